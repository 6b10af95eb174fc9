"""What public calls return: reports, checkpoint infos and statistics. Immutable data, which ``print`` and a notebook
show as text for people."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import floor

from tierfall.core.copies.chunk_reader import Fallback
from tierfall.core.types.text import format_some
from tierfall.core.types.units import (
    format_count,
    format_duration,
    format_rate,
    format_share,
    format_size,
)
from tierfall.core.types.values import CopyState, LossClass
from tierfall.core.types.view import LossBound, PeerSurvival, SurvivalChance
from tierfall.policies.cadence import TierCadence


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSource:
    """The tier that a shard's bytes were read from, and their number. ``rank`` read them there and sent them to this
    rank; None: this rank read them itself."""

    shard: str
    tier: str
    bytes: int
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore read, or received from other ranks: ``bytes`` in total, ``seconds`` from call to return,
    ``sources`` the largest first.

    ``fallbacks`` lists every tier, copy, chunk and step that was skipped, with the reason.
    """

    step: int
    attempt: int
    sources: tuple[ShardSource, ...]
    bytes: int
    seconds: float
    fallbacks: tuple[Fallback, ...]

    def __repr__(self) -> str:
        """One line, and one more for each source that was skipped."""
        read = ", ".join(_source(source) for source in self.sources) or "nothing to read"
        took = format_duration(self.seconds)
        lines = [f"restored step {self.step} (attempt {self.attempt}) in {took}: {read}"]
        return "\n".join([*lines, *(f"  skipped {f.what}: {f.reason}" for f in self.fallbacks)])


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One checkpoint over all tiers. ``bytes`` is its raw size, ``age_s`` seconds since it was saved.

    ``tiers`` maps each tier that holds a copy to its state; ``owed`` are the tiers that are still owed one. ``damage``
    is by tier what is wrong with the copy; ``set_aside`` is by tier why a copy was set aside, as it failed repeatedly
    while the tier accepted others.
    """

    step: int
    attempt: int
    ordinal: int
    tiers: Mapping[str, CopyState]
    bytes: int
    age_s: float
    pinned: bool
    abandoned: bool
    tags: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    owed: tuple[str, ...] = ()
    damage: Mapping[str, str] = field(default_factory=dict)
    set_aside: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line."""
        copies = [
            tier if state in (CopyState.COMMITTED, CopyState.SEALED) else f"{tier} ({state})"
            for tier, state in self.tiers.items()
        ]
        parts = [
            f"{format_size(self.bytes)} on {', '.join(copies) or 'no tier'}",
            f"{format_duration(self.age_s)} old",
            f"owed to {', '.join(self.owed)}" if self.owed else "",
            f"not good on {', '.join(self.damage)}" if self.damage else "",
            f"set aside on {', '.join(self.set_aside)}" if self.set_aside else "",
            "pinned" if self.pinned else "",
            "abandoned" if self.abandoned else "",
            f"tags {', '.join(self.tags)}" if self.tags else "",
            ", ".join(f"{name} {value:g}" for name, value in self.metrics.items()),
        ]
        return f"<step {self.step} (attempt {self.attempt}): {'; '.join(filter(None, parts))}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainForecast:
    """The forecast of one copy when a drain with a deadline began. ``arrives``: before the deadline or not; None: not
    known, as the tier had no measured rate, or accepted no copies. ``left_bytes`` were still to be copied."""

    step: int
    attempt: int
    tier: str
    arrives: bool | None
    left_bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """What a drain made durable, what is left, and what was given up meanwhile, as (step, attempt, tier).

    ``seconds`` is the duration of the call; it returns before the deadline where nothing more can arrive. ``forecast``
    is that of its start, in the order of the copies; empty without a deadline.
    """

    done: tuple[tuple[int, int, str], ...]
    left: tuple[tuple[int, int, str], ...]
    seconds: float
    lost: tuple[tuple[int, int, str], ...] = ()
    forecast: tuple[DrainForecast, ...] = ()

    def __repr__(self) -> str:
        """One line for each outcome that some copies have."""
        outcomes = {"durable": self.done, "left": self.left, "given up": self.lost}
        lines = [
            f"  {name}: {format_some([f'{step}@{attempt} to {tier}' for step, attempt, tier in copies])}"
            for name, copies in outcomes.items()
            if copies
        ]
        return "\n".join(
            [f"drained in {format_duration(self.seconds)}", *(lines or ["  nothing was owed"])]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """The compression of a tier since open: bytes before and after, and the seconds of all its threads."""

    raw_bytes: int
    stored_bytes: int
    seconds: float

    @property
    def ratio(self) -> float:
        """Bytes before over bytes after; 1 where nothing was packed yet."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 1.0

    @property
    def bytes_per_s(self) -> float:
        """Raw bytes that one thread packs in a second; 0 where nothing was packed yet."""
        return self.raw_bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceReport:
    """The interval at which ``maybe_save`` saves, and why. None: not measured yet.

    ``interval_steps`` is None, too, where the interval is not in steps. ``bound`` is what decided: every, measuring,
    overhead, failures or durable (the time until the slowest tier has a save); ``reason`` is a sentence about it.
    ``step_s`` is the time of a step while nothing is saved, ``cost_s`` what a save adds to the steps up to the next
    one; ``overhead`` is that cost as a share of the interval. ``durable_s`` is, by tier, the time from a save until the
    tier has it; host memory holds ``images`` at a time. ``next_step`` is saved next, if nothing changes. ``tiers`` is,
    under ``mtbf``, the best interval of each tier.
    """

    interval_steps: int | None
    bound: str
    reason: str
    step_s: float | None
    cost_s: float | None
    overhead: float | None
    durable_s: Mapping[str, float]
    images: int
    next_step: int | None
    tiers: tuple[TierCadence, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Counters since open, and rates, of this rank. Times are seconds.

    * ``saves`` counts saves whose capture began; ``superseded_saves`` those that were given up for a later one, those
      of an earlier start included; ``failed_saves`` is of the last 1,000. ``blocked_s``, ``captured_s`` and
      ``durable_s`` are means over the last 1,000 saves.
    * ``bytes`` is the size of the images of these saves, ``lazy_bytes`` how many of them were captured lazily; the
      others were copied before ``save`` returned.
    * ``edge_bytes`` counts copied bytes, by "source->target". ``compression`` has an entry for each tier that packs.
    * ``newest`` is, per loss class, the newest step that survives such a loss now (None: none); ``loss_bound`` what
      such a failure would cost now.
    * ``peer_survival`` is which losses of nodes the newest checkpoint in peer memory survives. None without a peer
      tier, and after a start until it has committed a checkpoint there: nodes that kept older ones may be lost.
    * ``cadence`` is when ``maybe_save`` saves.
    * ``ettr`` is the share of the time since open in which training made progress that is kept, timed by the calls of
      ``maybe_save``. The cost of saves, restores and steps that were trained again do not count as progress. Earlier
      processes are not included. None before the first call.
    * ``write_bytes_per_s`` and ``read_bytes_per_s`` are the measured rates of each tier, in bytes of images.
    * ``behind`` is, by tier, how many more checkpoints it would be behind after an hour of this cadence (0: it keeps
      up, None: its rate or the cadence is not known); ``behind_s`` the age of the oldest checkpoint that is newer than
      all that it has; ``late`` how often it came to be further behind than ``flush.within``.
    * ``flush_shares`` is, by tier that yields to training, the share of its rate that it is written at (1:
      unthrottled).
    * ``lost_events`` counts events that the event log lost; ``set_aside_copies`` copies that are left to the next
      start, as each failed repeatedly while its tier accepted others.
    """

    saves: int
    lazy_saves: int
    skipped_saves: int
    superseded_saves: int
    failed_saves: int
    blocked_s: float
    captured_s: float
    durable_s: Mapping[str, float]
    commits: Mapping[str, int]
    edge_bytes: Mapping[str, int]
    flush_failures: int
    given_up_copies: int
    dropped_copies: int
    direct_io: Mapping[str, bool]
    host_capacity_bytes: int
    newest: Mapping[LossClass, int | None]
    compression: Mapping[str, Compression] = field(default_factory=dict)
    cadence: CadenceReport | None = None
    ettr: float | None = None
    write_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    read_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    loss_bound: Mapping[LossClass, LossBound] = field(default_factory=dict)
    behind: Mapping[str, float | None] = field(default_factory=dict)
    behind_s: Mapping[str, float] = field(default_factory=dict)
    late: Mapping[str, int] = field(default_factory=dict)
    flush_shares: Mapping[str, float] = field(default_factory=dict)
    peer_survival: PeerSurvival | None = None
    lost_events: int = 0
    set_aside_copies: int = 0
    bytes: int = 0
    lazy_bytes: int = 0

    def __repr__(self) -> str:
        return describe_statistics(self)


# As text ---------------------------------------------------------------------------------------------


_WIDTH = 12


def _source(source: ShardSource) -> str:
    by = "" if source.rank is None else f", read by rank {source.rank}"
    return f"{format_size(source.bytes)} from {source.tier}{by}"


def describe_statistics(found: Statistics) -> str:
    """One line a subject; what is not known, and what is zero where that is good, is left out."""
    lazy = f"{found.lazy_saves} lazy"
    if found.lazy_bytes:
        lazy += f": {format_share(found.lazy_bytes / found.bytes)} of all bytes"
    saves = [
        f"{found.saves} ({lazy})",
        *_counted(
            skipped=found.skipped_saves,
            superseded=found.superseded_saves,
            failed=found.failed_saves,
        ),
    ]
    times = (
        {"training blocked": found.blocked_s, "captured": found.captured_s} if found.saves else {}
    )
    times |= {f"on {tier}": seconds for tier, seconds in found.durable_s.items()}
    rows = {
        "saves": ", ".join(saves),
        "after save": _pairs({what: format_duration(s) for what, s in times.items()}),
        "commits": _pairs(found.commits),
        **{_FAILURES[lost]: _format_loss(bound) for lost, bound in found.loss_bound.items()},
        "peer memory": ""
        if found.peer_survival is None
        else describe_peer_survival(found.peer_survival),
        "write rate": _pairs({t: format_rate(rate) for t, rate in found.write_bytes_per_s.items()}),
        "read rate": _pairs({t: format_rate(rate) for t, rate in found.read_bytes_per_s.items()}),
        "falls behind": _pairs(
            {
                tier: f"{format_count(n)} checkpoints an hour"
                for tier, n in found.behind.items()
                if n
            }
        ),
        "packed": _pairs(
            {
                tier: f"{format_count(one.ratio)} times smaller"
                for tier, one in found.compression.items()
            }
        ),
        "cadence": "" if found.cadence is None else found.cadence.reason,
        "progress": "" if found.ettr is None else f"{format_share(found.ettr)} of the time (ETTR)",
        "trouble": ", ".join(
            _counted(
                failed_flushes=found.flush_failures,
                copies_given_up=found.given_up_copies,
                copies_set_aside=found.set_aside_copies,
                lost_events=found.lost_events,
            )
        ),
    }
    lines = (f"  {name:<{_WIDTH}}  {text}" for name, text in rows.items() if text)
    return "\n".join(["since open:", *lines])


def _format_loss(bound: LossBound) -> str:
    """Format a loss bound: the step that is left, its tier, the time to read it, and the steps that would be lost. Only
    a living trainer knows the present step, and so the steps lost."""
    if bound.survives is None:
        return "nothing is left"
    text = f"{bound.survives} is left, on {bound.tier}"
    if bound.restore_s is not None:
        text += f", read back in {format_duration(bound.restore_s)}"
    if bound.steps_lost is not None:
        ago = "" if bound.seconds_lost is None else f" ({format_duration(bound.seconds_lost)})"
        text += f", {bound.steps_lost} {'step' if bound.steps_lost == 1 else 'steps'}{ago} lost"
    return text


_FAILURES = {
    LossClass.PROCESS: "process dies",
    LossClass.NODE: "machine dies",
    LossClass.SITE: "site is lost",
}


def format_bounds(bounds: Mapping[LossClass, LossBound], unread: Collection[str] = ()) -> list[str]:
    """Format all loss bounds, one line each; ``unread`` names the tiers that could not be read."""
    lines = [f"if the {_FAILURES[lost]}: {_format_loss(bound)}" for lost, bound in bounds.items()]
    return [*lines, f"not read: {', '.join(unread)}"] if unread else lines


def format_unread(unread: Collection[str]) -> str:
    """Name the tiers that could not be read, to append to what was found on the others."""
    return f" (not read: {', '.join(unread)})" if unread else ""


def describe_peer_survival(found: PeerSurvival) -> str:
    """Format which losses of nodes a checkpoint in peer memory survives. A percentage is rounded down."""
    nodes = "node" if found.certain == 1 else "nodes"
    certain = (
        f"the loss of any {found.certain} {nodes}"
        if found.certain
        else "no loss of a node for certain"
    )
    others = [
        f"of {chance.losses} with {'' if chance.exact else 'at least '}{_share_below(chance)}"
        for chance in found.chances
        if chance.losses > found.certain and chance.probability
    ]
    where = f"{found.tier}: {found.step}@{found.attempt} survives {certain}"
    return "; ".join([where, ", ".join(others)]) if others else where


def _share_below(chance: SurvivalChance) -> str:
    return f"{min(999, floor(round(chance.probability * 1000, 6))) / 10:g}%"


def _counted(**counts: int) -> Iterable[str]:
    return [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count]


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
