"""How commands print: tables and sentences for a person, or one JSON document. This module imports no torch.

A command prints its output once, at the end: tables and sentences for a person, or one JSON document and nothing else
on stdout. Each problem is one line on stderr. With ``--json`` a command that fails prints its document, too.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from rich.console import Console
from rich.text import Text

from tierfall.cli.usage import Asked, CommandRefused, Exit, print_out, proposed, to_document
from tierfall.core.types.errors import TierfallError
from tierfall.core.types.units import format_duration, format_rate, format_share, format_size

T = TypeVar("T")
Part = Text | str
"""What a person is shown: a table, or lines."""
PIPED_WIDTH = 10_000
GLUE = "\xa0"
"""Stands for a space at which no line ends."""
STYLES = {
    "damaged": "bold red",
    "DAMAGED": "bold red",
    "unreadable": "bold red",
    "set aside": "red",
    "?": "red",
    "owed": "yellow",
    "unfinished": "yellow",
    "arriving": "cyan",
}
"""Colours of the states that need attention. Rich applies them on a terminal, and honours NO_COLOR and FORCE_COLOR."""
_STATE = re.compile(rf"(?<!\S)(?:{'|'.join(map(re.escape, STYLES))})(?![^\s,])")
_MARK = 0xE000
"""Added to each character of a state until it is drawn: the same word elsewhere in a table is none."""
_MARKED = {"".join(chr(ord(c) + _MARK) for c in state): state for state in STYLES}


@dataclass(slots=True)
class CommandOutput:
    """Collects the output of a command, as tables and text or as a document; any problem makes it exit with
    COULD_NOT."""

    asked: Asked
    document: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _shown: list[Part] = field(default_factory=list)

    @property
    def as_json(self) -> bool:
        return self.asked.as_json

    def show(self, *parts: Part) -> None:
        """Add tables and lines for a person, in order."""
        self._shown += [proposed(part) if isinstance(part, str) else part for part in parts]

    def problem(self, message: object) -> None:
        self.problems.append(str(message))

    def note_unread(self, unread: Mapping[str, TierfallError]) -> None:
        """Report each tier that could not be read, once."""
        for tier, error in unread.items():
            line = with_tier(tier, error, " could not be read")
            if line not in self.problems:
                self.problem(line)

    def refuse(self, message: object, code: Exit = Exit.COULD_NOT) -> NoReturn:
        """End the command with the problems so far and one more."""
        raise CommandRefused([*self.problems, str(message)], code)

    def finish(self) -> None:
        """Print everything; problems end the command."""
        if not self.as_json:
            print_parts(self._shown)
        if self.problems:
            raise CommandRefused(self.problems, document=self.document)
        if self.as_json:
            print_out(to_document(self.document, [], indent=2) + "\n")


def screen_width() -> int:
    """Return the columns that a line may have: those of the terminal; a file or a pipe has no limit."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH


def print_parts(parts: Iterable[Part]) -> None:
    """Print for a person. A terminal gets lines that end between words; a file or a pipe gets no line breaks by width,
    and no spaces at the ends of lines."""
    at_terminal = sys.stdout.isatty()
    console = Console(
        file=io.StringIO(),
        force_terminal=at_terminal or None,  # None: FORCE_COLOR decides
        width=screen_width(),
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=True,
    )
    with console.capture() as capture:
        for part in parts:
            console.print(_wrapped(part, console.width) if isinstance(part, str) else part)
    text = capture.get()
    print_out(text if at_terminal else re.sub(r" +$", "", text, flags=re.MULTILINE))


def _wrapped(text: str, width: int) -> str:
    return "\n".join(
        textwrap.fill(
            line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        for line in text.split("\n")
    )


def table(names: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> Text:
    """Return a table without rules, and without columns that are empty; those in ``right`` are aligned to the right,
    what ``as_state`` returned has its colour."""
    return styled(aligned(names, [*rows], right))


FORMATS: Mapping[str, Callable[[Any], str]] = {
    "bytes_per_s": format_rate,
    "bytes_per_second": format_rate,
    "bytes": format_size,
    "bytes_max": format_size,
    "_s": format_duration,
    "busy": format_share,
    "ettr": "{:.2%}".format,
    "ranks": "{:,}".format,
    "kept": str,
}
"""The first that the name of a member ends with; others are text, which is aligned to the left."""


def listed(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> Text:
    """Return members of a document as a table: columns, and the member in each."""
    right, cells = [], []
    for column, member in columns.items():
        shown = next((FORMATS[end] for end in FORMATS if member.endswith(end)), None)
        right += [column] if shown else []
        cells.append([cell(each[member], shown or str) for each in rows])
    return table(list(columns), zip(*cells, strict=True), right)


def as_state(cell: str) -> str:
    """Mark the state of a copy in a cell, for its colour."""
    return _STATE.sub(lambda found: "".join(chr(ord(c) + _MARK) for c in found[0]), cell)


def styled(drawn: Sequence[str]) -> Text:
    lines = [_wrapped(line, screen_width()).replace(GLUE, " ") for line in drawn]
    text = Text("\n".join(lines))
    text.stylize("bold", 0, len(lines[0]))
    for marked, state in _MARKED.items():
        text.highlight_words([marked], STYLES[state])
        text.plain = text.plain.replace(marked, state)
    return text


def aligned(
    names: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str]
) -> list[str]:
    """Return the lines of a table: rich's own takes a second for a thousand rows. Where a line is too long, it ends
    between two columns, or between the words of one that is aligned to the left."""
    columns = [each for each in zip(names, *rows, strict=True) if any(each[1:]) or not rows]
    padded = []
    for column in columns:
        width = max(map(len, column))
        if column[0] in right:
            padded.append([cell.replace(" ", GLUE).rjust(width) for cell in column])
        else:
            padded.append([cell.ljust(width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def cell(value: T | None, format: Callable[[T], str]) -> str:
    """Format a cell of a table; ``-`` where the value is not known."""
    return "-" if value is None else format(value)


def counted(count: int, one: str, many: str) -> str:
    """Format a count with its noun: ``1 copy``, ``2 copies``."""
    return f"{count} {one if count == 1 else many}"


def with_tier(tier: str, error: object, what: str = "") -> str:
    """Prefix an error with its tier, which many messages name by themselves, and with ``what`` is with it."""
    return f"tier {tier}{what}: {str(error).removeprefix(f'{tier}: ')}"
