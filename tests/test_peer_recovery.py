"""A start after the loss of a node: which images do not come back into its memory from other nodes. Each rank is a
thread of this process, on one of two nodes."""

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


@contextmanager
def opened(folder: Path, **peer: Any) -> Iterator[list[Checkpointer]]:
    """Open the run on both ranks, which are killed at the end."""

    def open_one(ranks: Ranks) -> Checkpointer:
        rank = ranks.topology.rank
        tiers = [
            {"name": "host", "kind": "host", "folder": str(folder / f"memory-{rank}")},
            {"name": "peers", "kind": "peer", "path": str(folder / f"peers-{rank}"), **peer},
            {"name": "pfs", "kind": "file", "path": str(folder / "pfs"), "shared": True},
        ]
        config = {"run": "run", "max_wait": "10s", "chunk": "64KiB", "tiers": tiers}
        return Checkpointer(Config.model_validate(config), ranks=ranks)

    with network("ab") as ranks:
        both = on_all([lambda r=rank: open_one(r) for rank in ranks])  # type: ignore[misc]
        assert all(isinstance(one, Checkpointer) for one in both), both
        try:
            yield both
        finally:
            kill_all(both)
            for one in both:
                close_peers(open_run_of(one)._peers)


def save(both: Sequence[Checkpointer], step: int, *tiers: str) -> None:
    def save_one(rank: int) -> None:
        handle = both[rank].save(step, {"w": torch.full((60_000,), 10.0 * step + rank)})
        for tier in tiers:
            handle.wait(tier, SOON_S)

    assert on_all([lambda r=rank: save_one(r) for rank in range(2)]) == [None, None]  # type: ignore[misc]


def images_after_a_loss(folder: Path) -> set[CheckpointId]:
    """Lose the second node; return the checkpoints of which its rank's image is in memory after the next start."""
    for kept in ("memory", "peers"):
        shutil.rmtree(folder / f"{kept}-1")
    with opened(folder) as both:
        return {*open_run_of(both[1]).session.host.images()}


def test_what_a_person_has_deleted_is_not_brought_back(tmp_path: Path) -> None:
    with opened(tmp_path) as both:
        save(both, 1, "peers", "pfs")
        decided = both[0]._session.stores["pfs"].decided
        decided.add(decided.read().next(Word.DELETED, CheckpointId(1, 1), None))
    assert images_after_a_loss(tmp_path) == set()


def test_an_image_of_an_older_step_than_storage_has_is_not_brought_back(tmp_path: Path) -> None:
    with opened(tmp_path, flush={"every": 2}) as both:
        save(both, 1, "pfs")
        save(both, 2, "peers", "pfs")
        save(both, 3, "pfs")
    assert images_after_a_loss(tmp_path) == set()
