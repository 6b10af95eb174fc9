"""An optimizer whose step is compiled: saves are as good as elsewhere, and torch.compile traces nothing of tierfall."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

import tierfall
from tierfall.core.capture.barrier import Barrier


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "error:Dynamo does not know how to trace")
def test_a_compiled_step_waits_for_the_capture_and_compiles_nothing_of_this_package(
    make_config: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced_by: list[object] = []
    at_step = Barrier._at_step

    def watched(barrier: Barrier, *args: Any) -> None:
        traced_by.append(get_eval_frame_callback())
        at_step(barrier, *args)

    monkeypatch.setattr(Barrier, "_at_step", watched)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    config, saved = make_config(), []
    with tierfall.open(config) as ckpt:
        for number in range(1, 5):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            step()
            saved.append((ckpt.save(number, {"model": model, "optimizer": optimizer}), [
                p.detach().clone() for p in model.parameters()
            ]))  # fmt: skip
        assert saved[-1][0].stats.lazy
    assert traced_by == [None] * 4
    for handle, parameters in saved:
        found = tierfall.load(config, step=handle.step)["model"]
        assert all(map(torch.equal, found.values(), parameters))
