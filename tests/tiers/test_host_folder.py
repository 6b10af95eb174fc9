"""The host tier's folder and the memory that is free for it."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_help import MIB, START, add, create, root_only

from tierfall.core.runtime import cores
from tierfall.core.types.errors import CapacityError, ConfigError
from tierfall.tiers import host_folder, image_file
from tierfall.tiers.host_folder import RoomReport, default_folder, measure_room, prepare_folder


def test_memory_that_does_not_suffice_is_noticed_before_the_kernel_kills(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_folder, "is_in_memory", lambda folder: True)
    monkeypatch.setattr(host_folder, "memory_free_bytes", lambda: MIB)
    with pytest.raises(CapacityError, match=r"available 1 MiB .*memory: 1 MiB"):
        create(path, 2 * MIB)
    assert not path.exists()
    monkeypatch.setattr(host_folder, "is_in_memory", lambda folder: False)
    create(path, 2 * MIB).close(keep=False)


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
    room = measure_room(tiny)
    assert room.in_memory
    assert room.free_bytes <= 4 * MIB
    with pytest.raises(CapacityError, match=r"needed 16 MiB .*available 4 MiB"):
        create(tiny / "slot-0.0.image", 16 * MIB)
    # Somebody else took the room after it was looked at.
    monkeypatch.setattr(RoomReport, "require", lambda self, needed, what: None)
    monkeypatch.setattr(image_file, "RESERVE_BYTES", MIB)
    with pytest.raises(CapacityError, match=r"needed 16 MiB .*available were 3 MiB"):
        create(tiny / "slot-0.0.image", 16 * MIB)
    assert os.listdir(tiny) == []
    file = create(tiny / "slot-0.0.image", MIB)
    add(file, b"x" * 100_000).release()
    assert file.path.stat().st_size == START + MIB
    file.close(keep=False)


def test_default_folder_is_shared_memory_or_says_that_it_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    name = f"tierfall-{os.geteuid()}"
    monkeypatch.setattr(host_folder, "SHARED_MEMORY", tmp_path)
    assert default_folder() == tmp_path / name
    assert not caplog.records
    monkeypatch.setattr(host_folder, "SHARED_MEMORY", tmp_path / "none")
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
    monkeypatch.setattr(host_folder, "_MEMINFO", tmp_path / "meminfo")
    assert measure_room(tmp_path).memory_free_bytes == 4000
    (inner.parent / "memory.stat").write_text(
        "anon 400\nfile 600\nshmem 250\ninactive_file 300\nactive_file 50\n"
    )
    # the page cache, without files in memory
    assert measure_room(tmp_path).memory_free_bytes == 4350
    (inner.parent / "memory.max").write_text("max\n")
    assert measure_room(tmp_path).memory_free_bytes == 8 << 10
    (tmp_path / "meminfo").unlink()
    assert measure_room(tmp_path).memory_free_bytes is None
