"""The host tier: how many files it has, what an earlier start left in them, and when they go."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from host_help import KIB, MIB, PAGE, flip, host_in, prepare

from tests.tiers.test_image_file import forge, newer_document
from tierfall.core.format.records import Commit, Lineage, NamedFile
from tierfall.core.types.errors import CapacityError, ConfigError, IntegrityError, LockError
from tierfall.core.types.values import MEMORY_IMAGES_MAX, CheckpointId, CopyState, Shard
from tierfall.tiers import host as host_module
from tierfall.tiers import image_file
from tierfall.tiers.host import HostTier, held_bytes
from tierfall.tiers.host_folder import RoomReport
from tierfall.tiers.image_file import Region, room_for

IMAGE_BYTES = 100 * KIB
RECORDS_BYTES = 8 * KIB
ONE = room_for(image_bytes=IMAGE_BYTES, records_bytes=RECORDS_BYTES)


def commit_of(step: int, run: str = "gpt") -> Commit:
    return Commit(
        lineage=Lineage(
            run=run,
            checkpoint=CheckpointId(step, 1),
            attempt_id="a" * 32,
            ordinal=step,
            started_from=None,
        ),
        world_size=1,
        files=(NamedFile(name="rank-00000-of-00001.safetensors", bytes=IMAGE_BYTES, digest=None),),
        nodes=("n",),
        wall_time_s=1.0,
    )


def save(host: HostTier, step: int, run: str = "gpt") -> Region:
    region = room_in(host)
    assert region is not None
    region.image[:] = bytes([step]) * IMAGE_BYTES
    region.seal(manifest=b"manifest", commit=commit_of(step, run).encode())
    return region


def room_in(host: HostTier, image_bytes: int = IMAGE_BYTES) -> Region | None:
    host.ensure_capacity(image_bytes=image_bytes, records_bytes=RECORDS_BYTES)
    return host.allocate(image_bytes=image_bytes, records_bytes=RECORDS_BYTES)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def room(free: int, memory: int | None = None) -> RoomReport:
    return RoomReport(
        folder=Path("/dev/shm/x"),
        file_system_free_bytes=free,
        memory_free_bytes=memory,
        in_memory=True,
    )


# How much --------------------------------------------------------------------------------------------


def test_there_are_as_many_files_as_the_capacity_holds_and_they_are_used_again(
    folder: Path,
) -> None:
    host = host_in(folder, capacity_bytes=3 * ONE + PAGE)
    host.check_room()
    assert files(folder) == [], "nothing is reserved before an image is known"
    regions = [save(host, step) for step in (1, 2, 3)]
    assert room_in(host) is None
    assert (host.free_bytes, host.capacity_bytes) == (PAGE, 3 * ONE + PAGE)
    regions[1].release()
    assert save(host, 4).image[:1] == b"\x04"
    assert len(files(folder)) == 3
    host.close(keep=False)
    assert files(folder) == []


def test_a_capacity_that_holds_very_many_images_has_a_bound(folder: Path) -> None:
    host = host_in(folder, capacity_bytes=100 * MIB)
    save(host, 1)
    prepare(host)
    assert len(files(folder)) == MEMORY_IMAGES_MAX
    host.close(keep=False)


def test_a_process_that_may_open_few_descriptors_has_few_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    before = len(os.listdir("/proc/self/fd"))
    host = host_in(folder, capacity_bytes=100 * ONE)
    while room_in(host):
        pass
    assert len(files(folder)) == 4
    assert len(os.listdir("/proc/self/fd")) <= before + 8
    host.close(keep=False)


def test_an_image_that_has_outgrown_the_files_has_a_new_one_and_views_stay_valid(
    folder: Path,
) -> None:
    host = host_in(folder)
    first = save(host, 1)
    view = first.image
    large = room_in(host, 5 * IMAGE_BYTES)
    assert large is not None
    large.image[:] = b"x" * 5 * IMAGE_BYTES
    assert host.capacity_bytes >= 10 * IMAGE_BYTES
    assert bytes(view[:4]) == b"\x01" * 4
    assert [c.id.step for c in host.list().copies] == [1]
    before = host.capacity_bytes
    assert room_in(host) is not None
    assert host.capacity_bytes == before, "smaller images take the same files"
    host.close(keep=False)


def test_images_that_grow_a_little_each_time_do_not_reserve_anew_each_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their records do, with metrics and tags."""
    made = list[int]()
    real = image_file.ImageFile.create

    def create(path: Path, *, room_bytes: int, **more: Any) -> image_file.ImageFile:
        made.append(room_bytes)
        return real(path, room_bytes=room_bytes, **more)

    host = host_in(folder, capacity_bytes=8 * MIB)
    monkeypatch.setattr(image_file.ImageFile, "create", create)
    for pages in range(40):
        region = room_in(host, MIB + pages * PAGE)
        assert region is not None
        region.release()
    prepare(host)
    assert 0 < len(made) < 40
    host.close(keep=False)


