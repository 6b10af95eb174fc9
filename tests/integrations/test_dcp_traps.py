"""What DCP does that a storage writer may fall over: plans that it keeps, what its planners hand out, saves that
overlap, and an optimizer that it steps to see its state."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

import tierfall
from tests.core.capture.lazy_help import PATIENCE_S, Trainer
from tests.integrations.dcp_help import QUIET, nested, same
from tierfall.core.types.errors import CaptureError, StepError
from tierfall.integrations.dcp import LazyStager, TierReader, TierWriter

pytestmark = pytest.mark.filterwarnings(QUIET)

MakeConfig = Callable[..., dict[str, Any]]


def begin(ckpt: tierfall.Checkpointer, step: int, state: Any, lazy: bool, **options: Any) -> Any:
    if lazy:
        options["async_stager"] = LazyStager(ckpt)
    writer = TierWriter(ckpt, step=step, until="disk")
    return dcp.async_save(state, storage_writer=writer, **options)


# Plans -----------------------------------------------------------------------------------------------


def test_a_save_whose_ranks_do_not_meet_is_a_checkpoint(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()) as ckpt:
        state = {"w": torch.arange(3.0), "n": 1}
        writer = TierWriter(ckpt, step=1, until="disk")
        metadata = dcp.save(state, storage_writer=writer, use_collectives=False)
        assert metadata.storage_data is None
    assert same(tierfall.load(make_config()), state)


def test_what_is_staged_has_no_bytes(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()) as ckpt:
        writer = TierWriter(ckpt, step=1)
        state = {"w": torch.ones(3, 2), "l": [torch.ones(1), {"n": 1}], "n": 5}
        staged = LazyStager(ckpt).stage(state)
        assert staged["w"].is_meta
        assert staged["w"].shape == (3, 2)
        assert staged["l"][0].is_meta
        assert staged["l"][1] == {"n": 1}
        assert staged["n"] == 5
        with pytest.raises(
            CheckpointException
        ) as caught:  # of another writer than it was staged for
            dcp.save(staged, storage_writer=TierWriter(ckpt, step=2))
        assert isinstance(caught.value.failures[0][0], CaptureError)
        assert caught.match("w has no data here: a LazyStager staged it for another TierWriter")
        dcp.save(staged, storage_writer=writer)
        assert [c.step for c in ckpt.checkpoints()] == [1]


# What planners hand out ------------------------------------------------------------------------------


def as_they_come() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).view(4, 6)
    turning = torch.arange(6).to(torch.complex64) * (1 + 2j)
    return {
        "transposed": base.t(),
        "expanded": torch.tensor([1.0, 2.0, 3.0]).expand(4, 3),
        "every other column": base[:, ::2],
        "permuted": torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
        "rows": base.bfloat16()[1:],
        "mask": base > 3,
        "conjugate": turning.conj(),
        "negative": turning.conj().imag,
        "complex128": turning.to(torch.complex128),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "unsigned": torch.arange(4).to(torch.uint16),
    }


@pytest.mark.parametrize("lazy", [False, True])
def test_tensors_of_any_layout_and_kind_are_saved_and_loaded(
    make_config: MakeConfig, lazy: bool
) -> None:
    state = as_they_come()
    with tierfall.open(make_config()) as ckpt:
        if lazy:
            begin(ckpt, 1, state, lazy=True).result(PATIENCE_S)
        else:  # DCP's own stager drops what makes a tensor conjugate: torch 2.13
            dcp.save(state, storage_writer=TierWriter(ckpt, step=1))
        plain = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in state.items()}
        dcp.load(plain, storage_reader=TierReader(ckpt))
        assert same(plain, state)
        alike = {**copy.deepcopy(plain), "transposed": torch.zeros(4, 6).t()}
        alike["every other column"] = torch.zeros(4, 6)[:, ::2]
        alike["conjugate"] = torch.zeros(6, dtype=torch.complex64).conj()
        alike["negative"] = torch.zeros(6, dtype=torch.complex64).conj().imag
        dcp.load(alike, storage_reader=TierReader(ckpt))
        assert same(alike, state)


def test_a_planner_may_hand_out_views_and_what_it_has_just_made(make_config: MakeConfig) -> None:
    class Turning(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            found = super().transform_object(write_item, object)
            if write_item.index.fqn == "view":
                return found.t().contiguous().t()  # the same values, column by column
            return found.double() if write_item.index.fqn == "made" else found

    state = {"view": torch.arange(12.0).view(3, 4), "made": torch.arange(5.0), "n": 1}
    with tierfall.open(make_config()) as ckpt:
        writer = TierWriter(ckpt, step=1, until="disk")
        dcp.save(state, storage_writer=writer, planner=Turning())
        found = {"view": torch.zeros(3, 4), "made": torch.zeros(5), "n": 0}
        dcp.load(found, storage_reader=TierReader(ckpt))
        assert same(found, state)
    assert tierfall.load(make_config())["made"].dtype is torch.float64


# Saves that overlap ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [True, False])
def test_a_save_that_is_begun_before_the_last_is_planned_never_mixes_their_values(
    make_config: MakeConfig, tmp_path: Path, lazy: bool
) -> None:
    """A LazyStager captures in the order of the calls; else what DCP's threads write comes in theirs, and a step that
    comes too late is refused."""
    go_on = threading.Event()

    class Late(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            assert go_on.wait(PATIENCE_S)
            return super().create_local_plan()

    trainer, saved = Trainer(), {}
    with tierfall.open(make_config()) as ckpt:
        futures = []
        for step in (1, 2):
            trainer.step()
            state = nested(trainer)
            saved[step] = copy.deepcopy(state)
            planner = Late() if step == 1 else None
            futures.append(begin(ckpt, step, state, lazy, planner=planner))
        trainer.step()
        futures[1].result(PATIENCE_S)
        go_on.set()
        if lazy:
            futures[0].result(PATIENCE_S)
        else:
            with pytest.raises(CheckpointException) as late:
                futures[0].result(PATIENCE_S)
            assert isinstance(late.value.failures[0][0], StepError)
        ckpt.drain(PATIENCE_S)
        assert [c.step for c in ckpt.checkpoints()] == ([1, 2] if lazy else [2])
        for info in ckpt.checkpoints():
            assert same(tierfall.load(tmp_path / "disk", step=info.step), saved[info.step])
