"""A Trainer of TorchTitan that saves to tierfall: killed, it resumes exactly; the manager's fields are honoured."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.distributed.job import Job

pytest.importorskip("torchtitan")

PROGRAM = Path(__file__).with_name("torchtitan_program.py")
IMPORTS = ("tests.integrations.frameworks.torchtitan_program",)
ROOT = PROGRAM.parents[3]
STEPS, EVERY = 24, 4
INSIDE = ("capture", "seal", "sealed", "flush", "published", "landed", "commit")

LOADER_ADVICE = "another number of ranks, set exclude_from_loading=['dataloader']"

Start = Callable[..., Job]


@pytest.fixture
def start(make_job: Callable[..., Job], tmp_path: Path, memory: Path) -> Start:
    """``start(name, ranks, ...)`` starts a training in the folder ``name``, which has a memory of its own."""

    def begin(name: str, ranks: int = 1, function: str = "train", **more: Any) -> Job:
        job = make_job(tmp_path / name, PROGRAM, ranks)
        return job.start(function, memory=str(memory / name), **more)

    return begin


def train(start: Start, name: str, ranks: int = 1, **more: Any) -> dict[str, Any]:
    """Train to the end; return what rank 0 does."""
    job = start(name, ranks, **more)
    answer: dict[str, Any] = job.wait(250)[0]
    assert "exit" not in answer, job.log(0)
    return answer


def losses(folder: Path, life: str, rank: int = 0) -> dict[int, str]:
    path = folder / f"{life}-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(step): loss for step, loss in (line.split() for line in lines)}


def kill_at_random(job: Job, life: str, drawn: random.Random) -> None:
    """Kill all ranks some time after a loss and a stored checkpoint."""
    count, delay_s = drawn.randint(6, 14), drawn.uniform(0, 0.1)
    stored = job.folder / "disk"
    job.wait_until(
        lambda: len(losses(job.folder, life)) >= count and any(stored.rglob("commit.json"))
    )
    time.sleep(delay_s)
    job.kill()


# Killed, and started again -------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.quick), 2])
def test_every_loss_after_a_kill_is_that_of_an_uninterrupted_run(start: Start, ranks: int) -> None:
    drawn = random.Random(f"titan {ranks}")
    whole = start("whole", ranks, life="whole")
    expected = whole.wait(250)
    kill_at_random(
        start("killed", ranks, life="random", pause_s=0.03, waits_at=15), "random", drawn
    )
    point = drawn.choice(INSIDE)
    victim = 0 if point == "commit" else drawn.randrange(ranks)
    job = start("killed", ranks, life="inside", point=point, call=2, victim=victim)
    job.wait_for_kill(250)
    job.kill()
    job = start("killed", ranks, life="last")
    answers = job.wait(250)
    for rank in range(ranks):
        of_whole = losses(whole.folder, "whole", rank)
        for life in ("random", "inside", "last"):
            found = losses(job.folder, life, rank)
            assert {s: loss for s, loss in found.items() if of_whole[s] != loss} == {}, (
                point,
                life,
            )
        first = min(losses(job.folder, "last", rank))
        assert (first % EVERY, first > EVERY) == (1, True), "it did not go on from a checkpoint"
        assert max(losses(job.folder, "last", rank)) == STEPS
        assert answers[rank]["weights"] == expected[rank]["weights"]


@pytest.mark.timeout(600)
def test_sharded_replicas_go_on_after_a_kill(start: Start, tmp_path: Path) -> None:
    """HYBRID_SHARD: 2 replicas of 2 shards."""
    job = start("run", 4, life="first", steps=8, replicas=2, waits_at=7)
    job.wait_until(lambda: all(len(losses(job.folder, "first", rank)) == 7 for rank in range(4)))
    job.wait_until(lambda: any((job.folder / "disk").rglob("commit.json")))
    job.kill()
    answers = start("run", 4, life="last", steps=8, replicas=2).wait(250)
    for rank, answer in enumerate(answers):
        assert answer.get("step") == 8, answer
        first, last = (losses(tmp_path / "run", life, rank) for life in ("first", "last"))
        assert [*last] == [5, 6, 7, 8]
        assert [last[step] for step in (5, 6, 7)] == [first[step] for step in (5, 6, 7)]


@pytest.mark.timeout(600)
def test_another_number_of_ranks_resumes_without_the_loader(start: Start, tmp_path: Path) -> None:
    two = train(start, "run", 2, steps=8)
    refused = train(start, "run", steps=8)
    assert LOADER_ADVICE in refused["error"]
    one = train(start, "run", steps=8, exclude_from_loading=["dataloader"])
    assert (one["step"], one["weights"]) == (8, two["weights"])
    assert train(start, "run", life="on", steps=9, exclude_from_loading=["dataloader"])["step"] == 9
    assert [*losses(tmp_path / "run", "on")] == [9]
    for answer in start("run", 2, steps=10).wait(250):
        assert LOADER_ADVICE in answer["error"], "more ranks"
    job = start("run", 2, life="two", steps=10, exclude_from_loading=["dataloader"])
    assert [answer["step"] for answer in job.wait(250)] == [10, 10]


def damage(folder: Path, memory: Path, step: int, rank: int = 0) -> None:
    """Change the middle of a rank's image in every copy: on the disk and in memory."""
    image = next((folder / "disk/titan").glob(f"step-{step:08}-*/*{rank:05}-of-*.safetensors"))
    at = image.stat().st_size // 2
    with image.open("r+b") as file:
        file.seek(at)
        was = file.read(4096)
        file.seek(at)
        file.write(bytes(len(was)))
    images = [path for path in memory.rglob("*.image") if was in path.read_bytes()]
    assert images, "the newest checkpoint is in memory"
    for path in images:
        found = path.read_bytes().find(was)
        with path.open("r+b") as file:
            file.seek(found)
            file.write(bytes(len(was)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_that_is_damaged_everywhere_is_passed_over(
    start: Start, tmp_path: Path, memory: Path, ranks: int
) -> None:
    """By all ranks, though one alone has read the damage."""
    start("whole", ranks, life="whole", steps=12).wait(250)
    job = start("run", ranks, life="first", steps=12, waits_at=11)
    job.wait_until(lambda: [*(tmp_path / "run/disk/titan").glob("step-00000008-*/commit.json")])
    job.kill()
    damage(tmp_path / "run", memory / "run", 8, ranks - 1)
    answers = start("run", ranks, life="second", steps=12).wait(250)
    for rank, answer in enumerate(answers):
        assert answer.get("step") == 12, answer
        of_whole = losses(tmp_path / "whole", "whole", rank)
        expected = {step: of_whole[step] for step in range(5, 13)}
        assert losses(tmp_path / "run", "second", rank) == expected
    assert "step 8@1: " in (tmp_path / "run/rank-0.log").read_text()


@pytest.mark.timeout(600)
def test_damage_is_passed_over_down_to_a_whole_checkpoint_and_without_one_is_an_error(
    start: Start, tmp_path: Path, memory: Path
) -> None:
    train(start, "run", life="first", steps=12)

    def overwrite(step: int, share: float) -> None:
        shutil.rmtree(memory / "run", ignore_errors=True)
        (image,) = (tmp_path / "run/disk/titan").glob(f"step-{step:08}-*/*.safetensors")
        with image.open("r+b") as file:
            file.seek(int(image.stat().st_size * share))
            file.write(bytes(range(64)))

    overwrite(12, 0.5)
    overwrite(8, 0.0)  # its header
    refused = train(start, "run", steps=12, load_step=12)
    assert "digest" in refused["error"], "the step that a user names is not passed over"
    assert train(start, "run", life="second", steps=7)["step"] == 7
    assert [*losses(tmp_path / "run", "second")] == [5, 6, 7]
    overwrite(7, 0.5)
    overwrite(4, 0.5)
    error = train(start, "run", steps=12)["error"]
    assert "digest" in error
    assert "exclude_from_loading" not in error


# The fields of the manager -------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    """The steps that are on the disk."""
    return sorted(int(p.name.split("-")[1]) for p in (folder / "disk/titan").glob("step-*"))


def command(folder: Path, *arguments: str) -> str:
    """Run the command line."""
    place = ["--config", "tiers-0.yaml"]
    done = subprocess.run(
        [sys.executable, "-m", "tierfall", *arguments, *place],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_fields_are_honoured(start: Start, tmp_path: Path) -> None:
    fields = {"steps": 8, "interval": 2, "last_save_model_only": True, "last_save_in_hf": True}
    trained = train(start, "run", keep_latest_k=2, **fields)
    folder = tmp_path / "run"
    assert steps(folder) == [6, 8], "keep_latest_k"
    assert [*(folder / "checkpoint/step-8").glob("*.safetensors")], "last_save_in_hf"
    again = train(start, "run", life="again", steps=8, load_step=6, keep_latest_k=0)
    assert [*losses(folder, "again")] == [7, 8], "load_step"
    assert again["weights"] == trained["weights"]
    gone = train(start, "run", load_step=4)
    assert "there is no checkpoint of step 4 to restore; there are: 6@1 on disk" in gone["error"]
    no_steps = train(start, "run", exclude_from_loading=["train_state"])
    assert "this would train from step 1, and the run is at step 8" in no_steps["error"]
    unknown = train(start, "run", exclude_from_loading=["optimizers"])
    assert "exclude_from_loading: optimizers: expected train_state, model" in unknown["error"]


@pytest.mark.timeout(600)
def test_a_run_of_torchtitan_itself_is_imported(start: Start, tmp_path: Path) -> None:
    """Exactly but for the random state, which TorchTitan does not save."""
    train(start, "run", own="disabled", steps=4)
    refused = train(start, "run", steps=8)
    folder = tmp_path / "run/checkpoint/step-4"
    advice = f"`tierfall import {folder} --as-step 4`"
    assert advice in refused["error"]
    command(tmp_path / "run", *advice.strip("`").split()[1:])
    loaded = train(start, "run", life="on", steps=8)
    own = train(start, "run", own="disabled", life="own", steps=8)
    assert loaded["step"] == own["step"] == 8
    found = losses(tmp_path / "run", "on")
    assert [*found] == [5, 6, 7, 8]
    assert found == losses(tmp_path / "run", "own")


@pytest.mark.timeout(600)
def test_an_initial_checkpoint(start: Start, tmp_path: Path) -> None:
    trained = train(start, "run", steps=4)
    folder = tmp_path / "run"
    command(folder, "export", "4", "--format", "dcp", "--to", "exported")
    job = start("new", function="load", initial_load_path=str(folder / "exported"))
    (loaded,) = job.wait(250)
    assert loaded == {"found": True, "step": 0, "weights": trained["weights"]}
    with tierfall.open(folder / "tiers-0.yaml") as ckpt:
        ckpt.write_pointer(folder / "pointer", 4)
    nowhere = train(start, "none", load_step=4)
    assert "there is no checkpoint of step 4 to restore; there are: none" in nowhere["error"]
    (refused,) = start("new", function="load", initial_load_path=str(folder / "pointer")).wait(250)
    assert "points to step 4 of run 'titan'" in refused["error"]
    assert "`tierfall export 4 --run titan --format dcp --to FOLDER`" in refused["error"]


@pytest.mark.timeout(600)
def test_weights_of_hugging_face_are_loaded_where_the_option_says_so(
    start: Start, tmp_path: Path
) -> None:
    given = {"last_save_model_only": True, "last_save_in_hf": True}
    trained = train(start, "run", steps=4, **given)
    folder = tmp_path / "run/checkpoint/step-4"
    path = {"initial_load_path": str(folder)}
    (refused,) = start("new", function="load", **path).wait(250)
    assert f"initial_load_path={folder} has no .metadata of DCP" in refused["error"]
    assert "set initial_load_in_hf=True" in refused["error"]
    (loaded,) = start("new", function="load", initial_load_in_hf=True, **path).wait(250)
    assert loaded == {"found": True, "step": 0, "weights": trained["weights"]}
    shutil.rmtree(tmp_path / "run/disk/titan")
    command(tmp_path / "run", "forget", "disk")
    lost = train(start, "run", steps=8)
    assert f"set initial_load_path={folder} and initial_load_in_hf=True" in lost["error"]
    begun = train(start, "run", life="begun", steps=4, initial_load_in_hf=True, **path)
    assert begun["step"] == 4
    assert begun["weights"] != trained["weights"], "it trains on"
    assert [*losses(tmp_path / "run", "begun")] == [1, 2, 3, 4]


@pytest.mark.timeout(600)
def test_an_initial_checkpoint_that_one_rank_lacks_is_an_error_of_all(
    start: Start, tmp_path: Path
) -> None:
    train(start, "run", own="disabled", steps=1)
    (tmp_path / "run/checkpoint/step-1").rename(tmp_path / "initial-0")
    path = str(tmp_path / "initial-{rank}")
    answers = start("new", 2, function="load", initial_load_path=path).wait(120)
    expected = f"rank 1: TierfallManager: initial_load_path={tmp_path}/initial-1: there is no such"
    assert [expected in answer["error"] for answer in answers] == [True, True], answers


@pytest.mark.timeout(600)
def test_the_configuration_of_the_page_goes_on(start: Start, tmp_path: Path) -> None:
    """A short training saves its last step."""
    for steps in (2, 4):
        assert train(start, "run", own="page", life=f"to {steps}", steps=steps)["step"] == steps
    assert [*losses(tmp_path / "run", "to 4")] == [3, 4]
    assert sorted(p.name for p in (tmp_path / "run/checkpoints/first").glob("step-*")) == [
        "step-00000002-a0001",
        "step-00000004-a0002",
    ]


@pytest.mark.timeout(600)
def test_another_model_is_refused_and_the_run_goes_on_with_its_own(
    start: Start, tmp_path: Path
) -> None:
    train(start, "run", steps=2)
    fewer = train(start, "run", steps=4, layers=5)
    assert "that the state of this configuration lacks, such as layers.5." in fewer["error"]
    more = train(start, "run", steps=4, layers=7)
    assert "Missing key in checkpoint state_dict: layers.6." in more["error"]
    assert "With another model, resume with the one that saved" in more["error"]
    fresh = {"life": "fresh", "exclude_from_loading": ["optimizer", "lr_scheduler"]}
    assert train(start, "run", steps=4, **fresh)["step"] == 4
    assert [*losses(tmp_path / "run", "fresh")] == [3, 4]


@pytest.mark.timeout(600)
def test_killed_in_the_first_save_it_begins_anew(start: Start, tmp_path: Path) -> None:
    job = start("run", life="first", point="seal")
    job.wait_for_kill(250)
    job.kill()
    assert train(start, "run", life="second")["step"] == STEPS
    first, second = (losses(tmp_path / "run", life) for life in ("first", "second"))
    assert [*second] == [*range(1, STEPS + 1)]
    assert first.items() <= second.items()


@pytest.mark.timeout(600)
def test_without_checkpoints_it_trains_and_writes_none(start: Start, tmp_path: Path) -> None:
    assert train(start, "run", steps=5, enable=False)["step"] == 5
    assert not (tmp_path / "run/disk").exists()


@pytest.mark.timeout(600)
def test_fields_that_are_not_supported(start: Start) -> None:
    (refused,) = start("run", function="load", create_seed_checkpoint=True).wait(250)
    assert "create_seed_checkpoint: let TorchTitan's CheckpointManager write it" in refused["error"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("sys.modules[NAME] = None", "there is no module torchtitan.components.checkpointer"),
        ("del sys.modules[NAME].CheckpointManager._save_last_step", "lacks _save_last_step"),
        ("del sys.modules[NAME].CheckpointManager", "checkpointer has no CheckpointManager"),
        (
            "del sys.modules[NAME]; sys.modules['torchtitan.components'] = None",
            "there is no module torchtitan.components",
        ),
    ],
)
def test_another_interface_is_named(change: str, problem: str) -> None:
    code = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "NAME = 'torchtitan.components.checkpointer'\n"
        "import torchtitan.components.checkpointer\n"
        f"{change}\n"
        "import tierfall.integrations.torchtitan"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert re.search(r"torchtitan 0\.3\.\d+ is installed, supported are 0\.3", last), done.stderr
    assert problem in last
