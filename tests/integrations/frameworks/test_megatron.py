"""Megatron-Core's dist_checkpointing on tiers: other layouts, the distributed optimizer's two formats, and errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.job import Job

pytest.importorskip("megatron.core")

IMPORTS = ("tests.integrations.frameworks.megatron_program",)
PROGRAM = Path(__file__).with_name("megatron_program.py")

Start = Callable[..., Job]


@pytest.fixture
def start(make_job: Callable[..., Job], tmp_path: Path, memory: Path) -> Start:
    """``start(name, function, ...)`` starts 4 ranks in the folder ``name``, which has a memory of its own."""

    def begin(name: str, function: str, ranks: int = 4, **more: Any) -> Job:
        job = make_job(tmp_path / name, PROGRAM, ranks)
        return job.start(function, memory=str(memory / name), **more)

    return begin


def answers_of(job: Job) -> list[Any]:
    answers = job.wait(200)
    assert not any("exit" in a for a in answers if isinstance(a, dict)), job.log(0)
    return answers


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "layouts",
    [
        [(2, 2, 0), (1, 1, 0), (2, 1, 0), (1, 4, 0)],
        [(1, 1, 2), (1, 1, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2)],
    ],
    ids=["TP PP DP", "EP"],
)
def test_any_layout_loads_what_another_has_saved(start: Start, layouts: Any) -> None:
    for answer in answers_of(start("run", "values", layouts=layouts)):
        assert answer == {"wrong": [[]] * len(layouts), "same": True}


@pytest.mark.timeout(300)
def test_the_distributed_optimizer(start: Start) -> None:
    """As fully_reshardable in any layout; as dp_reshardable with another DP alone."""
    full, of_dp = "fully_reshardable", "dp_reshardable"
    others = [("load", of_dp, 2, *layout) for layout in ((1, 1), (1, 2), (2, 2))]
    first = [("save", full, 1, 2, 1), ("load", full, 1, 1, 2), ("load", full, 1, 1, 1)]
    calls = [*first, ("save", of_dp, 2, 2, 1), ("load", of_dp, 2, 2, 1), *others]
    for answer in answers_of(start("run", "optimizer", calls=calls)):
        *known, one, two, three = answer["answers"]
        assert known == [True] * 5, answer
        for refused in (one, two, three):
            assert "RestoreError: " in refused
            assert "as dp_reshardable, which another DP can load, and no other TP" in refused
            assert "--dist-ckpt-optim-fully-reshardable" in refused
    calls = [("load", of_dp, 2, 2, 1), ("load", full, 1, 1, 1)]
    assert answers_of(start("run", "optimizer", 2, calls=calls)) == [{"answers": [True, True]}] * 2


@pytest.mark.timeout(300)
def test_small_tensors_and_what_cannot_be_saved_or_loaded(start: Start) -> None:
    answers = answers_of(start("run", "refusals", 2))
    expected = {
        "no step": "ConfigError: dist_checkpointing: the folder's name, 'latest', has no step",
        "unknown object": "CaptureError: rank 1: ",
        "no such step": "there is no checkpoint of step 99",
        "its own format": "the folder has a checkpoint of the format 'torch_dist'",
        "newer": "has step 98 in the format 'torch_dist', and the run's newest is 3: to continue from step 98",
        "missing key": "has no 'b', which the state has; nearest: a",
        "shape": "a has the shape (8, 2), and (6, 2) in the state",
        "other": "has no entry 'megatron': it was saved in another way",
    }
    for answer in answers:
        assert {k: t for k, t in expected.items() if t not in answer[k]} == {}, answer
    assert [answer["own"][0] for answer in answers] == [0.0, 8.0], "duplicates may differ"
    rows = [[2.0 * i, 2.0 * i + 1] for i in range(8)]
    assert answers[0]["padded"] == rows[:6]
    assert answers[1]["padded"] == rows[6:] + [[0.0, 0.0]] * 4


@pytest.mark.timeout(300)
def test_the_finalization_of_an_asynchronous_save_does_not_wait_for_its_capture(
    start: Start,
) -> None:
    """The optimizer of the next step does: what is loaded are the values at the time of the save."""
    for answer in answers_of(start("run", "held_back", 2)):
        assert answer == {"finalized": [0], "captured": False, "lazy": True, "loaded": True}


def test_a_version_that_was_not_tried_is_named() -> None:
    code = (
        "import importlib.metadata as m; own = m.version\n"
        "m.version = lambda name: '0.19.0' if name == 'megatron-core' else own(name)\n"
        "import tierfall.integrations.megatron"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[3])},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert (
        "megatron-core 0.19.0 is installed: not supported; pip install 'megatron-core>=0.16,<0.17'"
        in last
    )
