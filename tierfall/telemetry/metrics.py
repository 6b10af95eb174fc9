"""The metrics of a run: their catalogue, the counters, and their names as flat keys.

A key is ``tierfall/name``, or ``tierfall/name/value`` for a metric that has one value per tier, loss class, outcome or
edge. Values are finite numbers; a gauge that is not known is missing. ``docs/metrics.md`` lists all; a test compares.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from tierfall.core.types import events
from tierfall.core.types.events import Event
from tierfall.core.types.values import SaveOutcome

PREFIX = "tierfall"
CAPTURED = "captured"
OUTCOMES = (CAPTURED, SaveOutcome.SKIPPED, SaveOutcome.SUPERSEDED, SaveOutcome.FAILED)


class MetricKind(StrEnum):
    """A counter counts since open; a gauge is the present value; an age is a gauge that grows by itself."""

    COUNTER = "counter"
    GAUGE = "gauge"
    AGE = "age"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; ``label`` names what it has one value of each for, ``about`` describes it."""

    name: str
    kind: MetricKind
    label: str | None
    about: str


_ABOUT: Mapping[tuple[MetricKind, str | None], Mapping[str, str]] = {
    (MetricKind.COUNTER, "outcome"): {
        "saves": "Saves that were captured, skipped or superseded, or whose capture failed."
    },
    (MetricKind.COUNTER, None): {
        "blocked_seconds": "Time for which captured saves blocked the training thread.",
        "captured_seconds": "Time from the call of save until the image was complete.",
        "captured_bytes": "Bytes of captured images.",
        "evicted_copies": "Images that were deleted from host memory.",
        "restores": "Restores that filled a state.",
        "restored_seconds": "Time that these took.",
        "errors": "Failures of restores, and of what ends all commits.",
        "lost_events": "Events that the event log lost.",
        "unread_events": "Events that subscribers lost, as they were slow.",
    },
    (MetricKind.COUNTER, "tier"): {
        "commits": "Checkpoints that were committed on the tier.",
        "commit_seconds": "Time from the save until the commit, of checkpoints of this start.",
        "flushed_bytes": "Bytes of images that were copied to the tier.",
        "flush_failures": "Copies to the tier that ended in an error.",
        "given_up_copies": "Copies that the tier will not get.",
        "set_aside_copies": "Copies that were left to the next start.",
        "deleted_copies": "Copies that were deleted from the tier.",
        "restored_bytes": "Bytes that restores read from the tier.",
        "late": "How often the tier came to be further behind than flush.within.",
    },
    (MetricKind.COUNTER, "edge"): {
        "edge_bytes": "Bytes that were copied from one tier to another."
    },
    (MetricKind.GAUGE, None): {
        "step": "The last step that save or maybe_save was called for.",
        "image_bytes": "Bytes of this rank's last image.",
        "last_blocked_seconds": "Time for which the last save blocked the training thread.",
        "step_seconds": "Time of a training step.",
        "interval_seconds": "Training time between two saves.",
        "durable_bound_seconds": "The greatest durable_age_seconds that is healthy.",
        "interval_steps": "Steps between two saves, as the cadence has chosen.",
        "save_cost_seconds": "Time that a save adds to the steps up to the next one.",
        "ettr": "Share of the time since open that made progress which is kept.",
    },
    (MetricKind.AGE, None): {
        "durable_age_seconds": "Time since any stored tier got a checkpoint, or since open."
    },
    (MetricKind.AGE, "tier"): {
        "commit_age_seconds": "Time since the tier got a checkpoint, or since open.",
        "behind_seconds": "Age of the oldest checkpoint that is newer than all on the tier.",
    },
    (MetricKind.GAUGE, "tier"): {
        "behind": "Checkpoints that the tier would be behind after an hour of this cadence.",
        "behind_bound_seconds": "The greatest behind_seconds that is healthy: flush.within.",
        "owed_copies": "Copies that the tier is owed.",
        "degraded_copies": "Copies on the tier that are damaged, could not be read, or were set aside.",
        "tier_failing": "1 while the tier accepts no copies.",
        "tier_used_bytes": "Bytes of this run on the tier.",
        "tier_capacity_bytes": "The most that it may take there.",
        "tier_free_bytes": "Free bytes of the tier's file system.",
        "checkpoints": "Checkpoints on the tier.",
        "write_bytes_per_second": "Measured rate of writing to the tier, of this rank.",
        "read_bytes_per_second": "Measured rate of reading from the tier, of this rank.",
        "flush_share": "Share of its rate that the tier is written at.",
    },
    (MetricKind.GAUGE, "loss"): {
        "surviving_step": "The newest step that survives the loss.",
        "loss_bound_steps": "Steps that the loss would cost now.",
        "loss_bound_seconds": "Training time that the loss would cost now.",
        "restore_seconds": "Time to read back what survives the loss.",
    },
}
"""By kind and label: the name of each metric, and what it is."""
METRICS: Mapping[str, Metric] = {
    name: Metric(name, kind, label, about)
    for (kind, label), abouts in _ABOUT.items()
    for name, about in abouts.items()
}
"""Every metric by its name."""


