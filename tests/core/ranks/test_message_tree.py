"""Contributions of all ranks reach rank 0 once; announcements reach all ranks in one order; no rank is flooded."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.core.ranks.network import Network
from tierfall.core.ranks.messages import Topic

X: Topic = ("x", 7)
NODES = {
    "one rank": ["a"],
    "one node": ["a"] * 4,
    "two nodes": ["a", "a", "b", "b"],
    "interleaved": ["a", "b", "a", "b", "c"],
    "a tree of nodes": [rank // 2 for rank in range(26)],
}


@pytest.fixture(params=[(name, seed) for name in NODES for seed in range(2)], ids=str)
def network(request: pytest.FixtureRequest) -> Network:
    name, seed = request.param
    return Network(NODES[name], seed=seed, fan_out=2)


def everybody(network: Network) -> range:
    return range(len(network.message_trees))


def shuffled(network: Network, seed: int = 0) -> list[int]:
    ranks = list(everybody(network))
    random.Random(seed).shuffle(ranks)
    return ranks


def heard(network: Network, rank: int, event: str) -> list[tuple[Any, ...]]:
    return [what[1:] for what in network.heard[rank] if what[0] == event]


def contribute(network: Network, *ranks: int, topic: Topic = X) -> None:
    for rank in ranks:
        network.message_trees[rank].contribute(topic, {"of": rank})


def of(*ranks: int) -> dict[int, dict[str, int]]:
    return {rank: {"of": rank} for rank in ranks}


def test_what_all_say_comes_together_at_rank_0_once(network: Network) -> None:
    for rank in shuffled(network):
        assert not heard(network, 0, "gathered")
        contribute(network, rank)
        network.deliver(3)
    network.deliver()
    assert heard(network, 0, "gathered") == [(X, of(*everybody(network)))]


def test_all_ranks_hear_announcements_in_their_order(network: Network) -> None:
    for number in range(20):
        network.message_trees[0].announce(("a", number % 3), {"number": number})
        network.deliver(number % 5)
    network.deliver()
    for rank in everybody(network):
        announced = heard(network, rank, "announced")
        assert announced == [(("a", number % 3), {"number": number}) for number in range(20)]


def test_rank_0_learns_who_has_sent_and_gets_the_rest_later(network: Network) -> None:
    """A rank is named as missing only if it has not spoken, also below a leader that has not; what comes afterwards is
    handed on as it comes, and what was handed on is not sent again."""
    late = set(shuffled(network, 3)[: len(network.message_trees) // 2])
    afterwards = sorted(late)[::2]
    early = [rank for rank in everybody(network) if rank not in late]
    contribute(network, *early)
    network.deliver()
    network.message_trees[0].flush_partial(X)
    network.deliver()
    assert network.message_trees[0].missing(X) == (tuple(sorted(late)) if early else ())
    contribute(network, *afterwards)
    network.deliver()
    assert network.message_trees[0].missing(X) == tuple(sorted(late - set(afterwards)))
    assert bool(heard(network, 0, "gathered")) == (late == set(afterwards))
    before = network.sent
    network.message_trees[0].flush_partial(X)
    network.deliver()
    assert network.sent - before == len(network.message_trees[0].topology.leaders) - 1
    contribute(network, *(late - set(afterwards)))
    network.deliver()
    assert heard(network, 0, "gathered") == [(X, of(*everybody(network)))]
