"""A run with tensors of classes with ``__tensor_flatten__``: lazy capture, a restart, load and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import tierfall
from tests.core.capture.lazy_help import PATIENCE_S, Held, MakeConfig
from tests.integrations.dcp_help import QUIET
from tests.wrapped import Coded, CodedMomentum, is_same
from tierfall.config import load_config
from tierfall.core.format.catalog import merge
from tierfall.core.types.errors import CaptureError, StateChangedError
from tierfall.export.export import ExportFormat, ExportOptions, ExportResult, export
from tierfall.integrations.dcp import LazyStager, TierWriter
from tierfall.ops.reader import RunReader

pytestmark = pytest.mark.usefixtures("small_segments")


class Trainer:
    """A model with a frozen wrapped weight and a trained plain one, whose momentum is wrapped."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(40, 100), nn.Linear(100, 40, bias=False))
        frozen: Any = self.model[0]
        frozen.weight = nn.Parameter(Coded.of(frozen.weight.detach()), requires_grad=False)
        self.optimizer = CodedMomentum([self.trained])
        self.state = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    @property
    def trained(self) -> torch.Tensor:
        weight: torch.Tensor = self.model[1].weight  # type: ignore[assignment]
        return weight

    @property
    def frozen(self) -> Any:
        return self.model[0].weight

    @property
    def momentum(self) -> Any:
        return self.optimizer.state[self.trained]["momentum"]

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 40)).pow(2).mean().backward()
        self.optimizer.step()

    def assert_equals(self, other: Trainer) -> None:
        assert torch.equal(self.trained, other.trained)
        assert is_same(self.momentum, other.momentum)
        assert is_same(self.frozen, other.frozen)


def lazily_saved(ckpt: tierfall.Checkpointer, trainer: Trainer, held: Held) -> Any:
    """Save twice; the capture of the second stands still."""
    held.free.set()
    trainer.step()
    ckpt.save(1, trainer.state, block=True)
    trainer.step()
    held.hold()
    handle = ckpt.save(2, trainer.state)
    assert handle.stats.lazy
    assert held.arrived.wait(PATIENCE_S)
    return handle


def test_wrapped_momentum_is_captured_lazily_with_the_values_before_the_step(
    make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    trainer = Trainer(0)
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        handle = lazily_saved(ckpt, trainer, held)
        before = trainer.momentum.clone()
        assert held.fillings[-1].final_chunks == 0
        trainer.step()  # waits for the copies
        assert not is_same(trainer.momentum, before)
        held.free.set()
        handle.wait(timeout=PATIENCE_S)
    loaded = tierfall.load(tmp_path / "disk", step=2)
    assert is_same(loaded["optimizer"]["state"][0]["momentum"], before)
    assert is_same(loaded["model"]["0.weight"], trainer.frozen)


def test_inner_tensor_that_changes_outside_of_a_step_fails_the_save(
    make_config: MakeConfig, held: Held
) -> None:
    trainer = Trainer(0)
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        handle = lazily_saved(ckpt, trainer, held)
        trainer.momentum.codes.zero_()
        held.free.set()
        with pytest.raises(StateChangedError, match=r'\["momentum"\] was changed'):
            handle.wait(timeout=PATIENCE_S)


def exported(config: dict[str, Any], trainer: Trainer, out: Path, format: str) -> ExportResult:
    trainer.step()
    with tierfall.open(config) as ckpt:
        ckpt.save(1, trainer.state, block=True)
    with RunReader(load_config(config)) as run:
        (known,) = merge(run.list())
        return export(
            known, ("disk",), run.opener(), ExportOptions(format=ExportFormat(format), to=out)
        )


def test_export_as_safetensors_has_the_inner_tensors(make_config: MakeConfig, out: Path) -> None:
    trainer = Trainer(0)
    done = exported(make_config(), trainer, out, "safetensors")
    found = safetensors.torch.load_file(done.path)
    momentum = found["optimizer.state.model.1.weight.momentum%codes"]
    assert torch.equal(found["model.0.weight%codes"], trainer.frozen.codes)
    assert torch.equal(momentum, trainer.momentum.codes)


def test_export_for_torch_has_the_wrappers(make_config: MakeConfig, out: Path) -> None:
    trainer = Trainer(0)
    done = exported(make_config(), trainer, out, "torch")
    found = torch.load(done.path, weights_only=False)
    assert is_same(found["model"]["0.weight"], trainer.frozen)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_export_for_dcp_has_the_inner_tensors(make_config: MakeConfig, out: Path) -> None:
    trainer = Trainer(0)
    done = exported(make_config(), trainer, out, "dcp")
    codes = torch.zeros(100, 40, dtype=torch.int8)
    dcp.load({"model": {"0.weight": {"codes": codes}}}, checkpoint_id=done.path)
    assert torch.equal(codes, trainer.frozen.codes)


def test_sharded_wrapper_is_refused(make_config: MakeConfig) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded: Any = DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()])
        sharded._local_tensor = Coded.of(torch.ones(2, 2))
        with (
            tierfall.open(make_config()) as ckpt,
            pytest.raises(CaptureError, match=r"Coded cannot be saved here: a sharded tensor"),
        ):
            ckpt.save(1, {"w": sharded})
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings(QUIET)
@pytest.mark.parametrize("lazy", [False, True])
def test_dcp_save_of_a_wrapper_is_refused(make_config: MakeConfig, lazy: bool) -> None:
    state = {"w": Coded.of(torch.ones(2, 2))}

    def save(ckpt: tierfall.Checkpointer) -> None:
        writer = TierWriter(ckpt, step=1)
        if lazy:
            dcp.async_save(state, storage_writer=writer, async_stager=LazyStager(ckpt)).result()
        else:
            dcp.save(state, storage_writer=writer)

    refused = pytest.raises((CaptureError, CheckpointException), match="are not saved by dcp")
    with tierfall.open(make_config()) as ckpt, refused:
        save(ckpt)
