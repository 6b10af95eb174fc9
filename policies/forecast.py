"""Forecast: whether a tier keeps up with the saves, and what each loss class would cost. Pure: rates are arguments."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import takewhile

from tierfall.core.types.lineage import first_good
from tierfall.core.types.units import format_count, format_duration, format_rate, format_size
from tierfall.core.types.values import LOSS_CLASSES, CheckpointId, LossClass, TierKind
from tierfall.core.types.view import (
    CheckpointView,
    LossBound,
    NodeLosses,
    PeerSurvival,
    TierRules,
    View,
)

HOUR_S = 3600.0
SAVES_MIN = 8
"""No warning before this many saves: the first ones of a run are not at its cadence."""
STRETCHES_MIN = 3
WAITING_MIN = 2
MARGIN = 1.1
"""A tier whose rate is less than a tenth below what is needed may keep up: measurements are not that exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogForecast:
    """By how many checkpoints a tier falls behind in an hour of this cadence (0: it keeps up; None: its rate or the
    cadence is not known), and the warning (None: none)."""

    behind: float | None = None
    warning: str | None = None


def forecast(
    tier: TierRules,
    *,
    saves: int,
    every_s: float,
    bytes: int,
    bytes_per_s: float | None,
    stretches: int,
    waiting: int,
) -> BacklogForecast:
    """Forecast the backlog of a tier. It warns only after enough saves and measurements, beyond their error, and with
    copies waiting already.

    There were ``saves`` saves, ``every_s`` seconds of training apart, of ``bytes`` each. ``bytes_per_s`` is the rate of
    copies (None: not measured yet), over ``stretches`` measurements; the tier is owed ``waiting`` copies now.
    """
    if bytes_per_s is None or every_s <= 0 or bytes <= 0:
        return BacklogForecast()
    due_s = every_s * tier.flush_every
    needed_bytes_per_s = bytes / due_s
    missing = (needed_bytes_per_s - bytes_per_s) / bytes
    behind = max(0.0, missing * HOUR_S)
    is_certain = (
        saves >= SAVES_MIN
        and stretches >= STRETCHES_MIN
        and waiting >= WAITING_MIN
        and needed_bytes_per_s > MARGIN * bytes_per_s
    )
    if not is_certain:
        return BacklogForecast(behind=behind)
    return BacklogForecast(
        behind=behind,
        warning=f"at this cadence {tier.name} is {format_count(behind)} checkpoints behind in an hour: one of "
        f"{format_size(bytes)} comes every {format_duration(due_s)}, which takes "
        f"{format_rate(needed_bytes_per_s)}, and {tier.name} takes {format_rate(bytes_per_s)}. Save less often, "
        "flush fewer to it (flush.every), or raise its bandwidth; once memory is full of copies that it is owed, "
        "when_full decides what saves do",
    )


def loss_bounds(
    view: View,
    *,
    step: int | None = None,
    step_s: float | None = None,
) -> dict[LossClass, LossBound]:
    """Return for each loss class the newest step that survives, its cost, and the tier and time of its restore.

    ``step`` is the current one of training (None: unknown), ``step_s`` its duration in seconds.
    """
    return {lost: _bound(view, lost, step, step_s) for lost in LOSS_CLASSES}


def peer_survival(
    view: View, attempt: int, losses: NodeLosses, *, copied: Collection[CheckpointId] = ()
) -> PeerSurvival | None:
    """Return which losses of nodes the newest checkpoint in peer memory survives; None while nothing that ``attempt``
    saved, or has ``copied``, is committed there. Other images of an earlier attempt may have lost holders since.

    ``losses`` are the chances by the placement of its copies. Whether an image has left host memory is known of the
    view's own node, and taken to be so on all.
    """
    kinds = {tier.kind: tier.name for tier in view.tiers}
    peers, host = kinds.get(TierKind.PEER, ""), kinds.get(TierKind.HOST, "")
    known = [c for c in view.checkpoints if c.id.attempt == attempt or (c.id in copied and c.live)]
    there = (checkpoint for checkpoint in known if checkpoint.readable_on(peers))
    newest = max(there, key=lambda checkpoint: checkpoint.id, default=None)
    if newest is None:
        return None
    chances = losses.whole if newest.readable_on(host) else losses.copies
    certain = takewhile(lambda chance: chance.exact and chance.probability == 1, chances)
    return PeerSurvival(
        tier=peers,
        step=newest.id.step,
        attempt=newest.id.attempt,
        certain=len(tuple(certain)),
        chances=chances,
    )


def _bound(view: View, lost: LossClass, step: int | None, step_s: float | None) -> LossBound:
    found = _newest_surviving(view, lost)
    if found is None:
        return LossBound(survives=None)
    checkpoint, tier = found
    steps_lost = None if step is None else max(0, step - checkpoint.id.step)
    rate = view.read_bytes_per_s.get(tier.name)
    image_bytes = max(copy.bytes for copy in checkpoint.copies.values())
    return LossBound(
        survives=checkpoint.id,
        tier=tier.name,
        steps_lost=steps_lost,
        seconds_lost=None if steps_lost is None or step_s is None else steps_lost * step_s,
        restore_seconds=image_bytes / rate if rate else None,
    )


def _newest_surviving(view: View, lost: LossClass) -> tuple[CheckpointView, TierRules] | None:
    """Return the live checkpoint that a restore takes after a loss, the newest but for those with NaN, and the fastest
    tier that has it then."""
    tiers = [tier for tier in view.tiers if tier.survives.covers(lost)]

    def fastest(checkpoint: CheckpointView) -> TierRules | None:
        return next((tier for tier in tiers if checkpoint.readable_on(tier.name)), None)

    held = (checkpoint for checkpoint in view.live if fastest(checkpoint))
    checkpoint = next(held, None)
    if checkpoint is not None and checkpoint.not_finite:
        left = [checkpoint, *held]
        checkpoint = left[first_good(left)]
    tier = checkpoint and fastest(checkpoint)
    return (checkpoint, tier) if checkpoint and tier else None
