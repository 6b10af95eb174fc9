"""``plan``: what checkpointing costs a training, before there is one. This module imports no torch, unless a YAML file
is read or written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tierfall.cli.output import CommandOutput, Part, counted, listed, table
from tierfall.cli.usage import Exit, refuse
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.text import members
from tierfall.core.types.units import format_duration, format_rate, format_share, format_size
from tierfall.core.types.values import CaptureMode, LossClass
from tierfall.plan.answers import SAVE_S, SLOWDOWN, Plan
from tierfall.plan.cluster import (
    GIVEN,
    LLAMA_GPUS,
    LLAMA_MTBF_S,
    OF_HARDWARE,
    Cluster,
    PlanTier,
    make_tiers,
    presets,
)
from tierfall.plan.layout import (
    Layout,
    Optimizer,
    RankBytes,
    make_layout,
    rank_bytes,
    terms_of,
)
from tierfall.plan.measured import Measured, read_events
from tierfall.plan.models import Model, find_model
from tierfall.plan.simulate import (
    WEEK_S,
    Training,
    exponential,
    read_trace,
)

if TYPE_CHECKING:
    from tierfall.config import Config

T = TypeVar("T")
IMAGES_SHOWN = 6
RESTART_S, FLOPS = 300.0, 400e12


@dataclass(slots=True)
class Asked:
    """The options of the command by name, None if not given; what a run has measured; a YAML file; and
    what was assumed: what nobody gave, its value, and where that is from."""

    options: dict[str, Any]
    run: Measured | None = None
    config: Config | None = None
    assumed: list[dict[str, str]] = field(default_factory=list)

    def take(
        self, what: str, given: T | None, default: T, shown: Callable[[T], str], source: str
    ) -> T:
        """Return what is given. Else return the default, and list it as assumed."""
        if given is not None:
            return given
        self.assumed.append({"what": what, "value": shown(default), "source": source})
        return default


def plan(answer: CommandOutput, **options: Any) -> None:
    """Answer for the options, and do what they ask beside."""
    given = options.get
    if given("trace") and not given("failures"):
        refuse("--trace: expected --failures N, the weeks to simulate, beside it", Exit.USAGE)
    if given("every") and given("overhead"):
        refuse("--every and --overhead exclude each other", Exit.USAGE)
    asked = Asked(options)
    path = given("config")
    if folder := given("from_run"):
        asked.run, beside = read_events(folder), folder / "tiers.yaml"
        path = path or (str(beside) if beside.exists() else None)
    if path is not None:
        from tierfall.config import load_config

        asked.config = load_config(path)
    made = make_plan(asked)
    answer.document = to_document(made, asked)
    answer.show(*_shown(made, asked, answer.document))
    answer.problems += made.faults()
    if asked.run is not None:
        answer.document["changes"] = changes = [*asked.run.changes(made)]
        answer.show("", f"by run {asked.run.name}:", *changes)
    if weeks := given("failures"):
        trace, rates, total_s = given("trace"), made.cluster.failures_per_s, weeks * WEEK_S
        failures = read_trace(trace) if trace else exponential(rates, total_s)
        out = Training(
            sources=made.sources,
            every_s=made.every_s,
            cost_s=made.blocking_s,
            restart_s=made.cluster.restart_s,
            total_s=total_s,
        )
        out.live(failures)
        names = ("total_s", "goodput", "lost_s", "failures", "restores")
        answer.document["simulation"] = members(out, *names)
        answer.show("", *_shown_outcome(out, made))
    if path := given("write"):
        from tierfall.cli.plan_file import write_plan

        answer.show("", write_plan(made, path, asked.assumed))
    if path := given("plot"):
        answer.show("", _plot(made, path))


def _plot(made: Plan, path: Path) -> str:
    try:
        from tierfall.plan.picture import draw

        draw(made).savefig(path)
    except (ImportError, OSError, ValueError) as error:
        help = "pip install 'tierfall[plot]' installs matplotlib, which draws"
        raise ConfigError(f"--plot: {path} cannot be drawn: {error}; {help}") from error
    return f"drew {path}"


# From options to a plan ------------------------------------------------------------------------------


def make_plan(asked: Asked) -> Plan:
    """Put a plan together, with defaults for what is not given. Raises ConfigError."""
    options, run, config = asked.options, asked.run, asked.config
    if options["model"] is None and run is None:
        raise ConfigError(
            "expected a MODEL: a preset such as llama3-8b, the path of a config.json, or a number of parameters such "
            "as 7B; or --from-run DIR"
        )
    model = Model(name="") if options["model"] is None else find_model(options["model"])
    layout = _layout(asked, model)
    terms = terms_of(options["precision"], options["optimizer"])
    as_mlperf = options["optimizer"] is Optimizer.MLPERF
    sizes = rank_bytes(model, layout, terms, as_mlperf=as_mlperf)
    if run is not None and not model.name:
        images = [run.image_bytes] * layout.ranks
        sizes = RankBytes(written=images, held=images)
    of_file, images_wanted, mtbf = dict[str, PlanTier](), None, options["mtbf"] or {}
    if config is not None:
        from tierfall.cli.plan_file import images_of, mtbf_of, tiers_of

        mtbf, images_wanted = mtbf or mtbf_of(config), images_of(config, max(sizes.written))
    cluster = _cluster(asked, layout.ranks, mtbf or (run and run.mtbf) or {})
    known = presets(layout.ranks, cluster.link_bytes_per_s)
    if config is not None:
        of_file = tiers_of(config, known, cluster)
    tiers = make_tiers(options["tier"] or [], known, of_file, cluster.nodes)
    if run is not None:
        tiers = tuple(run.rate_of(tier, sizes, cluster) for tier in tiers)
    for tier in tiers:
        if tier.source != GIVEN:
            asked.take(f"tier {tier.name}", None, tier, _told_rates, tier.source)
    of_save = f"{format_duration(SAVE_S)}, and {SLOWDOWN:.0%} of the time of its copies"
    measured = of_save if run else None
    asked.take("a save costs", measured, of_save, str, "tierfall's own benchmarks")
    tokens = 16_000_000 if model.parameters > 10**11 else 4_000_000
    step_s = asked.take(
        "step",
        options["step_time"] or (run.step_s if run else None),
        6 * max(1, model.active) * tokens / (layout.ranks * FLOPS),
        format_duration,
        f"6 x parameters x {tokens // 10**6}M tokens (Kaplan 2020), at 400 TFLOP/s a GPU (Llama 3 405B)",
    )
    every, overhead = options["every"], options["overhead"]
    if config is not None and every is None and overhead is None:
        every, overhead = config.interval.every, config.interval.budget
    return Plan(
        model=model,
        terms=terms,
        layout=layout,
        sizes=sizes,
        cluster=cluster,
        tiers=tiers,
        step_s=step_s,
        images_wanted=images_wanted,
        every_given_s=every * step_s if isinstance(every, int) else every,
        overhead=overhead,
        blocked_s=run.blocked_s if run else None,
        lazy=config is None or config.capture.mode is CaptureMode.LAZY,
    )


def _layout(asked: Asked, model: Model) -> Layout:
    options, gpus = asked.options, asked.options["gpus"] or (asked.run and asked.run.ranks)
    degrees = {name: options[name] or 1 for name in ("tp", "pp", "cp", "ep")}
    dp, inner = options["dp"], degrees["tp"] * degrees["pp"] * degrees["cp"]
    gpus = gpus or (dp and inner * dp)
    gpus = asked.take("GPUs", gpus, max(8, inner), str, "one node, or one replica")
    return make_layout(model, gpus, {**degrees, "dp": dp}, options["shard"])


def _cluster(asked: Asked, gpus: int, mtbf: Mapping[LossClass, float]) -> Cluster:
    options, take, dgx = asked.options, asked.take, "DGX H100"
    llama = "419 interruptions in 54 days on 16,384 GPUs (Llama 3 405B, Meta 2024)"
    default_s = LLAMA_MTBF_S * LLAMA_GPUS / gpus
    process_s = take("failure", mtbf.get(LossClass.PROCESS), default_s, _told_every, llama)
    share = f"{OF_HARDWARE:.0%} of failures are by hardware (Llama 3 405B)"
    node_s = min(process_s / OF_HARDWARE, mtbf.get(LossClass.SITE, math.inf))
    node_s = take("loss of a node", mtbf.get(LossClass.NODE), node_s, _told_every, share)
    if LossClass.SITE not in mtbf:
        take("loss of the site", None, "never", str, "nothing is published")
    polaris = "page-locked memory at Polaris (DataStates-LLM, HPDC'24)"
    port, meta = "one port of 400 Gbit/s (ConnectX-7)", "u0 of Meta (HPCA'25)"
    per_node, host = options["gpus_per_node"], options["host_memory"]
    return Cluster(
        gpus=gpus,
        gpus_per_node=take("GPUs of a node", per_node, min(gpus, 8), str, f"8 at most: {dgx}"),
        host_bytes=take("memory of a node", host, 2 * 10**12, format_size, dgx),
        copy_bytes_per_s=take("copy from a GPU", options["copy_rate"], 25e9, format_rate, polaris),
        link_bytes_per_s=take("link of a node", options["link"], 50e9, format_rate, port),
        restart_s=take("restart", options["restart"], RESTART_S, format_duration, meta),
        mtbf_s={**mtbf, LossClass.PROCESS: process_s, LossClass.NODE: node_s},
    )


def _told_every(seconds: float) -> str:
    return f"every {format_duration(seconds)}"


def _told_rates(tier: PlanTier) -> str:
    write, read = format_rate(tier.write_bytes_per_s), format_rate(tier.read_bytes_per_s)
    return f"write {write}, read {read}, {'all nodes' if tier.shared else 'each node'}"


# What is printed -------------------------------------------------------------------------------------


def to_document(made: Plan, asked: Asked) -> dict[str, Any]:
    """Return the answers as JSON members."""
    return {
        "model": made.model.name or None,
        "parameters": made.model.parameters or None,
        "bytes_per_parameter": [members(term) for term in made.terms],
        "checkpoint_bytes": made.checkpoint_bytes,
        "layout": members(made.layout, "tp", "pp", "cp", "dp", "ep", "sharding"),
        "bytes_by_rank": [{"bytes": size, "ranks": n} for size, n in made.sizes.counts],
        "writers": made.sizes.parts,
        "node_bytes": made.node_bytes,
        "host_memory_bytes": made.host_bytes,
        "step_s": made.step_s,
        "every_s": made.every_s,
        "blocking_s": made.blocking_s,
        "intervals": {
            each["name"]: each["every_s"]
            for each in made.cadences
            if each["name"] in ("young", "daly", "checkfreq", "pccheck")
        },
        "cadences": made.cadences,
        "ettr": made.ettr_at(made.every_s),
        "lost": made.shares_at(made.every_s),
        "tiers": made.tier_answers,
        "restore_s": made.restore_s,
        "survives": {
            str(lost): left
            and {
                "tier": left.name,
                "durable_s": left.durable_s,
                "saves": left.saves,
                "again_s": left.durable_s + made.every_s * left.saves / 2,
                "restore_s": left.restore_after(lost),
            }
            for lost, left in made.recoveries.items()
        },
        "peer_recovery_probability": [
            {"lost_nodes": lost, "probability": chance} for lost, chance in made.peer_chances
        ],
        "bottlenecks": [*made.bottlenecks()],
        "assumed": asked.assumed,
    }


TABLES: Mapping[str, Mapping[str, str]] = {
    "bytes_per_parameter": {"OF A PARAMETER": "what", "SIZE": "bytes", "WHY": "reason"},
    "writers": {"WRITTEN": "part", "RANKS": "ranks", "EACH AT MOST": "bytes_max"}
    | {"TOGETHER": "bytes", "WHY": "why"},
    "cadences": {"INTERVAL": "name", "EVERY": "every_s", "ETTR": "ettr", "WHY": "why"},
    "tiers": {"TIER": "name", "EVERY": "every_s", "COPY": "copy_s", "DURABLE": "durable_s"}
    | {"NEEDED": "required_bytes_per_s", "AVAILABLE": "available_bytes_per_s"}
    | {"HOLDS": "capacity_bytes", "RESTORE": "restore_s", "LIMITED BY": "limited_by"},
    "losses": {"LOSS OF": "lost", "COMES EVERY": "comes_every_s", "LEFT ON": "tier"}
    | {"WORK AGAIN": "again_s", "RESTORE": "restore_s"},
    "assumed": {"ASSUMED": "what", "VALUE": "value", "SOURCE": "source"},
}
"""Lists of the document as tables: columns, and the member in each."""


def _shown(made: Plan, asked: Asked, document: Mapping[str, Any]) -> Iterator[Part]:
    count, total, every_s = made.model.parameters, made.checkpoint_bytes, made.every_s
    sized = f"a checkpoint of {format_size(total)} ({total / 1e12:.4g} TB"
    if count:
        yield f"{made.model.name}, {count:,} parameters: {sized}, {total / count:.3g} bytes of each)"
    else:
        yield f"run {asked.run and asked.run.name}: {sized})"
    nodes = counted(made.cluster.nodes, "node", "nodes")
    yield f"{counted(made.cluster.gpus, 'GPU', 'GPUs')} in {nodes}: {made.layout}"
    if count:
        yield from (
            "",
            listed(TABLES["bytes_per_parameter"], document["bytes_per_parameter"]),
            "",
            listed(TABLES["writers"], document["writers"]),
        )
    images = [f"{n:,} of {format_size(size)}" for size, n in made.sizes.counts]
    more = f" and {len(images) - IMAGES_SHOWN} other sizes" if len(images) > IMAGES_SHOWN else ""
    others = f" and {format_size(made.kept_for_peers)} of other nodes" if made.peers else ""
    kept = f"{counted(made.images, 'image', 'images')} of each rank{others}"
    held_s, cost_s = made.held_s(every_s), made.blocking_s
    every = f"{format_duration(every_s)} ({made.steps:,} x {format_duration(made.step_s)})"
    times = {name: format_duration(seconds) for name, seconds in made.restore_s.items()}
    alone = f"; after the loss of one node: {times['hierarchical']}"
    alone = alone if made.recoveries[LossClass.NODE] else ""
    yield from (
        f"images: {', '.join(images[:IMAGES_SHOWN])}{more}; a node writes {format_size(made.node_bytes)} at most",
        f"memory of a node: {kept}: {format_size(made.host_bytes)}",
        "",
        f"a save every {every} lengthens training by {format_duration(cost_s)}:",
        f"it is held for {format_duration(held_s)}, and steps beside copies take {format_duration(cost_s - held_s)} "
        "longer",
        listed(TABLES["cadences"], document["cadences"]),
        "",
        listed(TABLES["tiers"], document["tiers"]),
        f"a restore from {made.tiers[-1].name}: {times['per_rank']} if each rank reads all that it holds, "
        f"{times['read_once']} if each byte is read once{alone}",
        "",
    )
    nothing = {"tier": "nothing", "again_s": None, "restore_s": None}
    losses = [
        {
            "lost": lost,
            "comes_every_s": made.cluster.mtbf_s.get(LossClass(lost)),
            **(left or nothing),
        }
        for lost, left in document["survives"].items()
    ]
    yield listed(TABLES["losses"], losses)
    if made.peer_chances:
        told = ", ".join(f"{lost} {chance:.3%}" for lost, chance in made.peer_chances)
        yield f"after the loss of so many nodes at once, memory has every image with this chance: {told}"
    yield from ("", "bottlenecks:", *(f"  {text}" for text in document["bottlenecks"]))
    if asked.assumed:
        yield from ("", listed(TABLES["assumed"], document["assumed"]))


def _shown_outcome(out: Training, made: Plan) -> Iterator[Part]:
    formula = made.ettr_at(made.every_s)
    failures = ", ".join(f"{count:,} of a {lost}" for lost, count in out.failures.items())
    restores = ", ".join(f"{count:,} from {name}" for name, count in out.restores.items())
    told = format_duration(out.total_s)
    yield f"simulated {told}: goodput {out.goodput:.2%}, by the formula {formula:.2%}"
    yield f"failures: {failures or 'none'}; restores: {restores or 'none'}"
    rows = [
        (what, format_duration(s), format_share(s / out.total_s)) for what, s in out.lost_s.items()
    ]
    yield table(("LOST TIME", "TIME", "SHARE"), rows, ("TIME", "SHARE"))
