"""``torch.distributed.checkpoint`` on tierfall's tiers: ``TierWriter``, ``TierReader`` and ``LazyStager``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tierfall
from tests.contract.kit import IMAGE, Place, equal, flip, folder_of, train_a_step, training_state
from tierfall.errors import CapacityError, CaptureError, ConfigError, IntegrityError, StepError
from tierfall.integrations.dcp import LazyStager, TierReader, TierSavePlanner, TierWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*torch.distributed is unavailable"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]
SOON_S = 20.0


def now(trained: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a loop gives to DCP."""
    model, optimizer = get_state_dict(trained["model"], trained["optimizer"])
    return {"model": model, "optim": optimizer, "extra": {"epoch": 3, "best": 0.5}, **more}


def emptied(state: Any) -> Any:
    """The same structure with other values."""
    if isinstance(state, dict):
        return type(state)((key, emptied(value)) for key, value in state.items())
    if isinstance(state, list):
        return [emptied(value) for value in state]
    if isinstance(state, torch.Tensor):
        return torch.full_like(state, -1)
    return type(state)() if isinstance(state, (int, float, str)) else state


def cause(error: CheckpointException) -> BaseException:
    """What rank 0 raised."""
    return error.failures[0][0]


# Saving ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", [None, DefaultSavePlanner, TierSavePlanner])
def test_what_dcp_saves_is_a_checkpoint_like_any_other(
    place: Place, planner: type[DefaultSavePlanner] | None
) -> None:
    place.config()
    state = now(training_state(), names=["a", "b"], parts=[{"n": 1}, {"w": torch.ones(3)}])
    with place.open() as ckpt:
        writer = TierWriter(ckpt, step=1, until="disk", metrics={"loss": 0.5}, tags=["first"])
        dcp.save(state, storage_writer=writer, planner=planner and planner())
        (info,) = ckpt.checkpoints()
        assert (info.step, info.copies["disk"].state) == (1, "committed")
        assert (info.metrics, info.tags) == ({"loss": 0.5}, ("first",))
        loaded = emptied(state)
        dcp.load(loaded, storage_reader=TierReader(ckpt))
        assert equal(loaded, state)
    assert equal(dict(tierfall.load(place.root / "disk")["model"]), dict(state["model"]))
    tensors = safetensors.torch.load_file(folder_of(place, 1) / IMAGE)
    assert any(equal(t, state["model"]["0.weight"]) for t in tensors.values())
    assert place.cli("latest").out == "1@1\n"
    assert place.json("verify")["ok"]


def test_dcp_and_the_checkpointer_read_what_the_other_saved(place: Place) -> None:
    place.config()
    trained = training_state()
    state = now(trained)
    with place.open() as ckpt:
        dcp.save(state, storage_writer=TierWriter(ckpt, step=1, until="disk"))
        found = emptied(state)
        report = ckpt.restore(found)
        assert report is not None
        assert (report.step, equal(found, state)) == (1, True)
        mine = {"model": trained["model"], "optim": trained["optimizer"], "extra": state["extra"]}
        ckpt.save(2, mine, block=True)
        found = emptied(state)
        dcp.load(found, storage_reader=TierReader(ckpt, step=2))
        assert equal(found, state)
    other = training_state(1)
    set_state_dict(
        *(other["model"], other["optimizer"]),
        model_state_dict=found["model"],
        optim_state_dict=found["optim"],
    )
    assert equal(now(other)["optim"], state["optim"])


def test_a_save_is_done_once_memory_has_it_or_the_tier_that_until_names(place: Place) -> None:
    place.config(disk={"flush": {"every": 100}}, far={})
    with place.open() as ckpt:
        dcp.save({"n": 1}, storage_writer=TierWriter(ckpt, step=1))
        assert "disk" not in ckpt.checkpoints()[0].copies
        dcp.save({"n": 2}, storage_writer=TierWriter(ckpt, step=2, until="far"))
        assert [folder.name[:13] for folder in place.folders("far")][-1] == "step-00000002"
        with pytest.raises(ConfigError, match="host, disk, far"):
            TierWriter(ckpt, step=3, until="disc")


def test_cached_plans_serve_several_saves(place: Place) -> None:
    place.config()
    trained = training_state()
    saved = []
    with place.open() as ckpt:
        for step in (1, 2, 3):
            train_a_step(trained["model"], trained["optimizer"])
            state = now(trained)
            saved.append(copy.deepcopy(state))
            planner = TierSavePlanner(enable_plan_caching=True)
            writer = TierWriter(ckpt, step=step, until="disk")
            dcp.save(state, storage_writer=writer, planner=planner)
        for step, state in enumerate(saved, 1):
            found = emptied(state)
            dcp.load(found, storage_reader=TierReader(ckpt, step=step, resume=False))
            assert equal(found, state)


