"""Checkpointers that save the state of the part: with host memory alone, a folder behind it, or a slab before it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

import tierfall
from benchmarks.chain import FILE, HOST
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.hooks import HookClock
from benchmarks.gpu.large import fingerprint
from tierfall.errors import StepError

PREPARATION_S = 60.0
"""How long the preparation of host memory is waited for."""
POLL_S = 0.05


class Saving:
    """A Checkpointer that saves the state, and the clock around its step hook."""

    def __init__(self, ckpt: tierfall.Checkpointer, bench: Bench, clock: HookClock) -> None:
        self.ckpt = ckpt
        self.clock = clock
        self._bench = bench
        self._step = 0
        self._last: tierfall.SaveHandle | None = None

    def save(self, *, lazy: bool = True) -> tierfall.SaveHandle:
        """Save; raises CapacityError if there is no room in host memory, and AssertionError if it is not ``lazy``."""
        self._step += 1
        self._last = handle = self.ckpt.save(self._step, self._bench.work.state)
        if (error := handle.exception()) is not None:
            raise error
        if handle.stats.lazy is not lazy:
            raise AssertionError("the save captured blocking; a lazy one was to be measured")
        return handle

    def settle(self) -> None:
        """Have new values in the state, nothing of an earlier save under way, and the device idle."""
        self.finish()
        self._bench.work.update()
        self._bench.accelerator.synchronize()

    def finish(self) -> None:
        """Wait until the last save is sealed."""
        if self._last is not None:
            self._last.captured()

    @property
    def is_prepared(self) -> bool:
        """Whether all host memory is touched and locked."""
        return self.ckpt._opened.session.host.is_prepared

    def wait_prepared(self) -> None:
        """Wait until it is, for as long as that may take."""
        until_s = time.monotonic() + preparation_s(self._bench)
        while not self.is_prepared and time.monotonic() < until_s:
            time.sleep(POLL_S)

    def forget(self) -> None:
        """Delete every checkpoint, so that nothing of them is written to disk any further."""
        self.finish()
        for checkpoint in self.ckpt.checkpoints():
            with suppress(StepError):  # retention was first
                self.ckpt.delete(checkpoint.step, even_the_last=True)
        self.ckpt.drain()

    def check(self) -> None:
        """Save, update at once, restore, and compare: nothing is timed that did not work."""
        work = self._bench.work
        self.settle()
        wanted = fingerprint(work.tensors())
        self.save()
        work.update()
        self.finish()
        work.spoil()
        self.restore()
        if not all(map(torch.equal, fingerprint(work.tensors()), wanted)):
            raise AssertionError("what was restored is not what was saved")

    def restore(self) -> None:
        """Restore what was saved last; it is in host memory."""
        report = self.ckpt.restore(self._bench.work.state, step=self._step)
        if report is None or [source.tier for source in report.sources] != [HOST]:
            raise AssertionError(f"a restore from host memory was to be measured: {report}")


def preparation_s(bench: Bench) -> float:
    """How long the preparation of host memory is waited for, with the time that is left."""
    return min(PREPARATION_S, bench.left_s)


@contextmanager
def opened(
    bench: Bench, name: str, *, images: int, slab_bytes: int = 0, on_disk: bool = False
) -> Iterator[Saving]:
    """A Checkpointer with host memory for so many images, which has saved once: that save captures blocking.

    Its memory and its files are removed at the end.
    """
    memory, folder = bench.plan.memory / f"gpu-{name}", bench.plan.folder / f"gpu-{name}"
    capacity = bench.capacity_bytes(images)
    tiers: list[dict[str, Any]] = [
        {"name": HOST, "kind": "host", "folder": str(memory), "capacity": capacity}
    ]
    if slab_bytes:
        tiers.insert(0, {"name": "spare", "kind": "device", "capacity": slab_bytes})
    if on_disk:
        rules = {"retain": {"last": 1}, "when_full": "supersede"}
        tiers.append({"name": FILE, "kind": "file", "path": str(folder), "shared": False, **rules})
    clock = HookClock(bench.accelerator)
    began_s = time.perf_counter()
    try:
        with tierfall.open({"run": "bench", "max_wait": "1m", "tiers": tiers}) as ckpt:
            clock.end_here()
            saving = Saving(ckpt, bench, clock)
            saving.save(lazy=False)
            bench.open_s_per_byte = (time.perf_counter() - began_s) / capacity
            yield saving
    finally:
        clock.close()
        for place in (memory, folder):
            shutil.rmtree(place, ignore_errors=True)
