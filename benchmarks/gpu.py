"""What saves cost on a GPU: the host's time, the bus, the training beside it, and a stall that spare memory shortens.

A model of billions of parameters in bf16 with fp32 moments, and host memory as the only tier: what a disk takes is told
by other parts. References copy as many bytes by large copies that follow each other at once, with nothing around them.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import tierfall
from benchmarks.accelerator import Accelerator, Cuda
from benchmarks.bare import Buffer, give_back_freed
from benchmarks.figures import Results, over_rounds, ratio
from benchmarks.hooks import HookClock
from benchmarks.large import LargeWorkload, fingerprint, shape_of
from benchmarks.plan import Plan
from benchmarks.rounds import Contender, Figures, run_rounds
from benchmarks.workload import bytes_of

HOST, SPARE = "host", "spare"
TRAINING_STEPS = 2
COPY_BYTES = 1 << 30
"""Of each of the references' copies: far more than any cache holds."""
HOST_TARGET_MS = 2.0
BUS_TARGET = 1 / 0.9
STEP_TARGET_PERCENT = 1.0
STALL_TARGET = 1.2
OUTLAST = 1.25
PAIRS_A_ROUND = 3
ROOM_BYTES = 512
"""In the slab, for each piece of the state: it begins at a multiple of this."""
SPARE_BYTES = 1 << 30
"""Of the device's memory, that a slab leaves free."""

MEMCPY, CAPTURED, AT_ONCE = "gpu.memcpy", "gpu.captured", "gpu.at once"
PLAIN, SAVED = "gpu.steps/without", "gpu.steps/saved"
THERE, SHELTERED = "gpu.copy there", "gpu.slab"


