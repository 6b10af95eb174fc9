"""What public calls return: reports and checkpoint infos. Immutable data, which ``print`` and a notebook show as text
for people."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import floor

from tierfall.core.copies.chunk_reader import Fallback
from tierfall.core.types.text import format_some
from tierfall.core.types.units import format_duration, format_share, format_size
from tierfall.core.types.values import CheckpointId, CopyState, LossClass
from tierfall.core.types.view import LossBound, PeerSurvival, SurvivalChance
from tierfall.policies.cadence import TierCadence


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSource:
    """The tier that a shard's bytes were read from, and their number. ``rank`` read them there and sent them to this
    rank; None: this rank read them itself."""

    shard: str
    tier: str
    bytes: int
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore read, or received from other ranks: ``bytes`` in total, ``seconds`` from call to return,
    ``sources`` the largest first.

    ``fallbacks`` lists every tier, copy, chunk and step that was skipped, with the reason.
    """

    step: int
    attempt: int
    sources: tuple[ShardSource, ...]
    bytes: int
    seconds: float
    fallbacks: tuple[Fallback, ...]

    def __repr__(self) -> str:
        """One line, and one more for each source that was skipped."""
        read = ", ".join(_source(source) for source in self.sources) or "nothing to read"
        took = format_duration(self.seconds)
        lines = [f"restored step {self.step} (attempt {self.attempt}) in {took}: {read}"]
        return "\n".join([*lines, *(f"  skipped {f.what}: {f.reason}" for f in self.fallbacks)])


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyInfo:
    """One copy of a checkpoint. ``state`` is its word in the glossary, such as ``committed`` or ``damaged``; ``bytes``
    are what is stored. ``damage`` is what is wrong with it, or why it could not be read; ``fraction`` is the share of
    an arriving copy that is there. None: nothing, or not known."""

    state: str
    bytes: int
    damage: str | None = None
    fraction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One checkpoint over all tiers. ``bytes`` is its raw size; ``wall_time_s`` is the time of its save, in seconds
    since 1970. None: not known. ``not_finite`` names parameters with NaN or an infinity, and ``metrics.NAME`` of such a
    loss.

    ``copies`` has its copies by tier; ``owed`` are the tiers that are still owed one. ``set_aside`` is by tier why a
    copy was set aside, as it failed repeatedly while the tier accepted others. ``deleted``: by a person, and not on
    every tier yet.
    """

    step: int
    attempt: int
    ordinal: int | None = None
    started_from: CheckpointId | None = None
    bytes: int = 0
    wall_time_s: float | None = None
    pinned: bool = False
    abandoned: bool = False
    deleted: bool = False
    tags: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()
    copies: Mapping[str, CopyInfo] = field(default_factory=dict)
    owed: tuple[str, ...] = ()
    set_aside: Mapping[str, str] = field(default_factory=dict)

    def on(self, tier: str) -> str:
        """Return the state of the copy on a tier, ``owed``, ``set aside``, or ``-`` for none."""
        if tier not in self.copies:
            return "owed" if tier in self.owed else "set aside" if tier in self.set_aside else "-"
        copy = self.copies[tier]
        share = "" if copy.fraction is None else f" {format_share(round(copy.fraction, 2))}"
        return f"{copy.state}{share}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Its tags, whether it is pinned, abandoned or to be deleted, and what is NaN or infinite in it."""
        decided = {
            "pinned": self.pinned,
            "abandoned": self.abandoned,
            "to be deleted": self.deleted,
        }
        return (
            *(f"#{tag}" for tag in self.tags),
            *(name for name, is_so in decided.items() if is_so),
            *([f"NaN or Inf in {format_some(self.not_finite)}"] if self.not_finite else []),
        )

    def __repr__(self) -> str:
        """One line."""
        complete = (CopyState.COMMITTED, CopyState.SEALED)
        owed = [tier for tier in self.owed if tier not in self.copies]  # else it arrives
        copies = [
            tier if copy.state in complete else f"{tier} ({copy.state})"
            for tier, copy in self.copies.items()
        ]
        parts = [
            f"{format_size(self.bytes)} on {', '.join(copies) or 'no tier'}",
            f"owed to {', '.join(owed)}" if owed else "",
            f"set aside on {', '.join(self.set_aside)}" if self.set_aside else "",
            *self.remarks,
            *(f"{name} {value:.4g}" for name, value in self.metrics.items()),
        ]
        return f"<step {self.step} (attempt {self.attempt}): {'; '.join(filter(None, parts))}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainForecast:
    """The forecast of one copy when a drain with a deadline began. ``arrives``: before the deadline or not; None: not
    known, as the tier had no measured rate, or accepted no copies. ``left_bytes`` were still to be copied."""

    step: int
    attempt: int
    tier: str
    arrives: bool | None
    left_bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """What a drain made durable, what is left, and what was given up meanwhile, as (step, attempt, tier).

    ``seconds`` is the duration of the call; it returns before the deadline where nothing more can arrive. ``forecast``
    is that of its start, in the order of the copies; empty without a deadline.
    """

    done: tuple[tuple[int, int, str], ...]
    left: tuple[tuple[int, int, str], ...]
    seconds: float
    lost: tuple[tuple[int, int, str], ...] = ()
    forecast: tuple[DrainForecast, ...] = ()

    def __repr__(self) -> str:
        """One line for each outcome that some copies have."""
        outcomes = {"durable": self.done, "left": self.left, "given up": self.lost}
        lines = [
            f"  {name}: {format_some([f'{step}@{attempt} to {tier}' for step, attempt, tier in copies])}"
            for name, copies in outcomes.items()
            if copies
        ]
        return "\n".join(
            [f"drained in {format_duration(self.seconds)}", *(lines or ["  nothing was owed"])]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceReport:
    """The interval at which ``maybe_save`` saves, and why. None: not measured yet.

    ``interval_steps`` is None, too, where the interval is not in steps. ``bound`` is what decided: every, measuring,
    overhead, failures or durable (the time until the slowest tier has a save); ``reason`` is a sentence about it.
    ``step_s`` is the time of a step while nothing is saved, ``cost_s`` what a save adds to the steps up to the next
    one; ``overhead`` is that cost as a share of the interval. ``durable_s`` is, by tier, the time from a save until the
    tier has it; host memory holds ``images`` at a time. ``next_step`` is saved next, if nothing changes. ``tiers`` is,
    under ``mtbf``, the best interval of each tier.
    """

    interval_steps: int | None
    bound: str
    reason: str
    step_s: float | None
    cost_s: float | None
    overhead: float | None
    durable_s: Mapping[str, float]
    images: int
    next_step: int | None
    tiers: tuple[TierCadence, ...] = ()


# As text ---------------------------------------------------------------------------------------------


def _source(source: ShardSource) -> str:
    by = "" if source.rank is None else f", read by rank {source.rank}"
    return f"{format_size(source.bytes)} from {source.tier}{by}"


def _format_loss(bound: LossBound) -> str:
    """Format a loss bound: the step that is left, its tier, the time to read it, and the steps that would be lost. Only
    a living trainer knows the present step, and so the steps lost."""
    if bound.survives is None:
        return "nothing is left"
    text = f"{bound.survives} is left, on {bound.tier}"
    if bound.restore_seconds is not None:
        text += f", read back in {format_duration(bound.restore_seconds)}"
    if bound.steps_lost is not None:
        ago = "" if bound.seconds_lost is None else f" ({format_duration(bound.seconds_lost)})"
        text += f", {bound.steps_lost} {'step' if bound.steps_lost == 1 else 'steps'}{ago} lost"
    return text


_FAILURES = {
    LossClass.PROCESS: "process dies",
    LossClass.NODE: "machine dies",
    LossClass.SITE: "site is lost",
}


def format_bounds(bounds: Mapping[LossClass, LossBound], unread: Collection[str] = ()) -> list[str]:
    """Format all loss bounds, one line each; ``unread`` names the tiers that could not be read."""
    lines = [f"if the {_FAILURES[lost]}: {_format_loss(bound)}" for lost, bound in bounds.items()]
    return [*lines, f"not read: {', '.join(unread)}"] if unread else lines


def format_run_ettr(ettr: float | None) -> list[str]:
    """Format the effective training time ratio of a run, on one line; none while it is not known."""
    return [] if ettr is None else [f"ETTR of all starts: {format_share(round(ettr, 3))}"]


def format_unread(unread: Collection[str]) -> str:
    """Name the tiers that could not be read, to append to what was found on the others."""
    return f" (not read: {', '.join(unread)})" if unread else ""


def describe_peer_survival(found: PeerSurvival, *, live: bool = True) -> str:
    """Format which losses of nodes a checkpoint in peer memory survives. A percentage is rounded down. Without a
    ``live`` trainer, a node may have been lost."""
    nodes = "node" if found.certain == 1 else "nodes"
    certain = (
        f"the loss of any {found.certain} {nodes}"
        if found.certain
        else "no loss of a node for certain"
    )
    others = [
        f"of {chance.losses} with {'' if chance.exact else 'at least '}{_share_below(chance)}"
        for chance in found.chances
        if chance.losses > found.certain and chance.probability
    ]
    where = f"{found.tier}: {found.step}@{found.attempt} survives {certain}"
    text = "; ".join([where, ", ".join(others)]) if others else where
    return text if live else f"{text} (if no node is lost yet)"


def _share_below(chance: SurvivalChance) -> str:
    return f"{min(999, floor(round(chance.probability * 1000, 6))) / 10:g}%"
