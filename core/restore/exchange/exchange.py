"""The exchange of a restore: what several ranks want is read once and handed on, and what only another rank can read is
read there and sent.

The ranks go in step: each says what it wants of which images (``messages``), all work out who reads it (``assign``),
and pass it on (``rounds``); what somebody could not read is asked for again, of others. First headers, until all ranks
have planned, then chunks, until nobody wants any. Where each reads its own image alone, that is all that is said.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tierfall.core.copies.buffer_ring import BufferRing
from tierfall.core.copies.checkpoint_reader import CheckpointReader
from tierfall.core.copies.chunk_reader import BUFFER_BYTES, ChunkReader, ReadTally
from tierfall.core.copies.images import READ_THREADS
from tierfall.core.copies.shard_reader import PASSABLE, OpenImage
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.format.commit_files import named_shards
from tierfall.core.format.records import Manifest
from tierfall.core.image.header import ImageHeader
from tierfall.core.load.build import Fill
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.restore.exchange.assign import (
    HEADER,
    ChunkAssignment,
    ChunkDelivery,
    Holders,
    RequestedRanges,
    UnassignedError,
    assign,
    remaining_ranges,
    requested_ranges,
    requests_of,
)
from tierfall.core.restore.exchange.gloo import ByteTransport, Connect, LostError
from tierfall.core.restore.exchange.messages import (
    ExchangeDecision,
    ExchangeRequest,
    NextPhase,
    NumberRanges,
    UnreadChunks,
    decide,
    holders_of,
)
from tierfall.core.restore.exchange.rounds import (
    ChunkPayload,
    ExchangeRound,
    HeaderPayload,
    Payload,
    run_round,
)
from tierfall.core.types.errors import IntegrityError, TierfallError, UnreachableError
from tierfall.core.types.values import Shard

logger = logging.getLogger("tierfall")

NODES_TRIED = 4
_CALL = "restore: exchange"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How the ranks of a restore exchange bytes. ``order`` are the tiers of the chain, fastest first; on those that are
    ``shared`` all nodes see the same. ``timeout_s`` is how long one rank may keep another waiting."""

    ranks: Ranks
    connect: Connect
    order: Sequence[str]
    shared: Collection[str]
    timeout_s: float

    def parts(
        self,
        checkpoint: KnownCheckpoint,
        tiers: Sequence[str],
        open_image: OpenImage,
        tally: ReadTally,
        ring: BufferRing | None,
        chunks_max: int | None,
        nowhere: str,
    ) -> CheckpointReader:
        """Make the parts of one checkpoint, which all ranks try now."""
        made = (checkpoint, tiers, open_image, tally, ring, chunks_max, nowhere)
        return _ExchangedReader(*made, exchange=self)


