"""Room for an arena: creation, growth, full file systems, folders."""

from __future__ import annotations

import errno
import logging
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from arena_help import (
    EXTENTS,
    KIB,
    MIB,
    PAGE,
    RUN,
    SHARD,
    SHARED,
    add,
    create,
    prepare,
    root_only,
    sealed_arena,
)

from tierfall.backends.toolkit import mapping
from tierfall.core.types.errors import BackendError, CapacityError, ConfigError
from tierfall.tiers.arena import file
from tierfall.tiers.arena import folder as arena_folder
from tierfall.tiers.arena.arena import (
    Arena,
    RoomReport,
    arena_name,
    default_folder,
    lock_name,
    prepare_folder,
    room_for_arena,
)

# --- creation, growth, room -------------------------------------------------------------------------------------------


def test_creation_refuses_to_replace_an_arena(path: Path) -> None:
    sealed_arena(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="there is one already"):
        create(path)
    assert path.read_bytes() == before


def test_file_is_private_and_its_pages_are_there(path: Path) -> None:
    steps: list[tuple[int, int]] = []
    arena = create(path, 3 * MIB - 5, progress=lambda done, total: steps.append((done, total)))
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) & 0o077 == 0
    assert arena.capacity_bytes == 3 * MIB
    assert status.st_size == EXTENTS + 3 * MIB
    assert status.st_blocks * 512 >= status.st_size
    assert steps == [(status.st_size, status.st_size)]
    arena.close(keep=False)


def test_progress_counts_up_in_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "_STEP_BYTES", MIB)
    steps: list[int] = []
    arena = create(path, 2 * MIB + PAGE, progress=lambda done, total: steps.append(done))
    assert steps == [MIB, 2 * MIB, 3 * MIB, 4 * MIB, 4 * MIB + PAGE]
    arena.close(keep=False)


def test_kernel_without_populate_is_served_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_MADV_POPULATE_WRITE", 9999)  # EINVAL
    arena = create(path)
    prepare(arena)
    add(arena, b"image")
    arena.close(keep=True)
    again = Arena.attach(path, run=RUN)
    assert again.regions()[0].image == b"image"
    again.close(keep=False)


