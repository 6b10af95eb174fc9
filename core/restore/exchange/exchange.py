"""The exchange of a restore: chunks that several ranks need are read once and sent to the others, and chunks that only
another rank can read are read there.

All ranks take the same steps: each sends what it requests of which images (``messages``), all compute which rank reads
it (``assign``), and exchange it (``rounds``). Chunks that a rank could not read are requested again, of others. First
come headers, until all ranks have planned, then chunks, until no rank requests any. Where each rank reads its own image
alone, one message of each rank is all that is sent.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tierfall.core.copies.chunk_reader import BUFFER_BYTES, BufferRing, ChunkReader, ReadTally
from tierfall.core.copies.images import READ_THREADS
from tierfall.core.copies.shard_reader import PASSABLE, CheckpointReader, OpenImage
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.format.commit_files import ranks_with_image
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
from tierfall.core.types.errors import IntegrityError, TierfallError, UnreachableError, is_damage
from tierfall.core.types.values import Shard

logger = logging.getLogger("tierfall")

NODES_TRIED = 4
_CALL = "restore: exchange"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How the ranks of a restore exchange bytes. ``order`` are the tiers of the chain, fastest first; all nodes see the
    same files on those that are ``shared``. ``timeout_s`` is how long a rank waits for another one."""

    ranks: Ranks
    connect: Connect
    order: Sequence[str]
    shared: Collection[str]
    timeout_s: float

    def reader(
        self,
        checkpoint: KnownCheckpoint,
        tiers: Sequence[str],
        open_image: OpenImage,
        tally: ReadTally,
        ring: BufferRing | None = None,
    ) -> CheckpointReader:
        """Return the reader of one checkpoint, which all ranks try now."""
        return _ExchangedReader(checkpoint, tiers, open_image, tally, ring, exchange=self)


