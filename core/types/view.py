"""The input and output of policies: an immutable view of every checkpoint on every tier, and decisions with reasons.

The coordinator builds a view from its ledger, a command from the tiers' listings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from tierfall.core.types.policy import Rule
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, CopyState, LossClass, TierKind, WhenFull


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRules:
    """The configuration of one tier. ``within_s`` bounds the time, in seconds, from a save until an owed copy has
    arrived (None: no bound).

    A copy is retained if any rule of ``retain`` keeps it; without rules, while there is room. When the fraction
    ``evict_high`` of the capacity would be exceeded, copies are evicted down to ``evict_low`` (None: only for lack of
    room), in the order of ``evict`` (None: the cheapest to lose first). Owed copies are flushed in the order of
    ``flush_order`` (None: as they were saved).

    ``when_full`` applies where images that wait for this tier fill the tiers above (None: that of the host tier, whose
    default is to wait); ``max_wait_s`` bounds how long a save waits for it (None: the default bound).
    ``yields``: writes slow down when training's steps take longer. ``bandwidth_share`` is the fraction of the tier's
    measured rate to write at (None: all of it).
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
        """Whether copies arrive in the order of their saves. Then a newer copy on the tier shows that older ones were
        handled. Under any other flush order it does not, and what has not arrived is still owed."""
        return self.flush_order is None

    @property
    def is_memory(self) -> bool:
        return self.kind in (TierKind.DEVICE, TierKind.HOST, TierKind.PEER)

    def is_high(self, used_bytes: int) -> bool:
        """Whether ``used_bytes`` exceed the tier's high watermark."""
        if self.capacity_bytes is None or self.evict_high is None:
            return False
        return used_bytes > self.evict_high * self.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyView:
    """One copy: its state, its size on the tier, and whether it is being read or written (``leased``).
    ``arrived_bytes`` counts the image bytes of an arriving copy, if known. ``verified``: this run has written the copy,
    or compared all of it with its digests."""

    state: CopyState
    bytes: int
    leased: bool = False
    arrived_bytes: int = 0
    verified: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """One checkpoint and its copies. ``owed`` names the tiers that are to get a copy and have none yet. ``changing``:
    a commit of it is in progress. ``at_end``: every tier is to get it. ``metrics`` are
    those of its save, ``tags`` those of its save and since; ``wall_time_s`` is the time of the save (None: unknown).
    ``not_finite`` names what is NaN or infinite in it.
    ``overtaken`` names tiers that received newer checkpoints first, because writing this one failed, and are still owed
    it. ``damaged`` has the damaged copies, as if whole: ``copies`` lacks them, and none is written in their place."""

    id: CheckpointId
    ordinal: int
    started_from: CheckpointId | None
    abandoned: bool = False
    pinned: bool = False
    deleted: bool = False
    copies: Mapping[str, CopyView] = field(default_factory=dict)
    owed: frozenset[str] = frozenset()
    changing: bool = False
    at_end: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    not_finite: frozenset[str] = frozenset()
    tags: frozenset[str] = frozenset()
    wall_time_s: float | None = None
    overtaken: frozenset[str] = frozenset()
    damaged: Mapping[str, CopyView] = field(default_factory=dict)

    def state(self, tier: str) -> CopyState:
        copy = self.copies.get(tier)
        return copy.state if copy else CopyState.ABSENT

    def readable_on(self, tier: str) -> bool:
        """Whether the tier has a complete copy: sealed in memory, or committed."""
        return self.state(tier) in (CopyState.SEALED, CopyState.COMMITTED)

    @property
    def readable(self) -> bool:
        """Whether any tier has a complete copy."""
        return any(map(self.readable_on, self.copies))

    @property
    def live(self) -> bool:
        return not self.abandoned and not self.deleted

    def decided(self, tier: str, verdict: Verdict, reason: str) -> Decision:
        """The decision about its copy on a tier."""
        size = self.copies[tier].bytes
        return Decision(checkpoint=self.id, tier=tier, verdict=verdict, reason=reason, bytes=size)


