"""The arena's file is removed by somebody else while it is in use: the memory stays, and the file is made anew."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from arena_help import KIB, MIB, RUN, add, create

from tierfall.core.types.errors import CapacityError, ConfigError, TierfallError
from tierfall.tiers.arena import mapping
from tierfall.tiers.arena.arena import Arena, arena_name

CAPACITY = 3 * MIB


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_MOVE_BYTES", 256 * KIB)


def make_anew(arena: Arena) -> None:
    """Make the file anew, as whoever looks after it does."""
    assert arena.unlock_pages()
    while not arena.file_exists():
        assert arena.recreate_file()


def move_what_can_be(arena: Arena) -> None:
    while arena.recreate_file():
        assert not arena.file_exists()


def left_in(path: Path) -> dict[bytes, tuple[bytes, tuple[bytes, ...]]]:
    """What a start after a kill finds there: each manifest's image and marks."""
    arena = Arena.attach(path, run=RUN, writable=False)
    assert arena.damage == ()
    found = {r.manifest(): (bytes(r.image), r.marks()) for r in arena.regions()}
    arena.close(keep=True)
    return found


def test_images_and_marks_are_in_the_new_file_and_views_stay(path: Path) -> None:
    arena = create(path, CAPACITY)
    first = add(arena, b"a" * MIB, b"first")
    first.add_mark(b"pin")
    view, tensor = first.image, first.tensor()
    assert arena.file_exists()
    path.unlink()
    assert not arena.file_exists()
    make_anew(arena)
    assert bytes(view) == b"a" * MIB
    assert bool((tensor == ord("a")).all())
    assert left_in(path) == {b"first": (b"a" * MIB, (b"pin",))}
    arena.close(keep=False)
    assert os.listdir(path.parent) == []


