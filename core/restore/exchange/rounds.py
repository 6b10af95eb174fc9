"""Rounds: in one round of an exchange every rank reads the chunks assigned to it and sends them to those that request
them.

A few threads read, and a few others receive, each in the assigned order. So there are no more chunks in memory than
threads, and no threads wait for each other in a circle. A chunk is sent as a *prefix*, with its length and the tier
that it was read from, and its bytes; of a chunk that cannot be read only a prefix is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from tierfall.core.copies.chunk_reader import (
    BufferRing,
    ChunkReader,
    DeviceCopies,
    ReadTally,
    TargetWriter,
    read_chunk_to_targets,
    scatter,
)
from tierfall.core.copies.shard_reader import PASSABLE
from tierfall.core.format.records import Manifest, parse_manifest
from tierfall.core.image.header import ImageHeader, read_header
from tierfall.core.load.build import Fill
from tierfall.core.restore.exchange.assign import (
    HEADER,
    ChunkAssignment,
    ChunkDelivery,
    RankGroup,
    deliveries_to,
    name_of,
    reads_of,
    receivers_of,
)
from tierfall.core.restore.exchange.gloo import ByteTransport, LostError
from tierfall.core.runtime.buffers import Buffer
from tierfall.core.runtime.threads import interrupted_by
from tierfall.core.runtime.wait import InterruptibleEvent

T = TypeVar("T")
_UNREAD = -1
_PREFIX_BYTES = 24


class ChunkPrefix(NamedTuple):
    """What is sent before a chunk: the number of bytes that follow, the tier that they were read from, by its number in
    the chain, and, of a header, the number of bytes of the manifest before it (``first``)."""

    bytes: int
    tier: int = 0
    first: int = 0


class LoadedChunk(NamedTuple):
    """Bytes that were read; they begin at ``low`` of the image's data."""

    view: memoryview
    low: int
    prefix: ChunkPrefix


class Payload(Protocol):
    """What a round exchanges, headers or chunks: how one is read, and processed where it is requested."""

    def read_buffer(self, item: ChunkAssignment) -> AbstractContextManager[Buffer]:
        """Lend the buffer that an item is read into."""
        ...

    def load(self, item: ChunkAssignment, buffer: Buffer) -> LoadedChunk:
        """Read and verify an item. Raises one of PASSABLE where no copy that this rank can reach is good."""
        ...

    def load_alone(self, item: ChunkAssignment, buffer: Buffer) -> None:
        """Read an item that no other rank requests, and process it; raises as ``load`` does."""
        ...

    def on_read(self, item: ChunkAssignment, loaded: LoadedChunk, buffer: Buffer) -> None:
        """Process what this rank requests of an item that it has read."""
        ...

    def receive_buffer(
        self, delivery: ChunkDelivery, prefix: ChunkPrefix
    ) -> AbstractContextManager[Buffer]:
        """Lend the buffer that an item of another rank is received into."""
        ...

    def on_received(self, delivery: ChunkDelivery, prefix: ChunkPrefix, buffer: Buffer) -> None:
        """Process an item that was received."""
        ...


@dataclass(slots=True)
class ReadFailures:
    """The items that this rank could not read, and why. Threads share it."""

    items: list[tuple[ChunkAssignment, BaseException]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, item: ChunkAssignment, error: BaseException) -> None:
        with self._lock:
            self.items.append((item, error))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRound:
    """The items of one round. ``first_tag`` is above all tags of earlier rounds."""

    items: Sequence[ChunkAssignment]
    groups: Sequence[RankGroup]
    first_tag: int

    @property
    def next_tag(self) -> int:
        return self.first_tag + 2 * (1 + max((item.number for item in self.items), default=-1))


