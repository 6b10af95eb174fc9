"""A trainer that gets Ctrl-C at random moments of save, step and restore, and goes on each time: TIMES SEED CONFIG.

Whatever an interrupt cut short, the next save must arrive on the file tier.
"""

from __future__ import annotations

import faulthandler
import json
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

import tierfall

PATIENCE_S = 20.0


def interrupted(work: Callable[[], Any], after_s: float) -> bool:
    """Do some work with an interrupt under way; say whether it came."""
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        try:
            work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    except RuntimeError as error:  # what Python's own thread pool makes of one at a bad moment
        if "unlocked lock" not in str(error):
            raise
        return True
    return False


def main(times: int, seed: int, config: dict[str, Any]) -> None:
    faulthandler.dump_traceback_later(times + 3 * PATIENCE_S, exit=True)
    draw = random.Random(seed)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    hits = step = 0
    with tierfall.open(config) as ckpt:
        while hits < times:

            def train(step: int) -> None:
                handle = ckpt.save(step, state)
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                if draw.random() < 0.3:
                    handle.wait(timeout=PATIENCE_S)

            def look() -> None:
                ckpt.restore(state, only=["model"])

            step += 1
            work = look if step > 5 and draw.random() < 0.2 else lambda step=step: train(step)
            hits += interrupted(work, draw.uniform(1e-5, 6e-3))
            step += 1
            try:
                if work is look:  # the state may be half filled, and is not saved then
                    look()
                ckpt.save(step, state).wait(timeout=PATIENCE_S)
            except TimeoutError:
                faulthandler.dump_traceback(all_threads=True)
                raise


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
