"""A training of some weeks with failures, by the figures of a plan: when a copy is durable, what survives, how long a
restore takes. Events are failures; between two of them saves come at their interval. Times are in seconds.

It does not run the coordinator: copies that are in progress when a failure comes are lost. The loss of a node is that
of one node, so that peer memory survives it.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from pathlib import Path

from tierfall.core.types.errors import ConfigError
from tierfall.core.types.units import format_duration, parse_duration
from tierfall.core.types.values import LossClass
from tierfall.plan.answers import Source

WEEK_S = 7 * 86_400.0
FAILURES_MAX = 1_000_000
Failure = tuple[float, LossClass]


@dataclass(slots=True, kw_only=True)
class Training:
    """A training that saves each ``every_s``, which lengthens it by ``cost_s``, and that restarts in ``restart_s``; and
    what becomes of ``total_s``: ``trained_s`` is in the state, the rest was ``lost_s``, by its cause. ``restores`` are
    by source; ``nothing``: no copy was left."""

    sources: Sequence[Source]
    every_s: float
    cost_s: float
    restart_s: float
    total_s: float
    trained_s: float = 0.0
    lost_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    failures: Counter[str] = field(default_factory=Counter)
    restores: Counter[str] = field(default_factory=Counter)
    _saves: int = 0
    _held: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """``trained_s`` of the newest copy of each source."""

    @property
    def goodput(self) -> float:
        return self.trained_s / self.total_s

    def live(self, failures: Iterable[Failure]) -> None:
        """Train for ``total_s``; ``failures`` are times since the start, ascending."""
        now_s = restore_s = restart_s = 0.0
        ends: Iterable[tuple[float, LossClass | None]] = ((self.total_s, None),)
        for at_s, lost in chain(takewhile(lambda each: each[0] < self.total_s, failures), ends):
            restarted_s = min(restart_s, at_s - now_s)  # another failure ends it early
            restored_s = min(restore_s, at_s - now_s - restarted_s)
            self.lost_s["restarts"] += restarted_s
            self.lost_s["restores"] += restored_s
            self._train(at_s - now_s - restarted_s - restored_s)
            if lost is not None:
                now_s, restart_s, restore_s = at_s, self.restart_s, self._fail(lost)

    def _train(self, elapsed_s: float) -> None:
        """Train and save for so long."""
        cycle_s = self.every_s + self.cost_s
        whole = int(elapsed_s // cycle_s)
        rest_s = elapsed_s - whole * cycle_s
        for source in self.sources:
            copies = int(max(0.0, elapsed_s + self.cost_s - source.durable_s) // cycle_s)
            newest = self._saves + copies
            ordinal = newest - newest % source.saves
            if ordinal > self._saves:
                ahead_s = (ordinal - self._saves) * self.every_s
                self._held[source.name] = self.trained_s + ahead_s
        self._saves += whole
        self.trained_s += whole * self.every_s + min(rest_s, self.every_s)
        self.lost_s["saving"] += whole * self.cost_s + max(0.0, rest_s - self.every_s)

    def _fail(self, lost: LossClass) -> float:
        """Lose what does not survive, and go back to the newest copy that does; return how long its restore takes."""
        position_s, seconds, name = 0.0, 0.0, "nothing"
        for source in self.sources:
            if not source.survives.covers(lost):
                self._held[source.name] = 0.0
            elif self._held[source.name] > position_s:
                position_s, seconds = self._held[source.name], source.restore_after(lost)
                name = source.name
        self.failures[lost] += 1
        self.restores[name] += 1
        self.lost_s[f"work lost to a {lost}"] += self.trained_s - position_s
        self.trained_s = position_s
        return seconds


def exponential(rates: Mapping[LossClass, float], total_s: float) -> Iterator[Failure]:
    """Return failures that come independently of each other, by the rate of each class, in their order; the same at
    each call. Raises ConfigError if they are too many."""
    if (expected := sum(rates.values()) * total_s) > FAILURES_MAX:
        raise ConfigError(
            f"{expected:.2g} failures are too many to simulate; expected {FAILURES_MAX:,} at most: fewer weeks"
        )

    def of_class(lost: LossClass, rate: float) -> Iterator[Failure]:
        chance, at_s = random.Random(f"0 {lost}"), 0.0
        while rate and (at_s := at_s + chance.expovariate(rate)) < total_s:
            yield at_s, lost

    return heapq.merge(*(of_class(lost, rate) for lost, rate in rates.items()))


def read_trace(path: Path) -> list[Failure]:
    """Read failures from a CSV file: the time since the start, such as ``12h`` or a number of seconds, and the loss
    class, ``process`` if it is missing. A first line of names is skipped. Raises ConfigError."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected lines such as 12h,node") from error
    found: list[Failure] = []
    for number, line in enumerate(lines, 1):
        text, _, name = (part.strip().strip('"') for part in line.partition(","))
        if not text or (number == 1 and not text[:1].isdigit()):
            continue
        try:
            at_s, lost = parse_duration(text), LossClass(name or "process")
        except ValueError as error:
            raise ConfigError(
                f"{path}:{number}: {line!r} is no failure; expected a time since the start, and process, node or site: "
                "12h,node"
            ) from error
        if found and at_s < found[-1][0]:
            raise ConfigError(
                f"{path}:{number}: {text} is before the line above, {format_duration(found[-1][0])}; expected times "
                "since the start, ascending: sort the lines by time"
            )
        found.append((at_s, lost))
    if not found:
        raise ConfigError(f"{path}: there is no failure; expected lines such as 12h,node")
    return found
