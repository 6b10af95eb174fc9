"""What each rank holds and writes of a checkpoint: bytes a parameter, and parallelism. Pure arithmetic.

Ranks are numbered as Megatron-LM does: tensor parallelism varies fastest, then context, data and pipeline parallelism.
Pipeline stages get equal numbers of layers, the first ones one more; the embedding is on the first, the head on the
last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tierfall.core.types.errors import ConfigError
from tierfall.plan.models import Block, Model
from tierfall.policies.formulas import mlperf_optimizer_bytes


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes that a checkpoint has of each parameter, and why."""

    what: str
    bytes: int
    reason: str


class Precision(StrEnum):
    """The dtype of weights; ``bf16`` has an fp32 master copy, ``bf16-pure`` has none."""

    BF16 = "bf16"
    BF16_PURE = "bf16-pure"
    FP32 = "fp32"


class Optimizer(StrEnum):
    """What keeps a state of each parameter; ``mlperf``: Adam's, as MLPerf Storage counts it."""

    ADAM = "adam"
    ADAM_8BIT = "adam8bit"
    MUON = "muon"
    SGD = "sgd"
    NONE = "none"
    MLPERF = "mlperf"


def terms_of(precision: Precision, optimizer: Optimizer) -> tuple[Term, ...]:
    """Return what a checkpoint has of each parameter: the weights, and the optimizer's. Gradients are not saved."""
    width = 4 if precision is Precision.FP32 else 2
    weights = Term("weights", width, f"a parameter in {precision.partition('-')[0]}")
    if optimizer is Optimizer.NONE:
        return (weights,)
    state = 2 if precision is Precision.BF16_PURE else 4
    of_adam = 1 if optimizer is Optimizer.ADAM_8BIT else state
    states: tuple[Term, ...] = (
        Term("first moment", of_adam, "Adam's running mean of gradients"),
        Term("second moment", of_adam, "Adam's running mean of their squares"),
    )
    if optimizer in (Optimizer.MUON, Optimizer.SGD):
        states = (Term("momentum", state, "one running mean of gradients"),)
    master = Term("master weights", 4, "the fp32 copy that the optimizer steps")
    return (weights, master, *states) if precision is Precision.BF16 else (weights, *states)


class Sharding(StrEnum):
    """What data-parallel ranks divide: nothing, the optimizer (ZeRO 1 and 2), or the weights, too (ZeRO 3, FSDP)."""

    NONE = "none"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    FSDP = "fsdp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism: tensor, pipeline, context, data, expert. Experts are divided among data- and
    context-parallel ranks."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    sharding: Sharding = Sharding.FSDP

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def replicas(self) -> int:
        """How many ranks hold the same dense weights, or divide them."""
        return self.cp * self.dp

    @property
    def divides_weights(self) -> bool:
        return self.sharding in (Sharding.ZERO3, Sharding.FSDP)

    def __str__(self) -> str:
        degrees = {"TP": self.tp, "PP": self.pp, "CP": self.cp, "DP": self.dp, "EP": self.ep}
        told = " x ".join(f"{name} {size}" for name, size in degrees.items() if size > 1)
        return f"{told or 'one rank'}, {self.sharding}"


def make_layout(
    model: Model, gpus: int, degrees: Mapping[str, int | None], sharding: Sharding
) -> Layout:
    """Return the layout of a model on so many GPUs; data parallelism is what the other degrees leave, if it is not
    given. Raises ConfigError with the nearest that works if it does not divide the model or the GPUs."""
    tp, pp, cp, ep = (degrees[name] or 1 for name in ("tp", "pp", "cp", "ep"))
    _check_divides("tp", tp, model.heads, "attention heads")
    if model.layers and pp > (most := len(model.layers)):
        raise ConfigError(f"pp {pp}: {model.name} has {most} layers; the nearest: --pp {most}")
    if ep > 1 and not model.experts:
        raise ConfigError(f"ep {ep}: {model.name} has no experts; leave --ep out")
    _check_divides("ep", ep, model.experts, "experts")
    inner = tp * pp * cp
    dp = degrees["dp"] or max(1, round(gpus / inner))
    layout = Layout(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, sharding=sharding)
    if layout.ranks != gpus:
        raise ConfigError(
            f"tp {tp} x pp {pp} x cp {cp} does not divide {gpus} GPUs into {degrees['dp'] or 'equal'} replicas; the "
            f"nearest that works: --gpus {layout.ranks}"
        )
    _check_divides("ep", ep, layout.replicas, "data- and context-parallel ranks")
    return layout


