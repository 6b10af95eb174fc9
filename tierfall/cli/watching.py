"""``watch``: a live view of tiers, copies, transfers and events, beside a trainer or without one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from tierfall.cli import picturing
from tierfall.cli.common import (
    CommandOutput,
    ConfigOption,
    Exit,
    JsonOption,
    RunOption,
    load_settings,
    refuse,
)
from tierfall.cli.facts import RunFacts
from tierfall.cli.picturing import RunView
from tierfall.config import Config
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.units import format_duration, parse_duration
from tierfall.ops.reader import RunReader
from tierfall.ops.watch import LIST_EVERY_S, Watcher

EVERY_S_LEAST = 0.1


def watch(
    every: Annotated[
        str, typer.Option("--every", metavar="TIME", help="How often to look again.")
    ] = "1s",
    once: Annotated[bool, typer.Option("--once", help="Show one frame, and end.")] = False,
    config: ConfigOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a run as it is: its tiers, its copies, what is on its way, what a loss would take, and the last events."""
    settings = load_settings(config, run)
    every_s = _every(every)
    with Watcher(settings, run=settings.run) as watcher:
        frames = _frames(settings, watcher)
        if once:
            _once(next(frames), as_json=as_json)
            return
        try:
            with _screen(as_json=as_json) as show:
                for picture in frames:
                    show(picture)
                    time.sleep(every_s)
        except KeyboardInterrupt:
            return  # that is how it is ended


def _every(text: str) -> float:
    try:
        every_s = parse_duration(text)
    except ConfigError as error:
        refuse(f"--every: {error}", Exit.USAGE)
    if every_s < EVERY_S_LEAST:
        least = format_duration(EVERY_S_LEAST)
        refuse(f"--every: {text!r} is too often; expected {least} or more", Exit.USAGE)
    return every_s


def _frames(settings: Config, watcher: Watcher) -> Iterator[RunView]:
    """Look again and again: at what a living trainer says, else at the tiers, less often."""
    facts: RunFacts | None = None
    while True:
        glimpse = watcher.look()
        if (live := glimpse.live) is not None:
            facts = None
            yield picturing.of_status(live, glimpse)
            continue
        if facts is None or glimpse.wall_time_s >= facts.wall_time_s + LIST_EVERY_S:
            facts = _listed(settings)
        yield picturing.of_facts(settings.run, facts, glimpse)


def _listed(settings: Config) -> RunFacts:
    with RunReader(settings) as reader:
        return RunFacts.gather(reader)


def _once(picture: RunView, *, as_json: bool) -> None:
    answer = CommandOutput(as_json, document=picture.document)
    for problem in picture.problems:
        answer.problem(problem)
    answer.show(*picture.shown())
    answer.finish()


@contextmanager
def _screen(*, as_json: bool) -> Iterator[Any]:
    """Say where frames go: a line of JSON each, a part of the terminal, or one below the other where nobody watches."""
    if as_json:
        yield _print_line
    elif not sys.stdout.isatty():
        yield _print_below
    else:
        with Live(auto_refresh=False, screen=False) as live:
            yield lambda picture: live.update(_drawn(picture), refresh=True)


def _print_line(picture: RunView) -> None:
    outcome = {"ok": not picture.problems, "problems": list(picture.problems)}
    typer.echo(json.dumps(picture.document | outcome, allow_nan=False))
    sys.stdout.flush()


def _print_below(picture: RunView) -> None:
    answer = CommandOutput(as_json=False)
    answer.show(*picture.shown(), *(f"tierfall: {problem}" for problem in picture.problems), "")
    answer.finish()
    sys.stdout.flush()


def _drawn(picture: RunView) -> RenderableType:
    parts = (*picture.shown(), *(f"tierfall: {problem}" for problem in picture.problems))
    return Group(*(Text(part) if isinstance(part, str) else part for part in parts))