@dataclass(slots=True)
class _ExchangeState:
    """The state of an exchange. ``ended``: no more messages are sent about this checkpoint; ``unreported`` is the error
    that kept this rank from sending one."""

    ended: bool = False
    unreported: TierfallError | None = None
    holders: Holders | None = None
    transport: ByteTransport | None = None
    next_tag: int = 0
    failed: list[UnreadChunks] = field(default_factory=list)
    to_report: list[UnreadChunks] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _ExchangedReader(CheckpointReader):
    """Reads a checkpoint whose images the ranks exchange."""

    exchange: Exchange
    _state: _ExchangeState = field(default_factory=_ExchangeState)
    _known: dict[int, tuple[Manifest, ImageHeader]] = field(default_factory=dict)
    _bad: dict[Shard, BaseException] = field(default_factory=dict)
    _images: dict[int, frozenset[int]] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    # What plans ask for ------------------------------------------------------------------------------

    def header(self, shard: Shard) -> ImageHeader:
        if self._is_fastest_here(shard.rank):
            try:
                self.header_here(shard)
            except PASSABLE as error:
                self._note_unread(shard.rank, [HEADER], error)
        return self._request_headers([shard.rank])[shard.rank]

    def header_here(self, shard: Shard) -> ImageHeader:
        header = CheckpointReader.header_here(self, shard)
        self._known[shard.rank] = self.find(shard)[1], header
        return header

    def headers(self, world_size: int) -> dict[int, ImageHeader]:
        return self._request_headers(range(world_size))

    def manifests(self, ranks: Iterable[int], world_size: int) -> dict[int, Manifest]:
        wanted = [rank for rank in sorted(ranks) if rank < world_size]
        self._request_headers(wanted)
        return {rank: self._known[rank][0] for rank in wanted}

    def _request_headers(self, images: Sequence[int]) -> dict[int, ImageHeader]:
        while missing := [image for image in images if image not in self._known]:
            self._continue(
                ExchangeRequest(
                    requested={image: RequestedRanges(0) for image in missing}, planning=True
                ),
                {},
            )
        return {image: self._known[image][1] for image in images}

    def fill(self, fills: Mapping[int, Sequence[Fill]], world_size: int) -> None:
        sizes = {image: self._known[image][0].chunk_bytes for image in fills}
        requested = {image: requested_ranges(those, sizes[image]) for image, those in fills.items()}
        requested = {image: request for image, request in requested.items() if request.edges}
        mine = self.exchange.ranks.shard
        alone = world_size == mine.world_size and requested.keys() <= {mine.rank}
        while True:
            request = ExchangeRequest(
                requested=requested, alone=alone and all(map(self._sees, requested))
            )
            next, left = self._continue(request, fills)
            if next is NextPhase.LOCAL:
                CheckpointReader.fill(self, fills, world_size)
            if next in (NextPhase.LOCAL, NextPhase.DONE):
                return
            if next is NextPhase.CHUNKS:
                requested = _requests_left(left, sizes)

    def give_up(self, error: BaseException) -> TierfallError | None:
        if self._state.transport is not None:
            self._state.transport.cut()
        if not self._state.ended:
            stopped = str(error) if isinstance(error, TierfallError) else repr(error)
            # A rank that has lost another one does not wait for it as long as for a slow one.
            patience_s = None if isinstance(error, LostError) else self.exchange.timeout_s
            try:
                self._send(ExchangeRequest(stopped=stopped), patience_s)
            except TierfallError as lost:
                logger.debug("the other ranks do not learn that this one gives up: %s", lost)
            self._state.ended = True
        return self._state.unreported

    # One step, with all ranks ------------------------------------------------------------------------

    def _continue(
        self, request: ExchangeRequest, fills: Mapping[int, Sequence[Fill]]
    ) -> tuple[NextPhase, list[ChunkDelivery]]:
        """Send what this rank requests, and exchange what all ranks do; return the phase, and the requested chunks that
        did not arrive.

        Raises one of ``PASSABLE`` on all ranks where no rank can read a chunk, and LostError where another rank has
        given up, or is gone.
        """
        answer = self._send(request, self.exchange.timeout_s)
        state = self._state
        if answer.next in (NextPhase.LOCAL, NextPhase.DONE):
            state.ended = True
            return answer.next, []
        assert state.holders is not None
        groups = answer.rank_groups()
        try:
            items = assign(groups, state.holders, self._excluded())
        except UnassignedError as unassigned:
            state.ended = True
            raise self._unreadable(unassigned) from None
        round = ExchangeRound(items=items, groups=groups, first_tag=state.next_tag)
        state.next_tag = round.next_tag
        if answer.next is NextPhase.HEADERS:
            return answer.next, self._exchange_headers(round, frozenset(request.requested))
        return answer.next, self._exchange_chunks(round, fills)

    def _send(self, request: ExchangeRequest, timeout_s: float | None) -> ExchangeDecision:
        state, ranks = self._state, self.exchange.ranks
        seen = None
        if state.holders is None:
            seen = {tier: NumberRanges.of(images) for tier, images in self._seen().items()}
        request, state.to_report = (
            replace(request, readable=seen, failed=tuple(state.to_report)),
            [],
        )
        try:
            answer = ranks.agree(
                _CALL, request, self._decide, ExchangeDecision, timeout_s=timeout_s
            )
        except TierfallError as lost:
            state.ended, state.unreported = True, lost
            raise
        state.failed += answer.failed
        if answer.seen is not None:
            state.holders = holders_of(answer.seen)
        if answer.stopped is not None:
            state.ended = True
            rank, why = answer.stopped
            raise LostError(f"rank {rank} gave up: {why}")
        if answer.next in (NextPhase.HEADERS, NextPhase.CHUNKS) and state.transport is None:
            name = f"tierfall/exchange/{answer.name}"
            shard = ranks.shard
            state.transport = self.exchange.connect(
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
        """Return image, chunk and rank where the rank does not try to read the chunk: a rank of its node has failed to,
        or ranks of several nodes have. A chunk on a shared tier is so not read by each of a thousand ranks before it
        counts as damaged.
        """
        topology = self.exchange.ranks.topology
        tried: dict[tuple[int, int], set[int]] = {}
        for failed in self._state.failed:
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
        payload = HeaderPayload(self._reader, wanted, self.exchange.order, self.tally)
        self._exchange_round(round, payload, READ_THREADS)
        self._known |= payload.known
        return []

    def _exchange_chunks(
        self, round: ExchangeRound, fills: Mapping[int, Sequence[Fill]]
    ) -> list[ChunkDelivery]:
        self.touched = True
        sizes = {
            i: request.chunk_bytes
            for group in round.groups
            for i, request in group.requested.items()
        }
        largest = max(sizes.values())
        ring = self.ring or BufferRing(largest)
        threads = max(1, min(READ_THREADS, ring.count, BUFFER_BYTES // largest))
        incoming = BufferRing(largest, count_max=threads, streams=ring.streams)
        try:
            payload = ChunkPayload(
                self._reader,
                fills,
                sizes,
                self.exchange.order,
                self.tally,
                ring=ring,
                incoming=incoming,
            )
            try:
                self._exchange_round(round, payload, threads)
            finally:
                payload.finish()
        finally:
            incoming.release()
            if self.ring is None:
                ring.release()
        rank = self.exchange.ranks.shard.rank
        wanted = requests_of(round.items, round.groups, rank)
        return [
            delivery
            for delivery in wanted
            if (delivery.item.image, delivery.item.chunk) not in payload.got
        ]

    def _exchange_round(self, round: ExchangeRound, payload: Payload, threads: int) -> None:
        shard, transport = self.exchange.ranks.shard, self._state.transport
        assert transport is not None
        failures = run_round(transport, round, shard.rank, shard.world_size, payload, threads)
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
        """Return the images that the records of each tier name here, by the tier's number in the chain."""
        if self._images is None:
            copies = {tier: self.checkpoint.copies[tier].commit for tier in self.tiers}
            self._images = {
                self.exchange.order.index(tier): ranks_with_image(commit, self._saved_by())
                for tier, commit in copies.items()
                if commit is not None
            }
        return self._images

    def _sees(self, image: int) -> bool:
        return any(image in images for images in self._seen().values())

    def _is_fastest_here(self, image: int) -> bool:
        """Return whether this rank sees ``image``, its own, on the fastest tier that any node has it on."""
        tiers = [tier for tier, images in self._seen().items() if image in images]
        fastest = self.checkpoint.fastest_tier
        return bool(tiers) and (fastest is None or min(tiers) <= self.exchange.order.index(fastest))

    def _reader(self, image: int) -> tuple[ChunkReader, Manifest]:
        """Open an image; threads share it."""
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
        """Keep what this rank could not read for its next message."""
        failed = UnreadChunks(
            rank=self.exchange.ranks.shard.rank,
            image=image,
            chunks=NumberRanges.of(chunks),
            damaged=is_damage(error),
            text=str(error),
        )
        self._state.to_report.append(failed)

    def _unreadable(self, unassigned: UnassignedError) -> TierfallError:
        """Return why no rank can read a chunk: damage if the error of each rank is."""
        tried = [
            f
            for f in self._state.failed
            if f.image == unassigned.image and unassigned.chunk in f.chunks
        ]
        reasons = "; ".join(f"rank {f.rank}: {f.text}" for f in tried) or self.nowhere
        kind = IntegrityError if all(f.damaged for f in tried) else UnreachableError
        return kind(f"no rank can read {unassigned}: {reasons}")


def _decisive_error(errors: Iterable[BaseException]) -> BaseException:
    """Return the first error that is no damage, or else the first."""
    errors = list(errors)
    return next((e for e in errors if not is_damage(e)), errors[0])


def _requests_left(
    left: Iterable[ChunkDelivery], sizes: Mapping[int, int]
) -> dict[int, RequestedRanges]:
    spans: dict[int, list[tuple[int, int]]] = {}
    for delivery in left:
        spans.setdefault(delivery.item.image, []).append((delivery.low, delivery.high))
    return {image: remaining_ranges(sorted(those), sizes[image]) for image, those in spans.items()}
