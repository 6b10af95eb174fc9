"""How much room memory has: an image that is never flushed gives way, unless it is the only copy of what this start was
restored from; without a capacity memory grows with the state."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tierfall
from tests.core.ranks.threads import network
from tests.open_ranks import SOON_S, Opener, stop_before_any_flush
from tierfall.cli import app
from tierfall.errors import CapacityError


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


def test_without_room_beside_images_of_other_ranks_a_warning_has_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 1 of two ranks is in their memory and nowhere else; the start after them has one rank."""
    with network(["a", "a"]) as both:
        opener = Opener(tmp_path, both)
        opener.place_of = {0: 0, 1: 0}
        tiers = opener.config(0).model_dump(mode="json", exclude_unset=True)["tiers"]
        tiers[0] |= {"capacity": "280KiB"}
        stop_before_any_flush(opener, monkeypatch, elements=1 << 15, tiers=tiers)
    config = {"run": "run", "max_wait": "2s", "tiers": tiers}
    (file := tmp_path / "tiers.yaml").write_text(json.dumps(config))
    state = states(2)[0]
    with tierfall.open(config) as ckpt:
        ckpt.restore(state, skip=["w"])
        for step in (2, 3):
            with pytest.raises(CapacityError):
                ckpt.save(step, state).captured(SOON_S)
    (said,) = [text for text in caplog.messages if "no room beside 1@1" in text]
    assert "tierfall drain" in said
    assert "raise the capacity" in said
    assert CliRunner().invoke(app, ["drain", "--config", str(file)]).exit_code == 0
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(state, skip=["w"])
        assert report is not None
        assert report.step == 1
        ckpt.save(2, state, block=True)


def test_memory_grows_when_the_optimizer_state_appears_after_the_first_save(
    make_config: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    model = torch.nn.Linear(100, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    config = make_config()
    del config["tiers"][0]["capacity"]
    with tierfall.open(config) as ckpt:
        small = ckpt.save(1, state, block=True)
        before = ckpt.statistics().capacity_bytes["host"] or 0
        model(torch.randn(2, 100)).sum().backward()
        optimizer.step()
        large = ckpt.save(2, state, block=True)
        assert large.stats.bytes > 2 * small.stats.bytes - 70_000
        after = ckpt.statistics().capacity_bytes["host"] or 0
        assert after >= 2 * large.stats.bytes > before  # the next capture need not wait for a flush
    loaded = tierfall.load(tmp_path / "disk", step=2)
    assert torch.equal(
        loaded["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )
