"""``dcp.async_save``: with a LazyStager the call returns with nothing copied, and the step waits for the values before
it; with DCP's own stagers the state is copied first. Either way a failure is the future's to tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import tierfall
from tests.core.capture.lazy_help import PATIENCE_S, Held, Trainer
from tests.integrations.dcp_help import QUIET, Renaming, copied, nested, same
from tierfall.core.image import segments
from tierfall.core.types.errors import CaptureError
from tierfall.integrations.dcp import LazyStager, TierWriter

pytestmark = pytest.mark.filterwarnings(QUIET)

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    monkeypatch.setattr(segments, "BATCH_BYTES", 4096)
    held = Held(monkeypatch)
    held.free.set()
    yield held
    held.free.set()


def result(future: Any) -> Any:
    assert isinstance(future, Future)
    return future.result(PATIENCE_S)


def lazily(ckpt: tierfall.Checkpointer, step: int, state: Any, stager: LazyStager) -> Any:
    return dcp.async_save(state, storage_writer=TierWriter(ckpt, step=step), async_stager=stager)


def warmed_up(ckpt: tierfall.Checkpointer, trainer: Trainer, stager: LazyStager) -> None:
    """The first save captures blocking; after it a step is seen."""
    trainer.step()
    writer = TierWriter(ckpt, step=1)
    result(dcp.async_save(nested(trainer), storage_writer=writer, async_stager=stager))
    assert not ckpt.statistics().lazy_saves
    trainer.step()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_a_lazy_save_returns_with_nothing_copied_and_holds_the_values_before_the_step(
    options: dict[str, Any], make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    trainer = Trainer(**options)
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        stager = LazyStager(ckpt)
        warmed_up(ckpt, trainer, stager)
        held.hold()
        state = nested(trainer)
        before = copied(state)
        writer = TierWriter(ckpt, step=2, until="disk")
        future = dcp.async_save(state, storage_writer=writer, async_stager=stager)
        assert held.arrived.wait(PATIENCE_S)
        filling = held.fillings[-1]
        assert not filling.copied
        assert filling.final_chunks == 0
        trainer.backward()  # needs no capture
        assert not filling.copied
        trainer.optimizer.step()  # helps: the capture thread stands still
        assert filling.copied
        assert not same(nested(trainer), before), "the step has changed what was saved"
        assert not future.done()
        held.free.set()
        result(future)
        assert ckpt.statistics().lazy_saves == 1
    assert same(tierfall.load(tmp_path / "disk", step=2), before)


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


def test_a_planner_that_changes_what_was_captured_is_refused_and_the_capture_stays(
    make_config: MakeConfig,
) -> None:
    with tierfall.open(make_config()) as ckpt:
        future = dcp.async_save(
            {"w": torch.ones(3)},
            storage_writer=TierWriter(ckpt, step=1),
            async_stager=LazyStager(ckpt),
            planner=Renaming(),
        )
        with pytest.raises(CheckpointException, match="xw is planned as "):
            result(future)
        ckpt.drain(PATIENCE_S)
        assert tierfall.load(make_config())["w"].tolist() == [1, 1, 1]