class Counter:
    """An object with a state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "values": torch.full((3,), float(self.count))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        assert state["values"].tolist() == [float(self.count)] * 3


def test_objects_come_back_and_what_dcp_would_pickle_is_refused_by_name(place: Place) -> None:
    place.config()
    with place.open() as ckpt:
        for value, name in (
            ({"inner": Counter(1)}, "entry.inner"),
            ({"f": object()}, "f"),
        ):
            with pytest.raises(CheckpointException, match=name) as raised:
                dcp.save({"entry": value}, storage_writer=TierWriter(ckpt, step=1))
            assert isinstance(cause(raised.value), CaptureError)
        dcp.save({"counter": Counter(7)}, storage_writer=TierWriter(ckpt, step=2))
        other = Counter(0)
        dcp.load({"counter": other}, storage_reader=TierReader(ckpt))
    assert other.count == 7


def test_a_writer_writes_one_step_and_steps_rise(place: Place) -> None:
    place.config()
    state = {"w": torch.ones(3)}
    with place.open() as ckpt:
        writer = TierWriter(ckpt, step=2)
        dcp.save(state, storage_writer=writer)
        with pytest.raises(CheckpointException, match="step 2"):
            dcp.save(state, storage_writer=writer)
        with pytest.raises(CheckpointException) as raised:
            dcp.save(state, storage_writer=TierWriter(ckpt, step=1))
        assert isinstance(cause(raised.value), StepError)
        for call in (
            lambda: dcp.save(state, checkpoint_id="x", storage_writer=TierWriter(ckpt, step=3)),
            lambda: dcp.load(state, checkpoint_id="x", storage_reader=TierReader(ckpt)),
        ):
            with pytest.raises(ConfigError, match="checkpoint_id"):
                call()


def test_a_state_without_room_in_memory_fails_the_save(place: Place) -> None:
    place.config(host={"capacity": "64KiB"})
    with place.open() as ckpt:
        with pytest.raises(CheckpointException) as raised:
            dcp.save({"w": torch.ones(1 << 20)}, storage_writer=TierWriter(ckpt, step=1))
        assert isinstance(cause(raised.value), CapacityError)
        assert ckpt.checkpoints() == []


# async_save ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [True, False])
def test_an_async_save_has_the_values_of_the_call_whatever_follows_it(
    place: Place, lazy: bool
) -> None:
    """With a ``LazyStager`` the optimizer's next step waits; without one DCP copies first."""
    place.config(host={"capacity": "16MiB"})
    trained = training_state()
    average = torch.ones(3000)
    with place.open() as ckpt:
        stager = {"async_stager": LazyStager(ckpt)} if lazy else {}
        for step in (1, 2, 3):
            train_a_step(trained["model"], trained["optimizer"])
            state = now(trained, average=average)
            expected = copy.deepcopy(state)
            future = dcp.async_save(
                state, storage_writer=TierWriter(ckpt, step=step, until="disk"), **stager
            )
            average.add_(1)
            train_a_step(trained["model"], trained["optimizer"])
            future.result(SOON_S)  # type: ignore[union-attr]
            found = emptied(expected)
            dcp.load(found, storage_reader=TierReader(ckpt, step=step, resume=False))
            assert equal(found, expected)
        assert (ckpt.statistics().lazy_saves > 0) is lazy


def test_a_lazy_stager_needs_a_writer_of_its_own_for_each_save(place: Place) -> None:
    place.config()
    state = {"w": torch.ones(3)}
    with place.open() as ckpt:
        stager = LazyStager(ckpt)
        unused = TierWriter(ckpt, step=3)
        with pytest.raises(ConfigError, match="3, 4"):
            dcp.async_save(state, storage_writer=TierWriter(ckpt, step=4), async_stager=stager)
        assert ckpt.checkpoints() == [], "nothing was captured"
        dcp.save(state, storage_writer=unused)
        future = dcp.async_save(state, storage_writer=TierWriter(ckpt, step=5), async_stager=stager)
        future.result(SOON_S)  # type: ignore[union-attr]
        assert [c.step for c in ckpt.checkpoints()] == [3, 5]


class Unable(DefaultSavePlanner):
    """It cannot plan."""

    def create_local_plan(self) -> Any:
        raise ValueError("this rank cannot plan")


def test_what_fails_after_the_call_is_raised_by_the_future_and_what_was_captured_stays(
    place: Place,
) -> None:
    place.config()
    with place.open() as ckpt:
        with pytest.raises(CaptureError, match="f"):
            dcp.async_save(
                {"f": print},
                storage_writer=TierWriter(ckpt, step=1),
                async_stager=LazyStager(ckpt),
            )
        future = dcp.async_save(
            {"w": torch.ones(3)},
            storage_writer=TierWriter(ckpt, step=2),
            async_stager=LazyStager(ckpt),
            planner=Unable(),
        )
        with pytest.raises(CheckpointException, match="cannot plan"):
            future.result(SOON_S)  # type: ignore[union-attr]
        ckpt.drain(SOON_S)
    assert tierfall.load(place.root / "disk", step=2)["w"].tolist() == [1, 1, 1]


# Loading -------------------------------------------------------------------------------------------------


