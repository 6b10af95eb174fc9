"""What happened when, from what the trainers told: the data behind the picture, which ``picture`` draws.

Every time was taken by the process that it is about, on the machine's monotonic clock, and is given in seconds since
the first trainer was started. Nothing here knows how it is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from tierfall.demo.chain import parse_checkpoint
from tierfall.demo.stage import Act


class Kind(StrEnum):
    """What a bar stands for."""

    CAPTURE = "capture"
    FLUSH = "flush"
    CUT = "flush cut off by the kill"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Work on one tier, from ``begin_s`` to ``end_s``, for the checkpoint of training step ``step``."""

    tier: str
    kind: Kind
    step: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step: when it was over, and its loss."""

    step: int
    time_s: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The life of one trainer, and the steps that it trained."""

    begin_s: float
    end_s: float
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened to the run: a kill, a loss."""

    time_s: float
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A run on its tiers, the fastest first."""

    tiers: tuple[str, ...]
    bars: tuple[Bar, ...]
    processes: tuple[Process, ...]
    moments: tuple[Moment, ...]


Copy = tuple[str, str]
"""A checkpoint, as ``step@attempt``, and the tier that it is on."""


def make_timeline(
    tiers: Sequence[str],
    acts: Sequence[Act],
    *,
    found: frozenset[Copy],
    moments: Sequence[Moment] = (),
) -> Timeline:
    """Put together what the trainers told, in the order in which they lived; times in ``moments`` are the clock's.

    ``found`` were whole when a trainer had been killed.
    """
    bars: list[Bar] = []
    happened = list(moments)
    for act in acts:
        bars += _restores(act)
        bars += _captures(act, tiers[0], found)
        for tier in tiers[1:]:
            bars += _flushes(act, tier, found)
        if act.killed_s is not None:
            happened.append(Moment(time_s=act.killed_s, what="SIGKILL"))
    return _since(
        acts[0].began_s,
        Timeline(
            tiers=tuple(tiers),
            bars=tuple(bars),
            processes=tuple(_process(act) for act in acts),
            moments=tuple(sorted(happened, key=lambda moment: moment.time_s)),
        ),
    )


def _restores(act: Act) -> Iterator[Bar]:
    """One bar on each tier that something was read from."""
    restored = act.started.restored if act.started else None
    if restored is None:
        return
    for tier in dict.fromkeys(tier for _, tier, _ in restored.sources):
        yield Bar(
            tier=tier,
            kind=Kind.RESTORE,
            step=restored.step,
            begin_s=restored.time_s - restored.seconds,
            end_s=restored.time_s,
        )


def _captures(act: Act, memory: str, found: frozenset[Copy]) -> Iterator[Bar]:
    """From the call of ``save`` until the image lay sealed in memory, or, if nobody told, was found there."""
    for save in act.saves.values():
        end_s = None if save.captured_s is None else save.began_s + save.captured_s
        if end_s is None and (save.checkpoint, memory) in found:
            end_s = act.killed_s
        if end_s is not None:
            yield Bar(
                tier=memory,
                kind=Kind.CAPTURE,
                step=parse_checkpoint(save.checkpoint).step,
                begin_s=save.began_s,
                end_s=end_s,
            )


def _flushes(act: Act, tier: str, found: frozenset[Copy]) -> Iterator[Bar]:
    """From a copy's turn until it was committed, or cut off.

    A tier takes one copy at a time, in order. A copy's turn comes when it is saved (what an earlier process owes: when
    the tiers are open), or when the copy before it is done.
    """
    over, cut = _committed(act, tier), None
    if act.killed_s is not None:
        for checkpoint, place in sorted(found):
            if place == tier and checkpoint in act.saves:
                over.setdefault(checkpoint, act.killed_s)
        cut = _arriving(act, tier)
        if cut in over:
            cut = None
        if cut is not None:
            over[cut] = act.killed_s
    free_s = 0.0
    for checkpoint, end_s in sorted(over.items(), key=lambda item: item[1]):
        yield Bar(
            tier=tier,
            kind=Kind.CUT if checkpoint == cut else Kind.FLUSH,
            step=parse_checkpoint(checkpoint).step,
            begin_s=min(max(_came(act, checkpoint), free_s), end_s),
            end_s=end_s,
        )
        free_s = end_s


def _arriving(act: Act, tier: str) -> str | None:
    """What was on its way to a tier when it was last looked at."""
    tiers = act.looks[-1][1]
    return tiers[tier].arriving if tier in tiers else None


def _committed(act: Act, tier: str) -> dict[str, float]:
    """When each copy that came to a tier was committed, or, where nobody told, was first seen whole."""
    over = {
        save.checkpoint: save.began_s + save.durable_s[tier]
        for save in act.saves.values()
        if tier in save.durable_s
    }
    opened = act.looks[0][1] if act.looks else {}
    before = opened[tier].whole if tier in opened else ()
    for time_s, tiers in act.looks:
        for checkpoint in tiers[tier].whole if tier in tiers else ():
            if checkpoint not in before:
                over.setdefault(checkpoint, time_s)
    return over


def _came(act: Act, checkpoint: str) -> float:
    if checkpoint in act.saves:
        return act.saves[checkpoint].began_s
    return act.looks[0][0]


def _process(act: Act) -> Process:
    return Process(
        begin_s=act.began_s,
        end_s=act.over_s if act.killed_s is None else act.killed_s,
        steps=tuple(
            Step(step=event.step, time_s=event.time_s, loss=float.fromhex(event.loss))
            for event in act.steps
        ),
    )


def _since(origin_s: float, timeline: Timeline) -> Timeline:
    """Count all times from ``origin_s``."""
    return replace(
        timeline,
        bars=tuple(
            replace(bar, begin_s=bar.begin_s - origin_s, end_s=bar.end_s - origin_s)
            for bar in timeline.bars
        ),
        processes=tuple(
            Process(
                begin_s=process.begin_s - origin_s,
                end_s=process.end_s - origin_s,
                steps=tuple(replace(step, time_s=step.time_s - origin_s) for step in process.steps),
            )
            for process in timeline.processes
        ),
        moments=tuple(
            replace(moment, time_s=moment.time_s - origin_s) for moment in timeline.moments
        ),
    )
