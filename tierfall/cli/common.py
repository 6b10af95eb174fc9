"""What all commands share beside their arguments: the configuration, finding steps, output and the progress bar.

A command prints its output once, at the end: tables and sentences for a person, or one JSON document and nothing else
on stdout. Each problem is one line on stderr. With ``--json`` there is always a document, whatever the error.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
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

from tierfall.cli.usage import (
    DEFAULT_CONFIG,
    Asked,
    CommandRefused,
    Exit,
    StepName,
    print_out,
    print_problem,
    refuse,
    to_document,
)
from tierfall.config import Config, load_config
from tierfall.config.fields import is_address
from tierfall.core.format.catalog import KnownCheckpoint, Listing, merge
from tierfall.core.format.records import Attempt
from tierfall.core.runtime.run_lock import LockOwner
from tierfall.core.types.errors import ConfigError, StepError, TierfallError
from tierfall.core.types.text import format_some, hint_at, members
from tierfall.core.types.units import format_duration
from tierfall.core.types.values import CheckpointId
from tierfall.ops.commands import Watch, find, restorable, unread, without_good_copy
from tierfall.ops.reader import config_of_place, find_runs
from tierfall.setup.places import seen_by_one
from tierfall.telemetry.reports import format_unread

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
_STATE = re.compile(rf"(?<!\S)(?:{'|'.join(map(re.escape, _STYLES))})(?!\S)")


def load_settings(asked: Asked, *, doing: str = "") -> Config:
    """Read the configuration as this node sees it; ends the command if it is invalid. A command that does more than
    read says so by its name, ``doing``: it needs a file."""
    return seen_by_one(load_settings_of_all(asked, doing=doing))


def load_settings_if_any(asked: Asked, *, doing: str = "") -> Config | None:
    """Read the configuration as ``load_settings`` does; None if none is named, and there is no ``./tiers.yaml``."""
    if asked.config is None and not Path(DEFAULT_CONFIG).exists():
        return None
    return load_settings(asked, doing=doing)


def load_settings_of_all(asked: Asked, *, doing: str = "") -> Config:
    """Read the configuration as a job on several nodes sees it, with their memory."""
    if asked.config is None and not Path(DEFAULT_CONFIG).exists():
        refuse(
            f"no configuration: there is no {DEFAULT_CONFIG} here; name a YAML file by --config, or set "
            "TIERFALL_CONFIG; 'tierfall init' writes one",
            Exit.USAGE,
        )
    source = asked.config or DEFAULT_CONFIG
    is_place = is_address(source) or Path(source).expanduser().is_dir()
    if is_place and doing:
        refuse(
            f"{doing}: a folder or an address is only read; name the YAML file of the run by --config",
            Exit.USAGE,
        )
    try:
        return (
            config_of_place(source, asked.run) if is_place else load_config(source, run=asked.run)
        )
    except ConfigError as error:
        refuse(error, Exit.USAGE)


def name_other_runs(settings: Config) -> str:
    """Name the tiers that could not be read, and the runs of the others, after a run that has no checkpoint."""
    found, unread = find_runs(settings)
    names = [name for name in found if name != settings.run]
    others = f"; the tiers have the runs {format_some(names)}" if names else ""
    return format_unread(unread) + others


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

    def note_newer(self, listings: Sequence[Listing], newest: CheckpointId | None) -> None:
        """Report the checkpoints after ``newest``, which can be restored, of which no tier has a good copy."""
        for id, why in sorted(without_good_copy(listings).items()):
            if newest is None or id > newest:
                self.problem(f"{id} is newer, and {why}")

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


def find_step(
    answer: CommandOutput,
    listings: Sequence[Listing],
    name: StepName,
    tier: str | None = None,
    *,
    doing: str,
) -> KnownCheckpoint:
    """Find the checkpoint that STEP names, on ``tier`` if one is given; if it is not there, end the command and name
    the tiers that could not be read."""
    known = [c for c in merge(listings) if tier is None or tier in c.copies]
    silent = unread([listing for listing in listings if tier in (None, listing.tier)])
    try:
        if name.step is not None:
            return find(known, name.step, name.attempt, doing=doing, unread=silent)
        found = _find_latest(known, silent, doing)
    except StepError as error:
        answer.note_unread(silent)
        answer.refuse(error)
    answer.note_newer(listings, found.id)
    return found


def _find_latest(
    known: Sequence[KnownCheckpoint], unread: Iterable[str], doing: str
) -> KnownCheckpoint:
    """Find the newest checkpoint that can be restored; StepError if there is none, or if a tier that could not be read
    may hold a newer one."""
    newest = restorable(known)
    if silent := ", ".join(unread):
        seen = f"; of the others it is {newest[0]}" if newest else ""
        raise StepError(f"{doing}: {silent} may hold a later step than the others{seen}: name it")
    if not newest:
        raise StepError(f"{doing}: the run has no step that can be restored")
    return next(c for c in known if c.id == newest[0])


def check_tier(settings: Config, tier: str | None) -> None:
    """End the command where no tier has that name."""
    known = [t.name for t in settings.chain]
    if tier is not None and tier not in known:
        hint = hint_at(tier, known)
        refuse(f"no tier is named {tier!r}; there are {', '.join(known)}{hint}", Exit.USAGE)


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


def coloured(state: str, *, before: str = "") -> Text:
    """Return the state of a copy in its colour."""
    found = _STATE.match(state)
    return Text(before).append(state, style=_STYLES[found[0]] if found else "")


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """Return a table without rules; the columns in ``right`` are aligned to the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def copies_table(
    head: Sequence[str],
    tiers: Sequence[str],
    tail: Sequence[str],
    rows: Sequence[tuple[Sequence[str], Mapping[str, str], Sequence[str]]],
) -> Table | Text:
    """Return a table of checkpoints with a column for the state on each tier, between the columns ``head`` and those of
    ``tail`` that are not empty; with one column for all tiers if it would be wider than the terminal."""
    used = [place for place in range(len(tail)) if any(last[place] for _, _, last in rows)]
    right = {*head, *tail} - {REMARKS}
    columns = (*head, *tiers, *(tail[place] for place in used))
    lines = [
        columns,
        *(
            (*first, *(states[t] for t in tiers), *(last[place] for place in used))
            for first, states, last in rows
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if sum(widths) + 2 * len(widths) - 2 <= screen_width():
        # Not a Table: rich takes a second for a thousand rows.
        pads = [str.rjust if name in right else str.ljust for name in columns]
        padded = (map(lambda pad, text, n: pad(text, n), pads, line, widths) for line in lines)
        drawn = Text("\n".join("  ".join(cells).rstrip() for cells in padded))
        drawn.stylize("bold", 0, len(drawn.plain.partition("\n")[0]))
        drawn.highlight_regex(_STATE, lambda state: _STYLES[state])
        return drawn
    narrow = table(*head, "COPIES", *([REMARKS] if used else []), right=right)
    for column in narrow.columns[: len(head)]:
        column.no_wrap = True
    for first, states, last in rows:
        copies = [
            Text(tier) if state == "committed" else coloured(state, before=f"{tier} ")
            for tier, state in states.items()
            if state != "-"
        ]
        remarks = [
            value if name == REMARKS else f"{name} {value}"
            for name, value in zip(tail, last, strict=True)
            if value
        ]
        shown = [", ".join(remarks)] if used else []
        narrow.add_row(*first, Text(", ").join(copies), *shown)
    return narrow


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


def warn_of(elsewhere: Attempt | None) -> None:
    """Warn where the newest attempt is of another node: whether its trainer is alive cannot be known here."""
    if elsewhere is not None:
        print_problem(
            f"the newest attempt, {elsewhere.number}, was started on {elsewhere.node}; whether its trainer is alive "
            "cannot be seen from this machine"
        )


def owner_members(owner: LockOwner | None) -> dict[str, Any] | None:
    return None if owner is None else members(owner, "pid", "node", "since_wall_s")


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
