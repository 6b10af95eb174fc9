"""What a commit, ``open`` and ``restore`` cost with many checkpoints on a tier: ``python -m benchmarks.many``.

The tier is an object store in memory, or a file tier, each request of which takes a given time. A listing of the store
has 1,000 rows a request; that of a file tier is a request for each folder. The checkpoints are one, saved, under the
names and records of all. The coordinator's CPU time is that of its thread.

A second table is of a run that went back to its first checkpoint, on a file tier: all that came after that is left
behind, and goes once the first commit that follows is there.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import tierfall
from tests.memory_backend import MemoryBackend
from tierfall.backends.posix.backend import PosixBackend, PosixWriter
from tierfall.backends.posix.folders import Entry
from tierfall.backends.wrappers import Wrapper
from tierfall.core.flush.coordinator import Coordinator
from tierfall.core.format.records import parse_commit
from tierfall.core.types import keys as names
from tierfall.core.types.backend import Backend, Publish, StoredObject, Traits, Writer
from tierfall.core.types.values import CheckpointId
from tierfall.setup import tiers

RUN = "many"
ROWS = 1000
SAVES = 3
HEADER = (
    "| tier | checkpoints | a request | `open` | requests | `restore` | requests | commit | requests "
    "| CPU of a commit |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
LEFT_HEADER = (
    "| left behind | until all are gone | requests | CPU, from `open` on |\n|---|---|---|---|"
)


class Medium(StrEnum):
    OBJECTS = "objects"
    FILES = "files"


class Requests:
    """Counts requests, each of which takes ``seconds``."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.made = 0
        self._lock = threading.Lock()

    def make(self, count: int = 1) -> None:
        for _ in range(count):
            with self._lock:
                self.made += 1
            if self.seconds:
                time.sleep(self.seconds)


