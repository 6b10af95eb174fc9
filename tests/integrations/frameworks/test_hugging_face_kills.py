"""A Trainer that is killed resumes exactly: every later loss has the bits of an uninterrupted run, on every rank."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.job import Job

pytest.importorskip("transformers")
pytest.importorskip("trl")
pytest.importorskip("peft")

from tests.integrations.frameworks import hugging_face

PROGRAM = Path(__file__).with_name("hugging_face.py")
IMPORTS = "transformers.trainer", "accelerate", "peft", "datasets", "trl"
Losses = dict[tuple[int, int], str]
STEPS = 14
INSIDE = ("capture", "seal", "sealed", "flush", "published", "landed", "commit")


def losses(folder: Path, life: str, rank: int) -> Losses:
    """Every loss of a life, by step and micro batch, as hexadecimal digits."""
    path = folder / f"{life}-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return {(int(s), int(m)): loss for s, m, loss in (line.split() for line in lines)}


def kill_at_random(job: Job, life: str, drawn: random.Random) -> None:
    """Kill all ranks some time after a loss and a stored checkpoint of step 3 or later."""
    count, delay_s = drawn.randint(8, 15), drawn.uniform(0, 0.05)
    stored = job.folder / "disk"

    def is_due() -> bool:
        found = (int(path.parent.name.split("-")[1]) for path in stored.rglob("commit.json"))
        return len(losses(job.folder, life, 0)) >= count and max(found, default=0) > 2

    job.wait_until(is_due)
    time.sleep(delay_s)
    job.kill()


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        *[("trainer", 1), ("trainer", 2), pytest.param("fsdp", 2, marks=pytest.mark.quick)],
        *[("sft", 1), ("lora", 1), ("dpo", 1), ("grpo", 1)],
    ],
)
def test_every_loss_after_a_kill_is_that_of_an_uninterrupted_run(
    make_job: Callable[..., Job], tmp_path: Path, memory: Path, kind: str, ranks: int
) -> None:
    """Killed at a random moment, and inside a save; each start resumes from what the one before left."""
    drawn = random.Random(f"{kind} {ranks}")
    folder = tmp_path / "killed"

    def start(life: str, **more: object) -> Job:
        job = make_job(folder, PROGRAM, ranks)
        return job.start("train", memory=str(memory), kind=kind, life=life, **more)

    whole_job = make_job(tmp_path, PROGRAM, ranks)
    for answer in whole_job.run("train", memory=str(memory / "whole"), kind=kind, life="whole"):
        assert answer["lazy"] == answer["saves"] - 1 > 5, whole_job.log(0)
    kill_at_random(start("random", waits_at=10), "random", drawn)
    point = drawn.choice(INSIDE)
    victim = 0 if point == "commit" else drawn.randrange(ranks)
    job = start("inside", point=point, call=3, victim=victim)
    job.wait_for_kill()
    job.kill()
    answers = start("last").wait()
    for rank, answer in enumerate(answers):
        assert answer["resumed"] == answers[0]["resumed"] > 2, (point, answers)
        whole = losses(tmp_path, "whole", rank)
        found = {life: losses(folder, life, rank) for life in ("random", "inside", "last")}
        for life, some in found.items():
            differ = {at: loss for at, loss in some.items() if whole[at] != loss}
            assert differ == {}, f"{point}: {life} of rank {rank} trained otherwise"
        last = [step for step, _ in found["last"]]
        assert (min(last), max(last)) == (answer["resumed"] + 1, max(whole)[0])


@pytest.mark.parametrize("kind", ["trainer", "fsdp"])
def test_ranks_pass_over_a_newest_checkpoint_of_which_one_rank_finds_damage(
    make_job: Callable[..., Job], tmp_path: Path, memory: Path, kind: str
) -> None:
    make_job(tmp_path, PROGRAM, 2).run("train", memory=str(memory), kind=kind, life="whole")
    hugging_face.damage(tmp_path, memory, STEPS, rank=1)
    hugging_face.damage(tmp_path, memory, STEPS - 1, rank=0)
    job = make_job(tmp_path, PROGRAM, 2)
    job.run("train", memory=str(memory), kind=kind, life="rest")
    for rank in range(2):
        whole, rest = (losses(tmp_path, life, rank) for life in ("whole", "rest"))
        assert rest == {at: loss for at, loss in whole.items() if at[0] > STEPS - 2}, job.log(rank)


def test_a_save_on_rank_0_alone_ends_with_an_error_on_all_ranks(
    make_job: Callable[..., Job], tmp_path: Path, memory: Path
) -> None:
    job = make_job(tmp_path, PROGRAM, 2)
    answers = job.start("train", memory=str(memory), kind="alone", life="alone").wait()
    assert all("exit" in answer for answer in answers), answers
    assert "rank 1 did not call save_checkpoint within 20 s. Nothing was saved" in job.log(0)


def test_another_number_of_ranks_resumes(
    make_job: Callable[..., Job], tmp_path: Path, memory: Path
) -> None:
    """What differs between the ranks in the state of a Trainer is that of the first rank."""
    two = make_job(tmp_path, PROGRAM, 2).start(
        "train", memory=str(memory), kind="trainer", life="two", waits_at=10
    )
    kill_at_random(two, "two", random.Random(4))
    job = make_job(tmp_path, PROGRAM).start("train", memory=str(memory), kind="trainer", life="one")
    (answer,) = job.wait()
    assert answer.get("resumed", 0) > 2, job.log(0)
    assert max(losses(tmp_path, "one", 0))[0] == STEPS