def _check_divides(name: str, size: int, whole: int, what: str) -> None:
    if whole % size:
        divisors = (n for n in range(1, whole + 1) if whole % n == 0)
        near = min(divisors, key=lambda n: (abs(n - size), -n))
        raise ConfigError(
            f"{name} {size} does not divide {whole} {what}; the nearest that does: --{name} {near}"
        )


# Bytes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Bytes of a checkpoint by rank: ``written`` is a rank's image, ``held`` what a restore has to fill there;
    ``parts`` are who writes what, as docs/json.md has it."""

    written: Sequence[int]
    held: Sequence[int]
    parts: Sequence[Mapping[str, Any]] = ()

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Sizes of images, and how many ranks write one; the largest first."""
        return sorted(Counter(self.written).items(), reverse=True)


def node_max(sizes: Sequence[int], ranks_per_node: int) -> int:
    """Return the most that the ranks of one node have together."""
    starts = range(0, len(sizes), ranks_per_node)
    return max(sum(sizes[at : at + ranks_per_node]) for at in starts)


def stages_of(model: Model, pp: int) -> list[Block]:
    """Divide a model among pipeline stages."""
    if not model.layers:
        count = model.parameters
        return [Block(count // pp + (n < count % pp)) for n in range(pp)]
    each, more = divmod(len(model.layers), pp)
    ends = [each * n + min(n, more) for n in range(pp + 1)]
    stages = [Block().plus(*model.layers[ends[n] : ends[n + 1]]) for n in range(pp)]
    stages[0] = stages[0].plus(model.embedding)
    stages[-1] = stages[-1].plus(model.head)
    return stages


def rank_bytes(
    model: Model,
    layout: Layout,
    terms: Sequence[Term],
    *,
    as_mlperf: bool = False,
) -> RankBytes:
    """Return what each rank writes and holds. Each of the ranks that hold the same writes an equal part of it, as
    tierfall does. ``as_mlperf``: the first of them writes all that it holds, and the optimizer is counted by MLPerf
    Storage's formula."""
    width, states = terms[0].bytes, sum(term.bytes for term in terms[1:])
    weights: list[int] = []
    optimizer: list[int] = []
    held: list[int] = []
    for stage in stages_of(model, layout.pp):
        dense = stage.split / layout.tp + stage.whole
        experts = stage.experts / (layout.tp * layout.ep)
        shard = dense / layout.replicas + experts * layout.ep / layout.replicas
        equal = sum(stage) / (layout.tp * layout.replicas)  # norms of tensor-parallel ranks once
        for data in range(layout.replicas):
            first = dense * (data == 0) + experts * (data < layout.ep)
            own = (shard if layout.divides_weights else first) if as_mlperf else equal
            weights += [math.ceil(own * width)] * layout.tp
            optimizer += [math.ceil(equal * states)] * layout.tp
        of_weights = shard if layout.divides_weights else dense + experts
        of_states = dense + experts if layout.sharding is Sharding.NONE else shard
        held += [math.ceil(of_weights * width + of_states * states)] * (layout.tp * layout.replicas)
    if as_mlperf:
        fixed = mlperf_optimizer_bytes(model.parameters, model.hidden, layout.ranks)
        optimizer = [fixed] * layout.ranks
    parts = [_part("weights", weights, layout, layout.divides_weights)]
    if any(optimizer):
        parts.append(_part("optimizer", optimizer, layout, layout.sharding is not Sharding.NONE))
    written = [sum(both) for both in zip(weights, optimizer, strict=True)]
    return RankBytes(written=written, held=held, parts=parts)


def _part(name: str, sizes: list[int], layout: Layout, divided: bool) -> dict[str, Any]:
    writing = sum(size > 0 for size in sizes)
    why = f"{layout.replicas} ranks hold the same: each writes a part of it, once"
    if divided or layout.replicas == 1:
        why = f"each has a part of its own ({layout.sharding})"
    elif writing < len(sizes):
        why = f"{layout.replicas} ranks hold the same: the first writes it"
    found = {"part": name, "ranks": writing, "why": why}
    return found | {"bytes": sum(sizes), "bytes_max": max(sizes)}
