"""The cluster that a plan is for: nodes, memory, links, failures, tiers with their rates. Sizes are in bytes, rates in
bytes per second, times in seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tierfall.core.types.errors import ConfigError
from tierfall.core.types.policy import PolicyKind, Rule
from tierfall.core.types.text import hint_at
from tierfall.core.types.units import (
    format_period,
    parse_duration,
    parse_positive_rate,
    parse_size_with_unit,
)
from tierfall.core.types.values import LOSS_CLASSES, LossClass, TierKind, survives
from tierfall.core.types.view import TierRules
from tierfall.policies.registry import find
from tierfall.policies.retention import DAY_S

LLAMA_MTBF_S, LLAMA_GPUS, OF_HARDWARE = 54 * DAY_S / 419, 16_384, 0.78
"""Llama 3 405B (Meta 2024): 419 unexpected interruptions in 54 days; the share of them that hardware caused."""
TECTONIC_BYTES_PER_S = 2e12
KEPT = 3
GIVEN = "as given"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTier:
    """A tier, by the rules that the policies know. ``shared``: all nodes see it, and the rates are of all nodes
    together; else of one node. ``copies``: how many other nodes keep an image (peer memory). ``source`` is where the
    rates are from."""

    rules: TierRules
    shared: bool
    write_bytes_per_s: float
    read_bytes_per_s: float
    copies: int = 1
    source: str = GIVEN

    @property
    def name(self) -> str:
        return self.rules.name

    @property
    def kind(self) -> TierKind:
        return self.rules.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """``copy_bytes_per_s``: from one GPU to host memory; ``link_bytes_per_s``: what a node sends, or receives;
    ``mtbf_s``: the mean time between failures of the job, of at least that loss class; ``restart_s``: until a new start
    begins to restore."""

    gpus: int
    gpus_per_node: int
    host_bytes: int
    copy_bytes_per_s: float
    link_bytes_per_s: float
    restart_s: float
    mtbf_s: Mapping[LossClass, float] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def ranks_per_node(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    @property
    def failures_per_s(self) -> dict[LossClass, float]:
        """The rate of failures of exactly each class: those of a class, without the more severe ones."""
        rates = [1 / self.mtbf_s[lost] if lost in self.mtbf_s else 0.0 for lost in LOSS_CLASSES]
        severer = (*rates[1:], 0.0)
        pairs = zip(LOSS_CLASSES, rates, severer, strict=True)
        return {lost: max(0.0, rate - more) for lost, rate, more in pairs}


def parse_mtbf(text: str) -> dict[LossClass, float]:
    """Parse ``4h``, or ``process=4h,node=12h,site=90d``; ``process`` is as ``node`` if it is missing. Raises
    ConfigError if a class is named twice, a time is 0, or a class that includes another one is more frequent."""
    found: dict[LossClass, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        name, value = (name, value) if equals else ("process", name)
        if name not in LOSS_CLASSES:
            raise ConfigError(
                f"{name!r} is no loss class; expected 4h, or process=4h,node=12h,site=90d"
                f"{hint_at(name, LOSS_CLASSES)}"
            )
        if name in found:
            raise ConfigError(
                f"{text}: {name} is named twice; expected one time for each loss class"
            )
        found[LossClass(name)] = parse_duration(value)
    times = [found[lost] for lost in LOSS_CLASSES if lost in found]
    if not min(times) > 0 or times != sorted(times):
        told = ", ".join(f"{lost} every {format_period(s)}" for lost, s in found.items())
        raise ConfigError(
            f"{told}: impossible: a more severe loss includes a less severe one, and cannot come more often; expected "
            "process at most node, node at most site, and each above 0"
        )
    return {LossClass.PROCESS: times[0], **found}


# Tiers -----------------------------------------------------------------------------------------------


def keep_last(count: int) -> tuple[Rule, ...]:
    """Return the rule that keeps the newest so many."""
    policy = find(PolicyKind.RETAIN, "last")
    assert policy is not None
    return (Rule(policy=policy, rules=count),)


def presets(gpus: int, link_bytes_per_s: float) -> dict[str, PlanTier]:
    """Return the tiers that are known by name, for a cluster of that size."""
    store, link = TECTONIC_BYTES_PER_S * gpus / LLAMA_GPUS, link_bytes_per_s
    meta = "Tectonic at Llama 3 405B: 2 TB/s sustained for 16,384 GPUs, taken in proportion"
    polaris, gemini = "Polaris (DataStates-LLM, HPDC'24)", "20 Gbit/s in all (Gemini, SOSP'23)"
    file, object = TierKind.FILE, TierKind.OBJECT
    rows = (
        ("peers", TierKind.PEER, False, link, link, "the link of a node"),
        ("nvme", file, False, 5e9, 10e9, "4 drives of PCIe Gen4"),
        ("nvme-gen5", file, False, 26e9, 48e9, "8 drives of PCIe Gen5"),
        ("lustre", file, True, 650e9, 650e9, polaris),
        ("store", object, True, store, store, meta),
        ("s3", object, True, 2.5e9, 2.5e9, gemini),
    )
    found = {}
    for name, kind, shared, write, read, source in rows:
        kept = keep_last(1 if kind is TierKind.PEER else KEPT)
        survived = survives(kind, shared=shared)
        rules = TierRules(name=name, kind=kind, survives=survived, retain=kept)
        found[name] = PlanTier(
            rules=rules,
            shared=shared,
            write_bytes_per_s=write,
            read_bytes_per_s=read,
            source=source,
        )
    return found


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0):
        raise ConfigError(f"{text!r} does not fit; expected a whole number, 1 or more")
    return int(text)


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "write": parse_positive_rate,
    "read": parse_positive_rate,
    "every": _count,
    "last": lambda text: keep_last(_count(text)),
    "capacity": parse_size_with_unit,
    "copies": _count,
}
"""By key of ``--tier``."""


def make_tiers(
    texts: Sequence[str], known: Mapping[str, PlanTier], given: Mapping[str, PlanTier], nodes: int
) -> tuple[PlanTier, ...]:
    """Return the tiers below host memory, fastest first: those of a file with what ``texts`` say of them, else those of
    ``texts``; without either peer memory if there are several nodes, a disk and a store. Raises ConfigError."""
    default = ("peers", "nvme", "store") if nodes > 1 else ("nvme", "store")
    tiers, named = dict(given), list[str]()
    for text in texts or (() if given else default):
        tier = _parse_tier(text, given or known)
        named.append(tier.name)
        tiers[tier.name] = tier
    if len(set(named)) < len(named):
        raise ConfigError(
            f"--tier {', '.join(named)}: a name is there twice; expected one --tier for each"
        )
    for tier in tiers.values():
        if tier.kind is TierKind.PEER and tier.copies >= nodes:
            near = f"copies={nodes - 1}" if nodes > 1 else "leave it out"
            raise ConfigError(
                f"tier {tier.name}: nodes that keep a copy: {tier.copies}, beside the node itself; nodes in all: "
                f"{nodes}; the nearest that works: {near}"
            )
    return tuple(tiers.values())


def _parse_tier(text: str, known: Mapping[str, PlanTier]) -> PlanTier:
    """Parse ``NAME:write=RATE,...``, where NAME is known."""
    name, _, rest = text.partition(":")
    if name not in known:
        raise ConfigError(
            f"tier {name!r} is not known; expected one of {', '.join(known)}{hint_at(name, known)}: the one of a YAML "
            "file, or the most similar one with your own rates, lustre:write=100GB/s,read=200GB/s"
        )
    tier, values = known[name], dict[str, Any]()
    for part in filter(None, rest.split(",")):
        key, _, value = part.strip().partition("=")
        if key not in _PARSERS:
            keys = f"{', '.join(_PARSERS)}{hint_at(key, _PARSERS)}"
            raise ConfigError(f"tier {name}: {part!r}; expected {name}:write=2TB/s, by {keys}")
        try:
            values[key] = _PARSERS[key](value)
        except ConfigError as error:
            raise ConfigError(f"tier {name}: {key}: {error}") from error
    write = values.get("write", tier.write_bytes_per_s)
    rules = replace(
        tier.rules,
        flush_every=values.get("every", tier.rules.flush_every),
        retain=values.get("last", tier.rules.retain),
        capacity_bytes=values.get("capacity", tier.rules.capacity_bytes),
    )
    return replace(
        tier,
        rules=rules,
        write_bytes_per_s=write,
        read_bytes_per_s=values.get("read", write if "write" in values else tier.read_bytes_per_s),
        copies=values.get("copies", tier.copies),
        source=GIVEN if "write" in values else tier.source,
    )
