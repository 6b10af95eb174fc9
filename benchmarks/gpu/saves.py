"""What one save into host memory costs: the host's time, the bus, and an update right behind it.

A slab of spare device memory shortens the stall of that update.
"""

from __future__ import annotations

import time

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.saving import Saving, opened
from benchmarks.rounds import Contender, Figures

HOST_TARGET_MS = 2.0
BUS_TARGET = 1 / 0.9
STALL_TARGET = 1.2
ROOM_BYTES = 512
"""In the slab, for each piece of the state: it begins at a multiple of this."""
ROUND_S = 10
"""What a round of these takes at most."""

MEMCPY, CAPTURED, AT_ONCE = "gpu.memcpy to host", "gpu.captured", "gpu.at once"
THERE, SHELTERED = "gpu.copy there", "gpu.slab"


def measure(bench: Bench, saving: Saving) -> None:
    """Measure saves without a slab."""

    def memcpy() -> None:
        bench.bus.to_host()
        bench.accelerator.synchronize()

    def capture() -> Figures:
        began = time.perf_counter()
        saving.save()
        saving.ckpt.wait_captured()
        read = time.perf_counter() - began
        saving.finish()
        return {"read": read}

    measured = bench.rounds(
        "saves, and page-locked copies of as many bytes",
        [
            Contender(name=MEMCPY, before=bench.accelerator.synchronize, timed=memcpy),
            Contender(name=CAPTURED, before=saving.settle, timed=capture),
            at_once(AT_ONCE, bench, saving),
        ],
    )
    if not measured:
        return
    _milliseconds(bench, "save() keeps the host", f"{AT_ONCE}/save")
    _milliseconds(bench, "the step hook keeps the host", f"{AT_ONCE}/hook")
    bench.ratio("read off the device, over memcpy", f"{CAPTURED}/read", MEMCPY, BUS_TARGET)
    bench.ratio("captured and sealed, over memcpy", CAPTURED, MEMCPY)
    bench.ratio("stall of an update at once", f"{AT_ONCE}/stall", MEMCPY)


def at_once(name: str, bench: Bench, saving: Saving) -> Contender:
    """A save, and right behind it the update, while the device is busy with what came before.

    Next to nothing of the state was copied by then. The host runs ahead of the device, so that whatever waits for the
    device shows in its times.
    """

    def race() -> Figures:
        bench.work.backward()
        began = time.perf_counter()
        saving.save()
        saved = time.perf_counter() - began
        bench.work.update()
        bench.accelerator.synchronize()
        return {"save": saved, "hook": saving.clock.host_s, "stall": saving.clock.device_s()}

    return Contender(name=name, before=saving.settle, timed=race, after=saving.finish)


def measure_slab(bench: Bench) -> None:
    """Measure the same update at once, with spare memory that holds the state."""
    slab_bytes = _slab_bytes(bench)
    allowed = bench.allows(
        "the device tier", images=2, device_bytes=slab_bytes, seconds=2 * ROUND_S
    )
    if not allowed:
        return
    free = bench.accelerator.free_bytes()

    def copy_there() -> Figures:
        first = bench.accelerator.mark()
        bench.bus.on_device()
        last = bench.accelerator.mark()
        return {"device": bench.accelerator.seconds(first, last)}

    with opened(bench, "slab", images=2, slab_bytes=slab_bytes) as saving:
        if bench.accelerator.free_bytes() > free - slab_bytes:
            raise AssertionError("the device tier was not taken; it was to be measured")
        saving.wait_prepared()
        measured = bench.rounds(
            "updates at once with a slab, and copies of as many bytes on the device",
            [
                Contender(name=THERE, before=bench.accelerator.synchronize, timed=copy_there),
                at_once(SHELTERED, bench, saving),
            ],
        )
        saving.check()
    if measured:
        _milliseconds(bench, "the step hook, with a slab", f"{SHELTERED}/hook")
        bench.ratio(
            "stall with a slab, over a copy", f"{SHELTERED}/stall", f"{THERE}/device", STALL_TARGET
        )


def _slab_bytes(bench: Bench) -> int:
    """Room for the whole state: it is copied in fewer pieces than it has tensors and MiB."""
    pieces = int(bench.results.facts["gpu_tensors"]) + (bench.bytes >> 20)
    return bench.bytes + ROOM_BYTES * pieces


def _milliseconds(bench: Bench, name: str, series: str) -> None:
    values = [seconds * 1e3 for seconds in bench.results.samples[series]]
    bench.finding(name, values, unit="ms", target=HOST_TARGET_MS)
