"""The steps that save and maybe_save saw: where training is, and how long a step takes.

All that a step takes counts, saves included, as for what a failure costs: ``metering`` tells these apart, and knows of
no loop that calls ``save`` alone.
"""

from __future__ import annotations

from collections import deque

SEEN = 64
"""The time of a step is a mean over so many calls of late: a run's steps change in length."""


class StepsSeen:
    """Noted by the thread that trains, read by any."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=SEEN)
        self._from: int | None = None

    def go_on_from(self, step: int) -> None:
        """A restore has put training back to ``step``."""
        self._seen.clear()
        self._from = step

    def note(self, step: int, now_s: float) -> None:
        """Training has come to ``step``; where it went back, what was seen before says nothing of how fast it is."""
        if self._seen and step < self._seen[-1][0]:
            self._seen.clear()
        if not self._seen or step > self._seen[-1][0]:
            self._seen.append((step, now_s))

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
