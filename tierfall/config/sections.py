"""The sections of the YAML file below its first level, but for the tiers: every key and its default.

Keys in YAML are the aliases; the names of attributes end in their unit. A key of ``interval`` or ``retain`` that the
section does not have is the name of a registered policy (``tierfall.config.plugins``), whose own model validates its
value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from tierfall.config import plugins
from tierfall.config.fields import (
    Count,
    Every,
    Flag,
    Folder,
    Level,
    Listen,
    Overhead,
    Rate,
    Share,
    Signal,
    SignalNames,
    Size,
    Wait,
    any_word,
    choice,
    fields_of,
    listen_address,
    misfit,
    no_address,
    parsed,
    value_error,
)
from tierfall.config.plugins import (
    ORDER_SCHEMA,
    order_rule,
    read_order,
    with_registered,
)
from tierfall.core.types import keys
from tierfall.core.types.policy import PolicyKind, Rule
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CaptureMode, Codec, Direction, Verify
from tierfall.policies.flush import IN_ORDER
from tierfall.policies.retention import BestRule as BestRules
from tierfall.policies.retention import EveryRule, TagsRule


class OnClose(StrEnum):
    """What a clean close does with the images in memory, once all are durable below."""

    RELEASE = "release"
    KEEP = "keep"


class Section(BaseModel):
    """A mapping of the file: frozen, without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, serialize_by_alias=True
    )


