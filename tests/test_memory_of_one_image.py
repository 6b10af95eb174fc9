"""Memory for one image, which has one that is never flushed: the next save takes its room."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.open_ranks import SOON_S, Opener, close_all, restore_all
from tierfall.config import Config


class OneImageOpener(Opener):
    """Opens one run on two ranks, each on a node of its own, with a disk of its own and memory for one image."""

    when_full = "skip"

    def config(self, rank: int, **more: Any) -> Config:
        place = self.folder / str(rank)
        memory = {
            "name": "host",
            "kind": "host",
            "folder": str(place / "memory"),
            "capacity": "280KiB",
            "when_full": self.when_full,
            "on_close": "keep",
        }
        disk = {"name": "disk", "kind": "file", "path": str(place / "disk"), "shared": False}
        return Config.model_validate(
            {"run": "run", "max_wait": "2s", "tiers": [memory, disk], **more}
        )


def states(step: float) -> list[dict[str, Any]]:
    return [{"w": torch.full((1 << 15,), step + rank / 2), "rng": None} for rank in range(2)]


def save_all(both: list[Any], step: int) -> None:
    pairs = zip(both, states(step), strict=True)
    waits = [lambda c=c, s=s: c.save(step, s).wait(None, SOON_S) for c, s in pairs]  # type: ignore[misc]
    assert on_all(waits) == [None, None]


@pytest.mark.parametrize("when_full", ["skip", "wait"])
def test_an_image_of_a_checkpoint_that_no_tier_has_whole_gives_way(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    when_full: str,
) -> None:
    monkeypatch.setattr(OneImageOpener, "when_full", when_full)
    with network(["a", "b"]) as ranks:
        both = OneImageOpener(tmp_path, ranks).all_open()
        restore_all(both, states(0))
        save_all(both, 1)
        close_all(both)
    shutil.rmtree(tmp_path / "0/memory")
    shutil.rmtree(tmp_path / "1/disk/run/step-00000001-a0001")
    with network(["a", "b"]) as ranks:
        both = OneImageOpener(tmp_path, ranks).all_open()
        reports = restore_all(both, states(0))
        assert [report.sources[0].tier for report in reports] == ["disk", "host"]
        for step in (2, 3):
            save_all(both, step)
        close_all(both)
    output = [r.getMessage() for r in caplog.records if "no rank flushes it" in r.getMessage()]
    assert output == [
        "host: 1@1 is deleted: no tier is owed it, and memory has room for one image only; no rank flushes it, as no "
        "tier that all ranks reach has all its images"
    ]


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
