"""What a tier is asked to retain in a history, drawn by a seed, and what that means: rules of the tests' own."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from tests.rules import best, every_period, every_steps, last, tagged, young
from tierfall.core.format.records import Commit
from tierfall.core.types.policy import Rule
from tierfall.core.types.values import CheckpointId

METRIC = "loss"
TAGS = ("release", "paper")


def metrics_of(id: CheckpointId) -> dict[str, float]:
    """The metrics that a checkpoint is saved with: few values, so that some are equal; some have none, or nan."""
    draw = random.Random(f"metrics {id}")
    if draw.random() < 0.1:
        return {}
    return {METRIC: math.nan if draw.random() < 0.1 else float(draw.randint(0, 4))}


def tags_of(id: CheckpointId) -> tuple[str, ...]:
    draw = random.Random(f"tags {id}")
    return tuple(tag for tag in TAGS if draw.random() < 0.15)


@dataclass(frozen=True, kw_only=True)
class Wants:
    """What one tier is to keep; all None: everything."""

    last: int | None = None
    every: int | None = None
    period_s: float | None = None
    best: tuple[str, int] | None = None
    for_s: float | None = None
    tags: bool = False

    def rules(self) -> tuple[Rule, ...]:
        found = []
        if self.last is not None:
            found.append(last(self.last))
        if self.every is not None:
            found.append(every_steps(self.every))
        if self.period_s is not None:
            found.append(every_period(self.period_s))
        if self.best is not None:
            found.append(best(METRIC, mode=self.best[0], count=self.best[1]))
        if self.for_s is not None:
            found.append(young(self.for_s))
        if self.tags:
            found.append(tagged())
        return tuple(found)

    def wanted(self, held: Mapping[CheckpointId, Commit], now_s: float) -> set[CheckpointId]:
        """What of these is to stay by any rule."""
        return {
            id
            for id in held
            if (self.last is not None and sum(other > id for other in held) < self.last)
            or (self.every is not None and self._is_first_after(id, held))
            or (self.period_s is not None and self._is_first_of_period(id, held))
            or (self.best is not None and self._is_best(id, held))
            or (self.for_s is not None and now_s - held[id].wall_time_s < self.for_s - 0.01)
            or (self.tags and held[id].tags)
        }

    def _is_first_after(self, id: CheckpointId, held: Mapping[CheckpointId, Commit]) -> bool:
        assert self.every is not None
        begin = id.step - id.step % self.every
        counts = begin > 0 or id.step == 0
        return counts and not any(begin <= other.step and other < id for other in held)

    def _is_first_of_period(self, id: CheckpointId, held: Mapping[CheckpointId, Commit]) -> bool:
        assert self.period_s is not None
        begin_s = held[id].wall_time_s // self.period_s * self.period_s
        return not any(begin_s <= held[other].wall_time_s and other < id for other in held)

    def _is_best(self, id: CheckpointId, held: Mapping[CheckpointId, Commit]) -> bool:
        assert self.best is not None
        mode, count = self.best
        mine = held[id].metrics.get(METRIC, math.nan)
        if math.isnan(mine):
            return False
        others = {o: commit.metrics.get(METRIC, math.nan) for o, commit in held.items() if o != id}
        better = [
            o
            for o, value in others.items()
            if (value < mine if mode == "min" else value > mine) or (value == mine and o > id)
        ]
        return len(better) < count


def draw_wants(draw: random.Random) -> Wants:
    """Mostly one or two rules, sometimes all."""

    def drawn(chance: float) -> bool:
        return draw.random() < chance

    return Wants(
        last=draw.choice((1, 1, 2, 3)) if drawn(0.5) else None,
        every=draw.choice((2, 5, 10)) if drawn(0.25) else None,
        period_s=draw.choice((5.0, 30.0)) if drawn(0.15) else None,
        best=(draw.choice(("min", "max")), draw.choice((1, 2))) if drawn(0.3) else None,
        for_s=draw.choice((3.0, 20.0, 100.0)) if drawn(0.2) else None,
        tags=drawn(0.2),
    )
