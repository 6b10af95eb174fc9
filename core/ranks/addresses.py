"""The addresses of this node, and which of them other nodes reach."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import NamedTuple

from tierfall.core.types.errors import ConfigError
from tierfall.core.types.text import format_some

Address = IPv4Address | IPv6Address
LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_LINK_LOCAL = "20"


class InterfaceAddress(NamedTuple):
    """An address of this node, and the interface that has it."""

    interface: str
    address: Address


def own_address(interface: str | None = None) -> str:
    """Return the address of this node on ``interface``, which is a name such as ib0 or a subnet such as 10.1.0.0/16;
    without one, that on the network that leads to rank 0.

    Raises ConfigError if this node has no address there.
    """
    if interface is None:
        return address_towards(os.environ.get("MASTER_ADDR") or socket.gethostname())
    known = addresses_of_node()
    try:
        subnet = ip_network(interface, strict=False)
    except ValueError:
        found = [each for each in known if each.interface == interface]
    else:
        found = [each for each in known if each.address in subnet]
    if not found:
        have = format_some([f"{name} ({address})" for name, address in known])
        raise ConfigError(
            f"interface is {interface}, and this node, {socket.gethostname()}, has no address there: it has {have}"
        )
    return str(found[0].address)


def addresses_of_node() -> list[InterfaceAddress]:
    """Return the addresses of each interface, IPv4 before IPv6. An address that is valid on one link alone is left
    out."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(InterfaceAddress(name, IPv4Address(answer[20:24])))
    with suppress(FileNotFoundError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text("ascii").splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != _LINK_LOCAL:
                found.append(InterfaceAddress(name, IPv6Address(int(digits, 16))))
    return found


def address_towards(other: str) -> str:
    """Return the address of this node on the network that leads to the host ``other``, by IPv4 if one does; that of the
    loopback interface if none does."""
    with suppress(OSError):
        found = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)
        for family, kind, *_, place in sorted(found, key=lambda each: each[0] != socket.AF_INET):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)  # sends nothing
                return str(probe.getsockname()[0])
    return LOOPBACK


def is_loopback(address: str) -> bool:
    """Return whether no other node reaches an address."""
    return ip_address(address).is_loopback


def listen(address: str = "") -> socket.socket:
    """Return a socket that listens on a free port of an address of this node; without one, on those of all interfaces,
    by IPv4 and IPv6. Raises OSError."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=128)
    with suppress(OSError):  # IPv6 may be switched off
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128
            )
    return socket.create_server(("", 0), backlog=128)
