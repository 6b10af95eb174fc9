"""Peer memory of 10,000 ranks on 1,250 nodes, by the real placement and message trees."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tests.core.ranks.network import Network
from tierfall.core.ranks.message_tree import Bodies
from tierfall.core.ranks.messages import Topic
from tierfall.core.ranks.topology import FAN_OUT
from tierfall.policies.placement import place_copies
from tierfall.setup.peers import PeerAddress, PeerMeeting, _merge

RANKS, LOCAL = 10_000, 8
NODES = RANKS // LOCAL
MEETING: Topic = ("open: peer memory", 1, 1, "")


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("nodes", [NODES, NODES - 1, NODES - 3])
@pytest.mark.parametrize("rack", [1, 16])
def test_copies_of_ten_thousand_ranks_are_placed_within_a_second(
    nodes: int, copies: int, rack: int
) -> None:
    domains = [f"rack {node // rack}" for node in range(nodes)]
    began = time.thread_time()
    placed = place_copies(domains, copies)
    seconds = time.thread_time() - began
    assert seconds < 1.0
    kept = Counter(holder for _, *others in placed.holders for holder in others)
    assert {*kept.values()} == {copies}, "each node keeps so many others' images"
    assert not placed.crowded


def test_ten_thousand_ranks_meet_by_one_message_from_each_child_of_rank_0() -> None:
    network = Network([rank // LOCAL for rank in range(RANKS)])
    meetings: list[PeerMeeting] = []

    def gathered(topic: Topic, bodies: Bodies) -> None:
        found = {rank: PeerAddress.from_json(body, rank=rank) for rank, body in bodies.items()}
        meetings.append(_merge(found))

    network.message_trees[0].on_gathered = gathered
    for rank, message_tree in enumerate(network.message_trees):
        address = PeerAddress(host="10.0.0.1", port=20_000 + rank % LOCAL, domain=f"rack {rank}")
        message_tree.contribute(MEETING, address.to_json())
    network.deliver()
    assert len(meetings) == 1
    assert len(meetings[0].addresses) == RANKS
    assert network.received[0] <= FAN_OUT + LOCAL - 1
    assert max(network.received.values()) <= FAN_OUT + LOCAL - 1
