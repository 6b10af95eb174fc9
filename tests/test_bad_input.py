"""Invalid arguments: states, steps, metrics, targets of a restore, and a Checkpointer used where it cannot be."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierfall
from tests.steps import blank, files_below, state_of, step_in, steps_on
from tierfall.core.types.errors import (
    CaptureError,
    ConfigError,
    LockError,
    RestoreError,
    StepError,
    TierfallError,
)
from tierfall.core.types.keys import STEP_MAX
from tierfall.run import group_commands

MakeConfig = Callable[..., dict[str, Any]]
MakeState = Callable[..., dict[str, Any]]


def in_a_child(action: Callable[[], None]) -> str:
    """Run in a forked child; return what it raised, as ``Kind: message``, or an empty text."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads is the point
        child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent compares it
            os.write(writer, f"{type(error).__name__}: {error}".encode()[:4000])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        output = pipe.read().decode()
    os.waitpid(child, 0)
    return output


# States ------------------------------------------------------------------------------------------


def _endless() -> dict[str, Any]:
    inner: dict[str, Any] = {}
    inner["self"] = inner
    return inner


UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "function": (lambda: len, r"state\[\"part\"\]\[\"it\"\]"),
    "object": (object, r"state\[\"part\"\]\[\"it\"\]"),
    "class": (lambda: dict, r"state\[\"part\"\]\[\"it\"\]"),
    "sparse": (lambda: torch.eye(3).to_sparse(), r"state\[\"part\"\]\[\"it\"\]"),
    "meta": (lambda: torch.empty(3, device="meta"), r"state\[\"part\"\]\[\"it\"\]"),
    "itself": (_endless, "contains itself"),
    "deep inside": (lambda: [1, {"x": (2, object())}], r"\[\"it\"\]\[1\]\[\"x\"\]\[1\]"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_value_that_cannot_be_saved_is_named_before_anything_is_written(
    name: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    make, where = UNSUPPORTED[name]
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        before = files_below(tmp_path / "disk")
        with pytest.raises(CaptureError, match=where):
            ckpt.save(2, {**state_of(2), "part": {"it": make()}})
        assert files_below(tmp_path / "disk") == before
        ckpt.save(2, state_of(2), block=True)
    assert steps_on(tmp_path / "disk") == [1, 2]


@pytest.mark.parametrize("state", [[1, 2], None, "model", 7])
def test_a_state_that_is_no_mapping(state: Any, make_config: MakeConfig) -> None:
    with (
        tierfall.open(make_config()) as ckpt,
        pytest.raises(CaptureError, match="expected a mapping"),
    ):
        ckpt.save(1, state)


@pytest.mark.parametrize(
    ("metrics", "output"),
    [
        ({"loss": "high"}, r"metrics\['loss'\]"),
        ({"loss": None}, r"metrics\['loss'\]"),
        ({"loss": torch.ones(3)}, r"metrics\['loss'\].*0-dim"),
        ({"loss": torch.ones(1)}, r"metrics\['loss'\].*0-dim"),
        ({"loss": 1 + 2j}, r"metrics\['loss'\]"),
        ({"loss": torch.tensor(1 + 2j)}, r"metrics\['loss'\] cannot be read"),
        ({"loss": torch.empty((), device="meta")}, r"metrics\['loss'\] cannot be read"),
        ({"loss": 10**400}, r"metrics\['loss'\] is too large for a 64-bit float"),
        ({"loss": Decimal("1e400")}, r"metrics\['loss'\] is too large for a 64-bit float"),
        ({"loss": np.ones(1)}, r"metrics\['loss'\].*0-dim"),
        ({"loss": np.str_("0.5")}, r"metrics\['loss'\]"),
        ({3: 0.5}, "a name is 3"),
        ([("loss", 0.5)], "metrics is a list, expected"),
        (7, "metrics is an int, expected"),
    ],
)
def test_metrics_that_are_no_numbers(
    metrics: Any, output: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(make_config()) as ckpt:
        with pytest.raises(CaptureError, match=output):
            ckpt.save(1, state_of(1), metrics=metrics)
        ckpt.save(1, state_of(1), metrics={"loss": torch.tensor(0.5)}, block=True)
        assert ckpt.checkpoints()[0].metrics == {"loss": 0.5}
    assert steps_on(tmp_path / "disk") == [1]


@pytest.mark.parametrize("tag", ["../up", "", "a/b", "x" * 300, "-first"])
def test_tags_that_are_no_names(tag: str, make_config: MakeConfig, tmp_path: Path) -> None:
    with tierfall.open(make_config()) as ckpt:
        with pytest.raises(ConfigError, match=r"tag.*not a usable name"):
            ckpt.save(1, state_of(1), tags=[tag])
        ckpt.save(1, state_of(1), tags=["first"], block=True)
    assert steps_on(tmp_path / "disk") == [1]


# Steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [-1, True, "3", 1.0, None])
def test_steps_that_are_no_steps(step: Any, make_config: MakeConfig) -> None:
    with (
        tierfall.open(make_config()) as ckpt,
        pytest.raises(StepError, match="an integer of at least 0, not"),
    ):
        ckpt.save(step, state_of(1))


def test_the_largest_step_is_found_again_and_a_larger_one_is_refused(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(make_config()) as ckpt:
        for more in (STEP_MAX + 1, 10**5000):
            with pytest.raises(StepError, match=f"must be at most {STEP_MAX}, the largest"):
                ckpt.save(more, state_of(1))
        ckpt.save(STEP_MAX, {"extra": {"step": 1}}, block=True)
    with tierfall.open(make_config()) as ckpt:
        report = ckpt.restore({"extra": {}})
    assert report is not None
    assert report.step == STEP_MAX


@pytest.mark.parametrize("again", [2, 1, 0])
def test_a_step_is_saved_once(again: int, make_config: MakeConfig, tmp_path: Path) -> None:
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1))
        ckpt.save(2, state_of(2), block=True)
        before = files_below(tmp_path / "disk")
        with pytest.raises(StepError, match=r"at step 2 already.*never overwritten.*restore"):
            ckpt.save(again, state_of(99))
        assert files_below(tmp_path / "disk") == before
    assert steps_on(tmp_path / "disk") == [1, 2]


# Targets that do not fit -------------------------------------------------------------------------


def _save_one(config: dict[str, Any], state: dict[str, Any]) -> None:
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state, block=True)


MISFITS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "shape": (lambda: {**blank(), "w": torch.zeros(7)}, r"w.*(20000|7)"),
    "dtype": (lambda: {**blank(), "w": torch.zeros(20_000).double()}, r"w.*float64"),
    "missing": (lambda: {**blank(), "new": torch.zeros(3)}, "new"),
    "extra": (lambda: {"other": torch.zeros(3)}, "w"),
    "tensor for value": (lambda: {**blank(), "extra": torch.zeros(3)}, "extra"),
    "value for tensor": (lambda: {**blank(), "w": 3.0}, "w"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_state_that_does_not_fit_is_named_and_left_alone(
    name: str, make_config: MakeConfig
) -> None:
    make, output = MISFITS[name]
    config = make_config()
    _save_one(config, state_of(1))
    target, untouched = make(), make()
    with tierfall.open(config) as ckpt:
        with pytest.raises(RestoreError, match=output):
            ckpt.restore(target)
        assert str(target) == str(untouched)
        state = blank()
        report = ckpt.restore(state)
        assert report is not None
        assert step_in(state) == 1


def test_without_strict_what_fits_is_restored(make_config: MakeConfig) -> None:
    config = make_config()
    _save_one(config, {**state_of(1), "old": torch.ones(3)})
    state = {**blank(), "new": torch.full((3,), 5.0)}
    with tierfall.open(config) as ckpt:
        with pytest.raises(RestoreError, match="new"):
            ckpt.restore(state)
        assert ckpt.restore(state, strict=False) is not None
    assert step_in(state) == 1
    assert torch.equal(state["new"], torch.full((3,), 5.0))


def test_without_strict_a_wrong_shape_is_an_error_all_the_same(make_config: MakeConfig) -> None:
    config = make_config()
    _save_one(config, state_of(1))
    with tierfall.open(config) as ckpt, pytest.raises(RestoreError, match="w"):
        ckpt.restore({**blank(), "w": torch.zeros(7)}, strict=False)


def test_another_model_than_the_saved_one(make_config: MakeConfig, make_state: MakeState) -> None:
    config = make_config()
    _save_one(config, make_state(1))
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    target = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "extra": {}}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with tierfall.open(config) as ckpt, pytest.raises(RestoreError, match=r"model.*0\.weight"):
        ckpt.restore(target)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ({"tier": "tape"}, r"no tier is named 'tape'; there are host, disk"),
        ({"unreachable": "maybe"}, "'raise' or 'ignore', not 'maybe'"),
    ],
)
def test_restore_with_words_that_mean_nothing(
    words: dict[str, Any], output: str, make_config: MakeConfig
) -> None:
    with tierfall.open(make_config()) as ckpt, pytest.raises(ConfigError, match=output):
        ckpt.restore(blank(), **words)


