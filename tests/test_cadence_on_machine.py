"""The cadence of a real run: saving takes the share of the time that it is configured to take.

Steps and saves take what the test says, on a clock of its own, so that what else the machine does counts for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import tierfall
from tests.steps import state_of
from tierfall.run.checkpointer import Checkpointer
from tierfall.run.saver import Saver

MakeConfig = Callable[..., dict[str, Any]]
STEP_S = 0.03
POINT = 0.01


class Run:
    """A loop whose saves take ``cost_s``."""

    def __init__(self, config: dict[str, Any], patch: pytest.MonkeyPatch, cost_s: float) -> None:
        self.cost_s = cost_s
        self.step = 0
        self.state = state_of(0)
        self._now_s = 0.0
        real = Saver.save

        def save(*args: Any, **words: Any) -> Any:
            self._now_s += self.cost_s
            return real(*args, **words)

        patch.setattr(Saver, "save", save)
        clock = SimpleNamespace(monotonic=lambda: self._now_s, time=time.time)
        for module in ("cadence", "open_run", "saver"):
            patch.setattr(f"tierfall.run.{module}.time", clock)
        self.ckpt: Checkpointer = tierfall.open(config)

    def until_saved(self, saves: int) -> tuple[float, int]:
        """Train for so many saves more; return the share that they took of the rest, and how many steps it were."""
        began, began_s = self.step, self._now_s
        while saves:
            self._now_s += STEP_S
            self.step += 1
            saves -= self.ckpt.maybe_save(self.step, self.state) is not None
        steps = self.step - began
        return (self._now_s - began_s) / (steps * STEP_S) - 1, steps


def test_saving_takes_its_share_within_a_point_and_follows_a_cost_that_doubles(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, cost_s = 0.1, 0.15
    run = Run({**make_config(), "interval": {"overhead": f"{budget:.1%}"}}, monkeypatch, cost_s)
    with run.ckpt as ckpt:
        run.until_saved(3)
        share, steps = run.until_saved(5)
        assert share == pytest.approx(budget, abs=POINT)
        cadence = ckpt.statistics().cadence
        assert cadence is not None
        assert cadence.bound == "overhead", cadence.reason
        run.cost_s = 2 * cost_s
        run.until_saved(3)
        again, more = run.until_saved(5)
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
            for batch in range(40):
                began_s = time.thread_time()  # what others do on this machine is not its time
                for step in range(1000):
                    ckpt.maybe_save(batch * 1000 + step, state)
                best_s = min(best_s, (time.thread_time() - began_s) / 1000)
                if best_s < 20e-6:
                    break
        print(f"{interval}: {best_s * 1e6:.2f} us")
        assert best_s < 20e-6