def to_key(name: str, value: str | None = None) -> str:
    """Return the key of a metric; ``value`` is that of its label."""
    return f"{PREFIX}/{name}" if value is None else f"{PREFIX}/{name}/{value}"


def split_key(key: str) -> tuple[Metric, str | None] | None:
    """Return the metric of a key, and the value of its label; None for a key of another version."""
    _, _, rest = key.partition("/")
    name, _, value = rest.partition("/")
    metric = METRICS.get(name)
    if metric is None or bool(value) != (metric.label is not None):
        return None
    return metric, value or None


def flatten(
    values: Mapping[str, float | None], by_label: Mapping[str, Mapping[str, float | None]] = {}
) -> dict[str, float]:
    """Return the finite values by key; ``by_label`` are those of metrics with a label."""
    flat = {to_key(name): value for name, value in values.items()}
    flat |= {
        to_key(name, of): value for name, each in by_label.items() for of, value in each.items()
    }
    return {key: value for key, value in flat.items() if value is not None and math.isfinite(value)}


def grown(values: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return metrics as they are some seconds later: ages have grown. A tier that is not behind stays so."""
    found = dict(values)
    for key, value in values.items():
        known = split_key(key)
        if known is not None and known[0].kind is MetricKind.AGE and value > 0:
            found[key] = value + seconds
    return found


# Counting --------------------------------------------------------------------------------------------


Amounts = Iterator[tuple[str, float]]


def _captured(event: events.Captured) -> Amounts:
    yield to_key("saves", CAPTURED), 1
    yield to_key("blocked_seconds"), event.blocked_s
    yield to_key("captured_seconds"), event.seconds
    yield to_key("captured_bytes"), event.bytes


def _committed(event: events.Committed) -> Amounts:
    yield to_key("commits", event.tier), 1
    yield to_key("commit_seconds", event.tier), event.seconds or 0.0


def _flushed(event: events.FlushDone) -> Amounts:
    yield to_key("flushed_bytes", event.tier), event.bytes
    for source, count in event.sources.items():
        yield to_key("edge_bytes", f"{source}->{event.tier}"), count


def _restored(event: events.StateRestored) -> Amounts:
    yield to_key("restores"), 1
    yield to_key("restored_seconds"), event.seconds
    for tier, count in event.sources.items():
        yield to_key("restored_bytes", tier), count


def _once(name: str) -> Callable[[events.CopyEvent], Amounts]:
    return lambda event: iter([(to_key(name, event.tier), 1)])


_AMOUNTS: Mapping[type[Event], Callable[..., Amounts]] = {
    events.Captured: _captured,
    events.SaveEnded: lambda event: iter([(to_key("saves", event.outcome), 1)]),
    events.Committed: _committed,
    events.FlushDone: _flushed,
    events.FlushFailed: _once("flush_failures"),
    events.FlushGivenUp: _once("given_up_copies"),
    events.SetAside: _once("set_aside_copies"),
    events.Dropped: _once("deleted_copies"),
    events.Evicted: lambda event: iter([(to_key("evicted_copies"), 1)]),
    events.StateRestored: _restored,
    events.OperationFailed: lambda event: iter([(to_key("errors"), 1)]),
}
"""What each kind of event adds to the counters."""


class EventTally:
    """The counters of a run: the sums over its events since open. For any thread; never waits for one that does I/O.

    ``last_blocked_s`` is the time for which the last captured save blocked training, in seconds (None: there was none).
    """

    def __init__(self, written: Iterable[str]) -> None:
        """``written`` are the tiers that are flushed to: their counters begin at 0."""
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {to_key("saves", outcome): 0 for outcome in OUTCOMES}
        for metric in METRICS.values():
            if metric.kind is MetricKind.COUNTER and metric.label is None:
                self._counts[to_key(metric.name)] = 0
            elif metric.kind is MetricKind.COUNTER and metric.label == "tier":
                self._counts |= {to_key(metric.name, tier): 0 for tier in written}
        self._committed_s: dict[str, float] = {}
        self.last_blocked_s: float | None = None

    def add(self, event: Event) -> None:
        """Count an event."""
        amounts = _AMOUNTS.get(type(event))
        if amounts is None:
            return
        with self._lock:
            for key, amount in amounts(event):
                self._counts[key] = self._counts.get(key, 0) + amount
            if isinstance(event, events.Committed):
                self._committed_s[event.tier] = event.at_s
            elif isinstance(event, events.Captured):
                self.last_blocked_s = event.blocked_s

    def read(self) -> dict[str, float]:
        """Return all counters, by key."""
        with self._lock:
            return dict(self._counts)

    def committed_s(self, tier: str) -> float | None:
        """Return when a tier got a checkpoint for the last time, by ``time.monotonic``; None: not since open."""
        with self._lock:
            return self._committed_s.get(tier)
