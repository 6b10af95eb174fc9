"""How many nodes have each checkpoint, by what all ranks have found at a start."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tierfall.core.format.catalog import Listing, merge
from tierfall.core.format.commit_files import ranks_with_image
from tierfall.core.ranks.topology import Topology
from tierfall.core.restore.agreement import complete, whole_on
from tierfall.core.restore.inventory import Inventory
from tierfall.core.types.values import CheckpointId

OnFewNodes = Mapping[CheckpointId, int]
"""Checkpoints, each with how many nodes have the image that the fewest have."""
_Life = tuple[CheckpointId, str]
_NodesByRank = dict[_Life, dict[int, set[int]]]
"""Per checkpoint and attempt, the nodes that have the image of each rank."""


def on_few_nodes(
    listings: Sequence[Listing],
    inventories: Mapping[int, Inventory],
    topology: Topology,
    *,
    copies: Mapping[str, int],
    host: str,
) -> dict[str, dict[CheckpointId, int]]:
    """Return, per tier of ``copies``, the live checkpoints that were committed there, or nearly, and of which some
    image is on fewer nodes than that: nodes are lost, or a start ended while it sent them. All of their images are on
    some tier.

    The images in host memory, of the tier ``host``, are not among these copies. The result counts them: one that was
    saved with all copies may have them alone now. ``listings`` are the ``inventories`` of all ranks, merged.
    """
    whole_somewhere, _ = complete(listings)
    left = {known.id for known in merge(listings) if known.abandoned}
    node_of = {rank: node for node, ranks in enumerate(topology.nodes) for rank in ranks}
    in_memory = _nodes_by_rank(inventories, host, node_of)
    found: dict[str, dict[CheckpointId, int]] = {}
    for listing in (x for x in listings if x.tier in copies):
        on_tier = _nodes_by_rank(inventories, listing.tier, node_of)
        few = found.setdefault(listing.tier, {})
        for copy in listing.copies:
            if copy.commit is None or copy.id not in whole_somewhere - left:
                continue
            life = copy.id, copy.commit.lineage.attempt_id
            kept, own = on_tier.get(life, {}), in_memory.get(life, {})
            ranks = range(copy.commit.world_size)
            if any(len(kept.get(rank, ())) < copies[listing.tier] for rank in ranks):
                few[copy.id] = min(len(kept.get(r, set()) | own.get(r, set())) for r in ranks)
    return found


def _nodes_by_rank(
    inventories: Mapping[int, Inventory], tier: str, node_of: Mapping[int, int]
) -> _NodesByRank:
    found: _NodesByRank = {}
    for reporter, tiers in inventories.items():
        for copy in tiers[tier].copies if tier in tiers else ():
            commit = copy.commit_of(reporter, tier) if copy.damage is None else None
            if commit is not None:
                nodes = found.setdefault((copy.id, commit.lineage.attempt_id), {})
                for rank in ranks_with_image(commit, commit.world_size):
                    nodes.setdefault(rank, set()).add(node_of[reporter])
    return found


def whole_on_each(
    listings: Sequence[Listing], few: Mapping[str, Collection[CheckpointId]], *, host: str
) -> dict[str, frozenset[CheckpointId]]:
    """Return, per tier, the checkpoints of which every shard is on it. One that is on too ``few`` nodes and whole in
    memory does not count: memory makes again what is missing."""
    whole = {x.tier: frozenset(c.id for c in x.copies if whole_on(x, c.id)) for x in listings}
    in_memory = whole.get(host, frozenset())
    return {tier: found - (in_memory & set(few.get(tier, ()))) for tier, found in whole.items()}
