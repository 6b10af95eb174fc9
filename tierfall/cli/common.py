"""What all commands share: options, exit codes, STEP, output and the progress bar.

A command prints its output once, at the end: tables and sentences for a person, or one JSON document and nothing else
on stdout. Each problem is one line on stderr. With ``--json`` there is always a document, whatever the error.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NoReturn, Self, TypeVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from tierfall.config import Config, load_config
from tierfall.core.format.catalog import KnownCheckpoint, Listing, merge
from tierfall.core.format.records import Attempt
from tierfall.core.runtime.run_lock import LockOwner
from tierfall.core.types.errors import ConfigError, NotSupportedError, StepError, TierfallError
from tierfall.core.types.text import members
from tierfall.ops.commands import find, unread

T = TypeVar("T")
PIPED_WIDTH = 10_000
NUMBER_MAX = 1e18
_STEP = re.compile(r"([0-9]{1,18})(?:@([0-9]{1,12}))?\Z")


class Exit(IntEnum):
    """Exit codes of all commands."""

    DONE = 0
    COULD_NOT = 1
    USAGE = 2
    INTERRUPTED = 130


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        envvar="TIERFALL_CONFIG",
        metavar="FILE",
        help="The YAML file with the tiers.",
    ),
]
RunOption = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME", help="The run, instead of the one in the file."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")
]
StepArgument = Annotated[
    str,
    typer.Argument(
        metavar="STEP", help="A step of the live lineage (400), or of an attempt (400@7)."
    ),
]


def print_problem(message: object) -> None:
    """Print a problem on stderr."""
    typer.echo(f"tierfall: {message}", err=True)


class CommandRefused(Exception):
    """Ends a command: ``problems`` are printed, ``code`` is the exit code."""

    def __init__(self, problems: Sequence[str], code: Exit = Exit.COULD_NOT) -> None:
        super().__init__(*problems)
        self.problems = list(problems)
        self.code = code


def refuse(message: object, code: Exit = Exit.COULD_NOT) -> NoReturn:
    """End the command with one problem; always raises CommandRefused."""
    raise CommandRefused([str(message)], code)


def code_of(error: TierfallError) -> Exit:
    """Return USAGE for an error of the configuration, COULD_NOT for any other."""
    wrong = isinstance(error, ConfigError) and not isinstance(error, NotSupportedError)
    return Exit.USAGE if wrong else Exit.COULD_NOT


def end(refusal: CommandRefused, *, as_json: bool) -> NoReturn:
    """Print the problems of a refusal, in the requested form, and exit with its code."""
    if as_json:
        typer.echo(to_document({}, refusal.problems, indent=2))
    for problem in refusal.problems:
        print_problem(problem)
    raise typer.Exit(refusal.code)


def load_settings(config: Path | None, run: str | None) -> Config:
    """Read the configuration, with ``run`` in place of its run if given; ends the command where it is invalid."""
    if config is None:
        refuse("no configuration: name a YAML file by --config, or set TIERFALL_CONFIG", Exit.USAGE)
    try:
        return load_config(config, run=run)
    except ConfigError as error:
        refuse(error, Exit.USAGE)


def parse_step(text: str) -> tuple[int, int | None]:
    """Parse STEP as a step and an optional attempt; ends the command where it is neither."""
    match = _STEP.match(text)
    if match is None:
        refuse(f"STEP is {text!r}; expected 400, or 400@7 for attempt 7's", Exit.USAGE)
    return int(match[1]), int(match[2]) if match[2] else None


def parse_option(word: str, text: str, parse: Callable[[str], T]) -> T:
    """Parse the value of an option; ends the command where ``parse`` raises ConfigError."""
    try:
        return parse(text)
    except ConfigError as error:
        refuse(f"{word}: {error}", Exit.USAGE)


@dataclass(slots=True)
class CommandOutput:
    """Collects the output of a command, as tables and text or as a document; any problem makes it exit with
    COULD_NOT."""

    as_json: bool
    document: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _shown: list[Table | str] = field(default_factory=list)

    def show(self, *parts: Table | str) -> None:
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

    def note_no_folders(self, listings: Iterable[Listing], named: tuple[int, int | None]) -> None:
        """Report files and links that are in the place of the folder of the step that STEP names."""
        for listing in listings:
            for error in listing.step_folder_errors(*named):
                self.problem(with_tier(listing.tier, error))

    def refuse(self, message: object, code: Exit = Exit.COULD_NOT) -> NoReturn:
        """End the command with the problems so far and one more."""
        raise CommandRefused([*self.problems, str(message)], code)

    def finish(self) -> None:
        """Print everything; exits with COULD_NOT where there are problems."""
        if self.as_json:
            typer.echo(to_document(self.document, self.problems, indent=2))
        else:
            _print(self._shown)
        for problem in self.problems:
            print_problem(problem)
        if self.problems:
            raise typer.Exit(Exit.COULD_NOT)


def find_step(
    answer: CommandOutput,
    known: Sequence[KnownCheckpoint],
    named: tuple[int, int | None],
    unread: Mapping[str, TierfallError],
    *,
    doing: str,
) -> KnownCheckpoint:
    """Find the checkpoint that STEP names; where no tier has it, ends the command and names the tiers that could not be
    read."""
    try:
        return find(known, *named, doing=doing, unread=unread)
    except StepError as error:
        answer.note_unread(unread)
        answer.refuse(error)


def find_on(
    answer: CommandOutput,
    listings: Sequence[Listing],
    named: tuple[int, int | None],
    tier: str | None,
    *,
    doing: str,
) -> KnownCheckpoint:
    """Find the checkpoint that STEP names, on ``tier`` where one is given; ends the command where it is not there."""
    known = [c for c in merge(listings) if tier is None or tier in c.copies]
    asked = [listing for listing in listings if tier in (None, listing.tier)]
    silent = unread(asked)
    answer.note_no_folders(asked, named)
    return find_step(answer, known, named, silent, doing=doing)


def check_tier(settings: Config, tier: str | None) -> None:
    """End the command where no tier has that name."""
    known = [t.name for t in settings.chain]
    if tier is not None and tier not in known:
        refuse(f"no tier is named {tier!r}; there are {', '.join(known)}", Exit.USAGE)


def to_document(
    document: dict[str, Any], problems: Sequence[str], *, indent: int | None = None
) -> str:
    """Return a document with ``ok`` and ``problems`` as JSON."""
    outcome = {"ok": not problems, "problems": list(problems)}
    return json.dumps(document | outcome, indent=indent, allow_nan=False)


def _print(parts: Iterable[Table | str]) -> None:
    """Print for a person. A file or a pipe gets no line breaks by width, and no spaces at the ends of lines."""
    watched = sys.stdout.isatty()
    console = Console(
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=True,
        width=None if watched else PIPED_WIDTH,
    )
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    text = capture.get()
    typer.echo(text if watched else re.sub(r" +$", "", text, flags=re.MULTILINE), nl=False)


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """Return a table without rules; the columns in ``right`` are aligned to the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def cell(value: T | None, format: Callable[[T], str]) -> str:
    """Format a cell of a table; ``-`` where the value is not known."""
    return "-" if value is None else format(value)


