"""What the command line needs before a command runs: STEP, exit codes, and how errors end it.

Errors of tierfall and wrong usage are one line; anything else is a bug, and is printed with its traceback. This module
imports neither torch nor the configuration: ``--help``, ``--version`` and completion need it alone.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import takewhile
from traceback import walk_tb
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import typer
from typer.core import TyperGroup

from tierfall.core.types.errors import ConfigError, NotSupportedError, TierfallError
from tierfall.core.types.text import without_secrets

_STEP = re.compile(r"([0-9]{1,18})(?:@([0-9]{1,12}))?\Z")
_LATEST = "latest"
DEFAULT_CONFIG = "tiers.yaml"


class Exit(IntEnum):
    """Exit codes of all commands."""

    DONE = 0
    COULD_NOT = 1
    USAGE = 2
    INTERRUPTED = 130


class Asked(NamedTuple):
    """The options of all commands: the file, the run in place of that of the file, and the form of the answer."""

    config: str | None = None
    run: str | None = None
    as_json: bool = False


_OF_A_RUN = "check|ls|show|diff|verify|drain|pin|unpin|tag|untag|prune|rm|forget|copy|prefetch|export|import"
"""The commands that read or change one run."""
_options = ""
"""The options of the command that runs by which another one finds the same run."""


def remember(asked: Asked) -> None:
    """Have the commands that are proposed from here on name the same run; see ``proposed``."""
    global _options
    given = {"--config": asked.config, "--run": asked.run}
    if asked.config == os.environ.get("TIERFALL_CONFIG"):
        del given["--config"]
    _options = "".join(f" {name} {shlex.quote(value)}" for name, value in given.items() if value)


def proposed(text: str) -> str:
    """Complete the commands that a text proposes by the options with which this one was called: without them, they
    would act on another run."""
    command = rf"\btierfall (?:{_OF_A_RUN})\b(?!{re.escape(_options)})(?! --help)"
    return re.sub(command, lambda found: found[0] + _options, text) if _options else text


# STEP ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepName:
    """What STEP names: a step of the live lineage, one of an attempt, or, without ``step``, the latest."""

    step: int | None = None
    attempt: int | None = None


def parse_step(text: str) -> StepName:
    """Parse STEP."""
    if text == _LATEST:
        return StepName()
    match = _STEP.match(text)
    if match is None:
        raise typer.BadParameter(f"{text!r}; expected 400, 400@7 for attempt 7's, or {_LATEST}")
    return StepName(int(match[1]), int(match[2]) if match[2] else None)


StepOrSource = StepName | str


def parse_source(text: str) -> StepOrSource:
    """Parse STEP, or a path or an address in its place."""
    return text if "/" in text else parse_step(text)


def parser_of(
    parse: Callable[[str], Any], least: float | None = None, shown: Callable[[Any], str] = str
) -> Callable[[str], Any]:
    """Make typer's parser of an option from a function that raises ConfigError; ``shown`` formats the least value."""

    def read(text: str) -> Any:
        try:
            value = parse(text)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error
        if least is not None and value < least:
            raise typer.BadParameter(f"{text!r} is too small; expected {shown(least)} or more")
        return value

    return read


# Errors ----------------------------------------------------------------------------------------------


print_out = partial(typer.echo, nl=False, color=True)
"""Write to stdout. A reader that is gone ends the command silently; any other error is a problem."""


def at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def print_problem(message: object) -> None:
    """Print a problem on stderr, if that can be written."""
    with suppress(OSError):
        typer.echo(f"tierfall: {proposed(str(message))}", err=True)


