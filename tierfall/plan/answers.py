"""The answers of a plan: what a save costs, how often to save, what a failure costs, and what the bottleneck is. Pure
arithmetic on the formulas; sizes are in bytes, rates in bytes per second, times in seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from tierfall.core.types.errors import ConfigError
from tierfall.core.types.units import (
    format_duration,
    format_rate,
    format_share,
    format_size,
)
from tierfall.core.types.values import LOSS_CLASSES, LossClass, TierKind
from tierfall.core.types.view import TierRules
from tierfall.plan.cluster import Cluster, PlanTier
from tierfall.plan.layout import Layout, RankBytes, Term, node_max
from tierfall.plan.models import Model
from tierfall.plan.steady import HOST_IMAGES, Chain, SteadyTier, Workload, steady_state
from tierfall.policies import formulas
from tierfall.policies.placement import place_copies

SAVE_S = 0.01
"""What ``save`` itself takes: 1.5 ms, and 5 us for each of 1,700 tensors (docs/benchmarks.md)."""
WINDOW = 0.95
"""The share of a step that is not the optimizer's: 1.26 + 1.82 of 3.2 s for a 7B (DataStates-LLM, HPDC'24)."""
SLOWDOWN = 0.02
"""How much longer a step takes beside a copy, on a GPU (docs/benchmarks.md: 1.02 times)."""
CHECKFREQ_OVERHEAD = 0.035
MEMORY_SHARE, MEMORY_SHARE_WITH_PEERS = 0.75, 0.5
"""What tierfall takes of a node's memory at most (docs/configuration.md, capacity)."""
CHANCES = 4
HELPS = {
    "saving": "a longer interval, or a faster chain",
    "work done again": "a shorter interval, with a chain that keeps up with it",
    "restarts": "a faster restart, or fewer failures",
    "restores": "a faster tier for what fails most often, or fewer failures",
}
"""What takes time from training, and what would help."""


