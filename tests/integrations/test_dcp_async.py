"""``dcp.async_save``: with a LazyStager the call returns with nothing copied, and the step waits for the values before
it; with DCP's own stagers the state is copied first. Either way a failure is the future's to tell."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import tierfall
from tests.core.capture.lazy_help import PATIENCE_S, Held, Trainer
from tests.integrations.dcp_help import QUIET, Renaming, copied, nested, same
from tierfall.core.image import segments
from tierfall.core.types.errors import CaptureError, ConfigError
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


class Failing(DefaultSavePlanner):
    """Cannot even begin."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        raise ValueError("this rank cannot plan")


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


def test_what_no_optimizer_changes_is_copied_at_once(
    make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    trainer = Trainer()
    average = torch.ones(3000)
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        stager = LazyStager(ckpt)
        warmed_up(ckpt, trainer, stager)
        held.hold()
        state = {
            **nested(trainer),
            "average": average,
            "view": trainer.model[0].weight.detach()[3:],
        }
        before = copied(state)
        writer = TierWriter(ckpt, step=2, until="disk")
        future = dcp.async_save(state, storage_writer=writer, async_stager=stager)
        average.zero_()  # by nobody that tierfall could know of
        trainer.optimizer.step()
        held.free.set()
        result(future)
    loaded = tierfall.load(tmp_path / "disk", step=2)
    assert same(loaded["average"], before["average"])
    assert same(loaded["view"], before["view"])
    assert same(loaded["model"], before["model"])


def test_without_a_step_since_the_last_save_all_is_copied_at_once(
    make_config: MakeConfig, held: Held
) -> None:
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        stager = LazyStager(ckpt)
        warmed_up(ckpt, trainer, stager)
        for step in (2, 3):
            held.hold()
            writer = TierWriter(ckpt, step=step)
            future = dcp.async_save(nested(trainer), storage_writer=writer, async_stager=stager)
            assert held.arrived.wait(PATIENCE_S)
            assert held.fillings[-1].copied == (step == 3)
            held.free.set()
            result(future)


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


def test_a_lazy_save_is_for_the_one_writer_that_lives_unused(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()) as ckpt:
        stager, state = LazyStager(ckpt), {"w": torch.ones(3)}
        with pytest.raises(ConfigError, match="a new one for each save"):
            stager.stage(state)
        dropped = TierWriter(ckpt, step=1)
        cycle = [dropped]
        cycle.append(cycle)  # type: ignore[arg-type]
        del dropped, cycle
        result(lazily(ckpt, 2, state, stager))
        kept = TierWriter(ckpt, step=3)
        with pytest.raises(ConfigError, match=r"steps 3, 4 are unused.* in the call of async_save"):
            lazily(ckpt, 4, state, stager)
        assert [c.step for c in ckpt.checkpoints()] == [2], "nothing was captured for either"
        dcp.save(state, storage_writer=kept)
        result(lazily(ckpt, 5, state, stager))
        assert [c.step for c in ckpt.checkpoints()] == [2, 3, 5]


def test_a_writer_that_was_refused_is_not_captured_for(make_config: MakeConfig) -> None:
    state = {"w": torch.ones(3)}
    with tierfall.open(make_config()) as ckpt:
        refused, writer = TierWriter(ckpt, step=1), TierWriter(ckpt, step=2)
        with pytest.raises(ConfigError, match="leave it out"):
            dcp.save(state, storage_writer=refused, checkpoint_id="elsewhere")
        result(dcp.async_save(state, storage_writer=writer, async_stager=LazyStager(ckpt)))
        assert [c.step for c in ckpt.checkpoints()] == [2]


def test_a_writer_whose_planning_failed_is_not_captured_for(make_config: MakeConfig) -> None:
    state = {"w": torch.ones(3)}
    with tierfall.open(make_config()) as ckpt:
        with pytest.raises(CheckpointException) as kept:  # and with it the writer
            dcp.save(state, storage_writer=TierWriter(ckpt, step=1), planner=Failing())
        result(lazily(ckpt, 2, state, LazyStager(ckpt)))
        assert "this rank cannot plan" in str(kept.value)
        assert [c.step for c in ckpt.checkpoints()] == [2]


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


def test_a_capture_that_fails_is_the_futures_to_tell(make_config: MakeConfig, held: Held) -> None:
    trainer = Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        stager = LazyStager(ckpt)
        warmed_up(ckpt, trainer, stager)
        held.hold()
        writer = TierWriter(ckpt, step=2)
        future = dcp.async_save(nested(trainer), storage_writer=writer, async_stager=stager)
        with torch.no_grad():
            trainer.model[0].weight.add_(1)  # type: ignore[operator] # outside of a step
        held.free.set()
        with pytest.raises(CheckpointException, match="was changed between save"):
            result(future)


def test_saves_of_dcps_thread_and_of_the_loop_come_one_after_the_other(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = threading.Event()
    go_on = threading.Event()
    with tierfall.open(make_config()) as ckpt:
        real = ckpt._saver.save

        def slow(*given: Any, **more: Any) -> Any:
            if not inside.is_set():
                inside.set()
                assert go_on.wait(PATIENCE_S)
            return real(*given, **more)

        monkeypatch.setattr(ckpt._saver, "save", slow)
        future = dcp.async_save({"n": 1}, storage_writer=TierWriter(ckpt, step=1))
        assert inside.wait(PATIENCE_S)
        threading.Timer(0.1, go_on.set).start()
        ckpt.save(2, {"n": 2}, block=True)
        result(future)
        assert [c.step for c in ckpt.checkpoints()] == [1, 2]
