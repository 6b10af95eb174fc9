"""The example is killed, and continues with the same losses, bit for bit."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import yaml

from tests.forked import Forked, server_of

ROOT = Path(__file__).resolve().parent.parent


def example_until(config: Path, folder: Path, step: int) -> tuple[str, dict[int, str]]:
    """Run examples/train.py up to a step, SIGKILL it there, and return what it said first, and its losses."""
    command = [str(ROOT / "examples" / "train.py"), "--config", str(config), "--steps", "1000000"]
    process = Forked(server_of(), command, os.environ, sys.__stderr__, cwd=folder)
    lines = []
    while line := process.stdout.readline().decode():
        lines.append(line)
        if line.startswith(f"step {step} "):
            process.kill()
    process.wait()
    process.close()
    found = [re.fullmatch(r"step (\d+) loss (\S+)\n", line) for line in lines]
    return lines[0] if lines else "", {int(m[1]): m[2] for m in found if m}


def test_example_is_killed_and_goes_on_where_it_was(tmp_path: Path) -> None:
    settings = yaml.safe_load((ROOT / "examples" / "tiers.yaml").read_text())
    settings["tiers"][0]["folder"] = str(tmp_path / "memory")
    config = tmp_path / "tiers.yaml"
    config.write_text(yaml.safe_dump(settings))
    _, before = example_until(config, tmp_path, 45)
    output, after = example_until(config, tmp_path, max(before) + 5)
    restored = re.match(r"restored step (\d+) from host", output)
    assert restored, output
    assert int(restored[1]) >= 20
    assert min(after) == int(restored[1]) + 1
    again = before.keys() & after.keys()
    assert {step: after[step] for step in again} == {step: before[step] for step in again}
    assert max(after) > max(before)
