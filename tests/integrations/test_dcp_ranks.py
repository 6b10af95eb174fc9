"""DCP on several ranks: what one cannot do ends the call on all, and what they saved comes back to any number."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.kit import Crew, crew
from tests.integrations import dcp_ranks


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with crew(tmp_path_factory.mktemp("ranks"), 3) as ranks:
        yield ranks


@pytest.mark.parametrize("lazy", [False, True])
def test_what_one_rank_cannot_save_is_raised_by_all_and_the_next_step_is_saved(
    three: Crew, tmp_path: Path, lazy: bool
) -> None:
    found = three.run(dcp_ranks.cannot_save, folder=str(tmp_path), lazy=lazy)
    for first, second, steps in found[:2]:
        assert "value" in first
        assert (second, steps) == ("", [2])


def test_a_rank_that_cannot_plan_ends_the_save_for_all_and_nothing_is_saved(
    three: Crew, tmp_path: Path
) -> None:
    for first, second, steps in three.run(dcp_ranks.cannot_plan, folder=str(tmp_path))[:2]:
        assert "this rank cannot plan" in first
        assert (second, steps) == ("", [2])


@pytest.mark.parametrize(
    ("renames", "output"), [(False, "this rank cannot plan"), (True, "xw is planned as")]
)
def test_what_was_captured_before_dcp_failed_to_plan_is_a_checkpoint_of_the_state(
    three: Crew, tmp_path: Path, renames: bool, output: str
) -> None:
    found = three.run(dcp_ranks.plans_wrongly, folder=str(tmp_path), renames=renames)
    for first, *others in found[:2]:
        assert output in first
        assert others == ["", [1, 2], True]


def test_values_under_one_key_are_each_ranks_own(three: Crew, tmp_path: Path) -> None:
    """DCP takes them for replicas, and plans one of them."""
    words = {"folder": str(tmp_path)}
    assert three.run(dcp_ranks.values, world_size=2, saves=True, **words)[:2] == ["", ""]
    assert three.run(dcp_ranks.values, world_size=2, saves=False, **words)[:2] == [True, True]
    text, has_those_of_rank_1 = three.run(dcp_ranks.values, world_size=1, saves=False, **words)[0]
    differs = r"rng\.seed: differs between the ranks that saved it: 100 on rank 0; 101 on rank 1"
    assert re.search(differs, text)
    assert has_those_of_rank_1


def test_what_all_ranks_have_opened_stays_until_they_have_read_it(
    three: Crew, tmp_path: Path
) -> None:
    found = three.run(dcp_ranks.saves_within_a_load, folder=str(tmp_path))
    for (within,), is_step_1, steps in found[:2]:
        assert 1 in within
        assert is_step_1
        assert steps == [4]


def test_a_step_that_lacks_another_ranks_image_gives_way_to_an_older_one(
    three: Crew, tmp_path: Path
) -> None:
    """A load needs the headers of all ranks' images."""
    words = {"folder": str(tmp_path)}
    assert three.run(dcp_ranks.parts, world_size=3, saves=True, **words) == [["", ""]] * 3
    shutil.rmtree(tmp_path / "memory")
    for manifest in tmp_path.glob("disk/run/step-00000002-*/rank-0000[01]-of-00003.json"):
        manifest.unlink()
    assert three.run(dcp_ranks.parts, world_size=1, saves=False, **words)[0]