@pytest.mark.parametrize(
    ("free_images", "needed", "most"), [(100, 2, 3), (4.2, 2, 3), (3, 2, 2), (2, 1, 1)]
)
def test_without_a_capacity_two_images_are_needed_and_a_third_is_taken_if_there_is_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch, free_images: float, needed: int, most: int
) -> None:
    monkeypatch.setattr(host_module, "measure_room", lambda folder: room(int(free_images * ONE)))
    host = host_in(folder)
    host.check_room()
    monkeypatch.undo()
    regions = [room_in(host)]
    while (region := room_in(host)) is not None:
        regions.append(region)
    assert len(regions) == needed
    assert host.take_spare() == (most > needed)
    assert not host.take_spare()
    assert (room_in(host) is not None) == (most > needed)
    assert room_in(host) is None
    host.close(keep=False)


def test_after_growth_there_is_room_for_two_images_as_before(folder: Path) -> None:
    """In the pool the first image is sealed, and the second is free, when they begin to grow."""
    host = host_in(folder)
    host._most_bytes = 0  # there is no room for a third
    first = save(host, 1)
    prepare(host)
    for image_bytes in (IMAGE_BYTES + PAGE, 2 * IMAGE_BYTES, 3 * IMAGE_BYTES):
        host.ensure_capacity(image_bytes=image_bytes, records_bytes=RECORDS_BYTES)
        host._most_bytes = 0
        second = room_in(host, image_bytes)
        assert second is not None
        first.release()
        first = room_in(host, image_bytes) or first
        assert first.filling, "there are two"
        second.release()
    host.close(keep=False)


def test_ranks_of_a_node_share_what_is_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of eight sees all that is free, since none has saved yet."""
    monkeypatch.setattr(host_module, "measure_room", lambda folder: room(8 * ONE, 16 * ONE))
    alone, eighth = host_in(folder), host_in(folder, slot=1, ranks=8)
    for host in (alone, eighth):
        host.check_room()
    with pytest.raises(CapacityError, match=r"without a `capacity` it takes .* set the tier's"):
        eighth.ensure_capacity(image_bytes=IMAGE_BYTES, records_bytes=RECORDS_BYTES)
    configured = host_in(folder, slot=2, ranks=8, capacity_bytes=2 * ONE)
    with pytest.raises(CapacityError, match=r"for each of 8 ranks: needed .* available"):
        configured.check_room()
    for host in (alone, eighth, configured):
        host.close(keep=False)


@pytest.fixture
def short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``short(free)``: now so many bytes are free for files, and what is deleted from here on. A test calls it before
    its first save, after which a second file may be prepared."""

    def set_free(free_bytes: int) -> None:
        known = free_bytes + held_bytes(folder)
        for module in (image_file, host_module):
            monkeypatch.setattr(module, "measure_room", lambda _: room(known - held_bytes(folder)))

    return set_free


