"""The list of commands, and what ends them: the errors of tierfall as one line, everything else as a traceback."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import tierfall
from tierfall.cli import changing, checking, draining, looking
from tierfall.cli.common import Exit, listen_to_warnings, refuse
from tierfall.core.errors import TierfallError
from tierfall.demo.command import demo

LATER = ("export", "copy", "check", "watch")


class _Commands(TyperGroup):
    """Ends a command that a TierfallError has stopped; an exception that is none is a bug, and shows where."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TierfallError as error:
            refuse(error)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Look at, check and change the checkpoints of a training run, on every tier of it.",
    epilog="Exit codes: 0 done; 1 could not, or found damage; 2 wrong usage or configuration.",
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tierfall {tierfall.__version__}")
        raise typer.Exit(Exit.DONE)


@app.callback()
def _prepare(
    version: Annotated[
        bool,
        typer.Option("--version", help="Say the version.", callback=_say_version, is_eager=True),
    ] = False,
) -> None:
    listen_to_warnings()


for _function, _summary in (
    (looking.ls, "List the steps of a run, tier by tier."),
    (looking.show, "Show one step in full."),
    (checking.verify, "Read back and check every file of every copy."),
    (changing.prune, "Apply the rules of retention now."),
    (changing.pin, "Keep a step, whatever the rules say."),
    (changing.unpin, "Take the pin off a step."),
    (changing.rm, "Delete a step from every tier."),
    (draining.drain, "Finish the flush of what a dead trainer left in memory."),
    (looking.schema, "Print the JSON schema of the YAML file."),
    (demo, "Train, kill and restore a small model, and show the timeline."),
):
    app.command(short_help=_summary)(_function)


def _refuse_for_now(name: str) -> None:
    """Answer to a command that a later version has, whatever its arguments; it is listed nowhere."""

    @app.command(
        name,
        hidden=True,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def _later(ctx: typer.Context) -> None:
        refuse(f"{name}: not supported yet", Exit.USAGE)


for _name in LATER:
    _refuse_for_now(_name)
