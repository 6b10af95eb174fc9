"""Writing one object to an object store: a single put of what is small, an upload in parts of what is not.

Every ``write`` of a large object is a part of its own and is on its way when the call returns, so parts leave in any
order and from several threads, straight from the caller's memory. A part's number follows from its offset. What is
smaller than a part may be is kept until ``publish``: the last piece, or the whole of a small object.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import obstore

from tierfall.backends.object_errors import translated
from tierfall.backends.object_options import Site
from tierfall.backends.s3_multipart import Multipart
from tierfall.backends.views import copy_bytes, flat
from tierfall.core.contracts import Publish
from tierfall.core.errors import BackendError

# Amazon S3's bounds for an upload in parts.
PART_BYTES_MIN = 5 * 1024 * 1024
PART_BYTES_MAX = 5 * 1024**3
PARTS_MAX = 10_000
# Up to here one request is better than three; above, an object that is created conditionally is refused, because
# only a single put was probed.
SINGLE_BYTES_MAX = 8 * 1024 * 1024
CONDITIONAL_BYTES_MAX = 64 * 1024 * 1024


@dataclass(slots=True, kw_only=True)
class _Part:
    """A piece that has a number; sent when it has an etag."""

    offset: int
    size_bytes: int
    etag: str = ""


class ObjectWriter:
    """Fills one new object; see ``core.contracts.Writer``. ``living`` holds the ids of uploads that go on."""

    def __init__(
        self, site: Site, living: set[str], key: str, *, length: int | None, publish: Publish
    ) -> None:
        self._site = site
        self._living = living
        self._key = key
        self._length = length
        self._publish = publish
        self._lock = threading.Lock()
        self._begin_lock = threading.Lock()
        self._open = True
        self._kept: dict[int, bytearray] = {}
        self._parts: dict[int, _Part] = {}
        self._upload = ""
        stride = -(-(length or 0) // PARTS_MAX)
        self._stride_bytes = max(PART_BYTES_MIN, stride)

    def write(self, offset: int, view: memoryview) -> None:
        data = flat(view)
        with self._lock:
            self._check_open("write")
            part = self._killing_take(offset, data)
        if part is not None:
            self._send(*part, data)

    def publish(self) -> None:
        with self._lock:
            self._check_open("publish")
            self._open = False
        what = self._what("publish")
        try:
            fault = self._fault()
            if fault:
                raise BackendError(f"{what}: {fault}; write every byte first, and once")
            if self._parts:
                self._publish_parts(what)
            else:
                self._publish_whole(what)
        except BaseException:
            self._remove_upload()
            raise
        self._living.discard(self._upload)

    def abort(self) -> None:
        with self._lock:
            was_open, self._open = self._open, False
        if was_open:
            self._remove_upload()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    def _killing_take(self, offset: int, data: memoryview) -> tuple[int, _Part] | None:
        try:
            return self._take(offset, data)
        except BaseException:
            self._open = False
            self._remove_upload()
            raise

    def _take(self, offset: int, data: memoryview) -> tuple[int, _Part] | None:
        """Keep the bytes, or say which part they are."""
        end = offset + data.nbytes
        if offset < 0 or (self._length is not None and end > self._length):
            raise BackendError(
                f"{self._what('write')}: bytes {offset} to {end} lie outside of its {self._length} bytes"
            )
        if not data.nbytes:
            return None
        if not self._is_part(end, data.nbytes):
            self._keep(offset, data)
            return None
        number = offset // self._stride_bytes + 1
        part = self._parts.setdefault(number, _Part(offset=offset, size_bytes=data.nbytes))
        if number > PARTS_MAX or (part.offset, part.size_bytes) != (offset, data.nbytes):
            raise BackendError(
                f"{self._what('write')}: bytes {offset} to {end} make too many parts; there may be {PARTS_MAX}: say "
                f"the length at create, and write {self._stride_bytes} bytes or more at a time"
            )
        return number, part

    def _is_part(self, end: int, size_bytes: int) -> bool:
        if self._site.uploads is None or self._publish is Publish.IF_ABSENT:
            return False
        if self._length is None:
            return size_bytes >= PART_BYTES_MIN
        return self._length > SINGLE_BYTES_MAX and (
            size_bytes >= PART_BYTES_MIN or end == self._length
        )

    def _keep(self, offset: int, data: memoryview) -> None:
        others = sum(len(each) for start, each in self._kept.items() if start != offset)
        if self._site.uploads is not None and others + data.nbytes > self._keep_bytes_max():
            raise BackendError(
                f"{self._what('write')}: {data.nbytes} bytes at {offset} are too few for a part (part_bytes_min: "
                f"{PART_BYTES_MIN}), and with the {others} kept before too many for a single put"
            )
        kept = bytearray(data.nbytes)
        with memoryview(kept) as target:
            copy_bytes(target, data)
        self._kept[offset] = kept

    def _keep_bytes_max(self) -> int:
        if self._publish is Publish.IF_ABSENT:
            return CONDITIONAL_BYTES_MAX
        return PART_BYTES_MIN if self._length is None else SINGLE_BYTES_MAX

    def _send(self, number: int, part: _Part, data: memoryview) -> None:
        what = self._what(f"write part {number} of")
        try:
            uploads, upload = self._begun()
            part.etag = uploads.put_part(self._full_key, upload, number, data, what)
        except BackendError as error:
            if not error.retryable:
                self.abort()
            raise
        except BaseException:
            self.abort()
            raise

    def _begun(self) -> tuple[Multipart, str]:
        """Begin the upload, once. An id whose answer is lost is one for ``discard_unfinished``."""
        uploads = self._site.uploads
        assert uploads is not None, "only a store with uploads has parts"
        with self._begin_lock:
            self._check_open("write")
            if not self._upload:
                self._upload = uploads.begin(self._full_key, self._what("begin"))
                self._living.add(self._upload)
            return uploads, self._upload

    def _fault(self) -> str | None:
        """Say what keeps the pieces from being the object, or None."""
        spans = [(part.offset, part.size_bytes) for part in self._parts.values() if part.etag]
        spans += [(offset, len(kept)) for offset, kept in self._kept.items()]
        end = 0
        for offset, size_bytes in sorted(spans):
            if offset != end:
                return f"{'a hole' if offset > end else 'bytes written twice'} at byte {end}"
            end += size_bytes
        if len(spans) != len(self._parts) + len(self._kept):
            return "a part was never taken"
        if self._length not in (None, end):
            return f"{end} of {self._length} bytes were written"
        return None

    def _publish_parts(self, what: str) -> None:
        uploads, upload, key = self._site.uploads, self._upload, self._full_key
        assert uploads is not None, "only a store with uploads has parts"
        end = max(part.offset + part.size_bytes for part in self._parts.values())
        if any(offset < end for offset in self._kept):
            raise BackendError(
                f"{what}: only the last piece may be below part_bytes_min ({PART_BYTES_MIN} bytes)"
            )
        # All that is kept lies behind the parts: together it is the last one.
        last = self._joined()
        done = [(number, part.etag) for number, part in sorted(self._parts.items())]
        if last:
            number = end // self._stride_bytes + 1
            number += number == done[-1][0]
            done.append((number, uploads.put_part(key, upload, number, memoryview(last), what)))
        uploads.complete(key, upload, done, what)

    def _publish_whole(self, what: str) -> None:
        mode: Literal["create", "overwrite"] = (
            "create" if self._publish is Publish.IF_ABSENT else "overwrite"
        )
        with translated(what):
            obstore.put(
                self._site.store, self._full_key, self._joined(), mode=mode, use_multipart=False
            )

    def _joined(self) -> bytes | bytearray:
        kept = [piece for _, piece in sorted(self._kept.items())]
        return kept[0] if len(kept) == 1 else b"".join(kept)

    def _remove_upload(self) -> None:
        """Abort what was begun; where the store cannot be asked, it is left to ``discard_unfinished``."""
        self._kept.clear()
        if self._upload and self._site.uploads is not None:
            with suppress(BackendError):
                self._site.uploads.abort(self._full_key, self._upload, self._what("abort"))
        self._living.discard(self._upload)

    @property
    def _full_key(self) -> str:
        return self._site.prefix + self._key

    def _check_open(self, operation: str) -> None:
        if not self._open:
            raise BackendError(
                f"{self._what(operation)}: this writer is published or dead; create a new one"
            )

    def _what(self, operation: str) -> str:
        return f"{operation} {self._key!r} in {self._site.url}"
