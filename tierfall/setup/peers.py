"""Peer memory of a start: each rank serves this node's memory to others, and learns who keeps what it saves; which
nodes keep the copies of which; a rank's image that other nodes keep, back in its host memory; and what one node keeps,
as a process sees it that does not meet the other nodes.

A node that was replaced has an empty host memory. With its ranks' images in it again, the newest checkpoint is in the
memory of all ranks, as after a start that lost no node: it is restored from there, and flushed to the nodes that keep
copies now.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tierfall.backends.posix.backend import PosixBackend
from tierfall.config import Config, PeerTierConfig
from tierfall.config.model import NODE_SPREAD
from tierfall.core.copies.chunk_reader import BufferRing, ChunkReader, ReadTally
from tierfall.core.copies.images import READ_THREADS, StoredImage, checked_manifest, unpacked
from tierfall.core.format.catalog import FoundCopy, Listing, merge
from tierfall.core.format.commit_files import files_of, image_file, plain
from tierfall.core.format.records import Commit, records_bytes_max
from tierfall.core.ranks.addresses import address_towards, is_loopback, listen, own_address
from tierfall.core.ranks.domains import VARIABLE, NodeDomain, find_domain, node_name
from tierfall.core.ranks.messages import Message
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.runtime.threads import run_in_threads
from tierfall.core.types.backend import Publish, put_object
from tierfall.core.types.errors import (
    CapacityError,
    ConfigError,
    KeyExistsError,
    TierfallError,
)
from tierfall.core.types.text import format_some
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, CopyState, Shard
from tierfall.policies.placement import CopyPlacement, place_copies
from tierfall.setup.places import seen_by_one, with_own_peers
from tierfall.tiers.host import HostTier
from tierfall.tiers.host_folder import prepare_folder
from tierfall.tiers.kept_images import KeptFolder, KeptImages
from tierfall.tiers.peer_requests import PeerClient, PeerServer
from tierfall.tiers.peers import KeptReader, PeerCache
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")

TIMEOUT_S = 30.0
TIMEOUT_MIN_S = 1.0
REQUESTS_IN_MAX_WAIT = 4
"""A request may take this part of ``max_wait``: a silent node is asked several times before that is reported."""
_MEET, _ID_NAME = "open: peer memory", "memory-id"


class PeerMemory:
    """What this rank serves, and the nodes that keep its images. ``placement`` has, by node, the nodes that keep its
    images, and ``images`` are the files that this process keeps for others. ``close`` ends the service."""

    def __init__(
        self,
        tier: PeerTierConfig,
        run: str,
        ranks: Ranks,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Meet the other ranks; all make this call. ``timeout_s``: how long another node may be silent in a request.
        Raises RanksError, and ConfigError if the copies cannot be placed."""
        self._tier, self._run, self._timeout_s = tier, run, timeout_s
        with ranks.reporting_error(_MEET):
            mine = _describe_self(tier, run)
        listener = listen(mine.host if tier.interface else "")
        try:
            mine = replace(mine, port=listener.getsockname()[1])
            addresses = ranks.agree(_MEET, mine, _by_rank, tuple[PeerAddress, ...])
            if (other := address_to_probe(addresses)) is not None:
                if is_loopback(mine.host):  # which other machines cannot reach
                    mine = replace(mine, host=address_towards(other))
                addresses = ranks.agree(
                    "open: peer addresses", mine, _by_rank, tuple[PeerAddress, ...]
                )
            topology = ranks.topology
            leaders = [addresses[node[0]] for node in topology.nodes]
            check_apart(tier, leaders)
            self.placement = place_on_nodes(tier, leaders)
            if topology.is_root:
                warn_of_placement(tier, leaders, self.placement)
        except BaseException:
            listener.close()
            raise
        self._nodes = [[addresses[rank] for rank in node] for node in topology.nodes]
        self._local_index = ranks.local_index
        self._shard = ranks.shard
        self._secret = ranks.secret
        self._keepers = [
            self._rank_of(keeper) for keeper in self.placement.holders[topology.node][1:]
        ]
        self._sender = str(topology.node)
        # the first rank of a node has the slots of ranks that no longer exist, too
        adopts_from = len(topology.local_ranks) if topology.is_leader else math.inf
        self.images = KeptImages(
            KeptFolder(tier.path / run, run), ranks.local_index, adopts_from=adopts_from
        )
        self._server = PeerServer(
            self.images,
            secret=self._secret,
            run=run,
            senders=[
                str(owner)
                for owner, holders in enumerate(self.placement.holders)
                if topology.node in holders[1:]
            ],
            listener=listener,
        )

    def _rank_of(self, node: int) -> PeerAddress:
        """Return the rank of a node that has this rank's place there."""
        ranks = self._nodes[node]
        return ranks[self._local_index % len(ranks)]

    def open_tier(self, pace: RateLimiter) -> PeerCache:
        """Return peer memory as a tier, to which this rank sends at a rate."""
        clients = [self._connect(rank, pace=pace) for rank in self._keepers]
        return PeerCache(
            name=self._tier.name,
            run=self._run,
            folder=self._tier.path,
            kept=self.images.kept,
            images=self.images,
            sent=clients,
            shard=self._shard,
            pace=pace,
            last_answer_s=lambda: max(client.last_answer_s for client in clients),
        )

    def recover_image(
        self,
        host: HostTier,
        listings: Sequence[Listing],
        is_ours: Callable[[Commit], bool],
        timeout_s: float,
    ) -> None:
        """Bring this rank's image back into ``host`` if that has none, from the first node that has it, and has it
        whole; see the function ``recover_image``. ``timeout_s``: for all reads."""
        if not host.is_empty():
            return
        until_s = time.monotonic() + timeout_s
        for other in self._keepers:
            client = self._connect(other, until_s=until_s)
            with closing(client), closing(kept_by(self._tier, self._run, client)) as keeper:
                if recover_image(host, keeper, self._shard, listings, is_ours) is not None:
                    return

    def _connect(
        self, rank: PeerAddress, *, pace: RateLimiter | None = None, until_s: float = math.inf
    ) -> PeerClient:
        return PeerClient(
            (rank.host, rank.port),
            secret=self._secret,
            run=self._run,
            sender=self._sender,
            pace=pace,
            timeout_s=self._timeout_s,
            until_s=until_s,
        )

    def close(self, *, keep: bool) -> None:
        """Stop serving; unless ``keep``, what this process keeps for others is deleted."""
        self._server.close()
        self.images.close(keep=keep)


