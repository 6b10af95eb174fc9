"""Reports as text for people: what ``print`` and a notebook show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import floor
from typing import TYPE_CHECKING

from tierfall.core.types.text import format_some
from tierfall.core.types.units import format_duration, format_rate, format_share, format_size
from tierfall.core.types.values import CopyState
from tierfall.core.types.view import LossBound, PeerSurvival, SurvivalChance

if TYPE_CHECKING:
    from tierfall.telemetry.reports import (
        CheckpointInfo,
        DrainReport,
        RestoreReport,
        ShardSource,
        Statistics,
    )

_WIDTH = 12


def describe_restore(report: RestoreReport) -> str:
    """One line, and one more for each source that was skipped."""
    read = ", ".join(_source(source) for source in report.sources) or "nothing to read"
    took = format_duration(report.seconds)
    lines = [f"restored step {report.step} (attempt {report.attempt}) in {took}: {read}"]
    return "\n".join([*lines, *(f"  skipped {f.what}: {f.reason}" for f in report.fallbacks)])


def _source(source: ShardSource) -> str:
    by = "" if source.rank is None else f" by rank {source.rank}"
    return f"{format_size(source.bytes)} from {source.tier}{by}"


def describe_drain(report: DrainReport) -> str:
    """One line for each outcome that some copies have."""
    outcomes = {"durable": report.done, "left": report.left, "given up": report.lost}
    lines = [
        f"  {name}: {format_some([f'{step}@{attempt} to {tier}' for step, attempt, tier in copies])}"
        for name, copies in outcomes.items()
        if copies
    ]
    return "\n".join(
        [f"drained in {format_duration(report.seconds)}", *(lines or ["  nothing was owed"])]
    )


def describe_checkpoint(info: CheckpointInfo) -> str:
    """One line."""
    copies = [
        tier if state in (CopyState.COMMITTED, CopyState.SEALED) else f"{tier} ({state})"
        for tier, state in info.tiers.items()
    ]
    parts = [
        f"{format_size(info.bytes)} on {', '.join(copies) or 'no tier'}",
        f"{format_duration(info.age_s)} old",
        f"owed to {', '.join(info.owed)}" if info.owed else "",
        f"not good on {', '.join(info.damage)}" if info.damage else "",
        f"set aside on {', '.join(info.set_aside)}" if info.set_aside else "",
        "pinned" if info.pinned else "",
        "abandoned" if info.abandoned else "",
        f"tags {', '.join(info.tags)}" if info.tags else "",
        ", ".join(f"{name} {value:g}" for name, value in info.metrics.items()),
    ]
    return f"<step {info.step} (attempt {info.attempt}): {'; '.join(filter(None, parts))}>"


def describe_statistics(found: Statistics) -> str:
    """One line a subject; what is not known, and what is zero where that is good, is left out."""
    saves = [
        f"{found.saves} ({_lazy(found)})",
        *_counted(
            skipped=found.skipped_saves,
            superseded=found.superseded_saves,
            failed=found.failed_saves,
        ),
    ]
    times = (
        {"training blocked": found.blocked_s, "captured": found.captured_s} if found.saves else {}
    )
    times |= {f"on {tier}": seconds for tier, seconds in found.durable_s.items()}
    rows = {
        "saves": ", ".join(saves),
        "after save": _pairs({what: format_duration(s) for what, s in times.items()}),
        "commits": _pairs(found.commits),
        "survives": ", ".join(
            f"{_step(step)} a lost {lost}" for lost, step in found.newest.items()
        ),
        "would lose": ", ".join(
            f"with a lost {lost} {text}"
            for lost, bound in found.loss_bound.items()
            if (text := _lost(bound))
        ),
        "peer memory": ""
        if found.peer_survival is None
        else describe_peer_survival(found.peer_survival),
        "write rate": _pairs({t: format_rate(rate) for t, rate in found.write_bytes_per_s.items()}),
        "read rate": _pairs({t: format_rate(rate) for t, rate in found.read_bytes_per_s.items()}),
        "falls behind": _pairs(
            {tier: f"{n:.1f} checkpoints an hour" for tier, n in found.behind.items() if n}
        ),
        "packed": _pairs(
            {tier: f"{one.ratio:.2f} times smaller" for tier, one in found.compression.items()}
        ),
        "cadence": "" if found.cadence is None else found.cadence.reason,
        "progress": "" if found.ettr is None else f"{format_share(found.ettr)} of the time (ETTR)",
        "trouble": ", ".join(
            _counted(
                failed_flushes=found.flush_failures,
                copies_given_up=found.given_up_copies,
                copies_set_aside=found.set_aside_copies,
                lost_events=found.lost_events,
            )
        ),
    }
    lines = (f"  {name:<{_WIDTH}}  {text}" for name, text in rows.items() if text)
    return "\n".join(["since open:", *lines])


def describe_peer_survival(found: PeerSurvival) -> str:
    """Format which losses of nodes a checkpoint in peer memory survives. A percentage is rounded down."""
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
    return "; ".join([where, ", ".join(others)]) if others else where


def _share_below(chance: SurvivalChance) -> str:
    return f"{min(999, floor(round(chance.probability * 1000, 6))) / 10:g}%"


def _lazy(found: Statistics) -> str:
    if not found.lazy_bytes:
        return f"{found.lazy_saves} lazy"
    return f"{found.lazy_saves} lazy: {format_share(found.lazy_bytes / found.bytes)} of all bytes"


def _counted(**counts: int) -> Iterable[str]:
    return [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count]


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _step(step: int | None) -> str:
    return "nothing" if step is None else f"step {step}"


def _lost(bound: LossBound) -> str:
    if bound.steps_lost is None:
        return ""
    time = "" if bound.seconds_lost is None else f" ({format_duration(bound.seconds_lost)})"
    return f"{bound.steps_lost} steps{time}"
