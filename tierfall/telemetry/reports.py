"""What public calls return: reports, checkpoint infos and statistics. Immutable data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierfall.core.copies.chunk_reader import Fallback
from tierfall.core.types.loss_bound import LossBound
from tierfall.core.types.values import CopyState, LossClass
from tierfall.policies.cadence import TierCadence

__all__ = [
    "CadenceReport",
    "CheckpointInfo",
    "Compression",
    "DrainForecast",
    "DrainReport",
    "Fallback",
    "LossBound",
    "RestoreReport",
    "ShardSource",
    "Statistics",
    "TierCadence",
]


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

    ``seconds`` is what the call took, less than the deadline where nothing more can arrive before it. ``forecast`` is
    what was to be expected when it began, in the order in which copies go; empty without a deadline.
    """

    done: tuple[tuple[int, int, str], ...]
    left: tuple[tuple[int, int, str], ...]
    seconds: float
    lost: tuple[tuple[int, int, str], ...] = ()
    forecast: tuple[DrainForecast, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """What a tier packed since open: bytes before and after, and the seconds that it took, over its threads."""

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
    """At which interval ``maybe_save`` saves, and why.

    ``interval_steps`` is None where the interval is not in steps, or not known yet; ``bound`` is what decided: every,
    measuring, overhead, failures or durable (how soon the slowest tier has a save); ``reason`` says it in words.
    ``step_s`` is what a step takes while nothing is saved and ``cost_s`` what a save adds to the steps up to the next
    one, in seconds; ``overhead`` is that cost as a share of the interval. ``durable_s`` has, per tier, the seconds from
    a save until the tier has it; host memory holds ``images`` at a time. ``next_step`` is saved next, if nothing
    changes. ``tiers`` says, under ``mtbf``, how often each tier would best get a checkpoint. What was not measured yet
    is None.
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
    """Counters since open; ``saves`` are those whose capture began, ``superseded_saves`` those that were given up for a
    later one, an earlier start's too. Times are seconds, means over the last 1,000 saves, over which ``failed_saves``
    counts too.

    ``edge_bytes`` counts what was moved, by "source->target". ``newest`` names, per loss class, the newest step that
    survives such a loss now (None: nothing would). ``compression`` has an entry for each tier that packs. ``capture``
    says, in mode auto, what the last save that had the choice was captured by, and why. ``cadence`` says when
    ``maybe_save`` saves. ``ettr`` is the share of the time since open in which training made progress that is kept, by
    the calls of ``maybe_save``: not what saves added, nor restores, nor steps that were gone back over; failures that
    ended an earlier process do not count. None before the first of them. ``loss_bound`` says, per loss class, what such
    a failure would cost now.

    ``write_bytes_per_s`` and ``read_bytes_per_s`` are how fast this rank was seen to write and to read each tier of
    late, in bytes of images; what was not seen has no entry. ``behind`` is, by tier, by how many more checkpoints it
    would be behind after an hour of this cadence (0: it keeps up), ``behind_s`` how many seconds ago the oldest
    checkpoint was saved that is newer than all that it has, and ``late`` how often it came to be further behind than
    ``flush.within``. ``flush_shares`` says of each tier that yields to training which share of its rate it is written
    at now (1: it is not held back). ``lost_events`` counts what the event log could not take, ``set_aside_copies`` the
    copies that are for the next start to try, as each failed again and again while its tier took others.
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
    capture: str = ""
    cadence: CadenceReport | None = None
    ettr: float | None = None
    write_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    read_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    loss_bound: Mapping[LossClass, LossBound] = field(default_factory=dict)
    behind: Mapping[str, float] = field(default_factory=dict)
    behind_s: Mapping[str, float] = field(default_factory=dict)
    late: Mapping[str, int] = field(default_factory=dict)
    flush_shares: Mapping[str, float] = field(default_factory=dict)
    lost_events: int = 0
    set_aside_copies: int = 0
