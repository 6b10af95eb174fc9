"""Objects in any filesystem of fsspec's but S3: ``file://``, ``memory://``, ``sftp://``, ``gs://`` by gcsfs and others.

fsspec promises little about how a file appears, so a large object is written in order under an unfinished name beside
its own, and moved when it is whole: by renaming where the filesystem can, else by copying and removing. Conditional
creation is asked for only of filesystems whose single put is one request with a condition to an object store; a file
that is opened exclusively is visible before it is whole. Folders that become empty are left.

Run by tests on ``file://`` and ``memory://``; of gcsfs and adlfs only their sources were read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]

from tierfall.backends.fsspec.errors import translated
from tierfall.backends.object.client import Found, Row, Stream
from tierfall.backends.object.responses import creating
from tierfall.backends.toolkit.keys import is_unfinished, unfinished_name
from tierfall.backends.toolkit.views import copy_bytes, flat
from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import (
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
    UnreachableError,
)

# Object stores: what they acknowledge is durable, a put is seen whole, and folders are only names.
_STORES = ("gs", "gcs", "az", "abfs", "abfss")
# This process's own, where a put is seen whole too.
_MEMORY = "memory"
# What filesystems call that which another object of a name has not.
_VERSIONS = (
    "ETag", "etag", "e_tag", "mtime", "ino", "created", "updated", "LastModified", "last_modified",
)  # fmt: skip
# Of the others, those that replace a file at one blow by moving another one onto it.
_REPLACING = ("file", "local", "sftp", "ssh")


class FsspecClient:
    """See ``ObjectClient``; full keys begin with the path of the place, as the filesystem names it."""

    uploads = None
    deletions = None

    def __init__(self, system: AbstractFileSystem, url: str) -> None:
        protocol = url.partition("://")[0]
        self._system = system
        self._root = str(system._strip_protocol(url)).rstrip("/")
        self._is_store = protocol in _STORES
        self._is_memory = protocol == _MEMORY
        self._puts_whole = self._is_store or self._is_memory
        self._was_there = False
        self._putting: set[str] = set()
        self.place = url.rstrip("/") if self._root else url
        self.prefix = f"{self._root}/"
        self.durable = self._is_store
        self.atomic_replace = self._puts_whole or protocol in _REPLACING
        self.knows_condition = self._is_store

    def open_stream(self, key: str, most_bytes: int | None, what: str) -> Stream:
        if self._is_memory:
            return _MemoryStream(self, key, what)
        return _FileStream(self, key, what)

    def put(self, key: str, data: memoryview, publish: Publish, what: str) -> None:
        if not self._puts_whole:
            self._put_by_stream(key, data, what)
            return
        mode = "create" if publish is Publish.IF_ABSENT else "overwrite"
        with creating(publish), translated(what):
            try:
                self._system.pipe_file(key, bytes(data), mode=mode)
            except FileExistsError:
                if publish is Publish.REPLACE:
                    raise
                raise KeyExistsError(f"{what}: the key is taken") from None

    def _put_by_stream(self, key: str, data: memoryview, what: str) -> None:
        stream = _FileStream(self, key, what)
        self._putting.add(stream.unfinished)
        try:
            stream.write(data)
            stream.finish()
        except BaseException:
            with suppress(BackendError):
                stream.drop()
            raise
        finally:
            self._putting.discard(stream.unfinished)

    def look(self, key: str, what: str) -> Found:
        entry = self._asked(self._system.info, key, what)
        if entry["type"] != "file":
            raise KeyNotFoundError(f"{what}: it is a folder or a special file; there is no object")
        return Found(bytes=int(entry["size"]), etag="")

    def read_into(self, key: str, offset: int, view: memoryview, what: str) -> int:
        data = self._asked(
            lambda path: self._system.cat_file(path, start=offset, end=offset + view.nbytes),
            key,
            what,
        )
        source = flat(memoryview(data))
        if source.nbytes > view.nbytes:
            raise BackendError(f"{what}: the store sent more than the range asked for")
        copy_bytes(view[: source.nbytes], source)
        return source.nbytes

    def rows(self, prefix: str, what: str) -> Iterator[Row]:
        found = self._flat if self._puts_whole else self._walked
        for entry in found(prefix.rstrip("/"), what):
            if entry["type"] == "file" and entry["name"].startswith(prefix):
                yield Row(entry["name"], int(entry["size"]), _version(entry))

    def delete(self, key: str, what: str) -> None:
        if not self._puts_whole:
            # A folder of this name is no object, and some would say so by an error of any kind.
            self.look(key, what)
        self._asked(self._system.rm_file, key, what)

    def pending(self, prefix: str, what: str) -> Iterator[tuple[str, str]]:
        for name, *_ in self.rows(prefix, what):
            if is_unfinished(name.rpartition("/")[2]) and name not in self._putting:
                yield name, name

    def abort(self, key: str, unfinished: str, what: str) -> None:
        with suppress(KeyNotFoundError):
            self._asked(self._system.rm_file, unfinished, what)

    def check_open(self) -> None:
        what = f"open {self.place}"
        self._check_root(what)
        if not self._is_memory:
            with translated(what):
                self._system.ls(self._root.partition("/")[0] if self._is_store else self._root)

    def close(self) -> None:
        """Do nothing: fsspec has no word for it; what a filesystem holds goes with this object."""

    def open_file(self, path: str, what: str) -> Any:
        """Open a new file for writing, its folder made where it is missing; the place itself only once."""
        try:
            return self._system.open(path, "wb")
        except FileNotFoundError:
            if self._was_there:
                self._check_root(what)
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._was_there = True
            return self._system.open(path, "wb")

    def move(self, source: str, target: str) -> None:
        """Let a file stand under another name, in place of what stands there."""
        if type(self._system).mv is AbstractFileSystem.mv:
            # That would look for wildcards in the names.
            self._system.cp_file(source, target)
            self._system.rm_file(source)
            return
        if self._system.isdir(target):
            # Else it would go into the folder.
            raise IsADirectoryError(target)
        self._system.mv(source, target)

    def _asked(self, call: Any, path: str, what: str) -> Any:
        """Make a call about one object; "not there" is believed only while the place itself is there."""
        with translated(what):
            try:
                return call(path)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                self._check_root(what)
                raise KeyNotFoundError(f"{what}: there is no such object") from None
            except KeyError:
                if not self._is_memory:
                    raise
                raise UnreachableError(f"{what}: it was changed meanwhile; try again") from None

    def _check_root(self, what: str) -> None:
        if self._is_memory:
            return
        root = self._root.partition("/")[0] if self._is_store else self._root
        look = self._system.ls if self._is_store else self._system.info
        with translated(what):
            try:
                look(root or "/")
            except FileNotFoundError:
                if self._is_store:
                    raise BackendError(
                        f"{what}: there is no such bucket; make it, or name another"
                    ) from None
                raise UnreachableError(
                    f"{what}: the place is not there; mount or restore it"
                ) from None

    def _flat(self, folder: str, what: str) -> list[dict[str, Any]]:
        with translated(what):
            found = self._system.find(folder, detail=True)
        if not found:
            # A bucket that is gone lists like an empty one.
            self._check_root(what)
        return list(found.values())

    def _walked(self, folder: str, what: str) -> Iterator[dict[str, Any]]:
        """List what lies below a folder. fsspec's own walk leaves out what it cannot read."""
        pending = [folder]
        while pending:
            parent = pending.pop()
            for entry in self._entries(parent, what):
                if entry["name"] == parent:
                    # A file lists itself.
                    continue
                if not entry["name"].startswith(f"{parent}/"):
                    raise BackendError(f"{what}: the filesystem lists names that do not lie there")
                if entry["type"] == "directory":
                    pending.append(entry["name"])
                yield entry

    def _entries(self, folder: str, what: str) -> list[dict[str, Any]]:
        with translated(what):
            try:
                return list(self._system.ls(folder or "/", detail=True))
            except (FileNotFoundError, NotADirectoryError):
                # Not there, or removed since its parent was listed: nothing lies below it.
                self._check_root(what)
                return []


