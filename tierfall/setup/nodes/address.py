"""The address at which a rank serves its node's memory to other nodes."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address

from tierfall.setup.nodes.placement import PeerAddress


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
