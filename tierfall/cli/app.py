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
    epilog="Exit codes: 0 done; 1 failed, or found damage; 2 wrong usage or configuration; 130 interrupted.",
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
    subject: str, short_help: str, *, name: str | None = None, also: tuple[str, ...] = (*_OF_ALL,)
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a command. Its arguments, options and help are those of a function, and the options of all commands that
    ``also`` names. The function of the same name in the module ``subject`` of this folder is called with what is
    asked by the latter, and with the former by name."""

    def add(declared: Callable[..., None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            asked = _ask(**{option: given.pop(option) for option in also})
            work = getattr(import_module(f"tierfall.cli.{subject}"), declared.__name__)
            work(asked, **given)

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


@_command("init", "Write a first tiers.yaml, after five questions at most.", also=("as_json",))
def init(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The YAML file to write.", show_default=True)
    ] = Path("tiers.yaml"),
    disk: Annotated[
        list[str] | None,
        _option(
            "--disk",
            "FOLDER",
            "A folder on a disk of this machine; may be repeated, fastest first. [./checkpoints]",
            _later("tierfall.cli.init", "parse_disk"),
        ),
    ] = None,
    far: Annotated[
        str | None,
        _option(
            "--far",
            "PLACE",
            "A place that survives this machine: a network folder, or s3://bucket/prefix. [none]",
            _later("tierfall.cli.init", "parse_far"),
        ),
    ] = None,
    parameters: Annotated[
        int | None,
        _option(
            "--parameters",
            "N",
            "The model's number of parameters, such as 7B: sets the capacity of host memory. [unknown]",
            _later("tierfall.cli.init", "parse_parameters"),
        ),
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
            "--lose",
            "N",
            "How much training the loss of this machine may cost, in steps or time: sets how often --far gets a copy. "
            "[1h, or 10 saves]",
            _PARSE_EVERY,
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
        int | None,
        _option(
            "--image", "SIZE", "For the forecast: the size of one rank's image: 9GiB.", _PARSE_SIZE
        ),
    ] = None,
    save_every: Annotated[
        float | None,
        _option(
            "--save-every",
            "TIME",
            "For the forecast: the time between saves: 10m.",
            _PARSE_STEP_TIME,
        ),
    ] = None,
    step_time: Annotated[
        float | None,
        _option(
            "--step-time",
            "TIME",
            "For the forecast, if the file saves every N steps: the time of a step: 2s.",
            _PARSE_STEP_TIME,
        ),
    ] = None,
    steps_per_hour: Annotated[
        float | None,
        _option(
            "--steps-per-hour",
            "N",
            "For the forecast: training steps in an hour, in place of --step-time.",
            _parse_steps_per_hour,
        ),
    ] = None,
    ranks: Annotated[
        int | None, _option("--ranks", "N", "For the forecast: number of ranks.", min=1)
    ] = None,
    nodes: Annotated[
        int | None, _option("--nodes", "N", "For the forecast: number of nodes.", min=1)
    ] = None,
) -> None:
    """Check the configuration, measure every tier by writing a file there, which is removed again, and forecast
    whether it keeps up and has room."""


@_command("copies", "Verify every file of every copy, and repair.")
def verify(
    steps: StepsIfAny = None,
    tier: TierOption = None,
    repair: Annotated[bool, _flag("--repair", "Rewrite damaged files from good copies.")] = False,
) -> None:
    """Read and verify every file of every copy, or of those of some steps: chunks, manifests and commit records."""


# Copying ---------------------------------------------------------------------------------------------


@_command("copies", "Write a step as files for other programs.")
def export(
    step: Annotated[StepName, typer.Argument(metavar="STEP", help=STEP_HELP, parser=parse_step)],
    to: Annotated[
        Path,
        _option(
            "--to",
            "PATH",
            "The folder to write into, created if missing; or a file, by its ending .safetensors or .pt.",
        ),
    ],
    format: Annotated[
        ExportFormat | None,
        typer.Option(
            "--format",
            help="safetensors, unless PATH ends in .pt; torch, a file for torch.load; or dcp, for which PATH becomes a "
            "folder of torch.distributed.checkpoint.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        _option("--only", "PREFIX", "Export only this part, such as model. May be repeated."),
    ] = None,
    max_shard: Annotated[
        int | None,
        _option(
            "--max-shard",
            "SIZE",
            "safetensors only: files of at most this size, such as 5GB, with an index; PATH must be new or empty.",
            _PARSE_SIZE,
        ),
    ] = None,
    dtype: Annotated[
        ExportDtype | None,
        typer.Option("--dtype", help="safetensors only: convert floating-point tensors."),
    ] = None,
    beside: Annotated[
        list[Path] | None,
        _option(
            "--with",
            "FILE",
            "safetensors only: copy this file, such as config.json, into PATH, which must be new or empty. May be "
            "repeated.",
        ),
    ] = None,
    tier: TierOption = None,
    force: Annotated[bool, _flag("--force", "Replace an existing file of that name.")] = False,
) -> None:
    """Write a checkpoint as one file, as shards, or as a DCP folder, from the fastest good copy; every chunk is
    verified."""


@_command("copies", "Save what another program wrote as a step.", name="import")
def import_(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A file of torch.save, a Lightning .ckpt, safetensors, or a folder of safetensors or DCP.",
        ),
    ],
    as_step: Annotated[int, _option("--as-step", "N", "The step to save it as.")],
    entry: Annotated[
        str | None,
        _option(
            "--entry",
            "NAME",
            "The name in the state of a bare state_dict (model), or of the only part of an export.",
        ),
    ] = None,
) -> None:
    """Save what another program wrote as a step of the run, on all of its stored tiers. No code from PATH is run."""


@_command("copies", "Copy steps to a tier that does not hold them.")
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
    all: Annotated[
        bool,
        _flag(
            "--all",
            "Delete the whole run that --run names: every tier, memory and ids. The run's name is read from standard "
            "input.",
        ),
    ] = False,
    yes: Annotated[
        bool,
        _flag(
            "--yes -y",
            "Delete the newest step, or one that could not be read, without a confirmation.",
        ),
    ] = False,
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
        typer.Argument(
            metavar="TIER",
            help="The name of the tier in the configuration.",
            autocompletion=_tier_names,
        ),
    ],
) -> None:
    """Make the other tiers, and this machine, forget a tier whose files were removed on purpose."""


@_command("commands", "Flush what a dead trainer left in host memory.")
def drain(
    deadline: Annotated[
        float | None,
        _option(
            "--deadline",
            "TIME",
            "Stop after this time, such as 30s or 10m; the newest copies come first.",
            parser_of(parse_duration),
        ),
    ] = None,
    all: Annotated[
        bool, _flag("--all", "Every run that has left something in this node's memory.")
    ] = False,
    discard: Annotated[
        bool, _flag("--discard", "Flush nothing: free the memory, once the run's name was typed.")
    ] = False,
) -> None:
    """Flush what a dead trainer left in host memory, then free the memory. With --all no file is needed: each run's
    memory notes its own."""


# Looking on ------------------------------------------------------------------------------------------


@_command("look", "Show tiers, copies and transfers live.")
def watch(
    every: Annotated[
        float, _option("--every", "TIME", "Time between two frames.", _PARSE_FRAME_TIME)
    ] = "1s",  # type: ignore[assignment]
    once: Annotated[bool, _flag("--once", "Print one frame, and end.")] = False,
    prometheus: Annotated[
        Any,
        _option(
            "--prometheus",
            "PORT",
            "Serve /metrics and /healthz of the trainers on this machine at this port or address, and show nothing: "
            "9109, or 127.0.0.1:9109.",
            _later("tierfall.config.fields", "listen_address"),
        ),
    ] = None,
    metrics: MetricsOption = False,
) -> None:
    """Show a run live, until Ctrl-C: tiers, copies, transfers, what a failure would cost, and the last events."""


@_command("init", "Print the JSON schema of the YAML file.", also=("as_json",))
def schema() -> None:
    """Print the JSON schema of the YAML file, for editors to complete from."""


@app.command(short_help="Train, kill and restore a small model, and show the timeline.")
def demo(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="A new or empty folder to keep everything in. Without it, a temporary one that is removed.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=24, help="Steps to train, rounded up to a multiple of 12.")
    ] = 120,
    s3: Annotated[
        bool, _flag("--s3", "Use a bucket of a real S3 server, which the demo starts.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where to write the timeline as PNG. Without it, DIR/timeline.png or ./tierfall-demo.png.",
        ),
    ] = None,
    as_json: Annotated[
        bool, _flag("--json", "Print one JSON document on stdout, and nothing else.")
    ] = False,
) -> None:
    """Train a small real model through a chain of tiers, kill it, restore it, and show that nothing was lost."""
    from tierfall.demo.story import play

    play(folder, every=-(-steps // 12), s3=s3, picture=picture, as_json=as_json)
