"""The arena's file is removed by somebody else while it is in use: the memory stays."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from arena_help import MIB, add, create

from tierfall.core.types.errors import ConfigError

CAPACITY = 3 * MIB


def test_memory_grows_without_its_file_and_its_folder(path: Path) -> None:
    arena = create(path, MIB)
    add(arena, b"a" * 100, b"first")
    shutil.rmtree(path.parent)
    arena.grow(CAPACITY)
    add(arena, b"b" * MIB, b"second")
    assert [region.manifest() for region in arena.regions()] == [b"first", b"second"]
    arena.close(keep=False)
    path.parent.mkdir()


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
        arena.check_place()
    assert os.listdir(tmp_path) == []
    arena.close(keep=False)
    path.parent.unlink()
    path.parent.mkdir()


def test_a_file_that_is_in_use_does_not_look_old(path: Path) -> None:
    """Cleaners of temporary files go by age, and stores into a mapping change no time."""
    arena = create(path, CAPACITY)
    old_s = time.time() - 11 * 24 * 3600
    os.utime(path, (old_s, old_s))
    add(arena, b"a" * MIB)
    assert arena.file_exists()
    assert time.time() - path.stat().st_mtime < 3600
    arena.close(keep=False)
