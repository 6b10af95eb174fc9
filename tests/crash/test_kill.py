"""SIGKILL at any moment: what was reported stays, what was not finished is nowhere, and nothing leaks.

A failing life is lived again with the seed that it prints:

    TIERFALL_KILL_SEED=<seed> pytest 'tests/crash/test_kill.py::<test>'
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import doomed
import pytest
from lives import Life, Trainers

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


def points(*groups: Mapping[str, object]) -> list[Any]:
    """The points of some groups: two of each in every run, the others in ``make torture``."""
    return [
        name if number < 2 else pytest.param(name, marks=pytest.mark.torture)
        for group in groups
        for number, name in enumerate(group)
    ]


@pytest.mark.parametrize("point", points(doomed.CAPTURE, doomed.FLUSH, doomed.COMMIT, doomed.PRUNE))
def test_a_kill_at_a_point(
    point: str, trainers: Trainers, tmp_path: Path, memory: Path, seed: int
) -> None:
    live(Life(trainers, tmp_path, memory, seed), stops=[point], random_kills=1)


@pytest.mark.parametrize("point", points(doomed.ADOPTION))
def test_a_kill_of_a_start_that_finishes_an_earlier_ones_flush(
    point: str, trainers: Trainers, tmp_path: Path, memory: Path, seed: int
) -> None:
    live(Life(trainers, tmp_path, memory, seed), stops=["flush-slow", point], random_kills=1)


@pytest.mark.parametrize("point", points(doomed.SUPERSEDE))
def test_a_kill_while_a_snapshot_is_superseded(
    point: str, trainers: Trainers, tmp_path: Path, memory: Path, seed: int
) -> None:
    """Killed there, and again in a start that adopts what is left and supersedes that.

    That each start comes to the point shows that it superseded; whether one was told of it before, chance decides.
    """
    life = Life(trainers, tmp_path, memory, seed, when_full="supersede")
    live(life, stops=[point, point], random_kills=1)


def test_latest_is_moved_on_by_whoever_drops_what_it_names(
    trainers: Trainers, tmp_path: Path, memory: Path, seed: int
) -> None:
    """Three starts in a row die before they write the hint; what it names has then been dropped."""
    stops = ["commit-done", "commit-first", "commit-first", "commit-first"]
    live(Life(trainers, tmp_path, memory, seed), stops=stops, random_kills=0)


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("torture_seed", TORTURE_SEEDS)
def test_lives_of_many_deaths(
    torture_seed: int, trainers: Trainers, tmp_path: Path, memory: Path
) -> None:
    """Every point in a shuffled order, each after the deaths before it, and as many random kills."""
    life = Life(trainers, tmp_path, memory, torture_seed)
    ours = doomed.POINTS.keys() - doomed.SUPERSEDE.keys()
    moments: list[str | None] = [*sorted(ours), *[None] * len(ours)]
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


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("torture_seed", TORTURE_SEEDS)
def test_lives_of_many_deaths_where_most_saves_are_superseded(
    torture_seed: int, trainers: Trainers, tmp_path: Path, memory: Path
) -> None:
    life = Life(trainers, tmp_path, memory, torture_seed, when_full="supersede")
    moments = [*doomed.SUPERSEDE, *[None] * len(doomed.SUPERSEDE)]
    life.random.shuffle(moments)
    for point in moments:
        if point is None:
            life.kill_at_random()
        else:
            life.stop_and_kill(point)
        life.check()
    life.end()
    assert life.superseded
