"""What a failure would cost now, as its trainer says it, or as a command can know it without one: in words, and for
programs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from tierfall.cli.common import readable_number
from tierfall.core.types.units import format_duration
from tierfall.core.types.values import LOSS_CLASSES, CheckpointId, LossClass
from tierfall.core.types.view import LossBound, View
from tierfall.policies.forecast import loss_bounds
from tierfall.telemetry.status import LossStatus, Status


def known_bounds(view: View) -> dict[LossClass, LossBound]:
    """Say what would be lost, counted from the newest step that is anywhere: where training is, is not known."""
    steps = [c.id.step for c in view.checkpoints if c.live and any(map(c.readable_on, c.copies))]
    return loss_bounds(view, step=max(steps, default=None))


def reported_bounds(status: Status) -> dict[LossClass, LossBound]:
    """Read what a trainer says, which knows where training is and how fast its tiers are read."""
    return {lost: _read_bound(status.loss_bound.get(lost)) for lost in LOSS_CLASSES}


def _read_bound(found: LossStatus | None) -> LossBound:
    if found is None:
        return LossBound(survives=None)
    return LossBound(
        survives=CheckpointId(found.step, found.attempt),
        tier=found.tier,
        steps_lost=found.steps_lost,
        seconds_lost=readable_number(found.seconds_lost),
        restore_s=readable_number(found.restore_s),
    )


def read_back(bound: LossBound) -> str:
    """Say what survives, where, and how long it takes to read back."""
    if bound.survives is None:
        return "nothing"
    where = f"{bound.survives} on {bound.tier}"
    if bound.restore_s is not None:
        where += f", read back in {format_duration(bound.restore_s)}"
    return where


def lost_and_read_back(bound: LossBound) -> str:
    """Say as well how far training is past it, as its trainer knows."""
    if bound.survives is None or bound.steps_lost is None:
        return read_back(bound)
    ago = "" if bound.seconds_lost is None else f" ({format_duration(bound.seconds_lost)})"
    steps = f"{bound.steps_lost} step{'' if bound.steps_lost == 1 else 's'}"
    return f"{read_back(bound)}, {steps}{ago} lost"


def format_bounds(
    bounds: Mapping[LossClass, LossBound],
    unread: Collection[str] = (),
    *,
    what: Callable[[LossBound], str] = read_back,
) -> str:
    """Say it in one line."""
    said = [f"of the {lost}, {what(bound)}" for lost, bound in bounds.items()]
    doubt = f" (not asked: {', '.join(unread)})" if unread else ""
    return f"survives the loss {'; '.join(said)}{doubt}"
