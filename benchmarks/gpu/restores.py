"""What a restore from host memory to the device takes: in the process that saved, and after a kill."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from functools import partial

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.killed import Task, running
from benchmarks.gpu.large import digest
from benchmarks.gpu.saving import Saving
from benchmarks.rounds import Contender, Figures

RESTORE_TARGET = 1 / 0.7
OPEN_TARGET_S = 0.5
START_S = 15
"""What a process takes until it has its model, at most."""
STARTS = 2
MEMCPY, HERE, KILLED = "gpu.memcpy to device", "gpu.restore", "gpu.after a kill/process"


def measure_here(bench: Bench, saving: Saving) -> None:
    """Restore in the process that saved."""
    saving.settle()
    wanted = digest(bench.work.tensors())
    saving.save()
    saving.finish()

    def memcpy() -> None:
        bench.bus.to_device()
        bench.accelerator.synchronize()

    def restore() -> None:
        saving.restore()
        bench.accelerator.synchronize()

    def check() -> None:
        if digest(bench.work.tensors()) != wanted:
            raise AssertionError("what was restored is not what was saved")

    measured = bench.rounds(
        "restores from host memory, and page-locked copies of as many bytes",
        [
            Contender(name=MEMCPY, before=bench.accelerator.synchronize, timed=memcpy),
            Contender(name=HERE, before=bench.work.spoil, timed=restore, after=check),
        ],
    )
    if measured:
        bench.ratio("restore, over memcpy", HERE, MEMCPY, RESTORE_TARGET)


def measure_after_kill(bench: Bench) -> None:
    """Save in a process of its own, kill it, and restore in the next, which is killed too."""
    folder = bench.plan.memory / "gpu-killed"
    task = partial(
        Task,
        shape=asdict(bench.work.shape),
        device=bench.accelerator.device,
        folder=str(folder),
        capacity_bytes=bench.capacity_bytes(2),
        state_bytes=bench.bytes,
    )
    gradients_bytes = bench.bytes / 3
    allowed = bench.allows(
        "open and restore after a kill",
        images=2,
        device_bytes=bench.bytes + gradients_bytes,
        seconds=2 * START_S,
    )
    if not allowed:
        return
    with running(task(saves=True)) as saved:
        bench.say("gpu: a process has saved into host memory, and is killed")

    def restore() -> Figures:
        with running(task(saves=False)) as found:
            if found.pop("digest") != saved["digest"]:
                raise AssertionError("what was restored after a kill is not what was saved")
            return found

    try:
        measured = bench.rounds(
            "starts after a kill, which open and restore",
            [Contender(name=KILLED, timed=restore)],
            rounds=STARTS,
            warms_up=False,
            seconds=START_S,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if measured:
        opened_s = bench.results.samples[f"{KILLED}/open"]
        bench.finding("open after a kill", opened_s, unit="s", target=OPEN_TARGET_S)
        bench.ratio(
            "restore after a kill, over memcpy",
            f"{KILLED}/restore",
            f"{KILLED}/memcpy",
            RESTORE_TARGET,
        )
