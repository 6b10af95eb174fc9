"""What tests of peer memory share: a job of four nodes that is killed, and started again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from tests.distributed.job import ROOT, Job
from tierfall.cli import app

PROGRAM = ROOT / "tests/distributed/peers_program.py"
NODES = [0, 1, 2, 3]
STORED = {"flush": {"every": 2}}
"""Step 2 is on storage, too, and step 3 in memory alone."""

MakeJob = Callable[..., Job]


def lose(folder: Path, node: int) -> None:
    for kept in ("memory", "peers"):
        shutil.rmtree(folder / f"{kept}-{node}")


def shown(folder: Path, *words: str, node: int = 0) -> str:
    """Call a command on a node; return what it prints."""
    tiers = [
        {"name": "host", "kind": "host", "folder": str(folder / f"memory-{node}")},
        {"name": "peers", "kind": "peer", "path": str(folder / f"peers-{node}")},
        {"name": "pfs", "kind": "file", "path": str(folder / "pfs"), "shared": True},
    ]
    (folder / "tiers.json").write_text(json.dumps({"run": "many", "tiers": tiers}))
    command, *rest = words
    answer = CliRunner().invoke(app, [command, "--config", str(folder / "tiers.json"), *rest])
    assert answer.exit_code == 0, answer.output
    return str(answer.stdout)
