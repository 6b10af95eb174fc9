"""The commands: their arguments, options and help. Each calls the module that does its work, and imports it only then,
so that ``--help`` and completion need not wait for torch."""

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
    refuse,
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


TIME_LEAST_S, FRAME_LEAST_S = 0.001, 0.1
STEP_HELP = (
    "400, a step of the live lineage; 400@7, that of attempt 7; or latest, the newest that can be "
    "restored."
)
ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        envvar="TIERFALL_CONFIG",
        metavar="FILE",
        help=f"The YAML file with the tiers; or, to read it alone, a tier's folder or address. [./{DEFAULT_CONFIG}]",
        is_eager=True,
    ),
]
RunOption = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME", help="The run, instead of the one in the file."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")
]
_STEPS = typer.Argument(metavar="STEP", help=f"{STEP_HELP} May be repeated.", parser=parse_step)
StepsArgument = Annotated[list[StepName], _STEPS]
StepsIfAny = Annotated[list[StepName] | None, _STEPS]
TagArgument = Annotated[
    str, typer.Argument(metavar="TAG", help="Letters, digits, '.', '_' and '-', at most 128.")
]
MetricsOption = Annotated[
    bool,
    typer.Option(
        "--metrics",
        "-m",
        help="Show all metrics, and not only those that a rule of retention uses.",
    ),
]
TierOption = Annotated[
    str | None,
    typer.Option("--tier", metavar="NAME", help="Read this tier only.", autocompletion=_tier_names),
]


def _add_run_command(
    short_help: str, *, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a function as a command on a run: in place of its first parameter, ``asked``, the command has the options
    --config, --run and --json."""

    def asking(
        config: ConfigOption = None, run: RunOption = None, as_json: JsonOption = False
    ) -> Asked:
        return Asked(config, run, as_json)

    common = signature(asking, eval_str=True).parameters

    def add(call: Callable[..., None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            call(asking(**{option: given.pop(option) for option in common}), **given)

        _, *own = signature(call, eval_str=True).parameters.values()
        command.__name__, command.__doc__ = call.__name__, call.__doc__
        command.__signature__ = Signature([*own, *common.values()])  # type: ignore[attr-defined]
        return app.command(name, short_help=short_help)(command)

    return add


def _from(module: str, name: str) -> Callable[[str], Any]:
    """Make typer's parser of an option from a function of a module that is imported once the option is given."""

    def parse(text: str) -> Any:
        return getattr(import_module(module), name)(text)

    return parser_of(parse)


def _steps_per_hour(text: str) -> float:
    count = float(text)
    if not 0 < count < float("inf"):
        raise typer.BadParameter(f"{text!r} is invalid; expected more than 0")
    return count


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


@app.command(short_help="Write a first tiers.yaml, after five questions at most.")
def init(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The YAML file to write.", show_default=True)
    ] = Path("tiers.yaml"),
    disk: Annotated[
        list[str] | None,
        typer.Option(
            "--disk",
            metavar="FOLDER",
            help="A folder on a disk of this machine; may be repeated, fastest first. [./checkpoints]",
            parser=_from("tierfall.cli.init", "parse_disk"),
        ),
    ] = None,
    far: Annotated[
        str | None,
        typer.Option(
            "--far",
            metavar="PLACE",
            help="A place that survives this machine: a network folder, or s3://bucket/prefix. [none]",
            parser=_from("tierfall.cli.init", "parse_far"),
        ),
    ] = None,
    parameters: Annotated[
        int | None,
        typer.Option(
            "--parameters",
            metavar="N",
            help="The model's number of parameters, such as 7B: sets the capacity of host memory. [unknown]",
            parser=_from("tierfall.cli.init", "parse_parameters"),
        ),
    ] = None,
    every: Annotated[
        float | None,
        typer.Option(
            "--every",
            metavar="N",
            help="How often to save: in steps (100) or time (10m). [10m]",
            parser=_from("tierfall.config.fields", "parse_every"),
        ),
    ] = None,
    lose: Annotated[
        float | None,
        typer.Option(
            "--lose",
            metavar="N",
            help="How much training the loss of this machine may cost, in steps or time: sets how often --far gets a "
            "copy. [1h, or 10 saves]",
            parser=_from("tierfall.config.fields", "parse_every"),
        ),
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", min=1, help="How many ranks train.")
    ] = 1,
    run: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="The run's name. [the folder's]")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing: defaults for what is not given.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a commented YAML file, and say what is too small on this machine. At a terminal it asks what no option
    answers; Enter takes the default."""
    from tierfall.cli import init

    init.init(
        file,
        disks=disk,
        far=far,
        parameters=parameters,
        ranks=ranks,
        every=every,
        lose=lose,
        run=run,
        yes=yes,
        force=force,
        as_json=as_json,
    )


# Reading ---------------------------------------------------------------------------------------------


@_add_run_command("List the steps of a run, tier by tier.")
def ls(
    asked: Asked,
    last: Annotated[
        int | None,
        typer.Option("--last", "-n", metavar="N", min=1, help="List the newest N steps only."),
    ] = None,
    metrics: MetricsOption = False,
) -> None:
    """List the steps of a run, the newest last: age, size, and the state on each tier."""
    from tierfall.cli import ls_show

    ls_show.ls(asked, last, metrics)


@_add_run_command("Print the newest step that can be restored.")
def latest(asked: Asked) -> None:
    """Print the newest step that can be restored. The exit code is 1 if there is none, or if a newer one is damaged."""
    from tierfall.cli import ls_show

    ls_show.latest(asked)


@app.command(short_help="List the runs on the tiers, and in this node's memory.")
def runs(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List all runs on the tiers, not only the one that the file names, and what any run holds in the memory of this
    node. Without a file, it lists the memory alone."""
    from tierfall.cli import ls_show

    ls_show.runs(Asked(config, None, as_json))


