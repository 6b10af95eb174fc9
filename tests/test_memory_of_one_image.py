"""Memory for one image, which has one that is never flushed: the next save takes its room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.open_ranks import SOON_S


def states(step: float) -> list[dict[str, Any]]:
    return [{"w": torch.full((1 << 15,), step + rank / 2), "rng": None} for rank in range(2)]


@pytest.mark.parametrize("when_full", ["skip", "wait", "supersede"])
def test_an_image_that_no_tier_takes_gives_way(tmp_path: Path, when_full: str) -> None:
    memory = {"name": "host", "kind": "host", "folder": str(tmp_path / "memory")}
    disk = {"name": "disk", "kind": "file", "path": str(tmp_path / "disk"), "flush": {"every": 3}}
    with tierfall.open(
        {
            "run": "run",
            "tiers": [{**memory, "capacity": "280KiB", "when_full": when_full}, disk],
        }
    ) as ckpt:
        ckpt.restore(states(0)[0])
        for step in (1, 2, 3):
            ckpt.save(step, states(step)[0]).captured(SOON_S)
        assert ckpt.drain(SOON_S).left == ()
        assert ckpt.statistics().skipped_saves == 0
        assert ckpt.statistics().commits == {"disk": 1}
