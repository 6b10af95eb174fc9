"""The commands: their arguments, options and help. The function of its name in the module of its subject does a
command's work, and is imported only then, so that ``--help`` and completion need not wait for torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

import tierfall
from tierfall.cli.usage import (
    DEFAULT_CONFIG,
    Asked,
    CommandGroup,
    Exit,
    StepName,
    listen_to_warnings,
    parse_step,
    parser_of,
)
from tierfall.core.types.units import (
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    parse_size_with_unit,
)
from tierfall.core.types.values import ExportDtype, ExportFormat

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="List, verify and change the checkpoints of a training run, on all its tiers.",
    epilog="Exit codes: 0 done; 1 failed, or found damage; 2 wrong usage or configuration; 130 interrupted. "
    "The commands by subject: https://github.com/tierfall/tierfall/blob/main/docs/command-line.md",
)


def _tier_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the tiers in the configuration, for completion; none where it cannot be read."""
    import yaml

    try:
        tiers = yaml.safe_load(
            Path(ctx.params["config"] or DEFAULT_CONFIG).expanduser().read_bytes()
        )["tiers"]
        return [name for tier in tiers if (name := str(tier["name"])).startswith(incomplete)]
    except (KeyError, TypeError, ValueError, OSError, yaml.YAMLError):
        return []


def _flag(names: str, help: str) -> Any:
    return typer.Option(*names.split(), help=help)


def _option(names: str, metavar: str, help: str, parse: Any = None, **more: Any) -> Any:
    """An option with a value, which ``parse`` makes of its text."""
    return typer.Option(*names.split(), metavar=metavar, help=help, parser=parse, **more)


def _later(module: str, name: str) -> Callable[[str], Any]:
    """Make the parser of an option from a function of a module that is imported once the option is given."""
    return parser_of(lambda text: getattr(import_module(module), name)(text))


def _parse_steps_per_hour(text: str) -> float:
    count = float(text)
    if not 0 < count < float("inf"):
        raise typer.BadParameter(f"{text!r} is invalid; expected more than 0")
    return count


_PARSE_SIZE = parser_of(parse_size_with_unit)
_PARSE_EVERY = _later("tierfall.config.fields", "parse_every")
_PARSE_DISK = _later("tierfall.cli.init", "parse_disk")
_PARSE_FAR = _later("tierfall.cli.init", "parse_far")
_PARSE_PARAMETERS = _later("tierfall.cli.init", "parse_parameters")
_PARSE_PORT = _later("tierfall.config.fields", "listen_address")
_PARSE_STEP_TIME = parser_of(parse_duration, 0.001, format_duration)
_PARSE_FRAME_TIME = parser_of(parse_duration, 0.1, format_duration)

STEP_HELP = (
    "400, a step of the live lineage; 400@7, that of attempt 7; or latest, the newest that can be "
    "restored."
)
_STEPS = typer.Argument(metavar="STEP", help=f"{STEP_HELP} May be repeated.", parser=parse_step)
StepsArgument = Annotated[list[StepName], _STEPS]
StepsIfAny = Annotated[list[StepName] | None, _STEPS]
TagArgument = Annotated[
    str, typer.Argument(metavar="TAG", help="Letters, digits, '.', '_' and '-', at most 128.")
]
MetricsOption = Annotated[
    bool,
    _flag("--metrics -m", "Show all metrics, and not only those that a rule of retention uses."),
]
TierOption = Annotated[
    str | None, _option("--tier", "NAME", "Read this tier only.", autocompletion=_tier_names)
]


def _ask(
    config: Annotated[
        str | None,
        _option(
            "--config -c",
            "FILE",
            f"The YAML file with the tiers; or, to read it alone, a tier's folder or address. [./{DEFAULT_CONFIG}]",
            envvar="TIERFALL_CONFIG",
            is_eager=True,
        ),
    ] = None,
    run: Annotated[
        str | None, _option("--run", "NAME", "The run, instead of the one in the file.")
    ] = None,
    as_json: Annotated[
        bool, _flag("--json", "Print one JSON document on stdout, and nothing else.")
    ] = False,
) -> Asked:
    return Asked(config, run, as_json)


