"""docs/when-something-is-wrong.md: each message that it quotes is in the source; each row has a cause and a cure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

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
    """Every text of the source: of an f-string, each part; what is filled in later by % is a line break."""
    for room in ("core", "tiers", "backends", "policies", "tierfall"):
        for path in (ROOT / room).rglob("*.py"):
            if path.resolve() == path:
                yield from texts_of(SourceFileLoader(path.stem, str(path)).get_code(path.stem))


def texts_of(constant: object) -> Iterator[str]:
    if isinstance(constant, CodeType):
        constant = constant.co_consts
    if isinstance(constant, (tuple, frozenset)):
        for each in constant:
            yield from texts_of(each)
    elif isinstance(constant, str):
        yield re.sub(r"%[sdrg]|%\.\d[fg]", "\n", constant)


def test_a_message_that_is_quoted_occurs_in_the_source() -> None:
    source = "\n".join(texts())
    for message in QUOTED:
        parts = [part.strip() for part in message.split("...")]
        parts = [part for part in parts if len(part) >= SHORT]
        assert parts or message in ("damaged: ...",), f"{message}: too short to be found"
        assert [part for part in parts if part not in source] == [], message


def test_every_row_has_a_cause_and_a_cure() -> None:
    assert len(ROWS) > 35
    assert [row for row in ROWS if len(row) != 3 or not all(row)] == []
    assert len(QUOTED) > 30
