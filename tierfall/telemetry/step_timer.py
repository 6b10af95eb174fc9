"""Timing training steps.

* ``StepTimer`` times steps by their numbers, as the calls of ``save`` and ``maybe_save`` give them: for what a failure
  would cost.
* ``StepClock`` times the steps of an optimizer, for the throttle of flushes, also where ``maybe_save`` is called once
  in many steps.
* ``StepMeter`` separates steps beside a save or a copy from all others, and measures what a save costs. It belongs to
  the training thread and reads no clock: its caller passes the time, handles report the rest. Steps from a save until
  every tier has it, or until the next save, are *affected*, and so are those beside any other copy; all others are
  *clean*. The cost of a save is the time of its affected steps beyond that of as many clean ones; later steps beside
  copies count with the last save.
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
from tierfall.core.flush.throttle import Flushing, Throttle
from tierfall.policies.cadence import PROFILE_STEPS, mean_within

SEEN = 64
"""The time of a step is the mean over so many last calls: the steps of a run change in length."""
EXCUSED = 2
REMEMBERED = 16
PATIENCE = 100
"""After so many steps of other optimizers the one that was timed has stopped, and the next one is timed."""


class StepTimer:
    """Times numbered steps. Updated by the training thread, read by any."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=SEEN)
        self._from: int | None = None

    def continue_from(self, step: int | None) -> None:
        """Training continues from ``step`` after a restore (None: from before all steps)."""
        self._seen.clear()
        self._from = step

    def record(self, step: int, now_s: float) -> tuple[int, float] | None:
        """Record that training is at ``step``; return the number of steps since the last call, and their seconds.

        None after the first call, and after training went back: earlier times are then discarded.
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
        """The last step that was recorded; before, the one that training continued from, or None."""
        seen = tuple(self._seen)
        return seen[-1][0] if seen else self._from

    @property
    def step_s(self) -> float | None:
        """Seconds per step; None before the second call."""
        seen = tuple(self._seen)
        if len(seen) < 2 or seen[-1][1] <= seen[0][1]:
            return None
        return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


class StepClock:
    """Times the steps of one optimizer, on the training thread; ``on_step`` is called at every optimizer's step,
    ``on_save`` at every save.

    The step of a save and the one after it, whose barrier waits for the capture, are not timed: they do not show what
    flushes cost.
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
        """Median seconds of the last steps, without those beside a save; None before the first."""
        return statistics.median(self._taken) if self._taken else None

    def on_save(self) -> None:
        self._excused = EXCUSED

    def on_step(self, optimizer: object) -> None:
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
            self._pacing.on_step(now_s - began_s, flushing)
        self._excused = max(0, self._excused - 1)
        self._began = (now_s, self._pacing.flushing)


# What a save costs ---------------------------------------------------------------------------------


SKIPPED = 2
"""The first steps after a start are not counted: they compile, allocate and fill caches."""
FEW_STEPS = 8
REMEMBERED_STEPS = 64
REMEMBERED_CYCLES = 3
"""The cost is a median of so many: one outlier changes nothing, a real change shows after two."""
REMEMBERED_FLUSHES = 5
STALE_STEPS = 256
"""After so many affected steps in a row, the time of a clean step is taken from these."""
_MARKS = 1000


@dataclass(slots=True)
class _Window:
    """A save whose steps are counted; ``first`` since open: it includes the set-up."""

    handle: SaveHandle
    first: bool
    steps: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _KeptSeconds:
    """Seconds of progress that is not lost; ``marks`` hold (step, seconds, unseen steps) at each save."""

    seconds: float = 0.0
    unseen: int = 0
    marks: deque[tuple[int, float, int]] = field(default_factory=lambda: deque(maxlen=_MARKS))

    def mark(self, step: int) -> None:
        self.marks.append((step, self.seconds, self.unseen))

    def rewind(self, step: int) -> None:
        """Discard the progress after ``step``; all of it, where the step is from before this start."""
        while self.marks and self.marks[-1][0] > step:
            self.marks.pop()
        at = self.marks[-1] if self.marks else (step, 0.0, 0)
        self.seconds, self.unseen = at[1], at[2]


