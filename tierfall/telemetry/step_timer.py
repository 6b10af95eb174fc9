"""Timing steps of training. What a step takes depends on which are asked about:

* ``StepTimer`` times steps by their numbers, as the calls of ``save`` and ``maybe_save`` give them: all alike for what
  a failure would cost, or, in ``meter``, told apart by whether a save or a copy was under way;
* ``StepClock`` times those of an optimizer, for whoever paces flushes. They come in any loop, one by one, also where
  ``maybe_save`` is called once in many steps.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tierfall.core.capture.handle import SaveHandle
from tierfall.core.scheduler.flush.throttle import Flushing, Throttle
from tierfall.policies.cadence import PROFILE_STEPS, mean_within

SEEN = 64
"""The time of a step is a mean over so many calls of late: a run's steps change in length."""
EXCUSED = 2
REMEMBERED = 16
PATIENCE = 100
"""After so many steps of others the optimizer that was gone by steps no more, and the next is taken."""


class StepTimer:
    """Times steps that have numbers. Told by the thread that trains, asked by any."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=SEEN)
        self._from: int | None = None

    def go_on_from(self, step: int | None) -> None:
        """A restore has put training back to ``step`` (None: to before all steps)."""
        self._seen.clear()
        self._from = step

    def come_to(self, step: int, now_s: float) -> tuple[int, float] | None:
        """Training has come to ``step``: return how many steps that were, and their seconds, from the last call.

        None where that is not known, since it is the first call, or training went back. What was seen before then says
        nothing of how fast it is.
        """
        if self._seen and step < self._seen[-1][0]:
            self._seen.clear()
        if not self._seen:
            self._seen.append((step, now_s))
            return None
        last, last_s = self._seen[-1]
        if step == last:
            return 0, 0.0
        self._seen.append((step, now_s))
        return step - last, now_s - last_s

    @property
    def last(self) -> int | None:
        """Where training is, as far as is known; None before the first call."""
        seen = tuple(self._seen)
        return seen[-1][0] if seen else self._from

    @property
    def step_s(self) -> float | None:
        """Seconds from one step to the next; None before the second."""
        seen = tuple(self._seen)
        if len(seen) < 2 or seen[-1][1] <= seen[0][1]:
            return None
        return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


class StepClock:
    """Times the steps of one optimizer, each from the one before, on the training thread; ``stepped`` hears of every
    optimizer's step, ``saving`` of every save.

    Those in which a save was called, and the ones after it, whose barrier waits for the capture, say nothing of
    flushes.
    """

    def __init__(self, pacing: Throttle, clock: Callable[[], float] = time.monotonic) -> None:
        self._pacing = pacing
        self._clock = clock
        self._optimizer: Callable[[], Any] = lambda: None
        self._others = 0
        self._began: tuple[float, Flushing] | None = None
        self._excused = 0
        self._taken: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def step_s(self) -> float | None:
        """Seconds that a step takes of late, without those beside a save; None before the first such."""
        return statistics.median(self._taken) if self._taken else None

    def saving(self) -> None:
        self._excused = EXCUSED

    def stepped(self, optimizer: object) -> None:
        if self._optimizer() is not optimizer:
            self._others += 1
            if self._optimizer() is not None and self._others < PATIENCE:
                return
            self._optimizer = weakref.ref(optimizer)
            self._began = None
        self._others = 0
        now_s = self._clock()
        if self._began is not None and not self._excused:
            began_s, flushing = self._began
            self._taken.append(now_s - began_s)
            self._pacing.step_took(now_s - began_s, flushing)
        self._excused = max(0, self._excused - 1)
        self._began = (now_s, self._pacing.flushing)


# What a save costs ---------------------------------------------------------------------------------


SKIPPED = 2
"""So many steps after a start are not counted: they compile, allocate and fill caches."""
FEW_STEPS = 8
REMEMBERED_STEPS = 64
REMEMBERED_CYCLES = 3
"""A cost is the median of so many: one odd save changes nothing, a change shows after two."""
REMEMBERED_FLUSHES = 5
STALE_STEPS = 256
"""After so many affected steps in a row what a clean one takes is not known any better than by these."""
_MARKS = 1000


@dataclass(slots=True)
class _Window:
    """A save whose steps are counted; ``first`` since open: it also sets everything up."""

    handle: SaveHandle
    first: bool
    steps: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _KeptSeconds:
    """Seconds that made progress which is kept; ``marks`` say how many there were at each save."""

    seconds: float = 0.0
    unseen: int = 0
    marks: deque[tuple[int, float, int]] = field(default_factory=lambda: deque(maxlen=_MARKS))

    def mark(self, step: int) -> None:
        self.marks.append((step, self.seconds, self.unseen))

    def go_back(self, step: int) -> None:
        """What came after ``step`` is to be done again; of a step from before this start nothing counts."""
        while self.marks and self.marks[-1][0] > step:
            self.marks.pop()
        at = self.marks[-1] if self.marks else (step, 0.0, 0)
        self.seconds, self.unseen = at[1], at[2]


class StepMeter:
    """See the module. In ``cycle`` saves every tier gets one, whatever its ``flush.every``. ``changed`` is set where a
    choice made before is to be made again."""

    def __init__(self, began_s: float, *, cycle: int = 1) -> None:
        self._began_s = began_s
        self._cycle = cycle
        self._steps = StepTimer()
        self._skip = SKIPPED
        self._clean: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._affected: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._seen_clean = self._since_clean = 0
        self._window: _Window | None = None
        self._under_way: list[SaveHandle] = []
        self._costs: deque[float] = deque(maxlen=REMEMBERED_CYCLES * cycle)
        self._durable: dict[str, deque[float]] = {}
        self._progress = _KeptSeconds()
        self.saves = 0
        self.foreground_s = 0.0
        """What the training thread has waited for the last save that was seen to its end."""
        self.image_bytes = 0
        self._paces: deque[float] = deque(maxlen=FEW_STEPS)
        self.changed = False

    # Being told ------------------------------------------------------------------------------------

    def tick(self, step: int, now_s: float, *, copying: bool) -> None:
        """The loop has come to the end of ``step``; ``copying``: a tier takes a copy, whosever it is."""
        taken = self._steps.come_to(step, now_s)
        if taken is None:
            self._progress.unseen += 1  # what this step took began before anybody looked
            return
        steps, seconds = taken
        if not steps:
            return
        self._paces.append(seconds / steps)
        self._progress.seconds += seconds
        window = self._window
        if window is None:
            self._count(steps, seconds, copying=copying)
            return
        window.steps += steps
        window.seconds += seconds
        # the first has the call of save in it
        self._count_affected(steps, pace_counts=window.steps > steps)
        if self._settled():
            self._close()

    def _count(self, steps: int, seconds: float, *, copying: bool) -> None:
        if self._skip > 0:
            self._skip -= 1
            return
        if copying:  # what an earlier start has left, or what is tried again
            self._count_affected(steps, pace_counts=True)
            self._count_late(steps, seconds)
        else:
            self._clean.append(self._paces[-1])
            self._seen_clean += 1
            if len(self._clean) >= PROFILE_STEPS:
                self._since_clean = 0
                few = self._seen_clean <= REMEMBERED_STEPS  # then each may tell much
                self.changed |= few or self._seen_clean % PROFILE_STEPS == 0
        if self.saves == 0 and len(self._clean) + len(self._affected) == PROFILE_STEPS:
            self.changed = True

    def _count_affected(self, steps: int, *, pace_counts: bool) -> None:
        if pace_counts:
            self._affected.append(self._paces[-1])
        before = self._since_clean
        self._since_clean += steps
        if self._since_clean > STALE_STEPS:  # from then on these tell what a step takes
            enough = pace_counts and len(self._affected) == PROFILE_STEPS
            self.changed |= before <= STALE_STEPS or enough

    def _count_late(self, steps: int, seconds: float) -> None:
        """A copy goes on although no save waits for it: its tier takes it late. That is a cost of the last save, which
        is never less than what training has waited for it, however fast such steps are."""
        if self._costs and (step_s := self.step_s) is not None:
            least_s = min(self._costs[-1], self.foreground_s)
            more_s = max(seconds - steps * step_s, least_s - self._costs[-1])
            self._costs[-1] += more_s
            self._progress.seconds -= more_s
            self.changed = True

    def saved(self, handle: SaveHandle) -> None:
        """A save has begun at the step of the last ``tick``, or at one that there was no tick for."""
        self._close()
        self._settled()  # those of a loop that never ticks are let go here
        self._window = _Window(handle, first=self.saves == 0)
        self._under_way.append(handle)
        self.saves += 1
        self.image_bytes = handle.stats.bytes or self.image_bytes
        self._progress.mark(handle.step)
        self.changed = True

    def go_back(self, step: int | None) -> None:
        """The line goes on from ``step``: what was trained after it is lost; None: from before all of them."""
        self._progress.go_back(-1 if step is None else step)
        self._steps.go_on_from(None)
        self._window = None

    # The window of a save --------------------------------------------------------------------------

    def _settled(self) -> bool:
        for handle in [handle for handle in self._under_way if handle.tell_settled()]:
            self._under_way.remove(handle)
            for tier, seconds in handle.stats.durable_s.items():
                self._durable.setdefault(tier, deque(maxlen=REMEMBERED_FLUSHES)).append(seconds)
        return not self._under_way

    def _close(self) -> None:
        """Count what the save has cost."""
        window, self._window = self._window, None
        if window is None or not window.steps:
            return
        step_s = self.step_s
        more_s = 0.0 if step_s is None else window.seconds - window.steps * step_s
        self.foreground_s = window.handle.stats.blocked_s
        cost_s = max(more_s, self.foreground_s)
        self._progress.seconds -= min(cost_s, window.seconds)
        if step_s is not None and not window.first:
            self._costs.append(cost_s)
        self.changed = True

    # Asking ----------------------------------------------------------------------------------------

    @property
    def step_s(self) -> float | None:
        """Seconds of a step while nothing is saved or copied; None where too few were seen.

        Where saves follow each other so closely that none was seen for long, those with one are asked too: no step
        is faster for it. Before the first save any will do.
        """
        if len(self._clean) < PROFILE_STEPS:
            any_do = self.saves == 0  # the first save is for measuring too: it waits for no copies
            seen = [*self._clean, *self._affected] if any_do else self._affected
            known = len(seen) >= PROFILE_STEPS and (any_do or self._since_clean > STALE_STEPS)
            return mean_within(seen) if known else None
        clean_s = mean_within(self._clean)
        if self._since_clean > STALE_STEPS and self._affected:
            return min(clean_s, mean_within(self._affected))
        return clean_s

    @property
    def pace_s(self) -> float:
        """The least that one of the last few steps took, whatever happened meanwhile; 0 before any."""
        return min(self._paces, default=0.0)

    @property
    def cost_s(self) -> float | None:
        """Seconds that a save adds, on average over a cycle; None before one was seen to its end, the first since open
        aside."""
        newest_first = list(reversed(self._costs))
        cycles = [
            newest_first[at : at + self._cycle] for at in range(0, len(newest_first), self._cycle)
        ]
        whole = [cycle for cycle in cycles if len(cycle) == self._cycle]
        means = [statistics.fmean(cycle) for cycle in whole or cycles]
        return statistics.median(means) if means else None

    @property
    def durable_s(self) -> dict[str, float]:
        """Seconds from a save until a tier has it, per tier: the median of the last saves that were seen to the end."""
        return {tier: statistics.median(times) for tier, times in self._durable.items()}

    @property
    def under_way(self) -> int:
        """How many saves are still on their way to a tier, as the last ``tick`` found it."""
        return len(self._under_way)

    def ettr(self, now_s: float) -> float | None:
        """Return the share of the time since open in which training made progress that is kept; None before a step.

        Steps that began before anybody timed them count as clean ones do. What a save that is still under way adds is
        not known yet.
        """
        wall_s = now_s - self._began_s
        if wall_s <= 0 or self._steps.last is None:
            return None
        unseen_s = self._progress.unseen * (self.step_s or 0.0)
        return min(1.0, (self._progress.seconds + unseen_s) / wall_s)
