"""A file, or a folder, that appears whole under its name, or not at all: what ``export`` writes.

It is written under a name of its own beside its place, synced, and renamed. Whatever fails leaves nothing behind, nor
the folders that were made for it. A kill may leave the unfinished file, whose name says what it is.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierfall.backends.posix.system import translated
from tierfall.core.types.errors import BackendError, CapacityError
from tierfall.core.types.units import format_size

UNFINISHED_SUFFIX = ".unfinished"


@contextmanager
def new_file(path: Path, *, replace: bool, room_bytes: int) -> Iterator[Path]:
    """Give the name to write under; after the block the file stands at ``path``, durably.

    ``room_bytes`` is what the block will write in all. Raises BackendError where ``path`` is taken and not to be
    replaced, or the folder cannot be used; CapacityError, before anything is written, where there is no room.
    """
    check_free(path, replace=replace)
    with translated(f"export to {path.parent}"):
        made = _make_folders(path.parent)
    unfinished = path.parent / f".{path.name}.{secrets.token_hex(4)}{UNFINISHED_SUFFIX}"
    try:
        _check_room(path, room_bytes)
        with translated(f"export to {path}"):
            yield unfinished
            _sync(unfinished)
            check_free(path, replace=replace)
            os.replace(unfinished, path)
            _sync(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        _remove_folders(made)
        raise


@contextmanager
def new_folder(path: Path, *, room_bytes: int) -> Iterator[Path]:
    """Give the folder to write files into; after the block it stands at ``path``, durably, with all of them.

    Raises as ``new_file`` does, and where ``path`` is there: only an empty folder gives way.
    """
    check_free_folder(path)
    with translated(f"export to {path}"):
        made = _make_folders(path.parent)
    unfinished = path.parent / f".{path.name}.{secrets.token_hex(4)}{UNFINISHED_SUFFIX}"
    try:
        _check_room(path, room_bytes)
        with translated(f"export to {path}"):
            unfinished.mkdir()
            yield unfinished
            for each in (*unfinished.iterdir(), unfinished):
                _sync(each)
            check_free_folder(path)
            os.replace(unfinished, path)
            _sync(path.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        _remove_folders(made)
        raise


def check_free_folder(path: Path) -> None:
    """Raise BackendError where something stands at ``path`` that is no empty folder, or in place of what it lies in."""
    with translated(f"export to {path}"):
        if os.path.lexists(path.parent) and not path.parent.is_dir():
            raise BackendError(f"export: {path.parent} is no folder; name another")
        empty = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
        if os.path.lexists(path) and not empty:
            raise BackendError(
                f"export: {path} is there already; name a folder that is not there, or an empty one"
            )


def check_free(path: Path, *, replace: bool) -> None:
    """Raise BackendError where something stands at ``path`` that must stay, or in place of its folder, and where that
    cannot be seen."""
    with translated(f"export to {path}"):
        if os.path.lexists(path.parent) and not path.parent.is_dir():
            raise BackendError(
                f"export: {path.parent} is no folder; name one, or one that can be made"
            )
        if path.is_dir():
            raise BackendError(f"export: {path} is a folder; move it, or export to another folder")
        if not replace and os.path.lexists(path):
            raise BackendError(
                f"export: {path} is there already; say --force to replace it, or name another folder"
            )


def _make_folders(folder: Path) -> list[Path]:
    """Make what is missing of a path, and return it, innermost first."""
    missing = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_folders(made: list[Path]) -> None:
    for folder in made:
        try:
            folder.rmdir()
        except OSError:
            return  # somebody put something there meanwhile


def _check_room(path: Path, needed_bytes: int) -> None:
    with translated(f"export to {path}"):
        free = shutil.disk_usage(path.parent).free
    if needed_bytes > free:
        raise CapacityError(
            f"export to {path}: it needs {format_size(needed_bytes)} ({needed_bytes} bytes), free are "
            f"{format_size(free)} ({free} bytes); free some, or export to another disk"
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, view: memoryview, offset: int) -> None:
    """Write a whole view at an offset; the system may take it in pieces."""
    while len(view):
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