_OF_ALL = signature(_ask, eval_str=True).parameters


def _command(
    subject: str,
    short_help: str,
    *,
    name: str | None = None,
    also: tuple[str, ...] = (*_OF_ALL,),
    prints: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a command. Its arguments, options and help are those of a function, and the options of all commands that
    ``also`` names. The function of the same name in the module ``subject`` of this folder is called with the former by
    name, and with what collects its output, which has the latter and is printed at the end. If it ``prints`` by itself,
    it is called with the latter."""

    def add(declared: Callable[..., None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            asked = _ask(**{option: given.pop(option) for option in also})
            work = getattr(import_module(f"tierfall.cli.{subject}"), declared.__name__)
            if prints:
                work(asked, **given)
                return
            answer = import_module("tierfall.cli.common").CommandOutput(asked)
            work(answer, **given)
            answer.finish()

        own = signature(declared, eval_str=True).parameters.values()
        command.__name__, command.__doc__ = declared.__name__, declared.__doc__
        shared = [_OF_ALL[option] for option in also]
        command.__signature__ = Signature([*own, *shared])  # type: ignore[attr-defined]
        return app.command(name, short_help=short_help)(command)

    return add


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


# Beginning -------------------------------------------------------------------------------------------


@_command(
    "init",
    "Write a first tiers.yaml, after five questions at most.",
    also=("as_json",),
    prints=True,
)
def init(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The YAML file to write.", show_default=True)
    ] = Path("tiers.yaml"),
    disk: Annotated[
        list[str] | None,
        _option(
            "--disk",
            "FOLDER",
            "A folder of this machine; may be repeated. [./checkpoints]",
            _PARSE_DISK,
        ),
    ] = None,
    far: Annotated[
        str | None,
        _option(
            "--far", "PLACE", "A folder or bucket that survives this machine. [none]", _PARSE_FAR
        ),
    ] = None,
    parameters: Annotated[
        int | None,
        _option("--parameters", "N", "The model's size, such as 7B. [unknown]", _PARSE_PARAMETERS),
    ] = None,
    every: Annotated[
        float | None,
        _option(
            "--every", "N", "How often to save: in steps (100) or time (10m). [10m]", _PARSE_EVERY
        ),
    ] = None,
    lose: Annotated[
        float | None,
        _option(
            "--lose", "N", "What the loss of this machine may cost. [1h, or 10 saves]", _PARSE_EVERY
        ),
    ] = None,
    ranks: Annotated[int, _option("--ranks", "N", "How many ranks train.", min=1)] = 1,
    run: Annotated[str | None, _option("--run", "NAME", "The run's name. [the folder's]")] = None,
    yes: Annotated[bool, _flag("--yes -y", "Ask nothing: defaults for what is not given.")] = False,
    force: Annotated[bool, _flag("--force", "Replace an existing file.")] = False,
) -> None:
    """Write a commented YAML file, and say what is too small on this machine. At a terminal it asks what no option
    answers; Enter takes the default."""


# Reading ---------------------------------------------------------------------------------------------


@_command("look", "List the steps of a run, tier by tier.")
def ls(
    last: Annotated[
        int | None, _option("--last -n", "N", "List the newest N steps only.", min=1)
    ] = None,
    metrics: MetricsOption = False,
) -> None:
    """List the steps of a run, the newest last: age, size, and the state on each tier."""


@_command("look", "Print the newest step that can be restored.")
def latest() -> None:
    """Print the newest step that can be restored. The exit code is 1 if there is none, or if a newer one is damaged."""


@_command(
    "look", "List the runs on the tiers, and in this node's memory.", also=("config", "as_json")
)
def runs() -> None:
    """List all runs on the tiers, not only the one that the file names, and what any run holds in the memory of this
    node. Without a file, it lists the memory alone."""


@_command("look", "Show steps in full.")
def show(steps: StepsArgument) -> None:
    """Show a step in full: its lineage, its files, its copies and why each is kept or deleted."""


@_command("check", "Check the configuration; measure and forecast every tier.")
def check(
    size: Annotated[
        int,
        _option(
            "--size", "SIZE", "Bytes to write to each tier.", parser_of(parse_size, 1, format_size)
        ),
    ] = "64MiB",  # type: ignore[assignment]
    image: Annotated[
        int | None, _option("--image", "SIZE", "The size of one rank's image: 9GiB.", _PARSE_SIZE)
    ] = None,
    save_every: Annotated[
        float | None,
        _option("--save-every", "TIME", "The time between saves: 10m.", _PARSE_STEP_TIME),
    ] = None,
    step_time: Annotated[
        float | None,
        _option("--step-time", "TIME", "The time of a training step: 2s.", _PARSE_STEP_TIME),
    ] = None,
    steps_per_hour: Annotated[
        float | None,
        _option("--steps-per-hour", "N", "In place of --step-time.", _parse_steps_per_hour),
    ] = None,
    ranks: Annotated[int | None, _option("--ranks", "N", "The number of ranks.", min=1)] = None,
    nodes: Annotated[int | None, _option("--nodes", "N", "The number of nodes.", min=1)] = None,
) -> None:
    """Check the configuration, measure every tier by writing a file there, which is removed again, and forecast
    whether it keeps up and has room, by the options or the run's own checkpoints."""


@_command("commands", "Verify every file of every copy, and repair.")
def verify(
    steps: StepsIfAny = None,
    tier: TierOption = None,
    repair: Annotated[bool, _flag("--repair", "Rewrite damaged files from good copies.")] = False,
) -> None:
    """Read and verify every file of every copy, or of those of some steps: chunks, manifests and commit records."""


# Copying ---------------------------------------------------------------------------------------------


@_command("commands", "Write a step as files for other programs.")
def export(
    step: Annotated[StepName, typer.Argument(metavar="STEP", help=STEP_HELP, parser=parse_step)],
    to: Annotated[Path, _option("--to", "PATH", "A folder, or a file .safetensors or .pt.")],
    format: Annotated[
        ExportFormat | None, typer.Option(help="The form, unless PATH tells it.")
    ] = None,
    only: Annotated[
        list[str] | None, _option("--only", "PREFIX", "This part only; may be repeated.")
    ] = None,
    max_shard: Annotated[
        int | None, _option("--max-shard", "SIZE", "Files of at most this size: 5GB.", _PARSE_SIZE)
    ] = None,
    dtype: Annotated[
        ExportDtype | None, typer.Option(help="Convert floating-point tensors.")
    ] = None,
    beside: Annotated[
        list[Path] | None,
        _option("--with", "FILE", "Copy this file into PATH, too; may be repeated."),
    ] = None,
    tier: TierOption = None,
    force: Annotated[bool, _flag("--force", "Replace an existing file of that name.")] = False,
) -> None:
    """Write a checkpoint as one file, as shards, or as a DCP folder, from the fastest good copy; every chunk is
    verified."""


@_command("commands", "Save what another program wrote as a step.", name="import")
def import_(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A file of torch.save, Lightning or safetensors, or a folder."
        ),
    ],
    as_step: Annotated[int, _option("--as-step", "N", "The step to save it as.")],
    entry: Annotated[
        str | None, _option("--entry", "NAME", "What a bare state_dict is in the state.")
    ] = None,
) -> None:
    """Save what another program wrote as a step of the run, on all of its stored tiers. No code from PATH is run."""


