"""Lazy capture on a real GPU: hundreds of times, the device's own order wins the race."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.core.capture.lazy_help import MakeConfig, Trainer, assert_same, saved, warmed_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TURNS = 30
"""Of each of nine ways; a turn takes up to 0.1 s, most of it to write the image to disk and to load it again."""
LAYERS, WIDTH = 6, 512


class OnGpu(Trainer):
    """A model whose stream is busy whenever it is saved; ``now`` copies in the stream's order, waiting for nothing."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.model = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(WIDTH)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **options)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.ballast = torch.randn(4096, 4096, device="cuda")

    def backward(self) -> None:
        for _ in range(8):
            self.ballast = torch.tanh(self.ballast @ self.ballast)
        self.model(torch.randn(64, WIDTH, device="cuda")).pow(2).mean().backward()


@pytest.mark.parametrize("slab", [None, "1MiB", "256MiB"])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_an_update_at_once_after_save_never_reaches_the_image(
    make_config: MakeConfig, tmp_path: Path, options: dict[str, Any], slab: str | None
) -> None:
    config = make_config(chunk="1MiB", host={"capacity": "512MiB"}, disk={"retain": {"last": 3}})
    if slab is not None:
        config["tiers"].insert(0, {"name": "spare", "kind": "device", "capacity": slab})
    trainer = OnGpu(**options)
    with tierfall.open(config) as ckpt:
        warmed_up(ckpt, trainer)
        for step in range(2, 2 + TURNS):
            trainer.backward()  # the stream is busy
            before = trainer.now()
            handle = ckpt.save(step, trainer.state)
            assert handle.stats.lazy
            trainer.optimizer.step()
            trainer.model[-1].running_mean.add_(1)
            trainer.optimizer.zero_grad()
            handle.wait()
            assert_same(saved(tmp_path / "disk", step), {k: v.cpu() for k, v in before.items()})
