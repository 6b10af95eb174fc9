"""Commands beside a running trainer become marks that it executes, and change nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cli_kit import Cli, Trainer

from tests.steps import files_below, steps_on, wait_until

MakeCli = Callable[..., Cli]
Train = Callable[[Cli], Trainer]


def _without_status(memory: Path) -> dict[str, bytes]:
    """What a trainer says of itself changes all the time."""
    files = files_below(memory)
    return {name: data for name, data in files.items() if not name.endswith(".status.json")}


def test_a_trainer_is_seen_and_what_is_its_own_is_left_to_it(
    make_cli: MakeCli, train: Train, tmp_path: Path, memory: Path
) -> None:
    cli = make_cli(disk={"retain": {"last": 2}})
    trainer = train(cli)
    for step in (1, 2):
        trainer.tell(f"save {step}")
    before = files_below(tmp_path), _without_status(memory)
    assert cli.json("ls")["owner"]["pid"] == trainer.pid
    assert f"a trainer owns it: process {trainer.pid} on " in cli("ls").out
    assert cli.steps()["2@1"] == {"host": "sealed", "disk": "committed"}
    for command in ("prune", "drain"):
        answer = cli(command, code=1)
        assert answer.out == ""
        assert f"process {trainer.pid} on " in answer.err
        assert answer.err.count("\n") == 1
    assert [d["verdict"] for d in cli.json("prune", "--dry-run")["decisions"]] == ["keep", "keep"]
    assert cli.json("verify")["ok"]
    assert (files_below(tmp_path), _without_status(memory)) == before


def test_a_trainer_heeds_pin_unpin_and_rm_after_its_next_commit(
    make_cli: MakeCli, train: Train, tmp_path: Path
) -> None:
    cli = make_cli(disk={"retain": {"last": 2}}, far={"flush": {"every": 2}})
    disk = tmp_path / "disk"
    trainer = train(cli)
    for step in (1, 2):
        trainer.tell(f"save {step}")
    answer = cli("pin", "2")
    assert answer.out.startswith("pinned 2@1 on disk, far: the trainer (process ")
    assert (disk / "run" / "step-00000002-a0001" / "marks" / "pin").exists()
    for step in (3, 4, 5):
        trainer.tell(f"save {step}")
    assert trainer.tell("pinned") == [2]
    assert steps_on(disk) == [2, 4, 5]
    assert "unpin it first" in cli("rm", "2", code=1).err
    assert cli.json("unpin", "2")["left_to"]["pid"] == trainer.pid
    marked = cli("rm", "4")
    assert marked.out.startswith("marked 4@1 for deletion on disk, far: the trainer (process ")
    assert {"disk", "far"} <= set(cli.steps()["4@1"]), "the trainer alone deletes"
    assert cli.json("show", "4")["deleted"]
    for step in (6, 7):
        trainer.tell(f"save {step}")
    assert steps_on(disk) == [6, 7]
    assert steps_on(tmp_path / "far") == [2, 6]
    assert "4@1" not in cli.steps(), "it left the trainer's memory too"
    assert 4 not in trainer.tell("steps")
    assert "newest" in cli("rm", "7", code=1).err
    trainer.close()
    assert cli.json("verify")["ok"]


def test_what_only_the_trainers_memory_holds_is_the_trainers_to_mark(
    make_cli: MakeCli, train: Train, tmp_path: Path
) -> None:
    cli = make_cli(disk={"flush": {"every": 2}})
    trainer = train(cli)
    trainer.tell("save 1")
    for command in (["pin", "1"], ["unpin", "1"], ["rm", "1", "--yes", "--even-the-last"]):
        assert "only in the trainer's memory" in cli(*command, code=1).err
    trainer.tell("save 2")
    trainer.tell("pin 2")
    assert cli("unpin", "2").out.startswith("unpinned 2@1 on disk: the trainer (process ")
    wait_until(lambda: steps_on(tmp_path / "disk") == [2], "step 2 is on disk")
    trainer.tell("save 3")
    trainer.tell("save 4")
    wait_until(lambda: trainer.tell("pinned") == [], "the trainer's memory is unpinned, too")
