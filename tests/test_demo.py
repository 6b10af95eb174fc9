"""The demo as a user runs it: its report and picture match what its processes reported, and failures are named."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import typer
import yaml
from matplotlib.figure import Figure
from rich.console import Console

from tests.forked import Forked, server_of
from tests.forked import run as run_forked
from tests.steps import wait_until
from tierfall.demo import picture, story
from tierfall.demo.story import Demo, DemoError, Line, Trainer

EVERY = 2
STEPS = EVERY * story.SAVES
PNG = b"\x89PNG\r\n\x1a\n"


def run(folder: Path | None, **options: Any) -> None:
    story.demo(
        folder, **{"steps": story.SAVES, "s3": False, "picture": None, "as_json": False, **options}
    )


class Process(Forked):
    """A trainer that is forked from a process that has imported torch already, and writes to files."""

    def __init__(self, command: list[str], *, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self._server, self.returncode = server_of(), None
        request = {"command": command[1:], "env": dict(os.environ), "cwd": str(Path.cwd())}
        self.pid = self._server.ask(request, stdout.fileno(), stderr.fileno())

    def __exit__(self, *exception: object) -> None:
        self.wait()


FORKING = SimpleNamespace(Popen=Process, run=lambda command, **_: run_forked(command[1:]))
"""What the demo uses of ``subprocess``."""


def memory_folder(folder: Path) -> Path:
    config = yaml.safe_load((folder / "tiers.yaml").read_text())
    return Path(config["tiers"][0]["folder"])


@dataclass(frozen=True)
class Shown:
    """A whole demo: the folder that it kept, what it told and reported, and its trainers."""

    folder: Path
    told: str
    document: dict[str, Any]
    trainers: list[Trainer]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    folder = tmp_path_factory.mktemp("demo") / 'it\'s #1: "kept"'
    drawn: list[list[Trainer]] = []
    draw = picture.draw

    def keep(trainers: list[Trainer], alone: Trainer) -> Figure:
        drawn.append([*trainers, alone])
        return draw(trainers, alone)

    out, told = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(told):
        patch.setattr(picture, "draw", keep)
        patch.setattr(story, "subprocess", FORKING)
        run(folder, steps=STEPS, as_json=True)
    return Shown(folder, told.getvalue(), json.loads(out.getvalue()), drawn[0])


# What it shows ----------------------------------------------------------------------------------------


def test_demo_kills_in_mid_flush_and_finishes_it_by_adoption(shown: Shown) -> None:
    told, document = shown.told, shown.document
    killed = re.search(r"checkpoint (\d+) has been arriving on store for .* SIGKILL", told)
    assert killed, told
    cut = f"{killed[1]}@1"
    assert f"store has no commit record of {cut}" in told
    assert f"finished by adoption: {cut} is committed on store" in told
    assert (document["ok"], document["problems"], document["steps"]) == (True, [], STEPS)
    assert document["killed"] == {
        "after_step": shown.trainers[0].of("step")[-1]["step"],
        "copying": cut,
        "to": "store",
    }
    assert list(document["restored"]["sources"]) == ["host"]
    assert shown.trainers[0].of("ended") == []


def test_demo_goes_on_with_the_same_losses(shown: Shown) -> None:
    assert "equal to the last bit" in shown.told
    first, again = ({x["step"] for x in trainer.of("step")} for trainer in shown.trainers[:2])
    assert first | again == set(range(1, STEPS + 1))
    assert max(first) < STEPS == max(again)
    assert min(again) == shown.document["restored"]["step"] + 1
    assert shown.document["equal_losses"] == {
        "before_the_kill": len(first),
        "after_the_restore": len(again),
    }


def test_demo_reads_what_is_damaged_from_the_next_tier(shown: Shown) -> None:
    fall = shown.told.partition("is flipped")[2]
    assert re.search(rf"skipped: chunk \d+ of {STEPS}@2 on fast", fall)
    assert "the same bytes as were saved" in fall
    assert sorted(shown.document["beside_damage"]["sources"]) == ["fast", "store"]


def test_demo_restores_from_the_object_tier_alone_when_the_node_is_lost(shown: Shown) -> None:
    lost = shown.told.partition("Lose the node")[2]
    assert re.search(rf"restored step {STEPS} .*\n  .* from store\n", lost)
    assert "the same bytes as were saved" in lost.partition("7. ")[0]
    after = shown.document["after_node_loss"]
    image_bytes = shown.trainers[0].of("captured")[0]["bytes"]
    assert (after["sources"], after["fallbacks"]) == ({"store": image_bytes}, [])
    assert not memory_folder(shown.folder).exists()


# What it draws ----------------------------------------------------------------------------------------


def line(at_s: float, kind: str, step: int = 1, tier: str | None = None, **more: Any) -> Line:
    where = {} if tier is None else {"tier": tier}
    return {"wall_time_s": at_s, "kind": kind, "step": step, "attempt": 1, **where, **more}


def trainer_of(*lines: Line, killed_s: float = 0.0) -> Trainer:
    trainer = Trainer.__new__(Trainer)
    trainer.lines, trainer.was_killed = list(lines), killed_s > 0
    trainer.began_s, trainer.over_s = 100.0, killed_s or 200.0
    return trainer


def test_picture_is_a_png_and_its_path_is_reported(shown: Shown) -> None:
    path = shown.folder / "timeline.png"
    assert shown.document["picture"] == str(path)
    assert f"as a picture: {path}" in shown.told
    data = path.read_bytes()
    assert data.startswith(PNG)
    assert struct.unpack(">II", data[16:24]) == (1800, 1120)
    assert 10_000 < len(data) < 200_000


# What goes wrong --------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], folder: Path, **options: Any) -> str:
    with pytest.raises(typer.Exit) as exited:
        run(folder, **options)
    assert exited.value.exit_code == 1
    return " ".join(capsys.readouterr().out.split())


def test_demo_that_fails_says_why_exits_with_1_and_leaves_no_memory_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(demo: Demo) -> None:
        memory_folder(tmp_path / "kept").mkdir()
        raise DemoError("a loss differs")

    monkeypatch.setattr(Demo, "train_and_kill", fail)
    assert refused(capsys, tmp_path / "kept").endswith("The demo failed: a loss differs")
    assert not memory_folder(tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("folder", "picture", "reason"),
    [
        ("full", None, "full is not an empty folder: name a new one"),
        ("full/mine/x", None, "Not a directory"),
        ("what?", None, "tiers[2].url"),
        ("kept", "full", "full: name a .png in a folder that is there"),
        ("kept", "nowhere/x.png", "x.png: name a .png in a folder that is there"),
        ("kept", "x.png", "x.png: name a .png in a folder that is there"),
    ],
)
def test_a_folder_or_a_picture_that_cannot_be_is_refused_before_anything_is_trained(
    folder: str,
    picture: str | None,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("precious")
    (tmp_path / "x.png").mkdir()
    monkeypatch.setattr(Demo, "play", None)
    output = refused(capsys, tmp_path / folder, picture=picture and tmp_path / picture)
    assert output.startswith("The demo failed: ")
    assert reason in output
    assert (tmp_path / "full" / "mine").read_text() == "precious"


# What acts check --------------------------------------------------------------------------------------


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    with ExitStack() as stack:
        yield Demo(tmp_path, tmp_path / "tiers.yaml", Console(), stack, every=1, steps=12)


def test_one_loss_that_differs_in_its_last_bit_is_found(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(*values: float) -> Trainer:
        steps = [line(1, "step", step, loss=loss.hex()) for step, loss in enumerate(values)]
        return trainer_of(*steps, line(2, "ended", fingerprint="f"))

    monkeypatch.setattr(Trainer, "follow", lambda self: [])
    alone = losses(2.5, 2.25)
    assert demo.compare(losses(2.5), losses(2.5, 2.25), alone)["after_the_restore"] == 2
    with pytest.raises(DemoError, match=r"differ from those without a kill: \[1\]"):
        demo.compare(losses(2.5), losses(2.5, 2.2500000000000004), alone)


def test_a_trainer_ends_with_the_demo(tmp_path: Path) -> None:
    with ExitStack() as stack:
        demo = Demo(tmp_path, tmp_path / "tiers.yaml", Console(), stack, every=1, steps=10_000)
        trainer = demo.start("it", saves=False)
        assert any(line["kind"] == "ready" for line in trainer.follow())
        assert trainer.process.poll() is None
    wait_until(lambda: trainer.process.poll() == -9, "the trainer is killed")


# The example ----------------------------------------------------------------------------------------


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
