"""``watch``: a live view of tiers, copies, transfers and events: by the trainer's status, or by a listing of the
tiers."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tierfall.cli.common import CommandOutput, load_settings, parse_option
from tierfall.cli.run_facts import RunFacts
from tierfall.cli.usage import Exit, refuse, to_document
from tierfall.cli.watch_frame import RunView, view_of_facts, view_of_status
from tierfall.config import Config
from tierfall.config.fields import listen_address
from tierfall.core.types.units import format_duration, parse_duration
from tierfall.ops.reader import RunReader
from tierfall.ops.watch import LIST_EVERY_S, Watcher
from tierfall.telemetry.prometheus import MetricsServer

EVERY_S_LEAST = 0.1
ROWS_ON_SCREEN = 200


def watch(
    every: str,
    once: bool,
    prometheus: str | None,
    config: str | None,
    run: str | None,
    as_json: bool,
) -> None:
    """Show a run live, or one frame of it, or serve its metrics."""
    settings = load_settings(config, run)
    every_s = _every(every)
    if once and prometheus is not None:
        refuse(
            "--once and --prometheus: one ends at once, the other goes on; expected one", Exit.USAGE
        )
    with Watcher(settings, run=settings.run) as watcher:
        if prometheus is not None:
            _serve(watcher, prometheus, settings.run, as_json=as_json)
            return
        frames = _frames(settings, watcher)
        if once:
            _once(next(frames), as_json=as_json)
            return
        try:
            with _screen(as_json=as_json) as show:
                for frame in frames:
                    show(frame)
                    time.sleep(every_s)
        except KeyboardInterrupt:
            return  # Ctrl-C is how a person ends it


def _serve(watcher: Watcher, listens_on: str, run: str, *, as_json: bool) -> None:
    """Serve metrics until Ctrl-C, or until a signal ends the process."""
    address, port = parse_option("--prometheus", listens_on, listen_address)
    server = MetricsServer.listen(
        address, port, watcher.living_statuses, run=run, where="--prometheus"
    )
    answer = CommandOutput(as_json, document={"run": run, "address": address, "port": port})
    answer.show(f"run {run}: /metrics and /healthz are served on port {port}; Ctrl-C ends it")
    answer.finish()
    sys.stdout.flush()
    try:
        while True:
            time.sleep(LIST_EVERY_S)
    except KeyboardInterrupt:
        return
    finally:
        server.close()


def _every(text: str) -> float:
    every_s = parse_option("--every", text, parse_duration)
    if every_s < EVERY_S_LEAST:
        least = format_duration(EVERY_S_LEAST)
        refuse(f"--every: {text!r} is too short; expected {least} or more", Exit.USAGE)
    return every_s


def _frames(settings: Config, watcher: Watcher) -> Iterator[RunView]:
    """Give a view per frame: by the status of a living trainer, else by a listing of the tiers every
    ``LIST_EVERY_S``."""
    facts: RunFacts | None = None
    while True:
        snapshot = watcher.take_snapshot()
        if (live := snapshot.live) is not None:
            facts = None
            yield view_of_status(live, snapshot)
            continue
        if facts is None or snapshot.wall_time_s >= facts.wall_time_s + LIST_EVERY_S:
            facts = _gather(settings)
        yield view_of_facts(settings.run, facts, snapshot)


def _gather(settings: Config) -> RunFacts:
    with RunReader(settings) as reader:
        return RunFacts.gather(reader)


def _once(frame: RunView, *, as_json: bool) -> None:
    answer = CommandOutput(as_json, document=frame.document)
    for problem in frame.problems:
        answer.problem(problem)
    answer.show(*frame.shown())
    answer.finish()


@contextmanager
def _screen(*, as_json: bool) -> Iterator[Callable[[RunView], None]]:
    """Give what prints a frame: as a line of JSON, on the whole screen of a terminal, or below the last one in a file
    or pipe."""
    console = Console(markup=False, highlight=False, emoji=False)
    if as_json:
        yield _print_line
    elif not sys.stdout.isatty() or console.is_dumb_terminal:
        yield _print_below
    else:
        live = Live(console=console, auto_refresh=False, screen=True)
        with _giving_back(live), live:
            yield lambda frame: live.update(_fitted(frame, console), refresh=True)


@contextmanager
def _giving_back(live: Live) -> Iterator[None]:
    """Give the screen back before SIGTERM ends the process, and while Ctrl-Z stops it."""

    def stop(number: int, _: object) -> None:
        live.stop()
        os.kill(os.getpid(), signal.SIGSTOP)
        live.start(refresh=True)

    handlers = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number)),
        signal.SIGTSTP: signal.signal(signal.SIGTSTP, stop),
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _print_line(frame: RunView) -> None:
    typer.echo(to_document(frame.document, frame.problems))
    sys.stdout.flush()


def _print_below(frame: RunView) -> None:
    answer = CommandOutput(as_json=False)
    answer.show(*frame.shown(), *(f"tierfall: {problem}" for problem in frame.problems), "")
    answer.finish()
    sys.stdout.flush()


def _fitted(frame: RunView, console: Console) -> RenderableType:
    """Draw a frame with as many steps as the screen has lines for."""
    drawn = _drawn(frame, ROWS_ON_SCREEN)
    over = len(console.render_lines(drawn)) - console.height
    return drawn if over <= 0 else _drawn(frame, max(1, frame.rows(ROWS_ON_SCREEN) - over))


def _drawn(frame: RunView, rows: int) -> RenderableType:
    problems = (Text(f"tierfall: {problem}", style="red") for problem in frame.problems)
    parts = (*problems, *frame.shown(rows, bars=True))
    return Group(*(Text(part) if isinstance(part, str) else part for part in parts))
