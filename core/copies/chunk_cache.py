"""A folder of this machine with verified chunks of slower tiers, for all processes of one user.

The name of a file is the digest of the chunk that it holds, and what is read is compared with it: a damaged or strange
file is only a miss. A file appears complete, by a rename. The least recently used ones are deleted first, files that a
killed process left unfinished among them. Whatever goes wrong with the folder is a warning, once: the chunks are read
from their tiers. Each call to its file system has a bound.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from tierfall.core.capture.copier import chunk_digest
from tierfall.core.format.records import DIGEST_PREFIX
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.types.errors import UnreachableError

logger = logging.getLogger("tierfall")
T = TypeVar("T")

NAME = "cache"
"""Its name among the tiers that bytes were read from."""
ANSWER_S = 5.0
BYTES_PER_S_MIN = 1 << 20
"""A call has ANSWER_S, and the time that its bytes take at this rate."""
SPARE = 16
"""A scan leaves a 16th of the size free; a process adds at most a 16th of that until its next scan."""
_DIGEST = re.compile(rf"{DIGEST_PREFIX}([0-9a-f]{{32}})\Z")
_OWN = re.compile(r"[0-9a-f]{32}\.(?:chunk|[a-z0-9_]+\.part)\Z")


class ChunkCache:
    """Thread-safe. ``tiers`` are those whose chunks it keeps; ``device`` is that of its file system, None if it cannot
    be used."""

    def __init__(self, folder: Path, bytes_max: int | None) -> None:
        """``bytes_max`` None: half of the room that its file system has for it."""
        self.tiers: set[str] = set()
        self._folder = folder / f"tierfall-{os.geteuid()}"
        self._bytes_max = bytes_max
        self._making_room, self._conditions = threading.Lock(), Conditions()
        self._left = 0
        """Bytes to add before the next scan."""
        self._ended: set[str] = set()
        self.device = self._call("be opened", self._open)

    def _open(self) -> int:
        """Create the folder; its chunks are for this user alone, as those on the tiers may be."""
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(0, f"others may write to {self._folder}")
        return found.st_dev

    def read(self, digest: str, view: memoryview) -> bool:
        """Fill ``view`` with the chunk of a digest; False if it is not there, whole and undamaged."""
        if (path := self._path(digest)) is None:
            return False
        # a read that is given up fills memory of its own
        found = self._call("be read", lambda: _read(path, view.nbytes), view.nbytes)
        if found is None:
            return False
        if len(found) == len(view) and chunk_digest(found) == digest:
            view[:] = found
            return True
        with suppress(OSError):
            path.unlink()
        return False

    def keep(self, digest: str, view: memoryview) -> None:
        """Keep a verified chunk. If the call is given up, ``view`` may change before its thread has written it: the
        file is a miss then."""
        if (path := self._path(digest)) is not None:
            self._call("keep more", lambda: self._write(path, view), view.nbytes)

    def _path(self, digest: str) -> Path | None:
        """Return the file of a digest; None if it is no digest of a chunk, whatever a manifest says."""
        found = _DIGEST.match(digest)
        return None if found is None else self._folder / f"{found[1]}.chunk"

    def _call(self, doing: str, function: Callable[[], T], bytes: int = 0) -> T | None:
        """Make a call within its bound; None if it fails, and from then on."""
        if self._ended & {doing, "be opened"}:
            return None
        bound_s = ANSWER_S + bytes / BYTES_PER_S_MIN
        answer = BoundedCalls().call_all({NAME: function}, {NAME: bound_s}, doing=doing)[NAME]
        match answer.error:
            case OSError() as error:
                self._end(doing, error.strerror or str(error))
            case UnreachableError():
                self._end(doing, f"no answer for {bound_s:.3g} s")
            case _:
                return answer.get()
        return None

    def _end(self, doing: str, reason: str) -> None:
        self._ended.add(doing)
        text = "the cache in %s cannot %s (%s): what it lacks is read from the tiers"
        self._conditions.report(doing, logging.WARNING, text, self._folder.parent, doing, reason)

    def _write(self, path: Path, view: memoryview) -> None:
        with self._making_room:
            if path.is_file() or not self._make_room(view.nbytes):
                return
        handle, part = tempfile.mkstemp(dir=self._folder, prefix=f"{path.stem}.", suffix=".part")
        try:
            with open(handle, "wb", buffering=0) as file:
                written = 0
                while written < len(view):
                    written += file.write(view[written:])
            os.replace(part, path)
        except (
            FileNotFoundError,
            IsADirectoryError,
        ):  # another process made room, or what is there is strange
            logger.debug("%s is not kept", path, exc_info=True)
        finally:
            with suppress(OSError):
                os.unlink(part)

    def _make_room(self, bytes: int) -> bool:
        """Return whether the folder has room for so many bytes, once the least recently used files are deleted."""
        if bytes <= self._left:
            self._left -= bytes
            return True
        files = []
        for entry in os.scandir(self._folder):
            if _OWN.match(entry.name):
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    files.append((found.st_mtime_ns, found.st_size, entry.path))
        held = sum(size for _, size, _ in files)
        limit = self._bytes_max
        if limit is None:
            limit = (held + shutil.disk_usage(self._folder).free) // 2
        if bytes > limit:
            return False
        for _, size, path in sorted(files):
            if held <= limit - max(bytes, limit // SPARE):
                break
            with suppress(OSError):
                os.unlink(path)
                held -= size
        self._left = limit // SPARE**2 - bytes
        return held + bytes <= limit


def _read(path: Path, length: int) -> memoryview | None:
    """Return what a file has, ``length`` bytes at most, nothing if it is strange; None if it is not there."""
    data, filled = np.empty(length, np.uint8).data, 0
    try:
        with open(path, "rb", buffering=0, opener=_open_file) as file:
            while filled < length and (count := file.readinto(data[filled:])):
                filled += count
            os.utime(file.fileno())
    except FileNotFoundError:
        return None
    except OSError:
        logger.debug("%s is not read", path, exc_info=True)
    return data[:filled]


def _open_file(path: str, flags: int) -> int:
    """Open what should be a file: no link is followed, and a pipe is not waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