def run_round(
    transport: ByteTransport,
    round: ExchangeRound,
    rank: int,
    world_size: int,
    payload: Payload,
    threads: int,
) -> list[tuple[ChunkAssignment, BaseException]]:
    """Read and send the items assigned to ``rank``, and receive those that it requests; return the items that it could
    not read.

    Raises LostError where a rank is gone, and any other error of this rank; the transport is cut then.
    """
    failures = ReadFailures()
    runner = _RoundRunner(transport, round, rank, payload, failures)
    reads = reads_of(round.items, rank)
    deliveries = deliveries_to(round.items, round.groups, rank, world_size)
    run_all([(threads, runner.read, reads), (threads, runner.receive, deliveries)], transport.cut)
    return failures.items


class _RoundRunner:
    def __init__(
        self,
        transport: ByteTransport,
        round: ExchangeRound,
        rank: int,
        payload: Payload,
        failures: ReadFailures,
    ) -> None:
        self._transport, self._round, self._rank = transport, round, rank
        self._payload, self._failures = payload, failures

    def read(self, item: ChunkAssignment) -> None:
        receivers = receivers_of(item, self._round.groups)
        with self._payload.read_buffer(item) as buffer:
            loaded: LoadedChunk | None = None
            try:
                if not receivers:
                    self._payload.load_alone(item, buffer)
                    return
                loaded = self._payload.load(item, buffer)
            except PASSABLE as error:
                self._failures.record(item, error)
            sends = [
                send
                for rank, low, high in receivers
                for send in self._send(item, rank, low, high, loaded)
            ]
            if loaded is not None:
                self._payload.on_read(item, loaded, buffer)
            for send, rank in sends:
                self._named(item, send.wait, f"to rank {rank}")

    def _send(
        self, item: ChunkAssignment, rank: int, low: int, high: int, loaded: LoadedChunk | None
    ) -> Iterable[tuple[Any, int]]:
        """Begin to send what a rank requests of an item, or the prefix of one that could not be read."""
        tag = self._tag(item)
        prefix, view = ChunkPrefix(_UNREAD), memoryview(b"")
        if loaded is not None:
            view = loaded.view[low - loaded.low : high - loaded.low] if high else loaded.view
            prefix = loaded.prefix._replace(bytes=len(view))
        where = f"to rank {rank}"
        send = self._transport.send
        yield self._named(item, lambda: send(rank, tag, _packed(prefix)), where), rank
        if len(view):
            bytes = torch.frombuffer(view, dtype=torch.uint8)
            yield self._named(item, lambda: send(rank, tag + 1, bytes), where), rank

    def receive(self, delivery: ChunkDelivery) -> None:
        item, where = delivery.item, f"from rank {delivery.item.reader}"
        tag, receive = self._tag(item), self._transport.receive
        packed = torch.empty(_PREFIX_BYTES, dtype=torch.uint8)
        self._named(item, lambda: receive(item.reader, tag, packed), where)
        prefix = ChunkPrefix(*packed.view(torch.int64).tolist())
        if prefix.bytes == _UNREAD:
            return
        if delivery.high and prefix.bytes != delivery.high - delivery.low:
            raise LostError(f"{_name(item)}: rank {item.reader} sends {prefix.bytes} bytes of it")
        with self._payload.receive_buffer(delivery, prefix) as buffer:
            bytes = torch.frombuffer(buffer.view, dtype=torch.uint8, count=prefix.bytes)
            self._named(item, lambda: receive(item.reader, tag + 1, bytes), where)
            self._payload.on_received(delivery, prefix, buffer)

    def _tag(self, item: ChunkAssignment) -> int:
        return self._round.first_tag + 2 * item.number

    def _named(self, item: ChunkAssignment, do: Callable[[], T], where: str) -> T:
        """Name the item in a LostError."""
        try:
            return do()
        except LostError as error:
            raise LostError(f"{_name(item)}, {where}: {error}") from error


def _name(item: ChunkAssignment) -> str:
    return name_of(item.image, item.chunk)


