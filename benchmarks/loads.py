"""A load by several ranks, beside the plain load of each of them: ``python -m benchmarks.loads``.

16 processes are the ranks of 4 nodes, on this machine, with one tier, which gives 100 MB/s to all of them together. A
node's memory is what its ranks have more (PSS) than before the load, at the worst moment. One read of all bytes at that
rate is 1.00. CPU is that of all ranks together, from the call of ``load`` to its end.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.distributed.job import Job

PROGRAM = Path("tests/distributed/loads_program.py").absolute()
RANKS, NODES = 16, 4
TENSOR_BYTES = 8 << 20
SAMPLE_S = 0.05
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "`group=True`": {"group": True},
    "`group=True`, a quarter each": {"group": True, "part": RANKS // NODES},
    "`group=True, share=True`": {"group": True, "share": True},
}


def pss_of(pid: int) -> int:
    """The memory of a process, in bytes; of what several share, its part."""
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("Pss:")) << 10


@contextmanager
def place(count: int, chunk: str) -> Iterator[Path]:
    """A folder in which the tier has the checkpoint."""
    folder = Path(tempfile.mkdtemp(prefix="tierfall-loads-"))
    try:
        (answer,) = Job(folder, 1, program=PROGRAM).run(
            "save_tensors", 300, count=count, tensor_bytes=TENSOR_BYTES, chunk=chunk
        )
        assert answer is None, answer
        yield folder
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, *, samples: bool, **how: Any) -> tuple[float, float, int, int]:
    """Return the seconds of the slowest rank, the CPU seconds of all, the bytes that all read from the tier, and the
    memory of the node that needed most, if that ``samples`` it, which takes time."""
    for path in folder.glob("*"):
        if path.is_file():
            path.unlink()
    node_of = [rank * NODES // RANKS for rank in range(RANKS)]
    job = Job(folder, RANKS, node_of, program=PROGRAM).start("load_from_slow", **how)
    job.wait_ready()
    pids = [process.pid for process in job.processes]

    def memory() -> list[int]:
        of_nodes = [0] * NODES
        for rank, pid in enumerate(pids):
            of_nodes[node_of[rank]] += pss_of(pid)
        return of_nodes

    before = memory()
    (folder / "go").touch()
    most = 0
    while len(list(folder.glob("loaded-*"))) < RANKS:
        assert all(process.poll() is None for process in job.processes), job.log(0)
        now = memory() if samples else before
        most = max(most, *(there - earlier for there, earlier in zip(now, before, strict=True)))
        time.sleep(SAMPLE_S)
    (folder / "end").touch()
    answers = job.wait(timeout_s=300)
    assert all(answer.get("good") for answer in answers), answers
    cpu_s, taken = (sum(answer[name] for answer in answers) for name in ("cpu", "read"))
    return max(answer["seconds"] for answer in answers), cpu_s, taken, most


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the checkpoint (512)")
    parser.add_argument("--chunk", default="16MiB", help="of the checkpoint (16MiB)")
    parser.add_argument("--rate", type=float, default=100e6, help="bytes per second (100e6)")
    parser.add_argument("--ways", nargs="*", type=int, help="numbers of the ways, from 0")
    given = parser.parse_args(arguments)
    bytes = given.mib << 20
    print("| load | seconds | of one read | CPU seconds | copies read | memory of a node |")
    print("|---|---|---|---|---|---|")
    with place(bytes // TENSOR_BYTES, given.chunk) as folder:
        for number, (name, how) in enumerate(WAYS.items()):
            if given.ways and number not in given.ways:
                continue
            how = {**how, "bytes_per_s": given.rate}
            seconds, cpu_s, taken, _ = measure(folder, samples=False, **how)
            *_, most = measure(folder, samples=True, **how)
            times = f"{seconds:.2f} | {seconds * given.rate / bytes:.2f} | {cpu_s:.1f}"
            print(f"| {name} | {times} | {taken / bytes:.3f} | {most >> 20} MiB |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
