"""Which checkpoints too few nodes have, by what all ranks have found at a start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tierfall.core.format.catalog import Listing, merge, starts_in
from tierfall.core.format.commit_files import ranks_with_image
from tierfall.core.format.records import Commit
from tierfall.core.restore.agreement import whole_on
from tierfall.core.restore.inventory import Inventory
from tierfall.core.types.values import CheckpointId


def on_few_nodes(
    listings: Sequence[Listing],
    inventories: Mapping[int, Inventory],
    *,
    copies: Mapping[str, int],
    whole: Collection[CheckpointId],
    host: str,
) -> dict[str, dict[CheckpointId, bool]]:
    """Return, per tier of ``copies``, the checkpoints of which a node has a commit record there, and too few nodes an
    image: nodes are lost, or a start ended while it sent them.

    ``copies`` says how many nodes are to have each image, beside host memory, which is the tier ``host``. Of ``whole``
    checkpoints all images are on some tier; others are left out. ``listings`` are the ``inventories`` of all ranks,
    merged. A checkpoint may have been reported as committed if an image of it in memory says so, or if memory has none.
    Nobody counts on one that is abandoned, or was deleted by a person: the value is False.
    """
    if not copies:
        return {}
    known = merge(_only(whole, listings))
    may_be_reported = {
        one.id: one.live and (host not in one.copies or one.copies[host].on_peers) for one in known
    }
    return {
        listing.tier: {
            copy.id: may_be_reported[copy.id]
            for copy in listing.copies
            if copy.commit is not None
            and copy.id in may_be_reported
            and _fewest(inventories, listing.tier, copy.commit) < copies[listing.tier]
        }
        for listing in listings
        if listing.tier in copies
    }


def _only(ids: Collection[CheckpointId], listings: Sequence[Listing]) -> list[Listing]:
    """Leave out other checkpoints: what was never whole abandons nothing."""
    starts = starts_in(listings, ids)
    return [
        replace(listing, starts=starts, copies=tuple(c for c in listing.copies if c.id in ids))
        for listing in listings
    ]


def _fewest(inventories: Mapping[int, Inventory], tier: str, commit: Commit) -> int:
    """Return on how many nodes the rarest image of a checkpoint is."""
    nodes: Counter[int] = Counter()
    for rank, tiers in inventories.items():
        for copy in tiers[tier].copies if tier in tiers else ():
            if copy.id == commit.lineage.checkpoint and copy.damage is None:
                found = copy.commit_of(rank, tier)
                if found is not None and found.lineage == commit.lineage:
                    nodes.update(ranks_with_image(found, commit.world_size))
    return min(nodes[rank] for rank in range(commit.world_size))


def whole_on_each(
    listings: Sequence[Listing], few: Mapping[str, Collection[CheckpointId]], *, host: str
) -> dict[str, frozenset[CheckpointId]]:
    """Return, per tier, the checkpoints of which every shard is on it. One that is on too ``few`` nodes and whole in
    memory does not count: memory makes again what is missing."""
    whole = {x.tier: frozenset(c.id for c in x.copies if whole_on(x, c.id)) for x in listings}
    in_memory = whole.get(host, frozenset())
    return {tier: found - (in_memory & set(few.get(tier, ()))) for tier, found in whole.items()}
