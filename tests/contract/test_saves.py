"""What a save returns, when it blocks, what a state may hold, what is captured lazily, and which steps are saved."""

from __future__ import annotations

import collections
import dataclasses
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tierfall
from tests.contract.faulty import Faulty
from tests.contract.kit import (
    Log,
    Place,
    blank,
    equal,
    save_steps,
    state_of,
    train_a_step,
    training_state,
)
from tierfall.errors import (
    BackendError,
    CapacityError,
    CaptureError,
    ConfigError,
    FlushError,
    StateChangedError,
    StepError,
)

SOON_S = 20.0


def loaded(place: Place, step: int, tier: str = "disk") -> dict[str, Any]:
    """What one committed step of a tier holds."""
    (folder,) = [f for f in place.folders(tier) if f.name.startswith(f"step-{step:08d}-")]
    return dict(tierfall.load(folder))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def lazily(place: Place, **words: Any) -> dict[str, Any]:
    """A state, and a configuration with room for its images."""
    place.config(host={"capacity": "16MiB"}, **words)
    return training_state()


def next_step(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train a step; return the weights."""
    train_a_step(state["model"], state["optimizer"])
    return weights(state["model"])


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
        even.captured(timeout=SOON_S)
        even.wait("pfs", timeout=SOON_S)
        for wrong in ("nowhere", 5.0):
            with pytest.raises(ConfigError, match=r"disk|timeout="):
                even.wait(wrong)  # type: ignore[arg-type]
    assert place.steps("disk") == [1, 2]
    assert place.steps("pfs") == [2]


def test_statistics_of_a_save_name_its_bytes_and_the_seconds_until_each_tier(place: Place) -> None:
    place.config(disk={}, pfs={})
    with place.open() as ckpt:
        stats = ckpt.save(1, state_of(1), block=True).stats
    assert stats.bytes >= 80_000
    assert (stats.lazy, stats.lazy_bytes) == (False, 0)
    assert stats.captured_s is not None
    assert 0 < stats.blocked_s <= stats.captured_s <= stats.durable_s["pfs"]


def test_a_wait_ends_with_its_timeout_and_any_thread_may_wait(place: Place, store: Faulty) -> None:
    place.config(store=store.tier())
    with place.open() as ckpt:
        store.set("hang", call="put")
        handle = ckpt.save(1, state_of(1))
        handle.captured(timeout=SOON_S)
        with pytest.raises(TimeoutError):
            handle.wait(timeout=0.05)
        assert not handle.done()
        assert handle.outcome == "pending"
        thread = threading.Thread(target=handle.wait)
        thread.start()
        store.heal()
        thread.join(SOON_S)
        assert not thread.is_alive()
        assert handle.outcome == "saved"


def test_a_callback_is_made_once_on_a_thread_of_its_own_also_if_the_save_is_done(
    place: Place,
) -> None:
    place.config(near={}, far={})
    found: list[tuple[int, bool, bool]] = []
    done = threading.Event()

    def note(handle: tierfall.SaveHandle) -> None:
        found.append((handle.step, handle.done("far"), threading.current_thread().daemon))

    def note_thread(handle: tierfall.SaveHandle) -> None:
        if threading.current_thread() is not threading.main_thread():
            done.set()

    with place.open() as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).add_done_callback(note)
        handle = ckpt.save(3, state_of(3), block=True)
        handle.add_done_callback(lambda handle: 1 / 0)
        handle.add_done_callback(note_thread)
        assert done.wait(SOON_S), "what the one before raised stops nothing"
    assert [each[:2] for each in found] == [(1, True), (2, True)]


def test_close_calls_back_for_what_it_leaves_behind(place: Place, store: Faulty) -> None:
    place.config(disk={}, store=store.tier(), max_wait="0.3s")
    made: list[BaseException | None] = []
    ckpt = place.open()
    store.set("refuse")
    handle = ckpt.save(1, state_of(1))
    handle.wait("disk", timeout=SOON_S)
    handle.add_done_callback(lambda handle: made.append(handle.exception()))
    ckpt.close()
    (error,) = made
    assert isinstance(error, FlushError)
    assert place.steps("disk") == [1]


# A tier that does not take it ------------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_failed_flush_is_raised_by_the_handle_and_by_the_next_save_if_that_is_asked_for(
    place: Place, on_error: str, log: Log
) -> None:
    place.config(max_wait="0.5s", on_error=on_error)
    ckpt = place.open()
    run = place.root / "disk" / "run"
    run.rename(place.root / "gone")
    run.write_text("in its way")
    handle = ckpt.save(1, state_of(1))
    for _ in range(2):
        with pytest.raises(FlushError, match="disk"):
            handle.wait(timeout=SOON_S)
    assert handle.outcome == "failed"
    error = handle.exception()
    assert isinstance(error, FlushError)
    assert isinstance(error.__cause__, BackendError)
    assert log.wait("disk")
    if on_error == "raise":
        with pytest.raises(FlushError) as raised:
            ckpt.save(2, state_of(2))
        assert raised.value is error
    else:
        ckpt.save(2, state_of(2)).captured(timeout=SOON_S)
    run.unlink()
    (place.root / "gone").rename(run)
    assert ckpt.drain(SOON_S).left == ()
    assert handle.outcome == "saved", "it is retried until the tier has it"
    assert handle.exception() is None
    ckpt.close()
    assert place.steps() == ([1] if on_error == "raise" else [1, 2])


THREE_IMAGES = "600KiB"


@pytest.mark.parametrize("when_full", ["wait", "skip"])
def test_a_save_without_room_in_memory_is_skipped_after_max_wait_or_at_once(
    place: Place, store: Faulty, when_full: str, log: Log
) -> None:
    max_wait_s = {"wait": 1, "skip": 30}[when_full]
    host = {"capacity": THREE_IMAGES, "when_full": when_full}
    place.config(store=store.tier(), host=host, max_wait=f"{max_wait_s}s")
    with place.open() as ckpt:
        store.set("hang", "step-", call="put")
        began = time.monotonic()
        handles = [ckpt.save(step, state_of(step)) for step in (1, 2, 3, 4)]
        assert (time.monotonic() - began >= max_wait_s) == (when_full == "wait")
        assert [h.outcome for h in handles] == [*["pending"] * 3, "skipped"]
        last = handles[-1]
        with pytest.raises(CapacityError, match="host"):
            last.wait(timeout=SOON_S)
        assert ckpt.statistics().skipped_saves == 1
        assert log.wait("skipped")
        store.heal()
        assert ckpt.drain().left == ()
    assert store.steps() == [1, 2, 3]


def test_a_save_may_wait_for_room_and_then_be_saved(place: Place, store: Faulty) -> None:
    host = {"capacity": THREE_IMAGES}
    place.config(store=store.tier(), host=host, max_wait="20s")
    with place.open() as ckpt:
        store.set("hang", "step-", call="put")
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step))
        opened = threading.Event()
        timer = threading.Timer(0.3, lambda: (opened.set(), store.heal()))
        timer.start()
        handle = ckpt.save(4, state_of(4))
        assert opened.is_set(), "it has not waited until there was room"
        assert handle.stats.blocked_s > 0
        handle.wait(timeout=SOON_S)
    assert store.steps() == [1, 2, 3, 4]


# What a state may hold -------------------------------------------------------------------------------


class WithoutState:
    """An object of one's own that nobody knows how to save."""


class Text(str):
    __slots__ = ()


class Table(dict[str, int]):
    pass


@dataclasses.dataclass
class Marked:
    field: int = 1


def _marked() -> Marked:
    made = Marked()
    made.more = 2  # type: ignore[attr-defined]
    return made


def _local() -> object:
    @dataclasses.dataclass
    class Local:
        a: int = 1

    return Local()


def _loop() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def _deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(5000):
        made = [made]
    return made


REFUSED: dict[str, Callable[[], object]] = {
    "function": lambda: print,
    "lambda": lambda: lambda: 0,
    "class": lambda: nn.Linear,
    "lock": threading.Lock,
    "generator": lambda: (n for n in range(3)),
    "file": lambda: open(os.devnull),  # noqa: SIM115 - the garbage collector closes it
    "object": WithoutState,
    "text_subclass": lambda: Text("a"),
    "dict_subclass": lambda: Table(a=1),
    "lambda_default": lambda: collections.defaultdict(lambda: 0),
    "more_than_fields": _marked,
    "local_class": _local,
    "python_random": random.Random,
    "numpy_random": np.random.default_rng,
    "objects": lambda: np.array([{}, 1], dtype=object),
    "records": lambda: np.zeros(2, [("a", "i4")]),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "meta": lambda: torch.empty(3, device="meta"),
    "loop": _loop,
    "too_deep": _deep,
}


@pytest.fixture(scope="module")
def open_run(module_place: Place) -> Iterator[tierfall.Checkpointer]:
    module_place.config()
    with module_place.open() as ckpt:
        yield ckpt


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore::ResourceWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_saved_is_refused_by_its_place_before_anything_is_written(
    open_run: tierfall.Checkpointer, module_place: Place, kind: str
) -> None:
    before = len(module_place.folders())
    number = list(REFUSED).index(kind)
    with pytest.raises(CaptureError, match=kind):
        open_run.save(2 * number + 1, {"w": torch.ones(3), "sub": [{kind: REFUSED[kind]()}]})
    assert len(module_place.folders()) == before
    open_run.save(2 * number + 2, {"w": torch.ones(3)}, block=True)
    assert len(module_place.folders()) == before + 1


def test_a_state_is_a_mapping_of_names(place: Place) -> None:
    place.config()
    with place.open() as ckpt:
        for wrong in (5, [torch.ones(3)], torch.ones(3), None, nn.Linear(2, 2)):
            with pytest.raises(CaptureError, match=r"mapping|dict"):
                ckpt.save(1, wrong)  # type: ignore[arg-type]
        ckpt.save(1, {"one": torch.ones(1)}, block=True)


class Broken:
    def state_dict(self) -> dict[str, int]:
        raise ZeroDivisionError("of the user")

    def load_state_dict(self, state: object) -> None: ...


def test_an_error_of_a_state_dict_is_the_cause(place: Place) -> None:
    place.config()
    with place.open() as ckpt, pytest.raises(CaptureError, match="mine") as raised:
        ckpt.save(1, {"mine": Broken()})
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_the_first_save_warns_of_what_a_restore_would_refuse_or_lack(
    place: Place, log: Log
) -> None:
    place.config()
    model, alpha = nn.Linear(2, 2), torch.zeros(3, requires_grad=True)
    groups: list[dict[str, Any]] = [
        {"params": [*model.parameters()]},
        {"params": [alpha], "lr": 0.5},
    ]
    optimizer = torch.optim.Adam(groups)
    state = {"model": model, "optimizer": optimizer, "dict": optimizer.state_dict()}
    with place.open() as ckpt:
        for step in (1, 2):
            ckpt.save(step, state, block=True)
        (lacking,) = log.lines("no entry")
        assert 'state["optimizer"]' in lacking
        assert "(3,)" in lacking
        assert len(log.lines("refuses to fill")) == 1


def test_the_first_save_warns_of_a_loader_that_shuffles_unless_the_state_has_its_order(
    place: Place, log: Log
) -> None:
    generator = torch.Generator()
    loader = torch.utils.data.DataLoader(range(8), shuffle=True, generator=generator)  # type: ignore[arg-type,var-annotated]
    place.config()
    with place.open() as ckpt:
        ckpt.save(1, {**state_of(1), "order": torch.Generator()}, block=True)
    assert log.lines("shuffles") == []
    with place.open(run="other") as ckpt:
        save_steps(ckpt, 1, 2)
    assert len(log.lines("shuffles")) == 1
    del loader


def test_a_save_between_backward_and_step_is_warned_of_once(place: Place, log: Log) -> None:
    state = lazily(place)
    with place.open() as ckpt:
        for step in (1, 2, 3):
            state["model"](torch.ones(1, 32)).sum().backward()
            ckpt.save(step, state)
            state["optimizer"].step()
            state["optimizer"].zero_grad()
    (warning,) = log.lines("between a backward pass")
    assert "step 2 was saved" in warning


# What may change after a save ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str
)
def test_an_optimizers_step_waits_for_what_is_not_captured(
    place: Place, options: dict[str, Any]
) -> None:
    """Saves are lazy from the second on, and have the values of the call, whatever follows it."""
    state = lazily(place)
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters(), **options)
    next_step(state)
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        for step in (2, 3, 4):
            expected = next_step(state)
            moments = state["optimizer"].state_dict()["state"][0]["exp_avg"].clone()
            handle = ckpt.save(step, state)
            next_step(state)
            handle.wait(timeout=SOON_S)
            assert handle.stats.lazy
            assert 0 < handle.stats.lazy_bytes < handle.stats.bytes
            found = loaded(place, step)
            assert equal(dict(found["model"]), expected)
            assert equal(found["optimizer"]["state"][0]["exp_avg"], moments)