@_add_run_command("Show steps in full.")
def show(asked: Asked, steps: StepsArgument) -> None:
    """Show a step in full: its lineage, its files, its copies and why each is kept or deleted."""
    from tierfall.cli import ls_show

    ls_show.show(asked, steps)


@_add_run_command("Check the configuration; measure and forecast every tier.")
def check(
    asked: Asked,
    size: Annotated[
        int,
        typer.Option(
            "--size",
            metavar="SIZE",
            help="Bytes to write to each tier.",
            parser=parser_of(parse_size, 1, format_size),
        ),
    ] = "64MiB",  # type: ignore[assignment]
    image: Annotated[
        int | None,
        typer.Option(
            "--image",
            metavar="SIZE",
            help="For the forecast: the size of one rank's image: 9GiB.",
            parser=parser_of(parse_size_with_unit),
        ),
    ] = None,
    save_every: Annotated[
        float | None,
        typer.Option(
            "--save-every",
            metavar="TIME",
            help="For the forecast: the time between saves: 10m.",
            parser=parser_of(parse_duration, TIME_LEAST_S, format_duration),
        ),
    ] = None,
    step_time: Annotated[
        float | None,
        typer.Option(
            "--step-time",
            metavar="TIME",
            help="For the forecast, if the file saves every N steps: the time of a step: 2s.",
            parser=parser_of(parse_duration, TIME_LEAST_S, format_duration),
        ),
    ] = None,
    steps_per_hour: Annotated[
        float | None,
        typer.Option(
            "--steps-per-hour",
            metavar="N",
            help="For the forecast: training steps in an hour, in place of --step-time.",
            parser=_steps_per_hour,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", min=1, help="For the forecast: number of ranks."),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", metavar="N", min=1, help="For the forecast: number of nodes."),
    ] = None,
) -> None:
    """Check the configuration, measure every tier by writing a file there, which is removed again, and forecast
    whether it keeps up and has room."""
    from tierfall.cli import check

    if step_time is not None and steps_per_hour is not None:
        refuse("--step-time and --steps-per-hour exclude each other", Exit.USAGE)
    if ranks is not None and (nodes or 1) > ranks:
        refuse(f"--nodes: {nodes} nodes are more than {ranks} ranks", Exit.USAGE)
    inputs = check.Training(
        image_bytes=image,
        save_every_s=save_every,
        step_s=3600 / steps_per_hour if steps_per_hour else step_time,
        ranks=ranks,
        nodes=nodes,
    )
    check.check(asked, size, inputs)


@_add_run_command("Verify every file of every copy, and repair.")
def verify(
    asked: Asked,
    steps: StepsIfAny = None,
    tier: TierOption = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Rewrite damaged files from good copies.")
    ] = False,
) -> None:
    """Read and verify every file of every copy, or of those of some steps: chunks, manifests and commit records."""
    from tierfall.cli import copies

    copies.verify(asked, steps or [], tier, repair)


