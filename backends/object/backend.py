"""A backend on an object store, through a client: of S3, of a filesystem of fsspec, or of a plug-in's store.

It owns what is the same for all clients: keys, traits, the probe at open, the choice of the writer. Wrappers retry and
throttle.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import md5
from typing import Any

from tierfall.backends.object.client import BareAbsenceError, ObjectClient, Stream
from tierfall.backends.toolkit.base import BackendBase, Coverage, Extent, WriterBase, WriterState
from tierfall.backends.toolkit.keys import (
    check_key,
    check_prefix,
    is_key,
    is_unfinished,
    unfinished_name,
)
from tierfall.backends.toolkit.views import copy_bytes, flat
from tierfall.core.types.backend import PARTS_MAX, Publish, StoredObject, Traits, Writer, part_bytes
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
    UnreachableError,
)

_NOTHING = memoryview(b"")


class ObjectStoreBackend(BackendBase):
    """Stores objects below an address such as ``s3://bucket/prefix``; see ``core.types.backend.Backend``.

    Opening lists the place, so that wrong credentials and a missing bucket are errors, even if the store would create
    the bucket at the first write. Then it creates one object twice, to probe whether the store obeys a conditional
    create, and deletes it. ``read_only``: opening only lists; writing and deleting raise AccessDeniedError. The client
    is closed with the backend, and if opening fails.
    """

    _not_conditional = "this store does not keep a conditional create"

    def __init__(self, client: ObjectClient, *, read_only: bool = False) -> None:
        super().__init__(client.place, read_only=read_only)
        self._client = client
        self._active: set[str] = set()
        """The ids of the unfinished objects of active writers."""
        self._keys_max = client.keys_max
        """The most keys of one request for their deletion."""
        try:
            client.check_open(read_only=read_only)
            conditional = not read_only and self._probed()
        except BaseException:
            self.close()
            raise
        self._traits = Traits(
            durable=client.durable,
            atomic_replace=client.atomic_replace,
            conditional_create=conditional,
            ordered_writes=client.takes_streams,
            part_bytes_min=PART_BYTES_MIN if client.takes_parts else 0,
            max_parallel=client.max_parallel,
        )

    def _create(self, key: str, extent: Extent, publish: Publish) -> Writer:
        kind: type[BufferedWriter | MultipartWriter | OrderedWriter] = BufferedWriter
        most_bytes = extent.most_bytes
        is_small = most_bytes is not None and most_bytes <= SINGLE_BYTES_MAX
        if publish is not Publish.IF_ABSENT and not is_small:
            if self._client.takes_parts:
                kind = MultipartWriter
            elif self._client.takes_streams:
                kind = OrderedWriter
        return kind(self._client, self._active, key, extent=extent, publish=publish)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        check_key(key)
        data = flat(view, writable=True)
        what = self._what("read", key)
        if offset < 0:
            raise BackendError(f"{what}: the offset {offset} is negative")
        if not data.nbytes:
            self.stat(key)
            return
        filled = self._client.read_into(self._full(key), offset, data, what)
        if filled < data.nbytes:
            length = self._client.head(self._full(key), what)
            raise self._short_read(what, offset, offset + data.nbytes, length)

    def stat(self, key: str) -> StoredObject:
        check_key(key)
        length = self._client.head(self._full(key), self._what("stat", key))
        return StoredObject(key=key, bytes=length)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        check_prefix(prefix)
        found: list[StoredObject] = []
        for row in self._rows(prefix, self._what("list", prefix)):
            key = row.key.removeprefix(self._client.prefix)
            if is_key(key) and key.startswith(prefix):
                found.append(replace(row, key=key))
        return iter(sorted(found, key=lambda each: each.key))

    def delete(self, key: str) -> None:
        check_key(key)
        what = self._what("delete", key)
        self._check_writable(what)
        self._remove(self._full(key), what)

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        """See ``Backend``. After a store has refused a batch deletion, objects are deleted one by one."""
        keys = [check_key(key) for key in keys]
        if self._keys_max == 1 or len(keys) == 1:
            self.delete(keys[0])
            return keys[1:]
        batch = [self._full(key) for key in keys[: self._keys_max]]
        what = f"delete {len(batch)} objects in {self.place}"
        self._check_writable(what)
        try:
            left = self._client.delete_some(batch, what)
        except BackendError as error:
            if error.retryable and not isinstance(error, BareAbsenceError):
                raise
            # If a single deletion succeeds, the store does not support batches; else it raises the cause.
            self.delete(keys[0])
            self._keys_max = 1
            return keys[1:]
        # The failed keys come last, so that the next batch has others first.
        failed = [full.removeprefix(self._client.prefix) for full in left]
        return [*keys[len(batch) :], *failed]

    def discard_unfinished(self, prefix: str) -> int:
        check_prefix(prefix)
        what = self._what("clean up", prefix)
        self._check_writable(what)
        count = 0
        for full, unfinished in list(self._client.pending(self._full(prefix), what)):
            if unfinished not in self._active and self._is_ours(full):
                self._client.abort(full, unfinished, what)
                count += 1
        return count

    def close(self) -> None:
        """Close the connections. Open writers may still abort."""
        self._client.close()

    def _rows(self, prefix: str, what: str) -> Iterator[StoredObject]:
        """List a prefix. KeyNotFoundError is no valid answer to that: without objects, the listing is empty."""
        try:
            yield from self._client.list(self._full(prefix), what)
        except KeyNotFoundError as error:
            raise UnreachableError(f"{error}; a listing cannot be missing, so try again") from None

    def _is_ours(self, full: str) -> bool:
        """Whether a writer of this package can have begun it."""
        name = full.removeprefix(self._client.prefix)
        folder, _, leaf = name.rpartition("/")
        return is_key(name) or (is_unfinished(leaf) and (not folder or is_key(folder)))

    def _probed(self) -> bool:
        """Create one object twice; return whether the second create was refused."""
        full, what = self._full(unfinished_name()), f"open {self.place}"
        try:
            obeys = self._client.supports_if_absent and self._second_create_fails(full, what)
            if not obeys:
                self._client.put(full, _NOTHING, Publish.REPLACE, what)
        except BaseException:
            # The object may exist, whatever the answer was. What cannot be deleted now stays: it is empty.
            with suppress(BackendError):
                self._remove(full, what)
            raise
        self._remove(full, what)
        return obeys

    def _second_create_fails(self, full: str, what: str) -> bool:
        try:
            self._client.put(full, _NOTHING, Publish.IF_ABSENT, what)
            try:
                self._client.put(full, _NOTHING, Publish.IF_ABSENT, what)
            except KeyExistsError:
                return True
        except BackendError as error:
            if error.retryable or isinstance(error, AccessDeniedError):
                raise
            # The store does not support the condition. The caller tries a put without one.
        return False

    def _remove(self, full: str, what: str) -> None:
        with suppress(KeyNotFoundError):
            self._client.delete(full, what)

    def _full(self, key: str) -> str:
        return self._client.prefix + key


# Amazon S3's bound for a part of an upload.
PART_BYTES_MIN = 5 * 1024 * 1024
# Up to this length one put is faster than the three requests of a multipart upload.
SINGLE_BYTES_MAX = 8 * 1024 * 1024
# A longer object cannot be created conditionally: only a single put was probed at open.
CONDITIONAL_BYTES_MAX = 64 * 1024 * 1024
_TOO_FEW = f"only the last piece may be below part_bytes_min ({PART_BYTES_MIN} bytes)"


class ObjectWriterBase(WriterBase):
    """Writes one new object. ``active`` are the ids of the unfinished objects of active writers. A subclass takes the
    bytes."""

    def __init__(
        self,
        client: ObjectClient,
        active: set[str],
        key: str,
        *,
        extent: Extent,
        publish: Publish,
    ) -> None:
        super().__init__(key, client.place, extent=extent, publish=publish)
        self._client = client
        self._active = active
        self._full_key = client.prefix + key
        self._kept = bytearray()
        """Bytes that are sent by ``publish``."""
        self._unfinished = ""

    def write(self, offset: int, view: memoryview) -> None:
        data = flat(view)
        with self._lock:
            self._check_open("write")
            try:
                self._extent.check_range(self._what("write"), offset, data.nbytes)
                send = self._add(offset, data)
            except BaseException:
                self._die()
                raise
        if send is not None:
            send()

    @abstractmethod
    def _add(self, offset: int, data: memoryview) -> Callable[[], None] | None:
        """Take bytes, under the lock; return a call that sends them, or None."""

    def _on_published(self) -> None:
        self._kept = bytearray()
        self._active.discard(self._unfinished)

    def _remove(self) -> None:
        """Remove the unfinished object from the store."""
        if self._unfinished:
            self._client.abort(self._full_key, self._unfinished, self._what("abort"))

    def _die(self) -> None:
        self._state = WriterState.DEAD
        self._kept = bytearray()
        with suppress(BackendError):
            self._remove()
        self._active.discard(self._unfinished)

    def _put_whole(self, what: str) -> None:
        self._client.put(self._full_key, memoryview(self._kept), self._publish_mode, what)


@dataclass(slots=True, kw_only=True)
class _Part:
    """A numbered part; sent once it has an etag."""

    offset: int
    size_bytes: int
    etag: str = ""


class MultipartWriter(ObjectWriterBase):
    """Writes one new object by a multipart upload; see ``core.types.backend.Writer``.

    Every ``write`` is one part, and has been sent when the call returns: parts are sent in any order and from several
    threads, without a copy. A part's number follows from its offset. One piece may be too small for a part, the last
    one: it is kept in memory until ``publish``. If it is all there is, a single put sends it.

    If the answer to the completion of an upload is lost, the request is retried. If the store no longer knows the
    upload then, it may have completed it the first time; the writer is dead, and the caller writes a new object.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._begin_lock = threading.Lock()
        self._parts: dict[int, _Part] = {}
        self._kept_offset = 0
        self._there: Mapping[int, tuple[str, int]] = {}
        """Parts that an earlier writer has sent of the upload: etag and bytes. An etag is usually the part's MD5; a
        part with another etag is sent again."""
        self._stride_bytes = part_bytes(self._extent.most_bytes or 0, PART_BYTES_MIN)

    def abort(self) -> None:
        """See ``Writer``. An upload that can be resumed keeps its parts: the store lists them."""
        resumes = self._publish_mode is Publish.RESUME and self._parts_of(self._unfinished)
        with self._lock:
            if resumes and self._state is WriterState.OPEN:
                self._active.discard(self._unfinished)
                self._unfinished = ""
        super().abort()

    def _parts_of(self, upload: str) -> Mapping[int, tuple[str, int]]:
        """Return the parts of an upload; none where it is gone, or the store does not list them."""
        if upload:
            with suppress(BackendError):
                return self._client.parts(self._full_key, upload, self._what("list the parts of"))
        return {}

    def _add(self, offset: int, data: memoryview) -> Callable[[], None] | None:
        end = offset + data.nbytes
        if not data.nbytes:
            return None
        if data.nbytes < PART_BYTES_MIN and end != self._extent.length:
            if self._kept and offset != self._kept_offset:
                raise BackendError(f"{self._what('write')}: {_TOO_FEW}")
            self._kept, self._kept_offset = _copied(data), offset
            return None
        number = offset // self._stride_bytes + 1
        part = self._parts.setdefault(number, _Part(offset=offset, size_bytes=data.nbytes))
        if number > PARTS_MAX or (part.offset, part.size_bytes) != (offset, data.nbytes):
            raise BackendError(
                f"{self._what('write')}: bytes {offset} to {end} make too many parts; there may be {PARTS_MAX}: give "
                f"length or length_max at create, and write {self._stride_bytes} bytes or more at a time"
            )
        return partial(self._send, number, part, data)

    def _send(self, number: int, part: _Part, data: memoryview) -> None:
        what = self._what(f"write part {number} of")
        try:
            upload = self._begun()
            etag, size_bytes = self._there.get(number, ("", -1))
            if (
                size_bytes == data.nbytes
                and etag.strip('"') == md5(data, usedforsecurity=False).hexdigest()
            ):
                part.etag = etag
            else:
                part.etag = self._client.put_part(self._full_key, upload, number, data, what)
        except BaseException as error:
            if not (isinstance(error, BackendError) and error.retryable):
                self.abort()
            raise
        with self._lock:
            is_dead = self._state is WriterState.DEAD
        if is_dead:
            # Aborted meanwhile: a part that arrives after the abort may still exist.
            with suppress(BackendError):
                self._remove()
            self._refuse("write")

    def _begun(self) -> str:
        """Begin the upload, once. If the answer is lost, ``discard_unfinished`` removes the upload."""
        with self._begin_lock:
            self._check_open("write")
            if not self._unfinished:
                begun = self._left() or self._client.begin(self._full_key, self._what("begin"))
                self._active.add(begun)
                with self._lock:
                    self._unfinished = begun
                    is_dead = self._state is WriterState.DEAD
                if is_dead:
                    # Aborted before the upload had an id, so that it was not removed then.
                    self._die()
                    self._refuse("write")
            return self._unfinished

    def _left(self) -> str:
        """Find an upload of this key that nobody writes any more, and its parts; '' if there is none."""
        if self._publish_mode is not Publish.RESUME:
            return ""
        what = self._what("look for a begun upload of")
        for key, upload in self._client.pending(self._full_key, what):
            if key == self._full_key and upload not in self._active:
                self._there = self._parts_of(upload)
                if self._there:
                    return upload
        return ""

    def _finish(self, what: str) -> None:
        fault = self._fault()
        if fault:
            raise BackendError(f"{what}: {fault}; write every byte first, and once")
        if self._parts:
            self._send_last(what)
            done = [(number, part.etag) for number, part in sorted(self._parts.items())]
            self._client.complete(self._full_key, self._unfinished, done, what)
        else:
            self._put_whole(what)

    def _fault(self) -> str | None:
        """Return why the parts and the kept bytes are not the whole object, or None."""
        spans = [(part.offset, part.size_bytes) for part in self._parts.values()]
        spans += [(self._kept_offset, len(self._kept))] if self._kept else []
        end = 0
        for offset, size_bytes in sorted(spans):
            if offset != end:
                return f"{'a hole' if offset > end else 'bytes written twice'} at byte {end}"
            end += size_bytes
        if not all(part.etag for part in self._parts.values()):
            return "a part was never taken"
        if self._extent.length not in (None, end):
            return f"{end} of {self._extent.length} bytes were written"
        return None

    def _send_last(self, what: str) -> None:
        """Send the kept bytes as the last part."""
        end = max(part.offset + part.size_bytes for part in self._parts.values())
        if not self._kept:
            return
        if self._kept_offset < end:
            raise BackendError(f"{what}: {_TOO_FEW}")
        number = end // self._stride_bytes + 1
        number += number == max(self._parts)
        etag = self._client.put_part(
            self._full_key, self._unfinished, number, memoryview(self._kept), what
        )
        self._parts[number] = _Part(offset=end, size_bytes=len(self._kept), etag=etag)
        self._kept = bytearray()


