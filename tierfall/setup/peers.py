"""Peer memory of a start: each rank serves this node's memory to others, and learns who keeps what it saves."""

from __future__ import annotations

import logging
import math
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from tierfall.backends.peer.backend import PeerBackend
from tierfall.backends.peer.kept import KeptFiles
from tierfall.backends.peer.server import PeerServer
from tierfall.backends.peer.view import PeerView
from tierfall.backends.peer.wire import SECRET_BYTES
from tierfall.backends.posix.backend import PosixBackend
from tierfall.backends.toolkit.base import describe
from tierfall.backends.wrappers.base import Wrapper
from tierfall.config import Config, PeerTierConfig
from tierfall.config.model import NODE_SPREAD
from tierfall.core.format.catalog import Listing
from tierfall.core.format.records import Commit
from tierfall.core.ranks.domains import NodeDomain, find_domain, node_name
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.runtime.bounded_calls import CallResult
from tierfall.core.types.backend import Backend, Publish, Writer, put_object
from tierfall.core.types.errors import (
    BackendError,
    ConfigError,
    KeyExistsError,
    RanksError,
    StorageFullError,
    TierfallError,
)
from tierfall.setup.nodes.kept import keeps_any, kept_folders
from tierfall.setup.nodes.placement import (
    HELPS,
    PeerAddress,
    PeerMeeting,
    address_to_probe,
    check_apart,
    own_address,
    place_on_nodes,
    reachable,
    warn_of_placement,
)
from tierfall.setup.nodes.recover import recover_image
from tierfall.setup.places import with_own_peers
from tierfall.tiers.arena.folder import (
    is_in_memory,
    prepare_folder,
    room_for_arena,
    sized,
)
from tierfall.tiers.host import HostTier
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")

TIMEOUT_S = 30.0
TIMEOUT_MIN_S = 1.0
REQUESTS_IN_MAX_WAIT = 4
"""A request may take this part of ``max_wait``: a silent node is asked several times before that is reported."""
CHECKED_BYTES_MIN = 64 << 10
"""Documents are smaller."""
_ID_NAME = "memory-id"

CallTiers = Callable[
    [Iterable[StoredTier], Callable[[StoredTier], None]], Mapping[str, CallResult[None]]
]
"""Makes a call of several tiers, each within its bound."""


class PeerMemory:
    """What this rank serves, and the nodes that keep what this node writes. ``placement`` has, by node, the nodes that
    keep its images. ``close`` ends the service."""

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
        listener = socket.create_server(("", 0), backlog=128)
        try:
            mine = _describe_self(tier, listener.getsockname()[1])
            meeting = ranks.agree("open: peer memory", mine, _merge, PeerMeeting)
            if (other := address_to_probe(meeting.addresses)) is not None:
                mine = reachable(mine, other)
                meeting = ranks.agree("open: peer addresses", mine, _merge, PeerMeeting)
            topology, addresses = ranks.topology, meeting.addresses
            leaders = [addresses[node[0]] for node in topology.nodes]
            check_apart(tier, leaders)
            self.placement = place_on_nodes(tier, leaders)
            if topology.is_root:
                warn_of_placement(tier, leaders, self.placement)
            self._kept = [prepare_folder(tier.path / str(n)) for n in range(tier.copies + 1)]
        except BaseException:
            listener.close()
            raise
        self._nodes = [[addresses[rank] for rank in node] for node in topology.nodes]
        self._node, self._local_index = topology.node, ranks.local_index
        self._shard = ranks.shard
        self._secret = bytes.fromhex(meeting.secret)
        self._keepers = [
            self._rank_of(keeper) for keeper in self.placement.holders[topology.node][1:]
        ]
        self._sender = _sender(topology.node)
        self._copy_of = {
            _sender(owner): holders.index(topology.node)
            for owner, holders in enumerate(self.placement.holders)
            if topology.node in holders[1:]
        }
        self._server = PeerServer(
            secret=self._secret,
            run=run,
            storage=self._open_kept_for,
            listener=listener,
        )

    def _rank_of(self, node: int) -> PeerAddress:
        """Return the rank of a node that has this rank's place there."""
        ranks = self._nodes[node]
        return ranks[self._local_index % len(ranks)]

    def _open_kept_for(self, sender: str) -> Backend:
        """Open the folder of what a node sends: that of the number of its copy, which no other node has in a
        start."""
        copy = self._copy_of.get(sender)
        if copy is None:
            raise BackendError(f"no copy of what {sender} saves is placed here")
        return RoomCheck(_open_kept(self._kept[copy]))

    def open_backend(self) -> PeerView:
        """Open what this node sees of the tier."""
        kept = [PosixBackend(folder, direct_io=False) for folder in kept_folders(self._tier.path)]
        return PeerView(kept, [self._connect(rank, self._sender) for rank in self._keepers])

    def _open_on_keepers(self, until_s: float) -> Iterator[Backend]:
        """Open, to read it until ``until_s``, what each node that keeps copies of this node's images sees of the
        tier."""
        for keeper in self._keepers:
            yield PeerView([self._connect(keeper, self._sender, until_s)], ())

    def recover_image(
        self,
        host: HostTier,
        listings: Sequence[Listing],
        is_ours: Callable[[Commit], bool],
        timeout_s: float,
    ) -> None:
        """Bring this rank's image back into ``host`` if that has none, from the first node that has it, and has it
        whole; see ``recover.recover_image``. ``timeout_s``: for all reads."""
        if not host.is_empty():
            return
        for seen in self._open_on_keepers(time.monotonic() + timeout_s):
            tier = StoredTier(name=self._tier.name, run=self._run, backend=seen, has_latest=False)
            with closing(tier) as keeper:
                if recover_image(host, keeper, self._shard, listings, is_ours) is not None:
                    return

    def _connect(self, rank: PeerAddress, sender: str, until_s: float = math.inf) -> PeerBackend:
        return PeerBackend(
            (rank.host, rank.port),
            secret=self._secret,
            run=self._run,
            sender=sender,
            timeout_s=self._timeout_s,
            until_s=until_s,
        )

    def close(self) -> None:
        """Stop serving. What is kept for others stays, for the next start."""
        self._server.close()

    def release(self, stores: Mapping[str, StoredTier], call: CallTiers) -> None:
        """Delete what this node has written to other nodes' memory, and what it keeps of earlier attempts: all is
        durable on tiers that are not memory. The leader of a node makes this call."""
        tiers = [stores[name] for name in (self._tier.name,) if name in stores]
        for answer in call(tiers, self._delete_all).values():
            if answer.error is not None:
                logger.warning("close: tier %s keeps its memory: %s", self._tier.name, answer.error)

    def _delete_all(self, store: StoredTier) -> None:
        left: Sequence[str] = [found.key for found in store.backend.scan(f"{self._run}/")]
        while left:
            left = store.backend.delete_some(left)


