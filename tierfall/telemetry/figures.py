"""The figures of a run. Each is declared once, as a member of ``Statistics`` with its meaning and unit.

``statistics()``, ``metrics_dict``, Prometheus, OpenTelemetry, ``/healthz``, the status file, ``watch`` and
``docs/metrics.md`` show these members under the same names. A counter names the events that it counts. What no event
tells is read by ``run.status_writer``.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, TypeVar

from tierfall.core.types import events
from tierfall.core.types.events import Event
from tierfall.core.types.units import format_duration, format_rate, format_share, format_size
from tierfall.core.types.values import LossClass, SaveOutcome
from tierfall.core.types.view import LossBound, PeerSurvival
from tierfall.telemetry.reports import CadenceReport, describe_peer_survival, format_bounds
from tierfall.tiers.image_writer import Compression

PREFIX = "tierfall"
Getter = TypeVar("Getter", bound=Callable[..., Any])
Amount = Callable[[Any], float | Mapping[str, float]]
Counts = type[Event] | Mapping[type[Event], Amount]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """The declaration of a figure; ``about`` is its meaning. With ``per`` (tier, loss or edge) it is a mapping: one
    value of each. Without a ``unit``, its name ends in it. ``column`` is its heading in ``watch``; ``grows``: it is an
    age, which grows by itself.

    ``counts`` has what each event adds to a counter (None: it is a gauge): numbers by label, or one number, which is
    that of the event's tier if it is per tier.
    """

    name: str = ""
    about: str
    per: str | None = None
    unit: str = ""
    column: str = ""
    grows: bool = False
    counts: Mapping[type[Event], Amount] | None = None

    def named(self, name: str) -> Figure:
        last = name.rpartition("_")[2]
        unit = self.unit or {"second": "bytes/s", "seconds": "s"}.get(last, last)
        return replace(self, name=name, unit=unit)


def _declared(about: str, counts: Counts | None, **more: Any) -> dict[str, Figure]:
    """Return the metadata of a field of ``Statistics``; one event alone is counted whenever it occurs."""
    if isinstance(counts, type):
        counts = {counts: lambda event: 1}
    return {"figure": Figure(about=about, counts=counts, **more)}


def _figure(about: str, counts: Counts | None = None, **more: Any) -> Any:
    default = None if counts is None else 0
    return field(default=default, metadata=_declared(about, counts, **more))


def _each(about: str, counts: Counts | None = None, per: str = "tier", **more: Any) -> Any:
    return field(default_factory=dict, metadata=_declared(about, counts, per=per, **more))


_DERIVED: dict[str, Figure] = {}


def _derived(about: str, **more: Any) -> Callable[[Getter], Getter]:
    """Declare a property of ``Statistics``: a gauge that its fields give."""

    def declare(read: Getter) -> Getter:
        _DERIVED[read.__name__] = Figure(about=about, **more).named(read.__name__)
        return read

    return declare


def _ended(outcome: SaveOutcome) -> Mapping[type[Event], Amount]:
    return {events.SaveEnded: lambda event: event.outcome is outcome}


def _is_lazy(event: events.SaveBegun) -> bool:
    return event.lazy_bytes > 0


_seconds, _bytes = attrgetter("seconds"), attrgetter("bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The figures of this rank; docs/metrics.md says what each is. One that exists per tier, loss or edge is a mapping.
    None, or missing in a mapping: not known.

    ``compression`` has an entry for each tier that packs; ``cadence`` is when ``maybe_save`` saves; ``loss_bound`` is
    what each loss would cost now. ``peer_survival`` is which losses of nodes the newest checkpoint in peer memory
    survives: None without a peer tier, and after a start until it has committed a checkpoint there.
    """

    # Counters: of saves and restores
    saves: int = _figure("saves whose capture began", events.SaveBegun)
    lazy_saves: int = _figure("saves that were captured lazily", {events.SaveBegun: _is_lazy})
    skipped_saves: int = _figure("saves that found no room", _ended(SaveOutcome.SKIPPED))
    superseded_saves: int = _figure(
        "saves, of this start and of earlier ones, that were given up for a later save",
        _ended(SaveOutcome.SUPERSEDED),
    )
    failed_saves: int = _figure("saves that failed on some rank", _ended(SaveOutcome.FAILED))
    blocked_seconds: float = _figure(
        "time for which captured saves blocked the training thread, up to the capture's end",
        {events.Captured: attrgetter("blocked_s")},
    )
    captured_seconds: float = _figure(
        "time from the call of `save` until the image was sealed", {events.Captured: _seconds}
    )
    captured_bytes: int = _figure("captured images", {events.Captured: _bytes})
    lazy_bytes: int = _figure(
        "bytes of images that were captured lazily; `save` copied the other bytes",
        {events.SaveBegun: attrgetter("lazy_bytes")},
    )
    evicted_copies: int = _figure("images that were deleted from host memory", events.Evicted)
    restores: int = _figure("restores that filled a state", events.StateRestored)
    restored_seconds: float = _figure("time that these took", {events.StateRestored: _seconds})
    errors: int = _figure(
        "failures of restores, and of what ends all commits", events.OperationFailed
    )
    lost_events: int = _figure("events that the event log lost", {})
    unread_events: int = _figure("events that subscribers lost, as they were slow", {})

    # Counters: of copies
    commits: Mapping[str, int] = _each(
        "checkpoints that were committed", events.Committed, unit="checkpoints"
    )
    commit_seconds: Mapping[str, float] = _each(
        "time from the call of `save` until the commit, without saves of earlier starts; "
        "divided by `commits` it is their mean, if there were none of those",
        {events.Committed: lambda event: event.seconds or 0.0},
    )
    flushed_bytes: Mapping[str, int] = _each(
        "bytes of images that were copied to the tier", {events.FlushDone: _bytes}
    )
    flush_failures: Mapping[str, int] = _each(
        "copies, or commit records, that failed or gave way to others; most are tried again",
        {events.FlushFailed: lambda event: 1, events.FlushStalled: lambda event: 1},
        unit="tries",
    )
    given_up_copies: Mapping[str, int] = _each(
        "copies that the tier will not get", events.FlushGivenUp
    )
    set_aside_copies: Mapping[str, int] = _each(
        "copies that are left to the next start", events.SetAside
    )
    deleted_copies: Mapping[str, int] = _each(
        "copies that were deleted, by retention, eviction or a person",
        {events.Dropped: lambda event: not event.unfinished},
    )
    restored_bytes: Mapping[str, int] = _each(
        "bytes that restores read from the tier", {events.StateRestored: attrgetter("sources")}
    )
    late: Mapping[str, int] = _each(
        "how often the tier came to be further behind than `flush.within`", {}, unit="times"
    )
    edge_bytes: Mapping[str, int] = _each(
        "bytes that were copied from one tier to another; an edge is written `host->nvme`",
        {},
        per="edge",
    )

    # Gauges: of training
    step: int | None = _figure("the last step of `save` or `maybe_save`", unit="steps")
    image_bytes: int | None = _figure("this rank's last image")
    last_blocked_seconds: float | None = _figure(
        "time for which the last captured save blocked the training thread"
    )
    step_seconds: float | None = _figure("a training step, saves included")
    interval_seconds: float | None = _figure(
        "training time between two saves, as measured; before the second save, as configured"
    )
    ettr: float | None = _figure(
        "effective training time ratio; in metrics, as of the last save by `maybe_save`",
        unit="share",
    )
    run_ettr: float | None = _figure("the same over all starts and the time between", unit="share")
    durable_age_seconds: float | None = _figure(
        "time since any stored tier got a checkpoint; before the first one, since `open`",
        grows=True,
    )
    durable_bound_seconds: float | None = _figure(
        "the greatest healthy `durable_age_seconds`: twice the time between two saves that some "
        "tier gets, and 10 s at least"
    )

    # Gauges: of tiers
    commit_age_seconds: Mapping[str, float] = _each(
        "time since the tier got a checkpoint; before the first one, since `open`", grows=True
    )
    behind: Mapping[str, float | None] = _each(
        "how many more checkpoints the tier would be behind after an hour of this cadence",
        unit="checkpoints",
    )
    behind_seconds: Mapping[str, float] = _each(
        "age of the oldest checkpoint that is newer than all on the tier; 0: it has the newest",
        grows=True,
    )
    behind_bound_seconds: Mapping[str, float | None] = _each(
        "the greatest healthy `behind_seconds`: `flush.within`, if it is set"
    )
    owed_copies: Mapping[str, int] = _each("copies that the tier is owed")
    degraded_copies: Mapping[str, int] = _each(
        "copies that are damaged, could not be read, or were set aside: the redundancy that the "
        "configuration asks for is not there"
    )
    failing: Mapping[str, str] = _each(
        "1 while the tier accepts no copies, or was not reached at `open`; `statistics()` has the "
        "reason, or an empty text",
        unit="0 or 1",
    )
    last_error: Mapping[str, str] = _each(
        "1 while a copy is tried again after an error; `statistics()` has the error, or an empty text",
        unit="0 or 1",
    )
    checkpoints: Mapping[str, int] = _each("complete checkpoints there", column="STEPS")
    used_bytes: Mapping[str, int] = _each("what this run takes there", column="USED")
    capacity_bytes: Mapping[str, int | None] = _each(
        "the most that it may take; missing without a bound", column="CAPACITY"
    )
    free_bytes: Mapping[str, int] = _each(
        "free space of the tier's file system, read every 30 s; not of object stores"
    )
    arriving_bytes_per_second: Mapping[str, float | None] = _each(
        "rate at which copies arrive now; missing while none does", column="RATE"
    )
    write_bytes_per_second: Mapping[str, float | None] = _each(
        "recent rate of writing, of this rank, without waits for a `bandwidth`"
    )
    read_bytes_per_second: Mapping[str, float] = _each("recent rate of reading, of this rank")
    flush_share: Mapping[str, float] = _each(
        "share of its rate that a tier that yields is written at; 1: unthrottled"
    )
    direct_io: Mapping[str, bool] = _each("1 if direct I/O is used there", unit="0 or 1")

    # More than numbers
    compression: Mapping[str, Compression] = field(default_factory=dict)
    cadence: CadenceReport | None = None
    loss_bound: Mapping[LossClass, LossBound] = field(default_factory=dict)
    peer_survival: PeerSurvival | None = None

    # Gauges that these members give

    @property
    @_derived(
        "the interval that the cadence has chosen; in metrics, as of the last save by `maybe_save`"
    )
    def interval_steps(self) -> int | None:
        return self.cadence.interval_steps if self.cadence else None

    @property
    @_derived(
        "what a save adds to the steps up to the next save; in metrics, as of the last `maybe_save`"
    )
    def save_cost_seconds(self) -> float | None:
        return self.cadence.cost_s if self.cadence else None

    @property
    @_derived("`used_bytes` of `capacity_bytes`", per="tier", unit="share", column="FULL")
    def fill(self) -> dict[str, float]:
        used = self.used_bytes.items()
        return {t: n / most for t, n in used if (most := self.capacity_bytes.get(t))}

    @property
    @_derived(
        "the newest step that survives the loss of the `process`, `node`, `site`; missing: nothing would",
        per="loss",
        unit="steps",
    )
    def newest(self) -> dict[LossClass, int | None]:
        bounds = self.loss_bound.items()
        return {lost: bound.survives.step if bound.survives else None for lost, bound in bounds}

    @property
    @_derived("steps that the loss would cost now", per="loss", unit="steps")
    def steps_lost(self) -> dict[LossClass, int | None]:
        return {lost: bound.steps_lost for lost, bound in self.loss_bound.items()}

    @property
    @_derived("training time that the loss would cost now", per="loss", unit="s")
    def seconds_lost(self) -> dict[LossClass, float | None]:
        return {lost: bound.seconds_lost for lost, bound in self.loss_bound.items()}

    @property
    @_derived("time to read back what survives, at the measured rate", per="loss")
    def restore_seconds(self) -> dict[LossClass, float | None]:
        return {lost: bound.restore_seconds for lost, bound in self.loss_bound.items()}

    def __repr__(self) -> str:
        """One line a figure; what is not known, and what is zero, is left out."""
        rows: dict[str, list[str]] = {}
        for figure, of, value in values_of(self):
            if value and figure.per != "loss":
                text = format_figure(figure, value)
                rows.setdefault(figure.name, []).append(text if of is None else f"{of} {text}")
        return "\n  ".join(
            [
                "since open:",
                *(f"{name:<25}  {', '.join(texts)}" for name, texts in rows.items()),
                *(
                    f"{t} is packed {x.ratio:.2f} times smaller"
                    for t, x in self.compression.items()
                ),
                *format_bounds(self.loss_bound),
                *([describe_peer_survival(self.peer_survival)] if self.peer_survival else []),
                *([f"interval: {self.cadence.reason}"] if self.cadence else []),
            ]
        )


