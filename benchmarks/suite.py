"""What is measured: tierfall's saves and restores beside their references, over one state and in one process.

Who comes first in a round is shuffled; what a restore left in the state is compared with what was saved, so that
nothing is timed that did not work.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tierfall
from benchmarks import bare
from benchmarks.bare import Buffer
from benchmarks.chain import FILE, HOST, configuration
from benchmarks.figures import Results, ratio
from benchmarks.plan import Plan
from benchmarks.rounds import Contender, Figures, run_rounds
from benchmarks.workload import Shape, Workload, bytes_of, shape_for
from tierfall.core.runtime.pinned import synchronize

DURABLE_TARGET = 1.0
BLOCKED_TARGET = 0.02
COLD_TARGET = 1.1
WARM_TARGET = 1.9
HOST_TARGET = 1.1
TRAINING_STEPS = 3


class Suite:
    """One state, one buffer of the references, and what was found so far."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self.results = Results()
        self._shape: Shape = shape_for(plan.size_bytes)
        say(f"building a GPT and training it for {TRAINING_STEPS} steps")
        self._work = Workload(self._shape, device=plan.device)
        self._work.train(TRAINING_STEPS)
        self._tensors = self._work.tensors()
        self._buffer = Buffer(self._tensors, touched=True)
        self._direct = bare.direct_works(plan.folder, plan.file_system)
        self._on_gpu = plan.device != "cpu"
        self._step = 0
        self._threads = torch.get_num_threads()
        self.results.facts.update(
            state_bytes=bytes_of(self._tensors),
            tensors=len(self._tensors),
            parameters=self._shape.parameters,
        )

    def run(self) -> Results:
        """Save, restore from memory while the saver lives, then restore from the disk alone."""
        only = self._plan.only
        ckpt = tierfall.open(configuration(self._plan.memory / "saver", self._plan.folder / "tier"))
        with ckpt:
            self._first_save(ckpt)
            if "durable" in only:
                self._durable(ckpt)
            if "host" in only:
                self._host(ckpt)
            direct = ckpt.statistics().direct_io[FILE]
            self.results.direct = {"reference": self._direct, "tierfall": direct}
        if "cold" in only:
            self._cold()
        if "warm" in only:
            self._warm()
        return self.results

    def _first_save(self, ckpt: tierfall.Checkpointer) -> None:
        """The save that allocates host memory and captures blocking: told, and no part of any ratio."""
        began = time.perf_counter()
        handle = ckpt.save(self._step, self._work.state)
        returned = time.perf_counter() - began
        handle.wait(FILE)
        self.results.facts["first_save_s"] = time.perf_counter() - began
        self.results.facts["first_save_blocked_s"] = returned
        self._buffer.take(self._tensors)

    def _rounds(self, title: str, contenders: list[Contender]) -> None:
        self._say(title)
        plan = self._plan
        found = run_rounds(contenders, rounds=plan.rounds, seed=plan.seed, say=self._say)
        self.results.samples.update(found)

    def _ratio(self, name: str, subject: str, reference: str, target: float | None = None) -> None:
        found = ratio(
            name, self.results.samples, subject=subject, reference=reference, target=target
        )
        self.results.ratios.append(found)

    # Saving ------------------------------------------------------------------------------------------

    def _durable(self, ckpt: tierfall.Checkpointer) -> None:
        path = self._plan.folder / "reference.bin"

        def write_bare() -> Figures:
            began = time.perf_counter()
            self._buffer.take(self._tensors)
            copied = time.perf_counter() - began
            bare.write_file(path, self._buffer.view, direct=self._direct)
            return {"copy": copied}

        def make_room() -> None:
            self._work.update()
            ckpt.delete(self._step, even_the_last=True)
            ckpt.drain()
            self._step += 1

        def save() -> Figures:
            began = time.perf_counter()
            handle = ckpt.save(self._step, self._work.state)
            blocked = time.perf_counter() - began
            handle.wait(FILE)
            stats = handle.stats
            if not stats.lazy or stats.captured_s is None:
                raise AssertionError("the save captured blocking; a lazy one was to be measured")
            return {"blocked": blocked, "captured": stats.captured_s}

        self._rounds(
            "durable: save to committed on the file tier, and a copy with a write",
            [
                Contender(name="durable.reference", timed=write_bare, after=path.unlink),
                Contender(name="durable.tierfall", before=make_room, timed=save),
            ],
        )
        self._buffer.take(self._tensors)
        copy = "durable.reference/copy"
        self._ratio("durable on the file tier", *_pair("durable"), DURABLE_TARGET)
        target = None if self._on_gpu else BLOCKED_TARGET  # a share of a copy by the processor
        self._ratio("save() blocks, lazily", "durable.tierfall/blocked", copy, target)
        self._ratio("captured in host memory", "durable.tierfall/captured", copy)

    # Restoring ---------------------------------------------------------------------------------------

    def _host(self, ckpt: tierfall.Checkpointer) -> None:
        fresh = _Fresh(self._shape, self._plan.device, self._buffer)

        def check_and_copy() -> Figures:
            bare.hash_all(self._buffer.view, self._threads)
            self._buffer.give(self._tensors)
            return {}

        def check_and_copy_fresh() -> Figures:
            bare.hash_all(self._buffer.view, self._threads)
            fresh.hold(torch.empty_like(tensor) for tensor in self._tensors)
            self._buffer.give(fresh.held)
            return {}

        def restore(work: Workload) -> Figures:
            self._restore(ckpt, work, HOST)
            return {}

        self._rounds(
            "host: restore from memory, and XXH3-128 with a copy",
            [
                self._contender("host.reference", check_and_copy),
                self._contender("host.tierfall", lambda: restore(self._work)),
                fresh.contender("host.fresh.reference", check_and_copy_fresh, builds=False),
                fresh.contender("host.fresh.tierfall", lambda: restore(fresh.work), builds=True),
            ],
        )
        self._ratio("restore from the host tier", *_pair("host"), HOST_TARGET)
        self._ratio("first start, from the host tier", *_pair("host.fresh"))

    def _contender(self, name: str, timed: Callable[[], Figures]) -> Contender:
        """What fills the state that is there, and has to leave it as it was saved."""
        return Contender(
            name=name, before=self._work.spoil, timed=timed, after=lambda: self._check(self._work)
        )

    def _check(self, work: Workload) -> None:
        if not self._buffer.holds(work.tensors()):
            raise AssertionError("what was restored is not what was saved")

    def _restore(self, ckpt: tierfall.Checkpointer, work: Workload, tier: str) -> None:
        report = ckpt.restore(work.state)
        if report is None or [source.tier for source in report.sources] != [tier]:
            raise AssertionError(f"a restore from tier {tier} alone was to be measured: {report}")
        synchronize()

    def _image(self) -> Path:
        return next((self._plan.folder / "tier" / "bench").glob("step-*/*.safetensors"))

    def _cold(self) -> None:
        image = self._image()
        start = _Start(self._plan, lambda: bare.drop_cached(image))
        into = Buffer(self._tensors, touched=True)
        into_huge = Buffer(self._tensors, touched=True, huge=True)
        fresh = _Fresh(self._shape, self._plan.device, self._buffer)

        def read(name: str, into: Callable[[], Buffer]) -> Contender:
            held: list[Buffer] = []  # giving memory back takes time, which is not a read's

            def timed() -> Figures:
                held.append(into())
                bare.read_file(image, held[0].whole, direct=self._direct)
                return {}

            return Contender(name=name, before=start.prepare, timed=timed, after=held.clear)

        fresh_restore = fresh.contender(
            "cold.fresh.tierfall",
            lambda: self._restore_start(start, fresh.work),
            builds=True,
            around=start,
        )
        self._rounds(
            "cold: restore from the file tier, and a read",
            [
                read("cold.reference", lambda: into),
                read("cold.reference.huge", lambda: into_huge),
                self._start_contender("cold.tierfall", start),
                read("cold.fresh.reference", lambda: Buffer(self._tensors, touched=False)),
                fresh_restore,
            ],
        )
        self._ratio("cold restore from the file tier", *_pair("cold"), COLD_TARGET)
        self._ratio("the same, over huge pages", "cold.tierfall", "cold.reference.huge")
        self._ratio("first start, from the file tier", *_pair("cold.fresh"))

    def _warm(self) -> None:
        image = self._image()
        start = _Start(self._plan, lambda: bare.keep_cached(image))
        into = Buffer(self._tensors, touched=True)

        def copy() -> Figures:
            if self._on_gpu:  # in the host's memory, as out of the page cache, and to the device
                into.take(self._buffer.tensors)
                into.give(self._tensors)
            else:
                self._buffer.give(self._tensors)
            return {}

        def read() -> Figures:
            bare.read_file(image, into.whole, direct=False)
            return {}

        self._rounds(
            "warm: restore from the file tier out of the page cache, and a copy",
            [
                self._contender("warm.reference", copy),
                Contender(name="warm.reference.read", before=start.prepare, timed=read),
                self._start_contender("warm.tierfall", start),
            ],
        )
        self._ratio("warm restore from the file tier", *_pair("warm"), WARM_TARGET)
        self._ratio("the same, over a cached read", "warm.tierfall", "warm.reference.read")

    def _start_contender(self, name: str, start: _Start) -> Contender:
        """A restore into the state that is there, by a start that finds nothing in memory."""

        def begin() -> None:
            self._work.spoil()
            start.open()

        def end() -> None:
            start.close()
            self._check(self._work)

        return Contender(
            name=name,
            before=begin,
            timed=lambda: self._restore_start(start, self._work),
            after=end,
        )

    def _restore_start(self, start: _Start, work: Workload) -> Figures:
        self._restore(start.ckpt, work, FILE)
        return {"open": start.seconds}


