"""``init``: questions at a terminal, none elsewhere; the file passes ``check``, and is never overwritten unasked."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from cli_kit import Answer, run
from test_cli_startup import modules_of

from tierfall.config import Config, load_config


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Path) -> None:
    (tmp_path / "gpt").mkdir()
    monkeypatch.chdir(tmp_path / "gpt")
    monkeypatch.setattr("tierfall.tiers.arena.folder.SHARED_MEMORY", memory)


def written() -> Config:
    return load_config("tiers.yaml")


def init(*words: str, code: int = 0, input: str | None = None) -> Answer:
    answer = run(["init", *words], input=input)
    assert answer.code == code, answer.out + answer.err
    return answer


def asked(monkeypatch: pytest.MonkeyPatch, *lines: str, words: tuple[str, ...] = ()) -> list[str]:
    """Answer the questions of a terminal, and return them."""
    given, questions = iter(lines), []

    def prompt(text: str, default: str) -> str:
        questions.append(text)
        return next(given) or default

    monkeypatch.setattr("tierfall.cli.init.at_terminal", lambda: True)
    monkeypatch.setattr("typer.prompt", prompt)
    init(*words)
    return questions


def test_defaults_need_no_answers_and_the_file_passes_the_check_that_is_advised() -> None:
    for words, pace, example in (
        (
            ["--yes"],
            "10 min 00 s of 1 GiB",
            "(--image is the size of one rank's image: put yours there)",
        ),
        (
            ["--force", "--every", "50"],
            "50 s of 1 GiB",
            "--step-time the time of a training step: put yours there)",
        ),
        (["--force", "--parameters", "1M"], "10 min 00 s of 14 MiB", "tierfall check"),
    ):
        answer = init(*words)
        assert [tier.name for tier in written().chain] == ["host", "disk"]
        assert written().run == "gpt"
        assert example in answer.out.splitlines()[-1]
        (line,) = re.findall("^next: tierfall (.*)", answer.out, re.MULTILINE)
        checked = run(shlex.split(line))
        assert checked.code == 0, checked.out + checked.err
        assert f"a day with a save every {pace}" in checked.out


def test_at_a_terminal_five_questions_at_most_and_enter_takes_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(asked(monkeypatch, "", "./far", "1M", "", "30m")) == 5
    assert [tier.flush.every for tier in written().stored] == [1, 3]
    questions = asked(monkeypatch, "", "", "", "", words=("--force",))
    assert len(questions) == 4
    assert [tier.name for tier in written().chain] == ["host", "disk"]


def test_a_wrong_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(asked(monkeypatch, "", "", "seven", "7M", "often", "5m")) == 6
    assert written().interval.every_s == 300


def test_a_number_without_its_unit_and_a_folder_that_is_not_there_are_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("typer.echo", lambda text="", **_: shown.append(str(text)))
    lines = ("/nowhere/a", "./a,/nowhere/b", "./a", "/nowhere/far", "none", "7", "9999", "7M", "")
    assert len(asked(monkeypatch, *lines)) == len(lines)
    assert [tier.name for tier in written().stored] == ["disk"]
    assert "# 7,000,000 parameters" in Path("tiers.yaml").read_text()
    again = [line for line in shown if "does not exist" in line or " or " in line]
    assert [line.split(" expected")[0] for line in again if "?" in line] == [
        "7 or 7B?",
        "9999 or 9999B?",
    ]
    assert sum("/nowhere does not exist: mount it, create it" in line for line in again) == 3


def test_a_folder_whose_parent_is_missing_is_not_created() -> None:
    answer = init("--far", "/nowhere-at-all/checkpoints", "--parameters", "1000B")
    assert "note: /nowhere-at-all does not exist: mount it, or create it" in answer.out
    assert "note: ./checkpoints is too small" in answer.out
    assert "/nowhere-at-all/checkpoints is too small" not in answer.out, "it was not looked at"


def test_a_file_that_cannot_be_written_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("folder", f"is a folder; name the file in it: {tmp_path}/folder/tiers.yaml"),
        ("none/tiers.yaml", f"there is no folder {tmp_path}/none; create it first"),
    ):
        answer = run(["init", str(tmp_path / name), "--yes", "--force"])
        assert answer.code == 2
        assert message in answer.err


def test_what_a_note_advises_can_be_done(tmp_path: Path) -> None:
    def notes(*words: str) -> list[str]:
        return re.findall("^note: (.*)", init("--yes", "--force", *words).out, re.MULTILINE)

    (note,) = notes()
    assert note.endswith("by --far")
    (note,) = notes("--far", "./far", "--lose", "5m")
    assert note.endswith("save more often, by --every 5m")
    assert notes("--far", "./far", "--lose", "5m", "--every", "5m") == []
    assert (
        "to change tiers.yaml, edit it, or repeat tierfall init with --force" in init("--force").out
    )


def test_no_torch_is_imported(tmp_path: Path) -> None:
    _, modules = modules_of(f"init {tmp_path / 'tiers.yaml'} --yes --parameters 1M")
    assert "torch" not in modules
    assert sys.modules["torch"]
