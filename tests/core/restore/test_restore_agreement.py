"""Which checkpoint several ranks restore: one whose shards are all available, chosen once for all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
from tierfall.core.format.decided import Word
from tierfall.core.restore.agreement import (
    Candidates,
    agree_to_restore,
    choose_candidates,
    complete,
    is_whole,
    on_few_nodes,
    whole_on_each,
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


def test_nan_in_the_memory_of_one_rank_takes_all_ranks_to_an_older_step() -> None:
    ranks = several(3)
    put_parts(ranks, "nvme", 4)
    for rank, tiers in enumerate(ranks):
        made = sharded(5, rank, 3)
        bad = ("w",) if rank == 2 else ()
        tiers.put("host", replace(made, commit=replace(made.commit, not_finite=bad)))
    decision = chosen(ranks)
    assert steps(decision) == ["4@1"]
    assert [(f.what, f.reason) for f in decision.fallbacks] == [
        ("step 5@1", "it has NaN or Inf in w")
    ]
    assert steps(chosen(ranks, step=5)) == ["5@1"]


# What is whole ---------------------------------------------------------------------------------------


def test_shards_may_lie_on_different_tiers() -> None:
    """One of four nodes is gone: its shard is taken from the store, which holds no other."""
    ranks = several(4)
    put_parts(ranks, "nvme", 5)
    lost(ranks[3])
    assert complete(seen(ranks))[1] == {
        CheckpointId(5, 1): "rank 3 of 4 is on no tier that answered"
    }
    ranks[0].put("store", sharded(5, 3, 4))
    merged = seen(ranks)
    assert complete(merged) == ({CheckpointId(5, 1)}, {})
    assert not any(is_whole(copy) for listing in merged for copy in listing.copies)


@pytest.mark.parametrize("kept", [2, 1, 0])
@pytest.mark.parametrize("in_memory", [True, False])
def test_an_image_that_too_few_nodes_keep_is_sent_again_where_memory_has_it(
    kept: int, in_memory: bool
) -> None:
    """Of three nodes that keep two copies of each other's images, some keep that of rank 0, or have lost it."""
    ranks = several(3)
    id = CheckpointId(5, 1)
    parts = [sharded(5, rank, 3) for rank in range(3)]
    keeps = [[1, 2], [0, 2] if kept > 1 else [2], [0, 1] if kept else [1]]
    for tiers, others in zip(ranks, keeps, strict=True):
        record = all_named([parts[rank] for rank in others])
        tiers.put("nvme", replace(parts[others[0]], commit=record))
    if in_memory:
        put_parts(ranks, "host", 5)
    few = few_of(ranks)
    whole = whole_on_each(seen(ranks), {"nvme": few}, host="host")
    assert set(few) == ({id} if kept < 2 and (kept or in_memory) else set())
    assert (id in whole["nvme"]) == (kept == 2 or (kept == 1 and not in_memory))
    assert (id in whole["host"]) == in_memory


def few_of(ranks: list[Tiers]) -> Mapping[CheckpointId, bool]:
    """What too few nodes have on ``nvme``, of which two are to keep each image."""
    listings = seen(ranks)
    whole, _ = complete(listings)
    found = on_few_nodes(listings, described(ranks), copies={"nvme": 2}, whole=whole, host="host")
    return found["nvme"]


@pytest.mark.parametrize(
    ("in_memory", "on_peers", "words", "counts"),
    [
        (False, False, (), True),  # nobody knows
        (True, False, (), False),
        (True, True, (), True),
        (True, True, (Word.DELETED,), False),
        (True, True, (Word.DELETED, Word.PIN), True),
    ],
)
def test_what_too_few_nodes_have_counts_if_it_may_have_been_reported(
    in_memory: bool, on_peers: bool, words: tuple[Word, ...], counts: bool
) -> None:
    """Where images are in memory, that of rank 1 tells what was reported."""
    ranks = several(2)
    put_parts(ranks, "nvme", 5)
    if in_memory:
        ranks[0].put("host", sharded(5, 0, 2))
        ranks[1].put("host", sharded(5, 1, 2), on_peers=on_peers)
    for word in words:
        ranks[1].decide("nvme", word, sharded(5, 1, 2))
    assert few_of(ranks) == {CheckpointId(5, 1): counts}


def test_an_image_of_a_start_that_has_nothing_whole_abandons_no_other_step() -> None:
    ranks = several(2)
    put_parts(ranks, "nvme", 5)
    put_parts(ranks, "nvme", 9)
    ranks[0].put("host", sharded(6, 0, 2, attempt=2, started_from=CheckpointId(5, 1)))
    assert few_of(ranks) == {CheckpointId(5, 1): True, CheckpointId(9, 1): True}


def test_a_record_that_claims_a_thousand_million_ranks_costs_no_memory() -> None:
    tiers = Tiers(*ORDER)
    made = sharded(5, 0, 2)
    tiers.put("nvme", replace(made, commit=replace(made.commit, world_size=10**9)))
    (text,) = complete(seen([tiers]))[1].values()
    assert text == (
        "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 999999992 more of 1000000000 are on no tier that answered"
    )


@pytest.mark.parametrize("index", [0, 1])
def test_a_shard_is_there_only_with_image_and_manifest(index: int) -> None:
    tiers = several(2)
    parts = [sharded(5, rank, 2) for rank in range(2)]
    record = all_named(parts)
    files = tuple(file for file in record.files if file != parts[1].commit.files[index])
    tiers[0].put("store", Made(parts[0].image, parts[0].manifest, replace(record, files=files)))
    assert complete(seen(tiers)) == (
        frozenset(),
        {CheckpointId(5, 1): "rank 1 of 2 is on no tier that answered"},
    )


def test_what_only_some_ranks_had_sealed_in_memory_is_no_checkpoint() -> None:
    ranks = several(2)
    ranks[0].put("host", sharded(5, 0, 2))
    assert complete(seen(ranks)) == (frozenset(), {})
    decision = chosen(ranks)
    assert decision.commits == ()
    assert decision.fallbacks[0].what == "step 5@1"
    assert "only some ranks had sealed it" in decision.fallbacks[0].reason


# What rank 0 chooses ---------------------------------------------------------------------------------


def test_checkpoints_that_are_only_partly_there_are_never_taken_for_a_first_start() -> None:
    ranks = several(2)
    put_parts(ranks, "nvme", 5)
    lost(ranks[1])
    for request in ({}, {"step": 5}, {"ignore_unreachable": True}):
        with pytest.raises(RestoreError, match="rank 1 of 2 is on no tier that answered"):
            chosen(ranks, **request)


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


def test_the_newest_is_restored_though_older_records_were_not_read() -> None:
    ranks = several(2)
    for step in (5, 6, 7):
        put_parts(ranks, "nvme", step)
    for tiers in ranks:
        read_later(tiers, 5, 6)
    for ignores in (False, True):
        decision = chosen(ranks, ignore_unreachable=ignores)
        assert (steps(decision), decision.unread, decision.later) == (["7@1"], (), False)
    assert chosen(ranks, step=6).later


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
