"""What tests of peer memory share: a job of four nodes that is killed, and started again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.distributed.job import ROOT, Job

PROGRAM = ROOT / "tests/distributed/peers_program.py"
NODES = [0, 1, 2, 3]
STORED = {"flush": {"every": 2}}
"""Step 2 is on storage, too, and step 3 in memory alone."""

MakeJob = Callable[..., Job]


def lose(folder: Path, node: int) -> None:
    for kept in ("memory", "peers"):
        shutil.rmtree(folder / f"{kept}-{node}")