@dataclass(frozen=True, kw_only=True)
class View:
    """Every tier, fastest first, and every checkpoint.

    ``failing`` names tiers that accept no copies at present. ``restored_from`` is the checkpoint that this start, with
    number ``attempt``, continued. ``restoring``: a restore is reading the tiers. ``wall_time_s`` is the current time in
    seconds since 1970. ``many_ranks``: other ranks build views of their own, whose metrics, tags and time may differ.
    ``read_bytes_per_s`` has the measured read rate of tiers, in bytes of images; a tier without an entry was not
    measured. ``assume_verified``: every committed copy counts as verified. ``partial`` has tiers with checkpoints that
    they have this node's part of, and not all of the other nodes'. ``on_few_nodes`` has, by tier and
    checkpoint, those that have a commit record on the tier, and too few copies there of some image. The value says
    whether the checkpoint may have been reported as committed; False if it was abandoned or deleted before this start.
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
    assume_verified: bool = False
    partial: frozenset[tuple[str, CheckpointId]] = frozenset()
    on_few_nodes: Mapping[tuple[str, CheckpointId], bool] = field(default_factory=dict)

    def tier(self, name: str) -> TierRules:
        return next(tier for tier in self.tiers if tier.name == name)

    def on(self, tier: str) -> tuple[CheckpointView, ...]:
        """Checkpoints with a complete copy on that tier, oldest first."""
        if tier not in self._by_tier:
            readable = (c for c in self.checkpoints if c.readable_on(tier))
            self._by_tier[tier] = tuple(sorted(readable, key=_by_id))
        return self._by_tier[tier]

    @cached_property
    def _by_tier(self) -> dict[str, tuple[CheckpointView, ...]]:
        return {}

    def restorable_on(self, tiers: tuple[str, ...]) -> tuple[CheckpointView, ...]:
        """Live checkpoints with a safe copy (``is_safe``) on one of these tiers, newest first."""
        if tiers not in self._safe:
            self._safe[tiers] = tuple(
                c for c in self.live if any(self.is_safe(c, tier) for tier in tiers)
            )
        return self._safe[tiers]

    def restorable_alike(self, tiers: tuple[str, ...]) -> Collection[Sequence[CheckpointView]]:
        """Those of ``restorable_on``, by what a restart passes over: what is NaN or infinite in them, and what their
        training continued from. The checkpoint that this start has continued is alone."""
        if tiers not in self._alike:
            alike: dict[object, list[CheckpointView]] = {}
            for c in self.restorable_on(tiers):
                key = (c.not_finite, c.started_from, c.id == self.restored_from)
                alike.setdefault(key, []).append(c)
            self._alike[tiers] = alike.values()
        return self._alike[tiers]

    @cached_property
    def _alike(self) -> dict[tuple[str, ...], Collection[Sequence[CheckpointView]]]:
        return {}

    def newest_abandoned_on(self, tiers: tuple[str, ...]) -> CheckpointId | None:
        """The abandoned checkpoint with a committed copy on one of these tiers that was saved last: highest attempt,
        then highest step."""
        if tiers not in self._abandoned:
            self._abandoned[tiers] = max(
                (
                    c.id
                    for c in self.checkpoints
                    if c.abandoned and not c.deleted
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

    @cached_property
    def restorable(self) -> tuple[CheckpointView, ...]:
        """The checkpoints that can be restored: live, with a complete copy on any tier, newest first."""
        return tuple(c for c in self.live if c.readable)

    def is_safe(self, checkpoint: CheckpointView, tier: str) -> bool:
        """Whether the copy is committed, verified and not ``on_few_nodes``, so that another copy may be deleted in
        reliance on it."""
        if checkpoint.state(tier) is not CopyState.COMMITTED or self.is_on_few_nodes(
            checkpoint, tier
        ):
            return False
        return self.assume_verified or checkpoint.copies[tier].verified

    def is_on_few_nodes(self, checkpoint: CheckpointView, tier: str) -> bool:
        """Whether the copy is ``on_few_nodes``."""
        return (tier, checkpoint.id) in self.on_few_nodes

    def used_bytes(self, tier: str) -> int:
        return sum(c.copies[tier].bytes for c in self.checkpoints if tier in c.copies)


def _by_id(checkpoint: CheckpointView) -> tuple[int, int]:
    return (checkpoint.id.step, checkpoint.id.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    """The input of a policy of one tier. ``checkpoints`` are those to decide about, oldest first; ``tier`` is the
    tier's configuration; ``view`` has all tiers and checkpoints."""

    checkpoints: tuple[CheckpointView, ...]
    tier: TierRules
    view: View


class Verdict(StrEnum):
    """Whether a copy is kept or deleted."""

    KEEP = "keep"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A policy's decision about one copy, its reason, and the bytes concerned."""

    checkpoint: CheckpointId
    tier: str
    verdict: Verdict
    reason: str
    bytes: int

    def __repr__(self) -> str:
        return f"<{self.verdict} {self.checkpoint} on {self.tier} ({format_size(self.bytes)}): {self.reason}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """Copies to delete for a request of room; ``missing_bytes`` remain unavailable after that."""

    deletions: tuple[Decision, ...]
    missing_bytes: int


class ArrivalOutlook(StrEnum):
    """Whether a copy will have arrived at the deadline; unknown where the tier's rate is."""

    ARRIVES = "arrives"
    TOO_LATE = "too_late"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainDecision:
    """What a drain does with one copy, and why. ``left_bytes`` have not arrived yet. ``proceeds``: the copy may begin
    or continue. ``displaced``: it has begun, and is aborted for one that can still arrive."""

    checkpoint: CheckpointId
    tier: str
    outlook: ArrivalOutlook
    left_bytes: int
    proceeds: bool
    reason: str
    displaced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBound:
    """What a failure of one loss class would cost now; None is what is not known.

    ``survives`` is the newest checkpoint that would remain, on ``tier``, the fastest that has it (None: all is lost).
    ``steps_lost`` are the steps from it to the last one passed to ``save`` or ``maybe_save``, ``seconds_lost`` their
    training time; ``restore_seconds`` is the time to read it at the measured rate.
    """

    survives: CheckpointId | None
    tier: str | None = None
    steps_lost: int | None = None
    seconds_lost: float | None = None
    restore_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalChance:
    """The ``probability`` that every image of a checkpoint has a holder left after ``losses`` nodes are lost at once,
    any with the same chance. It is ``exact``, or a lower bound."""

    losses: int
    probability: float
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLosses:
    """The chances that a checkpoint in peer memory survives the loss of 1, 2 and so on nodes: ``whole`` while every
    node has its own images in memory, too; ``copies`` once they have left it."""

    whole: tuple[SurvivalChance, ...]
    copies: tuple[SurvivalChance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSurvival:
    """Which losses of nodes, at once, the newest checkpoint in peer memory survives in memory; what other tiers hold is
    not counted.

    It is ``step``, saved by ``attempt``, on ``tier``. The loss of any ``certain`` nodes leaves a holder of every image
    (0: of no node). ``chances`` has the loss of 1, 2 and so on nodes, up to 3 more than an image has copies on other
    nodes.
    """

    tier: str
    step: int
    attempt: int
    certain: int
    chances: tuple[SurvivalChance, ...]
