"""What a state_dict hook makes of parameters: views and copies that nobody else has are captured lazily, the rest is
fixed when save() returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierfall
from tests.core.capture.lazy_help import (
    PATIENCE_S,
    Held,
    MakeConfig,
    Trainer,
    assert_same,
    lazy_save,
    warmed_up,
)
from tierfall.core.capture.lazy_evidence import LazyEvidence
from tierfall.core.state.view import StateView

KEYS = ("q", "k", "v")


class Fused(nn.Linear):
    """Queries, keys and values in one weight, stored as three; ``kept`` is what else holds them."""

    def __init__(self, split: Callable[[torch.Tensor, list[Any]], dict[str, Any]]) -> None:
        super().__init__(40, 60, bias=False)
        self.kept: list[Any] = []
        kept = self.kept

        def store(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> Any:
            state.update(
                {prefix + k: v for k, v in split(state.pop(prefix + "weight"), kept).items()}
            )

        def load(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
            state[prefix + "weight"] = torch.cat([state.pop(prefix + key) for key in KEYS], 0)

        self.register_state_dict_post_hook(store)
        self.register_load_state_dict_pre_hook(load)


def views(weight: torch.Tensor, kept: list[Any]) -> dict[str, Any]:
    return dict(zip(KEYS, weight.chunk(3, 0), strict=True))


def copies(weight: torch.Tensor, kept: list[Any]) -> dict[str, Any]:
    return {key: part.clone() for key, part in views(weight, kept).items()}


def kept_copies(weight: torch.Tensor, kept: list[Any]) -> dict[str, Any]:
    made = copies(weight, kept)
    kept[:] = made.values()
    return made


def kept_storages(weight: torch.Tensor, kept: list[Any]) -> dict[str, Any]:
    made = copies(weight, kept)
    kept[:] = [part.untyped_storage() for part in made.values()]
    return made


def weakly_kept(weight: torch.Tensor, kept: list[Any]) -> dict[str, Any]:
    made = copies(weight, kept)
    kept[:] = map(weakref.ref, made.values())
    return made


def kept_arrays(weight: torch.Tensor, kept: list[Any]) -> dict[str, Any]:
    kept[:] = [part.numpy().copy() for part in weight.chunk(3, 0)]
    return dict(zip(KEYS, map(torch.from_numpy, kept), strict=True))


def in_shared_memory(weight: torch.Tensor, kept: list[Any]) -> dict[str, Any]:
    made = {key: part.share_memory_() for key, part in copies(weight, kept).items()}
    kept[:] = [torch.from_numpy(part.numpy()) for part in made.values()]
    return made


@pytest.fixture
def lazily(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Of each tensor by its name, whether the last save leaves it to be copied after it has returned."""
    found: dict[str, bool] = {}
    choose = LazyEvidence.choose

    def noting(evidence: LazyEvidence, view: StateView) -> tuple[bool, ...]:
        chosen = choose(evidence, view)
        found.clear()
        found.update(zip(view.names, chosen, strict=True))
        return chosen

    monkeypatch.setattr(LazyEvidence, "choose", noting)
    return found


class FusedTrainer(Trainer):
    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        self.fused = fused
        self.state["fused"] = fused
        self.optimizer.add_param_group({"params": [*fused.parameters()]})

    def backward(self) -> None:
        super().backward()
        self.fused(torch.randn(4, 40)).pow(2).mean().backward()

    def parts(self) -> dict[str, torch.Tensor]:
        held: Any = self.fused.weight
        weight = held.detach()
        return {key: part.clone() for key, part in zip(KEYS, weight.chunk(3, 0), strict=True)}


def zero(held: Any) -> None:
    if isinstance(held, torch.UntypedStorage):
        held = torch.empty(0).set_(held)  # type: ignore[call-overload]
    if isinstance(held, weakref.ref):
        held = held()
    torch.as_tensor(held).data.zero_()


@pytest.mark.parametrize("split", [views, copies])
def test_what_a_hook_makes_is_captured_lazily_and_is_as_it_was_at_save(
    make_config: MakeConfig,
    tmp_path: Path,
    held: Held,
    lazily: dict[str, bool],
    split: Callable[..., Any],
) -> None:
    trainer = FusedTrainer(Fused(split))
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        for step in (2, 3):
            held.hold()
            wanted, handle = trainer.parts(), lazy_save(ckpt, trainer, step)
            assert [lazily[f"fused.{key}"] for key in KEYS] == [True] * 3
            held.free.set()
            trainer.step()
            handle.wait(timeout=PATIENCE_S)
            assert_same(dict(tierfall.load(tmp_path / "disk", step=step)["fused"]), wanted)


@pytest.mark.parametrize(
    "split",
    [
        kept_copies,
        kept_storages,
        weakly_kept,
        kept_arrays,
        in_shared_memory,
    ],
)
def test_what_a_hook_made_and_something_else_holds_is_fixed_when_save_returns(
    make_config: MakeConfig,
    tmp_path: Path,
    held: Held,
    lazily: dict[str, bool],
    split: Callable[..., Any],
) -> None:
    fused = Fused(split)
    trainer = FusedTrainer(fused)
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        wanted, handle = trainer.parts(), lazy_save(ckpt, trainer, 2)
        assert [lazily[f"fused.{key}"] for key in KEYS] == [False] * 3
        assert lazily["model.0.weight"]
        for each in fused.kept:
            zero(each)
        held.free.set()
        trainer.step()
        handle.wait(timeout=PATIENCE_S)
    assert_same(dict(tierfall.load(tmp_path / "disk", step=2)["fused"]), wanted)
