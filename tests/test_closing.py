"""What all ranks agree on at close, by the reports of each."""

from __future__ import annotations

import pytest

from tierfall.run.closing import ClosingPlan, LastStepReport, decide


def report(
    *, step: int = 5, saved: bool = True, failed: str = "", reached: int = 5
) -> LastStepReport:
    return LastStepReport(step=step, saved=saved, changed="", failed=failed, reached=reached)


@pytest.mark.parametrize(
    ("ranks", "reached"),
    [
        ([5, 5], 5),
        ([5, 3], 3),
        ([-1, 3], -1),  # one rank has saved nothing yet
    ],
)
def test_only_steps_after_the_lowest_that_a_rank_has_reached_are_given_up(
    ranks: list[int], reached: int
) -> None:
    decision = decide({rank: report(reached=each) for rank, each in enumerate(ranks)})
    assert decision.reached == reached


def test_all_ranks_learn_that_the_training_has_failed_on_one() -> None:
    failed = "it ended by ZeroDivisionError"
    decision = decide({0: report(saved=False), 1: report(saved=False, failed=failed)})
    assert (decision.failed, decision.plan) == (True, ClosingPlan.NOTHING)
    assert decision.reason == f"step 5: rank 1: {failed}"
    assert not decide({0: report(), 1: report()}).failed