class SlowStore(Wrapper):
    """A store whose every request takes its time."""

    def __init__(self, inner: Backend, requests: Requests) -> None:
        super().__init__(inner)
        self._requests = requests

    @property
    def traits(self) -> Traits:
        return replace(self._inner.traits, max_parallel=8)  # as of any object store

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> Writer:
        self._requests.make()
        return self._inner.create(key, length=length, length_max=length_max, publish=publish)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        self._requests.make()
        self._inner.read_into(key, offset, view)

    def stat(self, key: str) -> StoredObject:
        self._requests.make()
        return self._inner.stat(key)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        rows = list(self._inner.scan(prefix))
        self._requests.make(max(1, -(-len(rows) // ROWS)))
        return iter(rows)

    def delete(self, key: str) -> None:
        self._requests.make()
        self._inner.delete(key)

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        self._requests.make()
        return self._inner.delete_some(keys)

    def close(self) -> None:
        """It is opened more than once."""


class SlowFiles(PosixBackend):
    """A folder whose every call takes its time: one for each folder that is listed, too."""

    requests: Requests

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> PosixWriter:
        self.requests.make()
        return super().create(key, length=length, length_max=length_max, publish=publish)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        self.requests.make()
        super().read_into(key, offset, view)

    def stat(self, key: str) -> StoredObject:
        self.requests.make()
        return super().stat(key)

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        self.requests.make()
        return super().delete_some(keys)

    def sync(self, folder: str) -> None:
        self.requests.make()
        super().sync(folder)

    def _entries(self, prefix: str) -> list[Entry]:
        self.requests.make()
        return super()._entries(prefix)


_stores: dict[str, SlowStore] = {}


def _open(url: str, **words: Any) -> Backend:
    return _stores[url]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What something took: seconds, requests, and seconds of the coordinator's CPU time."""

    seconds: float
    requests: int
    cpu_s: float


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("benchmarks.many", description=__doc__)
    parser.add_argument("--counts", type=_numbers, default=(10, 100, 1000, 10000))
    parser.add_argument("--ms", type=_numbers, default=(0, 20, 60), help="each request takes")
    parser.add_argument("--left", type=_numbers, default=(500, 1000, 5000), help="left behind")
    parser.add_argument("--tiers", type=_media, default=tuple(Medium))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(HEADER)
    for medium, ms, count in product(options.tiers, options.ms, options.counts):
        costs = measure(count, ms / 1000, medium)
        cells = [medium.value, f"{count:,}", f"{ms} ms"]
        for name in ("open", "restore", "commit"):
            cells += [f"{costs[name].seconds:.2f} s", f"{costs[name].requests:,}"]
        print(f"| {' | '.join(cells)} | {costs['commit'].cpu_s * 1e3:.1f} ms |", flush=True)
    print(f"\n{LEFT_HEADER}")
    for count in options.left:
        cost = measure_left_behind(count)
        cells = [f"{count:,}", f"{cost.seconds:.1f} s", f"{cost.requests:,}", f"{cost.cpu_s:.2f} s"]
        print(f"| {' | '.join(cells)} |", flush=True)
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _media(text: str) -> tuple[Medium, ...]:
    return tuple(Medium(word) for word in text.split(","))


def measure(count: int, request_s: float, medium: Medium = Medium.OBJECTS) -> dict[str, Cost]:
    """Measure ``open``, ``restore`` and a commit (the cheapest of a few) with so many checkpoints on the tier."""
    with _run(medium, count, saved=[count]) as (config, requests), CoordinatorTime() as cpu:
        requests.seconds = request_s

        def cost(function: Callable[[], Any]) -> tuple[Any, Cost]:
            made, used_s, began_s = requests.made, cpu[0], time.monotonic()
            value = function()
            return value, Cost(
                seconds=time.monotonic() - began_s,
                requests=requests.made - made,
                cpu_s=cpu[0] - used_s,
            )

        ckpt, opened = cost(lambda: tierfall.open(config))
        with ckpt:
            ckpt.drain(600)
            _, restored = cost(lambda: ckpt.restore(_state()))
            ckpt.drain(600)

            def save(step: int) -> None:
                ckpt.save(step, _state(), block=True)
                ckpt.drain(600)

            steps = range(count + 1, count + 1 + SAVES)
            commits = [cost(partial(save, step))[1] for step in steps]
    cheapest = min(commits, key=lambda one: one.seconds)
    return {"open": opened, "restore": restored, "commit": cheapest}


def measure_left_behind(count: int) -> Cost:
    """Measure what it takes until all that was left behind on a file tier is gone after the commit of step 2: requests
    and seconds from that save on, CPU time from ``open`` on."""
    with (
        _run(Medium.FILES, count + 1, saved=[1, count + 1]) as (config, requests),
        CoordinatorTime() as cpu,
        tierfall.open(config) as ckpt,
    ):
        ckpt.restore(_state(), step=1)
        ckpt.drain(600)
        made, began_s = requests.made, time.monotonic()
        ckpt.save(2, _state(), block=True)
        ckpt.drain(600)
        left = [found.step for found in ckpt.checkpoints()]
        if left != [1, 2]:
            raise RuntimeError(f"expected that what was left behind is gone, found steps {left}")
        seconds = time.monotonic() - began_s
        return Cost(seconds=seconds, requests=requests.made - made, cpu_s=cpu[0])


@contextmanager
def _run(
    medium: Medium, count: int, *, saved: Sequence[int]
) -> Iterator[tuple[dict[str, Any], Requests]]:
    """Give the configuration of a run with so many checkpoints, of which these are ``saved``, and its requests."""
    folder, requests = Path(tempfile.mkdtemp(prefix="tierfall-many-")), Requests()
    try:
        with (
            patch.object(tiers, "PosixBackend", SlowFiles),
            patch.object(tiers, "open_backend", _open),
        ):
            tier, backend, put = _tier(medium, folder, requests)
            host_folder = str(folder / "host")
            host = {"name": "host", "kind": "host", "folder": host_folder, "capacity": "4MiB"}
            config = {"run": RUN, "tiers": [host, tier]}
            with tierfall.open(config) as ckpt:
                ckpt.restore(_state())
                for step in saved:
                    ckpt.save(step, _state(), block=True)
            others = [step for step in range(1, count) if step not in saved]
            fill(backend, put, others, like=count)
            yield config, requests
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _state() -> dict[str, torch.Tensor]:
    return {"x": torch.ones(1024)}


Put = Callable[[str, bytes], None]


def _tier(medium: Medium, folder: Path, requests: Requests) -> tuple[dict[str, str], Backend, Put]:
    """Return a tier's section, what reads its files at once, and what puts a file there at once."""
    if medium is Medium.OBJECTS:
        memory, url = MemoryBackend(), "s3://many"
        _stores[url] = SlowStore(memory, requests)

        def put(key: str, data: bytes) -> None:
            memory.store.put(key, memoryview(data), if_absent=False)

        return {"name": "store", "kind": "object", "url": url}, memory, put

    root = folder / "files"
    SlowFiles.requests = requests

    def write(key: str, data: bytes) -> None:
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    return {"name": "files", "kind": "file", "path": str(root)}, PosixBackend(root), write


def fill(backend: Backend, put: Put, steps: Iterable[int], *, like: int) -> None:
    """Put the checkpoint of step ``like`` under the names and records of other steps."""
    of_that = f"{RUN}/{names.step_folder(CheckpointId(like, 1))}/"
    files = {s.key.removeprefix(of_that): _read(backend, s) for s in backend.scan(of_that)}
    record = parse_commit(files.pop(names.COMMIT_NAME), what="commit record")
    for step in steps:
        id = CheckpointId(step, 1)
        prefix = f"{RUN}/{names.step_folder(id)}/"
        for name, data in files.items():
            put(prefix + name, data)
        line = replace(record.lineage, checkpoint=id, ordinal=step)
        put(prefix + names.COMMIT_NAME, replace(record, lineage=line).encode())


def _read(backend: Backend, stored: StoredObject) -> bytes:
    data = bytearray(stored.bytes)
    backend.read_into(stored.key, 0, memoryview(data))
    return bytes(data)


class CoordinatorTime:
    """Counts the CPU time of the coordinator's thread in its steps, in seconds."""

    def __enter__(self) -> list[float]:
        used = [0.0]
        self._step = step = Coordinator.step

        def counted(coordinator: Coordinator, now_s: float) -> float | None:
            began_s = time.thread_time()
            try:
                return step(coordinator, now_s)
            finally:
                used[0] += time.thread_time() - began_s

        Coordinator.step = counted  # type: ignore[method-assign]
        return used

    def __exit__(self, *error: object) -> None:
        Coordinator.step = self._step  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
