"""The list of commands, and what ends them: errors of tierfall and wrong usage as one line, anything else is a bug, and
shows where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import tierfall
from tierfall.cli import check, commands, copy_export, drain, ls_show, verify, watch
from tierfall.cli.common import CommandRefused, Exit, code_of, end, listen_to_warnings
from tierfall.core.types.errors import TierfallError
from tierfall.demo.command import demo

# Click's UsageError: newer typers carry click within them, so that it has no name to import it by.
_UsageError: Any = typer.BadParameter.__mro__[1]
_AS_JSON = "tierfall.as_json"


class _CommandGroup(TyperGroup):
    """Ends a command that cannot go on, in the form that was asked for, also where the words make no sense."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        if not args:  # help
            return super().make_context(info_name, args, parent, **extra)
        as_json = "--json" in takewhile(lambda word: word != "--", args)
        with _in_one_line(as_json):
            ctx = super().make_context(info_name, args, parent, **extra)
        ctx.meta[_AS_JSON] = as_json
        return ctx

    def invoke(self, ctx: Any) -> Any:
        with _in_one_line(ctx.meta.get(_AS_JSON, False)):
            return super().invoke(ctx)


@contextmanager
def _in_one_line(as_json: bool) -> Iterator[None]:
    try:
        yield
    except CommandRefused as refusal:
        end(refusal, as_json=as_json)
    except TierfallError as error:
        end(CommandRefused([str(error)], code_of(error)), as_json=as_json)
    except _UsageError as error:
        end(CommandRefused([_wrong_usage(error)], Exit.USAGE), as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        end(CommandRefused(["interrupted"], Exit.INTERRUPTED), as_json=as_json)


def _wrong_usage(error: Any) -> str:
    """Say in one line what the parser needs several for."""
    path = "tierfall" if error.ctx is None else error.ctx.command_path
    command = path.partition(" ")[2]
    text = " ".join(error.format_message().split()).rstrip(".")
    what = text[:1].lower() + text[1:]
    return f"{command}: {what}; see {path} --help" if command else f"{what}; see {path} --help"


app = typer.Typer(
    cls=_CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Look at, check and change the checkpoints of a training run, on every tier of it.",
    epilog="Exit codes: 0 done; 1 could not, or found damage; 2 wrong usage or configuration; 130 interrupted.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tierfall {tierfall.__version__}")
        raise typer.Exit(Exit.DONE)


@app.callback()
def _prepare(
    version: Annotated[
        bool,
        typer.Option("--version", help="Say the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    listen_to_warnings()


for _function, _summary in (
    (ls_show.ls, "List the steps of a run, tier by tier."),
    (ls_show.show, "Show one step in full."),
    (check.check, "Check the file, and measure every tier."),
    (verify.verify, "Read back and check every file of every copy, and repair."),
    (copy_export.export, "Write a step as one file for other programs."),
    (copy_export.copy, "Bring a step to a tier that does not hold it."),
    (commands.prune, "Apply the rules of retention now."),
    (commands.pin, "Keep a step, whatever the rules say."),
    (commands.unpin, "Take the pin off a step."),
    (commands.rm, "Delete a step from every tier."),
    (commands.forget, "Let the others forget a tier that was emptied on purpose."),
    (drain.drain, "Finish the flush of what a dead trainer left in memory."),
    (watch.watch, "Show tiers, copies and transfers as they are, live."),
    (ls_show.schema, "Print the JSON schema of the YAML file."),
    (demo, "Train, kill and restore a small model, and show the timeline."),
):
    app.command(short_help=_summary)(_function)
