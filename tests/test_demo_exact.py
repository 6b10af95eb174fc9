"""A killed training run continues with the same losses, bit for bit, in one process and in the example."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tierfall
from tierfall.core.tensors import rng
from tierfall.demo.training import make_state, train_step

ROOT = Path(__file__).resolve().parent.parent
STEPS, STOP, EVERY = 20, 13, 4


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Let a test fix threads and kernels, and put everything back."""
    threads = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)


def chain_in(folder: Path) -> dict[str, Any]:
    return {
        "run": "exact",
        "interval": {"every": EVERY, "at_end": False},  # as if it were killed
        "tiers": [
            {"name": "host", "kind": "host", "folder": str(folder / "memory")},
            {"name": "disk", "kind": "file", "path": str(folder / "disk")},
        ],
    }


def losses(last: int, config: dict[str, Any] | None = None) -> dict[int, str]:
    """Start a training as a new process would, from what the tiers hold; return each step's exact loss."""
    state = make_state(STEPS)
    with nullcontext() if config is None else tierfall.open(config) as ckpt:
        report = ckpt.restore(state) if ckpt is not None else None
        found = {}
        for step in range(report.step + 1 if report else 1, last + 1):
            loss = train_step(state)
            if ckpt is not None:
                ckpt.maybe_save(step, state)
            found[step] = loss.item().hex()
        return found


@pytest.mark.usefixtures("deterministic")
def test_interrupted_training_goes_on_with_the_same_losses_to_the_last_bit(tmp_path: Path) -> None:
    undisturbed = losses(STEPS)
    before = losses(STOP, chain_in(tmp_path))
    after = losses(STEPS, chain_in(tmp_path))
    restored = STOP - STOP % EVERY
    assert list(after) == list(range(restored + 1, STEPS + 1))
    assert before == {step: undisturbed[step] for step in before}
    assert after == {step: undisturbed[step] for step in after}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (rng, "apply"),
        (torch.optim.lr_scheduler.OneCycleLR, "load_state_dict"),
    ],
    ids=["random state", "scheduler"],
)
def test_losses_differ_where_a_part_is_not_restored(
    owner: Any, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above could not fail."""
    undisturbed = losses(STEPS)
    losses(STOP, chain_in(tmp_path))
    monkeypatch.setattr(owner, method, lambda *state: None)
    after = losses(STEPS, chain_in(tmp_path))
    assert after
    assert after != {step: undisturbed[step] for step in after}


# The example ------------------------------------------------------------------------------------------


def example_until(config: Path, folder: Path, step: int) -> tuple[str, dict[int, str]]:
    """Run examples/train.py up to a step, SIGKILL it there, and return what it said first, and its losses."""
    command = [sys.executable, str(ROOT / "examples" / "train.py"), "--config", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--steps", "1000000"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith(f"step {step} "):
                break
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    found = [re.fullmatch(r"step (\d+) loss (\S+)\n", line) for line in lines]
    return lines[0] if lines else "", {int(m[1]): m[2] for m in found if m}


def test_example_is_killed_and_goes_on_where_it_was(tmp_path: Path) -> None:
    settings = yaml.safe_load((ROOT / "examples" / "tiers.yaml").read_text())
    settings["tiers"][0]["folder"] = str(tmp_path / "memory")
    config = tmp_path / "tiers.yaml"
    config.write_text(yaml.safe_dump(settings))
    _, before = example_until(config, tmp_path, 25)
    output, after = example_until(config, tmp_path, max(before) + 5)
    restored = re.match(r"restored step (\d+) from host", output)
    assert restored, output
    assert int(restored[1]) >= 20
    assert min(after) == int(restored[1]) + 1
    again = before.keys() & after.keys()
    assert {step: after[step] for step in again} == {step: before[step] for step in again}
    assert max(after) > max(before)
