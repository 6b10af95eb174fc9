"""Peer memory of a start: each rank serves this node's memory to others, and learns who keeps what it saves."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tierfall.backends.peer.backend import PeerBackend
from tierfall.backends.peer.kept import KeptFiles
from tierfall.backends.peer.server import PeerServer
from tierfall.backends.peer.view import PeerView
from tierfall.backends.peer.wire import SECRET_BYTES
from tierfall.backends.posix.backend import PosixBackend
from tierfall.config import Config, PeerTierConfig
from tierfall.core.ranks.messages import Message
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.runtime.bounded_calls import CallResult
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import RanksError, TierfallError
from tierfall.policies.placement import place_copies
from tierfall.tiers.arena.folder import is_in_memory, prepare_folder
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")

CallTiers = Callable[
    [Iterable[StoredTier], Callable[[StoredTier], None]], Mapping[str, CallResult[None]]
]
"""Makes a call of several tiers, each within its bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress(Message):
    """Where a rank serves its node's memory, and the failure domain of its node; or the ``error`` that keeps it from
    serving."""

    host: str = ""
    port: int = 0
    domain: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMeeting(Message):
    """The addresses of all ranks, by rank, and the secret that only ranks of this start know."""

    addresses: tuple[PeerAddress, ...]
    secret: str = field(repr=False)


class PeerMemory:
    """What this rank serves, and the node that keeps what this node writes. ``close`` ends the service."""

    def __init__(self, tier: PeerTierConfig, run: str, ranks: Ranks) -> None:
        """Meet the other ranks; all make this call. Raises RanksError."""
        self._tier, self._run = tier, run
        listener = socket.create_server(("", 0), backlog=128)
        try:
            mine = PeerAddress(
                host=_own_address(), port=listener.getsockname()[1], domain=_domain(ranks)
            )
            try:
                prepare_folder(tier.path)  # what is kept for others is nobody else's to read
            except TierfallError as error:
                mine = PeerAddress(error=f"tier {tier.name}: {error}")
            meeting = ranks.agree("open: peer memory", mine, _merge, PeerMeeting)
        except BaseException:
            listener.close()
            raise
        self._secret = bytes.fromhex(meeting.secret)
        nodes = ranks.topology.nodes
        placed = place_copies([meeting.addresses[node[0]].domain for node in nodes], 1)
        _, keeper = placed.holders[ranks.topology.node]
        others = nodes[keeper]
        self._keeper = meeting.addresses[others[ranks.local_index % len(others)]]
        self._sender = f"node-{ranks.topology.node}"
        self._server = PeerServer(
            secret=self._secret,
            run=run,
            storage=lambda sender: _open_kept(tier.path),
            listener=listener,
        )

    def open_backend(self) -> PeerView:
        """Open what this node sees of the tier."""
        remote = PeerBackend(
            (self._keeper.host, self._keeper.port),
            secret=self._secret,
            run=self._run,
            sender=self._sender,
        )
        return PeerView(PosixBackend(self._tier.path, direct_io=False), remote)

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
    """Return the configuration, without a peer tier where there is one node, and the peer memory, if it has any."""
    tier = config.peers
    if tier is None:
        return config, None
    if len(ranks.topology.nodes) > 1:
        return config, PeerMemory(tier, run, ranks)
    if ranks.topology.is_root:
        logger.info("open: there is one node, so tier %s is left out", tier.name)
    return config.without(tier.name), None


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


def _domain(ranks: Ranks) -> str:
    return os.environ.get("TIERFALL_DOMAIN") or f"node-{ranks.topology.node}"


def _own_address() -> str:
    """Return the address of this machine on the network that leads to rank 0."""
    master = os.environ.get("MASTER_ADDR") or socket.gethostname()
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        host: str = probe.getsockname()[0]
        return host
    return "127.0.0.1"
