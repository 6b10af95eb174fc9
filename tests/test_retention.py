"""Retention of whole runs: checkpoints with metrics and tags are kept by them, on one rank and on several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.open_ranks import SOON_S
from tests.rank_kit import config_of
from tests.steps import state_of, wait_until
from tierfall.core.types import keys
from tierfall.run.checkpointer import Checkpointer

MakeConfig = Callable[..., dict[str, Any]]
LOSSES = {1: 0.9, 2: 0.2, 3: 0.5, 4: 0.2, 5: 0.8, 6: 0.7}


def steps_on(folder: Path) -> list[int]:
    found = (keys.parse_step_folder(path.name) for path in (folder / "run").iterdir())
    return sorted(id.step for id in found if id is not None)


def test_a_copy_leaves_by_time_while_the_trainer_waits(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(make_config(disk={"retain": {"for": "700ms"}})) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
        wait_until(lambda: steps_on(tmp_path / "disk") == [2, 3], "the oldest goes", 20.0)


# Several ranks ---------------------------------------------------------------------------------------


def test_rank_0s_metrics_decide_for_all(tmp_path: Path) -> None:
    """Rank 1 measured otherwise: by its losses, other steps would be the best."""
    config = config_of(tmp_path, shared={"retain": {"best": {"metric": "loss", "count": 2}}})
    with network(["a", "a"]) as ranks:
        opened = on_all([lambda r=r: Checkpointer(config, ranks=r) for r in ranks])  # type: ignore[misc]
        for step, loss in LOSSES.items():
            saves = [
                lambda c=ckpt, m=measured, s=step: c.save(  # type: ignore[misc]
                    s, {"w": torch.ones(4), "rng": None}, metrics={"loss": m}
                )
                for ckpt, measured in zip(opened, (loss, -loss), strict=True)
            ]
            for handle in on_all(saves):
                handle.wait("shared", timeout=SOON_S)
        assert on_all([one.close for one in opened]) == [None, None]
    assert steps_on(tmp_path / "shared") == [2, 4, 6]
