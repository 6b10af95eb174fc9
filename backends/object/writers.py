"""The writers to object stores: ``MultipartWriter`` for a store with multipart uploads, ``OrderedWriter`` for one with
streams, ``BufferedWriter`` for one that has neither. All write small objects by a single put."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tierfall.backends.object.client import (
    ObjectClient,
    Stream,
    Streams,
    UploadGoneError,
    Uploads,
)
from tierfall.backends.toolkit.base import Coverage, Extent, WriterBase, WriterState
from tierfall.backends.toolkit.views import copy_bytes, flat
from tierfall.core.types.backend import PARTS_MAX, Publish, part_bytes
from tierfall.core.types.errors import BackendError, KeyNotFoundError

# Amazon S3's bounds for an upload in parts.
PART_BYTES_MIN = 5 * 1024 * 1024
PART_BYTES_MAX = 5 * 1024**3
_MD5 = re.compile(r"[0-9a-f]{32}")
# Up to this length one put is faster than the three requests of a multipart upload.
SINGLE_BYTES_MAX = 8 * 1024 * 1024
# A longer object cannot be created conditionally: only a single put was probed at open.
CONDITIONAL_BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterContext:
    """What the writers of one backend share: its client, and the ids of the unfinished objects of active writers."""

    client: ObjectClient
    active: set[str]


class ObjectWriterBase(WriterBase):
    """Writes one new object; a subclass has ``write``."""

    def __init__(
        self, context: WriterContext, key: str, *, extent: Extent, publish: Publish
    ) -> None:
        super().__init__(key, context.client.place, extent=extent, publish=publish)
        self._client = context.client
        self._active = context.active
        self._kept: dict[int, bytearray] = {}
        """Bytes in memory, by their offset: too few for a part."""
        self._unfinished = ""

    def _on_published(self) -> None:
        self._kept.clear()
        self._active.discard(self._unfinished)

    def _remove(self) -> None:
        """Remove the unfinished object from the store."""
        if self._unfinished:
            self._client.abort(self._full_key, self._unfinished, self._what("abort"))

    def _die(self) -> None:
        self._state = WriterState.DEAD
        self._kept.clear()
        with suppress(BackendError):
            self._remove()
        self._active.discard(self._unfinished)

    def _keep(self, offset: int, data: memoryview) -> None:
        kept = bytearray(data.nbytes)
        with memoryview(kept) as target:
            copy_bytes(target, data)
        self._kept[offset] = kept

    def _joined(self) -> bytes | bytearray:
        kept = [piece for _, piece in sorted(self._kept.items())]
        return kept[0] if len(kept) == 1 else b"".join(kept)

    def _put_whole(self, what: str) -> None:
        self._client.put(self._full_key, memoryview(self._joined()), self._publish_mode, what)

    @property
    def _full_key(self) -> str:
        return self._client.prefix + self._key


@dataclass(slots=True, kw_only=True)
class _Part:
    """A numbered part; sent once it has an etag."""

    offset: int
    size_bytes: int
    etag: str = ""


class MultipartWriter(ObjectWriterBase):
    """Writes one new object by a single put or a multipart upload; see ``core.types.backend.Writer``.

    Every ``write`` of a large object is one part, and has been sent when the call returns: parts are sent in any order
    and from several threads, without a copy. A part's number follows from its offset. Bytes too few for a part are kept
    in memory until ``publish``: the last bytes of a large object, or all of a small one.

    If the answer to the completion of an upload is lost, the request is retried. A store that no longer knows the
    upload may have completed it the first time. Then the object under the key is compared by its length and its etag,
    which is the MD5 of the parts' MD5s where the parts' etags are MD5s ("Common Response Headers", Amazon S3 API
    Reference; the same on SeaweedFS). Where they are not (some encryptions), the outcome is unknown, and the writer is
    dead.
    """

    def __init__(
        self,
        context: WriterContext,
        uploads: Uploads,
        key: str,
        *,
        extent: Extent,
        publish: Publish,
    ) -> None:
        super().__init__(context, key, extent=extent, publish=publish)
        self._uploads = uploads
        self._begin_lock = threading.Lock()
        self._parts: dict[int, _Part] = {}
        self._is_unanswered = False
        self._stride_bytes = part_bytes(extent.most_bytes or 0, PART_BYTES_MIN)

    def write(self, offset: int, view: memoryview) -> None:
        data = flat(view)
        with self._lock:
            self._check_open("write")
            try:
                part = self._add(offset, data)
            except BaseException:
                self._die()
                raise
        if part is not None:
            self._send(*part, data)

    def _add(self, offset: int, data: memoryview) -> tuple[int, _Part] | None:
        """Keep the bytes in memory and return None, or return the number and the part that they are."""
        end = offset + data.nbytes
        self._extent.check_range(self._what("write"), offset, data.nbytes)
        if not data.nbytes:
            return None
        if not self._is_part(end, data.nbytes):
            self._check_kept_bytes(offset, data.nbytes)
            self._keep(offset, data)
            return None
        number = offset // self._stride_bytes + 1
        part = self._parts.setdefault(number, _Part(offset=offset, size_bytes=data.nbytes))
        if number > PARTS_MAX or (part.offset, part.size_bytes) != (offset, data.nbytes):
            raise BackendError(
                f"{self._what('write')}: bytes {offset} to {end} make too many parts; there may be {PARTS_MAX}: give "
                f"length or length_max at create, and write {self._stride_bytes} bytes or more at a time"
            )
        return number, part

    def _is_part(self, end: int, size_bytes: int) -> bool:
        length = self._extent.length
        if self._publish_mode is Publish.IF_ABSENT:
            return False
        if length is None:
            return size_bytes >= PART_BYTES_MIN
        return length > SINGLE_BYTES_MAX and (size_bytes >= PART_BYTES_MIN or end == length)

    def _check_kept_bytes(self, offset: int, size_bytes: int) -> None:
        others = sum(len(each) for start, each in self._kept.items() if start != offset)
        if others + size_bytes > self._keep_bytes_max():
            raise BackendError(
                f"{self._what('write')}: {size_bytes} bytes at {offset} are too few for a part (part_bytes_min: "
                f"{PART_BYTES_MIN}), and with the {others} kept before too many for a single put"
            )

    def _keep_bytes_max(self) -> int:
        """The most bytes that are kept in memory for a single put."""
        if self._publish_mode is Publish.IF_ABSENT:
            return CONDITIONAL_BYTES_MAX
        return PART_BYTES_MIN if self._extent.length is None else SINGLE_BYTES_MAX

    def _send(self, number: int, part: _Part, data: memoryview) -> None:
        what = self._what(f"write part {number} of")
        try:
            upload = self._begun()
            part.etag = self._uploads.put_part(self._full_key, upload, number, data, what)
        except BackendError as error:
            if not error.retryable:
                self.abort()
            raise
        except BaseException:
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
                begun = self._uploads.begin(self._full_key, self._what("begin"))
                self._active.add(begun)
                with self._lock:
                    self._unfinished = begun
                    is_dead = self._state is WriterState.DEAD
                if is_dead:
                    # Aborted before the upload had an id, so that it was not removed then.
                    self._die()
                    self._refuse("write")
            return self._unfinished

    def _finish(self, what: str) -> None:
        fault = self._fault()
        if fault:
            raise BackendError(f"{what}: {fault}; write every byte first, and once")
        if self._parts:
            self._send_last(what)
            self._complete(what)
        else:
            self._put_whole(what)

    def _fault(self) -> str | None:
        """Return why the parts and the kept bytes are not the whole object, or None."""
        spans = [(part.offset, part.size_bytes) for part in self._parts.values() if part.etag]
        spans += [(offset, len(kept)) for offset, kept in self._kept.items()]
        end = 0
        for offset, size_bytes in sorted(spans):
            if offset != end:
                return f"{'a hole' if offset > end else 'bytes written twice'} at byte {end}"
            end += size_bytes
        if len(spans) != len(self._parts) + len(self._kept):
            return "a part was never taken"
        if self._extent.length not in (None, end):
            return f"{end} of {self._extent.length} bytes were written"
        return None

    def _send_last(self, what: str) -> None:
        """Send the kept bytes as the last part."""
        end = self._end()
        if any(offset < end for offset in self._kept):
            raise BackendError(
                f"{what}: only the last piece may be below part_bytes_min ({PART_BYTES_MIN} bytes)"
            )
        last = self._joined()
        if not last:
            return
        number = end // self._stride_bytes + 1
        number += number == max(self._parts)
        etag = self._uploads.put_part(
            self._full_key, self._unfinished, number, memoryview(last), what
        )
        self._parts[number] = _Part(offset=end, size_bytes=len(last), etag=etag)
        self._kept.clear()

    def _complete(self, what: str) -> None:
        done = [(number, part.etag) for number, part in sorted(self._parts.items())]
        try:
            self._uploads.complete(self._full_key, self._unfinished, done, what)
        except UploadGoneError as error:
            if not self._is_unanswered:
                raise
            if not self._is_there(done, what):
                raise BackendError(
                    f"{what}: an earlier try got no answer, the upload is gone, and the object under the key is not "
                    "known to be this one; write a new object"
                ) from error
        except BackendError as error:
            self._is_unanswered = self._is_unanswered or error.retryable
            raise

    def _is_there(self, done: Sequence[tuple[int, str]], what: str) -> bool:
        """Whether the object under the key consists of these parts."""
        etags = [etag.strip('"') for _, etag in done]
        if not all(_MD5.fullmatch(etag) for etag in etags):
            return False
        digest = hashlib.md5(b"".join(map(bytes.fromhex, etags)), usedforsecurity=False)
        try:
            found = self._client.head(self._full_key, what)
        except KeyNotFoundError:
            return False
        return (found.bytes, found.etag) == (self._end(), f"{digest.hexdigest()}-{len(etags)}")

    def _end(self) -> int:
        return max(part.offset + part.size_bytes for part in self._parts.values())


class OrderedWriter(ObjectWriterBase):
    """Writes one new object where single parts cannot be sent again: its bytes in rising order, through one stream; see
    ``Writer`` under ``ordered_writes``.

    An object that is small, or created conditionally, is kept in memory for a single put, which can be retried. A
    stream that failed cannot be continued, because its earlier bytes are lost: the writer is dead, and the error is not
    retryable. The caller writes a new object."""

    def __init__(
        self,
        context: WriterContext,
        streams: Streams,
        key: str,
        *,
        extent: Extent,
        publish: Publish,
    ) -> None:
        super().__init__(context, key, extent=extent, publish=publish)
        self._streams = streams
        self._stream: Stream | None = None
        self._end = 0

    def write(self, offset: int, view: memoryview) -> None:
        data = flat(view)
        with self._lock:
            self._check_open("write")
            try:
                self._add(offset, data)
            except BaseException:
                self._die()
                raise

    def _add(self, offset: int, data: memoryview) -> None:
        what = self._what("write")
        self._extent.check_range(what, offset, data.nbytes)
        if offset != self._end:
            raise BackendError(
                f"{what}: bytes {offset} to {offset + data.nbytes} do not follow the {self._end} before; this store "
                "accepts bytes in rising order only (ordered_writes)"
            )
        if not data.nbytes:
            return
        end = offset + data.nbytes
        if self._stream is None and end <= self._keep_bytes_max():
            self._keep(offset, data)
        else:
            with _not_retryable():
                self._open_stream(what).write(data)
        self._end = end

    def _keep_bytes_max(self) -> int:
        """The most bytes that are kept in memory for a single put."""
        if self._publish_mode is Publish.IF_ABSENT:
            return CONDITIONAL_BYTES_MAX
        return SINGLE_BYTES_MAX

    def _open_stream(self, what: str) -> Stream:
        """Open the stream, once, and write the kept bytes to it."""
        if self._publish_mode is Publish.IF_ABSENT:
            raise BackendError(
                f"{what}: too many bytes for a single put, and only that can create conditionally; at most "
                f"{CONDITIONAL_BYTES_MAX} bytes"
            )
        if self._stream is None:
            self._stream = self._streams.open_stream(self._full_key, self._extent.most_bytes, what)
            self._unfinished = self._stream.unfinished
            self._active.add(self._unfinished)
            for _, piece in sorted(self._kept.items()):
                self._stream.write(memoryview(piece))
            self._kept.clear()
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
    """Writes one new object to a store that takes objects only whole: keeps its bytes in memory, which may be written
    in any order and again, for a single put."""

    def __init__(
        self, context: WriterContext, key: str, *, extent: Extent, publish: Publish
    ) -> None:
        super().__init__(context, key, extent=extent, publish=publish)
        self._coverage = Coverage()

    def write(self, offset: int, view: memoryview) -> None:
        data = flat(view)
        end = offset + data.nbytes
        with self._lock:
            self._check_open("write")
            try:
                self._extent.check_range(self._what("write"), offset, data.nbytes)
            except BaseException:
                self._die()
                raise
            kept = self._kept.setdefault(0, bytearray(self._extent.length or 0))
            kept.extend(bytes(max(0, end - len(kept))))
            with memoryview(kept) as target:
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
