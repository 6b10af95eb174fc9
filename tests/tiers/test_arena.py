"""The arena: filling, sealing, reading back, closing, page-locking, and the format byte by byte."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import struct
import threading
from pathlib import Path

import pytest
import torch
from arena_help import (
    BLOCK,
    DEVICE,
    EXTENTS,
    KIB,
    MIB,
    PAGE,
    RUN,
    add,
    create,
    prepare,
)

from tests.core.fake_device import FakeLocks
from tierfall.core.runtime import pinned
from tierfall.core.types.errors import CapacityError
from tierfall.tiers.arena.arena import Arena
from tierfall.tiers.arena.region import Region

# --- filling, sealing, reading back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [(), (0,), (2,), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("pages", [1, 2, 3, 4, 5, 6, 7])
def test_what_would_fit_is_what_fits_once_those_are_gone(
    path: Path, gone: tuple[int, ...], pages: int
) -> None:
    arena = create(path, 6 * PAGE)
    regions = []
    for _ in range(3):
        region = arena.allocate(image_bytes=PAGE, records_bytes=1)
        assert region is not None
        regions.append(region)
    asked = {"image_bytes": pages * PAGE - PAGE + 1, "records_bytes": 0}
    output = arena.would_fit(**asked, without=[regions[index] for index in gone])
    assert len(arena.regions()) == 3
    for index in gone:
        regions[index].release()
    assert output == (arena.allocate(**asked) is not None)
    arena.close(keep=False)


def test_table_of_slots_has_an_end(path: Path) -> None:
    arena = create(path, 100 * PAGE)
    regions = []
    while (region := arena.allocate(image_bytes=1, records_bytes=0)) is not None:
        region.image[:] = bytes([len(regions)])
        region.seal(manifest=b"", commit=b"")
        regions.append(region)
    assert len(regions) == 63
    assert arena.largest_free_bytes > PAGE
    arena.close(keep=True)
    again = Arena.attach(path, run=RUN)
    assert [bytes(region.image)[0] for region in again.regions()] == list(range(63))
    again.close(keep=False)


def test_what_is_unsealed_is_readable_here_and_nowhere_else(path: Path) -> None:
    arena = create(path)
    kept, region = add(arena, b"kept"), add(arena, b"given up")
    region.add_mark(b"pin")
    free_bytes = arena.free_bytes
    region.unseal()
    assert (region.sealed, region.is_discarded) == (False, True)
    assert region.image == b"given up"
    assert arena.free_bytes == free_bytes, "nobody else may write there yet"
    for late in (
        region.unseal,
        region.manifest,
        region.commit,
        lambda: region.add_mark(b"pin"),
        lambda: region.seal(manifest=b"m", commit=b""),
    ):
        with pytest.raises(ValueError, match=r"not sealed yet|sealed already"):
            late()
    other = Arena.attach(path, run=RUN, writable=False)
    assert [bytes(r.image) for r in other.regions()] == [b"kept"]
    assert other.damage == ()
    other.close(keep=True)
    region.release()
    assert arena.regions() == (kept,)
    assert arena.free_bytes > free_bytes
    arena.close(keep=False)


def test_marks_have_a_bound_that_says_so(path: Path) -> None:
    arena = create(path)
    region = add(arena, b"image")
    count = (28 * KIB - 8) // (4 + 500 + 32)
    for _ in range(count):
        region.add_mark(b"x" * 500)
    with pytest.raises(CapacityError, match="does not fit"):
        region.add_mark(b"x" * 500)
    assert region.marks() == (b"x" * 500,) * count
    arena.close(keep=False)


def test_threads_get_disjoint_regions(path: Path) -> None:
    arena = create(path, 64 * PAGE)
    got: list[Region] = []

    def work(number: int) -> None:
        for _ in range(6):
            region = arena.allocate(image_bytes=PAGE, records_bytes=0)
            assert region is not None
            region.image[:] = bytes([number]) * PAGE
            region.seal(manifest=b"", commit=b"")
            got.append(region)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({region.extent.start for region in got}) == len(got) == 48
    arena.close(keep=True)
    again = Arena.attach(path, run=RUN)
    assert sorted(bytes(r.image)[0] for r in again.regions()) == sorted(list(range(8)) * 6)
    again.close(keep=False)


# --- closing ----------------------------------------------------------------------------------------------------------


def test_closing_keeps_living_views_valid(path: Path) -> None:
    arena = create(path)
    region = add(arena, b"x" * 5000)
    view, tensor = region.image, region.tensor()
    arena.close(keep=False)
    arena.close(keep=False)
    assert view == b"x" * 5000
    assert int(tensor.sum()) == 5000 * ord("x")
    for late in (
        lambda: arena.allocate(image_bytes=1, records_bytes=0),
        lambda: arena.grow(2 * MIB),
        lambda: region.add_mark(b"pin"),
        region.marks,
    ):
        with pytest.raises(ValueError, match="closed"):
            late()
    region.release()


def test_closing_gives_the_memory_back(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena = create(path)
    arena.grow(2 * MIB)
    add(arena, b"x")
    assert str(path) in Path("/proc/self/maps").read_text()
    arena.close(keep=True)
    del arena
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_deletes_no_file_of_another(path: Path) -> None:
    arena = create(path)
    path.unlink()
    path.write_bytes(b"somebody else's")
    arena.close(keep=False)
    assert path.read_bytes() == b"somebody else's"


# --- page-locked memory -----------------------------------------------------------------------------------------------


def test_refused_page_lock_is_reported_once_and_work_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    locks = FakeLocks(monkeypatch, reason="CUDA error 2 (out of memory)")
    with caplog.at_level(logging.WARNING):
        arena = create(path)
        prepare(arena, DEVICE)
        arena.grow(2 * MIB)
        prepare(arena, DEVICE)
    (entry,) = caplog.records
    assert "out of memory" in entry.getMessage()
    assert "ulimit -l" in entry.getMessage()
    add(arena, b"image")
    arena.close(keep=False)
    assert locks.unlocked == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_images_are_pinned_on_a_real_device(path: Path) -> None:
    arena = create(path)
    prepare(arena, torch.device("cuda"))
    region = arena.allocate(image_bytes=500_000, records_bytes=0)
    assert region is not None
    tensor = region.tensor()
    assert tensor.is_pinned()
    source = torch.randint(0, 256, (500_000,), dtype=torch.uint8, device="cuda")
    arena.grow(2 * MIB)
    tensor.copy_(source, non_blocking=True)
    pinned.synchronize()
    region.seal(manifest=b"", commit=b"")
    del tensor
    arena.close(keep=True)
    again = Arena.attach(path, run=RUN)
    assert torch.equal(again.regions()[0].tensor(), source.cpu())
    again.close(keep=False)


# --- the format -------------------------------------------------------------------------------------------------------


def test_format_is_as_documented(path: Path) -> None:
    """Read a file with nothing but struct, json and hashlib."""
    arena = create(path)
    image = random.Random(9).randbytes(5000)
    region = add(arena, image, b"the manifest", b"the commit record")
    region.add_mark(b"pin")
    arena.grow(2 * MIB)
    arena.close(keep=True)
    data = path.read_bytes()

    assert data[:16] == b"tierfall arena\n\0"
    header = json.loads(data[16:PAGE].rstrip(b"\0"))
    assert list(header)[:3] == ["format", "requires", "layout"]
    assert list(header)[-1] == "digest"
    assert (header["run"], header["rank"], header["world_size"]) == (RUN, 2, 4)
    assert (header["slot"], header["capacity_bytes"], header["layout"]) == (0, MIB, 1)
    assert len(data) == EXTENTS + 2 * MIB

    length, complement = struct.unpack_from("=II", data, BLOCK)
    assert complement == length ^ 0xFFFFFFFF
    seal = json.loads(data[BLOCK + 8 : BLOCK + 8 + length])
    assert seal["offset"] == EXTENTS
    assert data[seal["offset"] :][: seal["image_bytes"]] == image
    for name, text in (("manifest", b"the manifest"), ("commit", b"the commit record")):
        place = seal[name]
        assert data[place["offset"] :][: place["bytes"]] == text
        assert place["digest"] == "sha256:" + hashlib.sha256(text).hexdigest()
    assert entries(data, BLOCK + PAGE) == [b"pin"]
    assert not any(data[2 * BLOCK : EXTENTS])


def entries(data: bytes, start: int) -> list[bytes]:
    used = struct.unpack_from("=I", data, start)[0]
    found, place = [], start + 8
    while place < start + 8 + used:
        length = int.from_bytes(data[place : place + 4], "little")
        body = data[place : place + 4 + length]
        assert hashlib.sha256(body).digest() == data[place + 4 + length :][:32]
        found.append(body[4:])
        place += 4 + length + 32
    return found
