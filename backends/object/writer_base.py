"""What both writers to object stores share: their states, and publishing what is small by a single put; and the writer
whose bytes come in order.

A writer is open until it is asked to publish. After a retryable failure of that it may be asked again (it is waiting
then), after any other failure it is dead. An object that is created conditionally is never asked for twice: the second
request could lose to the first.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum

from tierfall.backends.object.client import ObjectClient, Stream
from tierfall.backends.toolkit.views import copy_bytes, flat
from tierfall.backends.toolkit.writers import AbortOnExit, Extent
from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import BackendError

# Up to here one request is better than three; above, an object that is created conditionally is refused, because
# only a single put was probed.
SINGLE_BYTES_MAX = 8 * 1024 * 1024
CONDITIONAL_BYTES_MAX = 64 * 1024 * 1024


class WriterState(StrEnum):
    OPEN = "open"
    PUBLISHING = "publishing"
    WAITING = "waiting to be published again"
    PUBLISHED = "published"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterContext:
    """What the writers of one backend share: its client, and the ids of what they have begun."""

    client: ObjectClient
    living: set[str]


class ObjectFrame(AbortOnExit):
    """One new object; a subclass takes the bytes."""

    def __init__(self, shop: WriterContext, key: str, *, extent: Extent, publish: Publish) -> None:
        self._client = shop.client
        self._living = shop.living
        self._key = key
        self._extent = extent
        self._publish_mode = publish
        self._lock = threading.Lock()
        self._state = WriterState.OPEN
        self._kept: dict[int, bytearray] = {}
        self._unfinished = ""

    def publish(self) -> None:
        with self._lock:
            if self._state not in (WriterState.OPEN, WriterState.WAITING):
                self._refuse("publish")
            self._state = WriterState.PUBLISHING
        try:
            self._publish(self._what("publish"))
        except BackendError as error:
            if error.retryable and self._publish_mode is Publish.REPLACE:
                self._state = WriterState.WAITING
            else:
                self._die()
            raise
        except BaseException:
            self._die()
            raise
        self._state = WriterState.PUBLISHED
        self._kept.clear()
        self._living.discard(self._unfinished)

    def abort(self) -> None:
        with self._lock:
            if self._state not in (WriterState.OPEN, WriterState.WAITING):
                return
            self._state = WriterState.DEAD
        self._die()

    @abstractmethod
    def _publish(self, what: str) -> None: ...

    def _remove(self) -> None:
        """Remove what was begun at the store."""
        if self._unfinished:
            self._client.abort(self._full_key, self._unfinished, self._what("abort"))

    def _die(self) -> None:
        """Leave nothing; where the store cannot be asked, it is left to ``discard_unfinished``."""
        self._state = WriterState.DEAD
        self._kept.clear()
        with suppress(BackendError):
            self._remove()
        self._living.discard(self._unfinished)

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

    def _check_open(self, operation: str) -> None:
        if self._state is not WriterState.OPEN:
            self._refuse(operation)

    def _refuse(self, operation: str) -> None:
        raise BackendError(
            f"{self._what(operation)}: this writer is {self._state}; create a new one"
        )

    @property
    def _full_key(self) -> str:
        return self._client.prefix + self._key

    def _what(self, operation: str) -> str:
        return f"{operation} {self._key!r} in {self._client.place}"


class OrderedWriter(ObjectFrame):
    """Fills one new object where parts cannot be sent again one by one: its bytes in rising order, through one stream;
    see ``Writer`` under ``ordered_writes``.

    What is small, or created conditionally, is kept and put at one blow, and that may be asked for again. A stream that
    failed cannot be taken up again: its writer is dead, and its error is not retryable, even where the store may answer
    again a moment later, because the bytes before are lost; whoever still has them writes a new object.
    """

    def __init__(self, shop: WriterContext, key: str, *, extent: Extent, publish: Publish) -> None:
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