def watched(as_json: bool) -> bool:
    """Whether to show progress: stdout is a terminal, and no JSON is requested."""
    return not as_json and sys.stdout.isatty()


def counted(count: int, one: str, many: str) -> str:
    """Format a count with its noun: ``1 copy``, ``2 copies``."""
    return f"{count} {one if count == 1 else many}"


def with_tier(tier: str, error: object) -> str:
    """Prefix an error with its tier, which many messages name by themselves."""
    return f"tier {tier}: {str(error).removeprefix(f'{tier}: ')}"


def warn_of(elsewhere: Attempt | None) -> None:
    """Warn where the newest attempt is of another node: whether its trainer is alive cannot be known here."""
    if elsewhere is not None:
        print_problem(
            f"the newest attempt, {elsewhere.number}, was started on {elsewhere.node}; whether its trainer is alive "
            "cannot be seen from this machine"
        )


def owner_members(owner: LockOwner | None) -> dict[str, Any] | None:
    return None if owner is None else members(owner, "pid", "node", "since_wall_s")


class _ToStderr(logging.Handler):
    """Prints warnings of the library on stderr, one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        print_problem(record.getMessage())


def listen_to_warnings() -> None:
    """Print warnings of the library on stderr; may be called again."""
    logger = logging.getLogger("tierfall")
    if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        logger.addHandler(_ToStderr(level=logging.WARNING))


def readable_number(value: object) -> float | None:
    """Return a number from an untrusted file; None where it is no number, or too large for a time or a size."""
    if isinstance(value, int | float) and abs(value) < NUMBER_MAX:
        return float(value)
    return None


class ProgressBar:
    """A progress bar with rate and time left; hidden where ``shown`` is false. Thread-safe."""

    def __init__(self, label: str, total: int, *, shown: bool) -> None:
        """``total`` counts bytes."""
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            transient=True,
            disable=not shown,
        )
        self._task: TaskID = self._progress.add_task(label, total=total)
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._progress.advance(self._task, count)

    def set(self, done: int, total: int) -> None:
        with self._lock:
            self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
