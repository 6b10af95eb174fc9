"""Which checkpoint several ranks restore: one whose shards are all available, chosen once for all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from restore_help import Made, Tiers
from several_help import (
    Rank,
    all_named,
    network,
    on_all,
    put_parts,
    put_shared,
    sharded,
)

from tierfall.core.format.catalog import Listing, NotReadError
from tierfall.core.restore.agreement import (
    Candidates,
    agree_to_restore,
    choose_candidates,
    complete,
)
from tierfall.core.restore.candidates import RestoreRequest
from tierfall.core.restore.inventory import Inventory, describe, merge_ranks
from tierfall.core.types.errors import RestoreError, UnreachableError
from tierfall.core.types.values import CheckpointId

ORDER = ("host", "nvme", "store")


def several(count: int) -> list[Tiers]:
    return [Tiers(*ORDER) for _ in range(count)]


def described(ranks: list[Tiers]) -> dict[int, Inventory]:
    """Every rank has a node of its own: it speaks for its memory and disk, and rank 0 for the store."""
    return {
        rank: describe(tiers.listings(), mine=mine_of(rank)) for rank, tiers in enumerate(ranks)
    }


def mine_of(rank: int) -> tuple[str, ...]:
    return ORDER if rank == 0 else ORDER[:2]


def seen(ranks: list[Tiers]) -> tuple[Listing, ...]:
    return merge_ranks(described(ranks), ORDER)


def chosen(ranks: list[Tiers], **request: Any) -> Candidates:
    decision = choose_candidates(described(ranks), ORDER, RestoreRequest(**request))
    assert Candidates.from_json(json.loads(json.dumps(decision.to_json())), rank=0) == decision
    return decision


def steps(decision: Candidates) -> list[str]:
    return [str(commit.lineage.checkpoint) for commit in decision.commits]


def lost(tiers: Tiers) -> None:
    """A node is gone, with its memory and its disk."""
    for tier, id in list(tiers.found):
        if tier != "store":
            del tiers.found[tier, id]


# What is whole ---------------------------------------------------------------------------------------


def test_a_record_that_claims_a_thousand_million_ranks_costs_no_memory() -> None:
    tiers = Tiers(*ORDER)
    made = sharded(5, 0, 2)
    tiers.put("nvme", replace(made, commit=replace(made.commit, world_size=10**9)))
    (text,) = complete(seen([tiers]))[1].values()
    assert text == (
        "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 999999992 more of 1000000000 are on no tier that answered"
    )


# What rank 0 chooses ---------------------------------------------------------------------------------


def test_a_step_that_peer_memory_had_committed_is_not_passed_over_for_a_first_start() -> None:
    """The tier was taken out of the configuration after a loss. An image in memory tells of its commit."""
    ranks = several(2)
    ranks[0].put("host", sharded(5, 0, 2))
    assert chosen(ranks).commits == ()
    ranks[0].put("host", sharded(5, 0, 2), on_peers=True)
    with pytest.raises(RestoreError, match="rank 1 of 2 is on no tier that answered"):
        chosen(ranks)
    put_shared(ranks, "store", 4)
    decision = chosen(ranks)
    assert steps(decision) == ["4@1"]
    assert [fallback.what for fallback in decision.fallbacks] == ["step 5@1"]


def test_a_tier_that_one_rank_cannot_read_may_hold_something_newer() -> None:
    ranks = several(2)
    put_shared(ranks, "store", 4)
    ranks[1].errors["nvme"] = UnreachableError("timeout")
    with pytest.raises(RestoreError, match=r"nvme could not be read .* rank 1: timeout"):
        chosen(ranks)
    assert steps(chosen(ranks, ignore_unreachable=True)) == ["4@1"]


def test_a_line_that_went_back_stays_where_it_is_though_its_newest_is_not_whole() -> None:
    """Steps that a person left behind do not come back because a node is gone."""
    ranks = several(2)
    for step in (3, 4):
        put_shared(ranks, "store", step)
    put_parts(ranks, "nvme", 4, attempt=2, started_from=CheckpointId(3, 1))
    lost(ranks[1])
    assert steps(chosen(ranks)) == ["3@1"]


# All ranks -------------------------------------------------------------------------------------------


@pytest.fixture
def two() -> Iterator[list[Rank]]:
    """Two ranks, each on a node of its own."""
    with network("ab") as ranks:
        yield [Rank(one, Tiers(*ORDER), mine=mine_of(n)) for n, one in enumerate(ranks)]


def agreed(ranks: list[Rank], **request: Any) -> list[Any]:
    return on_all(
        lambda rank=rank: agree_to_restore(
            rank.ranks,
            rank.tiers.listings(),
            RestoreRequest(**request),
            mine=rank.mine,
            tally=rank.tally,
        )
        for rank in ranks
    )


def test_a_rank_takes_no_shard_from_another_life_of_the_run(two: list[Rank]) -> None:
    """Rank 1's disk holds an older start's checkpoint of the very same name."""
    tiers = [rank.tiers for rank in two]
    parts = []
    for rank in range(2):
        made = sharded(5, rank, 2)
        line = replace(made.commit.lineage, attempt_id="f" * 32)
        commit = replace(made.commit, lineage=line, wall_time_s=9.0)
        parts.append(Made(made.image, replace(made.manifest, lineage=line), commit))
    tiers[0].put("store", replace(parts[0], commit=all_named(parts)))
    tiers[1].put("nvme", sharded(5, 1, 2))
    first, second = agreed(two)
    assert first[0].commit is not None
    assert second[0].commit is not None
    assert second[0].commit.lineage == parts[0].commit.lineage
    assert second[0].copies["nvme"].commit is None
    assert "another life" in str(second[0].copies["nvme"].damage)


# Records that are read later --------------------------------------------------------------------------


def read_later(tiers: Tiers, *steps: int) -> None:
    """This rank has left the records of these steps on its disk to be read later."""
    for (tier, id), copy in tiers.found.items():
        if tier == "nvme" and id.step in steps:
            error = NotReadError(f"{id}: later")
            tiers.found[tier, id] = replace(copy, commit=None, damage=error)


@pytest.mark.parametrize("read_by", [(), (0,), (1,)])
def test_records_are_read_if_the_newest_lacks_a_part_that_no_rank_has(
    read_by: tuple[int, ...],
) -> None:
    """A start died between the commit records of two nodes."""
    ranks = several(2)
    for step in (5, 6):
        put_parts(ranks, "nvme", step)
    ranks[0].put("nvme", sharded(7, 0, 2))
    for rank in {0, 1}.difference(read_by):
        read_later(ranks[rank], 5, 6)
    for ignores in (False, True):
        assert chosen(ranks, ignore_unreachable=ignores) == Candidates(later=True)


def test_records_are_read_if_they_tell_which_of_two_attempts_of_one_number_counts() -> None:
    ranks = several(2)
    put_parts(ranks, "nvme", 5)
    put_parts(ranks, "nvme", 6)
    parts = [sharded(7, rank, 2) for rank in range(2)]
    line = replace(parts[0].commit.lineage, attempt_id="f" * 32)
    ranks[0].put("store", replace(parts[0], commit=replace(all_named(parts), lineage=line)))
    assert not chosen(ranks).later
    read_later(ranks[1], 5)
    assert chosen(ranks).later


def test_records_are_read_if_how_their_attempt_began_may_abandon_the_newest() -> None:
    ranks = several(2)
    put_parts(ranks, "nvme", 7)
    put_parts(ranks, "nvme", 6, attempt=2, started_from=CheckpointId(5, 1))
    assert steps(chosen(ranks))[0] == "6@2"
    for tiers in ranks:
        read_later(tiers, 6)
    assert chosen(ranks).later
