"""Which tensors are captured lazily, by evidence from the loop; the others are copied before save() returns."""

from __future__ import annotations

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
    saved,
    warmed_up,
)
from tests.steps import wait_until
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.types.errors import StateChangedError
from tierfall.core.types.values import SaveOutcome
from tierfall.run import saver

pytestmark = pytest.mark.usefixtures("small_segments")


def damage(tensors: list[torch.Tensor]) -> None:
    """Write to them as torch does not count."""
    for tensor in tensors:
        tensor.data.add_(1)


def save_and_damage(
    ckpt: tierfall.Checkpointer,
    trainer: Trainer,
    held: Held,
    tensors: list[torch.Tensor],
    step: int = 2,
) -> SaveHandle:
    """Save lazily, write to tensors before anything is copied, and train on."""
    held.hold()
    handle = lazy_save(ckpt, trainer, step)
    snapshot = ckpt._capturer._current
    assert snapshot is not None
    assert not snapshot.copier.copied, "the rest is left to the capture"
    damage(tensors)
    held.free.set()
    trainer.step()
    return handle


def failed(handle: SaveHandle) -> BaseException:
    wait_until(lambda: handle.outcome is not SaveOutcome.PENDING, "the handle tells")
    error = handle.exception()
    assert error is not None
    return error


@pytest.mark.parametrize(("chunk", "at"), [(0, "beginning"), (9, "end"), (16, "end")])
def test_a_write_that_only_the_edge_of_one_chunk_has_met_is_found(
    make_config: MakeConfig,
    held: Held,
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
    at: str,
) -> None:
    """As a swap of all weights leaves it that runs beside the copy, and is undone before the step."""
    monkeypatch.setattr(saver, "DIGEST_BYTES", 0)
    trainer = Trainer()
    trainer.model = nn.Sequential(nn.Linear(40, 40), nn.Linear(512, 520, bias=False))
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.state = {"wide": trainer.model[1], "optimizer": trainer.optimizer}
    trainer.backward = lambda: trainer.model[0](torch.ones(40)).sum().backward()  # type: ignore[method-assign]
    weight: Any = trainer.model[1].weight
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        elements = weight.data.view(-1)[chunk * 16384 :][:16384]
        edge = elements[:48] if at == "beginning" else elements[-48:]
        kept = edge.clone()
        edge.zero_()
        held.free.set()
        snapshot = ckpt._capturer._current
        assert snapshot is not None
        wait_until(lambda: snapshot.copier.copied, "all is copied")
        edge.copy_(kept)
        trainer.step()
        assert isinstance(failed(handle), StateChangedError)


@pytest.mark.parametrize("kind", ["gaps", "shared", "complex", "conjugated"])
def test_what_samples_cannot_be_compared_of_is_fixed_when_save_returns(
    make_config: MakeConfig, tmp_path: Path, held: Held, kind: str
) -> None:
    numbers = torch.randn(1000, dtype=torch.complex128)
    tensor = {
        "gaps": torch.arange(1000.0)[::2],
        "shared": torch.zeros(1).expand(50),
        "complex": numbers,
        "conjugated": numbers.to(torch.complex64).conj(),
    }[kind]
    trainer = Trainer()
    trainer.state["odd"] = tierfall.item(tensor, changes="on_step")
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        before = tensor.clone()
        whole = tensor[:1] if kind == "shared" else tensor
        handle = save_and_damage(ckpt, trainer, held, [whole])
        handle.wait(timeout=PATIENCE_S)
    assert torch.equal(tierfall.load(tmp_path / "disk", step=2)["odd"], before)
    assert not torch.equal(tensor, before)


def test_a_parameter_that_comes_to_lie_with_gaps_is_fixed_when_save_returns(
    make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    """Nothing else in the state tells it from what it was at the save before."""
    trainer = Trainer()
    weight = trainer.model[0].weight
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        held.free.set()
        lazy_save(ckpt, trainer, 2).wait(timeout=PATIENCE_S)
        trainer.step()
        weight.data = torch.randn(100, 80)[:, ::2]
        before = weight.detach().clone()
        handle = save_and_damage(ckpt, trainer, held, [weight], step=3)
        handle.wait(timeout=PATIENCE_S)
    assert torch.equal(saved(tmp_path / "disk", 3)["model.0.weight"], before)


def test_the_moments_of_an_optimizer_that_does_not_step_are_fixed_when_save_returns(
    make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    trainer, other = Trainer(), Trainer()
    trainer.state["other"] = other.state
    with tierfall.open(make_config()) as ckpt:
        other.step()
        warmed_up(ckpt, trainer)
        moments = other.optimizer.state[other.model[0].weight]
        before = {name: value.clone() for name, value in moments.items()}
        handle = save_and_damage(ckpt, trainer, held, [*moments.values()])
        handle.wait(timeout=PATIENCE_S)
    assert_same(
        dict(tierfall.load(tmp_path / "disk", step=2)["other"]["optimizer"]["state"][0]), before
    )


class WithFrozen(Trainer):
    """The optimizer was given all parameters, frozen ones too, as many programs do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(30, 30) for _ in range(4)]).requires_grad_(False)
        self.optimizer.add_param_group({"params": [*self.encoder.parameters()]})
        self.state["encoder"] = self.encoder


def test_without_verify_a_frozen_parameter_of_the_optimizer_is_fixed_when_save_returns(
    make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    trainer = WithFrozen()
    with tierfall.open({**make_config(), "capture": {"verify": "off"}}) as ckpt:
        warmed_up(ckpt, trainer)
        before = {k: v.clone() for k, v in trainer.encoder.state_dict().items()}
        handle = save_and_damage(ckpt, trainer, held, [*trainer.encoder.parameters()])
        handle.wait(timeout=PATIENCE_S)
    assert_same(dict(tierfall.load(tmp_path / "disk", step=2)["encoder"]), before)