# Copying ---------------------------------------------------------------------------------------------


@_add_run_command("Write a step as files for other programs.")
def export(
    asked: Asked,
    step: Annotated[StepName, typer.Argument(metavar="STEP", help=STEP_HELP, parser=parse_step)],
    to: Annotated[
        Path,
        typer.Option(
            "--to",
            metavar="PATH",
            help="The folder to write into, created if missing; or a file, by its ending .safetensors or .pt.",
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
        typer.Option(
            "--only",
            metavar="PREFIX",
            help="Export only this part, such as model. May be repeated.",
        ),
    ] = None,
    max_shard: Annotated[
        int | None,
        typer.Option(
            "--max-shard",
            metavar="SIZE",
            help="safetensors only: files of at most this size, such as 5GB, with an index; PATH must be new or empty.",
            parser=parser_of(parse_size_with_unit),
        ),
    ] = None,
    dtype: Annotated[
        ExportDtype | None,
        typer.Option("--dtype", help="safetensors only: convert floating-point tensors."),
    ] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option(
            "--with",
            metavar="FILE",
            help="safetensors only: copy this file, such as config.json, into PATH, which must be new or empty. May be "
            "repeated.",
        ),
    ] = None,
    tier: TierOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file of that name.")
    ] = False,
) -> None:
    """Write a checkpoint as one file, as shards, or as a DCP folder, from the fastest good copy; every chunk is
    verified."""
    from tierfall.cli import copies
    from tierfall.export.output import DTYPES, ExportOptions, format_of

    to = to.expanduser()
    wish = ExportOptions(
        to=to,
        format=format_of(to, format),
        only=tuple(only or ()),
        replace=force,
        max_shard_bytes=max_shard,
        dtype=None if dtype is None else DTYPES[dtype],
        beside=tuple(path.expanduser() for path in beside or ()),
    )
    copies.export(asked, step, wish, tier)


@_add_run_command("Save what another program wrote as a step.", name="import")
def import_(
    asked: Asked,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A file of torch.save, a Lightning .ckpt, safetensors, or a folder of safetensors or DCP.",
        ),
    ],
    as_step: Annotated[int, typer.Option("--as-step", metavar="N", help="The step to save it as.")],
    entry: Annotated[
        str | None,
        typer.Option(
            "--entry",
            metavar="NAME",
            help="The name in the state of a bare state_dict (model), or of the only part of an export.",
        ),
    ] = None,
) -> None:
    """Save what another program wrote as a step of the run, on all of its stored tiers. No code from PATH is run."""
    from tierfall.cli import copies

    copies.import_(asked, path, as_step, entry)


@_add_run_command("Copy steps to a tier that does not hold them.")
def copy(
    asked: Asked,
    steps: StepsArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="TIER", help="The tier to copy to.", autocompletion=_tier_names
        ),
    ],
) -> None:
    """Copy a step to a tier that does not hold it, with its pin and its tags, from the fastest good copy."""
    from tierfall.cli import copies

    copies.copy(asked, steps, to)


# Keeping and deleting --------------------------------------------------------------------------------


@_add_run_command("Apply the retention rules now.")
def prune(
    asked: Asked,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the decisions and their reasons, and delete nothing."
        ),
    ] = False,
) -> None:
    """Apply the retention rules now, on every stored tier; print for each copy why it is kept or deleted."""
    from tierfall.cli import commands

    commands.prune(asked, dry_run)


@_add_run_command("Protect steps from every deletion rule.")
def pin(asked: Asked, steps: StepsArgument) -> None:
    """Protect a step from every deletion rule, on every tier that holds it, until it is unpinned."""
    from tierfall.cli import commands

    commands.change(asked, "pin", steps)


@_add_run_command("Remove the pin of steps.")
def unpin(asked: Asked, steps: StepsArgument) -> None:
    """Remove the pin of a step, on every tier."""
    from tierfall.cli import commands

    commands.change(asked, "unpin", steps)


@_add_run_command("Add a tag to steps.")
def tag(asked: Asked, name: TagArgument, steps: StepsArgument) -> None:
    """Add a tag to a step, beside those of its save. A rule 'retain: {tags: ...}' keeps what has it."""
    from tierfall.cli import commands

    commands.change(asked, "tag", steps, tag=name)