class RoomCheck(Wrapper):
    """Refuses an object that does not fit into the memory that is free: else the machine may kill a process for it."""

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> Writer:
        if length is not None and length >= CHECKED_BYTES_MIN:
            reused_bytes = self._inner.spare_bytes if isinstance(self._inner, KeptFiles) else 0
            try:
                _check_room(Path(self.place), length, reused_bytes)
            except StorageFullError as error:
                raise StorageFullError(f"{describe('create', key, self.place)}: {error}") from None
        return super().create(key, length=length, length_max=length_max, publish=publish)


def _check_room(folder: Path, size: int, reused_bytes: int = 0) -> None:
    """Raise StorageFullError where so many bytes do not fit into the memory that is free, or is used again."""
    room = room_for_arena(folder)
    if size > room.free_bytes + reused_bytes:
        raise StorageFullError(
            f"it needs {sized(size)}, and {sized(room.free_bytes)} are free for it on {node_name()}: {HELPS}"
        )


def close_peers(peers: PeerMemory | None) -> None:
    """Close the peer memory of a start that has any."""
    if peers is not None:
        peers.close()


def meet_peers(config: Config, run: str, ranks: Ranks) -> tuple[Config, PeerMemory | None]:
    """Return the configuration, and the peer memory, if it has any. Where there is one node, the peer tier is left out,
    or only read if this node keeps a checkpoint: a restore must not take what it cannot read whole for nothing.

    Raises RanksError, and ConfigError where there are too few nodes or domains for the copies.
    """
    config = with_own_peers(config, run)
    tier = config.peers
    if tier is None:
        return config, None
    nodes = len(ranks.topology.nodes)
    if nodes > tier.copies:
        bound_s = (tier.max_wait_s or config.max_wait_s) / REQUESTS_IN_MAX_WAIT
        timeout_s = min(max(bound_s, TIMEOUT_MIN_S), TIMEOUT_S)
        return config, PeerMemory(tier, run, ranks, timeout_s=timeout_s)
    if nodes > 1:
        raise ConfigError(
            f"open: tier {tier.name}: copies is {tier.copies}, and there are {nodes} nodes: each copy is on another "
            f"node than the image. Start on at least {tier.copies + 1} nodes, or set copies to {nodes - 1} or less"
        )
    if keeps_any(tier, run):
        logger.info("open: there is one node, so tier %s is only read", tier.name)
        return config.reading_only([tier.name]), None
    if ranks.topology.is_root:
        logger.info("open: there is one node, so tier %s is left out", tier.name)
    return config.without(tier.name), None


def _describe_self(tier: PeerTierConfig, port: int) -> PeerAddress:
    try:
        prepare_folder(tier.path)  # what is kept for others is nobody else's to read
        found = find_domain(tier.domains) if tier.spread != NODE_SPREAD else NodeDomain()
        memory_id = _memory_id(tier.path)
    except TierfallError as error:
        return PeerAddress(error=f"tier {tier.name}: {error}")
    return PeerAddress(
        host=own_address(),
        port=port,
        node=node_name(),
        domain=found.name,
        source=found.source,
        memory_id=memory_id,
    )


def _open_kept(path: Path) -> Backend:
    """Open the folder of what is kept for others. Only files in memory are mapped: a read error of a disk would end the
    process."""
    return KeptFiles(path) if is_in_memory(path) else PosixBackend(path, direct_io=False)


def _merge(found: Mapping[int, PeerAddress]) -> PeerMeeting:
    for rank, address in found.items():
        if address.error:
            raise RanksError(f"open: rank {rank}: {address.error}")
    addresses = tuple(found[rank] for rank in sorted(found))
    return PeerMeeting(addresses=addresses, secret=secrets.token_hex(SECRET_BYTES))


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


def _sender(node: int) -> str:
    return f"node-{node}"
