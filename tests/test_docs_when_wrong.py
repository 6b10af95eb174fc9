"""docs/when-something-is-wrong.md: each message that it quotes is in the source; each row has a cause and a cure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "when-something-is-wrong.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in TEXT.splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| message"))
]
SHORT = 8
"""Parts of a message that are shorter than that are found anywhere."""
# ``close``, ``restore``, ``check``: what is seen, not a message.
QUOTED = sorted({text for row in ROWS for text in re.findall(r"`([^`]+)`", row[0]) if " " in text})


def texts() -> Iterator[str]:
    """Every text of the source; what is filled in later is a line break."""
    for room in ("core", "tiers", "backends", "policies", "tierfall"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())) if path.resolve() == path else ():
                if isinstance(node, ast.JoinedStr):
                    yield "".join(
                        str(v.value) if isinstance(v, ast.Constant) else "\n" for v in node.values
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield re.sub(r"%[sdrg]|%\.\d[fg]", "\n", node.value)


@pytest.fixture(scope="module")
def source() -> str:
    return "\n".join(texts())


def parts_of(message: str) -> list[str]:
    return [part.strip() for part in message.split("...")]


@pytest.mark.parametrize("message", QUOTED)
def test_a_message_that_is_quoted_occurs_in_the_source(message: str, source: str) -> None:
    parts = [part for part in parts_of(message) if len(part) >= SHORT]
    assert parts or message in ("damaged: ...",), "too short to be found"
    assert [part for part in parts if part not in source] == []


def test_every_row_has_a_cause_and_a_cure() -> None:
    assert len(ROWS) > 35
    assert [row for row in ROWS if len(row) != 3 or not all(row)] == []
    assert len(QUOTED) > 30
