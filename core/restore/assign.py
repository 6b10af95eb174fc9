"""Assignment: which rank reads a chunk for all ranks of a restore, and by which way it comes to each of them. Pure: the
result is the same on all ranks.

Ranks need chunks of images; ranks that need the same are one group. Every chunk that is needed is read once, by its
*owner*: a rank that sees it on the fastest tier, if possible one that needs it, and of those the one with the least to
read so far. Ranks of the owner's node get it from there. On each other node one rank, the *relay*, gets it for the
ranks of its node. It is passed on from node to node, beginning at the owner's: a relay gets it from the relay before
it, so that each node receives it once and sends it once.
"""

from __future__ import annotations

import heapq
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tierfall.core.ranks.messages import Message, NumberRanges
from tierfall.core.ranks.topology import Topology

HEADER = 0
"""The chunk that is an image's header."""
NODES_TRIED = 4
"""A chunk counts as unreadable once one rank of each of so many nodes could not read it: not each of a thousand ranks
tries."""

Chunk = tuple[int, int]
"""The rank that saved an image, and the number of a chunk in it."""
Holders = Mapping[int, Sequence[tuple[int, Sequence[int]]]]
"""For each image: tiers by their number in the chain, fastest first, each with the ranks that see it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup(Message):
    """Ranks that need the same chunks, by image."""

    ranks: NumberRanges
    chunks: Mapping[int, NumberRanges]


class AssignedChunk(NamedTuple):
    """A chunk that its ``owner`` reads for the groups of these numbers."""

    owner: int
    groups: tuple[int, ...]


def name_of(chunk: Chunk) -> str:
    """Return the name of a chunk in messages."""
    image, index = chunk
    what = "the header" if index == HEADER else f"chunk {index}"
    return f"{what} of rank {image}'s image"


def holders_of(seen: Mapping[int, Mapping[int, NumberRanges]]) -> Holders:
    """Return which ranks see each image on each tier; given is what each sees, by rank and tier. Images that the same
    ranks see share their tuple."""
    alike: dict[tuple[int, NumberRanges], list[int]] = {}
    for rank, tiers in seen.items():
        for each in tiers.items():
            alike.setdefault(each, []).append(rank)
    members = [*alike.values()]
    found: dict[int, dict[int, list[int]]] = {}
    for number, (tier, images) in enumerate(alike):
        for image in images:
            found.setdefault(image, {}).setdefault(tier, []).append(number)
    ranks: dict[tuple[int, ...], tuple[int, ...]] = {}

    def ranks_of(numbers: tuple[int, ...]) -> tuple[int, ...]:
        if numbers not in ranks:
            ranks[numbers] = tuple(sorted(r for n in numbers for r in members[n]))
        return ranks[numbers]

    return {
        image: [(tier, ranks_of(tuple(numbers))) for tier, numbers in sorted(tiers.items())]
        for image, tiers in found.items()
    }


def group_needs(
    needs: Mapping[int, Mapping[int, NumberRanges]], holders: Holders
) -> tuple[RankGroup, ...]:
    """Group ranks by what they need; no groups where each needs only its own image, and sees it on the fastest tier
    that any rank sees it on: then each reads for itself."""
    if all(
        chunks.keys() <= {rank} and all(rank in holders[i][0][1] for i in chunks if i in holders)
        for rank, chunks in needs.items()
    ):
        return ()
    found: dict[tuple[tuple[int, NumberRanges], ...], list[int]] = {}
    for rank, chunks in needs.items():
        if chunks:
            found.setdefault(tuple(sorted(chunks.items())), []).append(rank)
    return tuple(
        RankGroup(ranks=NumberRanges.of(ranks), chunks=dict(chunks))
        for chunks, ranks in found.items()
    )


# Owners ----------------------------------------------------------------------------------------------


def assign(groups: Sequence[RankGroup], holders: Holders) -> dict[Chunk, AssignedChunk]:
    """Choose the owner of each chunk that a group needs, image after image. A chunk that no rank sees has none."""
    owners = _Owners(groups, holders)
    items: dict[Chunk, AssignedChunk] = {}
    for image in sorted({image for group in groups for image in group.chunks} & holders.keys()):
        needing: dict[int, list[int]] = {}
        for number, group in enumerate(groups):
            for index in group.chunks.get(image, ()):
                needing.setdefault(index, []).append(number)
        for index, numbers in sorted(needing.items()):
            items[image, index] = owners.choose(image, tuple(numbers))
    return items


class _Owners:
    """The number of chunks that each rank has to read so far. Queues find the least busy rank without a look at each
    one."""

    def __init__(self, groups: Sequence[RankGroup], holders: Holders) -> None:
        self._holders = holders
        self._members = [frozenset(group.ranks) for group in groups]
        self._count: dict[int, int] = {}
        self._queues: dict[tuple[Sequence[int], tuple[int, ...]], list[tuple[int, int]]] = {}

    def choose(self, image: int, needing: tuple[int, ...]) -> AssignedChunk:
        able = self._holders[image][0][1]
        queue = self._queues.get((able, needing))
        if queue is None:
            needs = [rank for rank in able if any(rank in self._members[g] for g in needing)]
            queue = [(0, rank) for rank in needs or able]
            heapq.heapify(queue)
            self._queues[able, needing] = queue
        while True:  # counts only rise: the first whose count is current is the least
            count, rank = queue[0]
            now = self._count.get(rank, 0)
            if count == now:
                self._count[rank] = now + 1
                return AssignedChunk(rank, needing)
            heapq.heapreplace(queue, (now, rank))


def sources(
    holders: Holders, image: int, owner: int | None, node_of: Mapping[int, int]
) -> Iterator[int]:
    """Yield the ranks that are asked for a chunk, one after the other, until one has it good: its owner, then one rank
    of each other node that sees the image, fastest tier first. The same for all ranks that need the chunk. A header has
    no owner: the rank that saved the image is the first, if all see it alike."""
    tried: set[int] = set()
    if owner is not None:
        yield owner
        tried.add(node_of[owner])
    for _, ranks in holders.get(image, ()):
        first = image % len(ranks) if owner is None else bisect(ranks, owner)
        for rank in (*ranks[first:], *ranks[:first]):
            if len(tried) == NODES_TRIED:
                return
            if node_of[rank] not in tried:
                tried.add(node_of[rank])
                yield rank


# Ways ------------------------------------------------------------------------------------------------


def relay_of(chunk: Chunk, needing: Sequence[int]) -> int:
    """Return which of the ranks of a node that need a chunk gets it for the others from another node."""
    image, index = chunk
    return needing[(image + index) % len(needing)]


def takers_of(
    chunk: Chunk, item: AssignedChunk, groups: Sequence[RankGroup], topology: Topology
) -> frozenset[int]:
    """Return the ranks that get a chunk from this one, itself included if it needs it: from its owner, or the relay of
    another node, the ranks of its node and the next relay; none from any other rank."""
    rank, node = topology.rank, topology.node
    here = needing_on_node(item, groups, topology, node)
    if rank != item.owner:
        is_relay = item.owner not in topology.local_ranks and here and relay_of(chunk, here) == rank
        if not is_relay:
            return frozenset()
    following = range(node + 1, node + len(topology.nodes))
    return frozenset((*here, *_first_relay(chunk, item, groups, topology, following)))


def previous_of(
    chunk: Chunk, item: AssignedChunk, groups: Sequence[RankGroup], topology: Topology
) -> int:
    """Return the rank that the relay of this node gets a chunk from."""
    before = range(topology.node - 1, topology.node - len(topology.nodes), -1)
    return next(_first_relay(chunk, item, groups, topology, before), item.owner)


def _first_relay(
    chunk: Chunk,
    item: AssignedChunk,
    groups: Sequence[RankGroup],
    topology: Topology,
    places: Iterable[int],
) -> Iterator[int]:
    """Yield the relay of the first node that has one, of these ``places``, up to the owner's node."""
    for place in places:
        node = place % len(topology.nodes)
        if node == topology.node_of[item.owner]:
            return
        if there := needing_on_node(item, groups, topology, node):
            yield relay_of(chunk, there)
            return


def needing_on_node(
    item: AssignedChunk, groups: Sequence[RankGroup], topology: Topology, node: int
) -> list[int]:
    """Return the ranks of a node that need a chunk, ascending."""
    return [
        rank
        for rank in topology.nodes[node]
        if any(rank in groups[number].ranks for number in item.groups)
    ]


def sender_of(
    chunk: Chunk, item: AssignedChunk, groups: Sequence[RankGroup], topology: Topology
) -> int:
    """Return the rank that this one gets a chunk from: its owner, which may be this rank, on the same node; else the
    relay of this node, or if this rank is that, the relay of a node before."""
    if item.owner in topology.local_ranks:
        return item.owner
    relay = relay_of(chunk, needing_on_node(item, groups, topology, topology.node))
    return relay if relay != topology.rank else previous_of(chunk, item, groups, topology)