def close_peers(peers: PeerMemory | None, *, keep: bool = True) -> None:
    """Close the peer memory of a start that has any."""
    if peers is not None:
        peers.close(keep=keep)


def meet_peers(config: Config, ranks: Ranks) -> tuple[Config, PeerMemory | None]:
    """Return the configuration, and the peer memory, if it has any. With one node, the peer tier is left out, or only
    read if this node keeps anything: a restore must not take a checkpoint that it cannot read whole for none.

    Raises RanksError, and ConfigError where there are too few nodes or domains for the copies.
    """
    config = with_own_peers(config)
    tier = config.peers
    if tier is None:
        return config, None
    nodes = len(ranks.topology.nodes)
    if nodes > tier.copies:
        bound_s = (tier.max_wait_s or config.max_wait_s) / REQUESTS_IN_MAX_WAIT
        timeout_s = min(max(bound_s, TIMEOUT_MIN_S), TIMEOUT_S)
        return config, PeerMemory(tier, config.run, ranks, timeout_s=timeout_s)
    if nodes > 1:
        raise ConfigError(
            f"open: tier {tier.name}: copies is {tier.copies}, and there are {nodes} nodes: each copy is on another "
            f"node than the image. Start on at least {tier.copies + 1} nodes, or set copies to {nodes - 1} or less"
        )
    config = seen_by_one(config)
    if ranks.topology.is_root:
        what = "left out" if config.peers is None else "only read"
        logger.info("open: there is one node, so tier %s is %s", tier.name, what)
    return config, None


def _describe_self(tier: PeerTierConfig, run: str) -> PeerAddress:
    try:
        prepare_folder(tier.path / run)  # what is kept for others is nobody else's to read
        found = find_domain(tier.domains) if tier.spread != NODE_SPREAD else NodeDomain()
        return PeerAddress(
            host=own_address(tier.interface),
            node=node_name(),
            domain=found.name,
            source=found.source,
            memory_id=_memory_id(tier.path),
        )
    except TierfallError as error:
        raise type(error)(f"tier {tier.name}: {error}") from error


def _by_rank(found: Mapping[int, PeerAddress]) -> tuple[PeerAddress, ...]:
    return tuple(found[rank] for rank in sorted(found))


def _memory_id(folder: Path) -> str:
    """Return the random id of this node's memory, made by the first rank that asks; it is as long-lived as what is kept
    there."""
    with closing(PosixBackend(folder, direct_io=False)) as backend:
        with suppress(KeyExistsError):
            id = secrets.token_hex(16).encode()
            put_object(backend, _ID_NAME, id, Publish.IF_ABSENT)
        data = bytearray(32)
        backend.read_into(_ID_NAME, 0, memoryview(data))
        return data.decode("ascii")


