"""A restore between a forward and its backward pass: autograd raises, as after load_state_dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tierfall

MakeConfig = Callable[..., dict[str, Any]]


def test_a_backward_pass_of_before_a_restore_raises(make_config: MakeConfig) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    factor = torch.ones(4, 8).t().requires_grad_()  # filled through a temporary
    state = {"model": model, "factor": factor}
    inputs = torch.randn(4, 8)
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state, block=True)
        for only in (["model.1"], ["factor"]):
            loss = (model(inputs) * factor.t()).pow(2).mean()
            ckpt.restore(state, only=only)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        loss = (model(inputs) * factor.t()).pow(2).mean()
        ckpt.restore(state, only=["rng"])  # nothing that it uses
        loss.backward()
        model.zero_grad()
        ckpt.restore(state)
        (model(inputs) * factor.t()).pow(2).mean().backward()  # a new one


def test_all_that_a_restore_fills_has_a_new_version(make_config: MakeConfig) -> None:
    def make() -> dict[str, Any]:
        model = nn.BatchNorm1d(3)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "extra": [torch.ones(2)]}

    def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
        moments = [t for each in state["optimizer"].state.values() for t in each.values()]
        return [*state["model"].parameters(), *state["model"].buffers(), *moments, *state["extra"]]

    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, make(), block=True)
        live = make()
        before = [(id(t), t._version) for t in tensors(live)]
        ckpt.restore(live)
    after = [(id(t), t._version) for t in tensors(live)]
    assert all(a[0] == b[0] and a[1] > b[1] for a, b in zip(after, before, strict=True))