FIGURES: Mapping[str, Figure] = {
    each.name: each.metadata["figure"].named(each.name)
    for each in fields(Statistics)
    if each.metadata
} | _DERIVED
"""Every figure by its name."""


# Rendering -------------------------------------------------------------------------------------------


def values_of(found: Statistics, age_s: float = 0.0) -> Iterator[tuple[Figure, str | None, float]]:
    """Give each value that is known, with its figure and label, ``age_s`` seconds after it was read: ages have grown. A
    tier that is not behind stays so. A reason counts as 1."""
    for figure in FIGURES.values():
        value = getattr(found, figure.name)
        for of, one in value.items() if figure.per else [(None, value)]:
            number = bool(one) if isinstance(one, str) else one
            if number is not None and math.isfinite(number):
                grows = figure.grows and number > 0
                yield figure, of, number + age_s if grows else number


def to_key(name: str, label: str | None = None) -> str:
    """Return the key of a figure in ``metrics_dict``."""
    return f"{PREFIX}/{name}" if label is None else f"{PREFIX}/{name}/{label}"


def to_metrics(found: Statistics, age_s: float = 0.0) -> dict[str, float]:
    """Return the numbers of ``values_of`` by key."""
    return {to_key(figure.name, of): +value for figure, of, value in values_of(found, age_s)}


