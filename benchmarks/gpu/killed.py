"""One process of a training that is killed: ``python -m benchmarks.gpu.killed TASK``.

It saves into host memory, or is the next start, which opens and restores. It answers in one line of JSON, and waits
until it is killed. A start answers in seconds: of a copy of as many bytes from page-locked memory, of ``open``, once
the model is on the device and all is imported, and of ``restore``, which also makes the optimizer's state.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.chain import HOST
from benchmarks.gpu.bus import Bus
from benchmarks.gpu.large import LargeWorkload, digest
from benchmarks.workload import Shape
from tierfall.api import open as open_run
from tierfall.core.runtime.pinned import synchronize
from tierfall.run.checkpointer import Checkpointer

ANSWER_S = 90.0
"""How long a process may take for its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a process is to do, with which model; ``folder`` is that of the host memory of ``capacity_bytes``."""

    saves: bool
    shape: dict[str, int]
    device: str
    folder: str
    capacity_bytes: int
    state_bytes: int


@contextmanager
def running(task: Task) -> Iterator[dict[str, Any]]:
    """Run a process until it has answered, and kill it by SIGKILL at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(asdict(task))],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    too_long = threading.Timer(ANSWER_S, process.kill)
    too_long.start()
    try:
        line = process.stdout.readline()
        too_long.cancel()
        if not line:
            raise RuntimeError(
                f"gpu: the process that was to be killed ended, or gave no answer within {ANSWER_S:.0f} s: see above"
            )
        yield json.loads(line)
    finally:
        too_long.cancel()
        process.kill()
        process.communicate()
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"gpu: the process that was to be killed ended by {process.returncode}")


def _open(task: Task) -> Checkpointer:
    host = {"name": HOST, "kind": "host", "folder": task.folder, "capacity": task.capacity_bytes}
    return open_run({"run": "bench", "max_wait": "1m", "tiers": [host]})


def _save(task: Task, work: LargeWorkload) -> dict[str, Any]:
    work.make_moments()
    _open(task).save(1, work.state).captured()
    return {"digest": digest(work.tensors())}


def _restore(task: Task, work: LargeWorkload) -> dict[str, Any]:
    memcpy_s = _memcpy_s(Bus(task.state_bytes, task.device))
    opening_s = time.perf_counter()
    ckpt = _open(task)
    restoring_s = time.perf_counter()
    report = ckpt.restore(work.state)
    synchronize()
    ended_s = time.perf_counter()
    if report is None or [source.tier for source in report.sources] != [HOST]:
        raise AssertionError(f"a restore from host memory was to be measured: {report}")
    return {
        "memcpy": memcpy_s,
        "open": restoring_s - opening_s,
        "restore": ended_s - restoring_s,
        "digest": digest(work.tensors()),
    }


def _memcpy_s(bus: Bus) -> float:
    for _ in range(2):  # the first warms up
        began_s = time.perf_counter()
        bus.to_device()
        synchronize()
        took_s = time.perf_counter() - began_s
    return took_s


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    work = LargeWorkload(Shape(**task.shape), device=task.device)
    print(json.dumps(_save(task, work) if task.saves else _restore(task, work)), flush=True)
    sys.stdin.read()  # until it is killed, or its parent has gone


if __name__ == "__main__":
    main()
