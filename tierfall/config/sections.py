"""The sections of the YAML file below its first level, but for the tiers themselves: every key and its default.

Keys that a later version acts on are here as well, so that the schema is whole; setting one to anything but its
default is refused with "not supported yet", never ignored. Keys in YAML are the aliases; attributes carry their unit.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tierfall.config.fields import (
    Count,
    Duration,
    Flag,
    Level,
    Rate,
    any_word,
    choice,
    not_yet,
    wrong,
)
from tierfall.core.values import CaptureMode, Codec


class OnClose(StrEnum):
    """What a clean close does with the images in memory, once all is durable below."""

    RELEASE = "release"
    KEEP = "keep"


class FlushOrder(StrEnum):
    """Which of several waiting checkpoints a tier takes first."""

    IN_ORDER = "in_order"
    NEWEST_FIRST = "newest_first"


class Direction(StrEnum):
    """Which end of a metric is the good one."""

    MIN = "min"
    MAX = "max"


class Section(BaseModel):
    """A mapping of the file: frozen, and with no keys but its own."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, serialize_by_alias=True
    )


class Capture(Section):
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
    verify: Flag = Field(
        default=False,
        description="Whether to hash each source again at the barrier, to find a loop that changes "
        "tensors outside of the optimizer's step.",
        examples=[True],
    )
    bandwidth_bytes_per_s: Rate | None = Field(
        default=None,
        alias="bandwidth",
        description="The most that a lazy capture may take of the bus to the device, or of memory, until the "
        "optimizer's step waits for it.",
        examples=["10GB/s"],
    )


class Flush(Section):
    """Which checkpoints a tier takes."""

    every: Count = Field(
        default=1,
        description="Take every so many of the saved checkpoints (not training steps), counted over restarts.",
        examples=[10],
    )
    order: Annotated[
        FlushOrder,
        choice(FlushOrder, later={"newest_first": "taking the newest first is"}),
        any_word(FlushOrder),
    ] = Field(
        default=FlushOrder.IN_ORDER,
        description="Which waiting checkpoint goes first. newest_first is not supported yet.",
        examples=["in_order"],
    )
    within_s: Annotated[Duration | None, not_yet("a deadline for a flush is")] = Field(
        default=None,
        alias="within",
        description="How soon a checkpoint must have arrived. Not supported yet.",
        examples=["10m"],
    )


class Best(Section):
    """The best checkpoints by a metric."""

    metric: str = Field(
        description="The name of the metric, as save is given it.", examples=["loss"]
    )
    mode: Annotated[Direction, choice(Direction), any_word(Direction)] = Field(
        default=Direction.MIN, description="Whether less is better, or more.", examples=["max"]
    )
    count: Count = Field(default=1, description="How many to keep.", examples=[2])


class Retain(Section):
    """Which checkpoints a tier keeps; pinned ones, and the newest, stay whatever this says."""

    last: Count | None = Field(
        default=None,
        description="Keep the newest so many; absent: all that there is room for.",
        examples=[3],
    )
    every: Annotated[Count | None, not_yet("keeping every so many steps is")] = Field(
        default=None,
        description="Keep those whose step is a multiple of this. Not supported yet.",
        examples=[1000],
    )
    best: Annotated[Best | None, not_yet("keeping the best is")] = Field(
        default=None,
        description="Keep the best by a metric. Not supported yet.",
        examples=[{"metric": "loss", "mode": "min", "count": 2}],
    )
    for_s: Annotated[Duration | None, not_yet("keeping for a time is")] = Field(
        default=None,
        alias="for",
        description="Keep for so long. Not supported yet.",
        examples=["30d"],
    )


class Compress(Section):
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
