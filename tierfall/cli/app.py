"""The commands: their arguments, options and help, as one table. The function of its name in the module of its subject
does a command's work, and is imported only then, so that ``--help`` and completion need not wait for torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import typer

import tierfall
from tierfall.cli.usage import (
    DEFAULT_CONFIG,
    GROUPS,
    Asked,
    CommandGroup,
    Exit,
    StepName,
    listen_to_warnings,
    parse_source,
    parse_step,
    parser_of,
    remember,
)
from tierfall.core.types.units import (
    format_duration,
    format_size,
    parse_duration,
    parse_overhead,
    parse_positive_rate,
    parse_size,
    parse_size_with_unit,
)
from tierfall.core.types.values import ExportDtype, ExportFormat
from tierfall.plan.layout import Optimizer, Precision, Sharding

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

Declared = tuple[Any, Any]
"""The type of an option or an argument, and what typer knows of it."""


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


def _flag(names: str, help: str) -> Declared:
    return bool, typer.Option(False, *names.split(), help=help)


def _option(
    names: str,
    metavar: str | None,
    help: str,
    kind: Any = str,
    parse: Callable[[str], Any] | None = None,
    default: Any = None,
    **more: Any,
) -> Declared:
    """An option with a value, which ``parse`` makes of its text; a whole number from ``min`` to ``max``."""
    if kind is int and parse is None:
        parse = partial(_whole_number, least=more.pop("min", 0), most=more.pop("max", 10**9))
    info = typer.Option(default, *names.split(), metavar=metavar, help=help, parser=parse, **more)
    return kind, info


def _whole_number(text: str | int, *, least: int, most: int) -> int:
    if not str(text).isdecimal() or not least <= int(text) <= most:
        raise typer.BadParameter(f"{text!r}; expected a whole number of at least {least}")
    return int(text)


def _argument(
    metavar: str,
    help: str,
    kind: Any = str,
    parse: Callable[[str], Any] | None = None,
    default: Any = ...,
    **more: Any,
) -> Declared:
    return kind, typer.Argument(default, metavar=metavar, help=help, parser=parse, **more)


def _later(module: str, name: str) -> Callable[[str], Any]:
    """Make the parser of an option from a function of a module that is imported once the option is given."""
    return parser_of(lambda text: getattr(import_module(module), name)(text))


def _parse_number(text: str) -> float:
    count = float(text)
    if not 0 < count < float("inf"):
        raise typer.BadParameter(f"{text!r} is invalid; expected more than 0")
    return count


_SIZE = parser_of(parse_size_with_unit)
_RATE = parser_of(parse_positive_rate)
_PARAMETERS = _later("tierfall.plan.models", "parse_parameters")
_EVERY = _later("tierfall.config.fields", "parse_every")
_STEP_TIME = parser_of(parse_duration, 0.001, format_duration)
_STEP_HELP = "400, a step of the live lineage; 400@7, that of attempt 7; or latest, the newest that can be restored."
_SOURCE_HELP = f"{_STEP_HELP} Or the path or address of one, or of a run with its newest."
_STEPS = _argument("STEP", f"{_STEP_HELP} May be repeated.", list[StepName], parse_step)
_STEPS_IF_ANY = _argument(
    "STEP", f"{_STEP_HELP} May be repeated.", list[StepName], parse_step, None
)
_TAG = _argument("TAG", "Letters, digits, '.', '_' and '-', at most 128.")
_METRICS = _flag(
    "--metrics -m", "Show all metrics, and not only those that a rule of retention uses."
)
_TIER = _option("--tier", "NAME", "Read this tier only.", autocompletion=_tier_names)
_FORCE = _flag("--force", "Replace an existing file.")

_OF_ALL: dict[str, Declared] = {
    "config": _option(
        "--config -c",
        "FILE",
        f"The YAML file with the tiers; or, to read it alone, a tier's folder or address. [./{DEFAULT_CONFIG}]",
        envvar="TIERFALL_CONFIG",
        is_eager=True,
    ),
    "run": _option("--run", "NAME", "The run, instead of the one in the file."),
    "as_json": _flag("--json", "Print one JSON document on stdout, and nothing else."),
}


def _command(
    name: str,
    help: str,
    *,
    module: str = "tierfall.cli.commands",
    also: tuple[str, ...] = (*_OF_ALL,),
    prints: bool = False,
    **own: Declared,
) -> None:
    """Add a command to the last of GROUPS, with its ``own`` arguments and options, and the options of all commands that
    ``also`` names; the first sentence of the ``help`` is shown in the list of commands. The function of its name in a
    module is called with the former by name, and with what collects its output, which has the latter and is printed at
    the end; or with both by name if it ``prints`` by itself."""

    def command(**given: Any) -> None:
        work = getattr(import_module(module), f"{name}_" if name == "import" else name)
        asked = Asked(**{option: given[option] for option in also})
        remember(asked)
        if prints:
            work(**given)
            return
        given = {option: value for option, value in given.items() if option not in also}
        answer = import_module("tierfall.cli.output").CommandOutput(asked)
        work(answer, **given)
        answer.finish()

    declared = {**own, **{option: _OF_ALL[option] for option in also}}
    parameters = [
        Parameter(each, Parameter.KEYWORD_ONLY, default=info, annotation=kind)
        for each, (kind, info) in declared.items()
    ]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    app.command(name, help=help)(command)
    next(reversed(GROUPS.values())).append(name)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tierfall {tierfall.__version__}")
        raise typer.Exit(Exit.DONE)


@app.callback()
def _prepare(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_print_version, is_eager=True
    ),
) -> None:
    listen_to_warnings()


GROUPS["Start"] = []

_command(
    "init",
    "Write a first, commented YAML file, and say what is too small here. At a terminal it asks what no option answers, "
    "at most five questions; Enter takes the default.",
    module="tierfall.cli.init",
    also=("as_json",),
    prints=True,
    file=_argument("FILE", "The YAML file to write.", Path, default=Path("tiers.yaml")),
    disk=_option(
        "--disk",
        "FOLDER",
        "A folder of this machine; may be repeated. [./checkpoints]",
        list[str],
        _later("tierfall.cli.init", "parse_disk"),
    ),
    far=_option(
        "--far",
        "PLACE",
        "A folder or bucket that survives this machine. [none]",
        parse=_later("tierfall.cli.init", "parse_far"),
    ),
    parameters=_option(
        "--parameters",
        "N",
        "The model's size, such as 7B. [unknown]",
        int,
        _PARAMETERS,
    ),
    every=_option(
        "--every", "N", "How often to save: in steps (100) or time (10m). [10m]", float, _EVERY
    ),
    lose=_option(
        "--lose", "N", "What the loss of this machine may cost. [1h, or 10 saves]", float, _EVERY
    ),
    ranks=_option("--ranks", "N", "How many ranks train.", int, default=1, min=1),
    run=_option("--run", "NAME", "The run's name. [the folder's]"),
    yes=_flag("--yes -y", "Ask nothing: defaults for what is not given."),
    force=_FORCE,
)
_command(
    "plan",
    "Say what checkpointing costs, before there is a run: bytes, the interval, what each tier needs, what a failure "
    "costs, and the bottleneck. What is not given is assumed, and printed with its source.",
    module="tierfall.cli.plan",
    also=("as_json",),
    model=_argument("MODEL", "llama3-8b, a config.json, or parameters: 7B.", default=None),
    gpus=_option("--gpus", "N", "How many GPUs train. [8]", int, min=1, max=10**6),
    gpus_per_node=_option("--gpus-per-node", "N", "GPUs of a node. [8]", int, min=1),
    tp=_option("--tp", "N", "Tensor parallelism. [1]", int, min=1),
    pp=_option("--pp", "N", "Pipeline parallelism. [1]", int, min=1),
    cp=_option("--cp", "N", "Context parallelism. [1]", int, min=1),
    dp=_option("--dp", "N", "Data parallelism. [what the others leave]", int, min=1),
    ep=_option("--ep", "N", "Expert parallelism. [1]", int, min=1),
    shard=_option("--shard", None, "What data-parallel ranks divide.", Sharding, default="fsdp"),
    precision=_option("--precision", None, "The dtype of weights.", Precision, default="bf16"),
    optimizer=_option("--optimizer", None, "What has a state.", Optimizer, default="adam"),
    tier=_option(
        "--tier",
        "TIER",
        "A tier, fastest first: peers, nvme, nvme-gen5, lustre, store, s3; or with rates and rules, lustre:write=1GB/s,"
        "read=1GB/s,every=10,last=3,capacity=1PB. May be repeated. [peers, nvme, store]",
        list[str],
    ),
    host_memory=_option("--host-memory", "SIZE", "Memory of a node: 2TB.", int, _SIZE),
    copy_rate=_option("--copy-rate", "RATE", "From a GPU to host memory.", float, _RATE),
    link=_option("--link", "RATE", "What a node sends or receives.", float, _RATE),
    mtbf=_option(
        "--mtbf",
        "TIME",
        "Between failures of the job: 4h, or process=4h,node=12h,site=90d.",
        parse=_later("tierfall.plan.cluster", "parse_mtbf"),
    ),
    restart=_option("--restart", "TIME", "Until a restore begins. [5m]", float, _STEP_TIME),
    every=_option("--every", "N", "Save so often: steps (100) or time (10m).", float, _EVERY),
    overhead=_option(
        "--overhead",
        "SHARE",
        "The most that saves may lengthen training: 1%. [by the best ETTR]",
        float,
        parser_of(parse_overhead),
    ),
    step_time=_option("--step-time", "TIME", "The time of a training step.", float, _STEP_TIME),
    config=_option("--config -c", "FILE", "Take tiers and interval from a YAML file."),
    from_run=_option("--from-run", "DIR", "Take figures from a run's event log.", Path),
    failures=_option("--failures", "N", "Simulate N weeks.", float, _parse_number),
    trace=_option("--trace", "FILE", "Failures as CSV, not random ones.", Path),
    write=_option("--write", "FILE", "Write a commented YAML file.", Path),
    plot=_option("--plot", "FILE", "Draw ETTR and bandwidths as PNG.", Path),
)
_command(
    "check",
    "Check the configuration; measure and forecast every tier. A file is written to each tier, and removed again. The "
    "forecast says whether a tier keeps up and has room, by the options or the run's own checkpoints.",
    module="tierfall.cli.check",
    size=_option(
        "--size",
        "SIZE",
        "Bytes to write to each tier.",
        int,
        parser_of(parse_size, 1, format_size),
        "64MiB",
    ),
    image=_option("--image", "SIZE", "The size of one rank's image: 9GiB.", int, _SIZE),
    save_every=_option("--save-every", "TIME", "The time between saves: 10m.", float, _STEP_TIME),
    step_time=_option("--step-time", "TIME", "The time of a training step: 2s.", float, _STEP_TIME),
    steps_per_hour=_option(
        "--steps-per-hour", "N", "In place of --step-time.", float, _parse_number
    ),
    ranks=_option("--ranks", "N", "The number of ranks.", int, min=1),
    nodes=_option("--nodes", "N", "The number of nodes.", int, min=1),
)
_command(
    "demo",
    "Train, kill and restore a small model, and show the timeline. It trains a real one through a chain of tiers, and "
    "shows that nothing was lost.",
    module="tierfall.demo.story",
    also=("as_json",),
    prints=True,
    folder=_argument("DIR", "A new or empty folder to keep everything in.", Path, default=None),
    steps=_option(
        "--steps", "N", "Steps to train, rounded up to a multiple of 12.", int, default=120, min=24
    ),
    s3=_flag("--s3", "Use a bucket of a real S3 server, which the demo starts."),
    picture=_option("--picture", "FILE", "Where to write the timeline as PNG.", Path),
)
_command(
    "schema",
    "Print the JSON schema of the YAML file. Editors complete from it.",
    module="tierfall.cli.init",
    also=("as_json",),
    prints=True,
)

GROUPS["Look"] = []

_command(
    "ls",
    "List the steps of a run, tier by tier. The newest is the last; each has its age, its size, and the state on each "
    "tier.",
    module="tierfall.cli.look",
    last=_option("--last -n", "N", "List the newest N steps only.", int, min=1),
    metrics=_METRICS,
)
_command(
    "show",
    "Show steps in full. It shows their lineage, their files, their copies and why each is kept or deleted.",
    module="tierfall.cli.look",
    steps=_STEPS,
)
_command(
    "latest",
    "Print the newest step that can be restored. The exit code is 1 if there is none, or if a newer one is damaged.",
    module="tierfall.cli.look",
)
_command(
    "runs",
    "List the runs on the tiers, and in this node's memory. It lists all runs, not only the one that the file names, "
    "and what any run holds in memory; without a file, the memory alone.",
    module="tierfall.cli.look",
    also=("config", "as_json"),
)
_command(
    "watch",
    "Show tiers, copies and transfers live. Until Ctrl-C it also shows the last events, and what a failure would cost.",
    module="tierfall.cli.look",
    prints=True,
    every=_option(
        "--every",
        "TIME",
        "Time between two frames.",
        float,
        parser_of(parse_duration, 0.1, format_duration),
        "1s",
    ),
    once=_flag("--once", "Print one frame, and end."),
    prometheus=_option(
        "--prometheus",
        "PORT",
        "Serve metrics there, and show nothing.",
        parse=_later("tierfall.config.fields", "listen_address"),
    ),
    metrics=_METRICS,
)

_command(
    "diff",
    "Show which tensors and values of two steps differ. It compares the digests of chunks, and reads none; --values "
    "reads what they leave open, and shows the largest difference. The exit code is 0 if nothing differs, 1 if "
    "something does, 2 if that could not be found out.",
    module="tierfall.cli.look",
    a=_argument("A", _SOURCE_HELP, StepName, parse_source),
    b=_argument("B", _SOURCE_HELP, StepName, parse_source),
    values=_flag("--values", "Read what may differ, and compare it."),
)

GROUPS["Trust"] = []

_command(
    "verify",
    "Verify every file of every copy, and repair. It reads chunks, manifests and commit records of all steps, or of "
    "some.",
    steps=_STEPS_IF_ANY,
    tier=_TIER,
    repair=_flag("--repair", "Rewrite damaged files from good copies."),
)
_command(
    "drain",
    "Flush what a dead trainer left in host memory. The memory is freed then. With --all no file is needed: each run's "
    "memory notes its own.",
    deadline=_option(
        "--deadline", "TIME", "Stop after this time: 30s, 10m.", float, parser_of(parse_duration)
    ),
    all=_flag("--all", "Every run with images in this node's memory."),
    discard=_flag("--discard", "Flush nothing: free the memory."),
)

GROUPS["Change"] = []

_command(
    "pin",
    "Protect steps from every deletion rule. A pin counts on every tier that holds the step, until it is unpinned.",
    steps=_STEPS,
)
_command("unpin", "Remove the pin of steps, on every tier.", steps=_STEPS)
_command(
    "tag",
    "Add a tag to steps. It is beside those of their save; a rule 'retain: {tags: ...}' keeps what has it.",
    tag=_TAG,
    steps=_STEPS,
)
_command(
    "untag",
    "Remove a tag of steps, also one of their save.",
    tag=_TAG,
    steps=_STEPS,
)
_command(
    "prune",
    "Apply the retention rules now. It goes through every stored tier, and prints for each copy why it is kept or "
    "deleted.",
    dry_run=_flag("--dry-run", "Print the decisions and their reasons, and delete nothing."),
)
_command(
    "rm",
    "Delete steps from every tier, or a whole run. A pinned step is refused. The last step that can be restored needs "
    "--even-the-last.",
    steps=_STEPS_IF_ANY,
    all=_flag("--all", "Delete the whole run that --run names."),
    yes=_flag("--yes -y", "Ask for no confirmation; --all asks for the name all the same."),
    even_the_last=_flag("--even-the-last", "Delete the last step that can be restored."),
)
_command(
    "forget",
    "Make the other tiers forget one that was emptied on purpose. This machine forgets it, too.",
    tier=_argument("TIER", "The name of the tier.", autocompletion=_tier_names),
)

GROUPS["Move"] = []

_command(
    "copy",
    "Copy steps to a tier that does not hold them. Pin and tags are copied, too; the bytes come from the fastest good "
    "copy.",
    steps=_STEPS,
    to=_option("--to", "TIER", "The tier to copy to.", default=..., autocompletion=_tier_names),
)
_command(
    "prefetch",
    "Bring what a restore will read to a disk of this node. For a prolog, an init container or a spare node: it does "
    "nothing if the run has no checkpoint yet, or if the fast tiers have it.",
    step=_argument("STEP", f"{_STEP_HELP} [latest]", StepName, parse_step, None),
    to=_option(
        "--to",
        "TIER",
        "The tier. [the fastest disk of this node with room]",
        autocompletion=_tier_names,
    ),
    node=_option(
        "--node",
        "K/N",
        "This is node K, from 0, of N: bring its part of the ranks.",
        parse=_later("tierfall.cli.commands", "parse_node"),
    ),
)
_command(
    "export",
    "Write a step as files for other programs. It becomes one file, shards, or a DCP folder, from the fastest good "
    "copy; every chunk is verified.",
    step=_argument("STEP", _STEP_HELP, StepName, parse_step),
    to=_option("--to", "PATH", "A folder, or a file .safetensors or .pt.", Path, default=...),
    format=_option("--format", None, "The form, unless PATH tells it.", ExportFormat),
    only=_option("--only", "PREFIX", "This part only; may be repeated.", list[str]),
    max_shard=_option("--max-shard", "SIZE", "Files of at most this size: 5GB.", int, _SIZE),
    dtype=_option("--dtype", None, "Convert floating-point tensors.", ExportDtype),
    beside=_option("--with", "FILE", "Copy this file into PATH, too; may be repeated.", list[Path]),
    tier=_TIER,
    force=_FORCE,
)
_command(
    "import",
    "Save what another program wrote as a step. It becomes one of the run, on all of its stored tiers. No code from "
    "PATH is run.",
    path=_argument("PATH", "A file of torch.save, Lightning or safetensors, or a folder.", Path),
    as_step=_option("--as-step", "N", "The step to save it as.", int, default=...),
    entry=_option("--entry", "NAME", "What a bare state_dict is in the state."),
)
