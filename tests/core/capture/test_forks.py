"""A child that is forked while a state is captured: it changes no checkpoint, waits for nothing, and is told what to do
instead."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests import forked
from tests.core.capture.forking import BY_CHILD

HARMLESS = [
    "frees_storages",
    "leaves_the_with_block",
]
CODES = {
    "writes_over_the_image": -signal.SIGSEGV,
    "ends_as_programs_do": 3,
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What became of each deed: one program does them all."""
    folder = tmp_path_factory.mktemp("forks")
    done = forked.run(
        ["-m", "tests.core.capture.forking", str(folder), str(folder / "memory")], timeout=200
    )
    assert done.returncode == 0, done.stderr
    # What leaves through the interpreter's own end may repeat what its parent had not written yet.
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {answer["deed"]: {**answer, "log": done.stderr} for answer in found}


@pytest.mark.parametrize("deed", BY_CHILD)
def test_the_checkpoint_of_the_parent_is_whole_whatever_its_child_does(
    answers: dict[str, dict[str, Any]], deed: str
) -> None:
    answer = answers[deed]
    assert answer["under_way"], "nothing was left to be captured when the child was forked"
    assert answer["in_memory"]
    assert answer["on_disk"]


@pytest.mark.parametrize("deed", HARMLESS)
def test_a_child_goes_on_with_its_own(answers: dict[str, dict[str, Any]], deed: str) -> None:
    assert "error" not in answers[deed]
    assert answers[deed]["code"] == 0


@pytest.mark.parametrize("deed", CODES)
def test_a_child_ends_as_it_means_to(answers: dict[str, dict[str, Any]], deed: str) -> None:
    """Or by the signal of who writes over what is not there."""
    assert answers[deed]["code"] == CODES[deed]


def test_a_childs_own_exception_is_its_own(answers: dict[str, dict[str, Any]]) -> None:
    answer = answers["raises_in_the_with_block"]
    assert answer["error"] == "ZeroDivisionError: the child's own\n"
    assert "closing failed" not in answer["log"]