def _packed(prefix: ChunkPrefix) -> torch.Tensor:
    return torch.tensor(prefix, dtype=torch.int64).view(torch.uint8)


_Work = tuple[int, Callable[[Any], None], Sequence[Any]]
"""A number of threads, a function, and the items that they call it with, begun in that order."""


def run_all(works: Iterable[_Work], cut: Callable[[], None]) -> None:
    """Run all works at the same time. Raises the first error, or what interrupts the caller, once all threads have
    stopped; ``cut`` ends their waits."""
    threads = _WorkerThreads(cut)
    for count, do, items in works:
        threads.add(min(count, len(items)), do, iter(items))
    threads.run()


class _WorkerThreads:
    def __init__(self, cut: Callable[[], None]) -> None:
        self._cut = cut
        self._stop = threading.Event()
        self._interrupted = threading.Event()
        self._over = InterruptibleEvent()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._failures: list[BaseException] = []

    def add(self, count: int, do: Callable[[Any], None], left: Iterator[Any]) -> None:
        self._threads += [
            threading.Thread(
                target=self._work, args=(do, left), name="tierfall-exchange", daemon=True
            )
            for _ in range(count)
        ]

    def run(self) -> None:
        self._running = len(self._threads)
        try:
            for thread in self._threads:
                thread.start()
            if self._threads:
                self._over.wait()
        except BaseException:  # Ctrl-C: running items end, the others are not begun
            self._interrupted.set()
            self._end()
            raise
        finally:
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join()
        if self._failures:
            raise self._failures[0]

    def _work(self, do: Callable[[Any], None], left: Iterator[Any]) -> None:
        try:
            with interrupted_by(self._interrupted):
                while not self._stop.is_set():
                    with self._lock:
                        item = next(left, None)
                    if item is None:
                        return
                    do(item)
        except BaseException as error:  # noqa: BLE001 - an outcome: raised in run
            with self._lock:
                self._failures.append(error)
            self._end()
        finally:
            with self._lock:
                self._running -= 1
                last = not self._running
            if last:
                self._over.set()

    def _end(self) -> None:
        self._stop.set()
        self._cut()


OpenReader = Callable[[int], tuple[ChunkReader, Manifest]]
"""Opens the image that a rank has saved. Raises one of PASSABLE where this rank sees no good records of it."""


class HeaderPayload:
    """Headers, each with its manifest before it. ``known`` holds those that this rank has, by image."""

    def __init__(
        self,
        open_reader: OpenReader,
        wanted: frozenset[int],
        order: Sequence[str],
        tally: ReadTally,
    ) -> None:
        self.known: dict[int, tuple[Manifest, ImageHeader]] = {}
        self._open, self._wanted, self._order, self._tally = open_reader, wanted, order, tally

    def read_buffer(self, item: ChunkAssignment) -> AbstractContextManager[Buffer]:
        return nullcontext(Buffer(1))  # how long it is, its manifest says

    def load(self, item: ChunkAssignment, buffer: Buffer) -> LoadedChunk:
        reader, manifest = self._open(item.image)
        encoded = manifest.encode()
        view, tier = reader.read_from(HEADER, memoryview(bytearray(manifest.data_start)))
        whole = bytearray(len(encoded) + len(view))
        whole[: len(encoded)], whole[len(encoded) :] = encoded, view
        prefix = ChunkPrefix(len(whole), self._order.index(tier), len(encoded))
        return LoadedChunk(memoryview(whole), 0, prefix)

    def load_alone(self, item: ChunkAssignment, buffer: Buffer) -> None:
        self.on_read(item, self.load(item, buffer), buffer)

    def on_read(self, item: ChunkAssignment, loaded: LoadedChunk, buffer: Buffer) -> None:
        if item.image in self._wanted:
            self._read(item.image, loaded.view, loaded.prefix.first)

    def receive_buffer(
        self, delivery: ChunkDelivery, prefix: ChunkPrefix
    ) -> AbstractContextManager[Buffer]:
        return nullcontext(Buffer(prefix.bytes))

    def on_received(self, delivery: ChunkDelivery, prefix: ChunkPrefix, buffer: Buffer) -> None:
        self._read(delivery.item.image, buffer.view[: prefix.bytes], prefix.first)
        self._tally.add_received(self._order[prefix.tier], delivery.item.reader, prefix.bytes)

    def _read(self, image: int, view: memoryview, first: int) -> None:
        manifest = parse_manifest(bytes(view[:first]), what=f"manifest of rank {image}'s image")
        what = f"checkpoint {manifest.lineage.checkpoint}"
        header = read_header(view[first:], image_bytes=manifest.image_bytes, what=what)
        self.known[image] = manifest, header


