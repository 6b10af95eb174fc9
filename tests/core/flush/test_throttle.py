"""A flush yields to training, and stays within a share of its tier's rate; on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.simulation.throttled import Throttled
from tests.simulation.world import IMAGE, file_rules
from tierfall.core.flush.throttle import Throttle
from tierfall.core.types.values import TierKind

STEP_S = 1.0
RATE = IMAGE / 10.0
Slowed = Callable[[float], float]


class Trained:
    """A training whose steps take longer while a flush runs: by ``slowed`` of the share of the tier's rate it takes."""

    def __init__(
        self, slowed: Slowed, *, noise: float = 0.0, kind: TierKind = TierKind.FILE, **members: Any
    ) -> None:
        members = {"yields": True, **members}
        rules = [replace(file_rules("store", shared=True, **members), kind=kind)]
        self.world = Throttled(rules, bytes_per_s={"store": RATE}, memory_images=12)
        self.slowed = slowed
        self.draw = random.Random(1)
        self.noise = noise
        self.step = 0
        self.seen: list[float] = []

    @property
    def pacing(self) -> Throttle:
        return self.world.coordinator.throttle

    def train(self, steps: int, *, save_every: int) -> None:
        for _ in range(steps):
            self.step += 1
            if self.step % save_every == 0:
                self.world.save_soon(self.step)
            began = self.pacing.flushing
            pace = self.world.paces.get("store")
            share = 1.0 if pace is None else min(1.0, pace / RATE)
            longer = self.slowed(share) if began[0] else 0.0
            seconds = STEP_S * (1.0 + longer) * self.draw.gauss(1.0, self.noise)
            self.world.go_on(seconds)
            self.pacing.on_step(seconds, began)
            self.seen.append(self.pacing.shares.get("store", 1.0))


def test_a_flush_that_lengthens_the_steps_is_slowed_until_it_does_not() -> None:
    trained = Trained(lambda share: 0.2 * share)
    trained.train(600, save_every=60)
    settled = trained.seen[300:]
    assert max(settled) <= 0.35, "a third of its rate lengthens steps by 7 %"
    assert min(settled) >= 0.1
    assert sum(a != b for a, b in pairwise(settled)) < 30, "it swings"
    assert trained.world.steps_on("store")[:8] == list(range(60, 481, 60))


def test_a_flush_never_yields_so_much_that_its_tier_falls_behind() -> None:
    trained = Trained(lambda share: 0.5)
    trained.train(600, save_every=20)  # a copy takes ten seconds, of the thirty between two
    assert min(trained.seen) == pytest.approx(1.1 / 3, abs=0.03)
    assert trained.world.coordinator.backlog.behind["store"] == 0.0
    trained.world.go_on(60.0)
    assert trained.world.coordinator.owed_copies() == ()


def slowed_run() -> Trained:
    trained = Trained(lambda share: 0.5)
    while trained.pacing.shares["store"] > 0.3:
        trained.train(1, save_every=60)
        assert trained.step < 2000, "it is never slowed"
    return trained


def test_when_training_stands_still_a_flush_yields_to_nobody() -> None:
    trained = slowed_run()
    trained.world.save(10_000)
    trained.world.go_on(4.0)
    assert trained.world.paces["store"] is not None
    trained.world.go_on(5.0)
    assert trained.pacing.shares["store"] == 1.0
    assert trained.world.paces["store"] is None


def test_a_share_of_what_was_measured_is_kept_to_and_does_not_shrink() -> None:
    trained = Trained(lambda share: 0.0, yields=False, bandwidth_share=0.5)
    trained.train(300, save_every=30)
    assert trained.world.paces["store"] == pytest.approx(RATE / 2, rel=0.05)
    rates = trained.world.coordinator.rates
    assert rates.write_bytes_per_s("store") == pytest.approx(RATE, rel=0.05)
    assert rates.delivered_bytes_per_s("store") == pytest.approx(RATE / 2, rel=0.05)