# Placement, by what each node reports -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress(Message):
    """Where a rank serves its node's memory; the name and the failure domain of its node, and where that is known from;
    the id of the node's memory."""

    host: str = ""
    port: int = 0
    node: str = ""
    domain: str = ""
    source: str = ""
    memory_id: str = ""


def check_apart(tier: PeerTierConfig, leaders: Sequence[PeerAddress]) -> None:
    """Raise ConfigError, the same on all ranks, where nodes keep what others send in one folder."""
    memories = Counter(leader.memory_id for leader in leaders)
    if max(memories.values()) > 1:
        same = [n for n, leader in enumerate(leaders) if memories[leader.memory_id] > 1]
        raise ConfigError(
            f"open: tier {tier.name}: {_named(same, leaders)} have one folder for what they keep, {tier.path}: set the "
            "tier's path to a folder in the memory of each node, such as one below /dev/shm"
        )


def place_on_nodes(tier: PeerTierConfig, leaders: Sequence[PeerAddress]) -> CopyPlacement:
    """Place the copies, by the first rank of each node. Raises ConfigError, the same on all ranks."""
    domains = _domains(tier, leaders)
    if len(set(domains)) <= tier.copies:
        raise ConfigError(
            f"open: tier {tier.name}: spread is {tier.spread}, copies is {tier.copies}, and {len(domains)} nodes are "
            f"in {len(set(domains))} ({format_some(sorted(set(domains)))}): no two of {tier.copies + 1} nodes with an "
            f"image may be in the same. Start in more, set copies to less, or spread to node"
        )
    return place_copies(domains, tier.copies)


def _domains(tier: PeerTierConfig, leaders: Sequence[PeerAddress]) -> list[str]:
    """Return the failure domain of each node. Raises ConfigError where one is not known."""
    if tier.spread == NODE_SPREAD:
        return [str(node) for node in range(len(leaders))]
    of = f"open: tier {tier.name}: spread is {tier.spread}"
    unknown = [node for node, leader in enumerate(leaders) if not leader.domain]
    if unknown:
        raise ConfigError(
            f"{of}, and the {tier.spread} of {_named(unknown, leaders)} is not known: set {VARIABLE} on each node, or "
            f"domains to a file with a line 'HOSTNAME {tier.spread.upper()}' for each; Slurm tells it only where it "
            "knows the network's topology"
        )
    sources = {leader.source: node for node, leader in enumerate(leaders)}
    if len(sources) > 1:
        by = " and ".join(f"{source} on {_named([n], leaders)}" for source, n in sources.items())
        raise ConfigError(f"{of}, and it is given by {by}: names are compared, so give all by one")
    return [leader.domain for leader in leaders]


def warn_of_placement(
    tier: PeerTierConfig,
    leaders: Sequence[PeerAddress],
    placement: CopyPlacement,
) -> None:
    """Log what the placement does not give."""
    unused = "domains" if tier.domains is not None else VARIABLE if os.environ.get(VARIABLE) else ""
    if unused and tier.spread == NODE_SPREAD:
        logger.warning(
            "open: tier %s: %s is set, and spread is node, so that all copies may be in one domain: set spread to what "
            "it names, such as rack", tier.name, unused,
        )  # fmt: skip
    if placement.crowded:
        largest, count = Counter(leader.domain for leader in leaders).most_common(1)[0]
        logger.warning(
            "open: tier %s: copies of %s share a %s with another, so that its loss may cost more than one: %d of %d "
            "nodes are in %s, and with copies: %d no %s may have more than %d for all to be apart",
            tier.name, _named(placement.crowded, leaders), tier.spread, count, len(leaders), largest, tier.copies,
            tier.spread, len(leaders) // (tier.copies + 1),
        )  # fmt: skip


def _named(nodes: Sequence[int], leaders: Sequence[PeerAddress]) -> str:
    return format_some([f"node {node} ({leaders[node].node})" for node in nodes])


def address_to_probe(addresses: Sequence[PeerAddress]) -> str | None:
    """Return the address of another machine if some ranks know only one of their own that no other machine reaches.

    On the machine of rank 0 its own name often leads there: /etc/hosts of many distributions has 127.0.1.1 for it.
    None where all ranks know only such addresses: they are on one machine.
    """
    others = [address.host for address in addresses if not is_loopback(address.host)]
    return others[0] if 0 < len(others) < len(addresses) else None


