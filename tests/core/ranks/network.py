"""Councils of all ranks in one process: messages lie in the network until it delivers them, in an order drawn from a
seed, and are counted. Two messages from one rank to another keep their order, as in the post.

    network = Network(["a", "a", "b", "b"], seed=1)
    for message_tree in network.message_trees:
        message_tree.contribute(("x",), message_tree.topology.rank)
    network.deliver()
    print(network.sent)
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tierfall.core.ranks.message_tree import (
    DecisionAnnounced,
    MessagesGathered,
    MessageTree,
    RankMessage,
    RankReported,
)
from tierfall.core.ranks.topology import FAN_OUT, Topology

Pair = tuple[int, int]


class Network:
    """The message trees of all ranks. ``heard`` lists what each was told, as (event, topic, bodies or body, ...)."""

    def __init__(self, node_of: Sequence[object], *, seed: int = 0, fan_out: int = FAN_OUT) -> None:
        self._random = random.Random(seed)
        self._lines: dict[Pair, deque[bytes]] = {}
        self._waiting: list[Pair] = []  # the pairs whose line is not empty
        self.sent = 0
        self.lost: set[int] = set()  # what is sent to these ranks is never delivered
        self.heard: list[list[tuple[Any, ...]]] = [[] for _ in node_of]
        first = Topology.of(0, node_of, fan_out=fan_out)
        topologies = [Topology(rank, first.nodes, fan_out) for rank in range(len(node_of))]
        self.message_trees = [self._message_tree(topology) for topology in topologies]

    def deliver(self, limit: int | None = None) -> None:
        """Deliver what was sent, and what that causes, until nothing is left or that many were delivered."""
        while self._waiting and limit != 0:
            limit = None if limit is None else limit - 1
            self._deliver_one()

    @property
    def waiting(self) -> bool:
        """Say whether something was sent and not delivered."""
        return bool(self._waiting)

    def _deliver_one(self) -> None:
        which = self._random.randrange(len(self._waiting))
        pair = self._waiting[which]
        line = self._lines[pair]
        data = line.popleft()
        if not line:
            self._waiting[which] = self._waiting[-1]
            self._waiting.pop()
        if pair[1] in self.lost:
            return
        self.message_trees[pair[1]].receive(data, pair[0])

    def _message_tree(self, topology: Topology) -> MessageTree:
        message_tree = MessageTree(topology, self._sender(topology.rank))
        heard = self.heard[topology.rank]

        def hear(message: RankMessage) -> None:
            topic = message.topic
            match message:
                case MessagesGathered():
                    what = "passed" if message.passed else "gathered"
                    heard.append((what, topic, message.bodies))
                case DecisionAnnounced():
                    heard.append(("announced", topic, message.body))
                case RankReported():
                    heard.append(("told", topic, message.body, message.rank))

        message_tree.on_message = hear
        return message_tree

    def _sender(self, source: int) -> Callable[[int, bytes], None]:
        def send(target: int, data: bytes) -> None:
            line = self._lines.setdefault((source, target), deque())
            if not line:
                self._waiting.append((source, target))
            line.append(data)
            self.sent += 1

        return send
