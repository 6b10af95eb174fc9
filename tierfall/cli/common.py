"""The output of all commands: text, tables, documents and the progress bar.

A command prints its output once, at the end: tables and sentences for a person, or one JSON document and nothing else
on stdout. Each problem is one line on stderr. With ``--json`` there is always a document, whatever the error.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from tierfall.cli.usage import CommandRefused, Exit, print_out, to_document
from tierfall.config import Config
from tierfall.core.types.errors import TierfallError
from tierfall.core.types.units import format_duration, format_size
from tierfall.core.types.values import CopyState
from tierfall.ops.commands import Watch
from tierfall.telemetry.reports import CheckpointInfo

T = TypeVar("T")
Part = Table | Text | str
"""What a person is shown: a table, or lines."""
PIPED_WIDTH = 10_000
REMARKS = "REMARKS"
_STYLES = {
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
_STATE = re.compile(rf"(?<!\S)(?:{'|'.join(map(re.escape, _STYLES))})(?![^\s,])")


def of_this_user(settings: Config) -> str:
    """Return whose host memory a command has seen, to append to its name: the default folder is that of one user."""
    return "" if settings.host.folder else " of this user"


@dataclass(slots=True)
class CommandOutput:
    """Collects the output of a command, as tables and text or as a document; any problem makes it exit with
    COULD_NOT."""

    as_json: bool
    document: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _shown: list[Part] = field(default_factory=list)

    def show(self, *parts: Part) -> None:
        """Add tables and lines for a person, in order."""
        self._shown.extend(parts)

    def problem(self, message: object) -> None:
        self.problems.append(str(message))

    def note_unread(self, unread: Mapping[str, TierfallError]) -> None:
        """Report each tier that could not be read, once."""
        for tier, error in unread.items():
            line = f"tier {tier} could not be read: {error}"
            if line not in self.problems:
                self.problem(line)

    def refuse(self, message: object, code: Exit = Exit.COULD_NOT) -> NoReturn:
        """End the command with the problems so far and one more."""
        raise CommandRefused([*self.problems, str(message)], code)

    def finish(self) -> None:
        """Print everything; problems end the command."""
        if not self.as_json:
            _print(self._shown)
        if self.problems:
            raise CommandRefused(self.problems, document=self.document)
        if self.as_json:
            print_out(to_document(self.document, [], indent=2) + "\n")


def document_of(run: str, of_steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the document of one step as it is; those of several as ``steps``."""
    return of_steps[0] if len(of_steps) == 1 else {"run": run, "steps": list(of_steps)}


def screen_width() -> int:
    """Return the columns that a line may have: those of the terminal; a file or a pipe has no limit."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH


def _print(parts: Iterable[Part]) -> None:
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


def coloured(state: str) -> Text:
    """Return the state of a copy in its colour."""
    found = _STATE.match(state)
    return Text(state, style=_STYLES[found[0]] if found else "")


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """Return a table without rules; the columns in ``right`` are aligned to the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def checkpoints_table(
    shown: Sequence[CheckpointInfo],
    tiers: Sequence[str],
    metrics: Sequence[str],
    *,
    now_s: float,
    unread: Collection[str] = (),
    writing: Collection[tuple[int, int, str]] = (),
) -> Text:
    """Return a table of checkpoints with a column for the state on each tier, for each metric and for remarks; with one
    column for all tiers if it would be wider than the terminal. ``unread`` are tiers that could not be read,
    ``writing`` the copies in progress, as step, attempt and tier."""

    def state(one: CheckpointInfo, tier: str) -> str:
        found = "?" if tier in unread else one.on(tier)
        is_arriving = found == "owed" and (one.step, one.attempt, tier) in writing
        return str(CopyState.ARRIVING) if is_arriving else found

    narrow_head, wide_head = ("STEP", "AGE", "SIZE", "COPIES"), ("STEP", "AGE", "SIZE", *tiers)
    wide, narrow = [], []
    for one in shown:
        age = cell(one.wall_time_s, lambda at: rough_duration(max(0.0, now_s - at)))
        head = (f"{one.step}@{one.attempt}", age, format_size(one.bytes))
        states = {tier: state(one, tier) for tier in tiers}
        values = {name: format_metric(one.metrics.get(name)) for name in metrics}
        remarks = ", ".join(one.remarks)
        wide.append((*head, *states.values(), *values.values(), remarks))
        copies = [
            tier if found == CopyState.COMMITTED else f"{tier} {found}"
            for tier, found in states.items()
            if found != "-"
        ]
        told = [*(f"{name} {value}" for name, value in values.items() if value), remarks]
        narrow.append((*head, ", ".join(copies), ", ".join(filter(None, told))))
    right = {"STEP", "AGE", "SIZE", *metrics}
    drawn = _aligned((*wide_head, *metrics, REMARKS), wide, right)
    if max(map(len, drawn)) > screen_width():
        drawn = _aligned((*narrow_head, REMARKS), narrow, right)
    text = Text(_wrapped("\n".join(drawn), screen_width()))
    text.stylize("bold", 0, len(drawn[0]))
    text.highlight_regex(_STATE, lambda state: _STYLES[state])
    return text


def _aligned(
    names: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str]
) -> list[str]:
    """Return the lines of a table, without columns that are empty: not a Table, as rich takes a second for a thousand
    rows."""
    columns = [(name, *cells) for name, *cells in zip(names, *rows, strict=True) if any(cells)]
    padded = []
    for column in columns:
        pad, width = str.rjust if column[0] in right else str.ljust, max(map(len, column))
        padded.append([pad(cell, width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def cell(value: T | None, format: Callable[[T], str]) -> str:
    """Format a cell of a table; ``-`` where the value is not known."""
    return "-" if value is None else format(value)


def format_metric(value: float | str | None) -> str:
    """Format a metric with four digits; nothing if a checkpoint lacks it."""
    return "" if value is None else f"{float(f'{float(value):.4g}'):g}"


def rough_duration(seconds: float) -> str:
    """Format a time in its largest unit: ``5 h``."""
    return " ".join(format_duration(round(seconds)).split()[:2])


def watched(as_json: bool) -> bool:
    """Whether to show progress: stdout is a terminal, and no JSON is requested."""
    return not as_json and sys.stdout.isatty()


def counted(count: int, one: str, many: str) -> str:
    """Format a count with its noun: ``1 copy``, ``2 copies``."""
    return f"{count} {one if count == 1 else many}"


def with_tier(tier: str, error: object) -> str:
    """Prefix an error with its tier, which many messages name by themselves."""
    return f"tier {tier}: {str(error).removeprefix(f'{tier}: ')}"


def describe_new(tier: str, place: str) -> str:
    """Format a tier whose folder no run has used."""
    return f"{tier}: {place} is not created yet: the first training creates it"


@contextmanager
def progress_bar(label: str, *, as_json: bool) -> Iterator[Watch]:
    """Show a progress bar with rate and time left, if a person is watching; give what moves it, from any thread."""
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        transient=True,
        disable=not watched(as_json),
    ) as progress:
        task = progress.add_task(label, total=0)
        yield lambda done, total: progress.update(task, completed=done, total=total)