class Counting:
    """An object whose state is its attributes."""

    def __init__(self) -> None:
        self.seen: list[int] = [1]
        self.sums = torch.ones(3)

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def test_everything_else_is_copied_before_save_returns(place: Place) -> None:
    state = lazily(place)
    array, counting, running = np.ones(4), Counting(), torch.ones(5)
    average: Any = tierfall.item(torch.ones(4000), changes="anytime")
    more = {"array": array, "counting": counting, "running": running, "average": average}
    nested = {"list": [1, {"deep": 2}]}
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        next_step(state)
        handle = ckpt.save(2, {**state, **more, "nested": nested})
        assert handle.stats.lazy
        array[:] = 9
        counting.seen.append(2)
        counting.sums.zero_()
        running.zero_()
        average.value.zero_()
        nested["list"][1]["deep"] = 9  # type: ignore[index]
        state["extra"]["epoch"] = 9
        handle.wait(timeout=SOON_S)
    found = loaded(place, 2)
    assert found["array"].tolist() == [1] * 4
    assert found["counting"]["seen"] == [1]
    assert found["counting"]["sums"].tolist() == [1] * 3
    assert found["running"].tolist() == [1] * 5
    assert found["average"].tolist() == [1] * 4000
    assert (found["nested"], found["extra"]) == ({"list": [1, {"deep": 2}]}, {"epoch": 0})


