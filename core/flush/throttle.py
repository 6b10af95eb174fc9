"""How far each tier's copies are behind the saves, and the share of its write rate at which each tier is written:
configured, and reduced while flushes slow training.

Belongs to the coordinator's thread, reads no clock and does no I/O; the training thread reports the duration of each
step. Each rank measures and throttles its own copies; nothing that ranks decide together depends on it.
"""

from __future__ import annotations

import logging
import queue
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tierfall.core.flush.component import Component
from tierfall.core.types.units import format_duration, format_share
from tierfall.core.types.values import CheckpointId, TierKind
from tierfall.core.types.view import TierRules
from tierfall.policies.flush import lateness
from tierfall.policies.forecast import forecast
from tierfall.policies.throttle import least_share, plan_yield

if TYPE_CHECKING:
    from tierfall.core.flush.coordinator import Coordinator

logger = logging.getLogger("tierfall")

FIRST_SAVES = 4
"""The intervals between the first saves of a run do not predict later ones."""
GAPS_REMEMBERED = 16
DUE_REMEMBERED = 4096


class Backlog(Component):
    """How far copies are behind; rank 0 logs it. ``behind`` is the forecast per tier, in checkpoints (None: not
    known); ``late`` counts per tier how often it fell further behind than ``flush.within``."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)
        ledger = coordinator.ledger
        self._logs = self._group.decides
        self._stored: Mapping[str, TierRules] = {
            rules.name: rules
            for rules in ledger.rules
            if rules.kind not in (TierKind.DEVICE, TierKind.HOST)
        }
        self.behind: dict[str, float | None] = dict.fromkeys(self._stored)
        self.late: dict[str, int] = {}
        self._saves = 0
        self._trained_since_s: float | None = None
        self._first_s: list[float] = []
        self._gaps_s: deque[float] = deque(maxlen=GAPS_REMEMBERED)
        self._bytes = 0
        self._warned: set[str] = set()
        self._due: dict[str, dict[CheckpointId, float]] = {tier: {} for tier in self._stored}
        self._is_late: set[str] = set()

    @property
    def save_every_s(self) -> float | None:
        """Seconds of training between two saves; None while unknown. The larger of
        mean (pauses let a tier catch up) and median (a few saves in quick succession are not the usual interval)."""
        if not self._gaps_s:
            return None
        return max(statistics.fmean(self._gaps_s), statistics.median(self._gaps_s))

    @property
    def estimated_every_s(self) -> float | None:
        """``save_every_s`` or, while that is unknown, an estimate from the first saves; None before the second save."""
        if self._gaps_s or not self._first_s:
            return self.save_every_s
        return statistics.fmean(self._first_s)

    @property
    def image_bytes(self) -> int:
        """Bytes of the last saved image."""
        return self._bytes

    def behind_s(self, tier: str, now_s: float) -> float:
        """Return the age in seconds of the oldest checkpoint that is newer than every copy on a tier."""
        self._forget_abandoned(tier)
        return self._behind_s(tier, now_s)

    def _behind_s(self, tier: str, now_s: float) -> float:
        return max(0.0, now_s - min(self._due[tier].values(), default=now_s))

    # Saves and commits -----------------------------------------------------------------------------

    def on_save_requested(self, image_bytes: int, now_s: float) -> None:
        """A save requests memory. Its wait for memory does not count as training time."""
        self._saves += 1
        self._bytes = image_bytes
        if self._trained_since_s is not None:
            gaps = self._gaps_s if self._saves > FIRST_SAVES else self._first_s
            gaps.append(max(0.0, now_s - self._trained_since_s))
        self._trained_since_s = now_s
        for tier in self._stored:
            self._update_outlook(tier)

    def on_save_admitted(self, now_s: float) -> None:
        """The save has memory, or is skipped: training continues."""
        self._trained_since_s = now_s

    def on_owed(self, id: CheckpointId, tiers: tuple[str, ...]) -> None:
        """These tiers are owed a copy of a checkpoint; one of an earlier start counts as saved now."""
        for tier in tiers:
            due = self._due.get(tier)
            if due is None:
                continue
            due[id] = self._ledger.now_s
            if len(due) > DUE_REMEMBERED:
                del due[list(due)[1]]  # the age of the oldest is reported: keep it

    def on_committed(self, tier: str, id: CheckpointId) -> None:
        """A checkpoint was committed: only newer ones are still due on the tier."""
        self._due[tier] = {other: at_s for other, at_s in self._due[tier].items() if other > id}

    def forget(self, id: CheckpointId) -> None:
        """A checkpoint was deleted or given up: no tier is owed it."""
        for due in self._due.values():
            due.pop(id, None)

    # Reports ---------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Log each tier that is too far behind, once until it has caught up."""
        for tier, rules in self._stored.items():
            if rules.within_s is None:
                continue
            behind_s = self._behind_s(tier, now_s)
            reason = lateness(rules, behind_s)
            if reason is not None and tier not in self._is_late:
                behind_s = self.behind_s(tier, now_s)
                reason = lateness(rules, behind_s)
            if reason is None and tier in self._is_late:
                self._is_late.discard(tier)
                behind = format_duration(behind_s)
                if self._logs:
                    logger.warning("%s has caught up: it is %s behind", tier, behind)
            elif reason is not None and tier not in self._is_late:
                self._is_late.add(tier)
                self.late[tier] = self.late.get(tier, 0) + 1
                if self._logs:
                    logger.warning("%s", reason)
            if tier not in self._is_late and self._due[tier]:
                self._wake_at(min(self._due[tier].values()) + rules.within_s + 0.001)

    def _forget_abandoned(self, tier: str) -> None:
        if not self._due[tier]:
            return
        abandoned = self._ledger.abandoned()
        for id in list(self._due[tier]):
            entry = self._ledger.entries.get(id)
            if id in abandoned or (entry is not None and entry.deleted):
                self.forget(id)

    def _update_outlook(self, tier: str) -> None:
        rules = self._stored[tier]
        outlook = forecast(
            rules,
            saves=self._saves,
            every_s=self.save_every_s or 0.0,
            bytes=self._bytes,
            bytes_per_s=self._ledger.rates.delivered_bytes_per_s(tier),
            stretches=self._ledger.rates.stretches(tier),
            waiting=sum(tier in entry.owed for entry in self._ledger.open()),
        )
        self.behind[tier] = outlook.behind
        if outlook.warning is not None and tier not in self._warned and self._logs:
            self._warned.add(tier)
            logger.warning("%s", outlook.warning)


