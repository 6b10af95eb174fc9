"""Writing one image to a stored tier: raw, or packed chunk by chunk into parts of one size.

Workers write chunks in any order, several at once. A packed image is one stream: its frames are joined in the order of
the chunks and cut into parts. The worker that fills a part sends it while the others go on packing. A frame that is
early waits, as data, for those before it. No thread waits for another: a part that could not be sent is sent again by
the next worker that calls. Memory is bounded: see ``Packing``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from tierfall.core.compression.codec import Packer, frame_bytes_max
from tierfall.core.compression.frame_table import (
    FrameTable,
    chunk_widths,
    make_frame_table,
    seek_table_bytes,
)
from tierfall.core.copies.image_writes import ImageUpload
from tierfall.core.format.commit_files import packed_files
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Geometry, Manifest, NamedFile
from tierfall.core.runtime.buffers import BufferPool, allocate
from tierfall.core.types.backend import Writer, part_bytes
from tierfall.core.types.values import Codec, Shard

# Small enough to begin sending early and evenly, large enough for the throughput of disks and object stores.
PART_BYTES = 8 << 20
_PAGE_BYTES = 4096


class RawImageWriter(ImageUpload):
    """Writes a raw image, straight from the memory of its chunks."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._published = False

    def find_chunks(self, start: int, view: memoryview) -> bool:
        return self._writer.find(start, view)

    def write_chunks(self, index: int, start: int, view: memoryview) -> None:
        """Write the chunks from ``index`` on; ``start`` is their offset in the image."""
        self._writer.write(start, view)

    def finish(self, manifest: Manifest) -> tuple[NamedFile, ...]:
        """Publish the image; may be called again after a retryable failure. Returns no files: it is raw."""
        if not self._published:
            self._writer.publish()
            self._published = True
        return ()

    def abort(self) -> None:
        self._writer.abort()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """The compression of a tier since open: bytes before and after, and the seconds of all its threads."""

    raw_bytes: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Bytes before over bytes after; 1 where nothing was packed yet."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 1.0

    @property
    def bytes_per_s(self) -> float:
        """Raw bytes that one thread packs in a second; 0 where nothing was packed yet."""
        return self.raw_bytes / self.seconds if self.seconds else 0.0


class Packing:
    """The codec of one tier, and its buffers, reused from image to image.

    ``parallel`` threads pack at once. The memory is bounded by ``2 * parallel + 1`` buffers of about ``chunk_bytes``
    (planes and frame of each thread, and one frame that waits) and, for each image, ``parallel`` parts in flight.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        level: int,
        chunk_bytes: int,
        parallel: int,
        part_bytes: int | None = None,
    ) -> None:
        """``part_bytes``: the least length of a part; PART_BYTES by default."""
        self.codec = codec
        self.part_bytes = part_bytes or PART_BYTES
        self.level = level
        self.parallel = parallel
        self.window = parallel + 1
        self.frames = BufferPool(bytes=frame_bytes_max(chunk_bytes), count=self.window)
        self.compression = Compression()
        self._scratch = BufferPool(bytes=chunk_bytes, count=parallel)
        self._local = threading.local()
        self._lock = threading.Lock()

    def pack(self, chunk: memoryview, frame: memoryview, *, width: int) -> int:
        """Pack ``chunk`` into ``frame`` and return the frame's length. Each thread has its own compressor."""
        if not hasattr(self._local, "packer"):
            self._local.packer = Packer(self.codec, level=self.level, scratch=self._scratch)
        began = time.perf_counter()
        length: int = self._local.packer.pack(chunk, frame, width=width)
        seconds = time.perf_counter() - began
        with self._lock:
            before = self.compression
            self.compression = Compression(
                raw_bytes=before.raw_bytes + len(chunk),
                stored_bytes=before.stored_bytes + length,
                seconds=before.seconds + seconds,
            )
        return length


@dataclass(slots=True)
class _PendingFrame:
    """A frame that is not in a part yet; closing ``lease`` returns its buffer."""

    data: memoryview
    lease: ExitStack
    copied: int = 0


@dataclass(slots=True)
class _UploadPart:
    offset: int
    buffer: memoryview
    filled: int = 0


@dataclass(slots=True, kw_only=True)
class _PackedStream:
    """Frames that wait, by chunk; the lengths of frames already in parts; the part being filled; full parts; memory for
    further ones. Guarded by the writer's lock."""

    waiting: dict[int, _PendingFrame] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    filling: _UploadPart | None = None
    full: list[_UploadPart] = field(default_factory=list)
    free: list[memoryview] = field(default_factory=list)
    end: int = 0


