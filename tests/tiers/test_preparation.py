"""Preparation of an arena's memory in the background: open and saves wait for none of it, restores need none of it."""

from __future__ import annotations

import errno
import gc
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
from tests.tiers.arena_help import DEVICE, MIB, RUN, add, create, prepare
from tierfall.tiers.arena import file as file_module
from tierfall.tiers.arena import preparation
from tierfall.tiers.arena.arena import Arena

PATIENCE_S = 20.0
PIECE = MIB


@pytest.fixture
def path(memory: Path) -> Path:
    return memory / "slot-0.arena"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 1 MiB: the extents of an arena begin with its third."""
    for module in (file_module, preparation):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(preparation, "TOUCH_BYTES", PIECE // 4)
    monkeypatch.setattr(preparation, "BUSY_S", 0.001)


def resident_bytes(path: Path) -> int:
    """How much of a file's mappings is in this process's page table."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and first == "Rss:":
            found += int(line.split()[1]) << 10
    return found


# What waits for nothing ------------------------------------------------------------------------------


def test_creating_an_arena_touches_no_page_of_its_images(path: Path) -> None:
    arena = create(path, 16 * MIB)
    assert resident_bytes(path) < MIB
    prepare(arena)
    assert resident_bytes(path) >= 16 * MIB
    arena.close(keep=False)


def test_an_image_of_an_earlier_start_is_read_without_touching_its_pages(path: Path) -> None:
    first = create(path, 32 * MIB)
    add(first, b"i" * (24 * MIB))
    first.close(keep=True)
    arena = Arena.attach(path, run=RUN)
    (region,) = arena.regions()
    view = memoryview(bytearray(24 * MIB))
    region.read_into(0, view)
    assert bytes(view[:3]) == b"iii"
    assert view[-1] == ord("i")
    assert resident_bytes(path) < MIB
    del view
    arena.close(keep=False)


@pytest.mark.usefixtures("small_pieces")
def test_pages_are_locked_piece_by_piece_and_not_while_an_image_is_filled_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy to memory that is locked in part is refused by the driver."""
    locks = FakeLocks(monkeypatch)
    arena = create(path, 4 * MIB)
    region = arena.allocate(image_bytes=MIB, records_bytes=100)
    assert region is not None
    arena.prepare(DEVICE)
    wait_until(lambda: len(locks.made) >= 3, "the rest is locked")
    time.sleep(0.05)
    assert not arena.is_prepared
    start = region.tensor().data_ptr()
    assert not any(
        lock.address < start + MIB and start < lock.address + lock.length_bytes
        for lock in locks.made
    )
    region.seal(manifest=b"", commit=b"")
    prepare(arena, DEVICE)
    assert {lock.length_bytes for lock in locks.made} == {PIECE}
    del region
    arena.close(keep=False)
    assert len(locks.unlocked) == len(locks.made)


# Bad days --------------------------------------------------------------------------------------------


def test_memory_that_cannot_be_touched_is_reported_once_and_saves_go_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*arguments: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(file_module, "populate", refused)
    arena = create(path)
    with caplog.at_level(logging.WARNING):
        arena.prepare(None)
        wait_until(lambda: bool(caplog.records), "it is reported")
    (entry,) = caplog.records
    assert "Cannot allocate memory; saves go on, slower" in entry.getMessage()
    add(arena, b"image")
    arena.close(keep=False)


@pytest.mark.usefixtures("small_pieces")
def test_what_is_locked_stays_mapped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth maps the file again; else memory of the program could be where the driver believes the old pages."""
    locks = FakeLocks(monkeypatch)
    arena = create(path, 4 * MIB)
    prepare(arena, DEVICE)
    arena.grow(8 * MIB)
    prepare(arena, DEVICE)
    gc.collect()
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            mapped.append([int(each, 16) for each in line.split()[0].split("-")])
    for lock in locks.made:
        low, high = lock.address, lock.address + lock.length_bytes
        assert any(start <= low and high <= end for start, end in mapped)
    arena.close(keep=False)


def test_closing_does_not_wait_for_what_is_not_prepared(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "REST_S", PATIENCE_S)
    arena = create(path, 256 * MIB)
    arena.prepare(None)
    began = time.monotonic()
    arena.close(keep=False)
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
        from tierfall.tiers.arena import preparation
        preparation.REST_S = 5.0  # many seconds until all is prepared
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