def test_what_may_change_at_any_time_is_copied_before_save_returns(place: Place) -> None:
    """A parameter that is also in the state as such an item, and a whole module."""
    state = lazily(place)
    with place.open() as ckpt:
        for step in (1, 2, 3):
            expected = next_step(state)
            if step == 2:
                weight = state["model"][0].weight
                saved = {**state, "item": tierfall.item(weight, changes="anytime")}
            else:
                saved = {**state, "model": tierfall.item(state["model"], changes="anytime")}
            handle = ckpt.save(step, saved)
            with torch.no_grad():
                state["model"][0].weight.add_(1)
            handle.wait(timeout=SOON_S)
            assert equal(dict(loaded(place, step)["model"]), expected)


def test_a_parameter_that_no_optimizer_steps_is_copied_before_save_returns_and_named_once(
    place: Place, log: Log
) -> None:
    state = lazily(place)
    head = nn.Linear(2, 2)
    with place.open() as ckpt:
        for step in (1, 2, 3):
            next_step(state)
            before = weights(head)
            handle = ckpt.save(step, {**state, "head": head})
            with torch.no_grad():
                head.weight.add_(1)
            handle.wait(timeout=SOON_S)
            assert equal(dict(loaded(place, step)["head"]), before)
        assert handle.stats.lazy
    assert len(log.lines(r"head\.")) == 1