# An image that other nodes keep -------------------------------------------------------------------


def recover_image(
    host: HostTier,
    keeper: StoredTier,
    shard: Shard,
    listings: Sequence[Listing],
    is_ours: Callable[[Commit], bool],
) -> CheckpointId | None:
    """Copy the image of ``shard`` of the newest checkpoint from ``keeper``, which is the tier as another node sees it,
    into ``host``, which has no image; return the checkpoint.

    ``listings`` are what this rank has found on all tiers. None where the newest live checkpoint has no image of this
    shard there, or is not ``is_ours``; and where it is not read, or is damaged: that is logged.
    """
    try:
        found = _newest(keeper, shard, listings, is_ours)
        if found is not None:
            _copy(found, host, keeper, shard)
    except TierfallError as error:
        logger.warning(
            "open: this rank's image is not brought back into host memory from another node's: %s",
            error,
        )
        return None
    return None if found is None else found.id


def _newest(
    keeper: StoredTier,
    shard: Shard,
    listings: Sequence[Listing],
    is_ours: Callable[[Commit], bool],
) -> FoundCopy | None:
    """Return the keeper's copy of the newest live checkpoint of this run of which any tier has an image of this shard;
    None where the keeper has none, or has only one of an older checkpoint."""
    there = keeper.list()
    if there.error is not None:
        raise there.error
    copies = tuple(c for c in there.copies if c.commit is not None and is_ours(c.commit))
    there = replace(there, tier=f"{there.tier} of another node", copies=copies)
    live = (
        known.copies
        for known in reversed(merge((*listings, there)))
        if not (known.deleted or known.abandoned)
    )
    good = ({tier: c for tier, c in copies.items() if _has_image(c, shard)} for copies in live)
    return next(filter(None, good), {}).get(there.tier)


def _has_image(copy: FoundCopy, shard: Shard) -> bool:
    if copy.state is not CopyState.COMMITTED or copy.damage is not None or copy.commit is None:
        return False
    return image_file(copy.commit, shard) is not None


def _copy(found: FoundCopy, host: HostTier, keeper: StoredTier, shard: Shard) -> None:
    assert found.commit is not None
    began_s = time.monotonic()
    stored = StoredImage(keeper, found.id, shard)
    manifest = checked_manifest(stored, found.commit, shard)
    image = unpacked(stored, found.commit, manifest)
    # As the rank's own record was: of its image alone.
    commit = plain(replace(found.commit, files=files_of(found.commit, shard)))
    records = manifest.encode(), commit.encode()
    reserved_bytes = records_bytes_max(
        pieces_bytes=len(manifest.pieces),
        chunks=len(manifest.digests),
        metrics=commit.metrics,
        tags=commit.tags,
        run=commit.lineage.run,
    )
    records_bytes = max(reserved_bytes, sum(map(len, records)))
    needed = {"image_bytes": manifest.image_bytes, "records_bytes": records_bytes}
    host.ensure_capacity(**needed)
    region = host.allocate(**needed)
    if region is None:
        raise CapacityError(f"{host.name} has no room for it")
    try:
        filled = np.frombuffer(region.image, np.uint8)

        reader = ChunkReader([image], manifest, ReadTally())
        ring = BufferRing(manifest.chunk_bytes)

        def bring(index: int) -> None:
            start, end = manifest.chunk_range(index)
            with ring.pool.lend_view(end - start) as buffer:
                view = reader.read(index, buffer)
                np.copyto(filled[start:end], np.frombuffer(view, np.uint8))

        run_in_threads(READ_THREADS, bring, range(manifest.chunk_count))
        region.seal(manifest=records[0], commit=records[1])
    except BaseException:
        region.release()
        raise
    logger.info(
        "open: this rank's image of %s, %s, is brought back into host memory from %s in %.1f s",
        found.id,
        format_size(manifest.image_bytes),
        keeper.name,
        time.monotonic() - began_s,
    )


# What one node keeps ------------------------------------------------------------------------------


def kept_by(tier: PeerTierConfig, run: str, kept: KeptReader) -> PeerCache:
    """Return what a node keeps, for reading."""
    return PeerCache(
        name=tier.name, run=run, folder=tier.path, kept=kept, read_only="it is only to be read"
    )


def view_kept(tier: PeerTierConfig, run: str) -> PeerCache:
    """Open what this node keeps, for reading by a process that does not meet the other nodes."""
    return kept_by(tier, run, KeptFolder(tier.path / run, run))
