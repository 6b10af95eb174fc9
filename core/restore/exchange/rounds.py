"""Passing on: one round of an exchange, in which every rank reads what it was assigned and hands it to who wants it.

A few threads read, a few others receive, each in the order that was assigned; so no more chunks are in memory than
there are threads, and none of them waits for one that waits for it. Each chunk goes as a *head*, which says how long it
is and where it was read, and its bytes; of one that cannot be read only the head goes, and says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from tierfall.core.copies.buffer_ring import BufferRing
from tierfall.core.copies.cached_reads import TargetWriter, WrittenTargets
from tierfall.core.copies.chunk_reader import ChunkReader, ReadTally, read_chunk_to_targets, scatter
from tierfall.core.copies.shard_reader import PASSABLE
from tierfall.core.copies.to_device import DeviceCopies
from tierfall.core.format.records import Manifest, read_manifest
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
from tierfall.core.runtime.wait import InterruptibleEvent

T = TypeVar("T")
_UNREAD = -1
_HEAD_BYTES = 24


class ChunkPrefix(NamedTuple):
    """What goes ahead of a chunk: how many bytes follow, by its place in the chain the tier that they were read from,
    and how many of them come before the header, where that is what is sent."""

    bytes: int
    tier: int = 0
    first: int = 0


class LoadedChunk(NamedTuple):
    """What was read: bytes that begin at ``low`` of the image's data; ``head`` says the rest."""

    view: memoryview
    low: int
    head: ChunkPrefix


class Payload(Protocol):
    """What is passed on, headers or chunks: how it is read, and what is done with it here."""

    def room(self, item: ChunkAssignment) -> AbstractContextManager[Buffer]:
        """Lend what an item is read into."""
        ...

    def load(self, item: ChunkAssignment, buffer: Buffer) -> LoadedChunk:
        """Read and verify an item. Raises one of PASSABLE where no copy that this rank can reach is good."""
        ...

    def load_alone(self, item: ChunkAssignment, buffer: Buffer) -> None:
        """Read an item that this rank alone wants, and keep it; raises as ``load`` does."""
        ...

    def keep(self, item: ChunkAssignment, loaded: LoadedChunk, buffer: Buffer) -> None:
        """Take what this rank wants of what it has read itself."""
        ...

    def room_for(self, get: ChunkDelivery, head: ChunkPrefix) -> AbstractContextManager[Buffer]:
        """Lend what bytes from another rank are received into."""
        ...

    def take(self, get: ChunkDelivery, head: ChunkPrefix, buffer: Buffer) -> None:
        """Take what has come from another rank."""
        ...


@dataclass(slots=True)
class ReadFailures:
    """What this rank could not read, and why. Threads share it."""

    items: list[tuple[ChunkAssignment, BaseException]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, item: ChunkAssignment, error: BaseException) -> None:
        with self._lock:
            self.items.append((item, error))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRound:
    """What is passed on at once. ``first_tag`` is above all tags of earlier rounds."""

    items: Sequence[ChunkAssignment]
    groups: Sequence[RankGroup]
    first_tag: int

    @property
    def next_tag(self) -> int:
        return self.first_tag + 2 * (1 + max((item.number for item in self.items), default=-1))


def run_round(
    wire: ByteTransport,
    round: ExchangeRound,
    rank: int,
    world_size: int,
    cargo: Payload,
    threads: int,
) -> list[tuple[ChunkAssignment, BaseException]]:
    """Read what ``rank`` was assigned, hand it on, and take what it wants of the others; return what it could not read.

    Raises LostError where a rank is gone, and whatever else goes wrong here; the wire is cut then.
    """
    failures = ReadFailures()
    hand = _RoundRunner(wire, round, rank, cargo, failures)
    reads = reads_of(round.items, rank)
    gets = deliveries_to(round.items, round.groups, rank, world_size)
    run_all([(threads, hand.read, reads), (threads, hand.receive, gets)], wire.cut)
    return failures.items


