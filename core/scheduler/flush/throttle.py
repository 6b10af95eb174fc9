"""The share of its measured write rate at which each tier is written: configured, and reduced while flushes slow
training.

Belongs to the coordinator's thread, reads no clock and does no I/O; the training thread reports the duration of each
step. Each rank throttles by itself: nothing that ranks decide together depends on it.
"""

from __future__ import annotations

import logging
import queue
import statistics
from collections import deque
from collections.abc import Callable

from tierfall.core.scheduler.flush.backlog import Backlog
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.types.units import format_share
from tierfall.core.types.values import TierKind
from tierfall.core.types.view import TierRules
from tierfall.policies.throttle import least_share, plan_yield

logger = logging.getLogger("tierfall")
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


class Throttle:
    """See the module. ``shares`` are the present shares of the tiers that yield to training. Any thread may read
    ``flushing`` and call ``on_step``."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        backlog: Backlog,
        hooks: Hooks,
        set_pace: Callable[[str, float | None], None],
    ) -> None:
        """``set_pace`` limits the write rate of a tier, in bytes per second (None: no limit)."""
        self._rules = {r.name: r for r in ledger.rules if r.yields or r.bandwidth_share is not None}
        self._rates = ledger.rates
        self._backlog = backlog
        self._hooks = hooks
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
        """Report the duration of a training step; ``began`` is what ``flushing`` was when it began. A step in which a
        flush began or ended counts for neither."""
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

    def next_s(self, now_s: float) -> float | None:
        """Return when training counts as idle if no further step is reported; None where no tier is throttled."""
        if self._last_step_s is None or all(share == 1.0 for share in self.shares.values()):
            return None
        when = self._last_step_s + self._idle_after_s()
        return when if when > now_s else None

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
        every_s = self._backlog.estimated_every_s
        if measured is None or every_s is None:
            return
        least = least_share(
            image_bytes=self._backlog.image_bytes,
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
        if self._hooks.is_urgent():
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
