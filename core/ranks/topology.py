"""Who takes part: ranks, their nodes, and the tree along which their messages go. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

FAN_OUT = 64
"""No rank hands anything to more leaders of nodes than this."""


@dataclass(frozen=True)
class Topology:
    """One rank's place among all. ``nodes`` lists the ranks of each node, each list rising, the nodes by their first.

    The first rank of a node is its leader; rank 0 leads its own node, and everything. Leaders form a tree with at most
    ``fan_out`` branches; the other ranks of a node hang on their leader.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]
    fan_out: int = field(default=FAN_OUT, compare=False)

    @classmethod
    def of(cls, rank: int, node_of: Sequence[object], *, fan_out: int = FAN_OUT) -> Topology:
        """``node_of`` names the node of each rank by anything that tells nodes apart."""
        nodes: dict[object, list[int]] = {}
        for other, node in enumerate(node_of):
            nodes.setdefault(node, []).append(other)
        return cls(rank, tuple(tuple(ranks) for ranks in nodes.values()), fan_out)

    @cached_property
    def world_size(self) -> int:
        return sum(len(ranks) for ranks in self.nodes)

    @cached_property
    def node(self) -> int:
        """Which of the nodes this rank is on."""
        return next(number for number, ranks in enumerate(self.nodes) if self.rank in ranks)

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """All ranks of this node."""
        return self.nodes[self.node]

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        return tuple(ranks[0] for ranks in self.nodes)

    @property
    def is_root(self) -> bool:
        return self.rank == 0

    @property
    def is_leader(self) -> bool:
        return self.rank == self.local_ranks[0]

    @cached_property
    def parent(self) -> int | None:
        """Whom this rank tells; None for rank 0."""
        if not self.is_leader:
            return self.local_ranks[0]
        return None if self.node == 0 else self.leaders[(self.node - 1) // self.fan_out]

    @cached_property
    def children(self) -> tuple[int, ...]:
        """Who tells this rank."""
        if not self.is_leader:
            return ()
        first = self.fan_out * self.node + 1
        return (*self.leaders[first : first + self.fan_out], *self.local_ranks[1:])

    @cached_property
    def below(self) -> frozenset[int]:
        """This rank, and every rank whose messages come through it."""
        if not self.is_leader:
            return frozenset((self.rank,))
        found: set[int] = set()
        nodes = [self.node]
        while nodes:
            node = nodes.pop()
            found.update(self.nodes[node])
            first = self.fan_out * node + 1
            nodes.extend(range(first, min(first + self.fan_out, len(self.nodes))))
        return frozenset(found)


ALONE = Topology(0, ((0,),))
