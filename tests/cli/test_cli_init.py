"""``init``: questions at a terminal, none elsewhere; the file passes ``check``, and is never overwritten unasked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_kit import run

from tests.contract.kit import Answer
from tierfall.config import Config, load_config


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Path) -> None:
    (tmp_path / "gpt").mkdir()
    monkeypatch.chdir(tmp_path / "gpt")
    monkeypatch.setattr("tierfall.tiers.host_folder.SHARED_MEMORY", memory)


def written() -> Config:
    return load_config("tiers.yaml")


def init(*words: str, code: int = 0, input: str | None = None) -> Answer:
    answer = run(["init", *words], input=input)
    assert answer.code == code, answer.out + answer.err
    return answer


def asked(
    monkeypatch: pytest.MonkeyPatch, *lines: str, words: tuple[str, ...] = ()
) -> tuple[list[str], str]:
    """Answer the questions of a terminal; return them, and all that was printed."""
    monkeypatch.setattr("tierfall.cli.init.at_terminal", lambda: True)
    out = init(*words, input="".join(f"{line}\n" for line in lines)).out
    return re.findall(r"^(.*) \[.*\]: ", out, re.MULTILINE), out


def test_at_a_terminal_five_questions_at_most_and_enter_takes_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(asked(monkeypatch, "", "./far", "1M", "", "30m")[0]) == 5
    assert [tier.flush.every for tier in written().stored] == [1, 3]
    questions, _ = asked(monkeypatch, "", "", "", "", words=("--force",))
    assert len(questions) == 4
    assert [tier.name for tier in written().chain] == ["host", "disk"]


def test_a_number_without_its_unit_is_asked_again_and_a_folder_that_is_not_there_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = ("./a,/nowhere/b", "none", "7", "9999", "7M", "")
    questions, out = asked(monkeypatch, *lines)
    assert len(questions) == len(lines)
    assert [tier.name for tier in written().stored] == ["disk1", "disk2"]
    assert "# 7,000,000 parameters" in Path("tiers.yaml").read_text()
    again = re.findall(r"^Error: (\S+ or \S+\?)", out, re.MULTILINE)
    assert again == ["7 or 7B?", "9999 or 9999B?"]
    assert "note: /nowhere does not exist: mount it, or create it" in out


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
