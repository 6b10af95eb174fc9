"""Measured read and write rates of each tier, in bytes per second, while copies are in progress.

The unit is a *stretch*: the bytes that one lane copied until its copy was complete, or for ``STRETCH_S``. Its time is
the workers' time without rate-limit waits, but at most the time during which any worker was busy: so parallel tasks
count by their joint rate, and throttled ones by the rate that they could have had. Belongs to the coordinator's thread
and reads no clock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from tierfall.core.flush.tasks import CopyRun, FinishCopy, OpenShard, Outcome, Task

STRETCHES = 8
"""A rate is the mean of so many stretches."""
STRETCH_S = 5.0
PACED = 0.05
"""A stretch with a larger share of rate-limit waits counts as throttled: it shows the limit, not the tier's rate."""


@dataclass(slots=True)
class FlushStretch:
    """What one lane copied. ``write_s``, ``read_s`` and ``throttled_s`` (rate-limit waits) are summed over workers;
    ``busy_s`` is the time during which any was busy."""

    bytes: int = 0
    busy_s: float = 0.0
    write_s: float = 0.0
    throttled_s: float = 0.0
    read_bytes: dict[str, int] = field(default_factory=dict)
    read_s: dict[str, float] = field(default_factory=dict)

    @property
    def is_paced(self) -> bool:
        return self.throttled_s > PACED * (self.write_s + self.throttled_s)


class Throughput:
    """Bytes over seconds of the last stretches."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=STRETCHES)

    def add(self, count: int, seconds: float) -> None:
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
        """Return the rate including bytes that are not noted yet; None while unknown."""
        count = more + sum(count for count, _ in self._last)
        seconds = more_s + sum(seconds for _, seconds in self._last)
        return count / seconds if count and seconds else None


@dataclass(slots=True)
class _LaneActivity:
    """The tasks in progress to one tier, since when, and the present stretch."""

    in_flight: int = 0
    since_s: float = 0.0
    stretch: FlushStretch = field(default_factory=FlushStretch)


class TierThroughput:
    """See the module. Bytes are those of this rank's images, uncompressed."""

    def __init__(self) -> None:
        self._lanes: defaultdict[str, _LaneActivity] = defaultdict(_LaneActivity)
        self._begun = 0
        self._free: defaultdict[str, Throughput] = defaultdict(Throughput)
        self._paced: defaultdict[str, Throughput] = defaultdict(Throughput)
        self._delivered: defaultdict[str, Throughput] = defaultdict(Throughput)
        self._reads: defaultdict[str, Throughput] = defaultdict(Throughput)

    # Rates -----------------------------------------------------------------------------------------

    def write_bytes_per_s(self, tier: str) -> float | None:
        """Return how fast a tier can be written; None before the first copy. Throttling does not lower it."""
        seen = [self._free[tier].per_s, self._paced[tier].per_s]
        return max((rate for rate in seen if rate is not None), default=None)

    def delivered_bytes_per_s(self, tier: str) -> float | None:
        """Return the rate of copies to a tier, rate-limit waits included; None before the first."""
        return self._delivered[tier].per_s

    def arriving_bytes_per_s(self, tier: str, now_s: float) -> float | None:
        """Return the delivered rate including the stretch in progress, for display; None where no worker writes to the
        tier, or before the first byte."""
        lane = self._lanes[tier]
        if not lane.in_flight:
            return None
        busy_s = lane.stretch.busy_s + max(0.0, now_s - lane.since_s)
        return self._delivered[tier].per_s_with(lane.stretch.bytes, busy_s)

    def read_rates(self) -> dict[str, float]:
        """Return how fast each tier was read, by flushes to other tiers and by restores."""
        found = {tier: reads.per_s for tier, reads in self._reads.items()}
        return {tier: rate for tier, rate in found.items() if rate is not None}

    def stretches(self, tier: str) -> int:
        """Return the number of stretches in the delivered rate, at most ``STRETCHES``."""
        return len(self._delivered[tier])

    def flushing(self) -> tuple[frozenset[str], int]:
        """Return the tiers that workers write to now, and the number of tasks begun so far."""
        return frozenset(tier for tier, lane in self._lanes.items() if lane.in_flight), self._begun

    # Measurements ----------------------------------------------------------------------------------

    def on_begun(self, task: Task, now_s: float) -> None:
        """A task was dispatched."""
        if not isinstance(task, OpenShard | CopyRun | FinishCopy):
            return
        lane = self._lanes[task.tier]
        if lane.in_flight == 0:
            lane.since_s = now_s
        lane.in_flight += 1
        self._begun += 1

    def on_ended(self, outcome: Outcome, now_s: float) -> None:
        """A task has ended. After a failure the stretch is discarded: it does not show the tier's rate."""
        task = outcome.task
        if not isinstance(task, OpenShard | CopyRun | FinishCopy):
            return
        lane = self._lanes[task.tier]
        lane.in_flight -= 1
        lane.stretch.busy_s += max(0.0, now_s - lane.since_s)
        lane.since_s = now_s
        if outcome.error is not None:
            lane.stretch = FlushStretch()
            return
        stretch = lane.stretch
        stretch.write_s += outcome.seconds - outcome.read_s - outcome.throttled_s
        stretch.throttled_s += outcome.throttled_s
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

    def note_read(self, tier: str, count: int, seconds: float) -> None:
        """A restore has read ``count`` bytes of a tier in ``seconds``."""
        self._reads[tier].add(count, seconds)

    def _note(self, tier: str, stretch: FlushStretch) -> None:
        paced, free = self._paced[tier], self._free[tier]
        written_s = min(stretch.busy_s, stretch.write_s)
        if stretch.is_paced:
            paced.add(stretch.bytes, written_s)
        else:
            free.add(stretch.bytes, written_s)
            paced.forget_oldest()  # measured under a limit, perhaps long ago
        self._delivered[tier].add(stretch.bytes, stretch.busy_s)
        for source, count in stretch.read_bytes.items():
            self.note_read(source, count, min(stretch.busy_s, stretch.read_s[source]))
