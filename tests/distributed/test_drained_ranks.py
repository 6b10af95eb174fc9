"""All ranks of a job are killed, and ``tierfall drain`` on each node brings what they had in memory to the tiers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.distributed.job import Job
from tests.forked import Forked, server_of

MakeJob = Callable[..., Job]
TWO_NODES = [0, 1]
STEP = "many/step-00000002-a0001"
CRAWL: dict[str, Any] = {"bandwidth": "1kB/s"}


def start_drain(folder: Path, node: int, *, max_wait: str = "20s", **nvme: Any) -> Forked:
    """Start the command on a node, whose tiers are as fast as they are."""
    config = {
        "run": "many",
        "max_wait": max_wait,
        "chunk": "64KiB",
        "tiers": [
            {"name": "host", "kind": "host", "folder": str(folder / f"memory-{node}")},
            {"name": "nvme", "kind": "file", "path": str(folder / f"nvme-{node}"), **nvme},
            {"name": "pfs", "kind": "file", "path": str(folder / "pfs"), "shared": True},
        ],
    }
    path = folder / f"tiers-{node}.yaml"
    path.write_text(json.dumps(config))
    environment = {**os.environ, "TIERFALL_CONFIG": str(path)}
    with (folder / f"drain-{node}.log").open("w") as log:
        return Forked(server_of(node), ["-m", "tierfall", "drain", "--json"], environment, log)


def ended(process: Forked) -> dict[str, Any]:
    out, _ = process.communicate(timeout=90)
    document: dict[str, Any] = json.loads(out[out.index("{") : out.rindex("}") + 1])
    return {**document, "code": process.returncode}


def kill_with_all_in_memory(job: Job, folder: Path, **nvme: Any) -> None:
    """Two steps are sealed by all ranks, and no tier has had the time to take one."""
    job.start("die", steps=[1, 2], when="sealed", nvme={**CRAWL, **nvme}, pfs=CRAWL)
    deadline = time.monotonic() + 60
    while len(list(folder.glob("ready-*"))) < job.world_size:
        assert time.monotonic() < deadline, job.log(0)
        time.sleep(0.05)
    job.kill()
    for path in folder.glob("ready-*"):
        path.unlink()
    assert not list(folder.glob(f"*/{STEP}/commit.json"))


def moved(document: dict[str, Any], part: str = "done") -> set[tuple[int, str]]:
    return {(one["step"], one["tier"]) for one in document[part]}


def test_one_node_commits_whole_checkpoints_and_gives_the_memory_back(
    make_job: MakeJob, tmp_path: Path
) -> None:
    kill_with_all_in_memory(make_job(2), tmp_path)
    document = ended(start_drain(tmp_path, 0))
    assert (document["code"], document["left"], document["memory_kept"]) == (0, [], False), document
    assert moved(document) == {(step, tier) for step in (1, 2) for tier in ("nvme", "pfs")}
    assert not list(tmp_path.rglob("*.arena"))
    for tier in ("nvme-0", "pfs"):
        record = json.loads((tmp_path / tier / STEP / "commit.json").read_text())
        assert len([f for f in record["files"] if f["name"].endswith(".safetensors")]) == 2
        assert (tmp_path / tier / "many/latest").read_text().strip() == STEP.partition("/")[2]
    restored = make_job(2).run("restore")
    assert restored == [{"step": 2, "good": True, "tiers": ["nvme"]}] * 2
