"""The list of commands, and how errors end them: errors of tierfall and wrong usage as one line; anything else is a
bug, and is printed with its traceback."""

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
    """Reports an error in the requested form (text or JSON), also where the arguments cannot be parsed."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        if not args:  # prints the help
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
    """Return the parser's message as one line."""
    path = "tierfall" if error.ctx is None else error.ctx.command_path
    command = path.partition(" ")[2]
    text = " ".join(error.format_message().split()).rstrip(".")
    problem = text[:1].lower() + text[1:]
    return (
        f"{command}: {problem}; see {path} --help" if command else f"{problem}; see {path} --help"
    )


app = typer.Typer(
    cls=_CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="List, verify and change the checkpoints of a training run, on all its tiers.",
    epilog="Exit codes: 0 done; 1 failed, or found damage; 2 wrong usage or configuration; 130 interrupted.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tierfall {tierfall.__version__}")
        raise typer.Exit(Exit.DONE)


@app.callback()
def _prepare(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    listen_to_warnings()


for _function, _summary in (
    (ls_show.ls, "List the steps of a run, tier by tier."),
    (ls_show.show, "Show one step in full."),
    (check.check, "Check the configuration, measure every tier, and forecast a day."),
    (verify.verify, "Verify every file of every copy, and repair."),
    (copy_export.export, "Write a step as one file for other programs."),
    (copy_export.copy, "Copy a step to a tier that does not hold it."),
    (commands.prune, "Apply the retention rules now."),
    (commands.pin, "Protect a step from every deletion rule."),
    (commands.unpin, "Remove the pin of a step."),
    (commands.rm, "Delete a step from every tier."),
    (commands.forget, "Make the other tiers forget one that was emptied on purpose."),
    (drain.drain, "Flush what a dead trainer left in host memory."),
    (watch.watch, "Show tiers, copies and transfers live."),
    (ls_show.schema, "Print the JSON schema of the YAML file."),
    (demo, "Train, kill and restore a small model, and show the timeline."),
):
    app.command(short_help=_summary)(_function)