class CommandRefused(Exception):
    """Ends a command: ``problems`` are printed, ``code`` is the exit code. ``document`` is what --json prints."""

    def __init__(
        self,
        problems: Sequence[str],
        code: Exit = Exit.COULD_NOT,
        document: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.problems = [without_secrets(proposed(problem)) for problem in problems]
        super().__init__(*self.problems)
        self.code, self.document = code, document


def refuse(message: object, code: Exit = Exit.COULD_NOT) -> NoReturn:
    """End the command with one problem; always raises CommandRefused."""
    raise CommandRefused([str(message)], code)


def code_of(error: TierfallError) -> Exit:
    """Return USAGE for an error of the configuration, COULD_NOT for any other."""
    wrong = isinstance(error, ConfigError) and not isinstance(error, NotSupportedError)
    return Exit.USAGE if wrong else Exit.COULD_NOT


def to_document(
    document: Mapping[str, Any], problems: Sequence[str], *, indent: int | None = None
) -> str:
    """Return a document with ``ok`` and ``problems`` as JSON."""
    outcome = {"ok": not problems, "problems": list(problems)}
    return json.dumps({**document, **outcome}, indent=indent, allow_nan=False)


def _end(refusal: CommandRefused, *, as_json: bool) -> NoReturn:
    """Print the problems of a refusal, in the requested form, and exit with its code."""
    problems = refusal.problems
    if as_json:
        try:
            with suppress(BrokenPipeError):
                print_out(to_document(refusal.document, problems, indent=2) + "\n")
        except OSError as error:
            problems = [*problems, _drop_output(error)]
    for problem in problems:
        print_problem(problem)
    raise typer.Exit(refusal.code)


def _drop_output(error: OSError) -> str:
    """Return what is wrong with stdout, and drop what it has not written: else Python tries that again at its end."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return f"the output could not be written: {error.strerror}"


class _ToStderr(logging.Handler):
    """Prints warnings of the library on stderr, one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        print_problem(record.getMessage())


def listen_to_warnings() -> None:
    """Print warnings of the library on stderr; may be called again."""
    logger = logging.getLogger("tierfall")
    if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        logger.addHandler(_ToStderr(level=logging.WARNING))


# The group of commands -------------------------------------------------------------------------------

# Click's UsageError: newer typers carry click within them, so that it has no name to import it by.
_UsageError: Any = typer.BadParameter.__mro__[1]
_AS_JSON = "tierfall.as_json"
_HELP = frozenset(("-h", "--help"))
GROUPS: dict[str, list[str]] = {}
"""The commands in the groups of ``--help`` and of the pages in docs/; ``app.py`` declares both, in this order."""


class CommandGroup(TyperGroup):
    """Reports an error in the requested form (text or JSON), also where the arguments cannot be parsed."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        parameters: Any = (p for command in self.commands.values() for p in command.params)
        for each in parameters:
            if (
                each.param_type_name == "argument"
            ):  # --help names it by its word alone, without a type
                each.display_type_rich = lambda ctx: None

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        if not args:  # prints the help
            return super().make_context(info_name, args, parent, **extra)
        words = list(takewhile(lambda word: word != "--", args))
        as_json = "--json" in words
        with _in_one_line(as_json):
            if words and words[0] in self.commands and not _HELP.isdisjoint(words):
                # whatever else the line has; without the group's own parameters, for which typer imports pydantic
                settings = {**self.context_settings, **extra}
                above: Any = typer.Context(self, info_name=info_name, **settings)
                self.commands[words[0]].make_context(words[0], ["--help"], parent=above)
            try:
                ctx = super().make_context(info_name, [*args], parent, **extra)
            except _UsageError as error:
                self._check_place(getattr(error, "option_name", None), args)
                raise
        ctx.meta[_AS_JSON] = as_json
        return ctx

    def _check_place(self, unknown: str | None, words: Sequence[str]) -> None:
        """Say where an option belongs that is unknown before the command."""
        if any(unknown in p.opts for command in self.commands.values() for p in command.params):
            first = next((i for i, word in enumerate(words) if word in self.commands), len(words))
            command = words[first : first + 1] or ["COMMAND"]
            meant = shlex.join([*command, *words[first + 1 :], *words[:first]])
            refuse(f"{unknown} belongs after the command: tierfall {meant}", Exit.USAGE)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands in their groups."""
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(n, self.commands[n].get_short_help_str(70)) for n in names])

    def invoke(self, ctx: Any) -> Any:
        with _in_one_line(ctx.meta.get(_AS_JSON, False)):
            return super().invoke(ctx)


@contextmanager
def _in_one_line(as_json: bool) -> Iterator[None]:
    try:
        yield
    except CommandRefused as refusal:
        _end(refusal, as_json=as_json)
    except TierfallError as error:
        _end(CommandRefused([str(error)], code_of(error)), as_json=as_json)
    except _UsageError as error:
        _end(CommandRefused([_wrong_usage(error)], Exit.USAGE), as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        _end(CommandRefused(["interrupted"], Exit.INTERRUPTED), as_json=as_json)
    except OSError as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        printing = frame.f_globals["__name__"].partition(".")[0] in ("click", "rich", "typer")
        if isinstance(error, BrokenPipeError) or not printing:
            raise
        _end(CommandRefused([_drop_output(error)]), as_json=False)


def _wrong_usage(error: Any) -> str:
    """Return the parser's message as one line."""
    path = "tierfall" if error.ctx is None else error.ctx.command_path
    command = path.partition(" ")[2]
    text = " ".join(error.format_message().split()).rstrip(".")
    problem = text[:1].lower() + text[1:]
    advice = f" See {path} --help" if problem.endswith("?") else f"; see {path} --help"
    return (f"{command}: " if command else "") + problem + advice
