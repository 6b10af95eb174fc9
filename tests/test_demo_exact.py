"""A killed training run continues with the same losses, bit for bit, in one process and in the example."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import yaml

import tierfall
from tierfall.demo.training import make_state, train_step

ROOT = Path(__file__).resolve().parent.parent
STEPS, STOP, EVERY = 20, 13, 4


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
