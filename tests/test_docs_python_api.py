"""docs/python-api.md names all that users can call and get; its examples, and those of docs/import-export.md, run and
print what the page shows.

The examples of a page are one program; a comment on a line of its own is what was printed up to there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
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
THE_SAME = {"maybe_save": "save", "unpin": "pin", "untag": "tag"}
FUNCTIONS = ("open", "load", "open_tensors", "item", "register_codec", "close_all", "read_pointer")
NOT_CALLED_BY_USERS = ("add_blocked", "is_settled")
PAGES_OF_THEIR_OWN = ("CadenceReport", "TierCadence", "Compression", "UnknownValue")
REPORTS = [
    report
    for name in tierfall.__all__
    if is_dataclass(report := getattr(tierfall, name)) and name not in PAGES_OF_THEIR_OWN
]


def methods(kind: type) -> dict[str, Callable[..., Any]]:
    """The members that users call or read; capture and coordinator call ``on_...``."""
    return {
        name: member
        for name, member in vars(kind).items()
        if not name.startswith(("_", "on_")) and name not in NOT_CALLED_BY_USERS
    }


def signatures() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Each call, by its name on the page."""
    for name in FUNCTIONS:
        yield f"tierfall.{name}", getattr(tierfall, name)
    for kind in (tierfall.Checkpointer, tierfall.SaveHandle):
        for name, member in methods(kind).items():
            if callable(member) and name not in (*THE_SAME, "guard"):
                yield "Checkpointer.load" if name == "load" else name, member


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


def test_a_call_is_described_with_the_arguments_that_it_takes() -> None:
    expected = [written(name, function) for name, function in signatures()]
    unwrapped = " ".join(TEXT.split())  # a call may be longer than a line
    assert [call for call in expected if f"`{call}`" not in unwrapped] == []


def test_calls_that_are_reported_to_take_the_same_do() -> None:
    for name, other in THE_SAME.items():
        one, two = (getattr(tierfall.Checkpointer, each) for each in (name, other))
        assert written("", one) == written("", two)


def test_every_public_name_and_member_is_described() -> None:
    expected = {*tierfall.__all__}
    expected |= methods(tierfall.Checkpointer).keys() | methods(tierfall.SaveHandle).keys()
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
