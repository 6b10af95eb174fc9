"""The resources of a restore's reads: reused buffers, and the copy streams of devices."""

from __future__ import annotations

from tierfall.core.compression.frames import frame_bytes_max
from tierfall.core.copies.chunk_reader import DEVICE_BUFFER_BYTES
from tierfall.core.copies.images import READ_THREADS
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.runtime.cores import hash_threads
from tierfall.core.runtime.streams import Streams


class BufferRing:
    """Buffers for chunks of one size, raw or packed, and copy streams. Keep it between restores: first touches cost
    more than reads, and page-locking more than copying.

    ``threads`` verify chunks at once. ``count`` buffers are allocated when first needed: one for each thread, and more
    that a device copies from meanwhile.
    """

    def __init__(
        self,
        chunk_bytes: int,
        *,
        count_max: int | None = None,
        threads: int | None = None,
        streams: Streams | None = None,
    ) -> None:
        """All buffers together have at most DEVICE_BUFFER_BYTES, unless one chunk needs more."""
        self.threads = threads or hash_threads()
        if count_max is None:
            count_max = max(READ_THREADS, self.threads) + 2
        self.count = max(1, min(count_max, DEVICE_BUFFER_BYTES // chunk_bytes))
        self.pool = BufferPool(bytes=frame_bytes_max(chunk_bytes), count=self.count)
        self.streams = streams or Streams()

    def release(self) -> None:
        """Unlock the buffers and free their memory. No restore may be in progress."""
        self.pool.release()
