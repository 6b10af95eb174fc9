"""What one rank does whose job saves by a cadence: it trains in step with the others, and says what it saved."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

import tierfall
from tests.distributed import program


def train(folder: str, steps: int, signalled: int, at_step: int, **changes: Any) -> Any:
    """Train; rank ``signalled`` gets SIGUSR1 at a step."""
    dist.init_process_group("gloo")
    saved = []
    with tierfall.open(program.config(folder, **changes)) as ckpt:
        for step in range(1, steps + 1):
            time.sleep(0.004)
            gradient = torch.ones(1)
            dist.all_reduce(gradient)
            if signalled == program.RANK and step == at_step:
                os.kill(os.getpid(), signal.SIGUSR1)
            handle = ckpt.maybe_save(step, program.make_state(step))
            if handle is not None:
                saved.append(step)
        cadence = ckpt.statistics().cadence
        assert cadence is not None
        known = cadence.reason
    dist.destroy_process_group()
    return {"saved": saved, "reason": known}


if __name__ == "__main__":
    program.main(globals())