def of_tier(found: Statistics, tier: str) -> dict[str, Any]:
    """Return the figures of one tier that are known, by name."""
    per_tier = [name for name, figure in FIGURES.items() if figure.per == "tier"]
    values = {name: getattr(found, name) for name in per_tier}
    return {name: value[tier] for name, value in values.items() if tier in value}


def of_run(found: Statistics) -> dict[str, Any]:
    """Return the figures that have one value, by name."""
    return {name: getattr(found, name) for name, each in FIGURES.items() if each.per is None}


_FORMATS: Mapping[str, Callable[[float], str]] = {
    "bytes": lambda value: format_size(int(value)),
    "bytes/s": format_rate,
    "s": format_duration,
    "share": format_share,
}


def format_figure(figure: Figure, value: float) -> str:
    """Format a value by its unit."""
    return _FORMATS.get(figure.unit, "{:.12g}".format)(value)


# Counting --------------------------------------------------------------------------------------------


class EventTally:
    """The counters of a run: the sums over its events since open. For any thread; never waits for one that does I/O.

    ``last_blocked_s`` is the time for which the last captured save blocked training, in seconds (None: there was none).
    """

    def __init__(self, written: Iterable[str]) -> None:
        """``written`` are the tiers that are flushed to: their counters begin at 0."""
        self._lock = threading.Lock()
        begun: dict[str | None, list[str | None]] = {None: [None], "tier": [*written]}
        self._counts: dict[str, Counter[str | None]] = {
            name: Counter(dict.fromkeys(begun.get(figure.per, []), 0))
            for name, figure in FIGURES.items()
            if figure.counts
        }
        self._committed_s: dict[str, float] = {}
        self.last_blocked_s: float | None = None

    def add(self, event: Event) -> None:
        """Count an event."""
        with self._lock:
            for name, counts in self._counts.items():
                figure = FIGURES[name]
                amount = (figure.counts or {}).get(type(event))
                if amount is not None:
                    added: Any = amount(event)
                    of = event.tier if isinstance(event, events.CopyEvent) and figure.per else None
                    counts.update(added if isinstance(added, Mapping) else {of: added})
            if isinstance(event, events.Committed):
                self._committed_s[event.tier] = event.at_s
            elif isinstance(event, events.Captured):
                self.last_blocked_s = event.blocked_s

    def read(self) -> dict[str, Any]:
        """Return the counters that count events, as fields of ``Statistics``."""
        with self._lock:
            return {
                name: dict(counts) if FIGURES[name].per else counts[None]
                for name, counts in self._counts.items()
            }

    def committed_s(self, tier: str) -> float | None:
        """Return when a tier got a checkpoint for the last time, by ``time.monotonic``; None: not since open."""
        with self._lock:
            return self._committed_s.get(tier)
