"""The demo as a user runs it: its report and picture match what its processes wrote, and failures are reported."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import struct
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tierfall.demo import chain as chains
from tierfall.demo import command, story, timeline
from tierfall.demo.__main__ import demo
from tierfall.demo.process import DemoError
from tierfall.demo.story import Stage
from tierfall.demo.timeline import Bar, Kind, Timeline

STEPS = 96
PNG = b"\x89PNG\r\n\x1a\n"


def raw_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def raw_losses(path: Path) -> dict[int, str]:
    return {e["step"]: e["loss"] for e in raw_lines(path) if e["kind"] == "step"}


def memory_folder(folder: Path) -> Path:
    config = yaml.safe_load((folder / "tiers.yaml").read_text())
    return Path(config["tiers"][0]["folder"])


@dataclass(frozen=True)
class Shown:
    """A whole demo: the folder that it kept, what it told and reported, and what it drew."""

    folder: Path
    told: str
    document: dict[str, Any]
    timeline: Timeline

    def lines(self, name: str) -> list[dict[str, Any]]:
        return raw_lines(self.folder / "logs" / f"{name}.jsonl")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    folder = tmp_path_factory.mktemp("demo") / "kept"
    drawn: list[Timeline] = []

    def draw_picture(screen: Any, made: Timeline, path: Path) -> Path | None:
        drawn.append(made)
        return timeline.draw_picture(screen, made, path)

    out, told = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(told):
        patch.setattr(command, "draw_picture", draw_picture)
        demo(folder, steps=STEPS, as_json=True, small=True)
    return Shown(folder, told.getvalue(), json.loads(out.getvalue()), drawn[0])


# What it shows ----------------------------------------------------------------------------------------


def test_demo_kills_in_mid_flush_and_finishes_it_by_adoption(shown: Shown) -> None:
    told, document = shown.told, shown.document
    killed = re.search(r"checkpoint (\d+) has been arriving on store for .* SIGKILL", told)
    assert killed, told
    cut = int(killed[1])
    assert re.search(rf"^  {cut} .* interrupted$", told, re.MULTILINE)
    assert re.search(r"rank-00000-of-00001\.safetensors: .* from host", told)
    assert f"store is still owed checkpoint {cut}@1 by the process that was killed" in told
    assert f"finished by adoption: checkpoint {cut}@1 is committed on store" in told
    assert document["ok"]
    assert document["steps"] == STEPS
    assert document["killed"]["copying"] == f"{cut}@1"
    assert {tier for _, tier, _ in document["restored"]["sources"]} == {"host"}
    assert "ended" not in {line["kind"] for line in shown.lines("first")}


def test_demo_goes_on_with_the_same_losses(shown: Shown) -> None:
    """Compared here once more, from what the processes wrote."""
    logs = shown.folder / "logs"
    first, again = (raw_losses(logs / f"{name}.jsonl") for name in ("first", "again"))
    undisturbed = raw_losses(logs / "undisturbed.jsonl")
    assert sorted(undisturbed) == list(range(1, STEPS + 1))
    assert max(first) < STEPS == max(again)
    assert first.items() | again.items() == undisturbed.items()
    assert "equal to the last bit" in shown.told
    restored = shown.document["restored"]["step"]
    assert shown.document["equal_losses"] == {
        "before_the_kill": len(first),
        "after_the_restore": STEPS - restored,
    }


def test_demo_reads_what_is_damaged_from_the_next_tier(shown: Shown) -> None:
    fall = shown.told.partition("is flipped")[2]
    assert re.search(rf"skipped: chunk \d+ of {STEPS}@2 on fast", fall)
    assert "the same bytes as were saved" in fall
    assert {tier for _, tier, _ in shown.document["beside_damage"]["sources"]} == {"fast", "store"}


def test_demo_restores_from_the_object_tier_alone_when_the_node_is_lost(shown: Shown) -> None:
    lost = shown.told.partition("Lose the node")[2]
    assert re.search(rf"restored step {STEPS} .*\n  rank-\S+: .* from store\n", lost)
    assert "the same bytes as were saved" in lost.partition("7. ")[0]
    after = shown.document["after_node_loss"]
    assert [(tier, count) for _, tier, count in after["sources"]] == [
        ("store", shown.document["image_bytes"])
    ]
    assert after["fallbacks"] == []
    ready, ended = shown.lines("elsewhere")[0], shown.lines("undisturbed")[-1]
    assert [ready["kind"], ended["kind"]] == ["ready", "ended"]
    assert ready["fingerprint"] == ended["fingerprint"]
    assert not memory_folder(shown.folder).exists()


def test_demo_tells_how_far_the_object_tier_packs(shown: Shown) -> None:
    packed = shown.document["packed"]["store"]
    ratio = packed["raw_bytes"] / packed["stored_bytes"]
    assert ratio > 1.05
    assert re.search(rf"store packed .* into .*: {ratio:.3g} to 1", shown.told)
    step = shown.folder / "store" / "demo" / f"step-{STEPS:08d}-a0002"
    stored = (step / "rank-00000-of-00001.safetensors.tfz").stat().st_size
    image_bytes = shown.document["image_bytes"]
    assert 1.05 < image_bytes / stored < 2
    assert (step / "commit.json").exists()


# What it draws ----------------------------------------------------------------------------------------


def bars(shown: Shown, tier: str, kind: Kind) -> list[Bar]:
    return [bar for bar in shown.timeline.bars if (bar.tier, bar.kind) == (tier, kind)]


def test_picture_has_every_save_flush_and_restore_of_the_run(shown: Shown) -> None:
    every = STEPS // command.SAVES
    restored, cut = shown.document["restored"]["step"], shown.document["killed"]["copying"]
    saved = [step for step in range(every, STEPS + 1, every)]
    assert shown.timeline.tiers == ("host", "fast", "store")
    assert [bar.step for bar in bars(shown, "host", Kind.CAPTURE)] == saved
    assert [bar.step for bar in bars(shown, "store", Kind.CUT)] == [int(cut.partition("@")[0])]
    arrived = [bar.step for bar in bars(shown, "store", Kind.FLUSH)]
    assert arrived == [step for step in saved if step % (2 * every) == 0]
    assert {
        tier: [bar.step for bar in bars(shown, tier, Kind.RESTORE)] for tier in chains.TIERS
    } == {
        "host": [restored],
        "fast": [STEPS],
        "store": [STEPS, STEPS],
    }


def test_picture_shows_each_step_of_each_process_and_what_befell_them(shown: Shown) -> None:
    lives = shown.timeline.processes
    for name, life in zip(("first", "again", "damaged", "elsewhere"), lives, strict=True):
        losses = raw_losses(shown.folder / "logs" / f"{name}.jsonl")
        assert [loss.hex() for _, loss in life.steps] == list(losses.values())
        assert all(life.begin_s < time_s < life.end_s for time_s, _ in life.steps)
    assert lives[0].begin_s == 0
    moments = {what: time_s for time_s, what in shown.timeline.moments}
    assert list(moments) == ["SIGKILL", "byte flipped", "node lost"]
    assert moments["SIGKILL"] == lives[0].end_s <= lives[1].begin_s
    assert lives[1].end_s <= moments["byte flipped"] <= lives[2].begin_s
    assert lives[2].end_s <= moments["node lost"] <= lives[3].begin_s


def test_picture_is_a_png_and_its_path_is_reported(shown: Shown) -> None:
    path = shown.folder / "timeline.png"
    assert shown.document["picture"] == str(path)
    assert f"as a picture: {path}" in shown.told
    data = path.read_bytes()
    assert data.startswith(PNG)
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (1800, 880)
    assert 20_000 < len(data) < 150_000


# What goes wrong --------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any, **options: Any) -> str:
    with pytest.raises(typer.Exit) as exited:
        demo(*arguments, **options)
    assert exited.value.exit_code == 1
    return " ".join(capsys.readouterr().out.split())


def test_demo_that_fails_says_why_exits_with_1_and_leaves_no_memory_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(stage: Stage) -> None:
        stage.chain.memory.mkdir()
        raise DemoError("a loss differs")

    monkeypatch.setattr(story, "train_and_kill", fail)
    output = refused(capsys, tmp_path / "kept", steps=12, small=True)
    assert "The demo failed: a loss differs" in output
    assert not memory_folder(tmp_path / "kept").exists()


def test_demo_refuses_a_folder_with_something_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("precious")
    assert "not an empty folder" in refused(capsys, tmp_path)
    assert (tmp_path / "mine").read_text() == "precious"


def test_demo_says_in_one_line_that_its_folder_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object, **more: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (tmp_path / "file").touch()
    output = refused(capsys, tmp_path / "file" / "x", small=True)
    assert output.startswith("The demo failed: ")
    assert output.endswith("x cannot be used (Not a directory): name another folder")
    assert "cannot be used" in refused(capsys, Path("~nobody-of-that-name/x"), small=True)
    monkeypatch.setattr(chains, "write_chain", full)
    assert "cannot be used (Read-only file system)" in refused(capsys, tmp_path / "new", small=True)


def test_demo_refuses_a_folder_that_has_no_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = refused(capsys, tmp_path / "what?", small=True)
    assert "what? cannot be used: name another folder" in output
    assert "tiers[2].url" in output


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("there", "is a folder: name a file"),
        ("nowhere/x.png", "there is no folder"),
        ("x.jpg", "name a file that ends in .png"),
    ],
)
def test_demo_refuses_a_picture_that_cannot_be_before_it_trains(
    name: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(story, "train_and_kill", None)
    (tmp_path / "there.png").mkdir()
    wanted = tmp_path / ("there.png" if name == "there" else name)
    output = refused(capsys, tmp_path / "kept", small=True, picture=wanted)
    assert f"--picture {wanted}: " in output
    assert reason in output


def test_picture_goes_where_the_files_are_kept_or_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert timeline.picture_path(None, None) == tmp_path / "tierfall-demo.png"
    assert timeline.picture_path(tmp_path / "kept", None) == tmp_path / "kept" / "timeline.png"
    assert timeline.picture_path(tmp_path / "kept", Path("mine.PNG")) == tmp_path / "mine.PNG"


def test_picture_in_the_working_directory_is_named_from_there(
    shown: Shown,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = timeline.picture_path(None, None)
    assert timeline.draw_picture(command.Screen(), shown.timeline, path) == path
    assert capsys.readouterr().out == "  the timeline as a picture: ./tierfall-demo.png\n"
    assert path.read_bytes().startswith(PNG)


def test_picture_that_cannot_be_written_is_reported(
    shown: Shown, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gone" / "x.png"
    assert timeline.draw_picture(command.Screen(), shown.timeline, path) is None
    output = capsys.readouterr().out
    assert f"{path} cannot be written (No such file or directory)" in output
    assert "--picture" in output


def test_without_matplotlib_one_line_says_how_to_get_the_picture(
    shown: Shown,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delitem(sys.modules, "tierfall.demo.picture", raising=False)
    for name in ("matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))):
        monkeypatch.setitem(sys.modules, name, None)
    assert timeline.draw_picture(command.Screen(), shown.timeline, tmp_path / "x.png") is None
    output = capsys.readouterr().out
    assert output == "  for a picture of this timeline: pip install 'tierfall[plot]'\n"
    assert not (tmp_path / "x.png").exists()


def test_another_module_that_is_missing_is_not_taken_for_matplotlib(
    shown: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tierfall.demo.picture", None)
    with pytest.raises(ModuleNotFoundError, match=r"tierfall\.demo\.picture"):
        timeline.draw_picture(command.Screen(), shown.timeline, tmp_path / "x.png")
