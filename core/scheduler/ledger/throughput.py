"""Rates: how many bytes a second each tier was seen to write, and to be read, while copies really ran.

It belongs to the coordinator's thread and reads no clock: it is told when a worker's task begins and what became of it.
What is measured is a *stretch*: what one lane brought until its copy was there, or for ``STRETCH_S``. Its time is what
the workers spent at it, waits for a pace left out, but never more than the time in which any of them was at work at
all: so several at once count as what they bring together, and one that mostly waits for its pace as what it could do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tierfall.core.scheduler.ledger.tasks import CopyRun, FinishCopy, OpenShard, Outcome, Task

STRETCHES = 8
"""The estimate is over so many stretches: machines change, and one stretch says little."""
STRETCH_S = 5.0
PACED = 0.05
"""A stretch of which the workers waited more than this share for a pace shows what was asked, not what is possible."""


@dataclass(slots=True)
class FlushStretch:
    """What one lane brings: ``write_s``, ``read_s`` and ``paced_s`` are seconds summed over workers, ``busy_s`` the
    time in which any was at work."""

    bytes: int = 0
    busy_s: float = 0.0
    write_s: float = 0.0
    paced_s: float = 0.0
    read_bytes: dict[str, int] = field(default_factory=dict)
    read_s: dict[str, float] = field(default_factory=dict)

    @property
    def is_paced(self) -> bool:
        return self.paced_s > PACED * (self.write_s + self.paced_s)


class Throughput:
    """Bytes over seconds, of the last stretches that were noted."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=STRETCHES)

    def note(self, count: int, seconds: float) -> None:
        if count > 0 and seconds > 0:
            self._last.append((count, seconds))

    def forget_oldest(self) -> None:
        if self._last:
            self._last.popleft()

    def __len__(self) -> int:
        return len(self._last)

    @property
    def per_s(self) -> float | None:
        return self.per_s_with(0, 0.0)

    def per_s_with(self, more: int, more_s: float) -> float | None:
        """Return the rate with what is not noted yet; None before there are bytes, and time."""
        count = more + sum(count for count, _ in self._last)
        seconds = more_s + sum(seconds for _, seconds in self._last)
        return count / seconds if count and seconds else None


@dataclass(slots=True)
class _LaneActivity:
    """What is under way to one tier: tasks out, since when, and what the present stretch has so far."""

    out: int = 0
    since_s: float = 0.0
    stretch: FlushStretch = field(default_factory=FlushStretch)


class TierThroughput:
    """See the module. Bytes are those of images, before a tier packs them; with several ranks, those of this one."""

    def __init__(self) -> None:
        self._lanes: dict[str, _LaneActivity] = {}
        self._begun = 0
        self._free: dict[str, Throughput] = {}
        self._paced: dict[str, Throughput] = {}
        self._given: dict[str, Throughput] = {}
        self._reads: dict[str, Throughput] = {}

    # Asking ----------------------------------------------------------------------------------------

    def write_bytes_per_s(self, tier: str) -> float | None:
        """Return how fast a tier can be written, as far as was seen; None before the first copy.

        A pace does not lower it: stretches under one count for no less than they show, and those without one tell.
        """
        seen = [_rate(self._free, tier), _rate(self._paced, tier)]
        return max((rate for rate in seen if rate is not None), default=None)

    def delivered_bytes_per_s(self, tier: str) -> float | None:
        """Return how fast copies come to a tier while they run, with all waits for a pace; None before the first."""
        return _rate(self._given, tier)

    def arriving_bytes_per_s(self, tier: str, now_s: float) -> float | None:
        """Return the same with what the stretch under way has brought by now, for whoever watches; None where no worker
        writes to the tier, or nothing has come yet."""
        lane = self._lanes.get(tier)
        if lane is None or not lane.out:
            return None
        busy_s = lane.stretch.busy_s + max(0.0, now_s - lane.since_s)
        return self._given.get(tier, Throughput()).per_s_with(lane.stretch.bytes, busy_s)

    def read_rates(self) -> dict[str, float]:
        """Return how fast each tier was read, in bytes per second, by flushes to other tiers and by restores."""
        found = {tier: moving.per_s for tier, moving in self._reads.items()}
        return {tier: rate for tier, rate in found.items() if rate is not None}

    def stretches(self, tier: str) -> int:
        """Return how many stretches the estimate of what comes to a tier is over, ``STRETCHES`` at most."""
        return len(self._given.get(tier, ()))

    def flushing(self) -> tuple[frozenset[str], int]:
        """Name the tiers that workers are just writing to, and say how many tasks were begun so far."""
        return frozenset(tier for tier, lane in self._lanes.items() if lane.out), self._begun

    # Being told ------------------------------------------------------------------------------------

    def began(self, task: Task, now_s: float) -> None:
        """A task of a copy is handed to a worker."""
        if not isinstance(task, OpenShard | CopyRun | FinishCopy):
            return
        lane = self._lanes.setdefault(task.tier, _LaneActivity())
        if lane.out == 0:
            lane.since_s = now_s
        lane.out += 1
        self._begun += 1

    def ended(self, outcome: Outcome, now_s: float) -> None:
        """A task has come back: what failed says nothing of how fast a tier is, nor what went on beside it."""
        task = outcome.task
        if not isinstance(task, OpenShard | CopyRun | FinishCopy):
            return
        lane = self._lanes[task.tier]
        lane.out -= 1
        lane.stretch.busy_s += max(0.0, now_s - lane.since_s)
        lane.since_s = now_s
        if outcome.error is not None:
            lane.stretch = FlushStretch()
            return
        stretch = lane.stretch
        stretch.write_s += outcome.seconds - outcome.read_s - outcome.paced_s
        stretch.paced_s += outcome.paced_s
        if isinstance(task, CopyRun):
            length = task.end - task.start
            stretch.bytes += length
            if outcome.read_s > 0:
                source = task.source.tier
                stretch.read_bytes[source] = stretch.read_bytes.get(source, 0) + length
                stretch.read_s[source] = stretch.read_s.get(source, 0.0) + outcome.read_s
        ends = isinstance(task, FinishCopy) or stretch.busy_s >= STRETCH_S
        if ends and stretch.bytes:
            lane.stretch = FlushStretch()
            self._note(task.tier, stretch)

    def was_read(self, tier: str, count: int, seconds: float) -> None:
        """A restore has read so many bytes of a tier in so many seconds."""
        self._reads.setdefault(tier, Throughput()).note(count, seconds)

    def _note(self, tier: str, stretch: FlushStretch) -> None:
        paced, free = (of.setdefault(tier, Throughput()) for of in (self._paced, self._free))
        written_s = min(stretch.busy_s, stretch.write_s)
        if stretch.is_paced:
            paced.note(stretch.bytes, written_s)
        else:
            free.note(stretch.bytes, written_s)
            paced.forget_oldest()  # what was shown under a pace long ago may not be so any more
        self._given.setdefault(tier, Throughput()).note(stretch.bytes, stretch.busy_s)
        for source, count in stretch.read_bytes.items():
            self.was_read(source, count, min(stretch.busy_s, stretch.read_s[source]))


def _rate(of: dict[str, Throughput], tier: str) -> float | None:
    moving = of.get(tier)
    return None if moving is None else moving.per_s