def test_a_part_of_a_checkpoint_is_loaded_alone(place: Place) -> None:
    place.config()
    state = now(training_state())
    with place.open() as ckpt:
        dcp.save(state, storage_writer=TierWriter(ckpt, step=1))
        more = {"model": emptied(state["model"]), "new": torch.full((2,), 9.0)}
        with pytest.raises(CheckpointException, match="new"):
            dcp.load(more, storage_reader=TierReader(ckpt))
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(more, storage_reader=TierReader(ckpt), planner=planner)
    assert equal(more["model"], state["model"])
    assert more["new"].tolist() == [9, 9]


def test_the_run_continues_from_what_was_loaded(place: Place) -> None:
    place.config()
    with place.open() as ckpt:
        with pytest.raises(CheckpointException, match="no checkpoint"):
            dcp.load({"n": 0}, storage_reader=TierReader(ckpt))
        for step in (1, 2):
            dcp.save({"n": step}, storage_writer=TierWriter(ckpt, step=step, until="disk"))
    with place.open() as ckpt:
        state = {"n": 0}
        dcp.load(state, storage_reader=TierReader(ckpt, step=1, resume=False))
        assert state == {"n": 1}
        with pytest.raises(CheckpointException, match="restored none"):
            dcp.save({"n": 3}, storage_writer=TierWriter(ckpt, step=3))
        dcp.load(state, storage_reader=TierReader(ckpt))
        assert state == {"n": 2}
        dcp.load(state, storage_reader=TierReader(ckpt, step=1))
        dcp.save({"n": 22}, storage_writer=TierWriter(ckpt, step=2, until="disk"))
        dcp.load(state, storage_reader=TierReader(ckpt))
        assert state == {"n": 22}
        assert (2, 2) in {(c.step, c.attempt) for c in ckpt.checkpoints()}


def test_damage_is_read_elsewhere_and_else_an_error_that_says_so(place: Place) -> None:
    place.config(disk={}, far={})
    states = [{"w": torch.full((64 << 10,), float(step)), "n": step} for step in (1, 2)]
    with place.open() as ckpt:
        for step, state in enumerate(states, 1):
            dcp.save(state, storage_writer=TierWriter(ckpt, step=step, until="far"))
    flip(folder_of(place, 2) / IMAGE, -1)
    with place.open() as ckpt:
        found = emptied(states[1])
        with pytest.raises(CheckpointException) as raised:
            dcp.load(found, storage_reader=(reader := TierReader(ckpt, tier="disk")))
        assert isinstance(cause(raised.value), IntegrityError)
        assert reader.damaged
        dcp.load(found, storage_reader=TierReader(ckpt))
        assert equal(found, states[1])
    for tier in ("disk", "far"):
        flip(folder_of(place, 2, tier) / IMAGE, 40)
    with place.open() as ckpt:
        found = emptied(states[0])
        dcp.load(found, storage_reader=TierReader(ckpt))
        assert equal(found, states[0]), "the headers of step 2 are damaged everywhere"


def test_a_state_that_a_load_left_half_filled_is_not_saved_until_one_succeeds(
    place: Place,
) -> None:
    place.config()
    state = {"w": torch.full((64 << 10,), 1.0)}
    with place.open() as ckpt:
        for step in (1, 2):
            dcp.save(state, storage_writer=TierWriter(ckpt, step=step, until="disk"))
    flip(folder_of(place, 2) / IMAGE, -1)
    with place.open() as ckpt:
        dcp.load(state, storage_reader=TierReader(ckpt, step=1))
        for resume in (False, True):
            reader = TierReader(ckpt, step=2, attempt=1, resume=resume)
            with pytest.raises(CheckpointException, match="HALF FILLED"):
                dcp.load(emptied(state), storage_reader=reader)
            if not resume:
                dcp.save(state, storage_writer=TierWriter(ckpt, step=3))
        with pytest.raises(CheckpointException, match="half filled"):
            dcp.save(state, storage_writer=TierWriter(ckpt, step=4))
        dcp.load(state, storage_reader=TierReader(ckpt, step=3))
        dcp.save(state, storage_writer=TierWriter(ckpt, step=4))


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, crater: Path) -> None:
        self.crater = crater

    def __reduce__(self) -> Any:
        return (Path.touch, (self.crater,))


def test_nothing_in_a_checkpoint_is_unpickled(place: Place) -> None:
    place.config()
    crater, packed = place.root / "crater", place.root / "bomb.pt"
    torch.save(Bomb(crater), packed)
    torch.load(packed, weights_only=False)
    assert crater.exists(), "it is a bomb"
    crater.unlink()
    data = packed.read_bytes()
    charges = {
        "value": data,
        "tensor": torch.frombuffer(bytearray(data), dtype=torch.uint8),
    }
    with place.open() as ckpt:
        dcp.save({"x": charges}, storage_writer=TierWriter(ckpt, step=1))
        ckpt.save(2, {"x": charges}, block=True)
        for step in (1, 2):
            found = {"x": {"value": b"", "tensor": torch.zeros_like(charges["tensor"])}}
            dcp.load(found, storage_reader=TierReader(ckpt, step=step, resume=False))
            assert equal(found["x"], charges)
    assert not crater.exists()
