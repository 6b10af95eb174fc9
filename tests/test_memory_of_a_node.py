"""Host memory belongs to a run's tiers: projects whose runs have one name share nothing but that name. What dead runs
hold on a node is shown, flushed and freed without their files at hand."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tierfall
from tests import forked, test_peer_recovery
from tests.steps import blank, state_of, step_in, steps_on, wait_until
from tests.test_peer_recovery import config_of, opened, save
from tierfall.cli.app import app
from tierfall.config import Config
from tierfall.errors import ConfigError, LockError

RARELY = {"flush": {"every": 100}}


class Project:
    """A folder with ``tiers.yaml`` and tiers below it. All projects have a run ``exp``, and one folder of memory."""

    def __init__(self, folder: Path, memory: Path, **tiers: dict[str, Any]) -> None:
        self.folder, self.memory = folder, memory
        self.configure(**(tiers or {"disk": RARELY}))

    def configure(self, **tiers: dict[str, Any]) -> None:
        self.folder.mkdir(exist_ok=True)
        config = {
            "run": "exp",
            "max_wait": "20s",
            "tiers": [
                {"name": "host", "kind": "host", "folder": str(self.memory), "capacity": "2MiB"},
                *(
                    {"name": name, "kind": "file", "path": f"./{name}", **settings}
                    for name, settings in tiers.items()
                ),
            ],
        }
        self.file.write_text(json.dumps(config))

    def drain_within(self, deadline: str) -> None:
        config = json.loads(self.file.read_text())
        self.file.write_text(json.dumps({**config, "drain": {"deadline": deadline}}))

    @property
    def file(self) -> Path:
        return self.folder / "tiers.yaml"

    def open(self, **how: Any) -> tierfall.Checkpointer:
        return tierfall.open(self.file, **how)

    def leave(self, *steps: int) -> None:
        """End with these steps in memory alone."""
        with self.open() as ckpt:
            ckpt.restore(blank())
            for step in steps:
                ckpt.save(step, state_of(step)).captured()

    def restored(self) -> tuple[int, str] | None:
        """Return the step that a start restores, and the tier that it comes from."""
        with self.open() as ckpt:
            state = blank()
            report = ckpt.restore(state)
            assert report is None or step_in(state) == report.step
            return None if report is None else (report.step, report.sources[0].tier)

    def run_command(self, *words: str, code: int = 0) -> str:
        return run_command(*words, "--config", str(self.file), code=code)


def run_command(*words: str, code: int = 0, typed: str | None = None) -> str:
    """Run a command, and return all that it says."""
    answer = CliRunner().invoke(app, words, input=typed)
    assert answer.exit_code == code, answer.output
    return answer.output


def json_of(*words: str, code: int = 0) -> Any:
    answer = CliRunner().invoke(app, [*words, "--json"])
    assert answer.exit_code == code, answer.output
    return json.loads(answer.stdout)


@pytest.fixture
def default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of host memory where no configuration names another one."""
    monkeypatch.setattr("tierfall.tiers.arena.folder.SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm" / f"tierfall-{os.geteuid()}"


# Projects whose runs have one name --------------------------------------------------------------------


def test_two_projects_with_runs_of_one_name_train_at_once_and_share_nothing(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = (Project(tmp_path / name, memory) for name in ("one", "two"))
    with one.open() as first, two.open() as second:
        assert (first.restore(blank()), second.restore(blank())) == (None, None)
        first.save(1, state_of(1)).captured()
        second.save(20, state_of(20)).captured()
        assert [c.step for c in first.checkpoints()] == [1]
        listed = one.run_command("ls"), two.run_command("ls"), one.run_command("runs")
        assert "1@1" in listed[0]
        assert "20@1" in listed[1]
        for text in (listed[0], listed[2].partition("IN MEMORY HERE")[0]):
            assert "20@1" not in text
    assert (one.restored(), two.restored()) == ((1, "host"), (20, "host"))
    assert str(two.folder) not in one.run_command("drain"), "with flush.every nothing is owed"
    assert "nothing is in host memory" in Project(tmp_path / "three", memory).run_command("drain")
    of_the_others = [m for m in caplog.messages if str(one.folder) in m and str(two.folder) in m]
    assert of_the_others == []


def test_memory_is_found_again_after_a_change_of_the_tiers(tmp_path: Path, memory: Path) -> None:
    project = Project(tmp_path / "one", memory)
    project.leave(1)
    project.configure(nvme={}, disk=RARELY)
    assert project.restored() == (1, "host"), "a tier was added"
    project.configure(nvme=RARELY)
    project.leave(2)
    assert project.restored() == (2, "host"), "one was removed"
    project.folder.rename(tmp_path / "moved")
    moved = Project(tmp_path / "moved", memory, nvme=RARELY)
    assert moved.restored() == (2, "host"), "the project was moved"


def test_a_copy_of_a_project_is_another_one(tmp_path: Path, memory: Path) -> None:
    project = Project(tmp_path / "one", memory)
    with project.open() as ckpt:
        ckpt.restore(blank())
        ckpt.save(1, state_of(1)).captured()
        shutil.copytree(project.folder, tmp_path / "copy")
        copy = Project(tmp_path / "copy", memory)
        assert copy.restored() is None
        copy.leave(5)
    assert (project.restored(), copy.restored()) == ((1, "host"), (5, "host"))


def test_one_projects_trainer_is_still_alone(tmp_path: Path, memory: Path) -> None:
    project = Project(tmp_path / "one", memory)
    code = (
        "import sys, tierfall; c = tierfall.open(sys.argv[1]); print('open', flush=True); input()"
    )
    with forked.start(["-c", code, str(project.file)]) as other:
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(LockError, match="is owned on this machine by process"):
            project.open()
        with pytest.raises(LockError):
            project.open(replace=True)
        other.kill()


def test_kept_files_of_two_projects_on_one_node_lie_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have runs of one name, and one folder of peer memory."""

    def configured(folder: Path, node: str, **options: Any) -> Config:
        members = config_of(folder, node, **options).model_dump(exclude_none=True)
        members["tiers"][1]["path"] = tmp_path / f"node-{node}"
        return Config.model_validate(members)

    monkeypatch.setattr(test_peer_recovery, "config_of", configured)
    with opened(tmp_path / "one", "01") as ranks:
        save(ranks, 1)
    with opened(tmp_path / "two", "01") as ranks:
        save(ranks, 7)
    found = {path.name for path in tmp_path.glob("node-1/*/1/run/step-*")}
    folders = {path.parents[2].name for path in tmp_path.glob("node-1/*/1/run/step-*")}
    assert (len(folders), {name[:13] for name in found}) == (2, {"step-00000001", "step-00000007"})


# What dead runs hold ----------------------------------------------------------------------------------


def test_what_dead_runs_hold_is_shown_and_flushed_without_their_files_at_hand(
    tmp_path: Path, default_folder: Path
) -> None:
    one, two = (Project(tmp_path / name, default_folder) for name in ("one", "two"))
    one.leave(1, 2)
    two.leave(7)
    two.configure(disk={})
    with tierfall.open({"run": "other", "tiers": str(tmp_path / "of-a-dict")}) as ckpt:
        ckpt.save(3, state_of(3), block=True)
        held = {(one["file"], *one["steps"]) for one in json_of("runs")["memory"]}
        assert held == {(str(one.file), "1@1", "2@1"), (str(two.file), "7@1"), ("", "3@1")}
        shown = run_command("runs")
        for words in (str(one.file), str(two.file), f"process {os.getpid()}", "drain --all"):
            assert words in shown
        output = run_command("drain", "--all", code=1)
        assert f"a trainer owns it (process {os.getpid()}" in output
    assert "flushed 7@1 to disk" in output
    assert (steps_on(two.folder / "disk", "exp"), steps_on(one.folder / "disk", "exp")) == ([7], [])
    assert [held["file"] for held in json_of("runs")["memory"]] == [str(one.file)]
    assert "no trainer" in run_command("runs"), "a command may live, which is no owner"
    one.configure(elsewhere={})
    assert f"{one.file} has other tiers now" in run_command("drain", "--all", code=1)
    one.file.unlink()
    output = run_command("drain", "--all", code=1)
    assert re.search(
        rf"run exp in {default_folder}\S*: {one.file}: there is no such file; ", output
    )
    assert "'tierfall drain --run exp --config FILE'; to free it: 'tierfall drain --all" in output
    one.configure(disk=RARELY)
    shutil.rmtree(one.folder / "disk")
    assert "a folder is missing (tier disk" in run_command("drain", "--all", code=1)
    assert len(list(default_folder.rglob("*.arena"))) == 1


@pytest.mark.parametrize("words", [["--all"], ["--config", "FILE"]])
def test_memory_is_freed_once_the_name_of_its_run_was_typed(
    tmp_path: Path, default_folder: Path, words: list[str]
) -> None:
    project, other = (Project(tmp_path / name, default_folder) for name in ("one", "two"))
    project.leave(1, 2)
    words = [
        "drain",
        "--discard",
        *(str(project.file) if word == "FILE" else word for word in words),
    ]
    for line in ("", "\n", "y\n", "exp1\n", " exp\n", "EXP\n"):
        output = run_command(*words, code=1, typed=line)
        assert "1@1, 2@1" in output
        assert "nothing was freed" in output
    assert project.restored() == (2, "host")
    with project.open():
        assert "a trainer owns it" in run_command(*words, code=1, typed="exp\n")
    other.leave(9)
    with other.open() as ckpt:
        ckpt.restore(blank())
        run_command(*words, code="--all" in words, typed="exp\n")
    assert (project.restored(), other.restored()) == (None, (9, "host"))
    assert "nothing of this user is in this node's memory" in project.run_command(
        "drain", "--discard"
    )
    refused = project.run_command("drain", "--discard", "--deadline", "5s", code=2)
    assert "leave --deadline out" in refused
    assert "name none by --run" in run_command("drain", "--all", "--run", "exp", code=2)


def test_memory_that_another_command_holds_is_freed_once_that_has_ended(
    tmp_path: Path, memory: Path
) -> None:
    project = Project(tmp_path / "one", memory)
    project.leave(1)
    project.configure(disk={"bandwidth": "1kB/s"})
    with forked.start(["-m", "tierfall", "drain", "--config", str(project.file)]) as other:
        wait_until(
            lambda: any(b"tierfall drain" in lock.read_bytes() for lock in memory.rglob("*.lock")),
            "the other command holds the run",
        )
        ending = threading.Timer(1.0, other.kill)
        ending.start()
        words = ("drain", "--discard", "--config", str(project.file))
        assert "freed" in run_command(*words, typed="exp\n")
        ending.join()
    assert list(memory.rglob("*.arena")) == []


def test_memory_that_cannot_be_read_is_shown_and_can_be_freed(tmp_path: Path, memory: Path) -> None:
    project = Project(tmp_path / "one", memory)
    project.leave(1)
    (arena,) = memory.rglob("*.arena")
    with arena.open("r+b") as file:
        file.seek(100)
        file.write(bytes(100))
    with pytest.raises(ConfigError, match="host memory that an earlier start left is damaged"):
        project.open()
    (held,) = json_of("runs", "--config", str(project.file), code=1)["memory"]
    assert (held["steps"], len(held["problems"])) == ([], 1)
    assert "freed" in run_command(
        "drain", "--discard", "--config", str(project.file), typed="exp\n"
    )
    assert project.restored() is None


def test_files_kept_for_other_nodes_are_shown_and_freed(tmp_path: Path) -> None:
    with opened(tmp_path, "01") as ranks:
        save(ranks, 1)
    file = tmp_path / "tiers.yaml"
    file.write_text(config_of(tmp_path, "1").model_dump_json(exclude_none=True))
    (held,) = json_of("runs", "--config", str(file))["memory"]
    assert held["kept_bytes"] > 200_000
    assert list(tmp_path.glob("peers-1/*/1/run/step-*/*.safetensors"))
    run_command("drain", "--discard", "--config", str(file), typed="run\n")
    assert list(tmp_path.glob("peers-1/*/1/run/step-*")) == []
    assert json_of("runs", "--config", str(file))["memory"] == []
    assert list(tmp_path.glob("peers-0/*/1/run/step-*/*.safetensors")), "of another node"


TRAINER = """
import os, signal, sys, time, tierfall
from tests.steps import blank, state_of
ckpt = tierfall.open(sys.argv[1])
ckpt.restore(blank())
ckpt.save(1, state_of(1)).wait("disk")
if "last" in sys.argv:
    ckpt.save(2, state_of(2)).captured()
print("saved", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("deadline", ["20s", "10ms"])
def test_a_drain_on_a_signal_frees_memory_once_all_of_it_is_durable(
    tmp_path: Path, memory: Path, deadline: str
) -> None:
    project = Project(tmp_path / "one", memory, disk={"bandwidth": "40kB/s"})
    project.drain_within(deadline)
    words = ["-c", TRAINER, str(project.file), *(["last"] if deadline == "10ms" else [])]
    with forked.start(words) as trainer:
        assert trainer.stdout.readline() == b"saved\n"
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(60) == -signal.SIGTERM
    is_complete = deadline == "20s"
    assert bool(list(memory.rglob("*.arena"))) != is_complete
    assert project.restored() == ((1, "disk") if is_complete else (2, "host"))


def test_a_drain_on_a_signal_looks_again_before_it_frees_memory(
    tmp_path: Path, memory: Path
) -> None:
    """The folder was moved, or its file system unmounted, since the last commit."""
    project = Project(tmp_path / "one", memory, disk={})
    project.drain_within("20s")
    with forked.start(["-c", TRAINER, str(project.file)]) as trainer:
        assert trainer.stdout.readline() == b"saved\n"
        (away,) = tmp_path.rglob("step-00000001-a0001")
        shutil.move(away, tmp_path / "away")
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(60) == -signal.SIGTERM
    assert project.restored()[0] == 1


def in_a_container() -> list[str]:
    """Return the words before a command that make it process 1 of a container."""
    words = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*words, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no process namespace may be created here")
    return words


def test_a_trainer_of_another_container_is_not_named_by_a_number_that_is_anothers_here(
    tmp_path: Path, memory: Path
) -> None:
    project = Project(tmp_path / "one", memory)
    words = [*in_a_container(), sys.executable, "-m", "tierfall", "drain", "--config"]
    project.leave(1)
    with project.open():
        answer = subprocess.run(
            [*words, str(project.file)], check=False, capture_output=True, text=True
        )
    assert "a trainer owns run 'exp' (a process of another container on " in answer.stderr
    assert f"process {os.getpid()}" not in answer.stderr


def test_process_1_of_a_container_ends_after_a_drain_on_a_signal(
    tmp_path: Path, memory: Path
) -> None:
    """The kernel ends no process 1 by the default action of a signal."""
    as_first = in_a_container()
    project = Project(tmp_path / "one", memory, disk={})
    project.drain_within("20s")
    words = [*as_first, sys.executable, "-c", TRAINER, str(project.file)]
    root = Path(__file__).parents[1]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=root) as container:
        assert container.stdout is not None
        assert container.stdout.readline() == b"saved\n"
        children = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text()
        os.kill(int(children.split()[0]), signal.SIGTERM)
        assert container.wait(60) == 128 + signal.SIGTERM
    assert project.restored() == (1, "disk")


# Who is dead ------------------------------------------------------------------------------------------


DIES = """
import os, signal, sys, tierfall
from tests.steps import blank
ckpt = tierfall.open(sys.argv[1])
assert ckpt.restore(blank()).step == 1
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["closed, and its number is in use", "killed, and not waited for"])
def test_a_later_start_of_this_memory_is_known_to_be_dead(
    tmp_path: Path, memory: Path, end: str
) -> None:
    """In a container process numbers begin anew; a zombie has one for as long as nobody waits for it."""
    project = Project(tmp_path / "one", memory)
    project.leave(1)
    with ExitStack() as processes:
        if end.startswith("closed"):
            assert project.restored() == (1, "host"), "by this process"
        else:
            later = processes.enter_context(forked.start(["-c", DIES, str(project.file)]))
            process = Path(f"/proc/{later.pid}")
            state = process / "stat"
            wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z", "it died")
            # The kernel closes its files, and with them the lock, with its last thread.
            wait_until(lambda: len([*(process / "task").iterdir()]) == 1, "all its threads did")
        project.configure(disk={})
        assert "flushed 1@1 to disk" in project.run_command("drain")
    assert steps_on(project.folder / "disk", "exp") == [1]
    assert not list(memory.rglob("*.arena"))


def test_a_drain_that_a_later_start_keeps_from_writing_says_what_to_start(
    tmp_path: Path, memory: Path
) -> None:
    """Another machine went on from an older step. What memory holds is not to be removed by hand."""
    project = Project(tmp_path / "one", memory)
    project.leave(1)
    elsewhere = Project(tmp_path / "one", tmp_path / "memory-of-another-machine", disk={})
    elsewhere.leave(3)
    project.configure(disk={})
    output = project.run_command("drain", code=1)
    for words in ("did not begin with this memory", "start the training here", "--discard"):
        assert words in output
    assert "remove" not in output
    assert list(memory.rglob("*.arena"))
    assert project.restored() == (3, "disk")