IDLE_REMEMBERED = 32
IDLE_STEPS_MAX = 1000
"""Steps without a flush that are older than so many steps are not compared with: training changes."""
STILL_STEPS = 5.0
STILL_S = 1.0
"""Training counts as idle, and flushes run unthrottled, after so many median step times without a step, and at least
so many seconds."""
CHANGE = 0.01
"""Relative change of a rate limit below which it is not set again."""


Flushing = tuple[frozenset[str], int]
"""The tiers that are written to now, and the number of tasks that were begun so far."""


class Throttle(Component):
    """``shares`` are the present shares of the tiers that yield to training. Any thread may read
    ``flushing`` and call ``on_step``."""

    def __init__(
        self, coordinator: Coordinator, *, set_pace: Callable[[str, float | None], None]
    ) -> None:
        """``set_pace`` limits the write rate of a tier, in bytes per second (None: no limit)."""
        super().__init__(coordinator)
        ledger = coordinator.ledger
        self._rules = {r.name: r for r in ledger.rules if r.yields or r.bandwidth_share is not None}
        self._rates = ledger.rates
        self._set_pace = set_pace
        self.flushing: Flushing = (frozenset(), 0)
        self.shares: dict[str, float] = {name: 1.0 for name, r in self._rules.items() if r.yields}
        self._step_times: queue.SimpleQueue[tuple[float, frozenset[str] | None]] = (
            queue.SimpleQueue()
        )
        self._steps = 0
        self._last_step_s: float | None = None
        self._recent_s: deque[float] = deque(maxlen=IDLE_REMEMBERED)
        self._idle: deque[tuple[int, float]] = deque(maxlen=IDLE_REMEMBERED)
        self._busy: dict[str, deque[float]] = {
            name: deque(maxlen=IDLE_REMEMBERED) for name in self.shares
        }
        self._limits: dict[str, float | None] = {}
        self._begun_low: set[str] = set()
        """The peer tiers whose rate was lowered since training went on."""

    def on_step(self, seconds: float, began: Flushing) -> None:
        """Report the duration of a training step; ``began`` is what ``flushing`` was when it began. It counts for no
        tier whose flush began or ended in it."""
        tiers, count = self.flushing
        if began == (tiers, count):
            self._step_times.put((seconds, tiers))
        else:
            both = began[0] & tiers
            self._step_times.put((seconds, both or None))

    def adjust(self, now_s: float) -> None:
        """Evaluate the reported steps, and set the rate limit of each throttled tier."""
        self.flushing = self._rates.flushing()
        self._evaluate_steps(now_s)
        for name, rules in self._rules.items():
            if rules.yields:
                self._adjust_share(rules, now_s)
            self._apply(name, rules)
        if self._last_step_s is not None and any(share < 1.0 for share in self.shares.values()):
            self._wake_at(self._last_step_s + self._idle_after_s())  # training is idle then

    def _evaluate_steps(self, now_s: float) -> None:
        while True:
            try:
                seconds, tiers = self._step_times.get_nowait()
            except queue.Empty:
                return
            self._steps += 1
            self._last_step_s = now_s
            self._recent_s.append(seconds)
            if tiers is not None and not tiers:
                self._idle.append((self._steps, seconds))
            for tier in tiers or ():
                if tier in self._busy:
                    self._busy[tier].append(seconds)

    def _adjust_share(self, rules: TierRules, now_s: float) -> None:
        name, share = rules.name, self.shares[rules.name]
        busy = self._busy[name]
        if (reason := self._why_unthrottled(now_s)) is not None:
            self._begun_low.discard(name)
            if share < 1.0:
                self._change(name, 1.0, reason)
            return
        measured = self._rates.write_bytes_per_s(name)
        while self._idle and self._idle[0][0] < self._steps - IDLE_STEPS_MAX:
            self._idle.popleft()
        every_s = self._planner.backlog.estimated_every_s
        if measured is None or every_s is None:
            return
        least = least_share(
            image_bytes=self._planner.backlog.image_bytes,
            every_s=every_s * rules.flush_every,
            within_s=rules.within_s,
            bytes_per_s=measured,
        )
        if rules.kind is TierKind.PEER and name not in self._begun_low:
            # the network is that of the training: a copy takes as long as it may, until steps show that it need not
            self._begun_low.add(name)
            self._change(name, least, "a copy is to arrive before the next save")
            return
        if not busy:
            return
        decision = plan_yield(
            idle_s=[seconds for _, seconds in self._idle],
            busy_s=list(busy),
            share=share,
            least=least,
        )
        if decision.share != share:
            self._change(name, decision.share, decision.reason)

    def _why_unthrottled(self, now_s: float) -> str | None:
        if self._ledger.is_urgent:
            return "a save waits for room in memory, or there is a deadline"
        if self._last_step_s is None or now_s - self._last_step_s >= self._idle_after_s():
            return "training is idle"
        return None

    def _idle_after_s(self) -> float:
        usual_s = statistics.median(self._recent_s) if self._recent_s else 0.0
        return max(STILL_S, STILL_STEPS * usual_s)

    def _change(self, tier: str, share: float, reason: str) -> None:
        self.shares[tier] = share
        self._busy[tier].clear()  # those steps ran beside another share
        logger.info("flush to %s uses %s of its rate: %s", tier, format_share(share), reason)

    def _apply(self, tier: str, rules: TierRules) -> None:
        share = min(self.shares.get(tier, 1.0), rules.bandwidth_share or 1.0)
        measured = self._rates.write_bytes_per_s(tier)
        pace = None if share == 1.0 or measured is None else share * measured
        before = self._limits.get(tier)
        alike = pace is not None and before is not None and abs(pace / before - 1.0) < CHANGE
        if pace != before and not alike:
            self._limits[tier] = pace
            self._set_pace(tier, pace)
