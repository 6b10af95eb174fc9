"""Lines of saving: which checkpoints the present line of a run continues, and which ones it left behind.

Attempt A that started from step s makes every step above s of earlier attempts abandoned, from A's first commit on:
they are listed, never chosen by themselves, and collected once the new line is as safe as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierfall.core.values import CheckpointId


def abandoned(
    lines: Iterable[tuple[CheckpointId, CheckpointId | None]],
) -> frozenset[CheckpointId]:
    """Return the abandoned ones among (checkpoint, started_from) pairs."""
    known = list(lines)
    starts: dict[int, int] = {}
    for checkpoint, started_from in known:
        start = -1 if started_from is None else started_from.step
        starts[checkpoint.attempt] = min(start, starts.get(checkpoint.attempt, start))
    gone = set()
    for checkpoint, _ in known:
        if any(a > checkpoint.attempt and checkpoint.step > s for a, s in starts.items()):
            gone.add(checkpoint)
    return frozenset(gone)