def test_what_changes_on_step_is_captured_lazily(place: Place) -> None:
    state = lazily(place)
    state["average"] = tierfall.item(
        {name: p.detach().clone() for name, p in state["model"].named_parameters()},
        changes="on_step",
    )
    with place.open() as ckpt:
        next_step(state)
        ckpt.save(1, state, block=True)
        next_step(state)
        alone = ckpt.save(2, state)
        next_step(state)
        average = sum(t.nbytes for t in state["average"].value.values())
        moments = 3 * average + 100
        assert alone.stats.lazy_bytes >= average + moments - 200
        alone.wait(timeout=SOON_S)
    assert equal(dict(loaded(place, 2)["average"]), state["average"].value)


def test_the_first_save_and_one_without_a_step_before_it_copy_everything(
    place: Place, log: Log
) -> None:
    state = lazily(place)
    with place.open() as ckpt:
        assert not ckpt.save(1, state).stats.lazy
        assert log.lines("blocking") == []
        for step in (2, 3):
            assert not ckpt.save(step, state).stats.lazy
        next_step(state)
        assert ckpt.save(4, state).stats.lazy
        assert len(log.lines("no optimizer step")) == 1
        statistics = ckpt.statistics()
        assert (statistics.saves, statistics.lazy_saves) == (4, 1)
        assert 0 < statistics.lazy_bytes < statistics.captured_bytes / 3


