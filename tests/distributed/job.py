"""Jobs of several ranks: real processes that meet by a store, as under torchrun, each running one function."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("program.py")


@dataclass
class Job:
    """One start of all ranks. ``node_of`` says which node a rank is on; by default all are on one."""

    folder: Path
    world_size: int
    node_of: list[int] = field(default_factory=list)
    program: Path = PROGRAM

    def __post_init__(self) -> None:
        self.store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self.node_of = self.node_of or [0] * self.world_size
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, function: str, **arguments: Any) -> Job:
        """Start ``function`` of the program on every rank."""
        for rank in range(self.world_size):
            self.start_rank(rank, function, **arguments)
        return self

    def start_rank(self, rank: int, function: str, **arguments: Any) -> None:
        node = self.node_of[rank]
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.node_of[:rank].count(node)),
            "GROUP_RANK": str(node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "RES_OPTIONS": "timeout:1 attempts:1",  # torch asks for the name of 127.0.0.1, which nobody may know
            "PYTHONPATH": str(ROOT),
        }
        given = json.dumps({"folder": str(self.folder), **arguments})
        out = (self.folder / f"rank-{rank}.log").open("a")
        self.processes.append(
            subprocess.Popen(
                [sys.executable, str(self.program), function, given],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )
        )
        out.close()

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

    def wait_for_one(self, timeout_s: float = 60.0) -> int:
        """Wait until one rank has ended, and return which; as a launcher does, before it ends the others."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for rank, process in enumerate(self.processes):
                if process.poll() is not None:
                    return rank
            time.sleep(0.02)
        raise AssertionError(f"no rank has ended; the log of rank 0:\n{self.log(0)}")

    def run(self, function: str, timeout_s: float = 90.0, **arguments: Any) -> list[Any]:
        return self.start(function, **arguments).wait(timeout_s)

    def log(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}.log").read_text()[-4000:]

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self.processes.clear()
