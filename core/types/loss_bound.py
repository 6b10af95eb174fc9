"""What a failure would cost now: a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tierfall.core.types.values import CheckpointId, LossClass


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBound:
    """What one kind of failure would cost if it came now.

    ``survives`` is the newest checkpoint that would still be there, on ``tier``, the fastest that would have it; None:
    nothing would, and all is lost. ``steps_lost`` are those from it to the last step that ``save`` or ``maybe_save``
    saw, ``seconds_lost`` the training time that they took; ``restore_s`` is how long reading it back takes at the rate
    that was measured. None is what is not known yet.
    """

    survives: CheckpointId | None
    tier: str | None = None
    steps_lost: int | None = None
    seconds_lost: float | None = None
    restore_s: float | None = None


def newest_surviving(bounds: Mapping[LossClass, LossBound]) -> dict[LossClass, int | None]:
    """Return the newest step that survives each loss."""
    return {lost: b.survives.step if b.survives else None for lost, b in bounds.items()}
