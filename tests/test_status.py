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
from tests.core.ranks.threads import network, on_all
from tests.rank_kit import config_of
from tests.steps import memory_of, state_of, wait_until
from tierfall.ops.reader import Watcher
from tierfall.run import status_writer
from tierfall.run.checkpointer import Checkpointer
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


def test_ranks_of_one_node_are_slots_and_rank_0s_view_is_shown(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with network(["a", "a"]) as ranks:
        opened = on_all([lambda r=r: Checkpointer(config, ranks=r) for r in ranks])  # type: ignore[misc]
        watcher = Watcher(config, run="run")
        wait_until(
            lambda: [s.status and s.status.rank for s in watcher.take_snapshot().slots] == [0, 1],
            "both say something",
        )
        glimpse = watcher.take_snapshot()
        assert all(slot.alive for slot in glimpse.slots)
        assert glimpse.live is not None
        assert (glimpse.live.rank, glimpse.live.world_size) == (0, 2)
        assert on_all([one.close for one in opened]) == [None, None]
        assert [status.read_status(memory_of(config), slot) for slot in (0, 1)] == [None, None]
