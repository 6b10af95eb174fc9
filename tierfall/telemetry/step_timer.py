"""The step clock: how long the steps of training take, told to whoever paces flushes. It runs on the training thread.

A step is the time between two steps of one optimizer. Those in which a save was called, and the ones after it, whose
barrier waits for the capture, say nothing of flushes. Unlike the calls of ``maybe_save`` that ``metering`` goes by,
these come in any loop, one by one, also where that is called once in many steps.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from tierfall.core.scheduler.flush.throttle import Flushing, Pacing

EXCUSED = 2
REMEMBERED = 16
PATIENCE = 100
"""After so many steps of others the optimizer that was gone by steps no more, and the next is taken."""


class StepClock:
    """See the module; ``stepped`` hears of every optimizer's step, ``saving`` of every save."""

    def __init__(self, pacing: Pacing, clock: Callable[[], float] = time.monotonic) -> None:
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