class Source(NamedTuple):
    """A tier that a restore may read: it gets one of ``saves`` checkpoints, ``durable_s`` after its save. ``alone_s``:
    a restore after the loss of one node (None: as any)."""

    name: str
    survives: LossClass
    durable_s: float
    saves: int
    restore_s: float
    alone_s: float | None = None

    def restore_after(self, lost: LossClass) -> float:
        return self.alone_s if lost is LossClass.NODE and self.alone_s else self.restore_s


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model, its layout, a cluster with its tiers, and policies; the answers are its members. None: not given.
    ``blocked_s`` is for how long a save of a run has blocked training."""

    model: Model
    terms: tuple[Term, ...]
    layout: Layout
    sizes: RankBytes
    cluster: Cluster
    tiers: tuple[PlanTier, ...]
    step_s: float
    images_wanted: int | None = None
    every_given_s: float | None = None
    overhead: float | None = None
    blocked_s: float | None = None
    lazy: bool = True

    # Sizes -------------------------------------------------------------------------------------------

    @cached_property
    def checkpoint_bytes(self) -> int:
        return sum(self.sizes.written)

    @cached_property
    def image_bytes(self) -> int:
        """The largest image of a rank."""
        return max(self.sizes.written)

    @cached_property
    def node_bytes(self) -> int:
        """The most that the ranks of one node write."""
        return node_max(self.sizes.written, self.cluster.ranks_per_node)

    @cached_property
    def held_of_node(self) -> int:
        """The most that a restore has to fill on one node."""
        return node_max(self.sizes.held, self.cluster.ranks_per_node)

    @cached_property
    def peers(self) -> PlanTier | None:
        return next((tier for tier in self.tiers if tier.kind is TierKind.PEER), None)

    @property
    def kept_for_peers(self) -> int:
        """What a node keeps for others: the newest checkpoint, and the one that arrives."""
        return 0 if self.peers is None else 2 * self.peers.copies * self.node_bytes

    @property
    def _memory_share(self) -> float:
        return MEMORY_SHARE if self.peers is None else MEMORY_SHARE_WITH_PEERS

    def memory_for(self, images: int) -> float:
        """Return how much memory a node needs for so many images of each rank, each with room for the largest."""
        own = images * self.image_bytes * self.cluster.ranks_per_node
        return (own + self.kept_for_peers) / self._memory_share

    @cached_property
    def images(self) -> int:
        """How many images of a rank host memory has room for; at least one. Raises ConfigError."""
        wanted, room = self.images_wanted or HOST_IMAGES + bool(self.peers), self.cluster.host_bytes
        if (needed := self.memory_for(1)) > room:
            kept = " and what peer memory keeps of other nodes" if self.peers else ""
            raise ConfigError(
                f"host memory is too small for one image of {format_size(self.image_bytes)} of each of "
                f"{self.cluster.ranks_per_node} ranks{kept}: with {format_share(self._memory_share)} of it at most, "
                f"a node needs {format_size(needed)} and has {format_size(room)}; the nearest that works: "
                f"--host-memory {math.ceil(needed / 2**30)}GiB, or more GPUs that divide the state"
            )
        return next(n for n in range(wanted, 0, -1) if n == 1 or self.memory_for(n) <= room)

    @property
    def host_bytes(self) -> int:
        """What images take of a node's memory."""
        return int(self.memory_for(self.images) * self._memory_share)

    # What a save costs -------------------------------------------------------------------------------

    @cached_property
    def capture_s(self) -> float:
        """How long the copy to host memory takes."""
        return self.image_bytes / self.cluster.copy_bytes_per_s

    def copy_s(self, tier: PlanTier | None) -> float:
        """How long a copy to a tier (None: host memory) takes: its rate, or the link of the node that writes most,
        decides."""
        if tier is None:
            return self.capture_s
        if not tier.shared:
            return self.node_bytes * tier.copies / tier.write_bytes_per_s
        of_link = self.node_bytes / self.cluster.link_bytes_per_s
        return max(self.checkpoint_bytes / tier.write_bytes_per_s, of_link)

    def waits_for_link(self, tier: PlanTier) -> bool:
        """Whether a copy to a tier takes as long as the link of one node needs, and not by the tier's rate."""
        at_rate_s = self.checkpoint_bytes / tier.write_bytes_per_s
        return tier.shared and self.copy_s(tier) > 1.01 * at_rate_s

    def durable_s(self, tier: PlanTier | None) -> float:
        """From the save to its commit: a copy follows the capture."""
        return max(self.capture_s, self.copy_s(tier))

    def _needs_s(self, tier: PlanTier | None) -> float:
        """The shortest interval with which a tier keeps up."""
        return self.copy_s(tier) / (tier.rules.flush_every if tier else 1)

    @cached_property
    def slowest(self) -> PlanTier | None:
        """The tier that needs the longest interval; None: host memory."""
        return max((None, *self.tiers), key=self._needs_s)

    @property
    def _slowest_name(self) -> str:
        return self.slowest.name if self.slowest else "host"

    @cached_property
    def drain_s(self) -> float:
        """The shortest interval with which host memory and every tier keep up."""
        return self._needs_s(self.slowest)

    def _keeps_up_by(self, every_s: float) -> str:
        """Return the options by which the slowest tier keeps up with an interval."""
        tier, least_s = self.slowest, self.drain_s
        if tier is None:
            return f"--copy-rate {math.ceil(self.image_bytes / every_s / 1e6)}MB/s"
        wants = f"--tier {tier.name}:every={math.ceil(self.copy_s(tier) / every_s)}"
        if not self.waits_for_link(tier):
            rate = math.ceil(tier.write_bytes_per_s * least_s / every_s / 1e6)
            wants += f", or --tier {tier.name}:write={rate}MB/s"
        return wants

    def held_s(self, every_s: float) -> float:
        """How long the training thread waits for a save."""
        if self.blocked_s is not None:
            return self.blocked_s
        rate, drain_s = self.cluster.copy_bytes_per_s, self.drain_s
        return SAVE_S + formulas.lazy_hold_s(
            self.image_bytes, rate, self.window_s, drain_s, every_s
        )

    @property
    def window_s(self) -> float:
        """How long a lazy capture runs beside the training before that waits."""
        return WINDOW * self.step_s if self.lazy else 0.0

    def cost_s(self, every_s: float) -> float:
        """By how much a save lengthens training: it is held, and steps beside the copies take longer."""
        return self.held_s(every_s) + SLOWDOWN * min(every_s, self.drain_s)

    @property
    def blocking_s(self) -> float:
        return self.cost_s(self.every_s)

    # What a failure costs ----------------------------------------------------------------------------

    def restore_from_s(self, tier: PlanTier | None) -> float:
        """How long a restore takes if each byte is read once from a tier (None: host memory), and what several ranks
        hold is handed on meanwhile: the slower of both decides."""
        link = self.cluster.link_bytes_per_s
        if tier is not None and tier.shared:
            return max(self.checkpoint_bytes / tier.read_bytes_per_s, self.held_of_node / link)
        own_s = self.capture_s if tier is None else self.node_bytes / tier.read_bytes_per_s
        return max(own_s, (self.held_of_node - self.node_bytes) / link)

    @cached_property
    def restore_s(self) -> dict[str, float]:
        """From the last tier if each rank reads all that it holds, and if each byte is read once; and after the loss of
        one node: it alone reads the fastest tier that survives, if the others still have that step in memory."""
        last, link = self.tiers[-1], self.cluster.link_bytes_per_s
        once, left = self.restore_from_s(last), self.surviving(LossClass.NODE)
        read = sum(self.sizes.held) if last.shared else self.held_of_node
        alone = once if left is None else min(once, self.restore_from_s(left))
        if left is not None and left.rules.flush_every <= self.images:
            own_s = max(self.node_bytes / left.read_bytes_per_s, self.held_of_node / link)
            alone = min(alone, max(own_s, self.restore_from_s(None)))
        per_rank = max(once, read / last.read_bytes_per_s)
        return {"per_rank": per_rank, "read_once": once, "hierarchical": alone}

    def surviving(self, lost: LossClass) -> PlanTier | None:
        """Return the fastest tier below host memory that survives a loss."""
        return next((tier for tier in self.tiers if tier.rules.survives.covers(lost)), None)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """What a restore may read: host memory, and each tier."""
        found = [Source("host", LossClass.PROCESS, self.capture_s, 1, self.restore_from_s(None))]
        for tier in self.tiers:
            alone = tier is self.surviving(LossClass.NODE)
            alone_s = self.restore_s["hierarchical"] if alone else None
            rules, durable_s, restore_s = (
                tier.rules,
                self.durable_s(tier),
                self.restore_from_s(tier),
            )
            source = (tier.name, rules.survives, durable_s, rules.flush_every, restore_s, alone_s)
            found.append(Source(*source))
        return tuple(found)

    @cached_property
    def recoveries(self) -> dict[LossClass, Source | None]:
        """The fastest that each loss leaves; None: nothing survives it."""
        return {
            lost: next((each for each in self.sources if each.survives.covers(lost)), None)
            for lost in LOSS_CLASSES
        }

    @cached_property
    def _failures(self) -> list[tuple[float, Source, float]]:
        """Of each loss that leaves something its rate, what it leaves, and how long that restore takes."""
        rates, left = self.cluster.failures_per_s, self.recoveries.items()
        return [(rates[lost], each, each.restore_after(lost)) for lost, each in left if each]

    def ettr_at(self, every_s: float) -> float:
        """Return the effective training time ratio with an interval."""
        losses = []
        for rate, left, restore_s in self._failures:
            lost_s = formulas.wasted_s(left.durable_s, every_s * left.saves, restore_s)
            losses.append((rate, self.cluster.restart_s + lost_s))
        return formulas.ettr(self.cost_s(every_s), every_s, losses)

    def shares_at(self, every_s: float) -> dict[str, float]:
        """Return the shares of all time that are no training, by what takes them."""
        trained = 1 / (1 + self.cost_s(every_s) / every_s)
        again = sum(rate * (m.durable_s + every_s * m.saves / 2) for rate, m, _ in self._failures)
        restarts = sum(rate for rate, _, _ in self._failures) * self.cluster.restart_s
        restores = sum(rate * restore_s for rate, _, restore_s in self._failures)
        times = (trained * again, trained * restarts, trained * restores)
        return dict(zip(HELPS, (1 - trained, *times), strict=True))

    # The interval ------------------------------------------------------------------------------------

    @cached_property
    def _least_s(self) -> float:
        """The shortest interval that works, in whole steps: every tier keeps up."""
        return self._in_steps(self.drain_s)

    @cached_property
    def _cost_s(self) -> float:
        """What a save costs if every tier keeps up."""
        return self.cost_s(self._least_s)

    def _in_steps(self, seconds: float) -> float:
        return max(1, math.ceil(seconds / self.step_s - 1e-9)) * self.step_s

    @property
    def steps(self) -> int:
        return max(1, round(self.every_s / self.step_s))

    @cached_property
    def _best_s(self) -> float:
        """The interval of the best ETTR, whether or not every tier keeps up with it."""
        restart_s = self.cluster.restart_s
        fixed = sum(r * (restart_s + m.durable_s + s) for r, m, s in self._failures)
        rate = sum(rate * left.saves for rate, left, _ in self._failures)
        if not rate:  # no failure leaves anything
            return self.cluster.mtbf_s[LossClass.PROCESS]
        return formulas.best_ettr_s(self._cost_s, min(fixed, 1.0), rate)

    @cached_property
    def wanted_s(self) -> float:
        """The interval before tiers are asked whether they keep up."""
        if self.every_given_s is not None:
            return self._in_steps(self.every_given_s)
        if self.overhead is not None:
            steps = formulas.overhead_steps(self._cost_s, self.step_s, self.overhead)
            return steps * self.step_s
        return self._in_steps(self._best_s)

    @cached_property
    def every_s(self) -> float:
        """The interval between saves: as given; else as wanted, and no shorter than every tier keeps up with."""
        given = self.every_given_s is not None
        return self.wanted_s if given else max(self.wanted_s, self._least_s)

    @cached_property
    def best_s(self) -> float:
        """The interval of the best ETTR with which every tier keeps up."""
        return max(self._in_steps(self._best_s), self._least_s)

    @cached_property
    def cadences(self) -> list[dict[str, Any]]:
        """The interval by each method, and the one that is chosen, as docs/json.md has them."""
        cost_s, mtbf_s, step_s = self._cost_s, self.cluster.mtbf_s[LossClass.PROCESS], self.step_s
        budget = self.overhead or CHECKFREQ_OVERHEAD
        frequent = formulas.checkfreq_steps(self.drain_s, SAVE_S, step_s)
        over = formulas.overhead_steps(cost_s, step_s, budget) - frequent
        frequent += 2 * max(0, math.ceil(over / 2))  # CheckFreq's steps towards its budget
        images, slowdown = self.images, 1 + (self.overhead or 0)
        # Copies in flight share the rate of a tier: each takes as many times as long.
        kept_up = formulas.pccheck_steps(images * self.drain_s, images, slowdown, step_s)
        availability = formulas.availability_s(cost_s, mtbf_s, self.cluster.restart_s)
        within = f"one save is through before the next, within {format_share(budget)}"
        rows = (
            ("young", formulas.young_s(cost_s, mtbf_s), "sqrt(2 C M)"),
            ("daly", formulas.daly_s(cost_s, mtbf_s), "the same to higher order"),
            ("availability", availability, "the least time without training"),
            ("checkfreq", frequent * step_s, within),
            ("pccheck", kept_up * step_s, f"{images} images in flight keep up"),
            ("best", self.best_s, "the best ETTR with which every tier keeps up"),
            ("chosen", self.every_s, self._why_chosen()),
        )
        return [
            {"name": name, "every_s": every_s, "ettr": self.ettr_at(every_s), "why": why}
            for name, every_s, why in rows
        ]

    def _why_chosen(self) -> str:
        if self.every_given_s is not None:
            return "as given"
        if self.every_s > self.wanted_s:
            return f"{self._slowest_name} keeps up with no shorter one"
        if self.overhead is not None:
            return f"saves lengthen training by {format_share(self.overhead)} at most"
        return "the best ETTR"

    # Tiers -------------------------------------------------------------------------------------------

    @cached_property
    def steady(self) -> tuple[SteadyTier, ...]:
        """The steady state of host memory, and of each tier below it."""
        host = TierRules(name="host", kind=TierKind.HOST, survives=LossClass.PROCESS)
        chain = Chain(
            rules=(host, *(tier.rules for tier in self.tiers)),
            rates={tier.name: self.node_bytes / self.copy_s(tier) for tier in self.tiers},
            shared=frozenset(tier.name for tier in self.tiers if tier.shared),
            host_bytes=self.images * self.image_bytes,
        )
        load = Workload(
            image_bytes=self.image_bytes,
            save_every_s=self.every_s,
            step_s=self.step_s,
            ranks=self.cluster.gpus,
            nodes=self.cluster.nodes,
            bytes_of_node=self.node_bytes,
            bytes_of_all=self.checkpoint_bytes,
        )
        return steady_state(chain, load)

    @cached_property
    def tier_answers(self) -> list[dict[str, Any]]:
        """What is needed of each tier, as docs/json.md has it; rates and what a tier holds are of all nodes."""
        return [*map(self._answer, self.steady, (None, *self.tiers))]

    def _answer(self, steady: SteadyTier, tier: PlanTier | None) -> dict[str, Any]:
        copied, copy_s, places = self.checkpoint_bytes, self.copy_s(tier), self.cluster.gpus
        limit = "the copy from a GPU"
        if tier is not None:
            copied *= tier.copies
            places = tier.copies * (1 if tier.shared else self.cluster.nodes)
            limit = "the link of one node" if self.waits_for_link(tier) else "its rate"
        return {
            "name": steady.name,
            "kind": str(tier.kind if tier else TierKind.HOST),
            "survives": str(tier.rules.survives if tier else LossClass.PROCESS),
            "flush_every": tier.rules.flush_every if tier else 1,
            "every_s": steady.every_s,
            "required_bytes_per_s": copied / steady.every_s,
            "available_bytes_per_s": copied / copy_s,
            "copy_s": copy_s,
            "durable_s": self.durable_s(tier),
            "capacity_bytes": steady.bytes_max and steady.bytes_max * places,
            "restore_s": self.restore_from_s(tier),
            "limited_by": limit,
        }

    @cached_property
    def peer_chances(self) -> list[tuple[int, float]]:
        """How many nodes are lost at once, and the probability that memory still has every image."""
        if self.peers is None:
            return []
        nodes, copies = self.cluster.nodes, self.peers.copies
        placed = place_copies([str(node) for node in range(nodes)], copies)
        most = min(nodes, copies + CHANCES)
        return [(lost, placed.survival(lost)[0]) for lost in range(1, most + 1)]

    # Words -------------------------------------------------------------------------------------------

    def faults(self) -> Iterator[str]:
        """Yield what does not work: a chain that cannot keep up, failures that leave no time to train."""
        least_s, every_s = self.drain_s, self.every_s
        if every_s < least_s * (1 - 1e-9):
            yield (
                f"{self._slowest_name} cannot keep up with a save every {format_duration(every_s)}: a copy takes "
                f"{format_duration(self.copy_s(self.slowest))}; the nearest that works: --every "
                f"{math.ceil(self._least_s)}s, or {self._keeps_up_by(every_s)}"
            )
        if not self.ettr_at(self.every_s):
            mtbf_s = self.cluster.mtbf_s[LossClass.PROCESS]
            yield (
                f"no time is left to train: a failure comes every {format_duration(mtbf_s)}, and costs more, with its "
                f"restart of {format_duration(self.cluster.restart_s)} and a save every "
                f"{format_duration(self.every_s)}; expected fewer failures (--mtbf), a faster restart (--restart), or "
                "more frequent saves"
            )

    def bottlenecks(self) -> Iterator[str]:
        """Yield what limits this plan, and what would remove it; what takes the most time last."""
        if self.every_s > self.wanted_s:
            yield (
                f"{self._slowest_name} limits the interval: a copy takes "
                f"{format_duration(self.copy_s(self.slowest))}, and a save every {format_duration(self.wanted_s)} "
                f"would be better: {self._keeps_up_by(self.wanted_s)}"
            )
        if (wait_s := self.capture_s - self.window_s) > 0 and self.lazy:
            rate = self.image_bytes / self.window_s
            yield (
                f"host memory: the copy of {format_size(self.image_bytes)} takes {format_duration(wait_s)} longer than "
                f"forward and backward, and each save waits for that. {format_rate(rate)} from each GPU, or more ranks "
                "that divide the state, remove that"
            )
        if self.images < HOST_IMAGES:
            yield (
                f"host memory has room for one image of a rank: a save waits until the one before it is flushed. "
                f"{format_size(self.memory_for(HOST_IMAGES))} of memory in each node remove that"
            )
        for lost, left in self.recoveries.items():
            if left is None:
                helps = (
                    "an object store" if lost is LossClass.SITE else "a tier that all nodes share"
                )
                yield f"nothing survives the loss of a {lost}, and no ETTR counts it: {helps} removes that"
        for steady in self.steady:
            if steady.full_s or steady.bytes_max is None:
                yield from (f"{steady.name}: {reason}" for reason in steady.reasons)
        shares = self.shares_at(self.every_s)
        if (none := sum(shares.values())) < 1:
            most = max(shares, key=lambda what: shares[what])
            told = ", ".join(f"{what} {format_share(share)}" for what, share in shares.items())
            yield (
                f"{format_share(none)} of all time is no training: {told}. Against {most}: {HELPS[most]}"
            )
