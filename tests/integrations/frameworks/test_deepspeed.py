"""DeepSpeed engines that save to tierfall: killed, they resume exactly, on each rank and at each stage of ZeRO."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from tierfall.errors import ConfigError
from tierfall.integrations.deepspeed import TierfallEngine

PROGRAM = Path(__file__).with_name("deepspeed_program.py")
ROOT = PROGRAM.parents[3]
PATIENCE_S = 200.0

MakeConfig = Callable[..., dict[str, Any]]
Start = Callable[..., "Job"]


class Job:
    """One process for each rank. What they reported is read from files."""

    def __init__(self, folder: Path, ranks: int, *arguments: str, program: Path = PROGRAM) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.processes = []
        for rank in range(ranks):
            places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            place = {**places, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            paths = {
                "PYTHONPATH": str(ROOT),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            }
            with open(folder / f"log{rank}", "a") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(program), *arguments],
                        env={
                            **os.environ,
                            **place,
                            **paths,
                            "DS_ACCELERATOR": "cpu",
                            "OMP_NUM_THREADS": "1",
                        },
                        cwd=folder,
                        stdout=log,
                        stderr=log,
                    )
                )

    def reported(self, what: str, rank: int = 0) -> list[list[Any]]:
        path = self.folder / f"rank{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [values for kind, *values in map(json.loads, lines) if kind == what]

    def wait(self) -> None:
        for rank, process in enumerate(self.processes):
            assert process.wait(PATIENCE_S) == 0, (self.folder / f"log{rank}").read_text()[-4000:]

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(self.reported("loss")) < count:
            assert time.monotonic() < deadline
            assert all(each.poll() is None for each in self.processes), "a rank ended"
            time.sleep(0.002)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def start(tmp_path: Path, make_config: MakeConfig) -> Iterator[Start]:
    """``start(name, stage, what, ..., ranks=2)`` starts processes that report to the folder ``name``. None outlives
    the test."""
    jobs: list[Job] = []

    def begin(
        name: str, stage: int, what: str, *more: str, ranks: int = 2, run: str = "run"
    ) -> Job:
        config = json.dumps(make_config(host={"capacity": "64MiB"}, run=run))
        folder = tmp_path / name
        jobs.append(Job(folder, ranks, str(stage), config, str(folder), what, *more))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_loss_after_a_kill_is_that_of_an_uninterrupted_run(start: Start, stage: int) -> None:
    drawn = random.Random(f"zero {stage}")
    whole = start("whole", stage, "train", run="whole")
    whole.wait()
    killed = start("killed", stage, "train")
    killed.wait_for_steps(drawn.randint(9, 20))
    time.sleep(drawn.uniform(0, 0.05))
    killed.kill()
    resumed = start("resumed", stage, "train")
    resumed.wait()
    for rank in range(2):
        expected = dict(whole.reported("loss", rank))
        before, after = dict(killed.reported("loss", rank)), dict(resumed.reported("loss", rank))
        first, last = min(after), max(after)
        assert (first % 4, last) == (1, 24)
        assert first > 4, "it began anew"
        assert {s: loss for s, loss in expected.items() if s >= first} == after
        assert before.items() <= expected.items()
    lazy = [share for rank in range(2) for _, share in whole.reported("lazy", rank)[1:]]
    assert min(lazy) > 0.9, "what is large is captured lazily"


def test_a_save_on_rank_0_alone_ends_with_an_error_on_all_ranks(start: Start) -> None:
    job = start("alone", 2, "save_alone")
    assert 0 not in [process.wait(PATIENCE_S) for process in job.processes]
    expected = "rank 1 did not call save_checkpoint within 20 s. Nothing was saved"
    assert expected in (job.folder / "log0").read_text()


@pytest.mark.parametrize("version", ["0.18.9", "1.0.0"])
def test_another_version_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with pytest.raises(ConfigError, match=rf"deepspeed {version} is .* 'deepspeed>=0\.19,<1'"):
        TierfallEngine(None, None)  # type: ignore[arg-type]


@pytest.mark.timeout(600)
def test_a_step_is_loaded_by_its_tag_and_exported_for_another_number_of_ranks(start: Start) -> None:
    start("trained", 2, "train").wait()
    loaded = start("loaded", 2, "load", "best", "global_step20")
    loaded.wait()
    ((reason,),) = loaded.reported("refused")
    assert "no checkpoint has the tag 'best'" in reason
    ((step, loss),) = loaded.reported("step")
    assert step == 20
    assert (loaded.folder / "exported" / "latest").read_text() == "global_step20"
    start("loaded", 2, "load_exported").wait()
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
    start("loaded", 2, "load_universal", ranks=1).wait()
    assert loaded.reported("step") == [[20, loss]] * 3
    alone = start("alone", 2, "load", "global_step20", ranks=1)
    alone.wait()
    ((reason,),) = alone.reported("refused")
    assert "saved by 2 ranks" in reason
    assert "ds_to_universal.py" in reason


@pytest.mark.timeout(600)
def test_the_script_of_the_page_runs_and_continues(tmp_path: Path, memory: Path) -> None:
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
        job = Job(tmp_path, 2, program=tmp_path / "train.py")
        try:
            job.wait()
        finally:
            job.kill()
        assert expected in (tmp_path / "log0").read_text()
