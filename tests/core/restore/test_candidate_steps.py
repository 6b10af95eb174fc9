"""The steps of all ranks with a candidate: their messages are small, and the same to all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import pytest

from tierfall.core.ranks.messages import NumberRanges
from tierfall.core.restore.agreement import CandidateStep, StepDecision, _decide_step
from tierfall.core.restore.assign import Holders, holders_of
from tierfall.core.restore.restore import RankFailure
from tierfall.core.types.errors import RanksError
from tierfall.core.types.values import CheckpointId

ID = CheckpointId(5, 1)
ALL_SEE_ALL: Holders = {image: [(2, (0, 1, 2, 3))] for image in range(4)}


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


def test_all_ranks_learn_who_sees_which_image_on_which_tier() -> None:
    seen = decided([seeing({2: [0, 1]}), seeing({1: [0], 2: [0, 1]})]).seen
    assert holders_of(seen) == {0: [(1, (1,)), (2, (0, 1))], 1: [(2, (0, 1))]}


def test_ranks_that_read_their_own_images_alone_need_nobody() -> None:
    own = [needing(i0=[1, 2]), needing(i1=[1, 2]), needing(i2=[1]), needing()]
    assert decided(own, ALL_SEE_ALL).groups == ()


@pytest.mark.parametrize(
    ("needs", "holders"),
    [
        (needing(i0=[1], i1=[1]), ALL_SEE_ALL),
        (needing(i0=[1]), {**ALL_SEE_ALL, 0: [(1, (3,)), (2, (0, 1, 2, 3))]}),
    ],
)
def test_an_image_of_another_rank_or_a_faster_copy_there_is_assigned(
    needs: CandidateStep, holders: Holders
) -> None:
    groups = decided([needs, needing(i1=[1]), needing(i2=[1]), needing(i3=[1])], holders).groups
    assert len(groups) == 4
    assert [*groups[0].ranks] == [0]


def test_ranks_that_need_the_same_are_named_once() -> None:
    same = needing(i0=range(1, 100), i1=[1, 3])
    (group,) = decided([same, same, same, needing()], ALL_SEE_ALL).groups
    assert [*group.ranks] == [0, 1, 2]
    assert {image: [*chunks] for image, chunks in group.chunks.items()} == {
        0: [*range(1, 100)],
        1: [1, 3],
    }


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
