"""Which capture mode a run uses: both are measured, the cheaper one is kept, and it is measured again."""

from __future__ import annotations

import pytest

from tierfall.policies.cadence import AGAIN_AFTER, TRIALS, LazyTrial, choose_lazy


def run_of(saves: int, *, lazy_s: float, blocking_s: float, steps: int = 10) -> list[LazyTrial]:
    """A run in which saves cost so much, by the mode that was chosen for each."""
    trials: list[LazyTrial] = []
    for _ in range(saves):
        lazy, _ = choose_lazy(trials)
        trials.append(LazyTrial(lazy, steps, lazy_s if lazy else blocking_s))
    return trials


def test_the_first_save_is_lazy() -> None:
    assert choose_lazy([]) == (True, "lazy: nothing is known yet")


def test_both_are_tried_in_turn() -> None:
    trials = run_of(2 * TRIALS, lazy_s=1.0, blocking_s=1.0)
    assert [trial.lazy for trial in trials] == [True, False] * TRIALS


@pytest.mark.parametrize(("lazy_s", "blocking_s"), [(1.0, 1.1), (1.1, 1.0), (1.0, 1.0)])
def test_what_costs_the_run_less_stays(lazy_s: float, blocking_s: float) -> None:
    trials = run_of(AGAIN_AFTER - 1, lazy_s=lazy_s, blocking_s=blocking_s)
    is_lazy = lazy_s <= blocking_s
    assert {trial.lazy for trial in trials[2 * TRIALS :]} == {is_lazy}
    output = choose_lazy(trials)[1]
    assert output.startswith("lazy: " if is_lazy else "blocking: ")
    assert f"takes {abs(lazy_s - blocking_s):.3g} s less" in output


def test_the_other_is_tried_again_now_and_then() -> None:
    trials = run_of(3 * AGAIN_AFTER, lazy_s=1.0, blocking_s=1.5)
    later = [trial.lazy for trial in trials[2 * TRIALS :]]
    assert 1 <= later.count(False) <= 3


def test_a_machine_that_changes_changes_the_choice() -> None:
    trials = run_of(50, lazy_s=1.0, blocking_s=1.2)
    for _ in range(20 * AGAIN_AFTER):
        lazy, _ = choose_lazy(trials)
        trials.append(LazyTrial(lazy, 10, 2.0 if lazy else 1.2))
        del trials[:-300]
    assert choose_lazy(trials)[0] is False


def test_one_odd_interval_decides_nothing() -> None:
    trials = run_of(30, lazy_s=1.0, blocking_s=1.2)
    trials.append(LazyTrial(True, 10, 60.0))  # an evaluation, say
    assert choose_lazy(trials)[0]


def test_intervals_of_other_lengths_are_not_compared() -> None:
    trials = run_of(30, lazy_s=1.0, blocking_s=1.2)
    trials.append(LazyTrial(True, 5, 0.5))
    assert choose_lazy(trials) == (False, f"blocking: {TRIALS} of each are tried")