def test_arena_that_does_not_fit_is_refused_with_both_numbers(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def small(place: Any) -> os.statvfs_result:
        fields = list(real(place))
        fields[0], fields[1] = 4096, 4096
        fields[4] = 1000  # f_bavail
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", small)
    with pytest.raises(CapacityError) as caught:
        create(path, 16 * MIB)
    message = str(caught.value)
    assert f"needed 18 MiB ({18 * MIB} bytes)" in message
    assert f"available 3.9 MiB ({1000 * 4096} bytes)" in message
    for help_ in ("size of /dev/shm", "`capacity`", "`folder`"):
        assert help_ in message
    assert os.listdir(folder) == []


def test_memory_that_does_not_suffice_is_noticed_before_the_kernel_kills(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_folder, "is_in_memory", lambda folder: True)
    monkeypatch.setattr(arena_folder, "_memory_free_bytes", lambda: 2 * MIB)
    with pytest.raises(CapacityError, match=r"available 2 MiB .*memory: 2 MiB"):
        create(path, MIB)
    monkeypatch.setattr(arena_folder, "is_in_memory", lambda folder: False)
    create(path, MIB).close(keep=False)


def fail_reserving(monkeypatch: pytest.MonkeyPatch, beyond: int, code: int = errno.ENOSPC) -> None:
    real = os.posix_fallocate

    def reserve(fd: int, offset: int, length: int) -> None:
        if offset + length > beyond:
            raise OSError(code, os.strerror(code))
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", reserve)


def test_full_file_system_while_creating_leaves_no_file(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "_STEP_BYTES", MIB)
    fail_reserving(monkeypatch, 3 * MIB)
    with pytest.raises(CapacityError, match=r"needed 10 MiB .*available were 3 MiB .*`capacity`"):
        create(path, 8 * MIB)
    assert os.listdir(folder) == []
    monkeypatch.undo()
    create(path, 8 * MIB).close(keep=False)


def test_other_failures_while_creating_leave_no_file(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_reserving(monkeypatch, 0, errno.EIO)
    with pytest.raises(BackendError, match="creating it"):
        create(path)
    monkeypatch.undo()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create(path, progress=interrupt)
    assert os.listdir(folder) == []


def test_half_created_arena_is_collected(path: Path, folder: Path) -> None:
    (folder / f".{path.name}.partial").write_bytes(b"left by a kill")
    create(path).close(keep=True)
    assert os.listdir(folder) == [path.name]
    (folder / f".{path.name}.partial").write_bytes(b"left by a kill")
    Arena.attach(path, run=RUN).close(keep=False)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("capacity", [0, -1, 4095, 1 << 60])
def test_capacity_without_sense_is_refused(path: Path, capacity: int) -> None:
    with pytest.raises(ConfigError, match="expected 4096 to"):
        create(path, capacity)


def test_run_name_is_checked(path: Path) -> None:
    with pytest.raises(ConfigError, match="not a usable name"):
        Arena.create(path, run="../x", shard=SHARD, slot=0, capacity_bytes=MIB)


@pytest.fixture
def tiny() -> Iterator[Path]:
    """A file system in memory of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    place = Path(tempfile.mkdtemp(prefix="tierfall-mount-"))
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tierfall-test", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        place.rmdir()
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
    place.rmdir()


def test_small_file_system_is_respected(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = room_for_arena(tiny)
    assert room.in_memory
    assert room.free_bytes <= 4 * MIB
    with pytest.raises(CapacityError, match=r"needed 18 MiB .*available 4 MiB"):
        create(tiny / "slot-0.arena", 16 * MIB)
    # Somebody else took the room after it was looked at.
    monkeypatch.setattr(RoomReport, "require", lambda self, needed, what, helps=None: None)
    monkeypatch.setattr(file, "_STEP_BYTES", MIB)
    with pytest.raises(CapacityError, match=r"needed 18 MiB .*available were 4 MiB"):
        create(tiny / "slot-0.arena", 16 * MIB)
    assert os.listdir(tiny) == []
    arena = create(tiny / "slot-0.arena", MIB)
    region = add(arena, b"x" * 100_000)
    with pytest.raises(CapacityError):
        arena.grow(16 * MIB)
    assert region.image == b"x" * 100_000
    assert arena.capacity_bytes == MIB
    assert (tiny / "slot-0.arena").stat().st_size == EXTENTS + MIB
    arena.grow(2 * MIB)
    assert arena.largest_free_bytes > MIB
    arena.close(keep=False)


def test_growth_keeps_regions_and_their_views(path: Path) -> None:
    arena = create(path, MIB)
    sealed = add(arena, b"s" * 10_000)
    filling = arena.allocate(image_bytes=500_000, records_bytes=100)
    assert filling is not None
    view, tensor = filling.image, filling.tensor()
    view[:250_000] = b"1" * 250_000
    arena.grow(4 * MIB)
    assert arena.capacity_bytes == 4 * MIB
    view[250_000:] = b"2" * 250_000
    assert tensor[249_999:250_001].tolist() == [ord("1"), ord("2")]
    filling.seal(manifest=b"m", commit=b"c")
    sealed.add_mark(b"pin")
    new = add(arena, b"n" * 3 * MIB)
    tensor[0] = 7  # the old view and the file are the same pages
    arena.close(keep=True)
    again = Arena.attach(path, run=RUN)
    assert again.capacity_bytes == 4 * MIB
    first, second, third = again.regions()
    assert first.image == b"s" * 10_000
    assert first.marks() == (b"pin",)
    assert second.image == b"\x07" + b"1" * 249_999 + b"2" * 250_000
    assert third.image == b"n" * 3 * MIB
    assert new.extent == third.extent
    again.close(keep=False)


def test_failed_growth_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = create(path, MIB)
    region = add(arena, b"x" * 1000)
    fail_reserving(monkeypatch, EXTENTS + MIB)
    with pytest.raises(CapacityError, match="needed"):
        arena.grow(2 * MIB)
    assert arena.capacity_bytes == MIB
    assert path.stat().st_size == EXTENTS + MIB
    assert region.image == b"x" * 1000
    monkeypatch.undo()
    arena.grow(2 * MIB)
    assert arena.largest_free_bytes > MIB
    arena.close(keep=False)


def test_growth_does_not_shrink_and_growing_to_the_same_is_nothing(path: Path) -> None:
    arena = create(path, MIB)
    before = path.read_bytes()
    arena.grow(MIB)
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="cannot shrink"):
        arena.grow(MIB - PAGE)
    arena.close(keep=False)


def test_growth_that_was_killed_before_it_counted_is_undone(path: Path) -> None:
    sealed_arena(path)
    os.truncate(path, EXTENTS + 5 * MIB)
    arena = Arena.attach(path, run=RUN)
    assert arena.capacity_bytes == MIB
    assert path.stat().st_size == EXTENTS + MIB
    assert len(arena.regions()) == 2
    arena.close(keep=False)


def test_growths_have_a_bound_that_says_so(path: Path) -> None:
    arena = create(path, PAGE)
    for pages in range(2, 110):
        arena.grow(pages * PAGE)
    with pytest.raises(CapacityError, match="grown too often"):
        grow_on(arena)
    before = arena.capacity_bytes
    assert before < 400 * PAGE
    arena.close(keep=True)
    again = Arena.attach(path, run=RUN)
    assert again.capacity_bytes == before
    again.close(keep=False)


def grow_on(arena: Arena) -> None:
    for _ in range(1000):
        arena.grow(arena.capacity_bytes + PAGE)


# --- folders and room -------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert (arena_name(3), lock_name(3)) == ("slot-3.arena", "slot-3.lock")


def test_default_folder_is_shared_memory_or_says_that_it_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    name = f"tierfall-{os.geteuid()}"
    monkeypatch.setattr(arena_folder, "SHARED_MEMORY", tmp_path)
    assert default_folder() == tmp_path / name
    assert not caplog.records
    monkeypatch.setattr(arena_folder, "SHARED_MEMORY", tmp_path / "none")
    with caplog.at_level(logging.WARNING):
        assert default_folder() == Path(tempfile.gettempdir()) / name
    assert "set the host tier's `folder`" in caplog.text


def test_folder_is_made_private(folder: Path) -> None:
    made = prepare_folder(folder / "a" / "b", base=folder)
    assert made == folder / "a" / "b"
    for place in (made, made.parent):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert prepare_folder(made) == made


@pytest.mark.parametrize("depth", [0, 1])
def test_folder_behind_a_link_is_refused(folder: Path, depth: int) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "link").symlink_to(folder / "elsewhere")
    wanted = folder / "link" / "run" if depth else folder / "link"
    with pytest.raises(ConfigError, match="is a link"):
        prepare_folder(wanted, base=folder)
    assert os.listdir(folder / "elsewhere") == []


@pytest.mark.parametrize("mode", [0o770, 0o702])
@pytest.mark.parametrize("depth", [0, 1])
def test_folder_that_others_may_write_to_is_refused(folder: Path, mode: int, depth: int) -> None:
    (folder / "open").mkdir()
    (folder / "open").chmod(mode)
    wanted = folder / "open" / "run" if depth else folder / "open"
    with pytest.raises(ConfigError, match=f"others may write to it .mode {mode:04o}.; run chmod"):
        prepare_folder(wanted, base=folder)


@root_only
def test_folder_of_another_user_is_refused(folder: Path) -> None:
    (folder / "theirs").mkdir(mode=0o700)
    os.chown(folder / "theirs", 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        prepare_folder(folder / "theirs" / "run", base=folder)


def test_file_in_the_place_of_a_folder_is_refused(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(ConfigError, match="no folder"):
        prepare_folder(folder / "file", base=folder)


def test_folder_outside_its_base_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="expected a place below"):
        prepare_folder(folder / "a" / ".." / ".." / "b", base=folder / "a")


def test_links_above_the_base_are_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    made = prepare_folder(tmp_path / "link" / "run", base=tmp_path / "link")
    assert made.is_dir()
    assert (folder / "run").is_dir()


def test_base_left_out_is_shared_memory_or_the_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """A link planted where the default folder would be is not followed."""
    monkeypatch.setattr(arena_folder, "SHARED_MEMORY", folder)
    (folder / "elsewhere").mkdir()
    (folder / "tierfall-7").symlink_to(folder / "elsewhere")
    with pytest.raises(ConfigError, match="is a link"):
        prepare_folder(folder / "tierfall-7" / "run")


def test_room_is_what_the_file_system_and_the_memory_have(folder: Path) -> None:
    room = room_for_arena(folder)
    status = os.statvfs(folder)
    assert room.file_system_free_bytes > 0
    assert room.file_system_free_bytes <= status.f_blocks * status.f_frsize
    assert room.in_memory == folder.is_relative_to(SHARED)
    assert room.memory_free_bytes is not None
    assert 0 < room.free_bytes <= room.file_system_free_bytes
    with pytest.raises(BackendError, match="free space"):
        room_for_arena(folder / "none")


def room(free: int, memory: int | None, *, in_memory: bool = True) -> RoomReport:
    return RoomReport(
        folder=Path("/dev/shm/x"),
        file_system_free_bytes=free,
        memory_free_bytes=memory,
        in_memory=in_memory,
    )


def test_default_capacity_follows_the_first_image_and_the_free_memory() -> None:
    plenty = room(1000 * MIB, 1000 * MIB)
    assert plenty.default_capacity_bytes(image_bytes=100 * MIB, extent_bytes=101 * MIB) == 220 * MIB
    # Two small images must fit, though their records outweigh them.
    assert (
        plenty.default_capacity_bytes(image_bytes=100 * MIB, extent_bytes=101 * MIB, images=3)
        == 320 * MIB
    )
    assert plenty.default_capacity_bytes(image_bytes=10 * KIB, extent_bytes=20 * KIB) == 40 * KIB
    assert room(300 * MIB, 200 * MIB).default_capacity_bytes(
        image_bytes=90 * MIB, extent_bytes=91 * MIB
    ) == (100 * MIB)
    assert room(1000 * MIB, None).default_capacity_bytes(
        image_bytes=400 * MIB, extent_bytes=401 * MIB
    ) == (500 * MIB)


def test_default_capacity_that_holds_no_image_is_refused() -> None:
    """What helps is said: a capacity, where the image fits into what is free, and else more room alone."""
    with pytest.raises(
        CapacityError, match=r"needs 101 MiB .*\(100 MiB .*`capacity` to .* 101 MiB"
    ):
        room(300 * MIB, 200 * MIB).default_capacity_bytes(
            image_bytes=100 * MIB, extent_bytes=101 * MIB
        )
    with pytest.raises(CapacityError, match=r"needs 199 MiB .*\); raise the size of /dev/shm"):
        room(300 * MIB, 200 * MIB).default_capacity_bytes(
            image_bytes=198 * MIB, extent_bytes=199 * MIB
        )


def test_memory_bounds_an_arena_only_where_it_lies_in_memory() -> None:
    assert room(300, 200).free_bytes == 200
    assert room(300, 200, in_memory=False).free_bytes == 300
    assert room(300, None).free_bytes == 300


def test_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inner = tmp_path / "groups" / "job" / "task"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("100\n")
    (inner.parent / "memory.max").write_text("5000\n")
    (inner.parent / "memory.current").write_text("1000\n")
    (tmp_path / "cgroup").write_text("0::/job/task\n")
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:      8 kB\n")
    monkeypatch.setattr(arena_folder, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(arena_folder, "_OWN_GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(arena_folder, "_MEMINFO", tmp_path / "meminfo")
    assert room_for_arena(tmp_path).memory_free_bytes == 4000
    (inner.parent / "memory.stat").write_text(
        "anon 400\nfile 600\nshmem 250\ninactive_file 300\nactive_file 50\n"
    )
    assert (
        room_for_arena(tmp_path).memory_free_bytes == 4350
    )  # the page cache, without files in memory
    (inner.parent / "memory.max").write_text("max\n")
    assert room_for_arena(tmp_path).memory_free_bytes == 8 << 10
    (tmp_path / "meminfo").unlink()
    assert room_for_arena(tmp_path).memory_free_bytes is None
