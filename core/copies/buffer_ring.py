"""The resources of a restore's reads: reused buffers, and the copy streams of devices."""

from __future__ import annotations

from tierfall.core.compression.frames import frame_bytes_max
from tierfall.core.copies.chunk_reader import BUFFER_BYTES
from tierfall.core.copies.images import READ_THREADS
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.runtime.streams import Streams


class BufferRing:
    """Buffers for chunks of one size, raw or packed, and copy streams. Keep it between restores: first touches cost
    more than reads, and page-locking more than copying."""

    def __init__(
        self, chunk_bytes: int, *, count_max: int = READ_THREADS + 1, streams: Streams | None = None
    ) -> None:
        """By default there is one buffer more than parallel reads, which a device copies from meanwhile. All buffers
        together have at most BUFFER_BYTES, unless one chunk needs more."""
        count = max(1, min(count_max, BUFFER_BYTES // chunk_bytes))
        self.count = count
        self.pool = BufferPool(bytes=frame_bytes_max(chunk_bytes), count=count)
        self.streams = streams or Streams()

    def release(self) -> None:
        """Unlock the buffers and free their memory. No restore may be in progress."""
        self.pool.release()
