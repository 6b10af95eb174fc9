"""What both writers to object stores share, a single put of small objects; and the writer of bytes in order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tierfall.backends.object.client import ObjectClient, Stream
from tierfall.backends.toolkit.base import Extent, WriterBase, WriterState
from tierfall.backends.toolkit.views import copy_bytes, flat
from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import BackendError

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

    @abstractmethod
    def _keep_bytes_max(self) -> int:
        """The most bytes that are kept in memory for a single put."""

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


class OrderedWriter(ObjectWriterBase):
    """Writes one new object where single parts cannot be sent again: its bytes in rising order, through one stream; see
    ``Writer`` under ``ordered_writes``.

    An object that is small, or created conditionally, is kept in memory for a single put, which can be retried. A
    stream that failed cannot be continued, because its earlier bytes are lost: the writer is dead, and the error is not
    retryable. The caller writes a new object."""

    def __init__(
        self, context: WriterContext, key: str, *, extent: Extent, publish: Publish
    ) -> None:
        super().__init__(context, key, extent=extent, publish=publish)
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
                "takes bytes in rising order only (ordered_writes)"
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
            self._stream = self._client.open_stream(self._full_key, self._extent.most_bytes, what)
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
            self._stream.drop()


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
