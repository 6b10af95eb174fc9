"""The YAML file of a plan: what one that exists says, and a commented one that a plan writes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from tierfall.cli.init import TEMPLATE, exact_size, write_tier
from tierfall.cli.output import cell
from tierfall.config import Config, PeerTierConfig, load_config
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.units import format_duration, format_size
from tierfall.core.types.values import LOSS_CLASSES, LossClass, TierKind
from tierfall.plan.answers import Plan
from tierfall.plan.cluster import Cluster, PlanTier
from tierfall.setup.tiers import is_shared, tier_rules


def mtbf_of(config: Config) -> dict[LossClass, float]:
    """Return how often the training fails by a YAML file; what is absent is left out, ``process`` is as ``node``."""
    given = config.interval.mtbf
    times = {lost: s for lost in LOSS_CLASSES if given and (s := getattr(given, f"{lost}_s"))}
    return {LossClass.PROCESS: min(times.values()), **times} if times else {}


def images_of(config: Config, image_bytes: int) -> int | None:
    """Return how many images memory has room for, if the file says so. Raises ConfigError if it is none."""
    capacity = config.host.capacity_bytes
    if capacity is not None and capacity < image_bytes:
        raise ConfigError(
            f"the host tier of the file has a capacity of {format_size(capacity)}, too small for one image of "
            f"{format_size(image_bytes)}; the nearest that works: capacity: {exact_size(image_bytes)}"
        )
    return None if capacity is None else capacity // image_bytes


def tiers_of(
    config: Config, known: Mapping[str, PlanTier], cluster: Cluster
) -> dict[str, PlanTier]:
    """Return the tiers that are written to, with rates by their kind, or by their bandwidth if that is less. Raises
    ConfigError if there are none."""
    rules, found = {each.name: each for each in tier_rules(config)}, {}
    for tier in config.written:
        shared, is_peer = is_shared(tier), isinstance(tier, PeerTierConfig)
        base = known["peers" if is_peer else "store" if shared else "nvme"]
        copies = config.peer_copies.get(tier.name, 1)
        made = replace(base, rules=rules[tier.name], shared=shared, copies=copies)
        ranks = cluster.gpus if shared else cluster.ranks_per_node
        limit = (tier.bandwidth_bytes_per_s or math.inf) * ranks * copies
        limit = min(limit, made.write_bytes_per_s * (tier.bandwidth_share or 1))
        if limit < made.write_bytes_per_s:
            made = replace(made, write_bytes_per_s=limit, source="its bandwidth in the file")
        found[tier.name] = made
    if not found:
        raise ConfigError("the file has no tier below host memory that is written to; add one")
    return found


def write_plan(plan: Plan, path: Path, assumed: Iterable[Mapping[str, str]]) -> str:
    """Write a commented file with the chain of a plan; return what to tell. Raises ConfigError."""
    if path.exists():
        raise ConfigError(f"--write: {path} exists; name another file, or remove it")
    room = exact_size(plan.images * plan.image_bytes * 11 // 10)
    notes = [f"Planned for {plan.model.name}, {plan.layout}, on {plan.cluster.nodes} nodes."]
    notes += [f"Assumed: {each['what']}: {each['value']} ({each['source']})" for each in assumed]
    text = TEMPLATE.format(
        notes="".join(f"# {note}\n" for note in notes),
        run=json.dumps(plan.model.name or "run"),
        every=plan.steps,
        unit=f"training steps of {format_duration(plan.step_s)}: ETTR {plan.ettr_at(plan.every_s):.2%}",
        size=f"{plan.images} images of {format_size(plan.image_bytes)} for each rank, and a tenth more.",
        capacity=f", capacity: {room}",
        tiers="\n".join(_section(plan, tier) for tier in plan.tiers),
    )
    load_config(yaml.safe_load(text))  # raises before anything is written
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"--write: {path} cannot be written: {error.strerror}") from error
    return f"wrote {path}; put your own places into it, then: tierfall check --config {path}"


def _section(plan: Plan, tier: PlanTier) -> str:
    at = plan.tiers.index(tier) + 1  # after host memory
    answer, kept = plan.tier_answers[at], max(1, plan.steady[at].kept)
    size, copy_s = cell(answer["capacity_bytes"], format_size), format_duration(answer["copy_s"])
    keys = {
        TierKind.PEER: [f"copies: {tier.copies}"],
        TierKind.FILE: [f"path: /{tier.name}/checkpoints", f"shared: {str(tier.shared).lower()}"],
        TierKind.OBJECT: ["url: s3://bucket/checkpoints"],
    }[tier.kind]
    keys.append(f"flush: {{every: {tier.rules.flush_every}}}  # a copy takes {copy_s}")
    if tier.kind is not TierKind.PEER:
        keys.append(f"retain: {{last: {kept}}}  # with the one that arrives {size}")
    survives = f"Survives the loss of a {tier.rules.survives}."
    return write_tier(survives, f"name: {tier.name}", f"kind: {tier.kind}", *keys)
