"""What a cadence promises, held against what a training went through, with rules of the tests' own.

It sees every step of one loop, over all its starts. What steps take beyond what they are worth is *added*.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field

from tierfall.policies.cadence import PROFILE_STEPS, CadenceRules, IntervalBound
from tierfall.run.cadence import PATIENCE_STEPS, CadenceClock
from tierfall.telemetry.reports import CadenceReport

ONE_POINT = 0.01
ROUNDING = 1e-9
"""Times are sums of whole steps, so that a share may be just what is allowed, but for the rounding of floats."""
DRIFT, DRIFT_OF_MANY = 0.15, 0.4
"""So much a step's measured time may have changed since an interval was decided by it, and announced to others."""

DURABLE = re.compile(r"tier (\w+) has a save after (\S+) s, and host memory holds")


@dataclass
class Interval:
    """From a save to the next one."""

    began_s: float
    trained_s: float = 0.0
    added_s: float = 0.0


@dataclass
class Start:
    """What is known since a process began to train; ``bare_steps`` are those with no copy beside them,
    and ``unseen`` is the share of a step that was taken for training, as there were few of those."""

    bare_steps: int = 0
    unseen: float = 0.0
    intervals: list[Interval] = field(default_factory=list)


class Watch:
    """See the module. ``step_s`` is what a step is worth on average. Ranks that announce their saves are not
    ``exact``: they save about when it is due, and each waits for what others do; only one of them ``decides``."""

    def __init__(
        self, rules: CadenceRules, *, step_s: float, exact: bool = True, decides: bool = True
    ) -> None:
        self._rules, self._step_s, self._exact, self._decides = rules, step_s, exact, decides
        self._start = Start()
        self._since: Interval | None = None
        self.bounds: Counter[str] = Counter()

    def begin(self, now_s: float) -> None:
        """A process begins to train."""
        self.end()
        self._start = Start()
        self.go_back(None, now_s)

    def go_back(self, step: int | None, now_s: float) -> None:
        """The line goes on from ``step``; None: from nothing."""
        self._line_began_s = self._last_s = now_s
        self._line_saves = 0
        self._last_step, self._longest = step, math.inf
        self._since = None

    def step(self, step: int, step_s: float, now_s: float, *, wanted: bool, bare: bool) -> None:
        """A step has ended that is worth ``step_s``; ``bare``: no copy went on beside it."""
        self._start.bare_steps += bare
        if self._since is not None:
            self._since.trained_s += step_s
        if (every := self._rules.every_steps) is not None:
            assert wanted == (step % every == 0), f"step {step}, of every {every}: {wanted}"
        elif (every_s := self._rules.every_s) is not None and self._exact:
            if wanted:
                self._line_saves += 1
                soonest_s = self._line_began_s + self._line_saves * every_s
                assert now_s > soonest_s - 1e-6, f"step {step} is saved before it is due"
                self._last_s = now_s
            assert now_s - self._last_s < every_s, f"step {step} is due, and is not saved"

    def save(self, step: int, now_s: float, report: CadenceReport) -> None:
        """That step is to be saved."""
        self.bounds[report.bound] += 1
        if not self._decides and self._rules.every_steps is None:
            assert report.reason == "rank 0 decides"
        elif self._rules.measured:
            self._check_decided(step, report)
        else:
            assert report.bound == IntervalBound.EVERY, report
        if self._since is not None:
            self._since.added_s = now_s - self._since.began_s - self._since.trained_s
            self._start.intervals.append(self._since)
        self._last_step, self._since = step, None
        if report.cost_s is not None and report.step_s is not None:
            self._since = Interval(now_s)
            if self._start.bare_steps < 2 * PROFILE_STEPS:
                self._start.unseen = max(self._start.unseen, report.step_s / self._step_s - 1)

    def after_save(self, cadence: CadenceClock) -> None:
        """What the first step after a save is told of the next one."""
        self._longest = cadence.report().interval_steps or math.inf

    def _check_decided(self, step: int, report: CadenceReport) -> None:
        """The step is the one that the statistics speak of, and they name what decided."""
        steps, step_s = report.interval_steps, report.step_s
        if steps is None and not self._exact:
            return  # it was announced before this was measured anew
        assert steps is not None
        assert step_s
        assert (report.bound == IntervalBound.MEASURING) == (report.cost_s is None), report
        if report.cost_s is None:
            return
        if self._exact and self._last_step is not None:
            lie = step - self._last_step
            longest = max(steps, self._longest) + PATIENCE_STEPS
            assert steps <= lie <= longest, f"step {step} is saved after {lie}: {report.reason}"
        share = report.cost_s / (steps * step_s)
        if report.bound == IntervalBound.OVERHEAD:
            budget = self._rules.overhead or 0.0
            more = report.cost_s / ((steps - 1) * step_s) if steps > 1 else math.inf
            drift = DRIFT if self._exact else DRIFT_OF_MANY
            assert share * (1 - drift) <= budget <= more * (1 + drift), report
        elif report.bound == IntervalBound.FAILURES:
            lost = [self._lost(n * steps * step_s, report.cost_s) for n in (0.5, 1, 2)]
            assert lost[1] <= (1 + DRIFT) * lost[2], report
            assert steps == 1 or lost[1] <= (1 + DRIFT) * lost[0], report
        else:
            self._check_durable(steps, step_s, report)

    def _lost(self, interval_s: float, cost_s: float) -> float:
        """The share of time that saving and failures lose together, to first order."""
        return cost_s / interval_s + (interval_s + cost_s) / (2 * min(self._rules.mtbf_s.values()))

    def _check_durable(self, steps: int, step_s: float, report: CadenceReport) -> None:
        """The tier that is named keeps up, and would not with twice as many saves."""
        named = DURABLE.match(report.reason)
        assert report.bound == IntervalBound.DURABLE
        assert named, report
        (tier,) = [tier for tier in self._rules.tiers if tier.name == named[1]]
        share_s = float(named[2]) / tier.flush_every
        in_flight_s = steps * step_s * report.images * (1 + (self._rules.overhead or 0.0))
        assert in_flight_s * (1 + DRIFT) >= share_s, report
        assert steps == 1 or in_flight_s / 2 <= share_s, report

    def cannot_measure(self) -> None:
        """A tier takes no copies for long: nobody can tell what saves cost that slow the training once it does."""
        self._start.unseen = math.inf

    def end(self) -> None:
        """A process has ended: what saving added is within the budget, and a point, one odd save aside, and those
        before a change is seen.

        Where copies went on beside all steps, nobody can tell what one takes without. When saves begin to add more, the
        interval follows after the second such save, or the second such cycle, where some go to more tiers than others.
        """
        start, rules = self._start, self._rules
        if rules.overhead is None or not self._exact or not start.intervals:
            return
        trained_s = sum(interval.trained_s for interval in start.intervals)
        added_s = [interval.added_s for interval in start.intervals]
        cycle = math.lcm(*(tier.flush_every for tier in rules.tiers))
        usual_s = sorted(added_s)[: -1 - 2 * cycle]
        share = sum(usual_s) / trained_s
        allowed = rules.overhead + ONE_POINT + start.unseen
        assert share <= allowed + ROUNDING, (
            f"saving took {share:.3%} more than training, {allowed:.3%} may be"
        )
