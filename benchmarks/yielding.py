"""Yielding to training: how much longer steps take beside a flush, on cores that training saturates, with ``yield`` and
without.

The tier packs with zstd at a level that keeps cores busy, so that the flush takes from training what it can get. A save
is made each time the one before is durable and some steps have passed without one, which is what steps are held
against. The first saves, in which the pace is found, are left out.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import tierfall
from benchmarks.chain import FILE, configuration
from benchmarks.figures import Results
from benchmarks.plan import Plan
from benchmarks.rounds import Measured, find_each
from tierfall.core.runtime.pinned import synchronize

IMAGE_BYTES = 256 << 20
LEVEL = 9
WIDTH = 768
BATCH = 256
IDLE_STEPS = 20
FIRST_SAVES = 4
SAVES = 3
EXCUSED = 2
"""The step of a save, and the one whose update waits for the capture, belong to neither kind."""


def measure(plan: Plan, say: Callable[[str], None], results: Results) -> None:
    """Measure what steps take beside a flush, over steps without one, and how long the flush takes."""
    say(
        f"yielding: images of {IMAGE_BYTES >> 20} MiB, packed beside a training that takes all cores"
    )
    kinds = {"without yield": partial(_one, plan, False), "with yield": partial(_one, plan, True)}
    results.findings += find_each(kinds, rounds=plan.rounds)


def _one(plan: Plan, yields: bool, number: int) -> Measured:
    place = f"yielding-{yields}-{number}"
    config = configuration(
        plan.memory / place,
        plan.folder / place,
        compress={"codec": "zstd", "level": LEVEL},
        flush={"yield": yields},
        retain={"last": 1},
    )
    with tierfall.open(config) as ckpt:
        training = Training(ckpt, FILE, state_bytes=IMAGE_BYTES)
        training.run(FIRST_SAVES)
        idle_s, busy_s, durable_s = training.run(SAVES)
    shutil.rmtree(plan.folder / place, ignore_errors=True)
    return {
        ("steps beside a flush take", "x"): statistics.median(busy_s) / statistics.median(idle_s),
        ("a flush takes", "s"): statistics.median(durable_s),
    }


class Training:
    """A loop of real steps, whose state is mostly of bytes that pack badly."""

    def __init__(
        self,
        ckpt: tierfall.Checkpointer,
        tier: str,
        *,
        state_bytes: int,
        rank: int = 0,
        width: int = WIDTH,
        batch: int = BATCH,
        idle_steps: int = IDLE_STEPS,
        device: str = "cpu",
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """Every rank has the same model, and a state of its own beside it. ``idle_steps`` are the steps between the end
        of one copy and the next save. ``agree`` is called after each step, with whether this process sees the copy
        done, and returns whether all ranks do."""
        torch.manual_seed(0)
        self._ckpt = ckpt
        self._tier = tier
        self._agree = agree
        self._idle_steps = idle_steps
        self._model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4)
        self._batch = torch.randn(batch, width, device=device)
        rest = torch.randn(state_bytes // 4, device=device)
        self._state = {"model": self._model, f"rest-{rank}": rest}
        self._step = 0
        self._handle: tierfall.SaveHandle | None = None
        self._is_done = False
        self._last_s = time.perf_counter()

    def run(self, saves: int) -> tuple[list[float], list[float], list[float]]:
        """Save so many times; return the seconds of steps without a flush, of those beside one, and from each save to
        where it was durable."""
        idle_s: list[float] = []
        busy_s: list[float] = []
        durable_s: list[float] = []
        for _ in range(saves):
            self._train_one()
            idle_s += [self._train_one() for _ in range(self._idle_steps)]
            self._handle = handle = self._ckpt.save(self._step, self._state)
            for _ in range(EXCUSED):
                self._train_one()
            while not self._is_done:
                took_s = self._train_one()
                if not self._is_done:
                    busy_s.append(took_s)
            handle.wait(self._tier)
            durable_s.append(handle.stats.durable_s[self._tier])
            self._handle = None
        return idle_s, busy_s, durable_s

    def _train_one(self) -> float:
        """Make a step; return the seconds since the one before."""
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()
        self._step += 1
        synchronize()
        self._is_done = self._agree(self._handle is not None and self._handle.done(self._tier))
        last_s, self._last_s = self._last_s, time.perf_counter()
        return self._last_s - last_s