class Gpu:
    """One large state, the references' memory, and what is found."""

    def __init__(
        self, plan: Plan, say: Callable[[str], None], results: Results, accelerator: Accelerator
    ) -> None:
        self._plan = plan
        self._say = say
        self._results = results
        self._accelerator = accelerator
        say(f"gpu: a model of {plan.parameters / 1e9:g} billion parameters, and host memory")
        self._work = LargeWorkload(shape_of(plan.parameters), device=accelerator.device)
        self._work.train(TRAINING_STEPS)
        tensors = self._work.tensors()
        self._bytes = bytes_of(tensors)
        self._sources = torch.ones(
            min(COPY_BYTES, self._bytes), dtype=torch.uint8, device=accelerator.device
        )
        self._targets = torch.zeros_like(self._sources)
        self._buffer = Buffer([self._sources], touched=True)  # locked for as long as it is held
        self._step = 0
        self._last: tierfall.SaveHandle | None = None
        results.facts.update(
            gpu_parameters=self._work.shape.parameters,
            gpu_state_bytes=self._bytes,
            gpu_tensors=len(tensors),
            gpu_batches=1,
        )

    def run(self) -> None:
        with self._opened("plain") as (ckpt, clock):
            self._saves(ckpt, clock)
            self._steps(ckpt)
            self._check(ckpt)
        self._slab()

    # What both sides do ------------------------------------------------------------------------------

    @contextmanager
    def _opened(
        self, name: str, slab_bytes: int = 0
    ) -> Iterator[tuple[tierfall.Checkpointer, HookClock]]:
        """A Checkpointer that has saved once, which blocks, and the clock around its step hook."""
        tiers: list[dict[str, Any]] = [
            {"name": HOST, "kind": "host", "folder": str(self._plan.memory / f"gpu-{name}")}
        ]
        if slab_bytes:
            tiers.insert(0, {"name": SPARE, "kind": "device", "capacity": slab_bytes})
        clock = HookClock(self._accelerator)
        try:
            with tierfall.open({"run": "bench", "max_wait": "1m", "tiers": tiers}) as ckpt:
                clock.end_here()
                self._last = None
                self._save(ckpt, lazy=False)
                yield ckpt, clock
        finally:
            clock.close()

    def _save(self, ckpt: tierfall.Checkpointer, *, lazy: bool = True) -> None:
        self._step += 1
        self._last = ckpt.save(self._step, self._work.state)
        if (error := self._last.exception()) is not None:  # no room in host memory, say
            raise error
        if self._last.stats.lazy is not lazy:
            raise AssertionError("the save captured blocking; a lazy one was to be measured")

    def _settle(self) -> None:
        """Have new values in the state, nothing of an earlier save under way, and the device idle."""
        self._finish()
        self._work.update()
        self._accelerator.synchronize()

    def _finish(self) -> None:
        if self._last is not None:
            self._last.captured()

    def _rounds(self, title: str, contenders: list[Contender], *, times: int = 1) -> None:
        self._say(title)
        plan = self._plan
        found = run_rounds(contenders, rounds=times * plan.rounds, seed=plan.seed, say=self._say)
        self._results.samples.update(found)

    def _ratio(self, name: str, subject: str, reference: str, target: float | None = None) -> None:
        samples = self._results.samples
        found = ratio(name, samples, subject=subject, reference=reference, target=target)
        self._results.ratios.append(found)

    def _milliseconds(self, name: str, series: str) -> None:
        values = [seconds * 1e3 for seconds in self._results.samples[series]]
        self._results.findings.append(over_rounds(name, values, unit="ms", target=HOST_TARGET_MS))

    def _copy(self, targets: torch.Tensor) -> None:
        """Copy as many bytes as the state has; returns when all is enqueued."""
        left = self._bytes
        while left:
            size = min(left, self._sources.numel())
            targets[:size].copy_(self._sources[:size], non_blocking=True)
            left -= size

    # Without a slab ----------------------------------------------------------------------------------

    def _saves(self, ckpt: tierfall.Checkpointer, clock: HookClock) -> None:
        def memcpy() -> None:
            self._copy(self._buffer.tensors[0])
            self._accelerator.synchronize()

        def capture() -> Figures:
            began = time.perf_counter()
            self._save(ckpt)
            ckpt.wait_captured()
            read = time.perf_counter() - began
            self._finish()
            return {"read": read}

        self._rounds(
            "gpu: saves, and page-locked copies of as many bytes",
            [
                Contender(name=MEMCPY, before=self._accelerator.synchronize, timed=memcpy),
                Contender(name=CAPTURED, before=self._settle, timed=capture),
                self._at_once(AT_ONCE, ckpt, clock),
            ],
        )
        self._milliseconds("save() keeps the host", f"{AT_ONCE}/save")
        self._milliseconds("the step hook keeps the host", f"{AT_ONCE}/hook")
        self._ratio("read off the device, over memcpy", f"{CAPTURED}/read", MEMCPY, BUS_TARGET)
        self._ratio("captured and sealed, over memcpy", CAPTURED, MEMCPY)
        self._ratio("stall of an update at once", f"{AT_ONCE}/stall", MEMCPY)

    def _at_once(self, name: str, ckpt: tierfall.Checkpointer, clock: HookClock) -> Contender:
        """A save, and right behind it the update, while the device is busy with what came before.

        Next to nothing of the state was copied by then. The host runs ahead of the device, so that whatever waits for
        the device shows in its times.
        """

        def race() -> Figures:
            self._work.backward()
            began = time.perf_counter()
            self._save(ckpt)
            saved = time.perf_counter() - began
            self._work.update()
            self._accelerator.synchronize()
            return {"save": saved, "hook": clock.host_s, "stall": clock.device_s()}

        return Contender(name=name, before=self._settle, timed=race, after=self._finish)

    # Training ----------------------------------------------------------------------------------------

    def _steps(self, ckpt: tierfall.Checkpointer) -> None:
        """Two steps, with a save between them and without; the second one's batches outlast the copy."""
        batches = self._batches()
        self._results.facts["gpu_batches"] = batches

        def steps(between: Callable[[], None]) -> None:
            for number in range(2):
                if number:
                    between()
                for _ in range(batches):
                    self._work.backward()
                self._work.update()
            self._accelerator.synchronize()

        self._rounds(
            f"gpu: two steps of {batches} batches each, with a save between them and without",
            [
                Contender(name=PLAIN, before=self._settle, timed=lambda: steps(lambda: None)),
                Contender(
                    name=SAVED,
                    before=self._settle,
                    timed=lambda: steps(lambda: self._save(ckpt)),
                    after=self._finish,
                ),
            ],
            times=PAIRS_A_ROUND,
        )
        pairs = zip(self._results.samples[SAVED], self._results.samples[PLAIN], strict=True)
        self._results.findings.append(
            over_rounds(
                "a step with a save takes longer by",
                [added_percent(saved, plain) for saved, plain in pairs],
                unit="%",
                target=STEP_TARGET_PERCENT,
            )
        )

    def _batches(self) -> int:
        """Count the batches whose forward and backward outlast the reading of the state by a quarter."""
        self._accelerator.synchronize()
        took = []
        for _ in range(3):
            began = time.perf_counter()
            self._work.backward()
            self._accelerator.synchronize()
            took.append(time.perf_counter() - began)
        read = statistics.median(self._results.samples[f"{CAPTURED}/read"])
        return batches_for(read, statistics.median(took))

    # With a slab -------------------------------------------------------------------------------------

    def _slab(self) -> None:
        """The same update at once, with spare memory that holds the state."""
        slab_bytes = self._slab_bytes()
        free = self._accelerator.free_bytes()
        if free < slab_bytes + SPARE_BYTES:
            line = (
                f"gpu: left out: the device tier, which takes {slab_bytes / 2**30:.1f} GiB beside the training, of "
                f"{free / 2**30:.1f} GiB that are free (fewer --parameters)"
            )
            self._leave_out(line)
            return

        def copy_there() -> Figures:
            first = self._accelerator.mark()
            self._copy(self._targets)
            last = self._accelerator.mark()
            return {"device": self._accelerator.seconds(first, last)}

        with self._opened("slab", slab_bytes) as (ckpt, clock):
            if self._accelerator.free_bytes() > free - slab_bytes:
                raise AssertionError("the device tier was not taken; it was to be measured")
            self._rounds(
                "gpu: updates at once with a slab, and copies of as many bytes on the device",
                [
                    Contender(name=THERE, before=self._accelerator.synchronize, timed=copy_there),
                    self._at_once(SHELTERED, ckpt, clock),
                ],
            )
            self._check(ckpt)
        self._milliseconds("the step hook, with a slab", f"{SHELTERED}/hook")
        self._ratio(
            "stall with a slab, over a copy", f"{SHELTERED}/stall", f"{THERE}/device", STALL_TARGET
        )

    def _slab_bytes(self) -> int:
        """Room for the whole state: it is copied in fewer pieces than it has tensors and MiB."""
        pieces = self._results.facts["gpu_tensors"] + (self._bytes >> 20)
        return int(self._bytes + ROOM_BYTES * pieces)

    def _leave_out(self, line: str) -> None:
        self._say(line)
        self._results.facts.setdefault("gpu_left_out", []).append(line)

    def _check(self, ckpt: tierfall.Checkpointer) -> None:
        """Save, update at once, restore, and compare: nothing is timed that did not work."""
        self._settle()
        wanted = fingerprint(self._work.tensors())
        self._save(ckpt)
        self._work.update()
        self._finish()
        self._work.spoil()
        ckpt.restore(self._work.state, step=self._step)
        if not all(map(torch.equal, fingerprint(self._work.tensors()), wanted)):
            raise AssertionError("what was restored is not what was saved")


def added_percent(saved_s: float, plain_s: float) -> float:
    """Return what a save added to the one of two steps that it shared, in percent of a step."""
    return 100 * (saved_s - plain_s) / (plain_s / 2)


def batches_for(read_s: float, batch_s: float) -> int:
    """Return how many batches of forward and backward outlast so long a copy by a quarter."""
    return max(1, math.ceil(OUTLAST * read_s / batch_s))


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
        Gpu(plan, say, results, Cuda()).run()
    finally:
        gc.unfreeze()
