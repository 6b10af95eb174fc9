"""examples/fsdp2.py: it trains with four ranks, is killed, and goes on with two."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.distributed.job import ROOT, Job, wait_for


def test_the_example_is_killed_and_goes_on_with_fewer_ranks(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """Its ranks are started here as torchrun does; torchrun itself: test_elastic.py."""
    config = tmp_path / "tiers.yaml"
    config.write_text(
        (ROOT / "examples/tiers.yaml")
        .read_text()
        .replace("kind: host}", f"kind: host, folder: {tmp_path}/memory}}")
        .replace("./checkpoints", f"{tmp_path}/checkpoints")
    )

    def start(ranks: int, steps: int) -> Job:
        job = make_job(ranks)
        words = [str(ROOT / "examples/fsdp2.py"), "--config", str(config), "--steps", str(steps)]
        for rank in range(ranks):
            job.start_command(rank, words)
        return job

    first = start(4, 100_000)
    wait_for(first, tmp_path / "checkpoints/disk/fsdp2/step-00000010-a0001/commit.json")
    first.kill()
    second = start(2, 100)
    said = [process.communicate(120)[0] for process in second.processes]
    output = said[0] + second.log(0) + second.log(1)
    assert [process.wait() for process in second.processes] == [0, 0], output
    assert "in memory is deleted" not in output, "what four ranks had in memory is of use to two"
    for id in re.findall(r"the part of (\S+) that an earlier start left is deleted", output):
        # the kill may come while a checkpoint is sealed on some ranks only: such a one cannot be restored
        parts = re.findall(
            rf"the part of rank (\d) of 4 of {id} is in memory, the others' are not", output
        )
        assert 0 < len(set(parts)) < 4, output[-3000:]
    restored = int(said[0].partition("restored step ")[2].split()[0])
    assert restored >= 10
    assert restored % 10 == 0
    assert restored < 100, "the kill came soon"
    assert "step 100: loss 0." in said[0]
