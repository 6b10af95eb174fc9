"""The inventories of all ranks are merged into one view of the tiers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from several_help import sharded

from tierfall.core.format.catalog import FoundCopy, Listing
from tierfall.core.format.decided import DecidedList, Word
from tierfall.core.format.records import Commit
from tierfall.core.restore.agreement import is_whole
from tierfall.core.restore.inventory import TierMessage, describe, merge_ranks
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    IntegrityError,
    RanksError,
    TierfallError,
    UnreachableError,
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


def test_a_tier_lags_if_its_listing_does_on_any_rank() -> None:
    listings = {rank: Listing(tier="nvme", lags=rank == 1) for rank in range(3)}
    described = {rank: describe([one], mine=["nvme"]) for rank, one in listings.items()}
    (listing,) = merge_ranks(carried(described), ["nvme"])
    assert listing.lags


def test_what_is_decided_in_the_list_of_any_node_is_in_the_merged_one() -> None:
    lists = [DecidedList().adding(word, ID, "a" * 32) for word in (Word.PIN, Word.DELETED)]
    listings = {rank: Listing(tier="nvme", decided=one) for rank, one in enumerate(lists)}
    described = {rank: describe([one], mine=["nvme"]) for rank, one in listings.items()}
    (listing,) = merge_ranks(carried(described), ["nvme"])
    assert listing.decided == lists[0] | lists[1]


def test_a_copy_that_lacks_files_on_one_node_is_damaged_for_all_and_keeps_its_record() -> None:
    damage = IntegrityError("nvme: rank-00001: it is missing")
    copy = only(merged(found(part(0)), found(part(1), damage=damage)))
    assert str(copy.damage) == "rank 1: nvme: rank-00001: it is missing"
    assert copy.commit is not None
    assert len(copy.commit.files) == 4
    assert not is_whole(copy)
    assert is_whole(replace(copy, damage=None))


def test_a_tier_that_nobody_has_looked_at_is_not_taken_for_empty() -> None:
    (listing,) = merge_ranks({0: {}, 1: {}}, ["nvme"])
    assert isinstance(listing.error, RanksError)
    assert "no rank has looked at tier nvme" in str(listing.error)


def test_records_of_several_nodes_become_one_that_names_all_shards() -> None:
    copy = only(merged(found(part(0), on_peers=True), found(part(1), bytes=70)))
    assert copy.commit is not None
    assert copy.commit.files == part(0).files + part(1).files
    assert copy.commit.lineage == part(0).lineage
    assert copy.bytes == 170
    assert copy.on_peers
    assert copy.damage is None


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


def test_of_two_lives_under_one_name_the_one_that_was_saved_last_is_kept() -> None:
    line = replace(part(1).lineage, attempt_id="f" * 32)
    newer = part(1, lineage=line, wall_time_s=2.0)
    listing = merged(found(part(0), on_peers=True), found(newer))
    copy = only(listing)
    assert copy.commit == newer
    assert not copy.on_peers, "that was the other life"
    assert ["another attempt" in str(damage) for damage in listing.damaged] == [True]


def test_a_damaged_record_of_one_node_leaves_what_the_others_hold() -> None:
    bad = found(None, damage=IntegrityError("commit.json: digest"))
    listing = merged(bad, found(part(1)))
    assert only(listing).commit == part(1)
    assert [str(damage) for damage in listing.damaged] == ["rank 0: commit.json: digest"]


def test_records_that_are_damaged_on_every_node_are_damage_not_absence() -> None:
    bad = found(None, damage=IntegrityError("commit.json: digest"))
    listing = merged(bad, bad)
    assert only(listing).commit is None
    assert str(only(listing).damage) == "rank 0: commit.json: digest"
    assert [str(damage) for damage in listing.damaged] == ["rank 1: commit.json: digest"]


class ThirdPartyError(TierfallError):
    retryable = True


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UnreachableError("no"), UnreachableError),
        (AccessDeniedError("no"), AccessDeniedError),
        (ThirdPartyError("no"), UnreachableError),
        (type("Odd", (BackendError,), {})("no"), BackendError),
    ],
)
def test_a_tier_that_one_rank_cannot_read_is_a_tier_that_cannot_be_read(
    error: TierfallError, kind: type[TierfallError]
) -> None:
    described = {0: describe([Listing(tier="nvme", copies=(found(part(0)),))], mine=["nvme"])}
    described[1] = describe([Listing(tier="nvme", error=error)], mine=["nvme"])
    (listing,) = merge_ranks(carried(described), ["nvme"])
    assert type(listing.error) is kind
    assert str(listing.error) == "rank 1: no"
    assert only(listing).commit == part(0)
