"""Peer memory of 10,000 ranks on 1,250 nodes, by the real placement and message trees."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tierfall.policies.placement import place_copies

RANKS, LOCAL = 10_000, 8
NODES = RANKS // LOCAL


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
