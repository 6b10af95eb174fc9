"""Peer memory of a start: each rank serves this node's memory to others, and learns who keeps what it saves."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tierfall.backends.peer.backend import PeerBackend
from tierfall.backends.peer.server import PeerServer
from tierfall.backends.peer.view import PeerView
from tierfall.backends.peer.wire import SECRET_BYTES
from tierfall.backends.posix.backend import PosixBackend
from tierfall.backends.toolkit.base import describe
from tierfall.backends.wrappers.base import Wrapper
from tierfall.config import Config, PeerTierConfig
from tierfall.config.tiers import NODE_SPREAD
from tierfall.core.ranks.domains import VARIABLE, NodeDomain, find_domain, node_name
from tierfall.core.ranks.messages import Message
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.runtime.bounded_calls import CallResult
from tierfall.core.types.backend import Backend, Publish, Writer
from tierfall.core.types.errors import (
    BackendError,
    ConfigError,
    RanksError,
    StorageFullError,
    TierfallError,
)
from tierfall.core.types.text import format_some
from tierfall.policies.placement import CopyPlacement, place_copies
from tierfall.tiers.arena.folder import prepare_folder, room_for_arena, sized
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")

TIMEOUT_S = 30.0
TIMEOUT_MIN_S = 1.0
REQUESTS_IN_MAX_WAIT = 4
"""How often a node that is silent is asked until that is reported: by two tries of each of two calls."""
CHECKED_BYTES_MIN = 64 << 10
"""Documents are smaller."""
_HELPS = (
    "raise the size of /dev/shm (mount -o remount,size=..., or --shm-size of a container), set the tier's path to a "
    "larger file system in memory, or have fewer copies"
)

CallTiers = Callable[
    [Iterable[StoredTier], Callable[[StoredTier], None]], Mapping[str, CallResult[None]]
]
"""Makes a call of several tiers, each within its bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress(Message):
    """Where a rank serves its node's memory; the name and the failure domain of its node, and where that is known from;
    and how much of the tier's ``capacity`` has no room there, in bytes. Or the ``error`` that keeps it from serving."""

    host: str = ""
    port: int = 0
    node: str = ""
    domain: str = ""
    source: str = ""
    lacks_bytes: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMeeting(Message):
    """The addresses of all ranks, by rank, and the secret that only ranks of this start know."""

    addresses: tuple[PeerAddress, ...]
    secret: str = field(repr=False)


