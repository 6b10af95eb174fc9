"""What saves add to training steps, and what the preparation of host memory in the background does.

A step has enough batches to take a quarter longer than reading the state over the bus.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.saving import Saving, preparation_s
from benchmarks.rounds import Contender

STEPS = 12
RUN_ROUNDS = 2
STEP_TARGET = 1.05
LONGEST_TARGET = 1.2
NONE = "none"
EVERY = {1: "every step", 5: "every fifth step"}


def series(where: str, what: str) -> str:
    """Name the series of runs that save ``what``, such as "every step", to the tiers ``where``."""
    return f"gpu.steps, {where}/{what}"


def round_s(bench: Bench) -> float:
    """What a round of runs takes at least."""
    return (1 + len(EVERY)) * STEPS * bench.step_s


def measure_preparation(bench: Bench, saving: Saving) -> None:
    """Train until host memory is prepared, right after the first save, and at least a run; no step saves."""
    bench.say("gpu: steps while host memory is prepared in the background")
    until_s = time.monotonic() + preparation_s(bench)
    steps_s: list[float] = []
    bench.accelerator.synchronize()
    while not (prepared := saving.is_prepared) or len(steps_s) < STEPS:
        if time.monotonic() > until_s:
            break
        began_s = time.perf_counter()
        bench.train_step()
        bench.accelerator.synchronize()
        steps_s.append(time.perf_counter() - began_s)
    if not prepared:
        bench.leave_out(f"steps beyond {len(steps_s)}, though host memory is not prepared yet")
    if not steps_s:
        return
    longest = max(steps_s) / statistics.median(steps_s)
    bench.results.samples[series("host", "preparing")] = steps_s
    bench.finding("longest step, memory being prepared", [longest], unit="x", target=LONGEST_TARGET)


def measure_runs(bench: Bench, saving: Saving, *, where: str) -> None:
    """Train with a save in each step, in every fifth, and without, each run from a quiet disk."""

    def train(every: int) -> None:
        for step in range(STEPS):
            if every and step % every == 0:
                saving.save()
            bench.train_step()
        bench.accelerator.synchronize()

    def contender(what: str, every: int) -> Contender:
        return Contender(
            name=series(where, what),
            before=saving.settle,
            timed=partial(train, every),
            after=saving.forget,
        )

    contenders = [contender(NONE, 0), *(contender(what, every) for every, what in EVERY.items())]
    measured = bench.rounds(
        f"{STEPS} steps of {bench.batches} batches, with saves to {where} and without",
        contenders,
        rounds=RUN_ROUNDS,
        warms_up=False,
        seconds=round_s(bench),
    )
    if measured:
        for what in EVERY.values():
            name = f"a save in {what}, {where}"
            bench.ratio(name, series(where, what), series(where, NONE), STEP_TARGET)
