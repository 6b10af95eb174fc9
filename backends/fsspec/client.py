"""A client of fsspec's filesystems: ``gs://`` by gcsfs, ``az://`` by adlfs, ``s3://`` by s3fs, ``file://`` and others.

On an object store, a large object is one upload in parts, which the library commits at the end. Elsewhere fsspec does
not promise that a file appears atomically. So it is written in order under an unfinished name beside its own, and moved
when it is whole: by a rename where the filesystem has one, else by a copy and a deletion. Conditional create is used
only on object stores, whose put is one request with a condition, because a file that is opened exclusively is visible
before it is whole. Empty folders are not removed.

``open_client`` passes options to the filesystem unchanged. Each client has its own filesystem: fsspec's cached
instances share credentials and connections with other users in the process. The directory cache is disabled, because
its listings are stale.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import fsspec  # type: ignore[import-untyped]
from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]

from tierfall.backends.object.client import (
    ObjectClient,
    Stream,
    answer_in,
    creating,
    hide_requests,
    library_error,
    translating,
    unknown_argument,
)
from tierfall.backends.toolkit.keys import is_unfinished, unfinished_name
from tierfall.backends.toolkit.views import copy_bytes, flat
from tierfall.core.types.backend import Publish, StoredObject, part_bytes
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    ConfigError,
    KeyExistsError,
    KeyNotFoundError,
    UnreachableError,
)
from tierfall.core.types.text import hint_at

# Object stores: an acknowledged put is durable and atomic, and folders do not exist.
STORES = ("s3", "gs", "gcs", "az", "abfs", "abfss")
# In this process's memory, where a put is atomic too.
_MEMORY = "memory"
# The members of a listing's entries that change when a file is rewritten, by filesystem.
_VERSIONS = (
    "ETag", "etag", "e_tag", "mtime", "ino", "created", "updated", "LastModified", "last_modified",
)  # fmt: skip
# Of the other filesystems, those whose move replaces a file atomically.
_REPLACING = ("file", "local", "sftp", "ssh")
# The least length of a part of an upload.
_PART_BYTES = 16 * 1024 * 1024


class FsspecClient(ObjectClient):
    """See ``ObjectClient``. Full keys begin with the filesystem's path of the place. ``streams`` is the filesystem for
    uploads in parts: the same place, with the library's own tries of each part."""

    def __init__(
        self, system: AbstractFileSystem, url: str, *, streams: AbstractFileSystem
    ) -> None:
        protocol = url.partition("://")[0]
        self._system = system
        self._uploading = streams
        self._root = str(system._strip_protocol(url)).rstrip("/")
        self._is_store = protocol in STORES
        self._is_memory = protocol == _MEMORY
        self._puts_whole = self._is_store or self._is_memory
        self._root_exists = False
        self._putting: set[str] = set()
        self.place = url.rstrip("/") if self._root else url
        self.prefix = f"{self._root}/"
        self.durable = self._is_store
        self.atomic_replace = self._puts_whole or protocol in _REPLACING
        self.supports_if_absent = self._is_store
        self.takes_streams = not self._is_memory

    def open_stream(self, key: str, most_bytes: int | None, what: str) -> Stream:
        if self._is_store:
            return _Upload(self._uploading, key, most_bytes, what)
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
                if publish is not Publish.IF_ABSENT:
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
                stream.abort()
            raise
        finally:
            self._putting.discard(stream.unfinished)

    def head(self, key: str, what: str) -> int:
        entry = self._call(self._system.info, key, what)
        if entry["type"] == "directory":
            raise KeyNotFoundError(f"{what}: it is a folder; there is no such object")
        if entry["type"] != "file":
            raise AccessDeniedError(
                f"{what}: it is a link or a special file, which are not used; put the file itself there"
            )
        return int(entry["size"])

    def read_into(self, key: str, offset: int, view: memoryview, what: str) -> int:
        data = self._call(
            lambda path: self._system.cat_file(path, start=offset, end=offset + view.nbytes),
            key,
            what,
        )
        source = flat(memoryview(data))
        if source.nbytes > view.nbytes:
            raise BackendError(f"{what}: the store sent more than the range asked for")
        copy_bytes(view[: source.nbytes], source)
        return source.nbytes

    def list(self, prefix: str, what: str) -> Iterator[StoredObject]:
        found = self._flat if self._puts_whole else self._walked
        for entry in found(prefix.rstrip("/"), what):
            if entry["type"] == "file" and entry["name"].startswith(prefix):
                yield StoredObject(
                    key=entry["name"], bytes=int(entry["size"]), version=_version(entry)
                )

    def delete(self, key: str, what: str) -> None:
        if not self._puts_whole:
            # Filesystems raise different errors for a folder of this name, which is no object.
            self.head(key, what)
        self._call(self._system.rm_file, key, what)

    def pending(self, prefix: str, what: str) -> Iterator[tuple[str, str]]:
        for found in self.list(prefix, what):
            if is_unfinished(found.key.rpartition("/")[2]) and found.key not in self._putting:
                yield found.key, found.key

    def abort(self, key: str, unfinished: str, what: str) -> None:
        with suppress(KeyNotFoundError):
            self._call(self._system.rm_file, unfinished, what)

    def check_open(self, *, read_only: bool) -> None:
        if read_only or self._is_store:
            self._entries(self._root, f"open {self.place}")

    def close(self) -> None:
        """Do nothing: fsspec has no call for it. The filesystem is garbage-collected with this object."""

    def open_file(self, path: str, what: str) -> Any:
        """Open a new file for writing, and create its folder where it is missing; the place itself only once: later its
        absence is an error."""
        try:
            return self._system.open(path, "wb")
        except FileNotFoundError:
            if self._root_exists:
                self._check_root(what)
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._root_exists = True
            return self._system.open(path, "wb")

    def move(self, source: str, target: str) -> None:
        """Rename a file, in place of an existing one."""
        if type(self._system).mv is AbstractFileSystem.mv:
            # fsspec's default would expand wildcards in the names.
            self._system.cp_file(source, target)
            self._system.rm_file(source)
            return
        if self._system.isdir(target):
            # mv would move the file into the folder.
            raise IsADirectoryError(target)
        self._system.mv(source, target)

    def _call(self, call: Any, path: str, what: str) -> Any:
        """Make a call about one object. "Not found" counts only while the place itself exists."""
        with translated(what):
            try:
                return call(path)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
                self._check_root(what)
                if answer_in(error.__cause__) == (404, ""):
                    raise  # It names nothing: a proxy in front of the store may have sent it.
                raise KeyNotFoundError(f"{what}: there is no such object") from None
            except KeyError:
                if not self._is_memory:
                    raise
                raise UnreachableError(f"{what}: it was changed meanwhile; try again") from None

    def _check_root(self, what: str) -> None:
        if self._is_memory:
            return
        root = self._root.partition("/")[0] if self._is_store else self._root
        probe = self._system.ls if self._is_store else self._system.info
        with translated(what):
            try:
                probe(root or "/")
            except FileNotFoundError:
                if self._is_store:
                    why = "there is no such bucket; make it, or name another"
                    raise BackendError(f"{what}: {why}") from None
                why = "the place is not there; mount or restore it"
                raise UnreachableError(f"{what}: {why}") from None

    def _flat(self, folder: str, what: str) -> Sequence[dict[str, Any]]:
        with translated(what):
            found = self._system.find(folder, detail=True)
        if isinstance(found, list):
            # adlfs names an object in place of the folder, and nothing else.
            found = {}
        if not found:
            # A deleted bucket lists like an empty one.
            self._check_root(what)
        return list(found.values())

    def _walked(self, folder: str, what: str) -> Iterator[dict[str, Any]]:
        """List everything below a folder. fsspec's own walk silently omits folders that it cannot read: it passes
        ``on_error`` to none below the first."""
        pending = [folder]
        while pending:
            parent = pending.pop()
            for entry in self._entries(parent, what):
                if entry["name"] == parent:
                    # ls of a file returns the file itself.
                    continue
                if not entry["name"].startswith(f"{parent}/"):
                    raise BackendError(f"{what}: the filesystem lists names of other folders")
                if entry["type"] == "directory":
                    pending.append(entry["name"])
                yield entry

    def _entries(self, folder: str, what: str) -> Sequence[dict[str, Any]]:
        with translated(what):
            try:
                return list(self._system.ls(folder or "/", detail=True))
            except (FileNotFoundError, NotADirectoryError):
                # The folder does not exist, or was removed since its parent was listed.
                self._check_root(what)
                return []


