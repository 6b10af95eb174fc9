"""Pacing: at which share of its rate each tier is written, by configuration and by what a flush does to training.

It belongs to the coordinator's thread, reads no clock and does no I/O; how long steps took it is told by the thread
that trains. A pace is a matter of each rank by itself: nothing that ranks decide together hangs on it.
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
from tierfall.core.scheduler.ledger.policies import Policies
from tierfall.core.types.units import format_share
from tierfall.core.types.view import TierRules

logger = logging.getLogger("tierfall")
IDLE_REMEMBERED = 32
IDLE_STEPS_MAX = 1000
"""A step without a flush that was so many steps ago is none to compare with: training changes."""
STILL_STEPS = 5.0
STILL_S = 1.0
"""When no step has come for so many usual ones, and so long, training stands still, and a flush yields to nobody."""
CHANGE = 0.01


Flushing = tuple[frozenset[str], int]
"""Which tiers are just being written, and how many copies and runs were begun so far."""


class Throttle:
    """See the module. ``shares`` says how much of its rate each tier that yields may take now; ``flushing`` may be read
    by any thread, and ``step_took`` be called by any."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        backlog: Backlog,
        policies: Policies,
        hooks: Hooks,
        set_pace: Callable[[str, float | None], None],
    ) -> None:
        """``set_pace`` takes a tier, and the bytes per second that it may be written at (None: any)."""
        self._rules = {r.name: r for r in ledger.rules if r.yields or r.bandwidth_share is not None}
        self._rates = ledger.rates
        self._backlog = backlog
        self._policies = policies
        self._hooks = hooks
        self._set_pace = set_pace
        self.flushing: Flushing = (frozenset(), 0)
        self.shares: dict[str, float] = {name: 1.0 for name, r in self._rules.items() if r.yields}
        self._told: queue.SimpleQueue[tuple[float, frozenset[str] | None]] = queue.SimpleQueue()
        self._steps = 0
        self._last_step_s: float | None = None
        self._lately_s: deque[float] = deque(maxlen=IDLE_REMEMBERED)
        self._idle: deque[tuple[int, float]] = deque(maxlen=IDLE_REMEMBERED)
        self._busy: dict[str, deque[float]] = {
            name: deque(maxlen=IDLE_REMEMBERED) for name in self.shares
        }
        self._paces: dict[str, float | None] = {}

    def step_took(self, seconds: float, began: Flushing) -> None:
        """A training step took so long; ``began`` is what ``flushing`` was when it began. Where a flush began or ended
        in it, it tells nothing of either."""
        tiers, count = self.flushing
        if began == (tiers, count):
            self._told.put((seconds, tiers))
        else:
            both = began[0] & tiers
            self._told.put((seconds, both or None))

    def adjust(self, now_s: float) -> None:
        """Take what was told, and set the pace of each tier that has one."""
        self.flushing = self._rates.flushing()
        self._take_steps(now_s)
        for name, rules in self._rules.items():
            if rules.yields:
                self._adjust_share(rules, now_s)
            self._keep(name, rules)

    def next_s(self, now_s: float) -> float | None:
        """Say when a tier that yields is to be let go because no step has come."""
        if self._last_step_s is None or all(share == 1.0 for share in self.shares.values()):
            return None
        when = self._last_step_s + self._still_s()
        return when if when > now_s else None

    def _take_steps(self, now_s: float) -> None:
        while True:
            try:
                seconds, tiers = self._told.get_nowait()
            except queue.Empty:
                return
            self._steps += 1
            self._last_step_s = now_s
            self._lately_s.append(seconds)
            if tiers is not None and not tiers:
                self._idle.append((self._steps, seconds))
            for tier in tiers or ():
                if tier in self._busy:
                    self._busy[tier].append(seconds)

    def _adjust_share(self, rules: TierRules, now_s: float) -> None:
        name, share = rules.name, self.shares[rules.name]
        busy = self._busy[name]
        if (still := self._why_in_full(now_s)) is not None:
            if share < 1.0:
                self._change(name, 1.0, still)
            return
        measured = self._rates.write_bytes_per_s(name)
        while self._idle and self._idle[0][0] < self._steps - IDLE_STEPS_MAX:
            self._idle.popleft()
        every_s = self._backlog.likely_every_s
        if measured is None or every_s is None or not busy:
            return
        told = self._policies.plan_yield(
            idle_s=[seconds for _, seconds in self._idle],
            busy_s=list(busy),
            share=share,
            least=self._policies.least_share(
                image_bytes=self._backlog.image_bytes,
                every_s=every_s * rules.flush_every,
                within_s=rules.within_s,
                bytes_per_s=measured,
            ),
        )
        if told.share != share:
            self._change(name, told.share, told.reason)

    def _why_in_full(self, now_s: float) -> str | None:
        if self._hooks.is_urgent():
            return "a save waits for room in memory, or there is a deadline"
        if self._last_step_s is None or now_s - self._last_step_s >= self._still_s():
            return "training stands still"
        return None

    def _still_s(self) -> float:
        usual_s = statistics.median(self._lately_s) if self._lately_s else 0.0
        return max(STILL_S, STILL_STEPS * usual_s)

    def _change(self, tier: str, share: float, reason: str) -> None:
        self.shares[tier] = share
        self._busy[tier].clear()  # what follows is at another pace
        logger.info("flush to %s takes %s of its rate: %s", tier, format_share(share), reason)

    def _keep(self, tier: str, rules: TierRules) -> None:
        share = min(self.shares.get(tier, 1.0), rules.bandwidth_share or 1.0)
        measured = self._rates.write_bytes_per_s(tier)
        pace = None if share == 1.0 or measured is None else share * measured
        before = self._paces.get(tier)
        alike = pace is not None and before is not None and abs(pace / before - 1.0) < CHANGE
        if pace != before and not alike:
            self._paces[tier] = pace
            self._set_pace(tier, pace)
