"""What ranks pass on to each other: the headers of images with their manifests, and the chunks of their data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from tierfall.core.copies.buffer_ring import BufferRing
from tierfall.core.copies.cached_reads import TargetWriter, WrittenTargets
from tierfall.core.copies.chunk_reader import ChunkReader, ReadTally, read_chunk_to_targets, scatter
from tierfall.core.copies.to_device import DeviceCopies
from tierfall.core.format.records import Manifest, read_manifest
from tierfall.core.image.header import ImageHeader, read_header
from tierfall.core.load.build import Fill
from tierfall.core.restore.exchange.assign import HEADER, ChunkAssignment, ChunkDelivery
from tierfall.core.restore.exchange.rounds import ChunkPrefix, LoadedChunk
from tierfall.core.runtime.buffers import Buffer

OpenReader = Callable[[int], tuple[ChunkReader, Manifest]]
"""Opens the image of a rank that saved it. Raises one of PASSABLE where it has no good records here."""


class HeaderPayload:
    """Manifests and headers: ``known`` is what has come so far, by image. A manifest goes ahead of its header."""

    def __init__(
        self,
        open_reader: OpenReader,
        wanted: frozenset[int],
        order: Sequence[str],
        tally: ReadTally,
    ) -> None:
        self.known: dict[int, tuple[Manifest, ImageHeader]] = {}
        self._open, self._wanted, self._order, self._tally = open_reader, wanted, order, tally

    def room(self, item: ChunkAssignment) -> AbstractContextManager[Buffer]:
        return nullcontext(Buffer(1))  # how long it is, its manifest says

    def load(self, item: ChunkAssignment, buffer: Buffer) -> LoadedChunk:
        reader, manifest = self._open(item.image)
        said = manifest.encode()
        view, tier = reader.read_from(HEADER, memoryview(bytearray(manifest.data_start)))
        whole = bytearray(len(said) + len(view))
        whole[: len(said)], whole[len(said) :] = said, view
        head = ChunkPrefix(len(whole), self._order.index(tier), len(said))
        return LoadedChunk(memoryview(whole), 0, head)

    def load_alone(self, item: ChunkAssignment, buffer: Buffer) -> None:
        self.keep(item, self.load(item, buffer), buffer)

    def keep(self, item: ChunkAssignment, loaded: LoadedChunk, buffer: Buffer) -> None:
        if item.image in self._wanted:
            self._read(item.image, loaded.view, loaded.head.first)

    def room_for(self, get: ChunkDelivery, head: ChunkPrefix) -> AbstractContextManager[Buffer]:
        return nullcontext(Buffer(head.bytes))

    def take(self, get: ChunkDelivery, head: ChunkPrefix, buffer: Buffer) -> None:
        self._read(get.item.image, buffer.view[: head.bytes], head.first)
        self._tally.got(self._order[head.tier], get.item.reader, head.bytes)

    def _read(self, image: int, view: memoryview, first: int) -> None:
        manifest = read_manifest(bytes(view[:first]), what=f"manifest of rank {image}'s image")
        what = f"header of {manifest.line.checkpoint}"
        header = read_header(view[first:], image_bytes=manifest.image_bytes, what=what)
        self.known[image] = manifest, header


class ChunkPayload:
    """Chunks of data, on their way to the targets of ``fills``, by image; ``got`` is what has come to them.

    Threads share it. What is read goes through ``ring``, what is received through ``incoming``. Whoever makes it calls
    ``finish``.
    """

    def __init__(
        self,
        open_reader: OpenReader,
        fills: Mapping[int, Sequence[Fill]],
        sizes: Mapping[int, int],
        order: Sequence[str],
        tally: ReadTally,
        written: WrittenTargets,
        *,
        ring: BufferRing,
        incoming: BufferRing,
    ) -> None:
        """``sizes`` are the lengths of the images' chunks."""
        self.got: set[tuple[int, int]] = set()
        self._open, self._order, self._tally = open_reader, order, tally
        self._landings = {image: TargetWriter(those, written) for image, those in fills.items()}
        self._sizes = sizes
        self._ring, self._incoming = ring, incoming
        every = [fill for those in fills.values() for fill in those]
        self._copies = DeviceCopies(every, ring.pool, ring.streams)
        self._incoming_copies = DeviceCopies(every, incoming.pool, incoming.streams)
        self._lock = threading.Lock()

    def finish(self) -> None:
        """Wait until nothing is on its way onto a device any more; raises what one reports."""
        try:
            self._copies.finish()
        finally:
            self._incoming_copies.finish()

    def room(self, item: ChunkAssignment) -> AbstractContextManager[Buffer]:
        return self._ring.pool.lend(self._sizes[item.image])

    def load(self, item: ChunkAssignment, buffer: Buffer) -> LoadedChunk:
        reader, manifest = self._open(item.image)
        view, tier = reader.read_from(item.chunk, buffer.view)
        low = manifest.chunk_range(item.chunk)[0] - manifest.data_start
        return LoadedChunk(view, low, ChunkPrefix(len(view), self._order.index(tier)))

    def load_alone(self, item: ChunkAssignment, buffer: Buffer) -> None:
        reader, manifest = self._open(item.image)
        landing = self._landings[item.image]
        read_chunk_to_targets(reader, manifest, item.chunk, landing, self._copies, buffer)
        self._note(item)

    def keep(self, item: ChunkAssignment, loaded: LoadedChunk, buffer: Buffer) -> None:
        landing = self._landings.get(item.image)
        if landing is not None:
            scatter(loaded.view, loaded.low, landing, self._copies, buffer)
            self._note(item)

    def room_for(self, get: ChunkDelivery, head: ChunkPrefix) -> AbstractContextManager[Buffer]:
        return self._incoming.pool.lend(head.bytes)

    def take(self, get: ChunkDelivery, head: ChunkPrefix, buffer: Buffer) -> None:
        landing = self._landings[get.item.image]
        view = buffer.view[: head.bytes]
        scatter(view, get.low, landing, self._incoming_copies, buffer)
        self._tally.got(self._order[head.tier], get.item.reader, head.bytes)
        self._note(get.item)

    def _note(self, item: ChunkAssignment) -> None:
        with self._lock:
            self.got.add((item.image, item.chunk))
