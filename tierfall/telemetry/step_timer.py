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
from typing import Any

from tierfall.core.scheduler.flush.throttle import Flushing, Throttle

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
