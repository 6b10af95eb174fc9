"""The Checkpointer's promises to a training loop, from the first step to the next start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tierfall

MakeConfig = Callable[..., dict[str, Any]]


# Memory ----------------------------------------------------------------------------------------------


def test_memory_grows_when_the_optimizer_state_appears_after_the_first_save(
    make_config: MakeConfig, tmp_path: Path
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
