"""The sections of the YAML file below its first level, but for the tiers themselves: every key and its default.

Keys in YAML are the aliases; attributes carry their unit.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from tierfall.config.fields import (
    Count,
    Flag,
    Level,
    Rate,
    Wait,
    any_word,
    choice,
    show,
    wrong,
)
from tierfall.config.registered import ORDER_SCHEMA, order_rule, read_order
from tierfall.config.signal_names import SignalNames
from tierfall.core.types.policy import PolicyKind, Rule
from tierfall.core.types.text import nearest
from tierfall.core.types.values import CaptureMode, Codec, Verify
from tierfall.policies.flush import IN_ORDER


class OnClose(StrEnum):
    """What a clean close does with the images in memory, once all is durable below."""

    RELEASE = "release"
    KEEP = "keep"


class Section(BaseModel):
    """A mapping of the file: frozen, and with no keys but its own."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, serialize_by_alias=True
    )


def _read_verify(value: object) -> object:
    """Read the word, or true or false, as YAML reads ``on`` and ``off``."""
    if isinstance(value, bool):
        return Verify.FULL if value else Verify.OFF
    if isinstance(value, str):  # a variable's value is text
        if value in set(Verify):
            return Verify(value)
        if value in ("true", "false"):
            return Verify.FULL if value == "true" else Verify.OFF
    expected = f"one of {', '.join(Verify)}"
    near = nearest(value, Verify) if isinstance(value, str) else ""
    raise wrong(f"{show(value)} does not fit; expected {expected}{near}", expected=expected)


class CaptureSection(Section):
    """How the state is copied."""

    mode: Annotated[
        CaptureMode,
        choice(CaptureMode),
        any_word(CaptureMode),
    ] = Field(
        default=CaptureMode.LAZY,
        description="lazy: save returns at once, and the state is copied until the optimizer's next "
        "step. blocking: save returns when the state is copied. auto: whichever costs this run less, "
        "found out by trying both.",
        examples=["blocking"],
    )
    verify: Annotated[
        Verify, BeforeValidator(_read_verify), WithJsonSchema({"enum": [*Verify, True, False]})
    ] = Field(
        default=Verify.SAMPLE,
        description="How much of a lazily captured image is compared with the state as it was at save, before the "
        "image is sealed. sample: short tensors whole, about a hundred places of longer ones, and in rotation as much "
        "as fits into 1 % of a step. full (or true): every byte in host memory. off (or false): version counters and "
        "addresses alone; then frozen parameters are copied before save returns. A snapshot that differs is given up, "
        "and the tensor named.",
        examples=["full"],
    )
    bandwidth_bytes_per_s: Rate | None = Field(
        default=None,
        alias="bandwidth",
        description="The most that a lazy capture may take of the bus to the device, or of memory, until the "
        "optimizer's step waits for it.",
        examples=["10GB/s"],
    )


class FlushSection(Section):
    """Which checkpoints a tier takes."""

    every: Count = Field(
        default=1,
        description="Take every so many of the saved checkpoints (not training steps), counted over restarts.",
        examples=[10],
    )
    order: Annotated[
        dict[str, Any] | None,
        BeforeValidator(lambda value: read_order(PolicyKind.FLUSH, value)),
        ORDER_SCHEMA,
    ] = Field(
        default=None,
        description="Which waiting checkpoint goes first. in_order (the default): the oldest. newest_first: the "
        "newest, and older ones after it. Or an order that was registered. In any order but the first, those that the "
        "tier's retention would drop at once are given up. A copy that was begun is finished first.",
        examples=["newest_first"],
    )
    within_s: Wait | None = Field(
        default=None,
        alias="within",
        description="How far behind the tier may be: how long ago the oldest checkpoint may have been saved that is "
        "newer than all that it has. Where it is further behind, that is said once, and counted. What it is owed is "
        "not superseded.",
        examples=["10m"],
    )

    yields: Flag = Field(
        default=True,
        alias="yield",
        description="Whether the tier is written slower while training's steps take longer beside that: down to what "
        "keeps up with the saves and with within, and to a tenth of its rate at least.",
        examples=[False],
    )

    def rule(self) -> Rule | None:
        """Give the order as policies of kind ``flush`` are asked with it; None for the default, also by its name."""
        return None if IN_ORDER in (self.order or ()) else order_rule(PolicyKind.FLUSH, self.order)


class DrainSection(Section):
    """What is done when the process is told that it will end soon."""

    on_signal: SignalNames = Field(
        default=("SIGTERM",),
        description="The signals that announce the end. On one of them, whatever the training thread is in the middle "
        "of, what can still become durable until the deadline does, the most valuable first; then the signal has the "
        "effect that it had before.",
        examples=[["SIGTERM", "SIGUSR1"]],
        json_schema_extra={"default": ["SIGTERM"]},
    )
    deadline_s: Wait = Field(
        default=25.0,
        alias="deadline",
        description="How long that may take: a little less than the notice that is given.",
        examples=["110s"],
        json_schema_extra={"default": "25s"},
    )


class CompressSection(Section):
    """How stored chunks are compressed."""

    codec: Annotated[Codec, choice(Codec), any_word(Codec)] = Field(
        default=Codec.NONE,
        description="none: stored as it is. zstd: in the zstd seekable format, which zstd -d reads. planes: the bytes "
        "sorted by their place in an item, then zstd; smaller, and only tierfall reads it.",
        examples=["zstd"],
    )
    level: Level | None = Field(
        default=None,
        description="How hard zstd tries, from 1 (the default, and mostly the best choice) to 19.",
        examples=[3],
    )

    @model_validator(mode="after")
    def _level_has_a_codec(self) -> Self:
        if self.level is not None and self.codec is Codec.NONE:
            raise wrong(
                "a level without a codec; expected {codec: zstd, level: 3}, or no level",
                expected="{codec: zstd, level: 3}",
            )
        return self
