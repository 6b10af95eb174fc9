"""What a policy sees: an immutable picture of every checkpoint on every tier, and what a policy answers.

The coordinator makes a view from its ledger, the command line from what it found on disk; a policy cannot tell which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from tierfall.core.types.policy import Rule
from tierfall.core.types.values import CheckpointId, CopyState, LossClass, TierKind, WhenFull


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRules:
    """What the configuration asks of one tier. ``within_s`` is how soon, in seconds, a checkpoint that the tier is owed
    must have arrived (None: there is no bound).

    What any rule of ``retain`` wants is kept; without one, all there is room for. Where more than the share
    ``evict_high`` of the capacity would be taken, copies go until it is ``evict_low`` (None: they go only where room is
    short), in the order of ``evict`` (None: the cheapest to lose first). What the tier is owed goes there in the order
    of ``flush_order`` (None: as it was saved).

    ``when_full`` says what becomes of what waits for the tier where that fills those above (None: what the host tier
    says, and there that it is waited for); ``max_wait_s`` for how long a save waits for it (None: as long as for any).
    ``yields``: it is written slower where training's steps take longer; ``bandwidth_share`` is the share of its
    measured rate that it is written at (None: all of it).
    """

    name: str
    kind: TierKind
    survives: LossClass
    capacity_bytes: int | None = None
    flush_every: int = 1
    retain: tuple[Rule, ...] = ()
    evict_high: float | None = None
    evict_low: float | None = None
    evict: Rule | None = None
    within_s: float | None = None
    flush_order: Rule | None = None
    when_full: WhenFull | None = None
    max_wait_s: float | None = None
    yields: bool = False
    bandwidth_share: float | None = None

    @property
    def in_order(self) -> bool:
        """Say whether copies come as they were saved: then a newer one there says that older ones were dealt with.
        Under any other order, one of a user's own among them, it does not: what has not come is still owed."""
        return self.flush_order is None

    def is_high(self, used_bytes: int) -> bool:
        """Say whether so many bytes on the tier are above its high watermark."""
        if self.capacity_bytes is None or self.evict_high is None:
            return False
        return used_bytes > self.evict_high * self.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyView:
    """One copy: its state, its size on the tier, and whether somebody is reading or writing it. ``arrived_bytes`` of
    the image are there of one that is arriving, as far as that is known. ``verified``: this run has written the copy,
    or has held all of it against its digests."""

    state: CopyState
    bytes: int
    leased: bool = False
    arrived_bytes: int = 0
    verified: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """One checkpoint, and where its copies are. ``owed`` names the tiers that are still to get one; ``settling`` says
    that a commit of it, or a person's order about it, is under way; ``at_end`` that every tier is to get it.
    ``metrics`` and ``tags`` are those that it was saved with, and tags since; ``wall_time_s`` is when that was, None
    where that is not known. ``overtaken`` names tiers that took newer ones before it, as it could not be written there,
    and are still to get it."""

    id: CheckpointId
    ordinal: int
    started_from: CheckpointId | None
    abandoned: bool = False
    pinned: bool = False
    tombstoned: bool = False
    copies: Mapping[str, CopyView] = field(default_factory=dict)
    owed: frozenset[str] = frozenset()
    settling: bool = False
    at_end: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()
    wall_time_s: float | None = None
    overtaken: frozenset[str] = frozenset()

    def state(self, tier: str) -> CopyState:
        copy = self.copies.get(tier)
        return copy.state if copy else CopyState.ABSENT

    def readable_on(self, tier: str) -> bool:
        """Say whether a copy there can be read whole: sealed in memory, or committed."""
        return self.state(tier) in (CopyState.SEALED, CopyState.COMMITTED)

    @property
    def live(self) -> bool:
        return not self.abandoned and not self.tombstoned


