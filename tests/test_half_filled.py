"""Requests that fit nothing, half-filled states and interrupted captures are never silent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierfall
from tierfall.core.capture.copier import ImageCopier
from tierfall.errors import CaptureError, ConfigError, RestoreError, StepError

MakeConfig = Callable[..., dict[str, Any]]


def folder_of(config: dict[str, Any], tier: str = "disk") -> Path:
    return Path(next(t["path"] for t in config["tiers"] if t["name"] == tier))


class Linear(nn.Module):
    """One parameter that a plain SGD step changes by 1."""

    def __init__(self, size: int = 4096) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


def trained(size: int = 4096) -> tuple[Linear, torch.optim.Optimizer]:
    model = Linear(size)
    return model, torch.optim.SGD(model.parameters(), lr=1.0, fused=True)


@pytest.mark.parametrize("request_", [{"attempt": 99}, {"tier": "second"}, {"step": 9}])
def test_a_request_that_fits_nothing_is_an_error_and_begins_no_line(
    make_config: MakeConfig, request_: dict[str, Any]
) -> None:
    config = make_config(disk={}, second={"flush": {"every": 5}})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, {"x": torch.ones(3)}, block=True)
    with tierfall.open(config) as ckpt:
        with pytest.raises(RestoreError, match="1@1 on disk"):
            ckpt.restore({"x": torch.zeros(3)}, **request_)
        with pytest.raises(StepError, match="restored none"):
            ckpt.save(2, {"x": torch.ones(3)})
    assert [path.name for path in folder_of(config).glob("run/step-*")] == ["step-00000001-a0001"]


def test_an_older_step_that_does_not_fit_either_says_that_the_state_is_half_filled(
    make_config: MakeConfig,
) -> None:
    config = make_config(disk={}, chunk="4KiB")
    with tierfall.open(config) as ckpt:
        ckpt.save(1, {"x": torch.ones(7)}, block=True)
        ckpt.save(2, {"x": torch.ones(50_000)}, block=True)
    root = folder_of(config)
    (image,) = root.glob("*/step-00000002-*/rank-*.safetensors")
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)
    with tierfall.open(config) as ckpt, pytest.raises(RestoreError) as caught:
        ckpt.restore({"x": torch.zeros(50_000)})
    assert "HALF FILLED" in str(caught.value)
    assert "nothing was written" not in str(caught.value)


def test_an_older_step_that_lacks_what_a_damaged_one_has_written_to_is_refused(
    make_config: MakeConfig,
) -> None:
    """The image is in the page cache, from where bytes go straight to their targets, before they are verified."""
    config = make_config(disk={}, chunk="128KiB")
    base, later = torch.ones(1 << 17), torch.ones(1 << 17)
    with tierfall.open(config) as ckpt:
        ckpt.save(1, {"base": base}, block=True)
        ckpt.save(2, {"base": base + 1, "later": later}, block=True)
    (image,) = folder_of(config).glob("*/step-00000002-*/rank-*.safetensors")
    data = bytearray(image.read_bytes())
    data[-3] ^= 1  # within the tensor that came later
    image.write_bytes(data)
    state = {"base": torch.zeros(1 << 17), "later": torch.full((1 << 17,), -1.0)}
    with tierfall.open(config) as ckpt:
        with pytest.raises(
            RestoreError, match=r"restore of 1@1: it does not have later, which 2@1"
        ):
            ckpt.restore(state, strict=False)
        with pytest.raises(StepError, match="left the state half filled"):
            ckpt.save(2, state)
        state["later"] = torch.full((1 << 17,), -1.0)
        report = ckpt.restore(state, step=1, strict=False)
        assert report is not None
        assert report.step == 1
        ckpt.save(2, state, block=True)
    assert (state["base"] == 1).all()
    assert (state["later"] == -1).all()


class Stubborn:
    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("no")


def test_an_object_that_refuses_its_state_leaves_a_half_filled_one_and_that_is_reported(
    make_config: MakeConfig,
) -> None:
    config = make_config(disk={})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, {"x": torch.ones(3), "b": Stubborn()}, block=True)
    with tierfall.open(config) as ckpt, pytest.raises(RestoreError, match="HALF FILLED"):
        ckpt.restore({"x": torch.zeros(3), "b": Stubborn()})


def test_a_state_that_a_restore_left_half_filled_is_not_saved_until_another_succeeds(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stubborn, "load_state_dict", lambda self, state: None)
    state = {"x": torch.ones(3), "b": Stubborn()}
    with tierfall.open(make_config(disk={})) as ckpt:
        for step in (1, 2):
            state["x"].fill_(step)  # type: ignore[union-attr]
            ckpt.save(step, state, block=True)
        monkeypatch.undo()
        with pytest.raises(RestoreError, match="HALF FILLED"):
            ckpt.restore(state, step=1)
        for save in (ckpt.save, ckpt.maybe_save):
            with pytest.raises(StepError, match="left the state half filled"):
                save(3, state)
        monkeypatch.setattr(Stubborn, "load_state_dict", lambda self, state: None)
        ckpt.restore(state, step=2)
        ckpt.save(3, state, block=True)


def test_an_interrupt_at_the_barrier_goes_through_and_its_image_is_never_sealed(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer}
    with tierfall.open(make_config(disk={})) as ckpt:

        def update() -> None:
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()

        update()
        ckpt.save(1, state, block=True)
        update()
        with monkeypatch.context() as patch:
            held, run = threading.Event(), ImageCopier.run

            def run_later(self: ImageCopier) -> None:
                held.wait(30)
                run(self)

            patch.setattr(ImageCopier, "run", run_later)

            def interrupt(self: ImageCopier, *words: Any, **more: Any) -> bool:
                raise KeyboardInterrupt

            handle = ckpt.save(2, state)
            patch.setattr(ImageCopier, "copy_next", interrupt)
            with pytest.raises(KeyboardInterrupt):
                update()
            held.set()
            with pytest.raises(CaptureError, match="interrupted"):
                handle.captured(timeout=30)
        with pytest.raises(CaptureError, match="interrupted"):
            handle.captured(timeout=30)
        assert [info.step for info in ckpt.checkpoints()] == [1]
        update()
        ckpt.save(3, state, block=True)
        assert [info.step for info in ckpt.checkpoints()] == [1, 3]


def test_words_for_lists_are_refused(make_config: MakeConfig) -> None:
    with tierfall.open(make_config(disk={})) as ckpt:
        with pytest.raises(ConfigError, match=r"tags must be a list of names"):
            ckpt.save(1, {"x": 1}, tags="best")
        with pytest.raises(ConfigError, match=r"tags"):
            ckpt.save(1, {"x": 1}, tags=[1])  # type: ignore[list-item]
        ckpt.save(1, {"x": 1}, block=True)
        with pytest.raises(RestoreError, match="only must be a list"):
            ckpt.restore({"x": 0}, only="x")


def test_load_holds_a_step_folder_against_what_is_asked(make_config: MakeConfig) -> None:
    config = make_config(disk={})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, {"x": 5}, block=True)
    root = folder_of(config)
    (folder,) = root.glob("*/step-00000001-*")
    assert tierfall.load(folder)["x"] == 5
    for asked in ({"attempt": 9}, {"step": 2}):
        with pytest.raises(ConfigError, match="name the run's folder"):
            tierfall.load(folder, **asked)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="banana"):
        tierfall.load(folder, map_location="banana")


def test_a_number_of_ranks_that_is_none_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="expected a number"):
        tierfall.open(make_config(disk={}))