class PeerMemory:
    """What this rank serves, and the nodes that keep what this node writes. ``placement`` has, by node, the nodes that
    keep its images. ``close`` ends the service."""

    def __init__(
        self, tier: PeerTierConfig, run: str, ranks: Ranks, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Meet the other ranks; all make this call. ``timeout_s``: how long another node may be silent in a request.
        Raises RanksError, and ConfigError where the copies cannot be placed."""
        self._tier, self._run, self._timeout_s = tier, run, timeout_s
        listener = socket.create_server(("", 0), backlog=128)
        try:
            mine = _describe_self(tier, listener.getsockname()[1])
            meeting = ranks.agree("open: peer memory", mine, _merge, PeerMeeting)
            topology, addresses = ranks.topology, meeting.addresses
            leaders = [addresses[node[0]] for node in topology.nodes]
            self.placement: CopyPlacement = _place(tier, leaders)
            if topology.is_root:
                _warn(tier, leaders, self.placement)
            self._kept = [prepare_folder(tier.path / str(n)) for n in range(tier.copies + 1)]
        except BaseException:
            listener.close()
            raise
        self._secret = bytes.fromhex(meeting.secret)
        self._keepers = [
            addresses[_with_local_index(topology.nodes[keeper], ranks.local_index)]
            for keeper in self.placement.holders[topology.node][1:]
        ]
        self._sender = _sender(topology.node)
        self._copy_of = {
            _sender(owner): holders.index(topology.node)
            for owner, holders in enumerate(self.placement.holders)
            if topology.node in holders[1:]
        }
        self._server = PeerServer(
            secret=self._secret, run=run, storage=self._open_kept_for, listener=listener
        )

    def _open_kept_for(self, sender: str) -> Backend:
        """Open the folder of what a node sends: that of the number of its copy, which no other node has in a start."""
        copy = self._copy_of.get(sender)
        if copy is None:
            raise BackendError(f"no copy of what {sender} saves is placed here")
        return RoomCheck(PosixBackend(self._kept[copy], direct_io=False))

    def open_backend(self) -> PeerView:
        """Open what this node sees of the tier."""
        remotes = [
            PeerBackend(
                (keeper.host, keeper.port),
                secret=self._secret,
                run=self._run,
                sender=self._sender,
                timeout_s=self._timeout_s,
            )
            for keeper in self._keepers
        ]
        kept = kept_folders(self._tier.path)
        return PeerView([PosixBackend(folder, direct_io=False) for folder in kept], remotes)

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
            room = room_for_arena(Path(self.place))
            if length > room.free_bytes:
                raise StorageFullError(
                    f"{describe('create', key, self.place)}: it needs {sized(length)}, and {sized(room.free_bytes)} "
                    f"are free for it on {node_name()}: {_HELPS}"
                )
        return super().create(key, length=length, length_max=length_max, publish=publish)


def kept_folders(path: Path) -> list[Path]:
    """Return the folders of what this node keeps: ``0`` with what it has written itself of earlier attempts, and one
    for each number of a copy, of earlier starts, too, which may have had more."""
    names = [child.name for child in path.iterdir() if child.is_dir()] if path.is_dir() else []
    return [
        path / str(number) for number in sorted(int(name) for name in names if name.isdecimal())
    ]


def view_kept(path: Path) -> PeerView:
    """Open, for reading, what this node keeps, for a process that does not meet the other nodes."""
    folders = kept_folders(path) or [path]
    kept = [PosixBackend(folder, read_only=True) for folder in folders]
    return PeerView(kept, (), place=str(path))


def seen_by_one(config: Config) -> Config:
    """Return the configuration for a process that does not meet the other nodes: of peer memory it reads what this node
    keeps, if anything."""
    tier = config.peers
    if tier is None:
        return config
    return config.reading_only([tier.name]) if tier.path.exists() else config.without(tier.name)


def close_peers(peers: PeerMemory | None) -> None:
    """Close the peer memory of a start that has any."""
    if peers is not None:
        peers.close()


def meet_peers(config: Config, run: str, ranks: Ranks) -> tuple[Config, PeerMemory | None]:
    """Return the configuration, without a peer tier where there is one node, and the peer memory, if it has any.

    Raises RanksError, and ConfigError where there are too few nodes or domains for the copies.
    """
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
    if ranks.topology.is_root:
        logger.info("open: there is one node, so tier %s is left out", tier.name)
    return config.without(tier.name), None


def _describe_self(tier: PeerTierConfig, port: int) -> PeerAddress:
    try:
        prepare_folder(tier.path)  # what is kept for others is nobody else's to read
        found = find_domain(tier.domains) if tier.spread != NODE_SPREAD else NodeDomain()
        lacks_bytes = _lacking_bytes(tier)
    except TierfallError as error:
        return PeerAddress(error=f"tier {tier.name}: {error}")
    return PeerAddress(
        host=_own_address(),
        port=port,
        node=node_name(),
        domain=found.name,
        source=found.source,
        lacks_bytes=lacks_bytes,
    )


def _lacking_bytes(tier: PeerTierConfig) -> int:
    """Return how many bytes of the tier's capacity would not fit; 0 where it has none."""
    if tier.capacity_bytes is None:
        return 0
    files = [path for path in tier.path.rglob("*") if path.is_file()]
    there = room_for_arena(tier.path).free_bytes + sum(path.stat().st_size for path in files)
    return max(0, tier.capacity_bytes * tier.copies - there)


def _merge(found: Mapping[int, PeerAddress]) -> PeerMeeting:
    for rank, address in found.items():
        if address.error:
            raise RanksError(f"open: rank {rank}: {address.error}")
    addresses = tuple(found[rank] for rank in sorted(found))
    return PeerMeeting(addresses=addresses, secret=secrets.token_hex(SECRET_BYTES))


def _place(tier: PeerTierConfig, leaders: Sequence[PeerAddress]) -> CopyPlacement:
    """Place the copies, by the first rank of each node. Raises ConfigError, the same on all ranks."""
    if tier.spread == NODE_SPREAD:
        return place_copies([str(node) for node in range(len(leaders))], tier.copies)
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
    domains = [leader.domain for leader in leaders]
    if len(set(domains)) <= tier.copies:
        raise ConfigError(
            f"{of}, copies is {tier.copies}, and {len(domains)} nodes are in {len(set(domains))} "
            f"({format_some(sorted(set(domains)))}): no two of {tier.copies + 1} nodes with an image may be in the "
            f"same. Start in more, set copies to less, or spread to node"
        )
    return place_copies(domains, tier.copies)


def _warn(tier: PeerTierConfig, leaders: Sequence[PeerAddress], placement: CopyPlacement) -> None:
    """Log what the placement does not give, and where memory is short."""
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
    for node, leader in enumerate(leaders):
        if leader.lacks_bytes:
            assert tier.capacity_bytes is not None
            logger.warning(
                "open: tier %s: %s lacks memory: its capacity needs %s there (copies: %d), of which %s are not free: "
                "saves go on, but copies may be refused: %s",
                tier.name, _named([node], leaders), sized(tier.capacity_bytes * tier.copies), tier.copies,
                sized(leader.lacks_bytes), _HELPS,
            )  # fmt: skip


def _named(nodes: Sequence[int], leaders: Sequence[PeerAddress]) -> str:
    return format_some([f"node {node} ({leaders[node].node})" for node in nodes])


def _with_local_index(ranks: Sequence[int], index: int) -> int:
    return ranks[index % len(ranks)]


def _sender(node: int) -> str:
    return f"node-{node}"


def _own_address() -> str:
    """Return the address of this machine on the network that leads to rank 0."""
    master = os.environ.get("MASTER_ADDR") or socket.gethostname()
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        host: str = probe.getsockname()[0]
        return host
    return "127.0.0.1"
