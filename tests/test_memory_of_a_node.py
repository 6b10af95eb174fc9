"""Host memory belongs to a run's tiers: projects whose runs have one name share nothing but that name. What dead runs
hold on a node is shown, flushed and freed without their files at hand."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tierfall
from tests import forked
from tests.steps import blank, state_of, step_in, steps_on, wait_until
from tierfall.cli.app import app
from tierfall.errors import ConfigError

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


# What dead runs hold ----------------------------------------------------------------------------------


def test_memory_that_cannot_be_read_is_shown_and_can_be_freed(tmp_path: Path, memory: Path) -> None:
    project = Project(tmp_path / "one", memory)
    project.leave(1)
    (image,) = memory.rglob("*.image")
    with image.open("r+b") as file:
        file.write(bytes(100))
    with pytest.raises(ConfigError, match="not those of an image in memory; remove"):
        project.open()
    (held,) = json_of("runs", "--config", str(project.file), code=1)["memory"]
    assert (held["checkpoints"], len(held["problems"])) == ([], 1)
    assert "freed" in run_command(
        "drain", "--discard", "--config", str(project.file), typed="exp\n"
    )
    assert project.restored() is None


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


AS_FIRST = """
import ctypes, os, sys
if ctypes.CDLL(None, use_errno=True).unshare(0x20000000):
    print("refused", flush=True)
    os._exit(0)
if first := os.fork():
    print(first, flush=True)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
"""


def test_process_1_of_a_container_ends_after_a_drain_on_a_signal(
    tmp_path: Path, memory: Path
) -> None:
    """The kernel ends no process 1 by the default action of a signal."""
    project = Project(tmp_path / "one", memory, disk={})
    project.drain_within("20s")
    with forked.start(["-c", AS_FIRST + TRAINER, str(project.file)]) as container:
        first = container.stdout.readline()
        if first == b"refused\n":
            pytest.skip("no process namespace may be created here")
        assert container.stdout.readline() == b"saved\n"
        os.kill(int(first), signal.SIGTERM)
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


def test_a_later_start_of_this_memory_that_nobody_waited_for_is_known_to_be_dead(
    tmp_path: Path, memory: Path
) -> None:
    """A zombie has its process number for as long as nobody waits for it."""
    project = Project(tmp_path / "one", memory)
    project.leave(1)
    with forked.start(["-c", DIES, str(project.file)]) as later:
        process = Path(f"/proc/{later.pid}")
        state = process / "stat"
        wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z", "it died")
        # The kernel closes its files, and with them the lock, with its last thread.
        wait_until(lambda: len([*(process / "task").iterdir()]) == 1, "all its threads did")
        project.configure(disk={})
        assert "flushed 1@1 to disk" in project.run_command("drain")
    assert steps_on(project.folder / "disk", "exp") == [1]
    assert not list(memory.rglob("*.image"))


@pytest.mark.parametrize("deadline", ["20s", "10ms"])
def test_a_drain_on_a_signal_frees_memory_once_all_of_it_is_durable(
    tmp_path: Path, memory: Path, deadline: str
) -> None:
    project = Project(tmp_path / "one", memory, disk={"bandwidth": "160kB/s"})
    project.drain_within(deadline)
    words = ["-c", TRAINER, str(project.file), *(["last"] if deadline == "10ms" else [])]
    with forked.start(words) as trainer:
        assert trainer.stdout.readline() == b"saved\n"
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(60) == -signal.SIGTERM
    is_complete = deadline == "20s"
    assert bool(list(memory.rglob("*.image"))) != is_complete
    assert project.restored() == ((1, "disk") if is_complete else (2, "host"))