def test_with_mode_blocking_no_save_is_lazy(place: Place) -> None:
    state = lazily(place, capture={"mode": "blocking"})
    with place.open() as ckpt:
        for step in (1, 2):
            expected = next_step(state)
            handle = ckpt.save(step, state)
            assert not handle.stats.lazy
            with torch.no_grad():
                state["model"][0].weight.add_(1)
            handle.wait(timeout=SOON_S)
            assert equal(dict(loaded(place, step)["model"]), expected)


@pytest.mark.parametrize("by", ["wait_captured", "guard"])
def test_a_loop_without_an_optimizer_brackets_its_updates(place: Place, by: str) -> None:
    place.config(host={"capacity": "16MiB"})
    model = nn.Linear(64, 64)

    def update() -> None:
        with torch.no_grad():
            model.weight.add_(1)

    with place.open() as ckpt:
        ckpt.save(1, {"model": model})
        for step in (2, 3):
            if by == "guard":
                with ckpt.guard():
                    update()
            else:
                ckpt.wait_captured()
                update()
            expected = weights(model)
            handle = ckpt.save(step, {"model": model})
            assert handle.stats.lazy
        ckpt.wait_captured(timeout=SOON_S)
        update()
        handle.wait(timeout=SOON_S)
    assert equal(dict(loaded(place, 3)["model"]), expected)


def test_a_write_between_save_and_barrier_fails_that_save_and_names_the_tensor(
    place: Place, log: Log
) -> None:
    """By code that torch counts. The next saves copy such tensors before they return."""
    state = lazily(place)
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        next_step(state)
        handle = ckpt.save(2, state)
        with torch.no_grad():
            state["model"][0].weight.add_(1)
        for wait in (handle.wait, handle.captured):
            with pytest.raises(StateChangedError, match="weight") as raised:
                wait(timeout=SOON_S)
            assert raised.value.tensors == ("model.0.weight",)
        assert handle.outcome == "failed"
        assert log.wait("weight")
        expected = next_step(state)
        third = ckpt.save(3, state)
        with torch.no_grad():
            state["model"][0].weight.add_(1)
        third.wait(timeout=SOON_S)
    assert equal(dict(loaded(place, 3)["model"]), expected)
    assert [folder.name[:13] for folder in place.folders()] == ["step-00000001", "step-00000003"]


def large(place: Place, **words: Any) -> tuple[Any, dict[str, Any]]:
    """16 MiB of parameters: they are still being copied when ``save`` returns."""
    place.config(host={"capacity": "64MiB"}, **words)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
    return model, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def large_step(state: dict[str, Any]) -> None:
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()
    state["optimizer"].zero_grad()


