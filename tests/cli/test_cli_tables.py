"""Tables for people: each column has a name, and of metrics they show those that rules use."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli

import tierfall
from tests.steps import state_of, wait_until

METRICS = {"loss": 0.123456, "tokens": 123456.789}
BEST = {"best": {"metric": "loss", "mode": "min", "count": 9}}


@pytest.fixture
def cli(make_cli: Callable[..., Cli]) -> Cli:
    """Two steps with a remark and two metrics, one of which a rule uses."""
    made = make_cli(disk={"retain": BEST})
    with tierfall.open(made.config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), metrics=METRICS, tags=["try"], block=True)
    return made


def table(text: str, first: str) -> list[str]:
    """The lines of the table whose heading begins with a word."""
    lines = iter(text.splitlines())
    found = [next(line for line in lines if line.split()[:1] == [first])]
    for line in lines:
        if "  " not in line:
            break
        found.append(line)
    return found


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("ls", "STEP"),
        ("ls --metrics", "STEP"),
        ("watch --once", "TIER"),
        ("watch --once --metrics", "STEP"),
        ("prune --dry-run", "TIER"),
        ("verify", "STEP"),
        ("runs", "RUN"),
    ],
)
def test_each_column_has_a_name(cli: Cli, words: str, first: str) -> None:
    head, *rows = table(cli(*words.split()).out, first)
    assert rows
    names = [(found.start(), found.end()) for found in re.finditer(r"\S+( \S+)*", head)]
    for row in rows:
        for value in re.finditer(r"\S+( \S+)*", row):
            over = [n for n in names if value.start() < n[1] and n[0] < value.end()]
            assert len(over) == 1, f"{value[0]!r} has no heading of its own:\n{head}\n{row}"


def test_beside_a_trainer_watch_shows_tags_and_metrics_too(make_cli: Callable[..., Cli]) -> None:
    cli = make_cli(disk={"retain": BEST})
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(
            1, state_of(1), metrics={**METRICS, "bad": float("nan")}, tags=["try"], block=True
        )

        def seen() -> dict[str, Any]:
            found: list[dict[str, Any]] = cli.json("watch", "--once")["checkpoints"]
            return found[0] if found else {}

        wait_until(lambda: seen().get("metrics"), "the status has the metrics")
        assert seen()["metrics"] == {**METRICS, "bad": "nan"}
        head, row = table(cli("watch", "--once").out, "STEP")
        assert ("loss" in head, "tokens" in head, "#try" in row) == (True, False, True)


def test_only_the_state_of_a_copy_has_its_colour(
    make_cli: Callable[..., Cli], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run, a tier or an entry may have the name of a state."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    cli = make_cli(disk={"name": "owed"})
    cli.configure({**cli.config, "run": "damaged"})
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    assert "\x1b[1;31m" not in cli("runs").out
    assert "\x1b[33m" not in cli("ls").out
    (image,) = tmp_path.glob("*/damaged/step-*/*.safetensors")
    image.write_bytes(b"")
    assert "\x1b[1;31mdamaged\x1b[0m" in cli("ls", code=1).out