class StepMeter:
    """See the module. The flush pattern repeats after ``cycle`` saves. ``changed`` is set when the cadence is to be
    worked out again."""

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
        """Seconds that the training thread waited for the last save whose window has ended."""
        self.image_bytes = 0
        self._paces: deque[float] = deque(maxlen=FEW_STEPS)
        self.changed = False

    # Recording -------------------------------------------------------------------------------------

    def tick(self, step: int, now_s: float, *, copying: bool) -> None:
        """Record the end of ``step``; ``copying``: any copy is in progress."""
        taken = self._steps.record(step, now_s)
        if taken is None:
            self._progress.unseen += 1  # its start was not seen
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
        # the first includes the call of save
        self._count_affected(steps, pace_counts=window.steps > steps)
        if self._settled():
            self._close()

    def _count(self, steps: int, seconds: float, *, copying: bool) -> None:
        if self._skip > 0:
            self._skip -= 1
            return
        if copying:  # a copy of an earlier start, or one that is tried again
            self._count_affected(steps, pace_counts=True)
            self._count_late(steps, seconds)
        else:
            self._clean.append(self._paces[-1])
            self._seen_clean += 1
            if len(self._clean) >= PROFILE_STEPS:
                self._since_clean = 0
                few = self._seen_clean <= REMEMBERED_STEPS  # then each changes the mean much
                self.changed |= few or self._seen_clean % PROFILE_STEPS == 0
        if self.saves == 0 and len(self._clean) + len(self._affected) == PROFILE_STEPS:
            self.changed = True

    def _count_affected(self, steps: int, *, pace_counts: bool) -> None:
        if pace_counts:
            self._affected.append(self._paces[-1])
        before = self._since_clean
        self._since_clean += steps
        if self._since_clean > STALE_STEPS:  # from then on these give the time of a step
            enough = pace_counts and len(self._affected) == PROFILE_STEPS
            self.changed |= before <= STALE_STEPS or enough

    def _count_late(self, steps: int, seconds: float) -> None:
        """Add the cost of a copy that arrives after its save's window to the last save, whose cost is never less than
        what training has waited for it."""
        if self._costs and (step_s := self.step_s) is not None:
            least_s = min(self._costs[-1], self.foreground_s)
            more_s = max(seconds - steps * step_s, least_s - self._costs[-1])
            self._costs[-1] += more_s
            self._progress.seconds -= more_s
            self.changed = True

    def on_save(self, handle: SaveHandle) -> None:
        """Record that a save has begun, at the step of the last ``tick`` or at one without a tick."""
        self._close()
        self._settled()  # for a loop that never ticks
        self._window = _Window(handle, first=self.saves == 0)
        self._under_way.append(handle)
        self.saves += 1
        self.image_bytes = handle.stats.bytes or self.image_bytes
        self._progress.mark(handle.step)
        self.changed = True

    def rewind(self, step: int | None) -> None:
        """The lineage continues from ``step``: the progress after it is lost; None: from before all steps."""
        self._progress.rewind(-1 if step is None else step)
        self._steps.continue_from(None)
        self._window = None

    # The window of a save --------------------------------------------------------------------------

    def _settled(self) -> bool:
        for handle in [handle for handle in self._under_way if handle.is_settled()]:
            self._under_way.remove(handle)
            for tier, seconds in handle.stats.durable_s.items():
                self._durable.setdefault(tier, deque(maxlen=REMEMBERED_FLUSHES)).append(seconds)
        return not self._under_way

    def _close(self) -> None:
        """Record the cost of the save whose window ends."""
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

    # Reading ---------------------------------------------------------------------------------------

    @property
    def step_s(self) -> float | None:
        """Seconds of a step while nothing is saved or copied; None where too few were seen.

        Where no clean step was seen for ``STALE_STEPS``, affected ones count too: no step is faster than a clean one.
        Before the first save all steps count.
        """
        if len(self._clean) < PROFILE_STEPS:
            any_do = self.saves == 0  # the first save must not wait for copies to end
            seen = [*self._clean, *self._affected] if any_do else self._affected
            known = len(seen) >= PROFILE_STEPS and (any_do or self._since_clean > STALE_STEPS)
            return mean_within(seen) if known else None
        clean_s = mean_within(self._clean)
        if self._since_clean > STALE_STEPS and self._affected:
            return min(clean_s, mean_within(self._affected))
        return clean_s

    @property
    def fastest_step_s(self) -> float:
        """The least time of the last ``FEW_STEPS`` steps, affected or not; 0 before the first."""
        return min(self._paces, default=0.0)

    @property
    def cost_s(self) -> float | None:
        """Seconds that a save adds, as a mean over a cycle; None before the window of one has ended, without the first
        since open."""
        newest_first = list(reversed(self._costs))
        cycles = [
            newest_first[at : at + self._cycle] for at in range(0, len(newest_first), self._cycle)
        ]
        whole = [cycle for cycle in cycles if len(cycle) == self._cycle]
        means = [statistics.fmean(cycle) for cycle in whole or cycles]
        return statistics.median(means) if means else None

    @property
    def durable_s(self) -> dict[str, float]:
        """Seconds from a save until a tier has it, by tier: the median of the last saves that have settled."""
        return {tier: statistics.median(times) for tier, times in self._durable.items()}

    @property
    def unsettled_saves(self) -> int:
        """The number of saves that some tier has not got yet, as of the last ``tick``."""
        return len(self._under_way)

    def ettr(self, now_s: float) -> float | None:
        """Return the share of the time since open that made progress which is not lost; None before the first step.

        A step whose start was not timed counts as a clean one. The cost of a save that is under way is not included.
        """
        wall_s = now_s - self._began_s
        return None if wall_s <= 0 or not self.is_timed else min(1.0, self.kept_s / wall_s)

    @property
    def is_timed(self) -> bool:
        """Whether steps were recorded since open, or since the lineage went back."""
        return self._steps.last is not None

    @property
    def kept_s(self) -> float:
        """Seconds of this start that made progress which is not lost; see ``ettr``."""
        return self._progress.seconds + self._progress.unseen * (self.step_s or 0.0)
