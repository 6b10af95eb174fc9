"""The inventories of all ranks are merged into one view of the tiers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from several_help import sharded

from tierfall.core.format.catalog import FoundCopy, Listing
from tierfall.core.format.records import Commit
from tierfall.core.restore.inventory import TierMessage, describe, merge_ranks
from tierfall.core.types.errors import (
    IntegrityError,
    RanksError,
)
from tierfall.core.types.values import CheckpointId, CopyState

ID = CheckpointId(5, 1)


def found(commit: Commit | None, **members: Any) -> FoundCopy:
    known = {"id": ID, "state": CopyState.COMMITTED, "bytes": 100, "commit": commit}
    return FoundCopy(**(known | members))


def part(rank: int, **members: Any) -> Commit:
    return replace(sharded(5, rank, 2).commit, **members)


def merged(*copies: FoundCopy | None, tier: str = "nvme") -> Listing:
    """What rank 0, 1, ... hold of one tier, as rank 0 sees it."""
    described = {
        rank: describe([Listing(tier=tier, copies=(copy,) if copy else ())], mine=[tier])
        for rank, copy in enumerate(copies)
    }
    (listing,) = merge_ranks(carried(described), [tier])
    return listing


def carried(described: dict[int, dict[str, TierMessage]]) -> dict[int, dict[str, TierMessage]]:
    """As it comes to rank 0."""
    return {
        rank: {
            tier: TierMessage.from_json(json.loads(json.dumps(one.to_json())), rank=rank)
            for tier, one in tiers.items()
        }
        for rank, tiers in described.items()
    }


def only(listing: Listing) -> FoundCopy:
    (copy,) = listing.copies
    return copy


def test_a_tier_that_nobody_has_looked_at_is_not_taken_for_empty() -> None:
    (listing,) = merge_ranks({0: {}, 1: {}}, ["nvme"])
    assert isinstance(listing.error, RanksError)
    assert "no rank has looked at tier nvme" in str(listing.error)


def test_two_records_that_name_different_files_of_one_name_are_damage() -> None:
    record = part(0)
    image = replace(record.files[0], bytes=record.files[0].bytes + 1)
    copy = only(merged(found(record), found(replace(record, files=(image, record.files[1])))))
    assert copy.commit is None
    assert isinstance(copy.damage, IntegrityError)
    assert "nvme of rank 1" in str(copy.damage)
    assert "rank-00000-of-00002.safetensors is another than that on nvme of rank 0" in str(
        copy.damage
    )


def test_a_damaged_record_of_one_node_leaves_what_the_others_hold() -> None:
    bad = found(None, damage=IntegrityError("commit.json: digest"))
    listing = merged(bad, found(part(1)))
    assert only(listing).commit == part(1)
    assert [str(damage) for damage in listing.damaged] == ["rank 0: commit.json: digest"]