class _Start:
    """A start that finds the disk alone; ``prepare`` puts the image into the page cache, or takes it out."""

    def __init__(self, plan: Plan, prepare: Callable[[], None]) -> None:
        self._plan = plan
        self.prepare = prepare
        self.seconds = 0.0
        self.ckpt: tierfall.Checkpointer

    def open(self) -> None:
        shutil.rmtree(self._plan.memory / "start", ignore_errors=True)
        self.prepare()
        began = time.perf_counter()
        self.ckpt = tierfall.open(
            configuration(self._plan.memory / "start", self._plan.folder / "tier")
        )
        self.seconds = time.perf_counter() - began

    def close(self) -> None:
        self.ckpt.close()


class _Fresh:
    """A model just built, without optimizer state, in memory that nobody has touched."""

    def __init__(self, shape: Shape, device: str, saved: Buffer) -> None:
        self._shape = shape
        self._device = device
        self._saved = saved
        self.work: Workload
        self.held: list[torch.Tensor] = []

    def hold(self, tensors: Any) -> None:
        self.held = list(tensors)

    def contender(
        self,
        name: str,
        timed: Callable[[], Figures],
        *,
        builds: bool,
        around: _Start | None = None,
    ) -> Contender:
        def before() -> None:
            bare.give_back_freed()
            if builds:
                self.work = Workload(self._shape, device=self._device, seed=1)
            if around is not None:
                around.open()

        def after() -> None:
            if around is not None:
                around.close()
            if not self._saved.holds(self.work.tensors() if builds else self.held):
                raise AssertionError("what was restored is not what was saved")
            self.held = []
            if builds:
                del self.work

        return Contender(name=name, before=before, timed=timed, after=after)


def _pair(name: str) -> tuple[str, str]:
    return f"{name}.tierfall", f"{name}.reference"