def test_an_image_that_is_being_filled_moves_once_it_is_sealed(path: Path) -> None:
    arena = create(path, CAPACITY)
    add(arena, b"a" * MIB, b"first")
    region = arena.allocate(image_bytes=MIB, records_bytes=100)
    assert region is not None
    image = region.image
    image[: MIB // 2] = b"b" * (MIB // 2)
    path.unlink()
    assert not arena.unlock_pages()  # a device may be copying there
    move_what_can_be(arena)
    image[MIB // 2 :] = b"c" * (MIB // 2)
    assert not path.exists()
    region.seal(manifest=b"second", commit=b"")
    make_anew(arena)
    assert left_in(path)[b"second"] == (b"b" * (MIB // 2) + b"c" * (MIB // 2), ())
    assert left_in(path)[b"first"] == (b"a" * MIB, ())
    arena.close(keep=False)


def test_memory_that_was_mapped_before_a_growth_is_the_same_memory(path: Path) -> None:
    arena = create(path, MIB)
    old = arena.allocate(image_bytes=MIB // 2, records_bytes=100)
    assert old is not None
    arena.grow(CAPACITY)
    path.unlink()
    old.image[:] = b"x" * (MIB // 2)
    old.seal(manifest=b"old", commit=b"")
    make_anew(arena)
    tensor = old.tensor()
    assert bytes(old.image) == b"x" * (MIB // 2)
    old.unseal()
    old.release()
    del old
    again = add(arena, b"y" * (MIB // 2), b"again")  # at the same place, by the newer mapping
    assert bool((tensor == ord("y")).all())
    assert left_in(path) == {b"again": (bytes(again.image), ())}
    arena.close(keep=False)


def test_memory_grows_without_its_file_and_its_folder(path: Path) -> None:
    arena = create(path, MIB)
    add(arena, b"a" * 100, b"first")
    shutil.rmtree(path.parent)
    arena.grow(CAPACITY)
    add(arena, b"b" * MIB, b"second")
    path.parent.mkdir()
    make_anew(arena)
    assert set(left_in(path)) == {b"first", b"second"}
    arena.close(keep=False)


def test_another_file_of_that_name_is_left_as_it_is(path: Path) -> None:
    arena = create(path, CAPACITY)
    region = add(arena, b"a" * MIB, b"first")
    path.unlink()
    other = create(path)
    add(other, b"b" * 100, b"theirs")
    assert not arena.file_exists()
    with pytest.raises(ConfigError, match="another one has its name by now; it is left as it is"):
        arena.recreate_file()
    assert bytes(region.image) == b"a" * MIB
    arena.close(keep=False)
    assert left_in(path) == {b"theirs": (b"b" * 100, ())}
    other.close(keep=False)


def test_a_file_that_is_removed_again_and_again(path: Path) -> None:
    arena = create(path, CAPACITY)
    add(arena, b"a" * MIB, b"first")
    for _ in range(2):
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        assert arena.recreate_file()
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        with pytest.raises(TierfallError):
            move_what_can_be(arena)
        make_anew(arena)
        assert left_in(path) == {b"first": (b"a" * MIB, ())}
    arena.close(keep=False)


def test_an_arena_that_is_closed_in_the_middle_leaves_nothing(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena = create(path, CAPACITY)
    path.unlink()
    assert arena.recreate_file()
    assert os.listdir(path.parent) != []
    arena.close(keep=True)
    assert os.listdir(path.parent) == []
    assert arena.file_exists()  # nobody misses it
    assert not arena.recreate_file()
    del arena
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def mount() -> Iterator[Path]:
    """A file system in memory that has room for one arena, and a little more."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    place = Path(tempfile.mkdtemp(prefix="tierfall-mount-"))
    command = ["mount", "-t", "tmpfs", "-o", "size=12m,mode=0700", "tierfall-test", str(place)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        place.rmdir()
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
    place.rmdir()


def test_without_any_room_it_goes_on_once_there_is(mount: Path) -> None:
    path = mount / arena_name(0)
    arena = create(path, 8 * MIB)
    image = os.urandom(7 * MIB)
    region = add(arena, image, b"first")
    path.unlink()
    with (mount / "other").open("wb") as other:
        other.truncate(4 * MIB)
        with pytest.raises(OSError, match="No space left"):
            os.posix_fallocate(other.fileno(), 0, 4 * MIB)
        while os.statvfs(mount).f_bavail:
            other.write(bytes(4096))
            other.flush()
    for _ in range(2):
        with pytest.raises(CapacityError, match=r"there is no room for 256 KiB .*; raise the size"):
            move_what_can_be(arena)
        assert bytes(region.image) == image
    (mount / "other").unlink()
    make_anew(arena)
    assert left_in(path) == {b"first": (image, ())}
    arena.close(keep=False)


def test_a_folder_on_a_disk_does_not_take_the_place_of_memory(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system in memory was unmounted: its mount point is a folder on the root disk."""
    if os.stat(tmp_path).st_dev == os.stat(path.parent).st_dev:
        pytest.skip("there is one file system only")
    monkeypatch.setattr("tierfall.tiers.arena.folder.is_in_memory", lambda place: False)
    arena = create(path, CAPACITY)
    shutil.rmtree(path.parent)
    path.parent.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is not in memory; mount it again"):
        arena.recreate_file()
    assert os.listdir(tmp_path) == []
    arena.close(keep=False)
    path.parent.unlink()
    path.parent.mkdir()


def test_a_forked_child_gets_nothing_of_the_new_file(path: Path) -> None:
    arena = create(path, CAPACITY)
    region = add(arena, b"a" * MIB, b"first")
    path.unlink()
    make_anew(arena)
    child = os.fork()
    if child == 0:
        seen = bytes(region._view[:1])
        os.kill(os.getpid(), signal.SIGTERM if seen == b"\0" else signal.SIGKILL)
        time.sleep(10)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    assert left_in(path) == {b"first": (b"a" * MIB, ())}
    arena.close(keep=False)


def test_a_file_that_is_in_use_does_not_look_old(path: Path) -> None:
    """Cleaners of temporary files go by age, and stores into a mapping change no time."""
    arena = create(path, CAPACITY)
    old_s = time.time() - 11 * 24 * 3600
    os.utime(path, (old_s, old_s))
    add(arena, b"a" * MIB)
    assert arena.file_exists()
    assert time.time() - path.stat().st_mtime < 3600
    arena.close(keep=False)
