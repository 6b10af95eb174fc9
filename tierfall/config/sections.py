"""Sections of the YAML file below its first level: every key and its default.

Keys in YAML are the aliases; the names of attributes end in their unit.
"""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
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
    Folder,
    Level,
    Listen,
    Rate,
    SignalNames,
    Size,
    Wait,
    any_word,
    choice,
    listen_address,
    no_address,
    show,
    value_error,
)
from tierfall.config.plugins import ORDER_SCHEMA, order_rule, read_order
from tierfall.core.types.policy import PolicyKind, Rule
from tierfall.core.types.text import hint_at
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CaptureMode, Codec, Verify
from tierfall.policies.flush import IN_ORDER


class OnClose(StrEnum):
    """What a clean close does with the images in memory, once all are durable below."""

    RELEASE = "release"
    KEEP = "keep"


class Section(BaseModel):
    """A mapping of the file: frozen, without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, serialize_by_alias=True
    )


def _read_verify(value: object) -> object:
    """Accept the words, and true and false, as YAML parses ``on`` and ``off`` to these."""
    if isinstance(value, bool):
        return Verify.FULL if value else Verify.OFF
    if isinstance(value, str):  # a variable's value is text
        if value in set(Verify):
            return Verify(value)
        if value in ("true", "false"):
            return Verify.FULL if value == "true" else Verify.OFF
    expected = f"one of {', '.join(Verify)}"
    near = hint_at(value, Verify) if isinstance(value, str) else ""
    raise value_error(f"{show(value)} does not fit; expected {expected}{near}", expected=expected)


class CaptureSection(Section):
    """How the state is copied."""

    mode: Annotated[
        CaptureMode,
        choice(CaptureMode, instead={"auto": "; leave mode out for lazy, the default"}),
        any_word(CaptureMode),
    ] = Field(
        default=CaptureMode.LAZY,
        description="lazy: save returns at once, and the state is copied until the optimizer's next "
        "step. blocking: save returns when the state is copied.",
        examples=["blocking"],
    )
    verify: Annotated[
        Verify, BeforeValidator(_read_verify), WithJsonSchema({"enum": [*Verify, True, False]})
    ] = Field(
        default=Verify.SAMPLE,
        description="How much of a lazily captured image is compared with the state as it was at save, before the "
        "image is sealed. sample: short tensors whole, about a hundred places of longer ones, and in rotation as much "
        "as fits into 1 % of a step. full (or true): every byte in host memory. off (or false): only version counters "
        "and addresses; then frozen parameters are copied before save returns. A snapshot that differs is given up, "
        "and the error names the tensor.",
        examples=["full"],
    )
    bandwidth_bytes_per_s: Rate | None = Field(
        default=None,
        alias="bandwidth",
        description="The most that a lazy capture may use of the bus to the device, or of memory, until the "
        "optimizer's step waits for it.",
        examples=["10GB/s"],
    )
    threads: Count | None = Field(
        default=None,
        description="How many threads hash an image from a GPU, and verify a restore. Default: as many as the process "
        "has cores, at most 8; ranks that run on the same cores divide them.",
        examples=[4],
    )


class FlushSection(Section):
    """Which checkpoints a tier receives."""

    every: Count = Field(
        default=1,
        description="N: the tier receives every Nth saved checkpoint (not step), counted across restarts.",
        examples=[10],
    )
    order: Annotated[
        dict[str, Any] | None,
        BeforeValidator(lambda value: read_order(PolicyKind.FLUSH, value)),
        ORDER_SCHEMA,
    ] = Field(
        default=None,
        description="Which waiting checkpoint is copied first. in_order (the default): the oldest. newest_first: the "
        "newest, and older ones after it. Or a registered order. In any order but in_order, those that the tier's "
        "retention would delete at once are given up. A copy that was begun is finished first.",
        examples=["newest_first"],
    )
    within_s: Wait | None = Field(
        default=None,
        alias="within",
        description="How far behind the tier may be: the greatest age of the oldest checkpoint that is newer than all "
        "that it has. If it is further behind, that is logged once, and counted. Checkpoints that it is owed are not "
        "superseded.",
        examples=["10m"],
    )

    yields: Flag = Field(
        default=True,
        alias="yield",
        description="Whether the tier is written slower if flushing slows training: down to the rate that keeps up "
        "with the saves and with within, and never below a tenth of its rate.",
        examples=[False],
    )

    def rule(self) -> Rule | None:
        """Return the order as a rule of kind ``flush``; None for the default, also where it is named."""
        return None if IN_ORDER in (self.order or ()) else order_rule(PolicyKind.FLUSH, self.order)


class DrainSection(Section):
    """What is done when a signal announces the end of the process."""

    on_signal: SignalNames = Field(
        default=("SIGTERM",),
        description="The signals that announce the end. On one of them, whatever the training thread is doing, all "
        "that can become durable before the deadline does, the most valuable first; then the signal has the effect "
        "that it had before.",
        examples=[["SIGTERM", "SIGUSR1"]],
        json_schema_extra={"default": ["SIGTERM"]},
    )
    deadline_s: Wait = Field(
        default=25.0,
        alias="deadline",
        description="How long that may take: a little less than the notice before the process is killed.",
        examples=["110s"],
        json_schema_extra={"default": "25s"},
    )


class CompressSection(Section):
    """How stored chunks are compressed."""

    codec: Annotated[Codec, choice(Codec), any_word(Codec)] = Field(
        default=Codec.NONE,
        description="none: uncompressed. zstd: the zstd seekable format, which zstd -d reads. planes: bytes grouped by "
        "their position in an item, then zstd; smaller, and only tierfall reads it.",
        examples=["zstd"],
    )
    level: Level | None = Field(
        default=None,
        description="The level of zstd, from 1 (the default, and usually the best choice) to 19.",
        examples=[3],
    )

    @model_validator(mode="after")
    def _level_has_a_codec(self) -> Self:
        if self.level is not None and self.codec is Codec.NONE:
            raise value_error(
                "a level without a codec; expected {codec: zstd, level: 3}, or no level",
                expected="{codec: zstd, level: 3}",
            )
        return self


MAX_BYTES_LEAST = 64 << 10
RANK, RUN = "{rank}", "{run}"
_EXPECTED_FILE = f"a file such as ./events.jsonl, with {RANK} and {RUN} to be filled in"
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


def _check_placeholders(path: Path) -> Path:
    for found in _PLACEHOLDER.findall(str(path)):
        if found not in (RANK, RUN):
            raise value_error(
                f'"{found}" is not a placeholder; expected {_EXPECTED_FILE}',
                expected=_EXPECTED_FILE,
            )
    return path


EventsFile = Annotated[Folder, AfterValidator(_check_placeholders)]


def _check_max_bytes(max_bytes: int) -> int:
    if max_bytes < MAX_BYTES_LEAST:
        expected = f"{format_size(MAX_BYTES_LEAST)} or more"
        raise value_error(f"{max_bytes} bytes are too few; expected {expected}", expected=expected)
    return max_bytes


class EventsSection(Section):
    """The event log: one line of JSON per event."""

    path: Annotated[EventsFile, no_address(_EXPECTED_FILE)] = Field(
        description="The file. {run} is replaced by the name of the run. Rank 0 writes it, for all; with {rank} in it "
        "every rank writes its own.",
        examples=["./events.jsonl"],
    )
    max_bytes: Annotated[Size, AfterValidator(_check_max_bytes)] = Field(
        default=64 << 20,
        alias="max",
        description="The most that it uses on the disk, 64KiB or more: at half of that the file is renamed to the "
        "same name with .1 appended, replacing the one before.",
        examples=["64MiB"],
        json_schema_extra={"default": "64MiB"},
    )

    def file_of(self, *, run: str, rank: int) -> Path | None:
        """Return the file that a rank writes; None if it writes none."""
        text = str(self.path)
        if rank != 0 and RANK not in text:
            return None
        return Path(text.replace(RUN, run).replace(RANK, str(rank)))


def expand_events(value: object) -> object:
    """Expand a path alone to the section."""
    return {"path": value} if isinstance(value, str | Path) else value


class MetricsSection(Section):
    """Where the run's metrics are served."""

    prometheus: Listen = Field(
        description="The port of an HTTP server with /metrics for Prometheus, and /healthz; or an address and a port, "
        "such as 127.0.0.1:9109. The first rank of each node serves its own.",
        examples=[9109],
    )

    @property
    def listens_on(self) -> tuple[str, int]:
        """The address, empty for all of this machine, and the port."""
        return listen_address(self.prometheus)
