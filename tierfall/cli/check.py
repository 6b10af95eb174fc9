"""``check``: validate the configuration, measure every tier, list its guarantees, and forecast its steady state.

The forecast needs the size of an image and the interval between saves: from the options, or from the run's newest
checkpoints.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rich.console import Console

from tierfall.cli.common import (
    RunFacts,
    describe_new,
    load_settings_of_all,
)
from tierfall.cli.output import (
    CommandOutput,
    Part,
    counted,
    listed,
    with_tier,
)
from tierfall.cli.usage import Exit, refuse
from tierfall.config import Config, PeerTierConfig
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.format.records import Commit
from tierfall.core.ranks.addresses import addresses_of_node, own_address
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.text import members, to_json
from tierfall.core.types.units import (
    format_count,
    format_duration,
    format_size,
)
from tierfall.core.types.values import Codec, TierKind
from tierfall.ops.commands import notes_on_metrics
from tierfall.ops.measure import SIZE_MAX_BYTES, TierMeasurement, measure
from tierfall.plan.steady import Chain, SteadyTier, Workload, steady_state
from tierfall.policies.forecast import loss_bounds
from tierfall.setup.places import seen_by_one
from tierfall.setup.tiers import is_shared, tier_rules
from tierfall.telemetry.reports import format_bounds


def check(
    answer: CommandOutput,
    size: int,
    image: int | None,
    save_every: float | None,
    step_time: float | None,
    steps_per_hour: float | None,
    ranks: int | None,
    nodes: int | None,
) -> None:
    """Check the configuration, measure every tier, and forecast its steady state."""
    if step_time is not None and steps_per_hour is not None:
        refuse("--step-time and --steps-per-hour exclude each other", Exit.USAGE)
    if ranks is not None and (nodes or 1) > ranks:
        refuse(f"--nodes: {nodes} nodes are more than {ranks} ranks", Exit.USAGE)
    inputs = Training(
        image_bytes=image,
        save_every_s=save_every,
        step_s=3600 / steps_per_hour if steps_per_hour else step_time,
        ranks=ranks,
        nodes=nodes,
    )
    of_all = load_settings_of_all(answer.asked, doing="check")
    settings = seen_by_one(of_all)
    if size > SIZE_MAX_BYTES:
        refuse(f"--size: expected {format_size(SIZE_MAX_BYTES)} at most", Exit.USAGE)
    facts = RunFacts.read(settings)
    shown = not answer.as_json and sys.stdout.isatty()
    console = Console(quiet=not shown, force_terminal=shown)
    with console.status("check", spinner="line") as status:
        tiers = measure(settings, size, lambda name: status.update(f"check: {name}"))
    answer.document = {
        "run": settings.run,
        "size_bytes": size,
        "tiers": [members(tier) for tier in tiers],
    }
    _show(answer, tiers, size)
    _report_address(answer, of_all)
    _report_steady_state(answer, of_all, tiers, inputs, facts)
    _report_loss_bounds(answer, facts, tiers)


def _report_address(answer: CommandOutput, of_all: Config) -> None:
    """Report at which address of this node other nodes' images arrive."""
    if (tier := of_all.peers) is None:
        return
    try:
        address = own_address(tier.interface)
    except ConfigError as error:
        answer.problem(with_tier(tier.name, error))
        return
    known = addresses_of_node()
    interface = next((each.interface for each in known if str(each.address) == address), "")
    answer.document["peer_address"] = {"interface": interface, "address": address}
    answer.show(f"{tier.name}: other nodes send their images to {address} ({interface})")


def _report_loss_bounds(
    answer: CommandOutput, facts: RunFacts, tiers: Sequence[TierMeasurement]
) -> None:
    """Report what survives each loss, how long reading it takes at the measured rates, and which metrics of ``retain``
    no checkpoint has."""
    rates = {t.name: t.read_bytes_per_second for t in tiers if t.read_bytes_per_second is not None}
    bounds = loss_bounds(replace(facts.safety, read_bytes_per_s=rates))
    saved = any(bound.survives for bound in bounds.values())
    answer.document["loss_bound"] = to_json(bounds) if saved else None
    if saved:
        answer.show("", *format_bounds(bounds, tuple(facts.unread)))
    answer.document["notes"] = notes = notes_on_metrics(facts.config, facts.listings)
    answer.show(*notes)


