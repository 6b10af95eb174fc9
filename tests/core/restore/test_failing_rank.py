"""A rank that fails in a restore: all ranks go to the next older step, or get an error that names it; never a
mixture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from restore_help import Tiers, flip, holds
from several_help import Rank, network, on_all, put_shared

from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.load.fill import plan_fill
from tierfall.core.restore.agreement import make_barrier
from tierfall.core.types.errors import (
    RanksError,
    RestoreError,
)
from tierfall.core.types.values import CheckpointId

HALF = "HALF FILLED"


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    """Three ranks on two nodes; the store holds steps 3, 4 and 5 of all."""
    with network("aab") as joined:
        made = [
            Rank(one, Tiers("store"), mine=["store"] if number == 0 else [])
            for number, one in enumerate(joined)
        ]
        for step in (3, 4, 5):
            put_shared([rank.tiers for rank in made], "store", step)
        yield made


def restored(ranks: list[Rank], **request: Any) -> list[Any]:
    return on_all(lambda rank=rank: rank.restore(**request) for rank in ranks)


def damage(rank: Rank, step: int, chunk: int = 5) -> None:
    flip(rank.tiers.images["store", CheckpointId(step, 1)], chunk)


def words(error: BaseException) -> str:
    return str(error) + "".join(getattr(error, "__notes__", ()))


# Over the message_tree ------------------------------------------------------------------------------------


def test_different_ranks_may_fail_at_different_steps(ranks: list[Rank]) -> None:
    damage(ranks[0], 5)
    damage(ranks[2], 4, chunk=0)
    restored(ranks)
    assert [holds(rank.state, 3) for rank in ranks] == [True] * 3
    assert {tuple(rank.tried) for rank in ranks} == {tuple(CheckpointId(s, 1) for s in (5, 4, 3))}


def test_a_state_that_does_not_fit_ends_all_though_an_earlier_rank_would_go_on(
    ranks: list[Rank],
) -> None:
    damage(ranks[0], 5)
    ranks[2].state["w"] = torch.zeros(7)
    outcomes = restored(ranks)
    assert all(isinstance(outcome, RestoreError) for outcome in outcomes)
    assert str(outcomes[0]).startswith("restore of 5@1: rank 2: ")
    assert {len(rank.tried) for rank in ranks} == {1}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no more")])
@pytest.mark.parametrize("touched", [False, True])
def test_whatever_ends_one_rank_is_reported_to_the_others(
    ranks: list[Rank], error: BaseException, touched: bool
) -> None:
    if touched:
        damage(ranks[1], 5)

    def make_plan(header: Any) -> Any:
        if ranks[1].tried or not touched:
            raise error
        return plan_fill(ranks[1].state, header)

    ranks[1].make_plan = make_plan
    outcomes = restored(ranks)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, RestoreError)
        assert (
            f"rank 1: {'restore of 4@1: ' if touched and isinstance(error, Exception) else ''}"
            in (str(outcome))
        )
        assert type(error).__name__ in str(outcome)
        assert str(outcome).count(HALF) == 1
    if touched and isinstance(error, Exception):
        assert isinstance(outcomes[1], RestoreError)
        assert outcomes[1].__cause__ is error
    else:
        assert outcomes[1] is error
    assert (HALF in words(outcomes[1])) == touched


def test_a_rank_that_is_gone_ends_the_restore_of_the_others() -> None:
    with network("ab", timeout_s=0.5) as joined:
        ranks = [Rank(one, Tiers("store"), mine=["store"]) for one in joined]
        put_shared([rank.tiers for rank in ranks], "store", 5)

        def die() -> None:
            raise SystemExit

        ranks[1].before_fill = die
        outcomes = restored(ranks)
        assert isinstance(outcomes[1], SystemExit)
        assert isinstance(outcomes[0], RestoreError)
        assert isinstance(outcomes[0].__cause__, RanksError)
        assert "rank 1 did not call restore: fill within 0.5 s" in str(outcomes[0])
        assert HALF in str(outcomes[0])


def test_a_rank_that_went_on_after_its_error_is_not_taken_for_one_that_restores(
    ranks: list[Rank],
) -> None:
    """Rank 2 gave up, and restores another step by name: what it fills belongs to another call."""
    tell = [make_barrier(rank.ranks) for rank in ranks]
    known = [
        KnownCheckpoint(id=CheckpointId(s, 1), commit=None, copies={}, abandoned=False)
        for s in (5, 5, 4)
    ]
    outcomes = on_all(
        lambda tell=tell, known=known: tell(known, None)
        for tell, known in zip(tell, known, strict=True)
    )
    for outcome in outcomes:
        assert isinstance(outcome, RanksError)
        assert "rank 2 filled 4@1 where rank 0 filled 5@1" in str(outcome)