@pytest.mark.parametrize("verify", ["off", "sample", True, False])
def test_a_write_of_one_element_that_torch_counts_fails_the_save(
    place: Place, verify: object
) -> None:
    model, state = large(place, capture={"verify": verify})
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        large_step(state)
        handle = ckpt.save(2, state)
        with torch.no_grad():
            model[3].weight[512, 512] += 1
        large_step(state)
        with pytest.raises(StateChangedError) as raised:
            handle.wait(timeout=SOON_S)
        assert raised.value.tensors == ("model.3.weight",)


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_a_write_that_torch_does_not_count_is_found_or_came_too_late_to_harm(
    place: Place, verify: str
) -> None:
    """A whole tensor by ``.data``; with ``full``, also a single element in the middle of one."""
    model, state = large(place, capture={"verify": verify})
    over = threading.Event()
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        large_step(state)
        expected = weights(model)
        handle = ckpt.save(2, state)
        if verify == "full":
            model[3].weight.data[512, 512] += 1
        else:
            model[3].weight.data.mul_(2)
        large_step(state)
        handle.add_done_callback(lambda handle: over.set())
        assert over.wait(SOON_S)
    if handle.outcome == "saved":
        assert verify == "full", "samples of the live tensor are compared, too"
        assert equal(dict(loaded(place, 2)["model"]), expected)
    else:
        error = handle.exception()
        assert isinstance(error, StateChangedError)
        assert error.tensors == ("model.3.weight",)


@pytest.mark.parametrize("how", ["resize", "share_memory"])
def test_a_storage_that_is_freed_in_place_waits_for_the_capture(place: Place, how: str) -> None:
    """As by frameworks that offload, and by torch.multiprocessing."""
    model, state = large(place)
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        ckpt.wait_captured()
        expected = weights(model)
        handle = ckpt.save(2, state)
        assert handle.stats.lazy
        for parameter in reversed([*model.parameters()]):
            if how == "resize":
                parameter.untyped_storage().resize_(0)
            else:
                parameter.share_memory_()
        handle.wait(timeout=SOON_S)
    assert equal(dict(loaded(place, 2)["model"]), expected)


def test_without_a_barrier_an_image_is_sealed_after_a_second(place: Place) -> None:
    """As after the last save of a training, or before a long evaluation."""
    state = lazily(place)
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        next_step(state)
        done = threading.Event()
        handle = ckpt.save(2, state)
        handle.add_done_callback(lambda handle: done.set())
        assert done.wait(SOON_S)
        assert handle.stats.lazy
        assert handle.outcome == "saved"


FORKS = """
    state = training_state()
    model, optimizer = state["model"], state["optimizer"]

    def child(call):
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                call()
                answer = "nothing raised"
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(writing, answer.encode())
            os._exit(0)
        os.close(writing)
        os.waitpid(pid, 0)
        with os.fdopen(reading) as pipe:
            print(pipe.read().replace("\\n", " "), flush=True)

    def tramples():
        for parameter in model.parameters():
            parameter.data.zero_()
        train_a_step(model, optimizer)

    with tierfall.open("tiers.yaml") as ckpt:
        ckpt.save(1, state, block=True)
        train_a_step(model, optimizer)
        expected = {name: p.clone() for name, p in model.state_dict().items()}
        handle = ckpt.save(2, state)
        child(tramples)
        child(handle.wait)
        child(lambda: ckpt.save(3, state))
        child(ckpt.close)
        import multiprocessing
        worker = multiprocessing.get_context("fork").Process(target=time.time)
        worker.start()
        worker.join(20)
        assert worker.exitcode == 0
        train_a_step(model, optimizer)
        handle.wait(timeout=20)
    assert equal(dict(tierfall.load("disk", step=2)["model"]), expected)
    print("whole")
"""


def test_a_forked_child_harms_no_capture_and_may_not_use_the_run(place: Place) -> None:
    place.config(host={"capacity": "16MiB"})
    lines = place.run(FORKS)
    assert lines.code == 0, lines.err
    harmless, *refused, last = lines.out.splitlines()
    assert (harmless, last) == ("nothing raised", "whole")
    assert len(refused) == 3
    for line in refused:
        assert line.startswith("ConfigError: ")
        assert "child" in line


# Steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [-1, 1.0, "1", True, 10**18, float("nan"), torch.tensor([1, 2])])
def test_a_step_is_an_integer_from_0_to_10_to_the_18(
    open_run: tierfall.Checkpointer, module_place: Place, step: Any
) -> None:
    before = module_place.folders()
    with pytest.raises(StepError, match="step must be"):
        open_run.save(step, state_of(1))
    assert module_place.folders() == before


def test_steps_only_rise_within_a_start(place: Place) -> None:
    place.config()
    with place.open() as ckpt:
        ckpt.save(5, state_of(5), block=True)
        for step in (5, 4):
            with pytest.raises(StepError, match="5"):
                ckpt.save(step, state_of(step))
        ckpt.save(6, state_of(6), block=True)
        ckpt.save(10**18 - 1, state_of(7), block=True)
    assert [int(folder.name.split("-")[1]) for folder in place.folders()] == [5, 6, 10**18 - 1]


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
        assert ckpt.save(2, state_of(2), block=True).attempt == 2
    with place.open(run="another") as ckpt:
        ckpt.begin()
        ckpt.save(1, state_of(1))


# maybe_save -------------------------------------------------------------------------------------------


def test_maybe_save_saves_the_steps_that_are_due_and_the_last_one_on_every_tier(
    place: Place,
) -> None:
    place.config(near={}, far={"flush": {"every": 10}}, interval={"every": 3})
    with place.open() as ckpt:
        handles = [
            ckpt.maybe_save(step, state_of(step), metrics={"loss": step}, tags=["t"])
            for step in range(1, 9)
        ]
        assert [h.step for h in handles if h is not None] == [3, 6]
    assert place.steps("near") == [3, 6, 8]
    assert place.steps("far") == [8]
    with place.open() as ckpt:
        newest = ckpt.checkpoints()[-1]
        assert (newest.step, newest.metrics, newest.tags) == (8, {"loss": 8}, ("t",))


def test_the_last_step_is_not_saved_twice_and_not_if_that_is_not_asked_for(place: Place) -> None:
    place.config(near={}, far={"flush": {"every": 10}}, interval={"every": 4})
    with place.open() as ckpt:
        for step in range(1, 9):
            ckpt.maybe_save(step, state_of(step))
    assert place.steps("near") == [4, 8]
    assert place.steps("far") == [8], "it was saved already, and goes to every tier"
    place.config(interval={"every": 4, "at_end": False}, run="other")
    with place.open() as ckpt:
        for step in range(1, 7):
            ckpt.maybe_save(step, state_of(step))
    assert [f.name for f in (place.root / "disk/other").glob("step-*")] == ["step-00000004-a0001"]


def test_a_step_that_save_was_called_for_is_not_saved_again(place: Place) -> None:
    place.config(interval={"every": 2})
    with place.open() as ckpt:
        ckpt.save(2, state_of(2))
        assert ckpt.maybe_save(2, state_of(2)) is None
        assert ckpt.maybe_save(4, state_of(4)) is not None
        ckpt.maybe_save(5, state_of(5))
        ckpt.save(100, state_of(100))
    assert place.steps() == [2, 4, 100]


def _fails(ckpt: tierfall.Checkpointer, state: dict[str, Any]) -> None:
    raise ZeroDivisionError


def _trains(ckpt: tierfall.Checkpointer, state: dict[str, Any]) -> None:
    train_a_step(state["model"], state["optimizer"])


def _writes(ckpt: tierfall.Checkpointer, state: dict[str, Any]) -> None:
    state["model"][0].weight.detach().numpy().fill(7)


def _replaces(ckpt: tierfall.Checkpointer, state: dict[str, Any]) -> None:
    state["optimizer"].state.clear()


def _restores(ckpt: tierfall.Checkpointer, state: dict[str, Any]) -> None:
    ckpt.restore(state, only=["model"])


