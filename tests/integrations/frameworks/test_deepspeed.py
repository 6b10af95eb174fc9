"""DeepSpeed engines that save to tierfall: killed, they resume exactly, on each rank and at each stage of ZeRO."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.job import Job

pytest.importorskip("deepspeed")

from tierfall.errors import ConfigError
from tierfall.integrations.deepspeed import TierfallEngine

PROGRAM = Path(__file__).with_name("deepspeed_program.py")
IMPORTS = ("tests.integrations.frameworks.deepspeed_program",)
ROOT = PROGRAM.parents[3]
PATIENCE_S = 200.0

MakeConfig = Callable[..., dict[str, Any]]
Start = Callable[..., Job]


def reported(job: Job, what: str, rank: int = 0) -> list[list[Any]]:
    path = job.folder / f"rank{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [values for kind, *values in map(json.loads, lines) if kind == what]


def wait(job: Job) -> Job:
    answers = job.wait(PATIENCE_S)
    assert answers == [None] * job.world_size, (answers, job.log(0))
    return job


def kill_at_random(job: Job, drawn: random.Random) -> None:
    """Kill all ranks some time after a loss and a stored checkpoint."""
    count, delay_s = drawn.randint(9, 20), drawn.uniform(0, 0.05)
    stored = job.folder.parent / "disk/run"
    job.wait_until(lambda: len(reported(job, "loss")) >= count and any(stored.rglob("commit.json")))
    time.sleep(delay_s)
    job.kill()


@pytest.fixture
def start(make_job: Callable[..., Job], tmp_path: Path, make_config: MakeConfig) -> Start:
    """``start(name, stage, what, argument, ..., ranks=2)`` starts processes that report to the folder ``name``."""

    def begin(
        name: str, stage: int, what: str, *arguments: Any, ranks: int = 2, run: str = "run"
    ) -> Job:
        config = make_config(host={"capacity": "64MiB"}, run=run)
        job = make_job(tmp_path / name, PROGRAM, ranks)
        return job.start(what, stage=stage, config=config, arguments=arguments)

    return begin


@pytest.mark.quick
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_loss_after_a_kill_is_that_of_an_uninterrupted_run(start: Start, stage: int) -> None:
    drawn = random.Random(f"zero {stage}")
    whole = wait(start("whole", stage, "train", run="whole"))
    killed = start("killed", stage, "train", 22)
    kill_at_random(killed, drawn)
    resumed = wait(start("resumed", stage, "train"))
    for rank in range(2):
        expected = dict(reported(whole, "loss", rank))
        before, after = dict(reported(killed, "loss", rank)), dict(reported(resumed, "loss", rank))
        first, last = min(after), max(after)
        assert (first % 4, last) == (1, 24)
        assert first > 4, "it began anew"
        assert {s: loss for s, loss in expected.items() if s >= first} == after
        assert before.items() <= expected.items()
    lazy = [share for rank in range(2) for _, share in reported(whole, "lazy", rank)[1:]]
    assert min(lazy) > 0.9, "what is large is captured lazily"


def test_a_save_on_rank_0_alone_ends_with_an_error_on_all_ranks(start: Start) -> None:
    job = start("alone", 2, "save_alone")
    assert 0 not in [process.wait(PATIENCE_S) for process in job.processes]
    expected = "rank 1 did not call save_checkpoint within 20 s. Nothing was saved"
    assert expected in (job.folder / "rank-0.log").read_text()


@pytest.mark.parametrize("version", ["0.18.9", "1.0.0"])
def test_another_version_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with pytest.raises(ConfigError, match=rf"deepspeed {version} is .* 'deepspeed>=0\.19,<1'"):
        TierfallEngine(None, None)  # type: ignore[arg-type]


@pytest.mark.timeout(600)
def test_a_step_is_loaded_by_its_tag_and_exported_for_another_number_of_ranks(start: Start) -> None:
    wait(start("trained", 2, "train"))
    loaded = wait(start("loaded", 2, "load", "best", "global_step20"))
    ((reason,),) = reported(loaded, "refused")
    assert "no checkpoint has the tag 'best'" in reason
    ((step, loss),) = reported(loaded, "step")
    assert step == 20
    assert (loaded.folder / "exported" / "latest").read_text() == "global_step20"
    wait(start("loaded", 2, "load_exported"))
    folders = {
        "input": loaded.folder / "exported" / "global_step20",
        "output": loaded.folder / "universal",
    }
    subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "deepspeed.checkpoint.ds_to_universal",
                "--inject_missing_state",
            ),
            *(f"--{which}_folder={folder}" for which, folder in folders.items()),
        ],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        check=True,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    wait(start("loaded", 2, "load_universal", ranks=1))
    assert reported(loaded, "step") == [[20, loss]] * 3
    alone = wait(start("alone", 2, "load", "global_step20", ranks=1))
    ((reason,),) = reported(alone, "refused")
    assert "saved by 2 ranks" in reason
    assert "ds_to_universal.py" in reason


@pytest.mark.quick
@pytest.mark.timeout(600)
def test_the_script_of_the_page_runs_and_continues(
    make_job: Callable[..., Job], tmp_path: Path, memory: Path
) -> None:
    page = (ROOT / "docs/deepspeed.md").read_text()
    script, tiers = (
        re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)[0] for kind in ("python", "yaml")
    )
    (tmp_path / "train.py").write_text(
        script + "print(client_state and client_state['epoch'], engine.global_steps)\n"
    )
    (tmp_path / "tiers.yaml").write_text(
        tiers.replace("kind: host", f"kind: host, capacity: 64MiB, folder: {memory}")
    )
    for expected in ("None 100", "0 100"):
        job = make_job(tmp_path, PROGRAM, 2)
        for rank in range(2):
            job.start_command(rank, [str(tmp_path / "train.py")], cwd=tmp_path)
        printed = [process.communicate(PATIENCE_S)[0] for process in job.processes]
        assert expected in printed[0], job.log(0)