@dataclass(frozen=True, kw_only=True)
class View:
    """Every tier, fastest first, and every checkpoint.

    ``failing`` names tiers that do not take copies at present; ``restored_from`` is what this start continued from,
    as number ``attempt``; ``restoring`` says that a restore is reading the tiers. ``wall_time_s`` is now, in seconds
    since 1970; ``many_ranks``: other ranks make a view of their own, in which metrics, tags and time may differ.
    ``read_bytes_per_s`` is how fast tiers were seen to be read, in bytes of images: what has no entry is not known.
    ``trusting``: every committed copy counts as verified, as if each had been read and found good.
    """

    tiers: tuple[TierRules, ...]
    checkpoints: tuple[CheckpointView, ...]
    failing: frozenset[str] = frozenset()
    restored_from: CheckpointId | None = None
    attempt: int | None = None
    restoring: bool = False
    wall_time_s: float = 0.0
    many_ranks: bool = False
    read_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    trusting: bool = False

    def tier(self, name: str) -> TierRules:
        return next(tier for tier in self.tiers if tier.name == name)

    def on(self, tier: str) -> tuple[CheckpointView, ...]:
        """Checkpoints with a whole copy on that tier, oldest first."""
        if tier not in self._held:
            held = (c for c in self.checkpoints if c.readable_on(tier))
            self._held[tier] = tuple(sorted(held, key=_by_id))
        return self._held[tier]

    @cached_property
    def _held(self) -> dict[str, tuple[CheckpointView, ...]]:
        return {}

    def safe_on(self, tiers: tuple[str, ...]) -> tuple[CheckpointView, ...]:
        """Live checkpoints with a copy on one of these tiers that another copy may go because of, newest first."""
        if tiers not in self._safe:
            self._safe[tiers] = tuple(
                c for c in self.live if any(self.is_safe(c, tier) for tier in tiers)
            )
        return self._safe[tiers]

    def last_left_behind_on(self, tiers: tuple[str, ...]) -> CheckpointId | None:
        """Name the last checkpoint that came to be of all abandoned ones with a committed copy on one of these tiers:
        that of the last attempt, and of its last step."""
        if tiers not in self._abandoned:
            self._abandoned[tiers] = max(
                (
                    c.id
                    for c in self.checkpoints
                    if c.abandoned and not c.tombstoned
                    if any(c.state(tier) is CopyState.COMMITTED for tier in tiers)
                ),
                key=lambda id: (id.attempt, id.step),
                default=None,
            )
        return self._abandoned[tiers]

    @cached_property
    def _abandoned(self) -> dict[tuple[str, ...], CheckpointId | None]:
        return {}

    @cached_property
    def _safe(self) -> dict[tuple[str, ...], tuple[CheckpointView, ...]]:
        return {}

    @cached_property
    def live(self) -> tuple[CheckpointView, ...]:
        """Checkpoints that are neither abandoned nor deleted, newest first."""
        return tuple(sorted((c for c in self.checkpoints if c.live), key=_by_id, reverse=True))

    def is_safe(self, checkpoint: CheckpointView, tier: str) -> bool:
        """Say whether another copy may go because of this one: it is committed, and verified."""
        if checkpoint.state(tier) is not CopyState.COMMITTED:
            return False
        return self.trusting or checkpoint.copies[tier].verified

    def used_bytes(self, tier: str) -> int:
        return sum(c.copies[tier].bytes for c in self.checkpoints if tier in c.copies)


def _by_id(checkpoint: CheckpointView) -> tuple[int, int]:
    return (checkpoint.id.step, checkpoint.id.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    """What a policy of one tier is asked about: ``checkpoints`` are what the tier holds that may be kept or given up,
    oldest first, ``tier`` what is asked of it, ``view`` all tiers and checkpoints."""

    checkpoints: tuple[CheckpointView, ...]
    tier: TierRules
    view: View


class Verdict(StrEnum):
    """Whether a copy stays or goes."""

    KEEP = "keep"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a policy says of one copy, why, and how many bytes it concerns."""

    checkpoint: CheckpointId
    tier: str
    verdict: Verdict
    reason: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """Copies to drop so that ``need_bytes`` find room; ``missing_bytes`` is what is still lacking then."""

    drops: tuple[Decision, ...]
    missing_bytes: int