def _show(answer: CommandOutput, tiers: tuple[TierMeasurement, ...], size_bytes: int) -> None:
    columns = {"TIER": "name", "KIND": "kind", "WRITE": "write_bytes_per_second"}
    columns |= {"READ": "read_bytes_per_second", "ROUND TRIP": "round_trip_s"}
    columns |= {"FREE": "free_bytes", "CAPACITY": "capacity_bytes", "PLACE": "place"}
    answer.show(listed(columns, answer.document["tiers"]))
    for tier in tiers:
        if tier.durable is not None:
            answer.show(f"{tier.name}: {', '.join(_guarantees(tier))}")
        if tier.kind is TierKind.PEER:
            answer.show(f"{tier.name}: one node alone cannot measure it")
        elif tier.read_only:
            answer.show(
                f"{tier.name}: read-only: it is restored from, and nothing is flushed to it"
            )
        if tier.not_created:
            answer.show(describe_new(tier.name, tier.place))
        if tier.error is not None:
            answer.problem(with_tier(tier.name, tier.error))
    good = sum(tier.error is None and not tier.not_created for tier in tiers)
    answered = f"{good} of {counted(len(tiers), 'tier', 'tiers')} answered"
    answer.show(f"{answered}; each rate was measured with {format_size(size_bytes)}")


def _guarantees(tier: TierMeasurement) -> list[str]:
    durable = "durable" if tier.durable else "NOT durable: a power cut may lose what was written"
    fenced = (
        "fenced"
        if tier.fenced
        else "NOT fenced: an older start that is still alive may commit there"
    )
    direct = "direct I/O" if tier.direct_io else "no direct I/O"
    if not tier.direct_io and tier.kind != "object":
        direct += ", so reads may come from the page cache"
    return [durable, fenced, direct]


# The forecast --------------------------------------------------------------------------------------