class _FileStream:
    """A file under an unfinished name, moved to its own at the end."""

    def __init__(self, client: FsspecClient, key: str, what: str) -> None:
        self._client = client
        self._key = key
        self._what = what
        folder, slash, _ = key.rpartition("/")
        self.unfinished = f"{folder}{slash}{unfinished_name()}"
        self._file: Any = None

    def write(self, view: memoryview) -> None:
        with translated(self._what):
            if self._file is None:
                self._file = self._client.open_file(self.unfinished, self._what)
            if self._file.write(view) not in (None, view.nbytes):
                raise BackendError(f"{self._what}: the filesystem took only a part of the bytes")

    def finish(self) -> None:
        with translated(self._what):
            self._file.close()
            self._client.move(self.unfinished, self._key)

    def drop(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            with translated(self._what):
                file.close()
        finally:
            self._client.abort(self._key, self.unfinished, self._what)


class _MemoryStream:
    """Bytes that wait for the end; in this process's memory they would stand one way or the other."""

    unfinished = ""

    def __init__(self, client: FsspecClient, key: str, what: str) -> None:
        self._client = client
        self._key = key
        self._what = what
        self._data = bytearray()

    def write(self, view: memoryview) -> None:
        self._data += view

    def finish(self) -> None:
        self._client.put(self._key, memoryview(self._data), Publish.REPLACE, self._what)

    def drop(self) -> None:
        self._data = bytearray()


def _version(entry: Mapping[str, Any]) -> str:
    """What filesystems say of it, each in its own words: a file on a local disk may keep its time, not its inode."""
    said = [entry.get(name) for name in _VERSIONS]
    return "-".join(str(one) for one in said if one is not None)
