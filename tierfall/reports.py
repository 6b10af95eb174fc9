"""What calls hand back to people and programs: reports, infos, statistics. Immutable, and nothing but data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierfall.core.restore.reader import Fallback
from tierfall.core.values import CopyState, LossClass

__all__ = [
    "CheckpointInfo",
    "Compression",
    "DrainReport",
    "Fallback",
    "RestoreReport",
    "ShardSource",
    "Statistics",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSource:
    """From which tier a shard's bytes came, and how many. ``rank`` is the one that read them there and handed them on;
    None: this rank read them itself, for itself or for others too."""

    shard: str
    tier: str
    bytes: int
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore read, or got from other ranks: ``bytes`` in all, ``seconds`` from call to return, ``sources`` the
    largest first.

    ``fallbacks`` lists every tier, copy, chunk and step that was passed over, and why.
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

    ``tiers`` maps each tier that holds something of it to the state of the copy; ``owed`` are the tiers that are still
    to get one. ``damage`` says per tier why its record cannot be used.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """What a drain made durable, what is left, and what was given up meanwhile, as (step, attempt, tier)."""

    done: tuple[tuple[int, int, str], ...]
    left: tuple[tuple[int, int, str], ...]
    seconds: float
    lost: tuple[tuple[int, int, str], ...] = ()


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
class Statistics:
    """Counters since open; ``saves`` are those whose capture began, ``superseded_saves`` those that were given up for a
    later one, an earlier start's too. Times are seconds, means over the last 1,000 saves, over which ``failed_saves``
    counts too.

    ``edge_bytes`` counts what was moved, by "source->target". ``newest`` names, per loss class, the newest step that
    survives such a loss now (None: nothing would). ``compression`` has an entry for each tier that packs. ``capture``
    says, in mode auto, what the last save that had the choice was captured by, and why. ``lost_events`` counts what the
    event log could not take.
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
    lost_events: int = 0
