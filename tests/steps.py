"""States that say which step they are of, what a tier holds of them, forks, and a wait for what another thread does."""

from __future__ import annotations

import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tierfall
from tierfall.run import open_run
from tierfall.setup.places import run_folder

ELEMENTS = 20_000


def state_of(step: int, *, elements: int = ELEMENTS) -> dict[str, Any]:
    """About 80 KiB that hold the step's number everywhere."""
    return {"w": torch.full((elements,), float(step)), "extra": {"step": step}}


def blank(*, elements: int = ELEMENTS) -> dict[str, Any]:
    return state_of(-1, elements=elements)


def step_in(state: Mapping[str, Any]) -> int:
    """Return the step that a state is of, all of it."""
    step = state["extra"]["step"]
    assert torch.equal(state["w"], torch.full_like(state["w"], float(step))), state
    assert isinstance(step, int)
    return step


def steps_on(root: Path, run: str = "run") -> list[int]:
    """Name the steps that a tier has committed, each of them read back and compared."""
    folders = sorted(path.parent for path in (root / run).glob("step-*/commit.json"))
    found = []
    for folder in folders:
        step = step_in(tierfall.load(folder))
        assert folder.name.startswith(f"step-{step:08d}-")
        found.append(step)
    return found


def save_steps(config: Mapping[str, Any], *steps: int, **how: Any) -> None:
    """Start, restore what there is, save these steps to each tier, and close."""
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank(), **how)
        for step in steps:
            ckpt.save(step, state_of(step), block=True)


def flip(path: Path, offset: int | None = None) -> None:
    """Flip a bit of a file; without ``offset`` in its middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if offset is None else offset] ^= 1
    path.write_bytes(data)


def files_below(root: Path) -> dict[str, bytes]:
    """Every file below a folder, by its relative name."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def memory_of(config: Mapping[str, Any]) -> Path:
    """Return the folder of the host memory of a run on this machine, whether there is one yet or not."""
    made = tierfall.Config.model_validate(config)
    return run_folder(made, made.run)


def open_elsewhere(config: Mapping[str, Any]) -> tierfall.Checkpointer:
    """Open a run as a process on another node would, beside what this one has open; its folder of memory is another."""
    with mock.patch.object(open_run, "OPEN", set()):
        return tierfall.open(config)


def refuse_threads(patch: pytest.MonkeyPatch, names: str, after: int = 0) -> None:
    """Start only the first ``after`` of the threads whose names a pattern is found in, as at the limit of processes."""
    start, left = threading.Thread.start, [after]

    def refuse(thread: threading.Thread) -> None:
        if re.search(names, thread.name):
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
        start(thread)

    patch.setattr(threading.Thread, "start", refuse)


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


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Wait for what another thread or process brings about. What has taken long is looked at less often."""
    began = time.monotonic()
    pause = threading.Event()
    while not condition():
        waited = time.monotonic() - began
        assert waited < timeout_s, f"after {timeout_s} s still not: {what}"
        pause.wait(min(max(0.005, waited / 10), 0.05))
