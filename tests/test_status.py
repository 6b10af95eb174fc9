"""The status file of a trainer: never blocks it, and no larger than needed."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import state_of, wait_until
from tierfall.run import status_writer
from tierfall.telemetry import status

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_writer, "EVERY_S", 0.02)


def folder_in(memory: Path) -> Path:
    """The one folder of host memory of the run."""
    return next((memory / "run").iterdir())


def read(memory: Path) -> status.Status:
    found: list[status.Status] = []

    def look() -> bool:
        output = status.read_status(folder_in(memory), 0)
        found[:] = [] if output is None else [output]
        return bool(found)

    wait_until(look, "a status")
    return found[0]


def test_memory_that_is_full_costs_the_status_alone_and_is_reported_once(
    make_config: MakeConfig,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real, full = os.write, threading.Event()

    def write(fd: int, data: bytes) -> int:
        if full.is_set():
            real(fd, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(status.os, "write", write)
    with caplog.at_level(logging.WARNING), tierfall.open(make_config()) as ckpt:
        wait_until(lambda: read(memory).attempt == 1, "the first status")
        full.set()
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
        wait_until(lambda: "is not written" in caplog.text, "it is said")
        assert read(memory).checkpoints_known == 0, "the last whole one stays"
        wait_until(lambda: not [*folder_in(memory).glob("*.new")], "none of it stays")
        full.clear()
        ckpt.save(4, state_of(4), block=True)
        wait_until(lambda: read(memory).checkpoints_known == 4, "it goes on")
    assert caplog.text.count("is not written") == 1


def test_what_a_killed_process_reported_is_replaced_by_the_next_start(
    make_config: MakeConfig, memory: Path
) -> None:
    with tierfall.open(make_config()):
        wait_until(lambda: read(memory).attempt == 1, "the first status")
        output = read(memory)
    status.write_status(folder_in(memory), output.model_copy(update={"slot": 0}))
    with tierfall.open(make_config()) as ckpt:
        ckpt.restore(state_of(0))
        wait_until(lambda: read(memory).attempt == 2, "the next start's own")
    assert status.read_status(folder_in(memory), 0) is None
