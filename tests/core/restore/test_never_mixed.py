"""A restore that skips a checkpoint leaves none of its values in the state."""

from __future__ import annotations

from typing import Any

import torch
from restore_help import Tiers, checkpoint, flip
from several_help import Rank, network, on_all, put_shared

from tierfall.core.load.choices import Choices
from tierfall.core.load.fill import plan_fill
from tierfall.core.restore.candidates import RestoreRequest
from tierfall.core.restore.restore import RestoreResult
from tierfall.core.types.errors import RestoreError

COUNT = 5000  # five chunks
LOOSE = Choices(strict=False)


def base_and_adapter(step: int) -> dict[str, Any]:
    """What is stored last comes last in an image: of two of a size, what has the later name."""
    return {"base": torch.full((COUNT,), float(step)), "later": torch.full((COUNT,), step + 0.5)}


def only_base(step: int) -> dict[str, Any]:
    return {"base": torch.full((COUNT,), float(step))}


def refill(tiers: Tiers, state: dict[str, Any], **request: Any) -> RestoreResult | None:
    return tiers.fill(
        lambda header: plan_fill(state, header, LOOSE),
        RestoreRequest(**request),
        chunks_max=1,  # one thread: what comes after a damaged chunk is not read
    )


def test_a_step_that_is_damaged_before_anything_is_written_leaves_the_state_to_the_older_one() -> (
    None
):
    tiers = Tiers("nvme")
    tiers.put("nvme", checkpoint(4, state=only_base(4)))
    flip(tiers.put("nvme", checkpoint(5, state=base_and_adapter(5))), 0)  # its header
    state = base_and_adapter(-1)
    assert refill(tiers, state) is not None
    assert (state["base"] == 4).all()
    assert (state["later"] == -0.5).all()


def test_memory_that_the_older_step_fills_by_another_name_is_filled() -> None:
    tied = torch.full((COUNT,), 4.0)
    tiers = Tiers("nvme")
    tiers.put("nvme", checkpoint(4, state={"base": torch.full((COUNT,), 4.0), "tied": tied}))
    newest = base_and_adapter(5)
    newest["tied"] = newest["later"]
    flip(tiers.put("nvme", checkpoint(5, state=newest)), 10)
    state = base_and_adapter(-1)
    state["tied"] = state["later"]
    assert refill(tiers, state) is not None
    assert (state["later"] == 4).all()


def test_one_rank_that_would_keep_bytes_of_another_step_ends_the_restore_on_all() -> None:
    with network("ab") as joined:
        ranks = [
            Rank(one, Tiers("store"), mine=["store"] if number == 0 else [])
            for number, one in enumerate(joined)
        ]
        put_shared([rank.tiers for rank in ranks], "store", 4, state=only_base(4))
        put_shared([rank.tiers for rank in ranks], "store", 5, state=base_and_adapter(5))
        (flipped,) = [image for (_, id), image in ranks[1].tiers.images.items() if id.step == 5]
        flip(flipped, 1)
        for rank, state in zip(ranks, (base_and_adapter(-1), only_base(-1)), strict=True):
            rank.make_plan = lambda header, state=state: plan_fill(state, header, LOOSE)
        outcomes = on_all(lambda rank=rank: rank.restore() for rank in ranks)
    assert all(isinstance(outcome, RestoreError) for outcome in outcomes), outcomes
    assert "it does not have later" in str(outcomes[0])
    assert "rank 0: restore of 4@1: it does not have later" in str(outcomes[1])
