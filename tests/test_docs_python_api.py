"""docs/python-api.md: its examples run and print what the page shows, and it names all that users can call and get.

The examples are one program; a comment on a line of its own is what was printed up to there.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import tierfall
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


def examples() -> Iterator[tuple[int, str]]:
    """Yield each piece of the program, and how many lines of the page stand before it."""
    for match in re.finditer(r"^```python\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE):
        yield TEXT.count("\n", 0, match.start(1)), match[1]


def shown(code: str) -> list[str]:
    """What a piece is said to print."""
    return re.findall(r"^ *# (.*)$", code, flags=re.MULTILINE)


def test_the_examples_run_and_print_what_the_page_shows(
    tmp_path: Path,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    block = re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert block is not None
    (tmp_path / "tiers.yaml").write_text(
        block[1].replace("kind: host}", f'kind: host, folder: "{memory}"}}')
    )
    monkeypatch.chdir(tmp_path)
    for registry in ("_BY_TYPE", "_BY_NAME"):
        monkeypatch.setattr(value_codec, registry, dict(getattr(value_codec, registry)))
    program: dict[str, Any] = {"__name__": "page"}
    try:
        for before, code in examples():
            exec(compile("\n" * before + code, PAGE, "exec"), program)
            assert capsys.readouterr().out.splitlines() == shown(code), f"{PAGE.name}:{before + 1}"
    finally:
        program["ckpt"].close()


def test_every_example_is_played() -> None:
    played = [code for _, code in examples()]
    assert len(played) == TEXT.count("```python") > 7
    assert sum(map(len, map(shown, played))) >= sum(code.count("print(") for code in played) > 7
    for code in played:
        ast.parse(code)
