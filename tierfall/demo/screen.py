"""What a person reads: plain short lines, and, on a terminal, one more that changes as bytes arrive.

Piped, the lines are the same, without colour. It draws; it decides nothing.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from tierfall.core.types.units import format_rate, format_size
from tierfall.demo.events import StepDone, TierNow

RATE_WINDOW_S = 1.0


class Screen:
    """Prints to standard output, or, with ``aside``, to standard error."""

    def __init__(self, tiers: Sequence[str], *, aside: bool = False) -> None:
        self._tiers = tiers
        self._console = Console(file=sys.stderr if aside else sys.stdout, highlight=False)
        self._live: Live | None = None
        self._moved: dict[str, deque[tuple[float, int]]] = {}

    def say(self, text: str = "") -> None:
        """Print a line; ``[bold]`` and the like are rich's markup."""
        self._console.print(text, soft_wrap=True)

    def quote(self, text: str) -> None:
        """Print text of somebody else's as it is, indented."""
        for line in text.splitlines():
            self.say(f"    {escape(line)}")

    def head(self, number: int, text: str) -> None:
        self.say()
        self.say(f"[bold]{number}. {text}[/bold]")

    @contextmanager
    def training(self) -> Iterator[None]:
        """Bracket the steps of one trainer: on a terminal, the changing line stands for as long."""
        self._moved = {name: deque() for name in self._tiers}
        with Live(console=self._console, transient=True, auto_refresh=False) as self._live:
            yield

    def step(self, event: StepDone, *, keep: bool) -> None:
        """Show where a step's bytes are; ``keep`` leaves the line standing."""
        line = self._line(event)
        if keep:
            self.say(line)
        elif self._live is not None and self._console.is_terminal:
            text = Text.from_markup(line)
            text.no_wrap, text.overflow = True, "ellipsis"
            self._live.update(text, refresh=True)

    def _line(self, event: StepDone) -> str:
        loss = float.fromhex(event.loss)
        parts = [f"  step {event.step:>4}  loss {loss:.3f}"]
        for name in self._tiers if event.tiers else ():
            tier = event.tiers.get(name, _NOTHING)
            parts.append(_describe(name, tier, self._rate(name, tier, event), event))
        return "  ".join(parts)

    def _rate(self, name: str, tier: TierNow, event: StepDone) -> float:
        """Bytes a second that came to a tier over the last second or so."""
        seen = self._moved[name]
        seen.append((event.time_s, tier.moved_bytes))
        while len(seen) > 2 and event.time_s - seen[0][0] > RATE_WINDOW_S:
            seen.popleft()
        (then_s, then), (now_s, now) = seen[0], seen[-1]
        return (now - then) / (now_s - then_s) if now_s > then_s else 0.0

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        widths = [max(map(len, cells)) + 3 for cells in zip(columns, *rows, strict=True)]
        for number, row in enumerate((columns, *rows)):
            line = "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.say("  " + (f"[bold]{line.rstrip()}[/bold]" if number == 0 else line.rstrip()))


_NOTHING = TierNow(whole=(), arriving=None, arrived_bytes=0, moved_bytes=0)


def _describe(name: str, tier: TierNow, rate: float, event: StepDone) -> str:
    text = f"[bold]{name}[/bold] {_step(tier.newest) if tier.newest else '-':>3}"
    if tier.arriving is None or event.totals is None:
        return text
    share = tier.arrived_bytes / max(event.totals.image_bytes, 1)
    arriving = f"({_step(tier.arriving)} arriving: {share:.0%} at {format_rate(rate)})"
    return f"{text} [yellow]{arriving}[/yellow]"


def _step(checkpoint: str) -> str:
    return checkpoint.partition("@")[0]


def format_edges(edges: Mapping[str, int]) -> list[str]:
    """One line per edge: ``host->slow  234 MB``."""
    width = max((len(edge) for edge in edges), default=0)
    return [
        f"{edge.replace('->', ' -> '):<{width + 2}}  {format_size(count)}"
        for edge, count in sorted(edges.items())
    ]
