"""A start after the loss of a node: its images come back into its memory from other nodes, and each image is on as many
nodes as before. Each rank is a thread of this process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.core.ranks.threads import network, on_all
from tests.open_ranks import kill_all
from tierfall.config import Config
from tierfall.core.format.decided import Word
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types.values import CheckpointId
from tierfall.run.checkpointer import Checkpointer, open_run_of
from tierfall.setup.peers import close_peers

SOON_S = 20.0
NODES = "0123"
FIRST = CheckpointId(1, 1)


def config_of(folder: Path, node: str, *, every: int = 100, **peer: Any) -> Config:
    tiers = [
        {"name": "host", "kind": "host", "folder": str(folder / f"memory-{node}")},
        {"name": "peers", "kind": "peer", "path": str(folder / f"peers-{node}"), **peer},
        {
            "name": "pfs",
            "kind": "file",
            "path": str(folder / "pfs"),
            "shared": True,
            "flush": {"every": every},
        },
    ]
    return Config.model_validate(
        {"run": "run", "max_wait": "10s", "chunk": "64KiB", "tiers": tiers}
    )


def make_state(rank: int, step: int) -> dict[str, Any]:
    numbers = torch.Generator().manual_seed(100 * step + rank)
    return {"w": torch.randn(60_000, generator=numbers), "step": step}


@contextmanager
def opened(
    folder: Path, nodes: Sequence[str] = NODES, *, fresh: bool = False, **options: Any
) -> Iterator[list[Checkpointer]]:
    """Open the run on all ranks, by the node of each; all are killed at the end."""
    with network(nodes) as ranks:

        def open_one(rank: Ranks) -> Checkpointer:
            config = config_of(folder, nodes[rank.topology.rank], **options)
            return Checkpointer(config, ranks=rank, fresh=fresh)

        all_ranks = on_all([lambda r=rank: open_one(r) for rank in ranks])  # type: ignore[misc]
        assert all(isinstance(one, Checkpointer) for one in all_ranks), all_ranks
        try:
            yield all_ranks
        finally:
            kill_all(all_ranks)
            for one in all_ranks:
                close_peers(open_run_of(one)._peers)


def save(all_ranks: Sequence[Checkpointer], step: int, *tiers: str) -> None:
    def save_one(rank: int) -> None:
        handle = all_ranks[rank].save(step, make_state(rank, step))
        for tier in tiers or ("peers",):
            handle.wait(tier, SOON_S)

    outcomes = on_all([lambda r=rank: save_one(r) for rank in range(len(all_ranks))])  # type: ignore[misc]
    assert outcomes == [None] * len(all_ranks)


def train(folder: Path, nodes: Sequence[str] = NODES, **options: Any) -> None:
    with opened(folder, nodes, **options) as all_ranks:
        save(all_ranks, 1)


def lose(folder: Path, node: str) -> None:
    for kept in ("memory", "peers"):
        shutil.rmtree(folder / f"{kept}-{node}")


def in_memory(ckpt: Checkpointer) -> CheckpointId | None:
    """Return the newest checkpoint that host memory has this rank's image of."""
    return max(open_run_of(ckpt).session.host.images(), default=None)


def test_what_a_person_has_deleted_is_not_brought_back(tmp_path: Path) -> None:
    with opened(tmp_path, "01", every=1) as all_ranks:
        save(all_ranks, 1, "peers", "pfs")
        decided = all_ranks[0]._session.stores["pfs"].decided
        decided.add(decided.read().next(Word.DELETED, FIRST, None))
    lose(tmp_path, "1")
    with opened(tmp_path, "01", every=1) as all_ranks:
        assert in_memory(all_ranks[1]) is None


def test_an_image_of_an_older_step_than_storage_has_is_not_brought_back(tmp_path: Path) -> None:
    with opened(tmp_path, "01", every=1, flush={"every": 2}) as all_ranks:
        save(all_ranks, 1, "pfs")
        save(all_ranks, 2, "peers", "pfs")
        save(all_ranks, 3, "pfs")
    lose(tmp_path, "1")
    with opened(tmp_path, "01", every=1) as all_ranks:
        assert in_memory(all_ranks[1]) is None