@_command("commands", "Copy steps to a tier that does not hold them.")
def copy(
    steps: StepsArgument,
    to: Annotated[str, _option("--to", "TIER", "The tier to copy to.", autocompletion=_tier_names)],
) -> None:
    """Copy a step to a tier that does not hold it, with its pin and its tags, from the fastest good copy."""


# Keeping and deleting --------------------------------------------------------------------------------


@_command("commands", "Apply the retention rules now.")
def prune(
    dry_run: Annotated[
        bool, _flag("--dry-run", "Print the decisions and their reasons, and delete nothing.")
    ] = False,
) -> None:
    """Apply the retention rules now, on every stored tier; print for each copy why it is kept or deleted."""


@_command("commands", "Protect steps from every deletion rule.")
def pin(steps: StepsArgument) -> None:
    """Protect a step from every deletion rule, on every tier that holds it, until it is unpinned."""


@_command("commands", "Remove the pin of steps.")
def unpin(steps: StepsArgument) -> None:
    """Remove the pin of a step, on every tier."""


@_command("commands", "Add a tag to steps.")
def tag(tag: TagArgument, steps: StepsArgument) -> None:
    """Add a tag to a step, beside those of its save. A rule 'retain: {tags: ...}' keeps what has it."""


@_command("commands", "Remove a tag of steps.")
def untag(tag: TagArgument, steps: StepsArgument) -> None:
    """Remove a tag of a step, also one of its save."""