# Nothing there -----------------------------------------------------------------------------------


def test_a_first_start_restores_nothing_and_may_save(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(make_config()) as ckpt:
        state = blank()
        assert ckpt.restore(state) is None
        assert step_in(state) == -1
        with pytest.raises(
            RestoreError, match="no checkpoint of step 7 to restore; there are: none"
        ):
            ckpt.restore(state, step=7)
        ckpt.save(1, state_of(1), block=True)
        with pytest.raises(RestoreError, match="step 7"):
            ckpt.restore(state, step=7)
        with pytest.raises(RestoreError, match=r"step 1 of attempt 5"):
            ckpt.restore(state, step=1, attempt=5)
        for order in (ckpt.pin, ckpt.unpin, ckpt.delete):
            with pytest.raises(StepError, match=r"step 7 is not known.*1@1"):
                order(7)
    assert steps_on(tmp_path / "disk") == [1]


def test_load_of_nothing_says_what_was_expected(tmp_path: Path, make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"gone.*does not exist; expected"):
        tierfall.load(tmp_path / "gone")
    (tmp_path / "disk").mkdir()
    with pytest.raises(ConfigError, match="it holds no run"):
        tierfall.load(tmp_path / "disk")
    with pytest.raises(TierfallError, match="no checkpoint"):
        tierfall.load(make_config())
    assert list((tmp_path / "disk").iterdir()) == []


# A Checkpointer where it cannot be used ----------------------------------------------------------


def test_nothing_works_after_close(make_config: MakeConfig, tmp_path: Path) -> None:
    ckpt = tierfall.open(make_config())
    handle = ckpt.save(1, state_of(1))
    ckpt.close()
    ckpt.close()
    calls: list[Callable[[], object]] = [
        lambda: ckpt.save(2, state_of(2)),
        lambda: ckpt.maybe_save(2, state_of(2)),
        lambda: ckpt.restore(blank()),
        ckpt.checkpoints,
        ckpt.statistics,
        ckpt.drain,
        ckpt.wait_captured,
        ckpt.prune,
        lambda: ckpt.pin(1),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="closed; open another one"):
            call()
    handle.wait(timeout=0)
    assert handle.outcome == "saved"
    assert steps_on(tmp_path / "disk") == [1]


def test_a_forked_child_cannot_use_it_and_harms_nothing(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        for call in (
            lambda: ckpt.save(2, state_of(99)),
            lambda: ckpt.restore(blank()),
            ckpt.checkpoints,
            ckpt.close,
        ):
            output = in_a_child(call)
            assert output.startswith("ConfigError"), output
            assert "a forked child cannot use it" in output
        ckpt.save(2, state_of(2), block=True)
    assert steps_on(tmp_path / "disk") == [1, 2]


def test_a_second_one_in_the_same_process(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    with tierfall.open(config) as ckpt:
        with pytest.raises(ConfigError, match=r"second Checkpointer of run 'run'.*replace=True"):
            tierfall.open(config)
        ckpt.save(1, state_of(1), block=True)
        with tierfall.open(config, run="other") as other:
            other.save(1, state_of(1), block=True)
    assert steps_on(tmp_path / "disk") == steps_on(tmp_path / "disk", "other") == [1]


def test_a_second_one_in_another_process(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        output = in_a_child(lambda: tierfall.open(config) and None)
        assert output.startswith("LockError: run 'run' is owned on this machine by"), output
        assert f"process {os.getpid()}" in output
        assert "another run name" in output
        ckpt.save(2, state_of(2), block=True)
    assert issubclass(LockError, TierfallError)
    assert steps_on(tmp_path / "disk") == [1, 2]


# Exceptions in the block -------------------------------------------------------------------------


class LoopFailed(Exception):
    pass


def test_an_exception_in_the_block_passes_and_what_was_saved_stays(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    def loop() -> None:
        with tierfall.open(make_config()) as ckpt:
            ckpt.save(1, state_of(1))
            raise LoopFailed("loss is nan")

    with pytest.raises(LoopFailed, match="loss is nan") as caught:
        loop()
    assert not hasattr(caught.value, "__notes__")
    assert steps_on(tmp_path / "disk") == [1]


def test_a_failing_close_is_noted_on_the_exception_on_its_way(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise TierfallError("the disk is on fire")

    def loop() -> None:
        with tierfall.open(make_config()) as ckpt:
            ckpt.save(1, state_of(1), block=True)
            raise LoopFailed("loss is nan")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(group_commands, "drain_here", refuse)
        with pytest.raises(LoopFailed) as caught:
            loop()
    assert any("closing failed too: the disk is on fire" in n for n in caught.value.__notes__)
    assert "closing failed while another exception was being raised" in caplog.text
    assert steps_on(tmp_path / "disk") == [1]
    with tierfall.open(make_config()) as again:  # the lock was given back
        state = blank()
        again.restore(state)
        assert step_in(state) == 1
