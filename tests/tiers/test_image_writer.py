"""An image on its way, packed: in whatever order and from however many threads, the file is the same, and bounded."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from tests.core.compression.compression_help import image_of
from tests.memory_backend import MemoryBackend
from tierfall.core.capture.copier import chunk_digest
from tierfall.core.compression.codec import Unpacker
from tierfall.core.compression.frame_table import FrameTable, read_frame_table
from tierfall.core.format.records import Manifest
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.types.backend import Writer
from tierfall.core.types.errors import AccessDeniedError, UnreachableError
from tierfall.core.types.values import Codec
from tierfall.tiers.image_writer import PackedImageWriter, Packing

CODECS = [Codec.ZSTD, Codec.PLANES]
IMAGE, MANIFEST = image_of({"float32": 40_000, "bfloat16": 30_000, "uint8": 5_001})
CUT = MANIFEST.geometry()
KEY = "run/step/image"


class Place:
    """A memory backend whose writes fail on demand, and which notes what was asked of it."""

    def __init__(self) -> None:
        self.backend = MemoryBackend()
        self.failures: list[Exception] = []
        self.publish_failures: list[Exception] = []
        self.writes: list[tuple[int, int]] = []
        self.bound = 0
        self.records: list[bytes] = []
        self.under_way = 0
        self.most_under_way = 0
        self.lock = threading.Lock()

    def create(self, bound: int) -> Writer:
        self.bound = bound
        place = self
        inner = self.backend.create(KEY, length_max=bound)

        class Writing:
            def write(self, offset: int, view: memoryview) -> None:
                with place.lock:
                    place.under_way += 1
                    place.most_under_way = max(place.most_under_way, place.under_way)
                try:
                    if place.failures:
                        raise place.failures.pop(0)
                    inner.write(offset, view)
                    place.writes.append((offset, len(view)))
                finally:
                    with place.lock:
                        place.under_way -= 1

            def publish(self) -> None:
                if place.publish_failures:
                    raise place.publish_failures.pop(0)
                inner.publish()

            def abort(self) -> None:
                inner.abort()

        return Writing()  # type: ignore[return-value]

    def stored(self) -> bytes:
        data = bytearray(self.backend.stat(KEY).bytes)
        self.backend.read_into(KEY, 0, memoryview(data))
        return bytes(data)


@pytest.fixture
def place() -> Place:
    return Place()


def packing(codec: Codec, parallel: int = 2) -> Packing:
    return Packing(codec, level=1, chunk_bytes=CUT.chunk_bytes, parallel=parallel, part_bytes=4096)


def writer_to(
    place: Place, how: Packing, *, manifest: Manifest = MANIFEST, part_bytes_min: int = 0
) -> PackedImageWriter:
    return PackedImageWriter(
        place.create,
        how,
        shard=manifest.shard,
        cut=manifest.geometry(),
        pieces=manifest.pieces,
        part_bytes_min=part_bytes_min,
        write_record=place.records.append,
    )


def put(writer: PackedImageWriter, index: int) -> None:
    start, end = MANIFEST.chunk_range(index)
    writer.write_chunks(index, start, memoryview(IMAGE)[start:end])


def windowed(count: int, window: int, seed: int) -> Iterator[int]:
    """Every index once, none further ahead of the oldest that is missing than a lane allows."""
    draw, left, following = random.Random(seed), list(range(min(window, count))), window
    while left:
        index = left.pop(draw.randrange(len(left)))
        yield index
        oldest = min(left, default=following)
        while following < count and following - oldest < window:
            left.append(following)
            following += 1
            oldest = min(left)


def unpack_all(packed: FrameTable, stored: bytes, manifest: Manifest = MANIFEST) -> bytes:
    unpacker = Unpacker(packed.codec, scratch=BufferPool(bytes=1 << 20, count=1))
    data = bytearray()
    for index in range(packed.chunk_count):
        start, end = packed.chunk_range(index)
        raw_start, raw_end = manifest.chunk_range(index)
        target = memoryview(bytearray(raw_end - raw_start))
        frame = memoryview(stored)[start:end]
        unpacker.unpack(frame, target, width=packed.widths[index], what="x")
        assert chunk_digest(target) == manifest.digests[index]
        data += target
    return bytes(data)


def test_many_threads_make_the_same_file(place: Place) -> None:
    how = packing(Codec.ZSTD, parallel=4)
    writer = writer_to(place, how)
    alone = Place()
    single = writer_to(alone, packing(Codec.ZSTD))
    for index in range(CUT.chunk_count):
        put(single, index)
    single.finish(MANIFEST)
    pending: list[Future[None]] = []
    with ThreadPoolExecutor(4) as executor:
        for index in range(CUT.chunk_count):
            if index >= how.window:  # as a lane does: never further ahead than the oldest allows
                wait(pending[: index - how.window + 1], timeout=60)
            pending.append(executor.submit(put, writer, index))
        for future in pending:
            future.result(timeout=60)
    writer.finish(MANIFEST)
    assert place.stored() == alone.stored()
    assert place.most_under_way <= 4


@pytest.mark.parametrize("codec", CODECS)
def test_a_part_that_could_not_be_sent_is_sent_by_whoever_comes_next(
    place: Place, codec: Codec
) -> None:
    how = packing(codec)
    writer = writer_to(place, how)
    draw = random.Random(3)
    failed = 0
    for index in range(CUT.chunk_count):
        if draw.random() < 0.4:
            place.failures.append(UnreachableError("on purpose"))
        try:
            put(writer, index)
        except UnreachableError:
            failed += 1
            assert writer.has_chunk(index), "it was packed; only the sending failed"
            if draw.random() < 0.5:
                writer.flush()
    assert failed > 3
    place.failures.append(UnreachableError("on purpose"))
    with pytest.raises(UnreachableError):
        writer.finish(MANIFEST)
    place.publish_failures.append(UnreachableError("on purpose"))
    with pytest.raises(UnreachableError):
        writer.finish(MANIFEST)
    assert place.records == []
    writer.finish(MANIFEST)
    packed = read_frame_table(place.records[0], MANIFEST, what="x")
    assert unpack_all(packed, place.stored()) == IMAGE
    assert len(place.writes) == len(set(place.writes)), "no part was sent twice"


def test_an_outage_holds_no_thread_and_no_more_than_the_bound(place: Place) -> None:
    """With every send failing, chunks are taken up to the window, each call comes back, and then all goes on."""
    how = packing(Codec.ZSTD)
    writer = writer_to(place, how)
    place.failures = [UnreachableError("on purpose") for _ in range(1000)]
    taken = 0
    for index in range(how.window):
        try:
            put(writer, index)
        except UnreachableError:
            taken += 1
    assert taken
    assert all(writer.has_chunk(index) for index in range(how.window))
    assert len(writer._stream.full) <= how.parallel
    place.failures.clear()
    writer.flush()
    for index in range(how.window, CUT.chunk_count):
        put(writer, index)
    writer.finish(MANIFEST)
    assert (
        unpack_all(read_frame_table(place.records[0], MANIFEST, what="x"), place.stored()) == IMAGE
    )


@pytest.mark.parametrize("when", ["first", "middle", "finish"])
def test_whatever_is_lent_comes_back_after_an_abort(place: Place, when: str) -> None:
    """Another image is packed afterwards through the same buffers: were one missing, this would wait for ever."""
    how = packing(Codec.PLANES)
    for turn in range(3):
        writer = writer_to(place, how)
        for index in windowed(CUT.chunk_count, how.window, turn):
            put(writer, index)
            if when == "first" or (when == "middle" and index == 7):
                break
        if when == "finish":
            place.failures.append(AccessDeniedError("on purpose"))
            with pytest.raises(AccessDeniedError):
                writer.finish(MANIFEST)
        writer.abort()
        writer.abort()
        place.failures.clear()
        assert list(place.backend.scan("")) == []
    last = writer_to(place, how)
    for index in range(CUT.chunk_count):
        put(last, index)
    last.finish(MANIFEST)
    assert (
        unpack_all(read_frame_table(place.records[0], MANIFEST, what="x"), place.stored()) == IMAGE
    )