class _RoundRunner:
    def __init__(
        self,
        wire: ByteTransport,
        round: ExchangeRound,
        rank: int,
        cargo: Payload,
        failures: ReadFailures,
    ) -> None:
        self._wire, self._round, self._rank = wire, round, rank
        self._cargo, self._failures = cargo, failures

    def read(self, item: ChunkAssignment) -> None:
        takers = receivers_of(item, self._round.groups)
        with self._cargo.room(item) as buffer:
            loaded: LoadedChunk | None = None
            try:
                if not takers:
                    self._cargo.load_alone(item, buffer)
                    return
                loaded = self._cargo.load(item, buffer)
            except PASSABLE as error:
                self._failures.note(item, error)
            sendings = [
                sending
                for rank, low, high in takers
                for sending in self._send(item, rank, low, high, loaded)
            ]
            if loaded is not None:
                self._cargo.keep(item, loaded, buffer)
            for sending, rank in sendings:
                self._named(item, sending.wait, f"to rank {rank}")

    def _send(
        self, item: ChunkAssignment, rank: int, low: int, high: int, loaded: LoadedChunk | None
    ) -> Iterable[tuple[Any, int]]:
        """Begin to send what a rank wants of an item, or word that it could not be read."""
        tag = self._tag(item)
        head, view = ChunkPrefix(_UNREAD), memoryview(b"")
        if loaded is not None:
            view = loaded.view[low - loaded.low : high - loaded.low] if high else loaded.view
            head = loaded.head._replace(bytes=len(view))
        where = f"to rank {rank}"
        send = self._wire.send
        yield self._named(item, lambda: send(rank, tag, _packed(head)), where), rank
        if len(view):
            bytes = torch.frombuffer(view, dtype=torch.uint8)
            yield self._named(item, lambda: send(rank, tag + 1, bytes), where), rank

    def receive(self, get: ChunkDelivery) -> None:
        item, where = get.item, f"from rank {get.item.reader}"
        tag, receive = self._tag(item), self._wire.receive
        said = torch.empty(_HEAD_BYTES, dtype=torch.uint8)
        self._named(item, lambda: receive(item.reader, tag, said), where)
        head = ChunkPrefix(*said.view(torch.int64).tolist())
        if head.bytes == _UNREAD:
            return
        if get.high and head.bytes != get.high - get.low:
            raise LostError(f"{_name(item)}: rank {item.reader} sends {head.bytes} bytes of it")
        with self._cargo.room_for(get, head) as buffer:
            bytes = torch.frombuffer(buffer.view, dtype=torch.uint8, count=head.bytes)
            self._named(item, lambda: receive(item.reader, tag + 1, bytes), where)
            self._cargo.take(get, head, buffer)

    def _tag(self, item: ChunkAssignment) -> int:
        return self._round.first_tag + 2 * item.number

    def _named(self, item: ChunkAssignment, do: Callable[[], T], where: str) -> T:
        """Let what is lost be lost by name."""
        try:
            return do()
        except LostError as error:
            raise LostError(f"{_name(item)}, {where}: {error}") from error


def _name(item: ChunkAssignment) -> str:
    return name_of(item.image, item.chunk)


def _packed(head: ChunkPrefix) -> torch.Tensor:
    return torch.tensor(head, dtype=torch.int64).view(torch.uint8)


Work = tuple[int, Callable[[Any], None], Sequence[Any]]
"""What is done by so many threads, to things that are begun in their order."""


def run_all(works: Iterable[Work], cut: Callable[[], None]) -> None:
    """Do all works at once. Raises the first failure, or what interrupts the caller, once all threads have stopped:
    ``cut`` ends what they wait for."""
    crew = _WorkerThreads(cut)
    for count, do, things in works:
        crew.add(min(count, len(things)), do, iter(things))
    crew.run()


class _WorkerThreads:
    def __init__(self, cut: Callable[[], None]) -> None:
        self._cut = cut
        self._stop = threading.Event()
        self._over = InterruptibleEvent()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._failures: list[BaseException] = []

    def add(self, count: int, do: Callable[[Any], None], left: Iterator[Any]) -> None:
        self._threads += [
            threading.Thread(target=self._work, args=(do, left), name="tierfall-exchange")
            for _ in range(count)
        ]

    def run(self) -> None:
        self._running = len(self._threads)
        try:
            for thread in self._threads:
                thread.start()
            if self._threads:
                self._over.wait()
        except BaseException:  # Ctrl-C: what is under way ends, what waits is not begun
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
            while not self._stop.is_set():
                with self._lock:
                    thing = next(left, None)
                if thing is None:
                    return
                do(thing)
        except BaseException as error:  # noqa: BLE001 - an outcome: raised in run
            with self._lock:
                self._failures.append(error)
            self._end()
        finally:
            with self._lock:
                self._running -= 1
                last = not self._running
            if last:
                self._over.ring()

    def _end(self) -> None:
        self._stop.set()
        self._cut()


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
