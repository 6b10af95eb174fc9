"""A clock of things to come, for what happens at its time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

from tests.simulation.world import IMAGE
from tierfall.core.flush.tasks import CopyRun, Task

Act = Callable[[], None]


class Clock:
    """What is to happen, and when; ``draw`` decides how often what comes by chance does."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._coming: list[tuple[float, int, Act]] = []
        self._count = itertools.count()
        self.now_s = 0.0

    @property
    def next_s(self) -> float:
        """When something happens next."""
        return self._coming[0][0] if self._coming else float("inf")

    def after(self, seconds: float, what: Act) -> None:
        """Have something happen so much later than now."""
        heapq.heappush(self._coming, (self.now_s + seconds, next(self._count), what))

    def now_and_then(self, what: Act, every_s: float) -> None:
        """Have something happen again and again, so long apart on average."""

        def act() -> None:
            what()
            self.now_and_then(what, every_s)

        self.after(self._draw.expovariate(1 / every_s), act)

    def take(self) -> Act:
        """Take what is next; it is its time."""
        at_s, _, what = heapq.heappop(self._coming)
        self.now_s = max(self.now_s, at_s)
        return what

    def clear(self) -> None:
        self._coming.clear()


class Medium:
    """What a tier's bytes go through, one after the other: ``image_s`` for a whole image; each call takes ``latency_s``
    besides."""

    def __init__(self, *, image_s: float, latency_s: float) -> None:
        self._image_s = image_s
        self._latency_s = latency_s
        self._free_at_s = 0.0

    def done_after_s(self, task: Task, now_s: float) -> float:
        """Say how long a task takes that begins now."""
        if not isinstance(task, CopyRun):
            return self._latency_s
        start_s = max(now_s, self._free_at_s)
        self._free_at_s = start_s + self._image_s * (task.end - task.start) / IMAGE
        return self._free_at_s - now_s + self._latency_s


SOON_S = 0.01
INSTANT = Medium(image_s=0.0, latency_s=SOON_S)
"""For what goes to no stored tier."""
