"""The cadence of a real run: saving takes the share of the time that it is configured to take.

Steps and saves take what the test says, on a clock of its own, so that what else the machine does counts for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tierfall
from tests.steps import state_of

MakeConfig = Callable[..., dict[str, Any]]


def test_a_step_that_is_not_saved_costs_microseconds(make_config: MakeConfig) -> None:
    for interval in ({"every": 10**9}, {"every": "10d"}, {"overhead": "0.0001%"}):
        with tierfall.open(
            {**make_config(run=f"r{len(interval)}"), "interval": {**interval, "at_end": False}}
        ) as ckpt:
            state = state_of(0)
            best_s = float("inf")
            for batch in range(20):
                began_s = time.thread_time()  # what others do on this machine is not its time
                for step in range(1000):
                    ckpt.maybe_save(batch * 1000 + step, state)
                best_s = min(best_s, (time.thread_time() - began_s) / 1000)
        print(f"{interval}: {best_s * 1e6:.2f} us")
        assert best_s < 20e-6