class OrderedWriter(ObjectWriterBase):
    """Writes one new object where single parts cannot be sent again: its bytes in rising order, through one stream; see
    ``Writer`` under ``ordered_writes``.

    A stream that failed cannot be continued, because its earlier bytes are lost: the writer is dead, and the error is
    not retryable. The caller writes a new object."""

    _stream: Stream | None = None
    _end = 0

    def _add(self, offset: int, data: memoryview) -> None:
        what = self._what("write")
        if offset != self._end:
            raise BackendError(
                f"{what}: bytes {offset} to {offset + data.nbytes} do not follow the {self._end} before; this store "
                "accepts bytes in rising order only (ordered_writes)"
            )
        if data.nbytes:
            with _not_retryable():
                self._opened(what).write(data)
            self._end += data.nbytes

    def _opened(self, what: str) -> Stream:
        """Open the stream, once."""
        if self._stream is None:
            self._stream = self._client.open_stream(self._full_key, self._extent.most_bytes, what)
            self._unfinished = self._stream.unfinished
            self._active.add(self._unfinished)
        return self._stream

    def _finish(self, what: str) -> None:
        if self._extent.length not in (None, self._end):
            raise BackendError(
                f"{what}: {self._end} of {self._extent.length} bytes were written; write every byte first"
            )
        if self._stream is None:
            self._put_whole(what)
            return
        with _not_retryable():
            self._stream.finish()

    def _remove(self) -> None:
        if self._stream is not None:
            self._stream.abort()


