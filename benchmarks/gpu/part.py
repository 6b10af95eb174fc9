"""The part ``gpu``: its rows, those first that tell the most in the least time.

Each row is printed once it is measured. What there is no time or no room for is left out, with a line.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from benchmarks.bare import give_back_freed
from benchmarks.figures import Results
from benchmarks.gpu import one_save, restores, saves, steps
from benchmarks.gpu.accelerator import Cuda
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.saving import opened
from benchmarks.plan import Plan

IMAGES_WITH_DISK = 3
"""One that is written to disk, the newest, and one that is captured: saves then wait for no disk."""


def measure(plan: Plan, say: Callable[[str], None], results: Results) -> None:
    """Measure the part ``gpu`` of a plan; on the CPU, say that it is left out."""
    if plan.device == "cpu":
        line = "gpu: left out, since it needs a CUDA device and --device cuda"
        say(line)
        results.facts["gpu_left_out"] = [line]
        return
    gc.collect()
    give_back_freed()
    gc.freeze()
    try:
        run(Bench(plan, say, results, Cuda()))
    finally:
        gc.unfreeze()


def run(bench: Bench) -> None:
    measure_host(bench)
    restores.measure_after_kill(bench)
    measure_disk(bench)
    saves.measure_slab(bench)


def measure_host(bench: Bench) -> None:
    """Measure with host memory for two images as the only tier."""
    if not bench.allows("saves into host memory", images=2):
        return
    with opened(bench, "host", images=2) as saving:
        steps.measure_preparation(bench, saving)
        saves.measure(bench, saving)
        steps.measure_runs(bench, saving, where="host")
        saving.check()
        restores.measure_here(bench, saving)


def measure_disk(bench: Bench) -> None:
    """Measure with host memory and a folder, which is given the newest image whenever it has taken one."""
    images = IMAGES_WITH_DISK
    allowed = bench.allows(
        "saves to disk, by tierfall and others",
        images=images,
        disk_bytes=images * bench.bytes,
        seconds=steps.round_s(bench),
    )
    if not allowed:
        return
    with opened(bench, "disk", images=images, on_disk=True) as saving:
        saving.forget()
        saving.wait_prepared()
        steps.measure_runs(bench, saving, where="host and disk")
        one_save.measure(bench, saving)
