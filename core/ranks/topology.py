"""The ranks of a run, their nodes, and the tree that their messages pass through. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

FAN_OUT = 64
"""The most leaders of nodes that one rank sends to."""


@dataclass(frozen=True)
class Topology:
    """The tree, seen from ``rank``. ``nodes`` lists the ranks of each node, ascending; nodes are sorted by their first.

    The first rank of a node is its leader; rank 0 is the root. Leaders form a tree with at most ``fan_out`` children
    each; the other ranks of a node are children of their leader. ``core_sharers`` counts the ranks of this node that
    run on the same processor cores as this one, itself included.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]
    fan_out: int = field(default=FAN_OUT, compare=False)
    core_sharers: int = field(default=1, compare=False)

    @classmethod
    def of(
        cls,
        rank: int,
        node_of: Sequence[object],
        *,
        fan_out: int = FAN_OUT,
        cores_of: Sequence[str] = (),
    ) -> Topology:
        """``node_of`` holds the node of each rank: any values that tell nodes apart; ``cores_of`` the cores that each
        may run on (``cores.core_mask``)."""
        nodes: dict[object, list[int]] = {}
        for other, node in enumerate(node_of):
            nodes.setdefault(node, []).append(other)
        local = nodes[node_of[rank]]
        sharers = [other for other in local if cores_of and cores_of[other] == cores_of[rank]]
        return cls(
            rank, tuple(tuple(ranks) for ranks in nodes.values()), fan_out, max(1, len(sharers))
        )

    @cached_property
    def world_size(self) -> int:
        return sum(len(ranks) for ranks in self.nodes)

    @cached_property
    def node(self) -> int:
        """The number of this rank's node."""
        return self.node_of[self.rank]

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """All ranks of this rank's node."""
        return self.nodes[self.node]

    @cached_property
    def node_of(self) -> dict[int, int]:
        """The number of each rank's node."""
        return {rank: number for number, ranks in enumerate(self.nodes) for rank in ranks}

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        return tuple(ranks[0] for ranks in self.nodes)

    def name_rank(self, rank: int, text: str) -> str:
        """Return what a rank reports, with its name where there are others."""
        return f"rank {rank}: {text}" if self.world_size > 1 else text

    @property
    def is_root(self) -> bool:
        return self.rank == 0

    @property
    def is_leader(self) -> bool:
        return self.rank == self.local_ranks[0]

    @cached_property
    def parent(self) -> int | None:
        """The rank that this one forwards to; None for rank 0."""
        if not self.is_leader:
            return self.local_ranks[0]
        return None if self.node == 0 else self.leaders[(self.node - 1) // self.fan_out]

    @cached_property
    def children(self) -> tuple[int, ...]:
        """The ranks that forward to this one."""
        if not self.is_leader:
            return ()
        first = self.fan_out * self.node + 1
        return (*self.leaders[first : first + self.fan_out], *self.local_ranks[1:])

    @cached_property
    def below(self) -> frozenset[int]:
        """This rank, and every rank whose messages pass through it."""
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
