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
import torch

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.open_ranks import kill_all, wait_sealed
from tests.rank_kit import config_of
from tests.steps import memory_of, state_of, wait_until
from tierfall.config import load_config
from tierfall.ops.watch import Watcher
from tierfall.run.checkpointer import Checkpointer
from tierfall.session import status_writer
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


def test_an_idle_trainer_writes_only_to_say_that_all_is_well(
    make_config: MakeConfig, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[float] = []
    real = status_writer.write_status

    def write(folder: Path, output: status.Status) -> None:
        written.append(output.wall_time_s)
        real(folder, output)

    monkeypatch.setattr(status_writer, "write_status", write)
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        wait_until(lambda: read(memory).checkpoints_known == 1, "the save is seen")
        ckpt.drain()
        threading.Event().wait(0.2)
        before = len(written)
        threading.Event().wait(0.3)
        assert len(written) == before, "nothing happened in 15 turns"
        monkeypatch.setattr(status_writer, "AT_LEAST_EVERY_S", 0.05)
        wait_until(lambda: len(written) > before + 2, "it says that it lives")


def test_of_many_checkpoints_the_newest_are_reported(
    make_config: MakeConfig, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_writer, "CHECKPOINTS_MAX", 3)
    with tierfall.open(make_config()) as ckpt:
        for step in range(1, 6):
            ckpt.save(step, state_of(step), block=True)
        wait_until(lambda: read(memory).tiers[1].checkpoints == 5, "all are there")
        output = read(memory)
        assert [one.step for one in output.checkpoints] == [3, 4, 5]
        assert output.checkpoints_known == 5


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
        assert [p.name for p in folder_in(memory).glob("*.new")] == []
        full.clear()
        ckpt.save(4, state_of(4), block=True)
        wait_until(lambda: read(memory).checkpoints_known == 4, "it goes on")
    assert caplog.text.count("is not written") == 1


def test_a_coordinator_that_stopped_is_the_last_thing_reported(
    make_config: MakeConfig, memory: Path
) -> None:
    ckpt = tierfall.open(make_config())
    try:
        wait_until(lambda: read(memory).attempt == 1, "the first status")
        ckpt._session.workers._coordinator.wait_for_event = _fail  # type: ignore[union-attr, method-assign]
        ckpt._session.call_soon(int)
        wait_until(lambda: read(memory).failure is not None, "the failure")
        output = read(memory)
        assert "on purpose" in str(output.failure)
        assert output.events[-1]["kind"] == "error"
        assert output.events[-1]["doing"] == "coordinate"
    finally:
        with pytest.raises(tierfall.errors.TierfallError, match="on purpose"):
            ckpt.close()


def _fail(timeout: float | None) -> None:
    raise RuntimeError("on purpose")


def test_what_a_killed_rank_reported_goes_with_its_memory(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    folder = memory_of(config)
    with network(["a", "a"]) as ranks:
        opened: list[Any] = on_all(
            [lambda r=r: Checkpointer(config, run="run", ranks=r) for r in ranks]  # type: ignore[misc]
        )
        for one in opened:
            one.save(1, {"w": torch.ones(4), "rng": None})
        wait_sealed(opened)
        wait_until(lambda: status.read_status(folder, 1) is not None, "rank 1's status")
        output = status.read_status(folder, 1)
        assert output is not None
        kill_all(opened)
    status.write_status(folder, output)  # as a kill leaves it
    with Checkpointer(config, run="run") as alone:
        alone.restore({"w": torch.zeros(4), "rng": None})
        alone.drain()
    assert status.read_status(folder, 1) is None


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


# Several ranks ---------------------------------------------------------------------------------------


def test_ranks_of_one_node_are_slots_and_rank_0s_view_is_shown(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with network(["a", "a"]) as ranks:
        opened = on_all([lambda r=r: Checkpointer(config, run="run", ranks=r) for r in ranks])  # type: ignore[misc]
        states = [{"w": torch.full((4,), float(rank)), "rng": None} for rank in range(2)]
        handles = on_all(
            [lambda c=c, s=s: c.save(1, s) for c, s in zip(opened, states, strict=True)]
        )  # type: ignore[misc]
        for handle in handles:
            handle.wait(timeout=20)  # type: ignore[attr-defined]
        with Watcher(config, run="run") as watcher:
            wait_until(
                lambda: all(
                    s.status is not None
                    and any("shared" in c.copies and not c.owed for c in s.status.checkpoints)
                    for s in watcher.take_snapshot().slots
                ),
                "both say that it is committed",
            )
            glimpse = watcher.take_snapshot()
        assert [slot.number for slot in glimpse.slots] == [0, 1]
        assert [slot.status.rank for slot in glimpse.slots if slot.status] == [0, 1]
        assert all(slot.alive for slot in glimpse.slots)
        assert glimpse.live is not None
        assert (glimpse.live.rank, glimpse.live.world_size) == (0, 2)
        assert on_all([one.close for one in opened]) == [None, None]  # type: ignore[attr-defined]
        assert [status.read_status(memory_of(config), slot) for slot in (0, 1)] == [
            None,
            None,
        ]


def test_where_rank_0_is_elsewhere_this_nodes_first_rank_is_shown(
    make_config: MakeConfig, memory: Path
) -> None:
    config = make_config()
    with tierfall.open(config):
        wait_until(lambda: read(memory).attempt == 1, "the first status")
        output = read(memory)
        other = output.model_copy(update={"slot": 1, "rank": 8, "world_size": 16, "pid": 1})
        status.write_status(folder_in(memory), other)
        (folder_in(memory) / "slot-1.lock").touch(0o600)
        with Watcher(load_config(config), run="run") as watcher:
            glimpse = watcher.take_snapshot()
        assert [(slot.number, slot.alive) for slot in glimpse.slots] == [(0, True), (1, False)]
        assert glimpse.live is not None
        assert glimpse.live.rank == 0
