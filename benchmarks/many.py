"""What a commit, ``open`` and ``restore`` cost with many checkpoints on a tier: ``python -m benchmarks.many``.

The tier is an object store in memory, each request of which takes a given time; listings have 1,000 rows a request. The
checkpoints are one, saved, under the names and records of all. The coordinator's CPU time is that of its thread.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tierfall
from tierfall.backends import registry
from tierfall.backends.memory import MemoryBackend
from tierfall.backends.wrapper import Wrapper
from tierfall.core import names
from tierfall.core.contracts import Backend, Publish, Stored, Traits, Writer
from tierfall.core.records import read_commit
from tierfall.core.scheduler.coordinator import Coordinator
from tierfall.core.values import CheckpointId

RUN = "many"
ROWS = 1000
SAVES = 3
HEADER = (
    "| checkpoints | a request | `open` | requests | `restore` | requests | commit | requests | CPU of a commit |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


class SlowStore(Wrapper):
    """A store whose every request takes ``request_s`` seconds; ``requests`` counts them."""

    def __init__(self, inner: Backend, request_s: float) -> None:
        super().__init__(inner)
        self._request_s = request_s
        self._lock = threading.Lock()
        self.requests: Counter[str] = Counter()

    def _ask(self, what: str) -> None:
        with self._lock:
            self.requests[what] += 1
        if self._request_s:
            time.sleep(self._request_s)

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
        self._ask("put")
        return self._inner.create(key, length=length, length_max=length_max, publish=publish)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        self._ask("get")
        self._inner.read_into(key, offset, view)

    def stat(self, key: str) -> Stored:
        self._ask("head")
        return self._inner.stat(key)

    def scan(self, prefix: str) -> Iterator[Stored]:
        rows = list(self._inner.scan(prefix))
        for _ in range(max(1, -(-len(rows) // ROWS))):
            self._ask("list")
        return iter(rows)

    def delete(self, key: str) -> None:
        self._ask("delete")
        self._inner.delete(key)

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        self._ask("delete")
        return self._inner.delete_some(keys)

    def close(self) -> None:
        """It is opened more than once."""


_stores: dict[str, SlowStore] = {}


@registry.register("slow", remote=True)
def _open(url: str, *, options: Mapping[str, Any], read_only: bool) -> Backend:
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
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(HEADER)
    for ms in options.ms:
        for count in options.counts:
            costs = measure(count, ms / 1000)
            cells = [f"{count:,}", f"{ms} ms"]
            for name in ("open", "restore", "commit"):
                cells += [f"{costs[name].seconds:.2f} s", f"{costs[name].requests:,}"]
            print(f"| {' | '.join(cells)} | {costs['commit'].cpu_s * 1e3:.1f} ms |", flush=True)
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def measure(count: int, request_s: float) -> dict[str, Cost]:
    """Measure ``open``, ``restore`` and a commit (the cheapest of a few) with so many checkpoints on the tier."""
    memory, url = MemoryBackend(), "slow://many"
    folder = Path(tempfile.mkdtemp(prefix="tierfall-many-"))
    config = {
        "run": RUN,
        "tiers": [
            {"name": "host", "kind": "host", "folder": str(folder), "capacity": "4MiB"},
            {"name": "store", "kind": "object", "url": url},
        ],
    }
    state = {"x": torch.ones(1024)}
    try:
        _stores[url] = SlowStore(memory, 0.0)
        with tierfall.open(config) as ckpt:
            ckpt.restore(state)
            ckpt.save(count, state, block=True)
        fill(memory, count)
        store = _stores[url] = SlowStore(memory, request_s)
        with CoordinatorTime() as cpu:

            def cost(function: Callable[[], Any]) -> tuple[Any, Cost]:
                asked, used_s, began_s = store.requests.total(), cpu[0], time.monotonic()
                value = function()
                return value, Cost(
                    seconds=time.monotonic() - began_s,
                    requests=store.requests.total() - asked,
                    cpu_s=cpu[0] - used_s,
                )

            ckpt, opened = cost(lambda: tierfall.open(config))
            with ckpt:
                ckpt.drain(600)
                _, restored = cost(lambda: ckpt.restore(state))
                ckpt.drain(600)

                def save(step: int) -> None:
                    ckpt.save(step, state, block=True)
                    ckpt.drain(600)

                steps = range(count + 1, count + 1 + SAVES)
                commits = [cost(partial(save, step))[1] for step in steps]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    cheapest = min(commits, key=lambda one: one.seconds)
    return {"open": opened, "restore": restored, "commit": cheapest}


def fill(memory: MemoryBackend, count: int) -> None:
    """Put the one checkpoint that is there under the names and records of all before it."""
    of_last = f"{RUN}/{names.step_folder(CheckpointId(count, 1))}/"
    files = {s.key.removeprefix(of_last): _read(memory, s) for s in memory.scan(of_last)}
    record = read_commit(files.pop(names.COMMIT_NAME), what="commit record")
    for step in range(1, count):
        id = CheckpointId(step, 1)
        line = replace(record.line, checkpoint=id, ordinal=step)
        prefix = f"{RUN}/{names.step_folder(id)}/"
        for name, data in files.items():
            memory.put(prefix + name, memoryview(data), publish=Publish.REPLACE)
        data = replace(record, line=line).encode()
        memory.put(prefix + names.COMMIT_NAME, memoryview(data), publish=Publish.REPLACE)


def _read(memory: MemoryBackend, stored: Stored) -> bytes:
    data = bytearray(stored.bytes)
    memory.read_into(stored.key, 0, memoryview(data))
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
