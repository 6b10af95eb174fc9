"""One run that several ranks hold open, each a thread of this process: how they open it, restore, close and end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.ranks.threads import on_all
from tests.steps import wait_until
from tierfall.backends.posix.backend import PosixBackend
from tierfall.config import Config
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types.errors import UnreachableError
from tierfall.run.checkpointer import Checkpointer, open_run_of
from tierfall.run.open_run import OPEN

SOON_S = 8.0
"""Less than ``max_wait``, and much more than what these calls take."""


class Opener:
    """Opens one run on all ranks, each with tiers of its own."""

    def __init__(self, folder: Path, ranks: list[Ranks]) -> None:
        self.folder = folder
        self.ranks = ranks
        self.place_of = {0: 0, 1: 1}

    def config(self, rank: int, **more: Any) -> Config:
        place = self.folder / str(self.place_of[rank])
        tiers = [
            {"name": "host", "kind": "host", "folder": str(place / "memory")},
            {"name": "nvme", "kind": "file", "path": str(place / "nvme")},
            {"name": "far", "kind": "file", "path": str(place / "far")},
        ]
        return Config.model_validate({"run": "run", "max_wait": "10s", "tiers": tiers, **more})

    def open(self, rank: int, *, fresh: bool = False, **more: Any) -> Checkpointer:
        config = self.config(rank, **more)
        return Checkpointer(config, ranks=self.ranks[rank], fresh=fresh)

    def all_open(self, **more: Any) -> list[Any]:
        return on_all([lambda r=r: self.open(r, **more) for r in range(len(self.ranks))])  # type: ignore[misc]

    def left(self) -> list[bool]:
        return [one._transport.closed for one in self.ranks]  # type: ignore[union-attr]


def restore_all(
    checkpointers: Sequence[Checkpointer], states: Sequence[dict[str, Any]]
) -> list[Any]:
    """Restore each rank's state; return each rank's report."""
    pairs = zip(checkpointers, states, strict=True)
    return on_all([lambda c=c, s=s: c.restore(s) for c, s in pairs])  # type: ignore[misc]


def close_all(checkpointers: Sequence[Checkpointer]) -> None:
    assert on_all([ckpt.close for ckpt in checkpointers]) == [None] * len(checkpointers)


def wait_sealed(checkpointers: Sequence[Checkpointer]) -> None:
    """Wait until each rank knows that all have the newest step in memory."""
    wait_until(
        lambda: all(c.checkpoints()[-1].on("host") == "sealed" for c in checkpointers),
        "all ranks have sealed it",
        SOON_S,
    )


def kill_all(checkpointers: Sequence[Checkpointer]) -> None:
    """End as a kill does, once what was saved is in memory: nothing is flushed any more, and memory stays."""
    for ckpt in checkpointers:
        ckpt._capturer.close(SOON_S)
        ckpt._session.close(keep_memory=True)
        OPEN.discard(open_run_of(ckpt))


def stop_before_any_flush(
    opener: Opener, patch: pytest.MonkeyPatch, *, elements: int = 4, **more: Any
) -> None:
    """Save step 1 on all ranks, and end as a kill does: it is sealed in memory, and nowhere else."""

    real = PosixBackend.create

    def create(self: PosixBackend, key: str, **options: Any) -> Any:
        if not key.endswith(".safetensors"):
            return real(self, key, **options)
        raise UnreachableError(f"{key}: nobody answers")

    with patch.context() as context:
        context.setattr(PosixBackend, "create", create)
        both = opener.all_open(**more)
        for rank, ckpt in enumerate(both):
            state = {"w": torch.full((elements,), float(rank)), "rng": None}
            ckpt.save(1, state).captured(SOON_S)
        wait_sealed(both)
        kill_all(both)
