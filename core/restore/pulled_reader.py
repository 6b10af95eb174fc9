"""The reader of a checkpoint whose images the ranks of a restore share: what several ranks need is read once, and what
only some can read comes from them.

All ranks take the same steps (``CandidateStep``): each says which images it sees, then what it needs; all compute who
reads it (``assign``), and each pulls what it needs. If that rank sends nothing, or finds a chunk damaged, this rank or
another one reads the chunk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from queue import Empty, SimpleQueue
from typing import TypeVar

import numpy as np
import xxhash

from tierfall.core.capture.copier import chunk_digest
from tierfall.core.copies.checkpoint_reader import (
    NOWHERE,
    PASSABLE,
    CheckpointReader,
)
from tierfall.core.copies.chunk_reader import (
    ChunkReader,
    ImageFills,
    chunks_of,
    digest_pieces,
)
from tierfall.core.copies.images import READ_THREADS, Image, check_digest
from tierfall.core.format.commit_files import ranks_with_image
from tierfall.core.format.records import DIGEST_PREFIX, Manifest, parse_manifest
from tierfall.core.image.header import ImageHeader, read_header
from tierfall.core.load.build import Fill
from tierfall.core.ranks.messages import NumberRanges
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.restore import assign
from tierfall.core.restore.agreement import CandidateStep, StepDecision, agree_on_step
from tierfall.core.restore.assign import HEADER, Chunk
from tierfall.core.restore.pulls import (
    ChunkMemory,
    ChunkPool,
    Load,
    LoadedChunk,
    NothingCameError,
    PullNetwork,
    check_interrupt,
    wait_for,
)
from tierfall.core.runtime.buffers import allocate, is_being_filled
from tierfall.core.runtime.threads import WAKE_S, is_stopped, run_in_threads
from tierfall.core.types.errors import (
    CapacityError,
    IntegrityError,
    RanksError,
    TierfallError,
    UnreachableError,
    is_damage,
)
from tierfall.core.types.units import format_size

T = TypeVar("T")
NODE_MEMORY: Chunk = (-1, 0)
"""In place of a chunk: the memory that the first rank of a node shares with the others."""
Pieces = Callable[[xxhash.xxh3_128], Iterable[memoryview]]
"""Yields the views to fill with a chunk, and adds them to the digest."""
SILENT_IN_MAX_WAIT = 4
"""A rank may be silent for this part of ``max_wait``; then other ranks read its part."""


@dataclass(slots=True, kw_only=True)
class PulledReader(CheckpointReader):
    """Reads a checkpoint together with the other ranks, which all try it now. ``close`` once all have agreed on its
    end: until then it reads for them.

    ``order`` are the tiers of the chain, fastest first; ``patience_s`` is how long a rank waits for a slower one;
    ``interface`` names the network between nodes.
    """

    ranks: Ranks
    order: Sequence[str]
    max_wait_s: float
    patience_s: float
    interface: str | None = None
    _pool: ChunkPool = field(init=False)
    _network: PullNetwork | None = None
    _holders: assign.Holders = field(default_factory=dict)
    _groups: Sequence[assign.RankGroup] = ()
    _items: Mapping[Chunk, assign.AssignedChunk] = field(default_factory=dict)
    _known: dict[int, tuple[Manifest, ImageHeader]] = field(default_factory=dict)
    _memory: futures.Future[LoadedChunk] = field(default_factory=futures.Future)
    _reading: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(READ_THREADS))

    def __post_init__(self) -> None:
        self._pool = ChunkPool(patience_s=self._silence_s)

    # What plans ask for ------------------------------------------------------------------------------

    def header(self, rank: int) -> ImageHeader:
        return self.headers([rank])[rank]

    def manifests(self, ranks: Iterable[int]) -> dict[int, Manifest]:
        return {rank: self._known[rank][0] for rank in sorted(ranks)}

    def headers(self, ranks: Iterable[int]) -> dict[int, ImageHeader]:
        if self._network is None:
            self._meet()
        images = [rank for rank in sorted(ranks) if rank < self.world_size]
        missing = [image for image in images if image not in self._known]
        run_in_threads(min(READ_THREADS, len(missing)), self._read_header, missing)
        return {image: self._known[image][1] for image in images}

    def fill(self, fills: Mapping[int, Sequence[Fill]]) -> None:
        needs = {i: chunks_of(self._known[i][0], those) for i, those in fills.items() if those}
        step = CandidateStep(
            id=self.checkpoint.id,
            needs={i: NumberRanges.of(indexes) for i, indexes in needs.items() if indexes},
        )
        self._groups = self._agree(step).groups
        self._items = assign.assign(self._groups, self._holders)
        self.touched = True
        try:
            parts = {image: self.part(image, those) for image, those in fills.items()}
            wanted = [(image, index) for image, indexes in needs.items() for index in indexes]
            if not self._groups:
                self.read(parts, wanted)
                return
            ahead = threading.Thread(target=self._read_ahead, args=(self._expect(),), daemon=True)
            try:
                ahead.start()
            except RuntimeError:  # at the limit of threads: chunks are read when asked for
                self._pool.close()
            order = self._as_they_arrive(wanted)
            self.read(parts, wanted, threads_max=2 * READ_THREADS, order=order)
        except BaseException:
            self._pool.close()  # others still get what they ask for
            raise

    def _as_they_arrive(self, wanted: Sequence[Chunk]) -> Iterator[Chunk]:
        """Yield what this rank takes, each chunk once: those that ranks announce, as they are there; meanwhile those
        that it reads for itself alone. So no thread waits for a chunk while another one is there."""
        network, here = self._network, SimpleQueue[Iterable[Chunk]]()
        assert network is not None
        by_sender: dict[int | None, list[Chunk]] = {}
        for chunk in wanted:
            by_sender.setdefault(self._sender_of(chunk), []).append(chunk)
        alone = deque(by_sender.pop(None, ()))

        def follow(sender: int, chunks: Sequence[Chunk]) -> None:
            unsaid = set(chunks)
            try:
                for new in network.arrivals(sender):
                    here.put(new)
                    unsaid.difference_update(new)
                    if not unsaid:
                        return
            finally:
                here.put(unsaid)  # each is asked for

        for each in by_sender.items():
            try:
                threading.Thread(target=follow, args=each, daemon=True).start()
            except RuntimeError:  # at the limit of threads
                here.put(each[1])
        left = set(wanted)
        while left and not is_stopped():
            new: Iterable[Chunk] = ()
            try:
                new = [alone.popleft()] if alone and here.empty() else here.get(timeout=WAKE_S)
            except Empty:
                check_interrupt()
            for chunk in left.intersection(new):
                left.remove(chunk)
                yield chunk

    def _sender_of(self, chunk: Chunk) -> int | None:
        """Return the rank that announces a chunk to this one; None if this rank reads it for itself alone."""
        item = self._items.get(chunk)
        if item is None or self.reads_alone(chunk, item.owner):
            return None
        return assign.sender_of(chunk, item, self._groups, self.ranks.topology)

    def close(self) -> None:
        CheckpointReader.close(self)
        self.ranks.watch(lambda: None)
        self._pool.close()
        self.end_memory(UnreachableError(f"rank {self._rank} has ended"))
        self._memory = futures.Future()  # of this rank it is freed with its tensors
        if self._network is not None:
            self._network.close()

    # Steps of all ranks ------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Learn what each rank sees, and where it is asked for chunks."""
        commit = self.checkpoint.commit
        assert commit is not None, "the ranks have agreed on its record"
        self._network = PullNetwork(
            self.ranks.topology,
            secret=self.ranks.secret,
            checkpoint=f"{self.checkpoint.id} of attempt {commit.lineage.attempt_id}",
            interface=self.interface,
            silence_s=self._silence_s,
            provide=self._provide,
            pool=self._pool,
        )
        address = self._network.address
        met = self._agree(CandidateStep(id=self.checkpoint.id, seen=self._seen(), address=address))
        self._holders = assign.holders_of(met.seen)
        self._network.meet(met.addresses)
        self.ranks.watch(self._network.lost_s)

    def _agree(self, step: CandidateStep) -> StepDecision:
        return agree_on_step(self.ranks, step, self._holders, timeout_s=self.patience_s)

    def _seen(self) -> dict[int, NumberRanges]:
        """Return the images that the records of each tier name here, by the tier's number in the chain."""
        commits = {tier: self.checkpoint.copies[tier].commit for tier in self.tiers}
        return {
            self.order.index(tier): NumberRanges.of(ranks_with_image(commit, self.world_size))
            for tier, commit in commits.items()
            if commit is not None
        }

    @property
    def _silence_s(self) -> float:
        return self.max_wait_s / SILENT_IN_MAX_WAIT

    # What this rank reads for others -----------------------------------------------------------------

    def _expect(self) -> list[Chunk]:
        """Have the pool keep each chunk that other ranks get from this one until they have it; return those that this
        rank reads, in their order."""
        topology, expected = self.ranks.topology, {}
        for chunk, item in self._items.items():
            takers = assign.takers_of(chunk, item, self._groups, topology)
            if takers - {topology.rank}:
                expected[chunk, item.owner] = takers
        self._pool.expect(expected)
        return [chunk for chunk, owner in expected if owner == topology.rank]

    def _read_ahead(self, chunks: Sequence[Chunk]) -> None:
        """Read what others will ask for, as far as the pool has room. After an error they get what they ask for."""
        reading: deque[futures.Future[LoadedChunk]] = deque()
        try:
            size = max(manifest.chunk_bytes for manifest, _ in self._known.values())
            for chunk in chunks:
                if len(reading) == READ_THREADS:
                    futures.wait([reading.popleft()])
                if not self._pool.wait_for_room(size):
                    return
                reading.append(self._provide(chunk, self._rank, ""))
        except BaseException:
            self._pool.close()
            raise

    def _provide(self, chunk: Chunk, source: int, digest: str) -> futures.Future[LoadedChunk]:
        """Return a chunk that other ranks ask for: this rank reads it, or pulls it from the rank that does."""
        if chunk == NODE_MEMORY:
            return self._memory
        load: Load = partial(self._load_here, chunk)
        if source != self._rank:
            load = partial(self._relay, chunk, source, digest)
        return self._pool.load((chunk, source), load)

    def _relay(self, chunk: Chunk, source: int, digest: str) -> LoadedChunk:
        return self._kept(chunk, source, self._pull_along(chunk, source, digest))

    def _pull_along(self, chunk: Chunk, source: int, digest: str) -> LoadedChunk:
        """Pull a chunk from the node before this one; from its ``source``, if that one sends nothing. If it says that
        it cannot get the chunk, nor does this one ask: else each node would wait for a silent source, one after the
        other."""
        assert self._network is not None
        item, topology = self._items.get(chunk), self.ranks.topology
        if item is not None and source == item.owner and source not in topology.local_ranks:
            previous = assign.previous_of(chunk, item, self._groups, topology)
            if previous != source:
                with suppress(NothingCameError):
                    return self._network.pull(previous, chunk, source, digest)
        return self._network.pull(source, chunk, source, digest)

    def _load_here(self, chunk: Chunk) -> LoadedChunk:
        image, index = chunk
        with self._reading:
            images, manifest = self.find(image)
            low, high = manifest.chunk_range(index)
            reader = ChunkReader(images, manifest, self.tally)
            view, tier = reader.read_from(index, allocate(high - low))
        manifest_bytes = manifest.encode() if index == HEADER else b""
        loaded = LoadedChunk(
            view=memoryview(manifest_bytes + view) if manifest_bytes else view,
            tier=self.order.index(tier),
            digest="" if manifest_bytes else manifest.digests[index],
            first=len(manifest_bytes),
        )
        return self._kept(chunk, self._rank, loaded)

    def _kept(self, chunk: Chunk, source: int, loaded: LoadedChunk) -> LoadedChunk:
        """Return a chunk in memory that the other ranks of this node can map, if any of them is to take it."""
        takers = self._pool.expected((chunk, source)) if chunk[1] != HEADER else self._here
        return loaded.shared() if takers & self._here - {self._rank} else loaded

    @property
    def _here(self) -> frozenset[int]:
        return frozenset(self.ranks.topology.local_ranks)

    # Memory of the node ------------------------------------------------------------------------------

    def memory_of_node(self, bytes: int, *, free_bytes: int | None) -> ChunkMemory:
        """Return new memory of so many bytes, the same for all ranks of this node, which all make this call. It has no
        name, and lasts as long as one of them has it. Raises CapacityError if only ``free_bytes`` are there."""
        assert self._network is not None, "the headers are read"
        first = self.ranks.topology.local_ranks[0]
        if self._rank == first:
            what = f"load: no memory for the tensors of this node, {format_size(bytes)}"
            if free_bytes is not None and free_bytes < bytes:
                raise CapacityError(f"{what}: {format_size(free_bytes)} are free")
            try:
                memory = ChunkMemory.of_size(bytes)
            except (OSError, AttributeError) as error:
                raise CapacityError(f"{what}: {error}") from error
            self._memory.set_result(LoadedChunk(view=memory.view, tier=0, memory=memory))
            return memory
        try:
            found = self._network.pull(first, NODE_MEMORY, first, "").memory
        except PASSABLE as error:
            raise CapacityError(f"load: rank {first} shares no memory: {error}") from error
        if found is None or len(found.view) != bytes:
            raise RanksError(f"load: rank {first} shares other memory with rank {self._rank}")
        return found

    def end_memory(self, error: BaseException) -> None:
        """Have ranks that wait for the memory of this node raise an error, if they wait still."""
        if not self._memory.done():
            self._memory.set_exception(error)

    # What this rank needs ----------------------------------------------------------------------------

    def part(self, rank: int, fills: Sequence[Fill]) -> ImageFills:
        manifest = self._known[rank][0]
        try:
            images = self.find(rank)[0] if self._sees(rank) else []
        except PASSABLE:  # other ranks have it
            images = []
        return ImageFills(_SharedChunks(self, rank, images, manifest), fills)

    def _read_header(self, image: int) -> None:
        chunk = (image, HEADER)

        def parsed(loaded: LoadedChunk, place: str) -> tuple[Manifest, ImageHeader]:
            what = f"{place}: manifest of rank {image}'s image"
            manifest = parse_manifest(bytes(loaded.view[: loaded.first]), what=what)
            view, lineage = loaded.view[loaded.first :], manifest.lineage
            if (lineage.checkpoint, manifest.shard.rank) != (self.checkpoint.id, image):
                raise IntegrityError(f"{what}: it is that of another image")
            check_digest(place, manifest, HEADER, chunk_digest(view))
            what = f"checkpoint {lineage.checkpoint}"
            return manifest, read_header(view, image_bytes=manifest.image_bytes, what=what)

        self._known[image] = self.first_good(
            chunk, None, lambda source: parsed(self.take(chunk, source, ""), f"rank {source}")
        )

    def first_good(self, chunk: Chunk, owner: int | None, get: Callable[[int], T]) -> T:
        """Return what ``get`` gets of the first rank that has a chunk good, its owner first, if it has one. If a rank
        sends nothing, or could not look, this one reads the chunk itself, if it sees the image.

        Raises IntegrityError if the chunk is damaged wherever a rank looked for it, UnreachableError if one could not
        look.
        """
        image, _ = chunk
        left: Iterator[int] = assign.sources(
            self._holders, image, owner, self.ranks.topology.node_of
        )
        failures: dict[int, TierfallError] = {}
        source = next(left, None)
        while source is not None:
            try:
                return get(source)
            except PASSABLE as error:
                failures[source] = error
            if not is_damage(failures[source]) and self._sees(image):
                left = chain([self._rank], left)
            source = next((rank for rank in left if rank not in failures), None)
        reasons = "; ".join(f"rank {r}: {e}" for r, e in failures.items()) or NOWHERE
        kind = IntegrityError if all(map(is_damage, failures.values())) else UnreachableError
        raise kind(f"no rank can read {assign.name_of(chunk)}: {reasons}")

    def owner_of(self, chunk: Chunk) -> int | None:
        """Return the rank that reads a chunk: this one, if each reads for itself."""
        item = self._items.get(chunk)
        return item.owner if item is not None else None if self._groups else self._rank

    def reads_alone(self, chunk: Chunk, source: int | None) -> bool:
        """Return whether this rank reads a chunk, and no other one gets it from here."""
        return source == self._rank and not self._pool.expected((chunk, self._rank))

    def _hop_to(self, chunk: Chunk, source: int) -> int:
        """Return which rank this one asks for a chunk of ``source``: the source, if it is on this node; else the relay
        of this node, which may be this rank itself."""
        topology = self.ranks.topology
        if source in topology.local_ranks:
            return source
        item, needing = self._items.get(chunk), list(topology.local_ranks)
        if item is not None:
            needing = assign.needing_on_node(item, self._groups, topology, topology.node)
        assert self._network is not None
        silent = self._network.silent
        return assign.relay_of(
            chunk, [rank for rank in needing if rank not in silent] or [self._rank]
        )

    def take(self, chunk: Chunk, source: int, digest: str) -> LoadedChunk:
        """Get a chunk of ``source``: from the pool, if other ranks get it from this one, else from the rank that has it
        for this one."""
        assert self._network is not None
        hop = self._hop_to(chunk, source)
        if hop not in (self._rank, source):
            try:
                return self._received(source, self._network.pull(hop, chunk, source, digest))
            except NothingCameError:
                hop = source  # the relay did not send it
        if hop == self._rank and (chunk[1] == HEADER or self._pool.expected((chunk, source))):
            loaded = wait_for(self._provide(chunk, source, digest))
            self._pool.taken((chunk, source), self._rank)
        else:
            loaded = self._pull_along(chunk, source, digest)
        return loaded if source == self._rank else self._received(source, loaded)

    def _received(self, source: int, loaded: LoadedChunk) -> LoadedChunk:
        self.tally.add_received(self.order[loaded.tier], source, len(loaded.view))
        return loaded

    def _sees(self, image: int) -> bool:
        return any(self._rank in ranks for _, ranks in self._holders.get(image, ()))

    @property
    def _rank(self) -> int:
        return self.ranks.shard.rank


