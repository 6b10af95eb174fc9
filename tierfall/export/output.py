"""Atomic creation of the file or folder that ``export`` writes.

It is written under a temporary name in the same folder, synced, and renamed. After a failure it is removed, with the
folders that were created for it. After a kill the temporary file may remain; its name ends in ``.unfinished``.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tierfall.backends.posix.system import translated
from tierfall.core.types.errors import BackendError, CapacityError
from tierfall.core.types.units import format_size

UNFINISHED_SUFFIX = ".unfinished"


@contextmanager
def new_output(
    path: Path, *, room_bytes: int, folder: bool = False, replace: bool = False
) -> Iterator[Path]:
    """Yield the path of a file to write, or of a new ``folder``; after the block it is durable at ``path``.

    ``room_bytes`` is what the block writes in all. Raises as ``check_free`` does, before and after the block;
    BackendError if the folder is unusable; CapacityError, before anything is written, if there is no room.
    """
    check_free(path, folder=folder, replace=replace)
    with translated(f"export to {path.parent}"):
        made = [each for each in path.parents if not os.path.lexists(each)]
        path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.{secrets.token_hex(4)}{UNFINISHED_SUFFIX}"
    try:
        _check_room(path, room_bytes)
        with translated(f"export to {path}"):
            if folder:
                unfinished.mkdir()
            yield unfinished
            files = unfinished.iterdir() if folder else ()
            for each in (*files, unfinished):
                _sync(each)
            check_free(path, folder=folder, replace=replace)
            os.replace(unfinished, path)
            _sync(path.parent)
    except BaseException:
        if unfinished.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            unfinished.unlink(missing_ok=True)
        with suppress(OSError):  # another process has created something in it
            for each in made:
                each.rmdir()
        raise


def check_free(path: Path, *, folder: bool, replace: bool) -> None:
    """Raise BackendError if ``path`` exists and must not be replaced, its parent is no folder, or either cannot be
    examined. A new ``folder`` replaces an empty one alone."""
    with translated(f"export to {path}"):
        if os.path.lexists(path.parent) and not path.parent.is_dir():
            raise BackendError(
                f"export: {path.parent} is no folder; name one, or one that can be made"
            )
        if not os.path.lexists(path):
            return
        if folder:
            if path.is_symlink() or not path.is_dir() or any(path.iterdir()):
                raise BackendError(
                    f"export: {path} is there already; name a folder that is not there, or an empty one"
                )
        elif path.is_dir():
            raise BackendError(f"export: {path} is a folder; move it, or export to another folder")
        elif not replace:
            raise BackendError(
                f"export: {path} exists already: --force replaces it, or name another folder"
            )


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


def first_cause(error: RuntimeError) -> BaseException | None:
    """Return the OSError or interrupt that torch's error hides: after a failed write, closing the file fails too."""
    first: BaseException = error
    while first.__context__ is not None and not isinstance(first, KeyboardInterrupt):
        first = first.__context__
    return first if isinstance(first, OSError | KeyboardInterrupt) else None