LATEST = 50
"""The time of a step is taken from so many of a run's newest checkpoints."""
NO_FORECAST = (
    "no forecast: it needs the size of one rank's image (--image 9GiB) and the time between saves "
    "(--save-every 10m, or --step-time 2s with interval.every); of a run that has saved twice both are known"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Sizes and times of a training, by the options or by the run's own checkpoints; None: not known."""

    image_bytes: int | None = None
    save_every_s: float | None = None
    step_s: float | None = None
    ranks: int | None = None
    nodes: int | None = None


def measure_run(known: Sequence[KnownCheckpoint]) -> Training:
    """Take sizes and times from the newest checkpoints of the live lineage that the newest attempt saved."""
    commits = [c.commit for c in known if c.commit is not None and not c.abandoned]
    if not commits:
        return Training()
    newest = commits[-1]
    attempt = newest.lineage.checkpoint.attempt
    line = [c for c in commits if c.lineage.checkpoint.attempt == attempt][-LATEST:]
    spans = [(b.wall_time_s - a.wall_time_s, b, a) for a, b in pairwise(line)]
    steps = [
        span / (b.lineage.checkpoint.step - a.lineage.checkpoint.step)
        for span, b, a in spans
        if span > 0
    ]
    saves = [
        span / (b.lineage.ordinal - a.lineage.ordinal)
        for span, b, a in spans
        if span > 0 and b.lineage.ordinal > a.lineage.ordinal
    ]
    return Training(
        image_bytes=max(_one_rank(c) for c in line),
        step_s=statistics.median(steps) if steps else None,
        save_every_s=statistics.median(saves) if saves else None,
        ranks=newest.world_size,
        nodes=len(set(newest.nodes)) or 1,
    )


def _one_rank(commit: Commit) -> int:
    """The size of one image: a record of one node names its own ranks' alone."""
    images = sum(file.digest is None for file in commit.files)
    return -(-commit.image_bytes // max(1, images))


def workload(settings: Config, inputs: Training, run: Training) -> Workload | None:
    """Put together what is known; None where size or interval are not."""
    image = inputs.image_bytes or run.image_bytes
    interval = settings.interval
    steps = interval.every_steps
    step_s = inputs.step_s or run.step_s
    by_rule = steps * step_s if steps and step_s else interval.every_s
    save_every_s = inputs.save_every_s or by_rule or run.save_every_s
    if image is None or save_every_s is None:
        return None
    ranks = inputs.ranks or (run.ranks if inputs.image_bytes is None else None) or inputs.nodes or 1
    nodes = inputs.nodes or (run.nodes if ranks == run.ranks else None) or 1
    return Workload(
        image_bytes=image,
        save_every_s=save_every_s,
        step_s=step_s or (save_every_s / steps if steps else None),
        ranks=ranks,
        nodes=min(nodes, ranks),
    )


def _report_steady_state(
    answer: CommandOutput,
    settings: Config,
    tiers: Sequence[TierMeasurement],
    inputs: Training,
    facts: RunFacts,
) -> None:
    """Report the forecast, or the options that it needs. ``settings`` are those of all nodes."""
    load = workload(settings, inputs, Training())
    source = "by the options"
    if load is None:
        source = (
            "by the run's own checkpoints" if inputs == Training() else "by the options and the run"
        )
        load = workload(settings, inputs, measure_run(facts.known))
    if load is None:
        answer.document["forecast"] = None
        answer.show("", NO_FORECAST)
        return
    peers = settings.peers
    if peers is not None and load.nodes <= peers.copies:
        settings = settings.without(peers.name)
    rates = _rates(settings, tiers)
    chain = Chain(
        rules=tier_rules(settings),
        rates=rates,
        shared=frozenset(tier.name for tier in settings.stored if is_shared(tier)),
        room={
            tier.name: tier.free_bytes + tier.run_bytes
            for tier in tiers
            if tier.free_bytes is not None and tier.run_bytes is not None
        },
        host_bytes=settings.host.capacity_bytes,
    )
    made = steady_state(chain, load)
    of_load = members(load, "image_bytes", "save_every_s", "ranks", "nodes")
    answer.document["forecast"] = {**of_load, "tiers": [members(tier) for tier in made]}
    answer.show("", *_shown(made, load, source))
    if peers is not None:
        _report_peers(answer, peers, load, made)
    packed = [t.name for t in settings.stored if t.compress.codec is not Codec.NONE]
    if packed:
        answer.show(f"{', '.join(packed)}: the forecast counts packed copies with their raw size")


def _report_peers(
    answer: CommandOutput, tier: PeerTierConfig, load: Workload, made: Sequence[SteadyTier]
) -> None:
    """Report what a node sends to others for each checkpoint, and how much of its memory it keeps for them."""
    nodes = counted(load.nodes, "node", "nodes")
    found = next((each for each in made if each.name == tier.name), None)
    if found is None:
        few = f"{nodes} and copies: {tier.copies}" if tier.copies > 1 else nodes
        answer.show(f"{tier.name}: left out, with {few}; --nodes has how many train")
        return
    sent = found.copy_bytes * tier.copies
    kept = None if found.bytes_max is None else found.bytes_max * tier.copies
    of_node = {"sent_bytes": sent, "kept_bytes_max": kept}
    answer.document["forecast"]["peer_memory"] = {"tier": tier.name, **of_node}
    most = "checkpoints without a bound" if kept is None else f"{format_size(kept)} at most"
    answer.show(
        f"{tier.name}: each of {nodes} sends {format_size(sent)} of a checkpoint to "
        f"{counted(tier.copies, 'other', 'others')} and receives as much, and keeps {most} in its memory"
    )


def _rates(settings: Config, tiers: Sequence[TierMeasurement]) -> dict[str, float]:
    """Return the write rates: as measured, and at most what ``bandwidth`` allows, which a short measurement may
    exceed."""
    measured = {tier.name: tier.write_bytes_per_second or 0.0 for tier in tiers}
    found: dict[str, float] = {}
    for tier in settings.stored:
        share = tier.bandwidth_share or 1.0
        possible = measured.get(tier.name, 0.0) * share
        if known := [rate for rate in (possible, tier.bandwidth_bytes_per_s) if rate]:
            found[tier.name] = min(known)
    return found


def _kept(tier: SteadyTier) -> str:
    grows = f"+{format_count(tier.grows_per_day)}/day" if tier.grows_per_day else ""
    return f"{tier.kept or ''} {grows}".strip() or "0"


def _shown(made: Sequence[SteadyTier], load: Workload, source: str) -> list[Part]:
    of = (
        ""
        if load.ranks == 1
        else f" on each of {load.ranks} ranks, {counted(load.nodes, 'node', 'nodes')}"
    )
    head = f"with a save every {format_duration(load.save_every_s)} of {format_size(load.image_bytes)}{of} ({source}):"
    columns = {"TIER": "name", "COPY": "copy_bytes", "EVERY": "every_s", "TAKES": "copy_s"}
    columns |= {"BUSY": "busy", "KEPT": "kept", "AT MOST": "bytes_max", "FULL AFTER": "full_s"}
    rows = [members(tier) | {"kept": _kept(tier)} for tier in made]
    shown = listed(columns | {"LOSES AT MOST": "lost_s"}, rows)
    return [head, shown, *(f"{tier.name}: {reason}" for tier in made for reason in tier.reasons)]