@_command("commands", "Delete steps from every tier, or a whole run.")
def rm(
    steps: StepsIfAny = None,
    all: Annotated[bool, _flag("--all", "Delete the whole run that --run names.")] = False,
    yes: Annotated[bool, _flag("--yes -y", "Ask for no confirmation.")] = False,
    even_the_last: Annotated[
        bool, _flag("--even-the-last", "Delete the last step that can be restored.")
    ] = False,
) -> None:
    """Delete a step from every tier. A pinned step is refused. The last step that can be restored needs
    --even-the-last."""


@_command("commands", "Make the other tiers forget one that was emptied on purpose.")
def forget(
    tier: Annotated[
        str,
        typer.Argument(metavar="TIER", help="The name of the tier.", autocompletion=_tier_names),
    ],
) -> None:
    """Make the other tiers, and this machine, forget a tier whose files were removed on purpose."""


@_command("commands", "Flush what a dead trainer left in host memory.")
def drain(
    deadline: Annotated[
        float | None,
        _option("--deadline", "TIME", "Stop after this time: 30s, 10m.", parser_of(parse_duration)),
    ] = None,
    all: Annotated[bool, _flag("--all", "Every run with images in this node's memory.")] = False,
    discard: Annotated[bool, _flag("--discard", "Flush nothing: free the memory.")] = False,
) -> None:
    """Flush what a dead trainer left in host memory, then free the memory. With --all no file is needed: each run's
    memory notes its own."""


# Looking on ------------------------------------------------------------------------------------------


@_command("look", "Show tiers, copies and transfers live.", prints=True)
def watch(
    every: Annotated[
        float, _option("--every", "TIME", "Time between two frames.", _PARSE_FRAME_TIME)
    ] = "1s",  # type: ignore[assignment]
    once: Annotated[bool, _flag("--once", "Print one frame, and end.")] = False,
    prometheus: Annotated[
        Any, _option("--prometheus", "PORT", "Serve metrics there, and show nothing.", _PARSE_PORT)
    ] = None,
    metrics: MetricsOption = False,
) -> None:
    """Show a run live, until Ctrl-C: tiers, copies, transfers, what a failure would cost, and the last events."""


@_command("init", "Print the JSON schema of the YAML file.", also=("as_json",), prints=True)
def schema() -> None:
    """Print the JSON schema of the YAML file, for editors to complete from."""


@app.command(short_help="Train, kill and restore a small model, and show the timeline.")
def demo(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="A new or empty folder to keep everything in."),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=24, help="Steps to train, rounded up to a multiple of 12.")
    ] = 120,
    s3: Annotated[
        bool, _flag("--s3", "Use a bucket of a real S3 server, which the demo starts.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the timeline as PNG.")
    ] = None,
    as_json: Annotated[
        bool, _flag("--json", "Print one JSON document on stdout, and nothing else.")
    ] = False,
) -> None:
    """Train a small real model through a chain of tiers, kill it, restore it, and show that nothing was lost."""
    from tierfall.demo.story import play

    play(folder, every=-(-steps // 12), s3=s3, picture=picture, as_json=as_json)
