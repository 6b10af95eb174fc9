"""What the chunks of restores go through: reused buffers, and the streams that empty them onto devices."""

from __future__ import annotations

from tierfall.core.compression.frames import frame_bytes_max
from tierfall.core.copies.chunk_reader import BUFFER_BYTES
from tierfall.core.copies.images import READ_THREADS
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.runtime.streams import Streams


class BufferRing:
    """Buffers for chunks of one size, packed ones too, and copy streams. Keep it from one restore to the next: first
    touches cost more than reads, and page-locking more than copying."""

    def __init__(
        self, chunk_bytes: int, *, count_max: int = READ_THREADS + 1, streams: Streams | None = None
    ) -> None:
        """By default one buffer more than is read into at once: a device reads that one. Their chunks take
        BUFFER_BYTES together at most, unless one takes more."""
        count = max(1, min(count_max, BUFFER_BYTES // chunk_bytes))
        self.count = count
        self.pool = BufferPool(bytes=frame_bytes_max(chunk_bytes), count=count)
        self.streams = streams or Streams()

    def release(self) -> None:
        """Unlock the buffers and let their memory go. No restore is under way."""
        self.pool.release()
