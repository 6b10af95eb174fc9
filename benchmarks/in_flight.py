"""Saves in flight: how often a training can save to a tier that is slow, with host memory for one, two or four images.

A step is a pause of a fixed length, so that what is added to it is the saves' alone. First saves follow each other as
closely as they can, which tells how long one takes then, from its return until it is durable (T_w); then they come as
often as PCcheck's bound f >= T_w / (N q t) allows for a slow-down of q, and half as far apart.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

import tierfall
from benchmarks.chain import FILE, configuration
from benchmarks.figures import Results
from benchmarks.plan import Plan
from benchmarks.rounds import Measured, find_each
from tierfall.policies.formulas import pccheck_steps

IN_FLIGHT = (1, 2, 4)
STEP_S = 0.02
TOLERATED = 1.05
IMAGE_BYTES = 16 << 20
WRITE_S = 0.3
"""What the tier needs for an image alone."""
SAVES = 16


def measure(plan: Plan, say: Callable[[str], None], results: Results) -> None:
    """Measure the slow-down of training for each number of images that host memory holds."""
    say(f"in_flight: images of {IMAGE_BYTES >> 20} MiB to a tier that takes {WRITE_S:g} s for each")
    kinds = {f"{images} in flight": partial(_one, plan, images) for images in IN_FLIGHT}
    results.findings += find_each(kinds, rounds=plan.rounds)


def _one(plan: Plan, images: int, number: int) -> Measured:
    place = f"in-flight-{images}-{number}"
    config = configuration(
        plan.memory / place,
        plan.folder / place,
        capacity=int((images + 0.5) * IMAGE_BYTES),
        bandwidth=int(IMAGE_BYTES / WRITE_S),
        retain={"last": 1},
    )
    state = {"weights": torch.randn(IMAGE_BYTES // 4 - 4096)}
    with tierfall.open(config) as ckpt:
        training = _Training(ckpt, state)
        training.run(saves=2, every=1)  # the first also takes the memory
        _, durable_s = training.run(saves=SAVES, every=1)
        bound = pccheck_steps(durable_s, images, TOLERATED, STEP_S)
        at_bound, _ = training.run(saves=SAVES, every=bound)
        below, _ = training.run(saves=SAVES, every=max(1, bound // 2))
    shutil.rmtree(plan.folder / place, ignore_errors=True)
    return {
        ("T_w", "s"): durable_s,
        ("bound by the formula", "steps"): float(bound),
        ("training at the bound takes", "x"): at_bound,
        ("training at half the bound takes", "x"): below,
    }


class _Training:
    """A loop whose steps take ``STEP_S`` where nothing is saved."""

    def __init__(self, ckpt: tierfall.Checkpointer, state: dict[str, torch.Tensor]) -> None:
        self._ckpt = ckpt
        self._state = state
        self._step = 0

    def run(self, *, saves: int, every: int) -> tuple[float, float]:
        """Train until so many were saved, ``every`` steps apart; return what a step takes over one without saves, and
        the median of the seconds from a save's return until it is durable, both of the second half: the first fills
        memory."""
        handles, began, half = [], 0.0, saves // 2
        for number in range(saves):
            if number == half:
                began = time.perf_counter()
            for _ in range(every):
                time.sleep(STEP_S)
                self._ckpt.wait_captured()
                self._step += 1
            handles.append(self._ckpt.save(self._step, self._state))
        steps = (saves - half) * every
        slower = (time.perf_counter() - began) / steps / self._bare_s()
        for handle in handles:
            handle.wait(FILE)
        durable = [one.stats.durable_s[FILE] - one.stats.blocked_s for one in handles[half:]]
        return slower, statistics.median(durable)

    def _bare_s(self) -> float:
        """What a step takes here and now without saves."""
        began = time.perf_counter()
        for _ in range(10):
            time.sleep(STEP_S)
            self._ckpt.wait_captured()
        return (time.perf_counter() - began) / 10
