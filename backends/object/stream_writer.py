"""Writing one object where parts cannot be sent again one by one: its bytes in rising order, through one stream.

What is small, or created conditionally, is kept and put at one blow, and that may be asked for again. A stream that
failed cannot be taken up again: its writer is dead, and its error is not retryable, even where the store may answer
again a moment later, because the bytes before are lost; whoever still has them writes a new object.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tierfall.backends.object.client import Stream
from tierfall.backends.object.writer_base import (
    CONDITIONAL_BYTES_MAX,
    SINGLE_BYTES_MAX,
    ObjectFrame,
    Shop,
)
from tierfall.backends.toolkit.views import flat
from tierfall.backends.toolkit.writers import Extent
from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import BackendError


class OrderedWriter(ObjectFrame):
    """Fills one new object; see ``core.contracts.Writer`` under ``ordered_writes``."""

    def __init__(self, shop: Shop, key: str, *, extent: Extent, publish: Publish) -> None:
        super().__init__(shop, key, extent=extent, publish=publish)
        self._stream: Stream | None = None
        self._end = 0

    def write(self, offset: int, view: memoryview) -> None:
        data = flat(view)
        with self._lock:
            self._check_open("write")
            try:
                self._take(offset, data)
            except BaseException:
                self._die()
                raise

    def _take(self, offset: int, data: memoryview) -> None:
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
            with _mortal():
                self._opened(what).write(data)
        self._end = end

    def _keep_bytes_max(self) -> int:
        if self._publish_mode is Publish.IF_ABSENT:
            return CONDITIONAL_BYTES_MAX
        return SINGLE_BYTES_MAX

    def _opened(self, what: str) -> Stream:
        """Open the stream, once, and hand it what was kept."""
        if self._publish_mode is Publish.IF_ABSENT:
            raise BackendError(
                f"{what}: too many bytes for a single put, and only that can create conditionally; at most "
                f"{CONDITIONAL_BYTES_MAX} bytes"
            )
        if self._stream is None:
            self._stream = self._client.open_stream(self._full_key, self._extent.most_bytes, what)
            self._unfinished = self._stream.unfinished
            self._living.add(self._unfinished)
            for _, piece in sorted(self._kept.items()):
                self._stream.write(memoryview(piece))
            self._kept.clear()
        return self._stream

    def _publish(self, what: str) -> None:
        if self._extent.length not in (None, self._end):
            raise BackendError(
                f"{what}: {self._end} of {self._extent.length} bytes were written; write every byte first"
            )
        if self._stream is None:
            self._put_whole(what)
            return
        with _mortal():
            self._stream.finish()

    def _remove(self) -> None:
        if self._stream is not None:
            self._stream.drop()


@contextmanager
def _mortal() -> Iterator[None]:
    """Say of an error that may pass that the writer does not outlive it."""
    try:
        yield
    except BackendError as error:
        if not error.retryable:
            raise
        raise BackendError(
            f"{error}; what was written in order cannot be taken up again: write a new object"
        ) from error
