"""A rank that fails ends a candidate for all ranks, and ranks at different steps with one are refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import pytest

from tierfall.core.ranks.messages import NumberRanges
from tierfall.core.restore.agreement import CandidateStep, StepDecision, _decide_step
from tierfall.core.restore.assign import Holders
from tierfall.core.restore.restore import RankFailure
from tierfall.core.types.errors import RanksError
from tierfall.core.types.values import CheckpointId

ID = CheckpointId(5, 1)


def decided(steps: Sequence[CandidateStep], holders: Holders | None = None) -> StepDecision:
    """What all ranks learn once each has taken its step, as it comes to rank 0 and from there."""
    sent = [json.loads(json.dumps(step.to_json())) for step in steps]
    came = {rank: CandidateStep.from_json(each, rank=rank) for rank, each in enumerate(sent)}
    decision = _decide_step(came, holders or {})
    return StepDecision.from_json(json.loads(json.dumps(decision.to_json())), rank=0)


def seeing(tiers: Mapping[int, Iterable[int]]) -> CandidateStep:
    return CandidateStep(id=ID, seen={t: NumberRanges.of(images) for t, images in tiers.items()})


def needing(**images: Iterable[int]) -> CandidateStep:
    """``needing(i3=[1, 2])``: chunks 1 and 2 of rank 3's image."""
    needs = {int(name[1:]): NumberRanges.of(chunks) for name, chunks in images.items()}
    return CandidateStep(id=ID, needs=needs)


FILLED = CandidateStep(id=ID)


def test_a_rank_that_has_failed_ends_the_candidate_at_whichever_step_the_others_are() -> None:
    failed = CandidateStep(id=ID, failed="damaged")
    for_good = CandidateStep(id=ID, failed="it does not fit", for_good=True)
    for step in (seeing({2: [0]}), needing(i0=[1]), FILLED):
        decision = decided([step, failed, step, for_good])
        assert decision.failed == RankFailure(rank=3, message="it does not fit", permanent=True)
        assert decided([step, failed, step]).failed == RankFailure(
            rank=1, message="damaged", permanent=False
        )


def test_ranks_with_other_candidates_are_named() -> None:
    other = CandidateStep(id=CheckpointId(4, 1))
    with pytest.raises(RanksError, match="rank 1 filled 4@1 where rank 0 filled 5@1"):
        decided([FILLED, other])


def test_ranks_at_different_steps_are_refused() -> None:
    for step in (seeing({2: [0]}), FILLED):
        with pytest.raises(RanksError, match="at different steps"):
            decided([needing(i0=[1]), step])
