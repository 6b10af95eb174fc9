"""``copy``: bring a step to a tier that does not hold it."""

from __future__ import annotations

from typing import Annotated

import typer

from tierfall.cli.common import (
    CommandOutput,
    ConfigOption,
    Exit,
    JsonOption,
    RunOption,
    StepArgument,
    check_tier,
    load_settings,
    parse_step,
    refuse,
    warn_of,
    watched,
)
from tierfall.cli.progress import ProgressBar
from tierfall.cli.unread import find_certain, naming_unread_tiers
from tierfall.core.types.text import members
from tierfall.core.types.units import format_size
from tierfall.ops import commands
from tierfall.ops.copy import CopyResult
from tierfall.ops.copy import copy as copy_checkpoint
from tierfall.ops.reader import RunReader


def copy(
    step: StepArgument,
    to: Annotated[str, typer.Option("--to", metavar="TIER", help="The tier to bring it to.")],
    config: ConfigOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a step to a tier that does not hold it, with its marks, from the best copy there is."""
    settings = load_settings(config, run)
    named = parse_step(step)
    check_tier(settings, to)
    if to == settings.host.name:
        refuse(f"copy: {to} is memory, which is the trainer's alone; name another tier", Exit.USAGE)
    answer = CommandOutput(as_json)
    with RunReader(settings) as reader:
        owner = reader.owner()
        listings = reader.list()
        elsewhere = commands.trained_elsewhere(listings, reader.stores)
        id = find_certain(answer, listings, named, None, doing="copy").id
    if owner is not None:
        refuse(
            f"copy: a trainer owns run {settings.run!r} ({owner}) and flushes by the rules of the file; nothing was "
            "copied. Copy once it has ended, or start it with another flush: {every: ...} for that tier"
        )
    warn_of(elsewhere)
    with (
        naming_unread_tiers(answer, listings),
        ProgressBar("copy", 0, shown=watched(as_json)) as watch,
    ):
        copied = copy_checkpoint(settings, id, to, watch.set)
    _answer(answer, settings.run, copied)
    answer.finish()


def _answer(answer: CommandOutput, run: str, copied: CopyResult) -> None:
    answer.document = {"run": run, **members(copied)}
    size = format_size(copied.bytes)
    if copied.already:
        answer.show(f"{copied.tier} holds {copied.id} already, and it is good ({size} read)")
    else:
        sources = ", ".join(copied.sources)
        answer.show(
            f"copied {copied.id} from {sources} to {copied.tier}, which did not hold it ({size})"
        )
    if copied.marks:
        answer.show(f"brought along, since other tiers have it: {', '.join(copied.marks)}")
    answer.show(*(f"note: {note}" for note in copied.notes))
