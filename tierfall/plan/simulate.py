"""Playing a run, whole copy by whole copy, on the policies themselves, so that each rule counts as it does in a run.

Pure: the clock is a number. A flush begins when its image is sealed, deletions take no time, nothing fails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tierfall.core.types.values import CheckpointId, CopyState, TierKind, WhenFull
from tierfall.core.types.view import CheckpointView, CopyView, TierRules, Verdict, View
from tierfall.policies.backpressure import plan_relief, plan_superseding
from tierfall.policies.eviction import plan_eviction
from tierfall.policies.flush import plan_flush, tiers_owed
from tierfall.policies.retention import plan_retention

WORK_OF_EVENT = 10
MARKS_MAX = 2000
DEFAULT_IMAGES = 2.2
"""How many images host memory takes where no capacity is given, as ``arena_folder`` chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is saved: one rank's image in bytes, seconds from save to save, training steps between them, and how many
    ranks on how many nodes."""

    image_bytes: int
    save_every_s: float
    steps_per_save: int = 1
    ranks: int = 1
    nodes: int = 1

    @property
    def ranks_per_node(self) -> int:
        return -(-self.ranks // self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedChain:
    """What it is saved to. ``rates`` are bytes per second that one node writes to a tier, as far as known; ``shared``
    names the tiers that all nodes see; ``host_bytes`` is one rank's memory (None: 2.2 images)."""

    rules: tuple[TierRules, ...]
    rates: Mapping[str, float] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    host_bytes: int | None = None
    max_wait_s: float = 60.0


@dataclass(slots=True)
class _SimulatedCheckpoint:
    """One checkpoint of the play."""

    id: CheckpointId
    ordinal: int
    saved_s: float
    copies: dict[str, CopyState]
    owed: set[str]


@dataclass(slots=True)
class _SimulatedLane:
    """What is on its way to a tier."""

    rules: TierRules
    copy_bytes: int
    copy_s: float
    active: _SimulatedCheckpoint | None = None
    refuses: bool = False
    done_s: float = math.inf


@dataclass(slots=True)
class _Counted:
    """What a tier has seen."""

    settled: int = 0
    kept_max: int = 0
    full_s: float | None = None
    waits: bool = False
    lag_s: float | None = None
    due_s: dict[CheckpointId, float] = field(default_factory=dict)
    late_s: float | None = None


@dataclass(frozen=True, slots=True)
class CounterSample:
    """The counters at a moment."""

    at_s: float
    saves: int
    skipped: int
    superseded: int
    waited_s: float
    kept: Mapping[str, int]
    behind_s: Mapping[str, float]


