"""A killed training goes on to the same bits as one that was never interrupted, whatever it is made of."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from tests import forked
from tests.conftest import SHARED
from tests.exact.scenarios import OPTIMIZERS, SCENARIOS, SCHEDULERS

ROOT = Path(__file__).resolve().parents[2]


def run(what: str, *folders: Path, code: int = 0) -> str:
    done = forked.run(["-m", "tests.exact.program", what, *map(str, folders)], timeout=300)
    assert done.returncode == code, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """The digests of all scenarios: of a run without a break, and of the resumed run."""
    folder = tmp_path_factory.mktemp("exact")
    with tempfile.TemporaryDirectory(dir=SHARED if SHARED.is_dir() else folder) as memory:
        places = folder, Path(memory)
        straight = json.loads(run("straight", *places))
        run("killed", *places, code=-signal.SIGKILL)
        yield {"straight": straight, "resumed": json.loads(run("resumed", *places))}


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_training_resumes_to_the_same_bits(
    found: dict[str, dict[str, Any]], name: str
) -> None:
    assert found["resumed"][name] == found["straight"][name]


def test_every_optimizer_and_scheduler_of_torch_is_tried() -> None:
    optimizers = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert optimizers - {"Optimizer"} == {kind for kind, _ in OPTIMIZERS.values()} | {"SparseAdam"}
    assert {*lr_scheduler.__all__} - {"LRScheduler"} <= {*SCHEDULERS}
