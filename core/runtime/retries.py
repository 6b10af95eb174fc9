"""How long to wait between two tries of what a store refuses."""

from __future__ import annotations

FIRST_S = 0.5
LONGEST_S = 60.0
LONGEST_BEFORE_DEADLINE_S = 2.0


def wait_s(failures: int, *, has_deadline: bool = False) -> float:
    """Return the seconds until the next try after so many consecutive failures."""
    return min(FIRST_S * 2.0 ** min(failures - 1, 30), longest_s(has_deadline=has_deadline))


def longest_s(*, has_deadline: bool) -> float:
    """Return the longest wait between two tries; ``has_deadline``: the next one may be the last chance."""
    return LONGEST_BEFORE_DEADLINE_S if has_deadline else LONGEST_S