class Simulation:
    """Saves and copies in the order of their times."""

    def __init__(self, chain: SimulatedChain, load: Workload, *, work_max: int) -> None:
        self._chain, self._load, self._work_left = chain, load, work_max
        self._host = next(r for r in chain.rules if r.kind is TierKind.HOST)
        self.copy_bytes = {r.name: copy_bytes_of(r, chain, load) for r in chain.rules}
        self._host_bytes = chain.host_bytes or math.ceil(DEFAULT_IMAGES * load.image_bytes)
        self._lanes = [
            _SimulatedLane(r, self.copy_bytes[r.name], copy_s_of(r, chain, load) or 0.0)
            for r in chain.rules
            if r.kind is not TierKind.HOST
        ]
        self._skips = self._host.when_full is WhenFull.SKIP
        self._gives_up = self._host.when_full is WhenFull.SUPERSEDE or any(
            lane.rules.when_full in (WhenFull.SKIP, WhenFull.SUPERSEDE) for lane in self._lanes
        )
        self._held: list[_SimulatedCheckpoint] = []
        self.counted = {r.name: _Counted() for r in chain.rules}
        self.now_s = 0.0
        self.saves = self.skipped = self.superseded = self._ordinal = self._steps = 0
        self.waited_s = 0.0

    def until(self, horizon_s: float) -> tuple[CounterSample, CounterSample]:
        """Play; returns the counters at half of what was played, and at its end: at the horizon, or at a save. What is
        kept, and how far a tier is behind, goes up and down: of each half it is the most."""
        marks = [self.mark()]
        next_save_s = self._load.save_every_s
        while self._work_left > 0:
            self._work_left -= WORK_OF_EVENT + 6 * len(self._held)
            if min(next_save_s, self._next_done_s()) > horizon_s:
                self.now_s = horizon_s
                for lane in self._lanes:
                    self._note_late(lane.rules)
                marks.append(self.mark())
                break
            if next_save_s < self._next_done_s():
                self.now_s = next_save_s
                waited_s = self._save(horizon_s)
                next_save_s += waited_s + self._load.save_every_s
                marks.append(self.mark())
                if len(marks) > MARKS_MAX:
                    del marks[-2:0:-2]  # the last one stays
            else:
                self._finish_one()
        end = marks[-1]
        early = [m for m in marks if m.at_s <= end.at_s / 2]
        return _with_most(early), _with_most(marks[len(early) :] or early)

    def mark(self) -> CounterSample:
        kept = {name: self.kept(name) for name in self.counted}
        behind_s = {name: self._behind_s(name) for name in self.counted}
        return CounterSample(
            self.now_s, self.saves, self.skipped, self.superseded, self.waited_s, kept, behind_s
        )

    def kept(self, tier: str) -> int:
        """How many whole copies a tier holds."""
        whole = (CopyState.SEALED, CopyState.COMMITTED)
        here = sum(one.copies.get(tier) in whole for one in self._held)
        return here + self.counted[tier].settled

    # Saves -------------------------------------------------------------------------------------------

    def _save(self, horizon_s: float) -> float:
        """Save, or skip; returns how long training waited for room."""
        began_s = self.now_s
        self._steps += self._load.steps_per_save
        while not self._made_room():
            counted = self.counted[self._host.name]
            counted.full_s = began_s if counted.full_s is None else counted.full_s
            over_s = min(began_s + self._max_wait_s(), horizon_s)
            if self._skips or self._next_done_s() > over_s:
                self.now_s = began_s if self._skips else max(began_s, over_s)
                self.skipped += self.now_s < horizon_s
                self.waited_s += self.now_s - began_s
                return self.now_s - began_s
            self._finish_one()
        self._ordinal += 1
        self.saves += 1
        owed = tiers_owed(self._chain.rules, self._ordinal)
        self._held.append(
            _SimulatedCheckpoint(
                CheckpointId(self._steps, 1),
                self._ordinal,
                self.now_s,
                {self._host.name: CopyState.SEALED},
                set(owed),
            )
        )
        for tier in owed:
            self.counted[tier].due_s[self._held[-1].id] = self.now_s
        self._note_most(self._host.name)
        self._begin_all()
        self.waited_s += self.now_s - began_s
        return self.now_s - began_s

    def _max_wait_s(self) -> float:
        """How long a save waits: as long as any tier that memory is held for may be waited for."""
        behind = {tier for one in self._held if self._host.name in one.copies for tier in one.owed}
        bounds_s = (self._rules(tier).max_wait_s for tier in behind)
        return max(
            (self._chain.max_wait_s if bound is None else bound for bound in bounds_s),
            default=self._chain.max_wait_s,
        )

    def _made_room(self) -> bool:
        """Let images leave memory until one fits; False where none may go."""
        host, need = self._host.name, self._load.image_bytes
        while (free := self._host_bytes - self._used(host)) < need:
            plan = plan_eviction(self._view(), host, need_bytes=need, free_bytes=free)
            self._worked()
            if plan.drops:
                self._drop(host, plan.drops[0].checkpoint)
            elif not self._gives_up or not self._supersede(free):
                return False
        return True

    def _supersede(self, free: int) -> bool:
        host, need = self._host.name, self._load.image_bytes
        decisions = plan_superseding(
            self._view(), host, fits=lambda gone: free + len(gone) * need >= need
        )
        self._worked()
        for decision in decisions:
            if decision.verdict is Verdict.DROP:
                self.superseded += 1
                counted = self.counted[host]
                counted.full_s = self.now_s if counted.full_s is None else counted.full_s
                self._drop(host, decision.checkpoint)
                return True
        return False

    # Copies ------------------------------------------------------------------------------------------

    def _next_done_s(self) -> float:
        return min((lane.done_s for lane in self._lanes), default=math.inf)

    def _finish_one(self) -> None:
        lane = min(self._lanes, key=lambda lane: lane.done_s)
        assert lane.active is not None
        one, tier = lane.active, lane.rules.name
        self.now_s = max(self.now_s, lane.done_s)
        lane.active, lane.done_s = None, math.inf
        one.copies[tier] = CopyState.COMMITTED
        one.owed.discard(tier)
        counted = self.counted[tier]
        counted.lag_s = self.now_s - one.saved_s
        self._note_late(lane.rules)
        counted.due_s = {id: at_s for id, at_s in counted.due_s.items() if id > one.id}
        self._note_most(tier)
        for other in self._lanes:
            if other.rules.retain:
                self._retain(other.rules.name)
        self._settle()
        self._begin_all()

    def _retain(self, tier: str) -> None:
        decisions = plan_retention(self._view(), tier)
        self._worked(len(decisions))
        for decision in decisions:
            if decision.verdict is Verdict.DROP:
                self._drop(tier, decision.checkpoint)

    def _begin_all(self) -> None:
        for lane in self._lanes:
            if lane.active is None:
                self._begin(lane)

    def _begin(self, lane: _SimulatedLane) -> None:
        tier = lane.rules.name
        one = self._next_for(lane.rules)
        if one is None or not self._has_room(lane):
            return
        one.copies[tier] = CopyState.ARRIVING
        lane.active, lane.done_s = one, self.now_s + lane.copy_s

    def _next_for(self, rules: TierRules) -> _SimulatedCheckpoint | None:
        """Find what a tier takes next, and let go of what it is not to get any more."""
        waiting = {held.id: held for held in self._held if rules.name in held.owed}
        if rules.in_order:
            return next(iter(waiting.values()), None)
        for decision in plan_flush(self._view(), rules.name) if waiting else ():
            self._worked()
            if decision.verdict is Verdict.KEEP:
                return waiting[decision.checkpoint]
            waiting[decision.checkpoint].owed.discard(rules.name)
        return None

    def _has_room(self, lane: _SimulatedLane) -> bool:
        tier, capacity = lane.rules.name, lane.rules.capacity_bytes
        if capacity is None:
            return True
        used = self._used(tier)
        free = capacity - used
        if free >= lane.copy_bytes and not lane.rules.is_high(used + lane.copy_bytes):
            lane.refuses = False
            return True
        counted = self.counted[tier]
        counted.full_s = self.now_s if counted.full_s is None else counted.full_s
        plan = plan_eviction(self._view(), tier, need_bytes=lane.copy_bytes, free_bytes=free)
        self._worked()
        while plan.missing_bytes > 0 and self._relieve(tier, plan.missing_bytes):
            plan = plan_eviction(self._view(), tier, need_bytes=lane.copy_bytes, free_bytes=free)
        lane.refuses = plan.missing_bytes > 0
        if lane.refuses:
            counted.waits = True
            return False
        for decision in plan.drops:
            self._drop(tier, decision.checkpoint)
        return True

    def _relieve(self, tier: str, missing_bytes: int) -> bool:
        """Give up what slower tiers wait for of one copy on a tier that is full; False where none may go."""
        decisions = plan_relief(self._view(), tier, missing_bytes=missing_bytes)
        self._worked()
        for decision in decisions:
            next(one for one in self._held if one.id == decision.checkpoint).owed.discard(
                decision.tier
            )
        return bool(decisions)

    # What is there -----------------------------------------------------------------------------------

    def _used(self, tier: str) -> int:
        here = sum(tier in one.copies for one in self._held) + self.counted[tier].settled
        return here * self.copy_bytes[tier]

    def _drop(self, tier: str, id: CheckpointId) -> None:
        for one in self._held:
            if one.id == id:
                del one.copies[tier]
                if not one.copies:
                    self._held.remove(one)
                    for counted in self.counted.values():
                        counted.due_s.pop(id, None)
                return

    def _settle(self) -> None:
        """Leave out of the picture what lies for good on tiers that keep all they get: no policy asks about it, once a
        newer one is there."""
        newest: set[str] = set()
        for one in reversed(list(self._held)):
            tiers = set(one.copies)
            forever = all(keeps_all(self._rules(tier)) for tier in tiers)
            if forever and not one.owed and tiers <= newest:
                for tier in tiers:
                    self.counted[tier].settled += 1
                self._held.remove(one)
            whole = (t for t, state in one.copies.items() if state is CopyState.COMMITTED)
            newest.update(whole)

    def _rules(self, tier: str) -> TierRules:
        return next(rules for rules in self._chain.rules if rules.name == tier)

    def _note_most(self, tier: str) -> None:
        counted = self.counted[tier]
        counted.kept_max = max(counted.kept_max, self.kept(tier))

    def _behind_s(self, tier: str) -> float:
        """How long ago the oldest checkpoint was saved that is newer than all that a tier has."""
        return self.now_s - min(self.counted[tier].due_s.values(), default=self.now_s)

    def _note_late(self, rules: TierRules) -> None:
        counted, bound_s = self.counted[rules.name], rules.within_s
        if counted.late_s is None and bound_s is not None and self._behind_s(rules.name) > bound_s:
            counted.late_s = min(counted.due_s.values()) + bound_s

    def _worked(self, decisions: int = 1) -> None:
        self._work_left -= max(1, decisions) * len(self._held)

    def _view(self) -> View:
        return View(
            tiers=self._chain.rules,
            checkpoints=tuple(map(self._view_of, self._held)),
            failing=frozenset(lane.rules.name for lane in self._lanes if lane.refuses),
            wall_time_s=self.now_s,
        )

    def _view_of(self, one: _SimulatedCheckpoint) -> CheckpointView:
        copied = any(lane.active is one for lane in self._lanes)
        return CheckpointView(
            id=one.id,
            ordinal=one.ordinal,
            started_from=None,
            copies={
                tier: CopyView(
                    state=state,
                    bytes=self.copy_bytes[tier],
                    leased=copied and self._reads(one, tier),
                )
                for tier, state in one.copies.items()
            },
            owed=frozenset(one.owed),
            settling=copied,
            wall_time_s=one.saved_s,
        )

    def _reads(self, one: _SimulatedCheckpoint, tier: str) -> bool:
        """Say whether what is copied is read there: a copy goes on from another tier where one has it."""
        return not any(
            other != tier and state is CopyState.COMMITTED for other, state in one.copies.items()
        )


def _with_most(marks: Sequence[CounterSample]) -> CounterSample:
    tiers = marks[-1].kept
    most = {tier: max(m.kept[tier] for m in marks) for tier in tiers}
    behind_s = {tier: max(m.behind_s[tier] for m in marks) for tier in tiers}
    return replace(marks[-1], kept=most, behind_s=behind_s)


def keeps_all(rules: TierRules) -> bool:
    is_stored = rules.kind is not TierKind.HOST
    return is_stored and rules.capacity_bytes is None and not rules.retain


def copy_bytes_of(rules: TierRules, chain: SimulatedChain, load: Workload) -> int:
    """The bytes of a checkpoint that a tier's capacity counts."""
    if rules.kind is TierKind.HOST:
        return load.image_bytes
    return load.image_bytes * (load.ranks if rules.name in chain.shared else load.ranks_per_node)


def copy_s_of(rules: TierRules, chain: SimulatedChain, load: Workload) -> float | None:
    """How long a node's part of a checkpoint takes to a tier; None where nobody knows."""
    rate = chain.rates.get(rules.name)
    return None if not rate else load.image_bytes * load.ranks_per_node / rate
