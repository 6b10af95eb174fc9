"""``drain``: finish the flush of what a trainer that died left in host memory."""

from __future__ import annotations

from typing import Annotated

import typer

from tierfall.cli.common import (
    CommandOutput,
    ConfigOption,
    JsonOption,
    ProgressBar,
    RunOption,
    counted,
    load_settings,
    parse_option,
    refuse,
    watched,
)
from tierfall.config import Config
from tierfall.core.types.text import members
from tierfall.core.types.units import format_duration, format_size, parse_duration
from tierfall.ops.commands import unread
from tierfall.ops.drain import DrainResult, find_owed
from tierfall.ops.drain import drain as drain_run
from tierfall.ops.reader import RunReader, left_in_memory


def drain(
    deadline: Annotated[
        str | None,
        typer.Option(
            "--deadline",
            metavar="TIME",
            help="Stop after this time; the most valuable copies come first: 30s, 10m.",
        ),
    ] = None,
    config: ConfigOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Flush what a dead trainer left in host memory, then free the memory."""
    settings = load_settings(config, run)
    deadline_s = None if deadline is None else parse_option("--deadline", deadline, parse_duration)
    answer = CommandOutput(as_json)
    with RunReader(settings) as reader:
        if not _holds_images(reader, settings, answer):
            _report_empty(reader, answer)
            answer.finish()
            return
    forecast: list[str] = []

    def report_forecast(line: str) -> None:
        forecast.append(line)
        if not as_json:  # on stderr, while the drain runs
            typer.echo(f"in {format_duration(deadline_s or 0.0)} {line}", err=True)

    with ProgressBar("drain", 0, shown=watched(as_json)) as watch:
        drained = drain_run(settings, deadline_s, watch.set, report_forecast)
    answer.document = {
        "run": settings.run,
        "done": [members(owed) for owed in drained.done],
        "left": [members(owed) for owed in drained.left],
        "memory_kept": drained.memory_kept,
        "seconds": drained.seconds,
        "forecast": forecast,
    }
    _report(answer, settings, drained)
    answer.finish()


def _holds_images(reader: RunReader, settings: Config, answer: CommandOutput) -> bool:
    """Return whether host memory holds an image, without locking it; ends the command where a trainer is alive."""
    owner = reader.owner()
    if owner is not None:
        refuse(
            f"drain: a trainer owns run {reader.run!r} ({owner}) and flushes its memory itself; nothing was done"
        )
    count, problems = left_in_memory(settings)
    for problem in problems:
        if reader.memory().error is not None:
            refuse(f"drain: host memory cannot be read: {problem}")
        answer.problem(f"host memory holds a damaged image: {problem}")
    return count > 0


def _report_empty(reader: RunReader, answer: CommandOutput) -> None:
    """Report the copies that are owed from another tier: only a trainer's attempt may make those."""
    listings = reader.list()
    left = find_owed(reader.config, listings)
    answer.note_unread(unread(listings))
    answer.document = {
        "run": reader.run,
        "done": [],
        "left": [members(owed) for owed in left],
        "memory_kept": False,
    }
    answer.show(f"run {reader.run}: nothing is in host memory")
    for owed in left:
        answer.show(f"still owed from another tier: {owed}")
    if left:
        them = "that copy" if len(left) == 1 else f"those {len(left)} copies"
        answer.show(
            f"drain flushes only what is in memory: the next start of the trainer makes {them}"
        )


def _report(answer: CommandOutput, settings: Config, drained: DrainResult) -> None:
    for owed in drained.done:
        answer.show(f"flushed {owed}")
    if drained.done or drained.left:
        total = format_size(sum(owed.bytes for owed in drained.done))
        planned = counted(len(drained.done) + len(drained.left), "copy", "copies")
        count = f"{len(drained.done)} of {planned}"
        answer.show(
            f"run {settings.run}: {count} made durable, {total} in {format_duration(drained.seconds)}"
        )
    else:
        answer.show(f"run {settings.run}: everything in host memory was durable already")
    answer.show("host memory is kept" if drained.memory_kept else "host memory is freed")
    for owed in drained.left:
        answer.problem(f"drain: not done: {owed}")
    for problem in drained.problems:
        answer.problem(problem)
