"""The cadence in real time: saving takes the share of the time that it is configured to take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import tierfall
from tests.steps import state_of
from tierfall.run.checkpointer import Checkpointer
from tierfall.run.saver import Saver

MakeConfig = Callable[..., dict[str, Any]]
STEP_S = 0.03
POINT = 0.01
QUIET_TRIES = 4


class Run:
    """A loop whose saves sleep for ``cost_s`` beyond what they take."""

    def __init__(self, ckpt: Checkpointer, patch: pytest.MonkeyPatch, cost_s: float) -> None:
        self.ckpt = ckpt
        self.cost_s = cost_s
        self.step = 0
        self.state = state_of(0)
        real = Saver.save

        def save(*args: Any, **words: Any) -> Any:
            time.sleep(self.cost_s)
            return real(*args, **words)

        patch.setattr(Saver, "save", save)

    def share(self, saves: int, budget: float) -> tuple[float, int]:
        """``until_saved`` of a quiet time: whatever else the machine does counts as saving, and passes."""
        for _ in range(QUIET_TRIES):
            share, steps = self.until_saved(saves)
            if abs(share - budget) < POINT:
                break
        return share, steps

    def until_saved(self, saves: int) -> tuple[float, int]:
        """Train for so many saves more; return the share that they took of the rest, and how many steps it were."""
        train_s = save_s = 0.0
        began = self.step
        while saves:
            began_s = time.perf_counter()
            time.sleep(STEP_S)
            trained_s = time.perf_counter()
            self.step += 1
            saves -= self.ckpt.maybe_save(self.step, self.state) is not None
            train_s += trained_s - began_s
            save_s += time.perf_counter() - trained_s
        return save_s / train_s, self.step - began


@pytest.mark.parametrize(("budget", "cost_s"), [(0.05, 0.06), (0.1, 0.15)])
def test_saving_takes_its_share_within_a_point_and_follows_a_cost_that_doubles(
    budget: float, cost_s: float, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a save sleeps is much longer than what a busy machine adds to it, and so many saves are looked at that what
    it adds to one of them decides nothing."""
    config = {**make_config(), "interval": {"overhead": f"{budget:.1%}"}}
    with tierfall.open(config) as ckpt:
        run = Run(ckpt, monkeypatch, cost_s)
        run.until_saved(3)
        share, steps = run.share(5, budget)
        assert share == pytest.approx(budget, abs=POINT)
        cadence = ckpt.statistics().cadence
        assert cadence is not None
        assert cadence.bound == "overhead", cadence.reason
        run.cost_s = 2 * cost_s
        run.until_saved(3)
        again, more = run.share(5, budget)
        assert again == pytest.approx(budget, abs=POINT)
        assert 1.3 * steps < more
        print(f"budget {budget:.1%}: {share:.2%} by {steps / 5} steps, {again:.2%} by {more / 5}")


def test_a_step_that_is_not_saved_costs_microseconds(make_config: MakeConfig) -> None:
    for interval in ({"every": 10**9}, {"every": "10d"}, {"overhead": "0.0001%"}):
        with tierfall.open(
            {**make_config(run=f"r{len(interval)}"), "interval": {**interval, "at_end": False}}
        ) as ckpt:
            state = state_of(0)
            best_s = float("inf")
            for batch in range(20):
                began_s = time.perf_counter()
                for step in range(1000):
                    ckpt.maybe_save(batch * 1000 + step, state)
                best_s = min(best_s, (time.perf_counter() - began_s) / 1000)
        print(f"{interval}: {best_s * 1e6:.2f} us")
        assert best_s < 20e-6