@_add_run_command("Remove a tag of steps.")
def untag(asked: Asked, name: TagArgument, steps: StepsArgument) -> None:
    """Remove a tag of a step, also one of its save."""
    from tierfall.cli import commands

    commands.change(asked, "untag", steps, tag=name)


@_add_run_command("Delete steps from every tier, or a whole run.")
def rm(
    asked: Asked,
    steps: StepsIfAny = None,
    all: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Delete the whole run that --run names: every tier, memory and ids. The run's name is read from "
            "standard input.",
        ),
    ] = False,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            "-y",
            help="Delete the newest step, or one that could not be read, without a confirmation.",
        ),
    ] = False,
    even_the_last: Annotated[
        bool, typer.Option("--even-the-last", help="Delete the last step that can be restored.")
    ] = False,
) -> None:
    """Delete a step from every tier. A pinned step is refused. The last step that can be restored needs
    --even-the-last."""
    from tierfall.cli import commands

    if all:
        commands.rm_run(asked, steps or [])
    else:
        commands.change(asked, "rm", steps or [], yes=yes, even_the_last=even_the_last)


@_add_run_command("Make the other tiers forget one that was emptied on purpose.")
def forget(
    asked: Asked,
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
    from tierfall.cli import commands

    commands.forget(asked, tier)


@_add_run_command("Flush what a dead trainer left in host memory.")
def drain(
    asked: Asked,
    deadline: Annotated[
        float | None,
        typer.Option(
            "--deadline",
            metavar="TIME",
            help="Stop after this time, such as 30s or 10m; the newest copies come first.",
            parser=parser_of(parse_duration),
        ),
    ] = None,
    every_run: Annotated[
        bool,
        typer.Option("--all", help="Every run that has left something in this node's memory."),
    ] = False,
    discard: Annotated[
        bool,
        typer.Option(
            "--discard", help="Flush nothing: free the memory, once the run's name was typed."
        ),
    ] = False,
) -> None:
    """Flush what a dead trainer left in host memory, then free the memory. With --all no file is needed: each run's
    memory notes its own."""
    from tierfall.cli import commands

    if every_run and asked.run is not None:
        refuse("drain: --all drains every run: name none by --run", Exit.USAGE)
    if discard and deadline is not None:
        refuse("drain: --discard flushes nothing: leave --deadline out", Exit.USAGE)
    if discard:
        commands.discard(asked, every_run)
    elif every_run:
        commands.drain_all(asked, deadline)
    else:
        commands.drain(asked, deadline)


# Looking on ------------------------------------------------------------------------------------------


@_add_run_command("Show tiers, copies and transfers live.")
def watch(
    asked: Asked,
    every: Annotated[
        float,
        typer.Option(
            "--every",
            metavar="TIME",
            help="Time between two frames.",
            parser=parser_of(parse_duration, FRAME_LEAST_S, format_duration),
        ),
    ] = "1s",  # type: ignore[assignment]
    once: Annotated[bool, typer.Option("--once", help="Print one frame, and end.")] = False,
    prometheus: Annotated[
        Any,
        typer.Option(
            "--prometheus",
            metavar="PORT",
            help="Serve /metrics and /healthz of the trainers on this machine at this port or address, and show "
            "nothing: 9109, or 127.0.0.1:9109.",
            parser=_from("tierfall.config.fields", "listen_address"),
        ),
    ] = None,
    metrics: MetricsOption = False,
) -> None:
    """Show a run live, until Ctrl-C: tiers, copies, transfers, what a failure would cost, and the last events."""
    from tierfall.cli import watch

    watch.watch(asked, every, once, prometheus, metrics)


@app.command(short_help="Print the JSON schema of the YAML file.")
def schema(as_json: JsonOption = False) -> None:
    """Print the JSON schema of the YAML file, for editors to complete from."""
    from tierfall.cli import init

    init.schema()


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
        bool,
        typer.Option("--s3", help="Use a bucket of a real S3 server, which the demo starts."),
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where to write the timeline as PNG. Without it, DIR/timeline.png or ./tierfall-demo.png.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a small real model through a chain of tiers, kill it, restore it, and show that nothing was lost."""
    from tierfall.demo.story import play

    play(folder, every=-(-steps // 12), s3=s3, picture=picture, as_json=as_json)