@pytest.mark.parametrize("what", [_fails, _trains, _writes, _replaces, _restores])
def test_a_state_that_is_no_longer_the_last_steps_is_not_saved_at_the_end(
    place: Place, log: Log, what: Callable[..., None]
) -> None:
    state = lazily(place, interval={"every": 4})

    def train() -> None:
        with place.open() as ckpt:
            for step in range(1, 7):
                next_step(state)
                ckpt.maybe_save(step, state)
            what(ckpt, state)

    if what is _fails:
        with pytest.raises(ZeroDivisionError):
            train()
    else:
        train()
    assert [int(folder.name[5:13]) for folder in place.folders()] == [4]
    if what is not _restores:
        assert log.wait("the last step is not saved: step 6")


def test_what_changes_nothing_leaves_the_last_step_to_be_saved(place: Place) -> None:
    state = lazily(place, interval={"every": 4})
    with place.open() as ckpt:
        for step in range(1, 7):
            expected = next_step(state)
            ckpt.maybe_save(step, state)
        state["model"].eval()
        state["model"](torch.ones(1, 32)).sum().backward()
    assert equal(dict(loaded(place, 6)["model"]), expected)


def test_a_last_step_that_cannot_be_saved_is_raised_once_all_is_closed(place: Place) -> None:
    place.config(interval={"every": 4})
    ckpt = place.open()
    ckpt.save(1, state_of(1))
    ckpt.maybe_save(2, {"mine": lambda: None})
    with pytest.raises(CaptureError, match="mine"):
        ckpt.close()
    assert place.steps() == [1]
    place.open().close()


def test_a_signal_saves_at_the_next_step_and_the_handler_before_still_runs(place: Place) -> None:
    told: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        told.append(number)

    before = signal.signal(signal.SIGUSR1, mine)
    place.config(interval={"every": 10**6, "on_signal": ["SIGUSR1"], "at_end": False})
    try:
        with place.open() as ckpt:
            assert ckpt.maybe_save(1, state_of(1)) is None
            os.kill(os.getpid(), signal.SIGUSR1)
            assert ckpt.maybe_save(2, state_of(2)) is not None
            assert ckpt.maybe_save(3, state_of(3)) is None
        assert told == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert place.steps() == [2]


# Metrics and tags -------------------------------------------------------------------------------------


def test_metrics_are_read_at_the_call_whatever_numbers_they_are(place: Place) -> None:
    state = lazily(place)
    given: dict[str, Any] = {
        "tensor": torch.tensor(2.5),
        "graph": torch.tensor(2.5, requires_grad=True) * 1,
        "half": torch.tensor(2.5, dtype=torch.bfloat16),
        "array": np.array(2.5),
        "scalar": np.float32(2.5),
    }
    fixed = {"int": 7, "flag": True, "nan": float("nan"), "inf": torch.tensor(float("inf"))}
    with place.open() as ckpt:
        for step in (1, 2):
            next_step(state)
            handle = ckpt.save(step, state, metrics={**given, **fixed})
            with torch.no_grad():
                for name in ("tensor", "half", "array"):
                    given[name] *= 0
                    given[name] += 2.5 if step == 1 else 0
        handle.wait(timeout=SOON_S)
    with place.open() as ckpt:
        for info in ckpt.checkpoints():
            found = dict(info.metrics)
            assert np.isnan(found.pop("nan"))
            expected = {**dict.fromkeys(given, 2.5), "int": 7, "flag": 1, "inf": float("inf")}
            assert found == expected


@pytest.mark.parametrize(
    ("words", "error", "names"),
    [
        ({"tags": "best"}, ConfigError, "tags must be a list of names"),
        ({"tags": [1]}, ConfigError, "tags"),
        ({"tags": None}, ConfigError, "tags"),
        ({"metrics": {"loss": 10**400}}, CaptureError, "loss"),
        ({"metrics": {"loss": torch.ones(2)}}, CaptureError, "loss"),
        ({"metrics": {"loss": "low"}}, CaptureError, "loss"),
    ],
)
def test_wrong_metrics_and_tags_are_refused_and_nothing_is_saved(
    open_run: tierfall.Checkpointer,
    module_place: Place,
    words: dict[str, Any],
    error: type[Exception],
    names: str,
) -> None:
    before = module_place.folders()
    with pytest.raises(error, match=names):
        open_run.save(10**6, state_of(1), **words)
    assert module_place.folders() == before
