"""The addresses of this node: by the network that leads to another, by the name of an interface, by a subnet."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import pytest

from tierfall.core.ranks.addresses import addresses_of_node, is_loopback, listen, own_address
from tierfall.core.types.errors import ConfigError

HAS_IPV6 = any(str(each.address) == "::1" for each in addresses_of_node())
only_with_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")


def test_an_interface_is_named_or_given_by_its_subnet() -> None:
    assert own_address("lo") == own_address("127.0.0.0/8") == "127.0.0.1"


@only_with_ipv6
def test_a_network_may_have_ipv6_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address("::1/128") == "::1"
    monkeypatch.setenv("MASTER_ADDR", "::1")
    assert own_address() == "::1"


@pytest.mark.parametrize("interface", ["ib7", "203.0.113.0/24"])
def test_a_node_without_an_address_there_says_which_it_has(interface: str) -> None:
    with pytest.raises(ConfigError, match=rf"interface is {interface}.*lo \(127\.0\.0\.1\)"):
        own_address(interface)


@pytest.mark.parametrize("address", ["", "127.0.0.1", pytest.param("::1", marks=only_with_ipv6)])
def test_who_listens_is_reached_by_each_address_of_it(address: str) -> None:
    own = [str(each.address) for each in addresses_of_node() if is_loopback(str(each.address))]
    with listen(address) as listener:
        port = listener.getsockname()[1]
        for target in [address] if address else own:
            with socket.create_connection((target, port), 5) as client:
                accepted, _ = listener.accept()
                accepted.close()
                assert ip_address(client.getpeername()[0]) == ip_address(target)
