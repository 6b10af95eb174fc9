"""Placing copies on the nodes of a start, by what each node reports, its address included; and what cannot be
placed."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from ipaddress import ip_address

from tierfall.config import PeerTierConfig
from tierfall.config.model import NODE_SPREAD
from tierfall.core.ranks.domains import VARIABLE
from tierfall.core.ranks.messages import Message
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.text import format_some
from tierfall.policies.placement import CopyPlacement, place_copies

logger = logging.getLogger("tierfall")

HELPS = (
    "raise the size of /dev/shm (mount -o remount,size=..., or --shm-size of a container), set the tier's path to a "
    "larger file system in memory, or have fewer copies"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress(Message):
    """Where a rank serves its node's memory; the name and the failure domain of its node, and where that is known from;
    the id of the node's memory. Or the ``error`` that keeps it from serving."""

    host: str = ""
    port: int = 0
    node: str = ""
    domain: str = ""
    source: str = ""
    memory_id: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMeeting(Message):
    """The addresses of all ranks, by rank, and the secret that only ranks of this start know."""

    addresses: tuple[PeerAddress, ...]
    secret: str = field(repr=False)


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


def own_address() -> str:
    """Return the address of this machine on the network that leads to rank 0."""
    return _address_towards(os.environ.get("MASTER_ADDR") or socket.gethostname())


def address_to_probe(addresses: Sequence[PeerAddress]) -> str | None:
    """Return the address of another machine if some ranks know only one of their own that no other machine reaches.

    On the machine of rank 0 its own name often leads there: /etc/hosts of many distributions has 127.0.1.1 for it.
    None where all ranks know only such addresses: they are on one machine.
    """
    others = [address.host for address in addresses if not _is_loopback(address.host)]
    return others[0] if 0 < len(others) < len(addresses) else None


def reachable(mine: PeerAddress, other: str) -> PeerAddress:
    """Return ``mine``; if other machines cannot reach it, with the address on the network that leads to ``other``."""
    return replace(mine, host=_address_towards(other)) if _is_loopback(mine.host) else mine


def _is_loopback(host: str) -> bool:
    return ip_address(host).is_loopback


def _address_towards(other: str) -> str:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing
        host: str = probe.getsockname()[0]
        return host
    return "127.0.0.1"
