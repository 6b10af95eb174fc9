"""A flush yields to training, and stays within a share of its tier's rate; on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
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


def test_copies_to_peers_begin_at_the_lowest_rate_and_get_faster_if_steps_do_not_get_longer() -> (
    None
):
    for slowed, most in ((0.0, 1.0), (0.5, 1.1 / 3)):
        trained = Trained(lambda share, s=slowed: s * share, kind=TierKind.PEER)
        trained.train(600, save_every=30)
        lowered = next(at for at, share in enumerate(trained.seen) if share < 1.0)
        assert trained.seen[lowered] == pytest.approx(1.1 / 3, abs=0.05)
        assert lowered < 65, "once its rate is known, and how often a save comes"
        assert max(trained.seen[200:]) <= most + 0.01
        if slowed == 0.0:
            assert trained.seen[-1] > 0.9
        trained.world.go_on(60.0)
        assert trained.world.coordinator.owed_copies() == ()


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


# The clocks ------------------------------------------------------------------------------------------


def config_of(folder: Path, **settings: Any) -> dict[str, Any]:
    host = {"name": "host", "kind": "host", "folder": str(folder / "memory")}
    nvme = {"name": "nvme", "kind": "file", "path": str(folder / "nvme"), **settings}
    return {"run": "run", "tiers": [host, nvme]}


def test_steps_of_a_torch_optimizer_are_reported_and_a_pace_reaches_the_tier(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tierfall.open(config_of(tmp_path, bandwidth="80MB/s")) as ckpt:
        for _ in range(5):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
        coordinator = ckpt._session.coordinator
        ckpt._session.call(lambda: coordinator.throttle.adjust(0.0))
        assert coordinator.throttle._steps >= 4
        store = ckpt._session.stores["nvme"]
        assert store._pace is not None
        coordinator.throttle._set_pace("nvme", 1e6)
        assert store._pace.bytes_per_second == 1e6
        coordinator.throttle._set_pace("nvme", 1e9)
        assert store._pace.bytes_per_second == 80e6, "never more than what was set"
        coordinator.throttle._set_pace("nvme", None)
        assert store._pace.bytes_per_second == 80e6
