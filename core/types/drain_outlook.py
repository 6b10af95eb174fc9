"""What a drain says of each copy that is on its way, or waits: whether it will be there in time, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tierfall.core.types.values import CheckpointId


class ArrivalOutlook(StrEnum):
    """Whether a copy will have arrived at the deadline: it will, it will not, or nobody can say."""

    ARRIVES = "arrives"
    TOO_LATE = "too_late"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainDecision:
    """What a drain does with one copy, and why. ``left_bytes`` are still to come; ``goes``: it may begin, or go on;
    ``gives_way``: it was begun, and is taken back for one that can still arrive."""

    checkpoint: CheckpointId
    tier: str
    prospect: ArrivalOutlook
    left_bytes: int
    goes: bool
    reason: str
    gives_way: bool = False
