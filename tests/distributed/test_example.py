"""examples/fsdp2.py under torchrun: it trains with four ranks, is killed, and goes on with two."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.distributed.job import ROOT


def test_the_example_is_killed_and_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    config = tmp_path / "tiers.yaml"
    config.write_text(
        (ROOT / "examples/tiers.yaml")
        .read_text()
        .replace("kind: host}", f"kind: host, folder: {tmp_path}/memory}}")
        .replace("./checkpoints", f"{tmp_path}/checkpoints")
    )
    log = tmp_path / "log"
    with log.open("w") as out:
        first = _torchrun(4, config, steps=100_000, out=out)
        try:
            deadline = time.monotonic() + 120
            while "step 100:" not in log.read_text():
                assert first.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.1)
        finally:
            for pid in (first.pid, *_children(first.pid)):  # the ranks have sessions of their own
                os.kill(pid, signal.SIGKILL)
            first.wait()
    with log.open("w") as out:
        second = _torchrun(2, config, steps=300, out=out)
        assert second.wait(120) == 0, log.read_text()[-3000:]
    output = log.read_text()
    assert "in memory is deleted" not in output, "what four ranks had in memory is of use to two"
    for id in re.findall(r"the part of (\S+) that an earlier start left is deleted", output):
        # the kill may come while a checkpoint is sealed on some ranks only: such a one cannot be restored
        parts = re.findall(
            rf"the part of rank (\d) of 4 of {id} is in memory, the others' are not", output
        )
        assert 0 < len(set(parts)) < 4, output[-3000:]
    restored = int(output.partition("restored step ")[2].split()[0])
    assert restored >= 90
    assert restored % 10 == 0
    assert "step 300: loss 0.00" in output


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def _torchrun(ranks: int, config: Path, *, steps: int, out: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += [str(ROOT / "examples/fsdp2.py"), "--config", str(config), "--steps", str(steps)]
    return subprocess.Popen(
        command,
        env={**os.environ, "RES_OPTIONS": "timeout:1 attempts:1", "PYTHONPATH": str(ROOT)},
        stdout=out,  # type: ignore[arg-type]
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