def test_memory_that_does_not_suffice_for_two_images_suffices_for_one(
    folder: Path, short: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container with a small /dev/shm. Messages and superseding go by the memory that is there."""
    short(ONE)
    host = host_in(folder, capacity_bytes=2 * ONE)
    first = save(host, 1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert room_in(host) is None
    assert len([r for r in caplog.records if "continues with" in r.getMessage()]) == 1
    assert len(files(folder)) == 1, "what was refused leaves nothing"
    asked = {"image_bytes": IMAGE_BYTES, "records_bytes": RECORDS_BYTES}
    assert (host.free_bytes, host.largest_free_bytes) == (0, 0)
    assert not host.would_fit(**asked, without=[])
    assert host.would_fit(**asked, without=[first])
    short(1000 * ONE)
    assert room_in(host) is not None
    assert caplog.messages[-1] == "host: has memory for more again"
    host.close(keep=False)


def test_an_image_that_grows_if_memory_is_short_waits_for_the_one_before_it(
    folder: Path, short: Callable[[int], None]
) -> None:
    short(ONE + 2 * PAGE)
    host = host_in(folder, capacity_bytes=2 * ONE)
    first = save(host, 1)
    assert room_in(host, IMAGE_BYTES + PAGE) is None, "no error: the first may be released"
    first.release()
    assert room_in(host, IMAGE_BYTES + PAGE) is not None
    host.close(keep=False)


def test_a_free_file_stays_if_memory_lacks_what_a_larger_image_needs(
    folder: Path, short: Callable[[int], None]
) -> None:
    short(3 * ONE // 2)
    host = host_in(folder, capacity_bytes=8 * ONE)
    save(host, 1).release()
    with pytest.raises(CapacityError, match="are free for it"):
        room_in(host, 4 * IMAGE_BYTES)
    assert len(files(folder)) == 1
    assert room_in(host) is not None
    host.close(keep=False)


def test_closing_ends_a_reservation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call to the kernel is waited for, of the 27 that the second file takes."""
    real, calls = os.posix_fallocate, list[int]()
    begun, closing = threading.Event(), threading.Event()

    def reserve(fd: int, start: int, length: int) -> None:
        if len(files(folder)) > 1:
            calls.append(start)
            begun.set()
            assert closing.wait(60)
        real(fd, start, length)

    monkeypatch.setattr(image_file, "RESERVE_BYTES", PAGE)
    monkeypatch.setattr(os, "posix_fallocate", reserve)
    host = host_in(folder, capacity_bytes=2 * ONE)
    save(host, 1)
    assert begun.wait(60)
    real_close = host._preparation.close

    def close() -> None:
        closing.set()
        real_close()

    monkeypatch.setattr(host._preparation, "close", close)
    host.close(keep=False)
    assert len(calls) == 1
    assert files(folder) == []


def test_an_image_above_the_capacity_is_refused_with_both_numbers(folder: Path) -> None:
    host = host_in(folder, capacity_bytes=MIB)
    with pytest.raises(CapacityError, match=r"takes 2 MiB .* its capacity is 1 MiB"):
        host.ensure_capacity(image_bytes=2 * MIB, records_bytes=RECORDS_BYTES)
    host.close(keep=False)


@pytest.mark.parametrize("gone", [(), (0,), (2,), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("pages", [1, 2, 3, 4, 5, 6, 7])
def test_what_would_fit_is_what_fits_once_those_are_gone(
    folder: Path, gone: tuple[int, ...], pages: int
) -> None:
    host = host_in(folder, capacity_bytes=6 * PAGE)
    regions = []
    for _ in range(3):
        host.ensure_capacity(image_bytes=PAGE, records_bytes=1)
        region = host.allocate(image_bytes=PAGE, records_bytes=1)
        assert region is not None
        regions.append(region)
    asked = {"image_bytes": pages * PAGE - PAGE + 1, "records_bytes": 0}
    output = host.would_fit(**asked, without=[regions[index] for index in gone])
    for index in gone:
        regions[index].release()
    assert output == (host.allocate(**asked) is not None)
    host.close(keep=False)


# What was left ---------------------------------------------------------------------------------------


def test_what_was_sealed_is_there_for_the_next_start_and_nothing_else(folder: Path) -> None:
    host = host_in(folder, capacity_bytes=MIB)
    for step in (3, 1):
        save(host, step)
    assert room_in(host) is not None  # filling, when the process ends
    host.close(keep=True)
    assert len(files(folder)) == 2
    after = host_in(folder)
    listing = after.list()
    assert [c.id.step for c in listing.copies] == [1, 3]
    assert {c.state for c in listing.copies} == {CopyState.SEALED}
    assert {c.bytes for c in listing.copies} == {IMAGE_BYTES}
    assert listing.damaged == ()
    held = after.images()[CheckpointId(3, 1)]
    assert bytes(held.region.image[:2]) == b"\x03\x03"
    assert held.commit == commit_of(3)
    with pytest.raises(LockError):
        host_in(folder)
    after.close(keep=True)
    assert len(files(folder)) == 2
    host_in(folder).close(keep=False)
    assert files(folder) == []


@pytest.mark.parametrize("where", ["header", "records"])
def test_damage_costs_its_image_alone_and_its_room_can_be_had_again(
    folder: Path, where: str
) -> None:
    host = host_in(folder, capacity_bytes=2 * ONE)
    save(host, 1)
    save(host, 2)
    host.close(keep=True)
    (path,) = [p for p in folder.iterdir() if commit_of(2).encode() in p.read_bytes()]
    flip(path, 100 if where == "header" else path.read_bytes().index(commit_of(2).encode()) + 20, 3)
    after = host_in(folder, capacity_bytes=2 * ONE)
    listing = after.list()
    assert [c.id.step for c in listing.copies] == [1]
    (damage,) = listing.damaged
    assert isinstance(damage, IntegrityError)
    assert str(path) in str(damage)
    assert after.holds_damaged()
    assert room_in(after) is None
    after.release_damaged()
    assert not after.holds_damaged()
    assert after.list().damaged == ()
    assert room_in(after) is not None
    assert [c.id.step for c in after.list().copies] == [1]
    after.close(keep=False)


def test_images_of_other_ranks_are_counted_beside_those_that_are_needed(folder: Path) -> None:
    host = host_in(folder, shard=Shard(0, 2))
    save(host, 1)
    host.close(keep=True)
    after = host_in(folder, shard=Shard(0, 1))
    after.ensure_capacity(image_bytes=IMAGE_BYTES, records_bytes=RECORDS_BYTES)
    assert after.capacity_bytes > 3 * ONE
    after.close(keep=False)


def test_an_image_of_a_newer_tierfall_is_kept(folder: Path) -> None:
    forge(folder / "slot-0.0.image", newer_document())
    host = host_in(folder, capacity_bytes=2 * ONE)
    assert host.holds_damaged()
    host.release_damaged()
    assert host.holds_damaged()
    prepare(host)
    host.close(keep=True)
    assert files(folder) == ["slot-0.0.image"]


def test_a_reader_does_not_mind_a_file_that_goes_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_in(folder, capacity_bytes=2 * ONE)
    save(host, 1)
    paths = {0: [folder / "slot-0.7.image", *sorted(folder.iterdir())]}
    monkeypatch.setattr(host_module, "image_files", lambda folder: paths)
    reader = host_in(folder, writable=False)
    assert [c.id.step for c in reader.list().copies] == [1]
    reader.close(keep=True)
    host.close(keep=False)


def test_what_is_discarded_is_deleted_and_no_file_of_another_start(folder: Path) -> None:
    host = host_in(folder, capacity_bytes=3 * ONE)
    save(host, 1)
    prepare(host)
    other = folder / "slot-0.9.image"
    other.write_bytes(b"theirs")
    host.discard()
    assert files(folder) == [other.name]
    host.close(keep=True)
    assert files(folder) == [other.name]


def test_a_file_that_is_no_image_is_refused_and_stays(folder: Path) -> None:
    path = folder / "slot-0.0.image"
    path.write_bytes(b"mine")
    with pytest.raises(ConfigError, match=str(path)):
        host_in(folder, capacity_bytes=MIB)
    assert path.read_bytes() == b"mine"


# Files are removed by others -------------------------------------------------------------------------


def test_after_a_removal_the_next_images_have_new_files_and_the_old_ones_are_read_on(
    folder: Path,
) -> None:
    host = host_in(folder, capacity_bytes=3 * ONE)
    first = save(host, 1)
    prepare(host)
    gone = folder.with_name(f"{folder.name}-gone")
    folder.rename(gone)
    shutil.rmtree(gone)
    assert host.lost_regions() == [first]
    second = save(host, 2)
    assert 1 <= len(files(folder)) <= 2
    assert host.lost_regions() == [first]
    assert bytes(first.image) == bytes([1]) * IMAGE_BYTES
    assert set(host.images()) == {CheckpointId(1, 1), CheckpointId(2, 1)}
    first.release()
    assert host.lost_regions() == []
    save(host, 3)
    assert set(host.images()) == {CheckpointId(2, 1), CheckpointId(3, 1)}
    host.close(keep=True)
    assert second.image == b"", "it was closed"
    again = host_in(folder)
    assert set(again.images()) == {CheckpointId(2, 1), CheckpointId(3, 1)}
    again.close(keep=False)


def test_a_folder_on_a_disk_does_not_take_the_place_of_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system in memory was unmounted: its mount point is a folder on the root disk."""
    host = host_in(folder, capacity_bytes=4 * ONE)
    host.check_room()
    monkeypatch.setattr("tierfall.tiers.host_folder.is_in_memory", lambda place: False)
    with pytest.raises(ConfigError, match="is not in memory; mount it again"):
        room_in(host)
    host.close(keep=False)