class BufferedWriter(ObjectWriterBase):
    """Writes one new object by a single put, which can be retried: one that is small or created conditionally, or any
    if the store takes objects only whole. Keeps its bytes in memory, which may be written in any order and again."""

    @cached_property
    def _coverage(self) -> Coverage:
        return Coverage()

    def _add(self, offset: int, data: memoryview) -> None:
        end = offset + data.nbytes
        if self._publish_mode is Publish.IF_ABSENT and end > CONDITIONAL_BYTES_MAX:
            raise BackendError(
                f"{self._what('write')}: too many bytes for a single put, and only that can create conditionally; at "
                f"most {CONDITIONAL_BYTES_MAX} bytes"
            )
        if not self._kept:
            self._kept = bytearray(self._extent.length or 0)
        self._kept.extend(bytes(max(0, end - len(self._kept))))
        with memoryview(self._kept) as target:
            copy_bytes(target[offset:end], data)
        self._coverage.add(offset, end)

    def _finish(self, what: str) -> None:
        fault = self._coverage.missing(self._extent.length)
        if fault:
            raise BackendError(f"{what}: {fault}; write every byte first")
        self._put_whole(what)


@contextmanager
def _not_retryable() -> Iterator[None]:
    """Raise a retryable error as one that is not: the stream is lost."""
    try:
        yield
    except BackendError as error:
        if not error.retryable:
            raise
        raise BackendError(
            f"{error}; a stream that failed cannot be continued: write a new object"
        ) from error


def _copied(data: memoryview) -> bytearray:
    copy = bytearray(data.nbytes)
    with memoryview(copy) as target:
        copy_bytes(target, data)
    return copy
