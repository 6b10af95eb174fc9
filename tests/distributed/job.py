"""Jobs of several ranks: real processes that meet by a store, as under torchrun, each running one function."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.forked import Forked, server_of

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("program.py")


@dataclass
class Job:
    """One start of all ranks. ``node_of`` says which node a rank is on; by default all are on one. ``port`` leads to
    its store, where that is not to be reached directly."""

    folder: Path
    world_size: int
    node_of: list[int] = field(default_factory=list)
    program: Path = PROGRAM
    port: int = 0

    def __post_init__(self) -> None:
        self.store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self.node_of = self.node_of or [0] * self.world_size
        self.processes: list[Forked] = []

    def start(self, function: str, **arguments: Any) -> Job:
        """Start ``function`` of the program on every rank."""
        for rank in range(self.world_size):
            self.start_rank(rank, function, **arguments)
        return self

    def launcher(self, rank: int) -> dict[str, str]:
        """What the launcher tells a rank: torchrun."""
        node = self.node_of[rank]
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.node_of[:rank].count(node)),
            "GROUP_RANK": str(node),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def start_rank(self, rank: int, function: str, **arguments: Any) -> None:
        given = json.dumps({"folder": str(self.folder), **arguments})
        self.start_command(rank, [str(self.program), function, given])

    def start_command(
        self, rank: int, command: Sequence[str], cwd: Path | None = None, **variables: str
    ) -> None:
        """Start a rank that runs what follows ``python``; ``variables`` come to its environment."""
        environment = {
            **os.environ,
            **variables,
            **self.launcher(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port or self.store.port),
            "OMP_NUM_THREADS": "1",
            "RES_OPTIONS": "timeout:1 attempts:1",  # torch asks for the name of 127.0.0.1, which nobody may know
            "PYTHONPATH": str(ROOT),
        }
        with (self.folder / f"rank-{rank}.log").open("a") as log:
            self.processes.append(Forked(server_of(rank), command, environment, log, cwd=cwd))

    def wait(self, timeout_s: float = 90.0) -> list[Any]:
        """Wait for all ranks, and return what each function returned: a value, or ``{"error": kind, "text": ...}``."""
        deadline = time.monotonic() + timeout_s
        answers = []
        for rank, process in enumerate(self.processes):
            try:
                out, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"rank {rank} hangs; its log:\n{self.log(rank)}") from None
            lines = [line for line in out.splitlines() if line.startswith("ANSWER ")]
            answers.append(json.loads(lines[-1][7:]) if lines else {"exit": process.returncode})
        self.processes.clear()
        return answers

    def wait_for_kill(self, timeout_s: float = 60.0) -> int:
        """Wait until one rank is killed, and return which; as a launcher does, before it ends the others."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            ended = [process.poll() for process in self.processes]
            if -signal.SIGKILL in ended:
                return ended.index(-signal.SIGKILL)
            assert None in ended, f"all ranks have ended, and none was killed: {ended}"
            time.sleep(0.02)
        raise AssertionError(f"no rank was killed; the log of rank 0:\n{self.log(0)}")

    def run(self, function: str, timeout_s: float = 90.0, **arguments: Any) -> list[Any]:
        return self.start(function, **arguments).wait(timeout_s)

    def log(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}.log").read_text()[-4000:]

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Wait until every rank has said that it is where the test wants it; that is said once."""
        deadline = time.monotonic() + timeout_s
        marks = [self.folder / f"ready-{rank}" for rank in range(self.world_size)]
        while not all(mark.exists() for mark in marks):
            assert time.monotonic() < deadline, self.log(0)
            assert all(process.poll() is None for process in self.processes), self.log(0)
            time.sleep(0.02)
        for mark in marks:
            mark.unlink()

    def wait_until(self, condition: Callable[[], object], timeout_s: float = 150.0) -> None:
        """Wait for what a rank does; none of them ends before it."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.log(0)
            assert all(process.poll() is None for process in self.processes), self.log(0)
            time.sleep(0.002)

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
            process.stdout.close()
        self.processes.clear()


class SlurmJob(Job):
    """One start of all ranks as ``srun`` makes it, of a batch job that was requeued ``restarts`` times."""

    restarts = 0

    def launcher(self, rank: int) -> dict[str, str]:
        node = self.node_of[rank]
        return {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": str(self.world_size),
            "SLURM_LOCALID": str(self.node_of[:rank].count(node)),
            "SLURM_NODEID": str(node),
            **({"SLURM_RESTART_COUNT": str(self.restarts)} if self.restarts else {}),
        }


@contextmanager
def stopped(job: Job, rank: int) -> Iterator[None]:
    """Stop a rank's process for the block, by SIGSTOP."""
    process = job.processes[rank]
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def wait_for(job: Job, path: Path) -> None:
    """Wait until a rank has made this file."""
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, "\n".join(map(job.log, range(job.world_size)))
        time.sleep(0.02)
