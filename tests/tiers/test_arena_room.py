"""Room for an arena: creation, growth, full file systems, folders."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from arena_help import (
    EXTENTS,
    KIB,
    MIB,
    RUN,
    add,
    create,
    root_only,
    sealed_arena,
)

from tierfall.core.runtime import cores
from tierfall.core.types.errors import CapacityError, ConfigError
from tierfall.tiers.arena import file
from tierfall.tiers.arena import folder as arena_folder
from tierfall.tiers.arena.arena import Arena
from tierfall.tiers.arena.folder import (
    RoomReport,
    default_folder,
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


def test_memory_that_does_not_suffice_is_noticed_before_the_kernel_kills(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_folder, "is_in_memory", lambda folder: True)
    monkeypatch.setattr(arena_folder, "_memory_free_bytes", lambda: 2 * MIB)
    with pytest.raises(CapacityError, match=r"available 2 MiB .*memory: 2 MiB"):
        create(path, MIB)
    monkeypatch.setattr(arena_folder, "is_in_memory", lambda folder: False)
    create(path, MIB).close(keep=False)


def test_half_created_arena_is_collected(path: Path, folder: Path) -> None:
    (folder / f".{path.name}.partial").write_bytes(b"left by a kill")
    create(path).close(keep=True)
    assert os.listdir(folder) == [path.name]
    (folder / f".{path.name}.partial").write_bytes(b"left by a kill")
    Arena.attach(path, run=RUN).close(keep=False)
    assert os.listdir(folder) == []


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


# --- folders and room -------------------------------------------------------------------------------------------------


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
    made = prepare_folder(folder / "a" / "b")
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
        prepare_folder(wanted)
    assert os.listdir(folder / "elsewhere") == []


@pytest.mark.parametrize("mode", [0o770, 0o702])
@pytest.mark.parametrize("depth", [0, 1])
def test_folder_that_others_may_write_to_is_refused(folder: Path, mode: int, depth: int) -> None:
    (folder / "open").mkdir()
    (folder / "open").chmod(mode)
    wanted = folder / "open" / "run" if depth else folder / "open"
    with pytest.raises(ConfigError, match=f"others may write to it .mode {mode:04o}.; run chmod"):
        prepare_folder(wanted)


@root_only
def test_folder_of_another_user_is_refused(folder: Path) -> None:
    (folder / "theirs").mkdir(mode=0o700)
    os.chown(folder / "theirs", 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        prepare_folder(folder / "theirs" / "run")


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


def test_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inner = tmp_path / "groups" / "job" / "task"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("100\n")
    (inner.parent / "memory.max").write_text("5000\n")
    (inner.parent / "memory.current").write_text("1000\n")
    (tmp_path / "cgroup").write_text("0::/job/task\n")
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:      8 kB\n")
    monkeypatch.setattr(cores, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cores, "_OWN_GROUPS", tmp_path / "cgroup")
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