class PolicySection(Section):
    """A section whose other keys are the names of registered policies, each with its settings."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"additionalProperties": {"type": "object"}}
    )
    _policies: ClassVar[PolicyKind]

    @model_validator(mode="before")
    @classmethod
    def _read_registered(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return with_registered(cls._policies, value, [*fields_of(cls)])

    def registered(self) -> list[Rule]:
        """Return the registered policies that are configured, as rules of their kind."""
        named = (self.model_extra or {}).items()
        return [plugins.rule(self._policies, name, rules) for name, rules in named]


def _switch(value: object) -> object:
    """Accept true and false too, as YAML parses ``on`` and ``off`` to these; a variable's value is text."""
    if value is True or value == "true":
        return Verify.FULL
    return Verify.OFF if value is False or value == "false" else value


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
        Verify,
        choice(Verify),
        BeforeValidator(_switch),
        WithJsonSchema({"enum": [*Verify, True, False]}),
    ] = Field(
        default=Verify.SAMPLE,
        description="How much of a lazily captured image is compared with the state as it was at save, before the "
        "image is sealed. sample: short tensors whole, about a hundred places of longer ones, and in rotation 2 MiB "
        "of these. full (or true): every byte in host memory. off (or false): only version counters and addresses; "
        "then frozen parameters are copied before save returns. A snapshot that differs is given up, and the error "
        "names the tensor.",
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


# When maybe_save saves -------------------------------------------------------------------------------


OVERHEAD = 0.035
"""The default share of training time that saving may cost: CheckFreq's (FAST'21)."""


class Mtbf(Section):
    """How often training fails, by loss class. Each includes the more severe classes."""

    process_s: Wait | None = Field(
        default=None,
        alias="process",
        description="The mean time between failures that end the training, whatever else is lost; a time instead of "
        "the mapping is this one.",
        examples=["4h"],
    )
    node_s: Wait | None = Field(
        default=None,
        alias="node",
        description="The mean time between failures that lose a node, with its memory and its disks; absent: the same "
        "as process.",
        examples=["12h"],
    )
    site_s: Wait | None = Field(
        default=None,
        alias="site",
        description="The mean time between failures that lose all but object stores; absent: the same as node.",
        examples=["90d"],
    )

    @model_validator(mode="after")
    def _increases(self) -> Self:
        times = [s for s in (self.process_s, self.node_s, self.site_s) if s is not None]
        if not times:
            raise value_error(
                "has no time; expected 4h, or {process: 4h, node: 12h}", expected="4h"
            )
        if times != sorted(times):
            expected = "process at most node, and node at most site"
            raise value_error(
                f"a more severe loss occurs more often than a less severe one; expected {expected}: the loss of a "
                "node is also the loss of its processes",
                expected=expected,
            )
        return self


def _as_mtbf(value: object) -> object:
    return {"process": value} if isinstance(value, int | float | str) else value


class IntervalSection(PolicySection):
    """When maybe_save saves: by one of every, overhead and mtbf, or a registered policy; on_signal and at_end are
    additional."""

    _policies = PolicyKind.INTERVAL

    every: Every | None = Field(
        default=None,
        description="The interval in training steps, or as a time such as 10m.",
        examples=[100],
    )
    overhead: Overhead | None = Field(
        default=None,
        description="The share of training time that saving may cost: the interval is computed from measured steps and "
        "saves. The default, 3.5%, if neither every nor mtbf is set.",
        examples=["3.5%"],
    )
    mtbf: Annotated[Mtbf | None, BeforeValidator(_as_mtbf, str | int | float | Mtbf | None)] = (
        Field(
            default=None,
            description="The mean time between failures, from which the interval is computed that loses the least time "
            "to saving and to failures (Young and Daly); a time, or one per loss class: {process: 4h, node: 12h, "
            "site: 90d}.",
            examples=["4h"],
        )
    )
    on_signal: Annotated[
        tuple[Signal, ...],
        BeforeValidator(lambda value: () if value is None else value, tuple[Signal, ...] | None),
    ] = Field(
        default=(),
        description="Signals after which the next maybe_save saves, whatever the interval.",
        examples=[["SIGTERM"]],
    )
    at_end: Flag = Field(
        default=True,
        description="Whether close saves the last step that maybe_save was called with, if it is not saved yet; every "
        "tier receives it. After an exception it is not saved.",
        examples=[False],
    )

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        named = [n for n in ("every", "overhead", "mtbf") if getattr(self, n) is not None]
        named += self.model_extra or {}
        if len(named) > 1:
            raise value_error(
                f"{' and '.join(named)} cannot stand together; keep one: every (a fixed interval), overhead (from what "
                "saving costs) or mtbf (from what saving and failures cost)",
                expected="one of every, overhead and mtbf",
            )
        return self

    @property
    def every_steps(self) -> int | None:
        """The interval in steps, if it is set in steps."""
        return self.every if isinstance(self.every, int) else None

    @property
    def every_s(self) -> float | None:
        """The interval in seconds, if it is set as a time."""
        return self.every if isinstance(self.every, float) else None

    def rule(self) -> Rule | None:
        """Return the registered policy that is configured, as a rule of kind ``interval``; None if there is none."""
        return next(iter(self.registered()), None)

    @property
    def budget(self) -> float | None:
        """The share of training time that saving may cost; None where every or mtbf decides. It also applies where a
        plug-in's policy has no answer."""
        if self.every is not None or self.mtbf is not None:
            return None
        return OVERHEAD if self.overhead is None else self.overhead


# What a tier keeps and deletes -----------------------------------------------------------------------


_EXPECTED_TAGS = "true for any tag, or a list of tags such as [release]"


def _tags(value: object) -> object:
    if value is True or value == "true":
        return True
    if isinstance(value, list | tuple) and value and all(isinstance(tag, str) for tag in value):
        return tuple(keys.check_name(tag, what="tag") for tag in value)
    raise misfit(value, _EXPECTED_TAGS)


TagsKept = Annotated[bool | tuple[str, ...], parsed(_tags, _EXPECTED_TAGS)]


class BestSection(Section):
    """The best checkpoints by a metric."""

    metric: str = Field(
        description="The name of the metric, as it is passed to save.", examples=["loss"]
    )
    mode: Annotated[Direction, choice(Direction), any_word(Direction)] = Field(
        default=Direction.MIN,
        description="Whether the least is the best, or the greatest.",
        examples=["max"],
    )
    count: Count = Field(default=1, description="How many to keep.", examples=[2])


class RetainSection(PolicySection):
    """Which checkpoints a tier keeps: those that any of these rules keeps. Pinned ones and the newest are kept in any
    case. Other keys are registered rules."""

    _policies = PolicyKind.RETAIN

    last: Count | None = Field(
        default=None,
        description="Keep the newest N.",
        examples=[3],
    )
    every: Every | None = Field(
        default=None,
        description="Keep the first at or after each multiple of N training steps; or, with a time such as 1d, the "
        "first of each such period in UTC.",
        examples=[1000, "1d"],
    )
    best: BestSection | None = Field(
        default=None,
        description="Keep the best by a metric.",
        examples=[{"metric": "loss", "mode": "min", "count": 2}],
    )
    for_s: Wait | None = Field(
        default=None,
        alias="for",
        description="Keep what was saved less than this time ago.",
        examples=["30d"],
    )
    tags: TagsKept | None = Field(
        default=None,
        description="Keep what has one of these tags; true: any tag.",
        examples=[["release"], True],
    )

    def rules(self) -> tuple[Rule, ...]:
        """Return the configured rules, each bound to its policy of kind ``retain``."""
        every = None if self.every is None else EveryRule(period_s=self.every)
        if isinstance(self.every, int):
            every = EveryRule(steps=self.every)
        configured: dict[str, Any] = {
            "last": self.last,
            "every": every,
            "best": None
            if self.best is None
            else BestRules(metric=self.best.metric, mode=self.best.mode, count=self.best.count),
            "for": self.for_s,
            "tags": None
            if self.tags is None
            else TagsRule(names=() if isinstance(self.tags, bool) else self.tags),
        }
        built_in = [
            plugins.rule(PolicyKind.RETAIN, name, rules)
            for name, rules in configured.items()
            if rules is not None
        ]
        return (*built_in, *self.registered())


class EvictSection(Section):
    """What a tier deletes if its capacity is short: first what no rule of retain keeps."""

    high: Share | None = Field(
        default=None,
        description="The share of the capacity above which copies are deleted; absent: only if there is no room.",
        examples=["90%"],
    )
    low: Share | None = Field(
        default=None,
        description="The share of the capacity down to which they are deleted then; absent: as high.",
        examples=["80%"],
    )
    order: Annotated[
        dict[str, Any] | None,
        BeforeValidator(lambda value: read_order(PolicyKind.EVICT, value)),
        ORDER_SCHEMA,
    ] = Field(
        default=None,
        description="What is deleted first. cheapest (the default): what another tier stores as safely and restores "
        "fastest; then the oldest. oldest: the oldest. Or a registered order.",
        examples=["oldest"],
    )

    @model_validator(mode="after")
    def _check_watermarks(self) -> Self:
        expected = "{high: 90%, low: 80%}"
        if self.low is not None and self.high is None:
            raise value_error(
                f"low has no effect without high; expected {expected}", expected=expected
            )
        if self.high == 0 or (self.low is not None and self.low > (self.high or 0)):
            raise value_error(
                f"high must be above 0%, and low no higher; expected {expected}", expected=expected
            )
        return self

    def rule(self) -> Rule | None:
        """Return the order as a rule of kind ``evict``; None for the default."""
        return order_rule(PolicyKind.EVICT, self.order)