class _SharedChunks(ChunkReader):
    """Reads verified chunks of one image, whichever rank has them."""

    def __init__(
        self, of: PulledReader, image: int, images: Sequence[Image], manifest: Manifest
    ) -> None:
        """``images`` are the copies that this rank sees."""
        super().__init__(images, manifest, of.tally)
        self._of, self._image = of, image

    def read_from(self, index: int, buffer: memoryview) -> tuple[memoryview, str]:
        of, chunk = self._of, (self._image, index)
        low, high = self.manifest.chunk_range(index)

        def get(source: int) -> tuple[memoryview, str]:
            if of.reads_alone(chunk, source):
                of.find(self._image)  # raises, if it could not be opened
                return ChunkReader.read_from(self, index, buffer)
            is_free = not is_being_filled(buffer)  # by a read of this rank that was given up
            view = (buffer if is_free else allocate(high - low))[: high - low]
            return view, self._fill_from(source, index, partial(digest_pieces, view))

        return of.first_good(chunk, of.owner_of(chunk), get)

    def fill_from_page_cache(self, index: int, pieces: Pieces) -> bool:
        """Fill targets with a chunk as its owner reads or sends it; False if that fails."""
        chunk = (self._image, index)
        owner = self._of.owner_of(chunk)
        if owner is None:
            return False
        if self._of.reads_alone(chunk, owner):
            return bool(self.images) and ChunkReader.fill_from_page_cache(self, index, pieces)
        try:
            self._fill_from(owner, index, pieces)
        except PASSABLE:  # the following read reports it
            return False
        return True

    def _fill_from(self, source: int, index: int, pieces: Pieces) -> str:
        """Bring a chunk of ``source`` into its targets, piece by piece, and verify it; return its tier."""
        wanted = self.manifest.digests[index]
        loaded = self._of.take((self._image, index), source, wanted)
        digest, start = xxhash.xxh3_128(), 0
        for piece in pieces(digest):
            part = loaded.view[start : start + len(piece)]
            np.copyto(np.frombuffer(piece, np.uint8), np.frombuffer(part, np.uint8))
            start += len(piece)
        found = DIGEST_PREFIX + digest.hexdigest()
        check_digest(f"rank {source}", self.manifest, index, found)
        return self._of.order[loaded.tier]
