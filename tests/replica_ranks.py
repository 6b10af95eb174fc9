"""Ranks of data-parallel training as threads of one process: what they hold, and how they save it and get it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.open_ranks import close_all, restore_all
from tierfall.config import Config
from tierfall.core.ranks.ranks import Ranks
from tierfall.run.checkpointer import Checkpointer

MAX_WAIT_S = 6.0


def open_all(
    folder: Path, ranks: list[Ranks], chunk: str = "16MiB", **disk: Any
) -> list[Checkpointer]:
    stored = {"name": "disk", "kind": "file", "path": str(folder / "disk"), "shared": True, **disk}

    def open_one(rank: int) -> Checkpointer:
        tiers = [{"name": "host", "kind": "host", "folder": str(folder / "memory")}, stored]
        keys = {"run": "run", "chunk": chunk, "max_wait": f"{MAX_WAIT_S}s", "tiers": tiers}
        return Checkpointer(Config.model_validate(keys), ranks=ranks[rank])

    opened = on_all([lambda r=r: open_one(r) for r in range(len(ranks))])  # type: ignore[misc]
    assert all(isinstance(one, Checkpointer) for one in opened), opened
    return opened


def replica(rank: int, seed: int = 1, width: int = 64) -> dict[str, Any]:
    """What a rank of data-parallel training has: model and optimizer as all, loader and buffers of its own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model[1].running_mean.fill_(rank)
    loader = tierfall.item({"at": rank}, on_resize="per_rank")
    return {"model": model, "optimizer": optimizer, "loader": loader}


def save_all(checkpointers: list[Any], step: int, states: list[dict[str, Any]]) -> list[Any]:
    return on_all(
        [
            lambda c=c, s=s: c.save(step, s)  # type: ignore[misc]
            for c, s in zip(checkpointers, states, strict=True)
        ]
    )


def save_whole(checkpointers: list[Any], step: int, states: list[dict[str, Any]]) -> None:
    """Save, and wait until the last tier has it."""
    for handle in save_all(checkpointers, step, states):
        handle.wait(timeout=MAX_WAIT_S)


@contextmanager
def restarted(folder: Path) -> Iterator[tuple[list[Checkpointer], list[dict[str, Any]], list[Any]]]:
    """Start again, and restore into other states: gives who is open, the states, and each rank's report."""
    with network(["a", "a", "a"]) as again:
        opened = open_all(folder, again)
        fresh = [replica(9, seed=2) for _ in range(3)]
        yield opened, fresh, restore_all(opened, fresh)
        close_all(opened)


def assert_same(states: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for state, other in zip(states, expected, strict=True):
        for name, value in other["model"].state_dict().items():
            assert torch.equal(state["model"].state_dict()[name], value), name
        pairs = zip(
            other["optimizer"].state.values(), state["optimizer"].state.values(), strict=True
        )
        for one, two in pairs:
            assert all(torch.equal(one[key], two[key]) for key in one)
        assert state["loader"].value == other["loader"].value
