"""One save to disk by tierfall, DCP and torch.save: how long training is held, and until the save is done.

Training is held for what a step that begins with the save takes longer. tierfall's save is done when it is committed on
the file tier, the others' when every file and folder is fsynced.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable

import tierfall
from benchmarks import bare
from benchmarks.chain import FILE
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.saving import Saving
from benchmarks.peers.dcp import DcpThread
from benchmarks.peers.files import TorchSave
from benchmarks.peers.measure import place_of
from benchmarks.peers.system import System
from benchmarks.rounds import Contender, Figures

OTHERS: dict[str, tuple[type[System], int]] = {
    "DCP async_save": (DcpThread, 1),
    "torch.save": (TorchSave, 0),
}
"""Each with the copies of the state that it has in memory: that of DCP is page-locked, and kept between saves."""
SERIAL_BYTES_PER_S = 1e9
"""How fast they write at most: on one thread or two."""
PROBE_BYTES = 256 << 20


def measure(bench: Bench, saving: Saving) -> None:
    """Measure a save by ``saving``, beside what a bare write takes, and one by each of the others."""
    direct = bare.direct_works(bench.plan.folder, bench.plan.file_system)
    rate = _disk_rate(bench, direct=direct)
    bench.finding("done: a bare write", [bench.bytes / rate], unit="s")
    usual_s = statistics.median(_step_s(bench) for _ in range(3))
    ours: list[tierfall.SaveHandle] = []
    if bench.has_time("a save by tierfall", bench.bytes / rate):
        saving.settle()
        _measure(
            bench,
            "tierfall",
            lambda: ours.append(saving.save()),
            lambda: ours[-1].wait(FILE),
            usual_s,
        )
        saving.forget()
    for name, (kind, copies) in OTHERS.items():
        seconds = bench.bytes / min(rate, SERIAL_BYTES_PER_S)
        what = f"a save by {name}"
        size = bench.bytes
        if bench.allows(what, memory_bytes=copies * size, disk_bytes=size, seconds=seconds):
            system = kind(bench.work, place_of(bench.plan, f"gpu-{kind.key}", direct=direct))
            try:
                system.take_memory()
                _measure(bench, name, system.save, system.wait, usual_s)
            finally:
                system.close()
                for folder in (system.place.folder, system.place.memory):
                    shutil.rmtree(folder)


def _measure(
    bench: Bench,
    name: str,
    save: Callable[[], None],
    wait: Callable[[], None],
    usual_s: float,
) -> None:
    def step() -> Figures:
        began_s = time.perf_counter()
        save()
        took_s = time.perf_counter() - began_s + _step_s(bench)
        wait()
        return {"held": max(0.0, took_s - usual_s)}

    series = f"gpu.one save, {name}"
    once = Contender(name=series, before=bench.accelerator.synchronize, timed=step)
    if bench.rounds(f"a save by {name}", [once], rounds=1, warms_up=False):
        samples = bench.results.samples
        bench.finding(f"training held: {name}", samples[f"{series}/held"], unit="s")
        bench.finding(f"done: {name}", samples[series], unit="s")


def _step_s(bench: Bench) -> float:
    began_s = time.perf_counter()
    bench.train_step()
    bench.accelerator.synchronize()
    return time.perf_counter() - began_s


def _disk_rate(bench: Bench, *, direct: bool) -> float:
    """Return how many bytes a second a bare write makes durable."""
    path, view = bench.plan.folder / "gpu-probe.bin", bench.bus.buffer.view[:PROBE_BYTES]
    began_s = time.perf_counter()
    bare.write_file(path, view, direct=direct)
    took_s = time.perf_counter() - began_s
    path.unlink()
    return view.nbytes / took_s
