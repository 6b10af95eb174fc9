"""tierfall, and the raw limit: a copy into a ready buffer that one thread writes around the page cache."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import tierfall
from benchmarks import bare
from benchmarks.chain import FILE, HOST, configuration
from benchmarks.peers.system import Place, System
from benchmarks.workload import Workload

TIER, AGAIN = "tier", "again"


class Tierfall(System):
    key = "tierfall"
    name = "tierfall"

    def __init__(self, work: Workload, place: Place) -> None:
        super().__init__(work, place)
        self._step = 0
        self._handles: list[tierfall.SaveHandle] = []
        self._ckpt = tierfall.open(keeping_one(place, TIER, "saver"))

    def save(self) -> None:
        self._step += 1
        self._handles.append(self._ckpt.save(self._step, self.work.state))

    def wait(self) -> None:
        """For every save since the last wait: none may be skipped, and all but the first are lazy."""
        for handle in self._handles:
            handle.wait(FILE)
            if not handle.stats.lazy and handle.step > 1:
                raise AssertionError("the save captured blocking; a lazy one was to be measured")
        self._handles.clear()

    def under_way(self) -> bool:
        """Say, without waiting, whether the newest save is neither durable nor given up; ``wait`` raises why it was."""
        handle = self._handles[-1]
        return not handle.done(FILE) and handle.exception() is None

    def load(self) -> None:
        """Warm: from host memory."""
        self._restore(self._ckpt, HOST)

    def begin_cold(self) -> None:
        """A run has one Checkpointer in a process, so the next start finds the same files in a folder of its own.

        Retention may be deleting an older checkpoint meanwhile: the newest alone is copied."""
        again, memory = self.place.folder / AGAIN, self.place.memory / AGAIN
        for folder in (again, memory):
            shutil.rmtree(folder, ignore_errors=True)
        newest = f"step-{self._step:08d}-"

        def older(folder: str, names: list[str]) -> list[str]:
            return [
                each for each in names if each.startswith("step-") and not each.startswith(newest)
            ]

        shutil.copytree(self.place.folder / TIER, again, ignore=older, copy_function=os.link)
        super().begin_cold()

    def load_cold(self) -> None:
        """By a start of its own, whose ``open`` counts."""
        with tierfall.open(keeping_one(self.place, AGAIN, AGAIN)) as ckpt:
            self._restore(ckpt, FILE)

    def _restore(self, ckpt: tierfall.Checkpointer, tier: str) -> None:
        report = ckpt.restore(self.work.state)
        if report is None or [source.tier for source in report.sources] != [tier]:
            raise AssertionError(f"a restore from tier {tier} alone was to be measured: {report}")

    def forget(self) -> None:
        if self._step:
            shutil.rmtree(self.place.folder / AGAIN, ignore_errors=True)
            self._ckpt.delete(self._step, even_the_last=True)
            self._ckpt.drain()

    def close(self) -> None:
        self._ckpt.close()


def keeping_one(place: Place, tier: str, memory: str) -> dict[str, Any]:
    """Host memory, and a folder that keeps the newest checkpoint."""
    return configuration(place.memory / memory, place.folder / tier, retain={"last": 1})


class Bare(System):
    """No names, no checks, no second copy: what a careful program could do at best with one buffer."""

    key = "bare"
    name = "bare copy, O_DIRECT"

    def __init__(self, work: Workload, place: Place) -> None:
        super().__init__(work, place)
        self._tensors = list(self.state.values())
        self._buffer = bare.Buffer(self._tensors, touched=True)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bare-writer")
        self._written: Future[None] | None = None

    def save(self) -> None:
        self.wait()
        self._buffer.take(self._tensors)
        self.target.mkdir(exist_ok=True)
        self._written = self._thread.submit(self._write)

    def _write(self) -> None:
        path = self.target / "state.bin"
        bare.write_file(path, self._buffer.view, direct=self.place.direct, threads=1)

    def wait(self) -> None:
        if self._written is not None:
            self._written.result()

    def load(self) -> None:
        """Warm: the buffer still holds it."""
        self._buffer.give(self._tensors)

    def load_cold(self) -> None:
        path = self.target / "state.bin"
        bare.read_file(path, self._buffer.whole, direct=self.place.direct)
        self._buffer.give(self._tensors)

    def close(self) -> None:
        self._thread.shutdown()
