"""How long a commit of 10,000 ranks takes beyond its I/O: the real message trees, on clocks of their own.

Each rank has a clock. A message costs its receiver a round trip to the store and the CPU time that the real code takes
for it here; it costs its sender a push. What stands in docs/many-ranks.md is what this prints in
``make torture``.
"""

from __future__ import annotations

import gc
import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tierfall.core.format.records import Commit, Lineage, NamedFile
from tierfall.core.ranks.message_tree import MessagesGathered, MessageTree, RankMessage
from tierfall.core.ranks.messages import Topic
from tierfall.core.ranks.topology import Topology
from tierfall.core.types import keys
from tierfall.core.types.values import CheckpointId, Shard

ROUND_TRIP_S = 200e-6
"""A pop from a store on another machine. On this one it takes 35 us."""
PUSH_S = 20e-6
LANDED: Topic = ("landed", 400, 7, "store")


@pytest.fixture(autouse=True)
def frozen_again() -> Iterator[None]:
    """What the session had frozen is frozen again: ``Clocks.run`` thaws all."""
    yield
    gc.collect()
    gc.freeze()


class Clocks:
    """Delivers messages in the order of their arrival, and adds up what each rank spends on them."""

    def __init__(self, node_of: list[int]) -> None:
        first = Topology.of(0, node_of)
        self.now_s = [0.0] * len(node_of)
        self.received: Counter[int] = Counter()
        self._on_the_way: list[tuple[float, int, int, int, bytes]] = []
        self._number = 0
        self.message_trees = [
            MessageTree(Topology(rank, first.nodes), self._sender(rank))
            for rank in range(len(node_of))
        ]

    def run(self) -> float:
        """Deliver everything; return when the last rank was done."""
        # No rank has the memory of all of them (and of this test run) for its collector to walk.
        gc.freeze()
        try:
            while self._on_the_way:
                arrived_s, _, source, rank, data = heapq.heappop(self._on_the_way)
                self.received[rank] += 1
                self.now_s[rank] = max(self.now_s[rank], arrived_s) + ROUND_TRIP_S
                receive = self.message_trees[rank].receive
                self.timed(rank, partial(receive, data, source))
        finally:
            gc.unfreeze()
        return max(self.now_s)

    def timed(self, rank: int, act: Callable[[], Any]) -> None:
        # Each rank has a core to itself: what others do on this machine meanwhile is not its time.
        began = time.thread_time()
        act()
        self.now_s[rank] += time.thread_time() - began

    def _sender(self, source: int) -> Callable[[int, bytes], None]:
        def send(target: int, data: bytes) -> None:
            self.now_s[source] += PUSH_S
            self._number += 1
            entry = (self.now_s[source], self._number, source, target, data)
            heapq.heappush(self._on_the_way, entry)

        return send


@pytest.mark.parametrize("ranks", [1000, pytest.param(10_000, marks=pytest.mark.torture)])
def test_a_commit_of_many_ranks_is_decided_and_received_within_a_second(ranks: int) -> None:
    clocks = Clocks([rank // 8 for rank in range(ranks)])
    root = clocks.message_trees[0]
    records: list[bytes] = []

    def commit(message: RankMessage) -> None:
        if isinstance(message, MessagesGathered):
            records.append(_record(message.bodies))
            root.announce(("there", 400, 7, "store"), {"0": 1})

    root.on_message = commit
    for rank, message_tree in enumerate(clocks.message_trees):
        shard = Shard(rank, ranks)
        body = [
            [keys.shard_name(shard), 10**10, None, None],
            [keys.manifest_name(shard), 10**5, "sha256:" + "0" * 64, None],
        ]
        clocks.timed(
            rank, lambda message_tree=message_tree, body=body: message_tree.contribute(LANDED, body)
        )
    seconds = clocks.run()
    most = max(clocks.received.values())
    print(
        f"{ranks} ranks: {seconds:.3f} s, {len(records[0]) / 1e6:.1f} MB of commit record, {most} messages at most"
    )
    assert len(records) == 1
    assert most <= 64 + 7 + 1, "64 leaders and 7 ranks of its node speak, and one decision is heard"
    assert seconds < 1.0


def _record(bodies: dict[int, Any]) -> bytes:
    line = Lineage(
        run="r", checkpoint=CheckpointId(400, 7), attempt_id="0" * 32, ordinal=4, started_from=None
    )
    files = tuple(
        NamedFile(name=name, bytes=size, digest=digest, raw_bytes=raw)
        for body in bodies.values()
        for name, size, digest, raw in body
    )
    return Commit(
        lineage=line, world_size=len(bodies), files=files, nodes=(), wall_time_s=1.0
    ).encode()
