"""docs/python-api.md names all that users can call and get; its examples, and those of docs/import-export.md, run and
print what the page shows.

The examples of a page are one program; a comment on a line of its own is what was printed up to there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tierfall
from tests.test_docs_cli import words_of
from tierfall.cli import app
from tierfall.core.tensors import value_codec
from tierfall.core.types import errors
from tierfall.core.types.values import CopyState, SaveOutcome
from tierfall.telemetry.figures import FIGURES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "python-api.md"
TEXT = PAGE.read_text()
ABSENT = {CopyState.ABSENT}
SIGNATURES: dict[str, Callable[..., Any]] = {
    "tierfall.open": tierfall.open,
    "tierfall.load": tierfall.load,
    "tierfall.item": tierfall.item,
    "Checkpointer.load": tierfall.Checkpointer.load,
    "tierfall.register_codec": tierfall.register_codec,
    **{
        name: getattr(tierfall.Checkpointer, name)
        for name in (
            "save",
            "restore",
            "wait_captured",
            "pin",
            "tag",
            "delete",
            "prune",
            "drain",
            "close",
            "write_pointer",
            "begin",
        )
    },
    **{name: getattr(tierfall.Checkpointer, name) for name in ("subscribe", "metrics_dict")},
    **{
        name: getattr(tierfall.SaveHandle, name)
        for name in ("captured", "wait", "done", "add_done_callback")
    },
}
THE_SAME = {"maybe_save": "save", "unpin": "pin", "untag": "tag"}
REPORTS = (
    tierfall.CheckpointInfo,
    tierfall.CopyInfo,
    tierfall.DrainReport,
    tierfall.DrainForecast,
    tierfall.LossBound,
    tierfall.PeerSurvival,
    tierfall.SurvivalChance,
    tierfall.Fallback,
    tierfall.Pointer,
    tierfall.RestoreReport,
    tierfall.SaveStats,
    tierfall.ShardSource,
    tierfall.Statistics,
)


def named() -> set[str]:
    """Every word that the page sets as code, outside of the examples."""
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", prose))))


def written(name: str, function: Callable[..., Any]) -> str:
    """Write a call as the page does: no types, and ``*`` where keywords begin."""
    parts: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(str(parameter.replace(annotation=inspect.Parameter.empty)))
    return f"{name}({', '.join(parts)})".replace("'", '"')


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_call_is_described_with_the_arguments_that_it_takes(name: str) -> None:
    assert f"`{written(name, SIGNATURES[name])}`" in TEXT


def test_calls_that_are_reported_to_take_the_same_do() -> None:
    for name, other in THE_SAME.items():
        one, two = (getattr(tierfall.Checkpointer, each) for each in (name, other))
        assert written("", one) == written("", two)


def test_every_public_name_and_member_is_described() -> None:
    expected = {*tierfall.__all__}
    for kind in (tierfall.Checkpointer, tierfall.SaveHandle):
        expected |= {
            name
            for name in vars(kind)
            if not name.startswith(("_", "on_"))  # capture and coordinator call these
            and name not in ("add_blocked", "is_settled")
        }
    expected |= {field.name for report in REPORTS for field in fields(report)} - set(FIGURES)
    assert expected - named() == set()


def test_every_error_and_every_state_is_described() -> None:
    expected = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    expected |= {word.value for word in SaveOutcome}
    expected |= {word.value for word in set(CopyState) - ABSENT}
    assert expected - named() == set()


# The examples ----------------------------------------------------------------------------------------


def shown(code: str) -> list[str]:
    """What a piece is said to print."""
    return re.findall(r"^ *# (.*)$", code, flags=re.MULTILINE)


@pytest.mark.parametrize("name", ["python-api.md", "import-export.md"])
def test_the_examples_run_and_print_what_the_page_shows(
    name: str,
    tmp_path: Path,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = PAGE.with_name(name)
    text = page.read_text()
    (config, *_) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "tiers.yaml").write_text(
        config.replace("kind: host}", f'kind: host, folder: "{memory}"}}')
    )
    monkeypatch.chdir(tmp_path)
    for registry in ("_BY_TYPE", "_BY_NAME"):
        monkeypatch.setattr(value_codec, registry, dict(getattr(value_codec, registry)))
    program: dict[str, Any] = {"__name__": "page"}
    played = 0
    for match in re.finditer(r"^```(python|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        kind, code = match.groups()
        before = text.count("\n", 0, match.start(2))
        if kind == "python":
            exec(compile("\n" * before + code, page, "exec"), program)
            assert capsys.readouterr().out.splitlines() == shown(code), f"{name}:{before + 1}"
        else:
            line, _, expected = code.removeprefix("$ tierfall ").partition("\n")
            result = CliRunner().invoke(app, line.split())
            assert words_of(result.stdout + result.stderr) == words_of(expected)
        played += 1
    tierfall.close_all()
    assert played > 6


def test_every_example_prints() -> None:
    played = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)
    assert len(played) == TEXT.count("```python") > 7
    assert sum(map(len, map(shown, played))) >= sum(code.count("print(") for code in played) > 7
