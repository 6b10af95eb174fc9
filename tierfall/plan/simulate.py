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
from tierfall.core.types.text import hint_at
from tierfall.core.types.units import format_duration, parse_duration
from tierfall.core.types.values import LOSS_CLASSES, LossClass
from tierfall.plan.answers import Source

WEEK_S = 7 * 86_400.0
FAILURES_MAX = 1_000_000
Failure = tuple[float, LossClass]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of ``total_s``: ``trained_s`` is in the state at the end, the rest was ``lost_s``, by its cause.
    ``restores`` are by source; ``nothing``: no copy was left."""

    total_s: float
    trained_s: float = 0.0
    lost_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    failures: Counter[str] = field(default_factory=Counter)
    restores: Counter[str] = field(default_factory=Counter)

    @property
    def goodput(self) -> float:
        return self.trained_s / self.total_s


class Training:
    """A training that saves each ``every_s``, which lengthens it by ``cost_s``, and that restarts in ``restart_s``. It
    has a position, in seconds of training, and each source has that of its newest copy."""

    def __init__(
        self, sources: Sequence[Source], *, every_s: float, cost_s: float, restart_s: float
    ) -> None:
        self._sources, self._every_s, self._cost_s = sources, every_s, cost_s
        self._restart_s = restart_s
        self._position_s, self._saves = 0.0, 0
        self._held = {source.name: 0.0 for source in sources}

    def live(self, failures: Iterable[Failure], total_s: float) -> Outcome:
        """Train for ``total_s``; ``failures`` are times since the start, ascending."""
        out = Outcome(total_s=total_s)
        now_s = restore_s = restart_s = 0.0
        ends: Iterable[tuple[float, LossClass | None]] = ((total_s, None),)
        for at_s, lost in chain(takewhile(lambda each: each[0] < total_s, failures), ends):
            restarted_s = min(restart_s, at_s - now_s)  # another failure ends it early
            restored_s = min(restore_s, at_s - now_s - restarted_s)
            out.lost_s["restarts"] += restarted_s
            out.lost_s["restores"] += restored_s
            out.lost_s["saving"] += self._train(at_s - now_s - restarted_s - restored_s)
            if lost is not None:
                now_s, restart_s = at_s, self._restart_s
                restore_s = self._fail(lost, out)
        out.trained_s = self._position_s
        return out

    def _train(self, elapsed_s: float) -> float:
        """Train and save for so long; return what the saves cost."""
        cycle_s = self._every_s + self._cost_s
        whole = int(elapsed_s // cycle_s)
        rest_s = elapsed_s - whole * cycle_s
        for source in self._sources:
            copies = int(max(0.0, elapsed_s + self._cost_s - source.durable_s) // cycle_s)
            newest = self._saves + copies
            ordinal = newest - newest % source.saves
            if ordinal > self._saves:
                ahead_s = (ordinal - self._saves) * self._every_s
                self._held[source.name] = self._position_s + ahead_s
        self._saves += whole
        self._position_s += whole * self._every_s + min(rest_s, self._every_s)
        return whole * self._cost_s + max(0.0, rest_s - self._every_s)

    def _fail(self, lost: LossClass, out: Outcome) -> float:
        """Lose what does not survive, and go back to the newest copy that does; return how long its restore takes."""
        position_s, seconds, name = 0.0, 0.0, "nothing"
        for source in self._sources:
            if not source.survives.covers(lost):
                self._held[source.name] = 0.0
            elif self._held[source.name] > position_s:
                position_s, seconds = self._held[source.name], source.restore_after(lost)
                name = source.name
        out.failures[lost] += 1
        out.restores[name] += 1
        out.lost_s[f"work lost to a {lost}"] += self._position_s - position_s
        self._position_s = position_s
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
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {why}; expected lines such as 12h,node") from error
    found: list[Failure] = []
    for number, line in enumerate(lines, 1):
        text, _, name = (part.strip().strip('"') for part in line.partition(","))
        if not text or (number == 1 and not text[:1].isdigit()):
            continue
        where, lost = f"{path}:{number}", name or "process"
        if lost not in LOSS_CLASSES:
            known = f"process, node or site{hint_at(lost, LOSS_CLASSES)}"
            raise ConfigError(f"{where}: {lost!r} is no loss class; expected {known}")
        try:
            at_s = parse_duration(text)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if found and at_s < found[-1][0]:
            raise ConfigError(
                f"{where}: {text} is before the line above, {format_duration(found[-1][0])}; expected times since the "
                "start, ascending: sort the lines by time"
            )
        found.append((at_s, LossClass(lost)))
    if not found:
        raise ConfigError(f"{path}: there is no failure; expected lines such as 12h,node")
    return found
