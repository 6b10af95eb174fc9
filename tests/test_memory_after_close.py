"""``close`` gives host memory back at once, whatever of the closed run is still referenced: nothing of it is mapped or
open any more, without a run of Python's garbage collector."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.core.ranks.threads import on_all
from tests.open_ranks import Opener, close_all, restore_all, wait_sealed
from tests.steps import state_of
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types.errors import StateChangedError, TierfallError, UnreachableError
from tierfall.tiers.image_writer import RawImageWriter

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held(folder: Path) -> list[str]:
    """What this process has mapped or open of the images below a folder, removed ones too."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line for line in lines if str(folder) in line and ".image" in line]
    opened = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # other threads close files meanwhile
            opened.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [*mapped, *(name for name in opened if str(folder) in name and ".image" in name)]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()


def trained() -> dict[str, Any]:
    torch.manual_seed(0)  # ranks that hold different values give a save up
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def test_after_lazy_saves_and_restores(make_config: MakeConfig, memory: Path) -> None:
    ckpt = tierfall.open(make_config())
    state = trained()
    kept: list[Any] = [ckpt.restore(state)]
    for step in range(1, 5):
        kept.append(ckpt.save(step, state))
        train(state["model"], state["optimizer"])
    kept += [ckpt.restore(state), ckpt.statistics(), ckpt.checkpoints(), ckpt.drain(10.0)]
    assert held(memory) != []
    ckpt.close()
    assert held(memory) == []
    assert kept[1].done


def test_after_a_save_whose_state_changed(make_config: MakeConfig, memory: Path) -> None:
    ckpt = tierfall.open(make_config())
    state = trained()
    kept: list[Any] = [ckpt.save(1, state, block=True)]
    for step in (2, 3):
        train(state["model"], state["optimizer"])
        kept.append(ckpt.save(step, state))
        with torch.no_grad():
            state["model"].weight.zero_()
        if step == 2:
            with pytest.raises(StateChangedError) as raised:
                ckpt.wait_captured()
            kept.append(raised)
        else:
            train(state["model"], state["optimizer"])
    ckpt.close()
    assert isinstance(kept[1].exception(), StateChangedError)
    assert held(memory) == []


@pytest.mark.usefixtures("impatient")
def test_after_a_copy_that_failed_until_close(
    make_config: MakeConfig,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "tierfall")

    tried = threading.Event()

    def stall(writer: RawImageWriter, *words: Any) -> Any:
        tried.set()
        raise UnreachableError("the network is down")

    monkeypatch.setattr(RawImageWriter, "write_chunks", stall)
    ckpt = tierfall.open({**make_config(), "max_wait": "0.3s"})
    handle = ckpt.save(1, state_of(1))
    assert tried.wait(60)
    assert not handle.done("disk")
    with suppress(TierfallError):
        ckpt.close()
    assert held(memory) == []
    assert handle.exception() is not None


@pytest.mark.usefixtures("impatient_probe")
def test_of_several_ranks(tmp_path: Path, ranks: list[Ranks]) -> None:
    opener = Opener(tmp_path, ranks)
    both = opener.all_open()
    states = [trained(), trained()]
    kept: list[Any] = restore_all(both, states)
    for step in range(1, 4):
        pairs = zip(both, states, strict=True)
        kept += on_all([lambda c=c, s=s, n=step: c.save(n, s) for c, s in pairs])  # type: ignore[misc]
    wait_sealed(both)
    kept += restore_all(both, states)
    assert held(tmp_path) != []
    close_all(both)
    assert held(tmp_path) == []