class PackedImageWriter(ImageUpload):
    """Writes a packed image; see the module. ``write_record`` stores its frame table."""

    def __init__(
        self,
        create: Callable[[int], Writer],
        packing: Packing,
        *,
        shard: Shard,
        cut: Geometry,
        pieces: Spliced,
        part_bytes_min: int,
        write_record: Callable[[bytes], None],
    ) -> None:
        """``create`` begins the file, given an upper bound of its length in bytes."""
        self._packing = packing
        self._shard = shard
        self._cut = cut
        self._write_record = write_record
        self._widths = (1,) * cut.chunk_count
        if packing.codec is Codec.PLANES:
            self._widths = chunk_widths(pieces, cut, what="manifest")
        bound = packed_bytes_max(cut)
        least = part_bytes(bound, max(packing.part_bytes, part_bytes_min))
        self._part_bytes = -(-min(least, bound) // _PAGE_BYTES) * _PAGE_BYTES
        self._lock = threading.Lock()
        self._stream = _PackedStream()
        self._stream.free = [allocate(self._part_bytes) for _ in range(packing.parallel)]
        self._packed: FrameTable | None = None
        self._published = False
        self._writer = create(bound)

    def has_chunk(self, index: int) -> bool:
        """Whether a chunk is packed already: after a failure, ``flush`` then repeats what could not be sent."""
        with self._lock:
            return index in self._stream.waiting or index < len(self._stream.lengths)

    def write_chunks(self, index: int, start: int, view: memoryview) -> None:
        """Pack chunk ``index``, and send full parts. After a retryable failure of that the chunk is packed."""
        lease = ExitStack()
        try:
            buffer = lease.enter_context(self._packing.frames.lend_view(frame_bytes_max(len(view))))
            length = self._packing.pack(view, buffer, width=self._widths[index])
        except BaseException:
            lease.close()
            raise
        with self._lock:
            self._stream.waiting[index] = _PendingFrame(buffer[:length], lease)
        self.flush()

    def flush(self) -> None:
        """Fill parts with frames and send full parts, until none is left that no other thread is sending."""
        while True:
            with self._lock:
                self._fill()
                part = self._stream.full.pop(0) if self._stream.full else None
            if part is None:
                return
            try:
                self._writer.write(part.offset, part.buffer[: part.filled])
            except BaseException:
                with self._lock:
                    self._stream.full.insert(0, part)
                raise
            with self._lock:
                self._stream.free.append(part.buffer)

    def finish(self, manifest: Manifest) -> tuple[NamedFile, ...]:
        """Send the rest, publish, and store the frame table; may be called again after a retryable failure."""
        self.flush()
        if self._packed is None:
            self._packed = self._close_stream(manifest)
            self.flush()
        record = self._packed.encode()
        if not self._published:
            self._writer.publish()
            self._published = True
        self._write_record(record)
        packed = self._packed
        return packed_files(
            self._shard,
            packed.codec,
            stored_bytes=packed.stored_bytes,
            raw_bytes=packed.raw_bytes,
            record=record,
        )

    def abort(self) -> None:
        self._writer.abort()
        with self._lock:
            stream, self._stream = self._stream, _PackedStream()
        for frame in stream.waiting.values():
            frame.lease.close()

    def _close_stream(self, manifest: Manifest) -> FrameTable:
        """Once all frames are in the stream, append the seek table, where the codec has one."""
        packed = make_frame_table(
            manifest,
            self._packing.codec,
            level=self._packing.level,
            lengths=self._stream.lengths,
            widths=self._widths,
        )
        tail = packed.seek_table(manifest)
        if tail:
            with self._lock:
                self._stream.waiting[self._cut.chunk_count] = _PendingFrame(
                    memoryview(tail), ExitStack()
                )
        return packed

    def _fill(self) -> None:
        """Move the next frames, in order, into parts while parts are free. The caller holds the lock."""
        stream = self._stream
        while (frame := stream.waiting.get(len(stream.lengths))) is not None:
            while frame.copied < len(frame.data):
                if not self._has_room():
                    return
                self._copy_frame(frame)
            del stream.waiting[len(stream.lengths)]
            stream.lengths.append(len(frame.data))
            frame.lease.close()
        if len(stream.lengths) >= self._frame_count() and stream.filling is not None:
            stream.full.append(stream.filling)
            stream.filling = None

    def _frame_count(self) -> int:
        """Frames after which the last part is closed, a seek table included."""
        if self._packed is None:
            return self._cut.chunk_count + 1
        return self._cut.chunk_count + (self._packing.codec is Codec.ZSTD)

    def _has_room(self) -> bool:
        stream = self._stream
        if stream.filling is None:
            if not stream.free:
                return False
            stream.filling = _UploadPart(stream.end, stream.free.pop())
        return True

    def _copy_frame(self, frame: _PendingFrame) -> None:
        stream = self._stream
        part = stream.filling
        assert part is not None
        count = min(len(frame.data) - frame.copied, self._part_bytes - part.filled)
        source = np.frombuffer(frame.data[frame.copied : frame.copied + count], dtype=np.uint8)
        target = np.frombuffer(part.buffer[part.filled : part.filled + count], dtype=np.uint8)
        np.copyto(target, source)
        frame.copied += count
        part.filled += count
        stream.end += count
        if part.filled == self._part_bytes:
            stream.full.append(part)
            stream.filling = None


def packed_bytes_max(cut: Geometry) -> int:
    """Return an upper bound of the length of a packed image, in bytes."""
    ranges = map(cut.chunk_range, range(cut.chunk_count))
    return sum(frame_bytes_max(end - start) for start, end in ranges) + seek_table_bytes(
        cut.chunk_count
    )
