"""Requests that fit nothing, half-filled states and interrupted captures are never silent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tierfall
from tierfall.core.capture.copier import ImageCopier
from tierfall.errors import CaptureError

MakeConfig = Callable[..., dict[str, Any]]


class Linear(nn.Module):
    """One parameter that a plain SGD step changes by 1."""

    def __init__(self, size: int = 4096) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


def trained(size: int = 4096) -> tuple[Linear, torch.optim.Optimizer]:
    model = Linear(size)
    return model, torch.optim.SGD(model.parameters(), lr=1.0, fused=True)


def test_an_interrupt_at_the_barrier_goes_through_and_its_image_is_never_sealed(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer}
    with tierfall.open(make_config(disk={})) as ckpt:

        def update() -> None:
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()

        update()
        ckpt.save(1, state, block=True)
        update()
        with monkeypatch.context() as patch:
            held, run = threading.Event(), ImageCopier.run

            def run_later(self: ImageCopier) -> None:
                held.wait(30)
                run(self)

            patch.setattr(ImageCopier, "run", run_later)

            def interrupt(self: ImageCopier, *words: Any, **more: Any) -> bool:
                raise KeyboardInterrupt

            handle = ckpt.save(2, state)
            patch.setattr(ImageCopier, "copy_next", interrupt)
            with pytest.raises(KeyboardInterrupt):
                update()
            held.set()
            with pytest.raises(CaptureError, match="interrupted"):
                handle.captured(timeout=30)
        with pytest.raises(CaptureError, match="interrupted"):
            handle.captured(timeout=30)
        assert [info.step for info in ckpt.checkpoints()] == [1]
        update()
        ckpt.save(3, state, block=True)
        assert [info.step for info in ckpt.checkpoints()] == [1, 3]