@dataclass(slots=True)
class _ExchangeState:
    """How far the ranks have come. ``over``: nothing more is said of this checkpoint; ``unheard`` is what kept a rank
    from saying it."""

    over: bool = False
    unheard: TierfallError | None = None
    holders: Holders | None = None
    wire: ByteTransport | None = None
    next_tag: int = 0
    failed: list[UnreadChunks] = field(default_factory=list)
    to_tell: list[UnreadChunks] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _ExchangedReader(CheckpointReader):
    """The parts of a checkpoint that ranks exchange."""

    exchange: Exchange
    _talk: _ExchangeState = field(default_factory=_ExchangeState)
    _known: dict[int, tuple[Manifest, ImageHeader]] = field(default_factory=dict)
    _bad: dict[Shard, BaseException] = field(default_factory=dict)
    _images: dict[int, frozenset[int]] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    # What plans ask for ------------------------------------------------------------------------------

    def header(self, shard: Shard) -> ImageHeader:
        if self._sees(shard.rank):
            try:
                self.header_here(shard)
            except PASSABLE as error:
                self._note_unread(shard.rank, [HEADER], error)
        return self._ask([shard.rank])[shard.rank]

    def header_here(self, shard: Shard) -> ImageHeader:
        header = CheckpointReader.header_here(self, shard)
        self._known[shard.rank] = self.find(shard)[1], header
        return header

    def headers(self, world_size: int) -> dict[int, ImageHeader]:
        return self._ask(range(world_size))

    def manifest(self, shard: Shard) -> Manifest:
        return self._known[shard.rank][0]

    def manifests(self, ranks: Iterable[int], world_size: int) -> dict[int, Manifest]:
        wanted = [rank for rank in sorted(ranks) if rank < world_size]
        self._ask(wanted)
        return {rank: self._known[rank][0] for rank in wanted}

    def _ask(self, images: Sequence[int]) -> dict[int, ImageHeader]:
        while missing := [image for image in images if image not in self._known]:
            self._continue(
                ExchangeRequest(
                    wants={image: RequestedRanges(0) for image in missing}, planning=True
                ),
                {},
            )
        return {image: self._known[image][1] for image in images}

    def fill(self, fills: Mapping[int, Sequence[Fill]], world_size: int) -> None:
        sizes = {image: self._known[image][0].chunk_bytes for image in fills}
        wants = {image: requested_ranges(those, sizes[image]) for image, those in fills.items()}
        wants = {image: want for image, want in wants.items() if want.edges}
        mine = self.exchange.ranks.shard
        alone = world_size == mine.world_size and wants.keys() <= {mine.rank}
        while True:
            ask = ExchangeRequest(wants=wants, alone=alone and all(map(self._sees, wants)))
            next, left = self._continue(ask, fills)
            if next is NextPhase.LOCAL:
                CheckpointReader.fill(self, fills, world_size)
            if next in (NextPhase.LOCAL, NextPhase.DONE):
                return
            if next is NextPhase.CHUNKS:
                wants = _requests_left(left, sizes)

    def give_up(self, error: BaseException) -> TierfallError | None:
        if self._talk.wire is not None:
            self._talk.wire.cut()
        if not self._talk.over:
            stopped = str(error) if isinstance(error, TierfallError) else repr(error)
            # Whoever has lost another rank does not wait for it as long as for one that is slow.
            patience_s = None if isinstance(error, LostError) else self.exchange.timeout_s
            try:
                self._send(ExchangeRequest(stopped=stopped), patience_s)
            except TierfallError as lost:
                logger.debug("the other ranks do not hear that this one gives up: %s", lost)
            self._talk.over = True
        return self._talk.unheard

    # One step, with all ranks ------------------------------------------------------------------------

    def _continue(
        self, ask: ExchangeRequest, fills: Mapping[int, Sequence[Fill]]
    ) -> tuple[NextPhase, list[ChunkDelivery]]:
        """Say what this rank wants, and do with all others what follows; return that, and what did not come of it.

        Raises what ``PASSABLE`` has, on all ranks, where something cannot be read by any, and LostError where another
        rank gave up, or is gone.
        """
        answer = self._send(ask, self.exchange.timeout_s)
        talk = self._talk
        if answer.next in (NextPhase.LOCAL, NextPhase.DONE):
            talk.over = True
            return answer.next, []
        assert talk.holders is not None
        groups = answer.rank_groups()
        try:
            items = assign(groups, talk.holders, self._excluded())
        except UnassignedError as nobody:
            talk.over = True
            raise self._unreadable(nobody) from None
        round = ExchangeRound(items=items, groups=groups, first_tag=talk.next_tag)
        talk.next_tag = round.next_tag
        if answer.next is NextPhase.HEADERS:
            return answer.next, self._exchange_headers(round, frozenset(ask.wants))
        return answer.next, self._exchange_chunks(round, fills)

    def _send(self, ask: ExchangeRequest, timeout_s: float | None) -> ExchangeDecision:
        talk, ranks = self._talk, self.exchange.ranks
        seen = None
        if talk.holders is None:
            seen = {tier: NumberRanges.of(images) for tier, images in self._seen().items()}
        ask, talk.to_tell = replace(ask, sees=seen, failed=tuple(talk.to_tell)), []
        try:
            answer = ranks.agree(_CALL, ask, self._decide, ExchangeDecision, timeout_s=timeout_s)
        except TierfallError as lost:
            talk.over, talk.unheard = True, lost
            raise
        talk.failed += answer.failed
        if answer.seen is not None:
            talk.holders = holders_of(answer.seen)
        if answer.stopped is not None:
            talk.over = True
            rank, why = answer.stopped
            raise LostError(f"rank {rank} gave up: {why}")
        if answer.next in (NextPhase.HEADERS, NextPhase.CHUNKS) and talk.wire is None:
            name = f"tierfall/exchange/{answer.name}"
            shard = ranks.shard
            talk.wire = self.exchange.connect(
                name, shard.rank, shard.world_size, self.exchange.timeout_s
            )
        return answer

    def _decide(self, requests: Mapping[int, ExchangeRequest]) -> ExchangeDecision:
        """Decide what all ranks do next; for rank 0."""
        exchange = self.exchange
        nodes = enumerate(exchange.ranks.topology.nodes)
        node_of = {rank: node for node, ranks in nodes for rank in ranks}

        def place_of(tier: int, rank: int) -> int | None:
            return None if exchange.order[tier] in exchange.shared else node_of[rank]

        return decide(requests, place_of, secrets.token_hex(8))

    def _excluded(self) -> set[tuple[int, int, int]]:
        """Who need not try to read which chunk: the ranks of a node on which one has failed to, and, after some nodes
        that have, all: what lies where all see it is not read by each of a thousand ranks before it counts as damaged.
        """
        topology = self.exchange.ranks.topology
        tried: dict[tuple[int, int], set[int]] = {}
        for failed in self._talk.failed:
            node = next(n for n, ranks in enumerate(topology.nodes) if failed.rank in ranks)
            for chunk in failed.chunks:
                tried.setdefault((failed.image, chunk), set()).add(node)
        return {
            (image, chunk, rank)
            for (image, chunk), nodes in tried.items()
            for node in (nodes if len(nodes) < NODES_TRIED else range(len(topology.nodes)))
            for rank in topology.nodes[node]
        }

    def _exchange_headers(
        self, round: ExchangeRound, wanted: frozenset[int]
    ) -> list[ChunkDelivery]:
        cargo = HeaderPayload(self._reader, wanted, self.exchange.order, self.tally)
        self._exchange_round(round, cargo, READ_THREADS)
        self._known |= cargo.known
        return []

    def _exchange_chunks(
        self, round: ExchangeRound, fills: Mapping[int, Sequence[Fill]]
    ) -> list[ChunkDelivery]:
        self.touched = True
        sizes = {i: want.chunk_bytes for group in round.groups for i, want in group.wants.items()}
        largest = max(sizes.values())
        ring = self.ring or BufferRing(largest)
        threads = max(1, min(READ_THREADS, ring.count, BUFFER_BYTES // largest))
        incoming = BufferRing(largest, count_max=threads, streams=ring.streams)
        try:
            cargo = ChunkPayload(
                self._reader,
                fills,
                sizes,
                self.exchange.order,
                self.tally,
                self.written,
                ring=ring,
                incoming=incoming,
            )
            try:
                self._exchange_round(round, cargo, threads)
            finally:
                cargo.finish()
        finally:
            incoming.release()
            if self.ring is None:
                ring.release()
        rank = self.exchange.ranks.shard.rank
        wanted = requests_of(round.items, round.groups, rank)
        return [get for get in wanted if (get.item.image, get.item.chunk) not in cargo.got]

    def _exchange_round(self, round: ExchangeRound, cargo: Payload, threads: int) -> None:
        shard, wire = self.exchange.ranks.shard, self._talk.wire
        assert wire is not None
        failures = run_round(wire, round, shard.rank, shard.world_size, cargo, threads)
        by_image: dict[int, list[tuple[ChunkAssignment, BaseException]]] = {}
        for item, error in failures:
            by_image.setdefault(item.image, []).append((item, error))
        for image, those in by_image.items():
            self._note_unread(
                image, [item.chunk for item, _ in those], _decisive_error(e for _, e in those)
            )

    # What this rank can read -------------------------------------------------------------------------

    def _saved_by(self) -> int:
        return self.world_size(self.exchange.ranks.shard.world_size)

    def _seen(self) -> dict[int, frozenset[int]]:
        """The images that the records of each tier name here, by the tier's place in the chain."""
        if self._images is None:
            copies = {tier: self.checkpoint.copies[tier].commit for tier in self.tiers}
            self._images = {
                self.exchange.order.index(tier): named_shards(commit, self._saved_by())
                for tier, commit in copies.items()
                if commit is not None
            }
        return self._images

    def _sees(self, image: int) -> bool:
        return any(image in images for images in self._seen().values())

    def _reader(self, image: int) -> tuple[ChunkReader, Manifest]:
        """Open an image, once; threads share it."""
        shard = Shard(image, self._saved_by())
        with self._lock:
            if shard in self._bad:
                raise self._bad[shard]
            try:
                images, manifest = self.find(shard)
            except PASSABLE as error:
                self._bad[shard] = error
                raise
        return ChunkReader(images, manifest, self.tally), manifest

    def _note_unread(self, image: int, chunks: Sequence[int], error: BaseException) -> None:
        """Keep for the next time that ranks speak what this one could not read."""
        failed = UnreadChunks(
            rank=self.exchange.ranks.shard.rank,
            image=image,
            chunks=NumberRanges.of(chunks),
            retryable=getattr(error, "retryable", False),
            text=str(error),
        )
        self._talk.to_tell.append(failed)

    def _unreadable(self, nobody: UnassignedError) -> TierfallError:
        """Say why nobody can read a chunk; it may pass if that of anybody may."""
        tried = [
            f for f in self._talk.failed if f.image == nobody.image and nobody.chunk in f.chunks
        ]
        said = "; ".join(f"rank {f.rank}: {f.text}" for f in tried) or self.nowhere
        kind = UnreachableError if any(f.retryable for f in tried) else IntegrityError
        return kind(f"no rank can read {nobody}: {said}")


def _decisive_error(errors: Iterable[BaseException]) -> BaseException:
    """The first error that may pass, or else the first."""
    errors = list(errors)
    return next((e for e in errors if getattr(e, "retryable", False)), errors[0])


def _requests_left(
    left: Iterable[ChunkDelivery], sizes: Mapping[int, int]
) -> dict[int, RequestedRanges]:
    spans: dict[int, list[tuple[int, int]]] = {}
    for get in left:
        spans.setdefault(get.item.image, []).append((get.low, get.high))
    return {image: remaining_ranges(sorted(those), sizes[image]) for image, those in spans.items()}
