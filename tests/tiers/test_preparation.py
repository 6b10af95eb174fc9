"""Preparation of memory in the background: open and saves wait for none of it, restores need none of it."""

from __future__ import annotations

import errno
import logging
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests import forked
from tests.core.fake_device import FakeLocks
from tests.steps import wait_until
from tests.tiers.host_help import DEVICE, MIB, host_in, prepare, put
from tests.tiers.test_image_file import resident_bytes
from tierfall.tiers import image_file

PATIENCE_S = 20.0
PIECE = MIB


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_file, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(image_file, "TOUCH_BYTES", PIECE // 4)
    monkeypatch.setattr("tierfall.tiers.host.BUSY_S", 0.001)


# What waits for nothing ------------------------------------------------------------------------------


def test_memory_is_reserved_touched_and_locked_for_the_next_image_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = FakeLocks(monkeypatch)
    host = host_in(folder, capacity_bytes=17 * MIB)
    region = put(host, b"i" * (8 * MIB), b"")
    assert region is not None
    prepare(host, DEVICE)
    first, second = sorted(folder.iterdir())
    assert min(resident_bytes(first), resident_bytes(second)) >= 8 * MIB
    assert sum(lock.length_bytes for lock in locks.made) >= 16 * MIB
    host.close(keep=False)
    assert len(locks.unlocked) == len(locks.made)


@pytest.mark.usefixtures("small_pieces")
def test_pages_are_locked_piece_by_piece_and_not_while_an_image_is_filled_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy to memory that is locked in part is refused by the driver."""
    locks = FakeLocks(monkeypatch)
    host = host_in(folder, capacity_bytes=4 * MIB)
    host.ensure_capacity(image_bytes=2 * MIB, records_bytes=0)
    region = host.allocate(image_bytes=2 * MIB, records_bytes=0)
    assert region is not None
    host.prepare(DEVICE)
    wait_until(lambda: len(locks.made) >= 2, "the other file is locked")
    time.sleep(0.05)
    assert not host.is_prepared
    start = torch.frombuffer(region.image, dtype=torch.uint8).data_ptr()
    assert not any(start <= lock.address < start + 2 * MIB for lock in locks.made)
    region.seal(manifest=b"", commit=b"")
    prepare(host, DEVICE)
    assert {lock.length_bytes for lock in locks.made} == {PIECE}
    del region
    host.close(keep=False)
    assert len(locks.unlocked) == len(locks.made)


@pytest.mark.usefixtures("small_pieces")
def test_the_pages_of_a_file_that_is_deleted_for_a_larger_one_are_unlocked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of the program could be where the driver believes the old pages."""
    locks = FakeLocks(monkeypatch)
    host = host_in(folder, capacity_bytes=3 * MIB)
    region = put(host, b"i" * (2 * MIB), b"")
    assert region is not None
    prepare(host, DEVICE)
    before = len(locks.made)
    assert before >= 2
    region.release()
    del region
    host.ensure_capacity(image_bytes=3 * MIB, records_bytes=0)
    assert len(locks.unlocked) == before
    prepare(host, DEVICE)
    assert sum(lock.length_bytes for lock in locks.made[before:]) == 3 * MIB
    host.close(keep=False)


# Bad days --------------------------------------------------------------------------------------------


def test_memory_that_cannot_be_touched_is_reported_once_and_saves_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*arguments: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(image_file, "populate", refused)
    host = host_in(folder, capacity_bytes=MIB)
    with caplog.at_level(logging.WARNING):
        first = put(host, b"image")
        wait_until(lambda: bool(caplog.records), "it is reported")
    (entry,) = caplog.records
    assert "Cannot allocate memory; saves go on, slower" in entry.getMessage()
    assert first is not None
    assert put(host, b"another image") is not None
    host.close(keep=False)


def test_refused_page_lock_is_reported_once_and_work_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    locks = FakeLocks(monkeypatch, reason="CUDA error 2 (out of memory)")
    with caplog.at_level(logging.WARNING):
        host = host_in(folder, capacity_bytes=4 * MIB)
        put(host, b"i" * MIB)
        prepare(host, DEVICE)
        put(host, b"i" * MIB)
        prepare(host, DEVICE)
    (entry,) = caplog.records
    assert "out of memory" in entry.getMessage()
    assert "ulimit -l" in entry.getMessage()
    host.close(keep=False)
    assert locks.unlocked == []


def test_closing_does_not_wait_for_what_is_not_prepared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierfall.tiers.host.REST_S", PATIENCE_S)
    host = host_in(folder, capacity_bytes=256 * MIB)
    put(host, b"i" * (64 * MIB))
    began = time.monotonic()
    host.close(keep=False)
    assert time.monotonic() - began < PATIENCE_S / 2


@pytest.fixture
def folder(memory: Path) -> Path:
    return memory


def config_of(folder: Path, capacity: str) -> dict[str, Any]:
    memory = {
        "name": "host",
        "kind": "host",
        "capacity": capacity,
        "folder": str(folder / "memory"),
    }
    disk = {"name": "disk", "kind": "file", "path": str(folder / "disk")}
    return {"run": "prepared", "tiers": [memory, disk]}


def test_a_process_killed_while_memory_is_prepared_loses_nothing(folder: Path) -> None:
    """The next start reads the image, and saves, while memory is prepared again."""
    config = config_of(folder, "256MiB")
    program = f"""
        import os, signal, torch, tierfall
        from tierfall.tiers import host
        host.REST_S = 5.0  # many seconds until all is prepared
        with tierfall.open({config!r}) as ckpt:
            ckpt.save(1, {{"x": torch.arange(1000.0)}}).captured()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    ran = forked.run(["-c", textwrap.dedent(program)])
    assert ran.returncode == -signal.SIGKILL
    state = {"x": torch.zeros(1000)}
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(state)
        assert report is not None
        assert report.step == 1
        assert torch.equal(state["x"], torch.arange(1000.0))
        state["x"] += 1
        ckpt.save(2, state).wait()
    assert torch.equal(tierfall.load(folder / "disk", step=2)["x"], torch.arange(1000.0) + 1)


def test_a_start_with_much_memory_opens_at_once(folder: Path) -> None:
    """Of what an earlier start left there, nothing is touched."""
    seconds = {}
    for capacity in ("16MiB", "512MiB"):
        config = config_of(folder / capacity, capacity)
        config["tiers"][0]["on_close"] = "keep"
        with tierfall.open(config) as ckpt:
            ckpt.save(1, {"x": torch.zeros(10)}).wait()
        times = list[float]()
        for _ in range(3):
            began = time.monotonic()
            with tierfall.open(config):
                times.append(time.monotonic() - began)
        seconds[capacity] = min(times)
    assert seconds["512MiB"] < 2 * seconds["16MiB"] + 0.2
