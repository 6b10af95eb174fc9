"""The output of the demo: short lines, and on a terminal a status line that changes while training runs.

In a pipe, the lines are the same without colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from tierfall.core.types.units import format_duration
from tierfall.demo.chain import HOST, TIERS
from tierfall.demo.process import Line


class TierProgress:
    """The state of each tier by the event log so far: its newest checkpoint, and the copy that is arriving."""

    def __init__(self) -> None:
        self.newest: dict[str, int] = {}
        self.arriving: dict[str, Line] = {}
        """The line ``flush_begun`` of each copy that is not over."""

    def add(self, line: Line) -> None:
        match line["kind"]:
            case "opened":
                self.arriving.clear()
            case "captured":
                self.newest[HOST] = line["step"]
            case "flush_begun":
                self.arriving[line["tier"]] = line
            case "committed":
                self.newest[line["tier"]] = line["step"]
                self.arriving.pop(line["tier"], None)
            case "flush_failed" | "flush_given_up":
                self.arriving.pop(line["tier"], None)


class Screen:
    """Prints to standard output, or, with ``aside``, to standard error."""

    def __init__(self, *, aside: bool = False) -> None:
        self._console = Console(stderr=aside, highlight=False)
        self._live: Live | None = None

    def print(self, text: str = "") -> None:
        """Print a line; ``[bold]`` and the like are rich's markup."""
        self._console.print(text, soft_wrap=True)

    def quote(self, text: str) -> None:
        """Print text of somebody else's as it is, indented."""
        for line in text.splitlines():
            self.print(f"    {escape(line)}")

    def head(self, number: int, text: str) -> None:
        self.print()
        self.print(f"[bold]{number}. {text}[/bold]")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        widths = [max(map(len, cells)) + 3 for cells in zip(columns, *rows, strict=True)]
        for number, row in enumerate((columns, *rows)):
            line = "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.print("  " + (f"[bold]{line.rstrip()}[/bold]" if number == 0 else line.rstrip()))

    @contextmanager
    def training(self) -> Iterator[None]:
        """A context for the steps of one trainer: on a terminal it shows the status line."""
        with Live(console=self._console, transient=True, auto_refresh=False) as self._live:
            yield

    def step(self, line: Line, progress: TierProgress | None, *, keep: bool) -> None:
        """Print a step, and, of a training that saves, the state of each tier; with ``keep`` the line remains on
        screen."""
        live = self._live if self._console.is_terminal else None
        if not keep and live is None:
            return
        shown = f"  step {line['step']:>4}  loss {float.fromhex(line['loss']):.3f}"
        if progress is not None:
            shown += "".join(f"  {text}" for text in describe(progress, line["wall_time_s"]))
        if keep:
            self.print(shown)
        elif live is not None:
            text = Text.from_markup(shown)
            text.no_wrap, text.overflow = True, "ellipsis"
            live.update(text, refresh=True)


def describe(progress: TierProgress, now_s: float) -> Iterator[str]:
    """Describe for each tier its newest checkpoint, and the copy that is arriving and since when."""
    for name in TIERS if progress.newest else ():
        text = f"[bold]{name}[/bold] {progress.newest.get(name, '-'):>3}"
        if (copy := progress.arriving.get(name)) is not None:
            for_s = max(0.0, now_s - copy["wall_time_s"])
            text += f" [yellow]({copy['step']} arriving for {format_duration(for_s)})[/yellow]"
        yield text
