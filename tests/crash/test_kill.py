"""SIGKILL at any moment: what was reported stays, what was not finished is nowhere, and nothing leaks.

A failing life is lived again with the seed that it prints:

    TIERFALL_KILL_SEED=<seed> pytest 'tests/crash/test_kill.py::<test>'
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash import doomed
from tests.crash.lives import Life

TORTURE_SEEDS = range(100, 108)


def live(life: Life, *, stops: list[str], random_kills: int) -> None:
    """Kill at each stop and then at random moments, check after each death, and end in peace."""
    moments: list[str | None] = [*stops, *[None] * random_kills]
    for moment in moments:
        if moment is None:
            life.kill_at_random()
        else:
            life.stop_and_kill(moment)
        life.check()
        life.plant()
    life.end()


def test_a_run_that_is_killed_again_and_again(tmp_path: Path, memory: Path, seed: int) -> None:
    """A point of each group, a start that is killed while it adopts what the one before left, and three starts in a row
    that die before they write ``latest``: what that names has then been dropped."""
    stops = ["capture-copied", "flush-slow", "adopt-attached", "prune-commit", "commit-done"]
    stops += ["commit-first"] * 3
    live(Life(tmp_path, memory, seed), stops=stops, random_kills=1)


def test_a_run_that_is_killed_while_snapshots_are_superseded(
    tmp_path: Path, memory: Path, seed: int
) -> None:
    """Killed there, and again in a start that adopts what is left and supersedes that.

    That each start comes to the point shows that it superseded; whether one was told of it before, chance decides.
    """
    life = Life(tmp_path, memory, seed, when_full="supersede")
    live(life, stops=["supersede-sealed"] * 2, random_kills=0)


@pytest.mark.torture
@pytest.mark.parametrize("point", doomed.POINTS)
def test_a_kill_at_a_point(point: str, tmp_path: Path, memory: Path, seed: int) -> None:
    when_full = "supersede" if point in doomed.SUPERSEDE else "wait"
    before = {
        **dict.fromkeys(doomed.ADOPTION, "flush-slow"),
        **dict.fromkeys(doomed.SUPERSEDE, point),
    }
    stops = [before[point], point] if point in before else [point]
    life = Life(tmp_path, memory, seed, when_full=when_full)
    live(life, stops=stops, random_kills=1)


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("when_full", ["wait", "supersede"])
@pytest.mark.parametrize("torture_seed", TORTURE_SEEDS)
def test_lives_of_many_deaths(
    torture_seed: int, when_full: str, tmp_path: Path, memory: Path
) -> None:
    """Every point in a shuffled order, each after the deaths before it, and as many random kills. Those of superseded
    saves have a life of their own, in which most saves are superseded."""
    life = Life(tmp_path, memory, torture_seed, when_full=when_full)
    points = {
        point
        for point in doomed.POINTS
        if (point in doomed.SUPERSEDE) == (when_full == "supersede")
    }
    moments: list[str | None] = [*sorted(points), *[None] * len(points)]
    life.random.shuffle(moments)
    first = next(
        point for point in moments if point not in doomed.ADOPTION
    )  # there is nothing to adopt yet
    moments.remove(first)
    for point in [first, *moments]:
        if point is None:
            life.kill_at_random()
        else:
            life.stop_and_kill(point)
        life.check()
    life.end()
    assert when_full == "wait" or life.superseded
