"""What a save returns, when it blocks, and what may change afterwards."""

from __future__ import annotations

import math
import threading

import pytest
import torch

import tierfall
from tests.contract.kit import (
    Place,
    blank,
    equal,
    state_of,
    step_in,
    train_a_step,
    training_state,
    wait_until,
)
from tierfall.errors import CaptureError, StateChangedError, StepError

SOON_S = 20.0


def loaded(place: Place, step: int, tier: str = "disk") -> dict[str, object]:
    """What one committed step of a tier holds."""
    (folder,) = [f for f in place.folders(tier) if f.name.startswith(f"step-{step:08d}-")]
    return dict(tierfall.load(folder))


# The handle ------------------------------------------------------------------------------------------


def test_a_handle_tells_where_the_step_goes_and_when_it_is_there(place: Place) -> None:
    place.config(disk={}, pfs={"flush": {"every": 2}})
    with place.open() as ckpt:
        odd = ckpt.save(1, state_of(1))
        assert (odd.step, odd.attempt, odd.tiers) == (1, 1, ("disk",))
        odd.wait(timeout=SOON_S)
        assert odd.done("disk")
        assert odd.outcome == "saved"
        assert odd.exception() is None
        even = ckpt.save(2, state_of(2))
        assert even.tiers == ("disk", "pfs")
        even.wait("pfs", timeout=SOON_S)
    assert place.steps("disk") == [1, 2]
    assert place.steps("pfs") == [2]


def test_statistics_of_a_save_name_its_bytes_and_the_seconds_until_each_tier(place: Place) -> None:
    place.config()
    with place.open() as ckpt:
        stats = ckpt.save(1, state_of(1), block=True).stats
    assert stats.bytes >= 80_000
    assert not stats.lazy
    assert 0 < stats.blocked_s <= stats.captured_s <= stats.durable_s["disk"]


def test_a_blocking_save_returns_once_the_last_tier_has_it(place: Place) -> None:
    place.config(disk={}, pfs={})
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        assert place.steps("pfs") == [1]


def test_a_callback_is_made_once_also_if_the_save_is_done(place: Place) -> None:
    place.config()
    found, done = [], threading.Event()
    with place.open() as ckpt:
        handle = ckpt.save(1, state_of(1))
        handle.add_done_callback(found.append)
        handle.wait(timeout=SOON_S)
        handle.add_done_callback(lambda h: done.set())
        assert done.wait(SOON_S)
    assert found == [handle]


def test_a_wait_ends_with_its_timeout(place: Place) -> None:
    place.config(disk={"bandwidth": "20kB/s"})
    with place.open() as ckpt:
        handle = ckpt.save(1, state_of(1))
        with pytest.raises(TimeoutError):
            handle.wait(timeout=0.05)
        assert not handle.done()
        assert handle.outcome == "pending"
        handle.wait(timeout=SOON_S)


# What may change after a save ------------------------------------------------------------------------


def test_an_optimizers_step_waits_for_what_is_not_captured(place: Place) -> None:
    """Saves are lazy from the second on, and have the values of the call, whatever follows it."""
    place.config(host={"capacity": "16MiB"})
    state = training_state()
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        for step in (2, 3):
            train_a_step(state["model"], state["optimizer"])
            expected = {name: p.detach().clone() for name, p in state["model"].named_parameters()}
            handle = ckpt.save(step, state)
            train_a_step(state["model"], state["optimizer"])
            handle.wait(timeout=SOON_S)
            assert handle.stats.lazy
            assert equal(loaded(place, step)["model"], expected)


def test_plain_values_and_tensors_are_copied_before_save_returns(place: Place) -> None:
    place.config()
    state = state_of(1)
    with place.open() as ckpt:
        handle = ckpt.save(1, state)
        state["w"].fill_(99)
        state["extra"]["step"] = 99
        handle.wait(timeout=SOON_S)
    assert place.steps() == [1]


def test_a_write_between_save_and_barrier_fails_that_save_and_names_the_tensor(
    place: Place,
) -> None:
    """By code that torch counts. The next save copies such tensors before it returns."""
    place.config(host={"capacity": "16MiB"})
    state = training_state()
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        train_a_step(state["model"], state["optimizer"])
        handle = ckpt.save(2, state)
        with torch.no_grad():
            state["model"][0].weight.add_(1)
        with pytest.raises(StateChangedError) as raised:
            handle.wait(timeout=SOON_S)
        assert raised.value.tensors == ("model.0.weight",)
        train_a_step(state["model"], state["optimizer"])
        ckpt.save(3, state, block=True)
    assert [folder.name[:13] for folder in place.folders()] == ["step-00000001", "step-00000003"]


def test_wait_captured_is_a_barrier_for_loops_without_an_optimizer(place: Place) -> None:
    place.config(host={"capacity": "16MiB"})
    model = torch.nn.Linear(64, 64)
    with place.open() as ckpt:
        ckpt.save(1, {"model": model})
        for step in (2, 3):
            with ckpt.guard(), torch.no_grad():
                model.weight.fill_(step)
            handle = ckpt.save(step, {"model": model})
            assert handle.stats.lazy
        handle.wait(timeout=SOON_S)
    assert equal(loaded(place, 3)["model"]["weight"], torch.full((64, 64), 3.0))  # type: ignore[index]


# Steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [-1, 1.0, "1", True, 10**18, math.nan])
def test_a_step_is_an_integer_from_0_to_10_to_the_18(place: Place, step: object) -> None:
    place.config()
    with place.open() as ckpt, pytest.raises((StepError, CaptureError, TypeError, ValueError)):
        ckpt.save(step, state_of(1))  # type: ignore[arg-type]
    assert place.folders() == []


def test_steps_only_rise_within_a_start(place: Place) -> None:
    place.config()
    with place.open() as ckpt:
        ckpt.save(5, state_of(5), block=True)
        for step in (5, 4):
            with pytest.raises(StepError, match="5"):
                ckpt.save(step, state_of(step))
        ckpt.save(6, state_of(6), block=True)
    assert place.steps() == [5, 6]


def test_a_start_in_a_run_with_checkpoints_must_restore_before_it_saves(place: Place) -> None:
    place.config()
    place.save(1)
    with place.open() as ckpt:
        with pytest.raises(StepError, match="restore"):
            ckpt.begin()
        with pytest.raises(StepError, match="restore"):
            ckpt.save(2, state_of(2))
        assert ckpt.restore(blank()) is not None
        ckpt.begin()
        ckpt.save(2, state_of(2), block=True)
    with place.open(fresh=True) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    state = blank()
    with place.open() as ckpt:
        report = ckpt.restore(state)
    assert report is not None
    assert (report.step, report.attempt, step_in(state)) == (1, 3, 1)


def test_maybe_save_saves_the_steps_that_are_due_and_the_last_one(place: Place) -> None:
    place.config(interval={"every": 3})
    state = training_state()
    with place.open() as ckpt:
        handles = []
        for step in range(1, 9):
            train_a_step(state["model"], state["optimizer"])
            handles.append(ckpt.maybe_save(step, state))
    assert [h.step for h in handles if h is not None] == [3, 6]
    wait_until(lambda: len(place.folders()) == 3, "the last step is saved at the end")
    assert [int(folder.name[5:13]) for folder in place.folders()] == [3, 6, 8]
