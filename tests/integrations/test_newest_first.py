"""What an adapter tries after the newest checkpoint was damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

import tierfall
from tierfall.integrations.frameworks import newest_first


def test_older_checkpoints_follow_also_where_the_newest_is_gone(tmp_path: Path) -> None:
    with tierfall.open({"run": "r", "tiers": str(tmp_path)}) as ckpt:
        ckpt.begin()
        for step in (1, 2, 3):
            ckpt.save(step, {"w": torch.ones(2)}).wait()
    with tierfall.open({"run": "r", "tiers": str(tmp_path)}) as ckpt:
        report = ckpt.restore({"w": torch.zeros(2)})
        assert report is not None
        tried = newest_first(ckpt, report)
        found = [next(tried)["step"]]
        for folder in tmp_path.rglob("step-00000003-*"):
            shutil.rmtree(folder)
        found += [at["step"] for at in tried]
    assert found == [3, 2, 1]