class _FileStream:
    """A file under an unfinished name, renamed by ``finish``."""

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
                raise BackendError(f"{self._what}: the filesystem wrote only a part of the bytes")

    def finish(self) -> None:
        with translated(self._what):
            self._file.close()
            self._client.move(self.unfinished, self._key)

    def abort(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            with translated(self._what):
                file.close()
        finally:
            self._client.abort(self._key, self.unfinished, self._what)


class _Upload:
    """An upload in parts of s3fs, gcsfs or adlfs: nothing is visible before ``finish``. Stores remove an upload that a
    killed process left after a week, S3 by a lifecycle rule."""

    unfinished = ""

    def __init__(
        self, system: AbstractFileSystem, key: str, most_bytes: int | None, what: str
    ) -> None:
        self._system = system
        self._key = key
        self._part_bytes = part_bytes(most_bytes or 0, _PART_BYTES)
        self._what = what
        self._file: Any = None

    def write(self, view: memoryview) -> None:
        with translated(self._what):
            if self._file is None:
                # open() would keep a file without autocommit in a list for ever.
                self._file = self._system._open(
                    self._key, mode="wb", block_size=self._part_bytes, autocommit=False
                )
            self._file.write(view)

    def finish(self) -> None:
        with translated(self._what):
            # adlfs commits in close, the others in commit.
            self._file.close()
            self._file.commit()

    def abort(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            with translated(self._what):
                file.discard()
        finally:
            # The finalizer of adlfs's file would commit.
            file.closed = True


def _version(entry: Mapping[str, Any]) -> str:
    """Join all members that a filesystem has: a local file that is rewritten may keep its time, but not its inode."""
    found = [entry.get(name) for name in _VERSIONS]
    return "-".join(str(value) for value in found if value is not None)


def translated(what: str) -> AbstractContextManager[None]:
    """Raise a filesystem's exceptions as BackendErrors."""
    return translating(what, library_error)


_PACKAGES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
_NO_STORE = "a web server takes no files; a store like S3 is s3://BUCKET/PREFIX with options: {endpoint_url: ...}"
# Options of every filesystem, for its cache.
_OF_FSSPEC = {"listings_expiry_time", "max_paths", "use_listings_cache", "skip_instance_cache"}
_CONNECT_S = 5.0
_READ_S = 120.0
# As of our own client: bounded waits, and no checksums that stores other than Amazon's may not support.
_S3_CONFIG = {
    "connect_timeout": _CONNECT_S,
    "read_timeout": _READ_S,
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
_ONE_TRY = {"retries": {"total_max_attempts": 1}}


def open_client(url: str, options: Mapping[str, Any] | None = None) -> FsspecClient:
    """Make the client; makes no request yet.

    Raises ConfigError for a protocol that fsspec does not know, a missing package, and options that the filesystem does
    not have.
    """
    protocol = url.partition("://")[0]
    if protocol in ("http", "https"):
        raise ConfigError(f"{url}: {_NO_STORE}")
    kind = _filesystem_class(protocol)
    given = {**kind._get_kwargs_from_urls(url), **dict(options or {})}
    if protocol not in STORES:
        system = _filesystem(kind, protocol, given)
        return FsspecClient(system, url, streams=system)
    if protocol == "s3":
        hide_requests()
    else:
        _check_names(kind, protocol, given)
    streams = _filesystem(kind, protocol, given)
    system = _filesystem(kind, protocol, given, **_ONE_TRY)
    _try_once(protocol, system)
    return FsspecClient(system, url, streams=streams)


def _check_names(kind: Any, protocol: str, options: Collection[str]) -> None:
    """Raise ConfigError for an option that a filesystem does not have: gcsfs and adlfs ignore it."""
    known = set(_OF_FSSPEC)
    for each in kind.__mro__:
        known.update(inspect.signature(each.__init__).parameters)
    for name in sorted(options):
        if name not in known:
            raise ConfigError(
                f"{protocol}://: {_PACKAGES[protocol]} has no option {name}{hint_at(name, known)}; see its "
                "documentation"
            )


def _bounds(protocol: str, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return options that bound the wait for an answer. ``config`` is added to that of s3fs. adlfs has bounds of its
    own."""
    if protocol == "s3":
        return {"config_kwargs": {**_S3_CONFIG, **config}}
    if _PACKAGES.get(protocol) != "gcsfs":
        return {}
    import aiohttp  # It comes with gcsfs.

    bound = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S)
    return {"session_kwargs": {"timeout": bound}}


def _try_once(protocol: str, system: Any) -> None:
    """Let a filesystem try each request once, because wrappers retry. gcsfs and adlfs have no option for it."""
    if protocol == "s3":
        system.retries = 1
    elif _PACKAGES[protocol] == "gcsfs":
        once = getattr(getattr(type(system), "_request", None), "__wrapped__", None)
        if once is not None:
            system._request = once.__get__(system)
    else:
        for policy in system.service_client._pipeline._impl_policies:
            if hasattr(policy, "total_retries"):
                policy.total_retries = 0


def _filesystem_class(protocol: str) -> Any:
    try:
        if _PACKAGES.get(protocol) == "gcsfs":
            # The class that gcsfs registers asks over gRPC what kind of bucket it is, and in some shows half an object.
            return importlib.import_module("gcsfs.core").GCSFileSystem
        return fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        hint = f"pip install {package}" if package else str(error)
        raise ConfigError(f"{protocol}:// needs another package: {hint}") from error


def _filesystem(kind: Any, protocol: str, options: dict[str, Any], **config: Any) -> Any:
    with _options_checked(protocol):
        bounded = {
            name: {**bounds, **(options.get(name) or {})}
            for name, bounds in _bounds(protocol, config).items()
        }
        fresh = {"skip_instance_cache": True, "use_listings_cache": False}
        system = kind(**{**options, **bounded, **fresh})
        if protocol == "s3":
            # s3fs looks at its options only when it connects, which makes no request to the store.
            system.connect()
        return system


@contextmanager
def _options_checked(protocol: str) -> Iterator[None]:
    """Raise a filesystem's exceptions about its options as a ConfigError that contains no value."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - each filesystem raises other classes
        name = unknown_argument(error)
        reason = f"{name} is unknown" if name else type(error).__name__
        raise ConfigError(
            f"fsspec's {protocol}:// does not accept these options: {reason}; see its documentation"
        ) from None