class ChunkPayload:
    """Chunks of data, for the targets of ``fills``, by image; ``got`` are those that have reached them.

    Threads share it. Chunks are read into buffers of ``ring``, and received into those of ``incoming``. The caller must
    call ``finish``.
    """

    def __init__(
        self,
        open_reader: OpenReader,
        fills: Mapping[int, Sequence[Fill]],
        sizes: Mapping[int, int],
        order: Sequence[str],
        tally: ReadTally,
        *,
        ring: BufferRing,
        incoming: BufferRing,
    ) -> None:
        """``sizes`` are the lengths of the images' chunks."""
        self.got: set[tuple[int, int]] = set()
        self._open, self._order, self._tally = open_reader, order, tally
        self._writers = {image: TargetWriter(those) for image, those in fills.items()}
        self._sizes = sizes
        self._ring, self._incoming = ring, incoming
        every = [fill for those in fills.values() for fill in those]
        self._copies = DeviceCopies(every, ring.pool, ring.streams)
        self._incoming_copies = DeviceCopies(every, incoming.pool, incoming.streams)
        self._lock = threading.Lock()

    def finish(self) -> None:
        """Wait for all copies onto devices; raises an error of one."""
        try:
            self._copies.finish()
        finally:
            self._incoming_copies.finish()

    def read_buffer(self, item: ChunkAssignment) -> AbstractContextManager[Buffer]:
        return self._ring.pool.lend(self._sizes[item.image])

    def load(self, item: ChunkAssignment, buffer: Buffer) -> LoadedChunk:
        reader, manifest = self._open(item.image)
        view, tier = reader.read_from(item.chunk, buffer.view)
        low = manifest.chunk_range(item.chunk)[0] - manifest.data_start
        return LoadedChunk(view, low, ChunkPrefix(len(view), self._order.index(tier)))

    def load_alone(self, item: ChunkAssignment, buffer: Buffer) -> None:
        reader, manifest = self._open(item.image)
        writer = self._writers[item.image]
        read_chunk_to_targets(reader, manifest, item.chunk, writer, self._copies, buffer)
        self._note(item)

    def on_read(self, item: ChunkAssignment, loaded: LoadedChunk, buffer: Buffer) -> None:
        writer = self._writers.get(item.image)
        if writer is not None:
            scatter(loaded.view, loaded.low, writer, self._copies, buffer)
            self._note(item)

    def receive_buffer(
        self, delivery: ChunkDelivery, prefix: ChunkPrefix
    ) -> AbstractContextManager[Buffer]:
        return self._incoming.pool.lend(prefix.bytes)

    def on_received(self, delivery: ChunkDelivery, prefix: ChunkPrefix, buffer: Buffer) -> None:
        writer = self._writers[delivery.item.image]
        view = buffer.view[: prefix.bytes]
        scatter(view, delivery.low, writer, self._incoming_copies, buffer)
        self._tally.add_received(self._order[prefix.tier], delivery.item.reader, prefix.bytes)
        self._note(delivery.item)

    def _note(self, item: ChunkAssignment) -> None:
        with self._lock:
            self.got.add((item.image, item.chunk))
