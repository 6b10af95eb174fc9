"""Lines of saving: which checkpoints the present line of a run continues, and which ones it left behind.

Attempt A that started from step s makes every step above s of earlier attempts abandoned, from A's first commit on:
they are listed, never chosen by themselves, and collected once the new line is as safe as they are. That stays so when
A's own checkpoints are gone: tiers record how each attempt began that has committed something there.

Two starts that could not see each other's tiers may have taken the same number. Then one of them counts, and what the
other has saved is abandoned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from tierfall.core.types.values import CheckpointId

Key = tuple[int, str]
"""An attempt's number and id: the number alone may have been taken twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStart:
    """How an attempt began that has committed something: from which checkpoint (None: anew), and when, by its own
    clock, in seconds since 1970. ``passed_over``: another attempt of this number counts."""

    attempt: int
    attempt_id: str
    started_from: CheckpointId | None
    began_s: float
    passed_over: bool = False

    @property
    def key(self) -> Key:
        return self.attempt, self.attempt_id

    @property
    def step(self) -> int:
        """The step above which it leaves everything behind."""
        return -1 if self.started_from is None else self.started_from.step


def merge_starts(starts: Iterable[AttemptStart]) -> dict[Key, AttemptStart]:
    """Make one of all that is known of an attempt."""
    merged: dict[Key, AttemptStart] = {}
    for start in starts:
        there = merged.setdefault(start.key, start)
        if there is not start and there != start:
            merged[start.key] = replace(
                min(there, start, key=lambda one: (one.step, str(one.started_from))),
                began_s=min(there.began_s, start.began_s),
                passed_over=there.passed_over or start.passed_over,
            )
    return merged


def resolve(
    starts: Iterable[AttemptStart], saved: Iterable[tuple[CheckpointId, str]]
) -> tuple[AttemptStart, ...]:
    """Decide, where attempts share a number, which of them counts. ``saved`` are the checkpoints that are there, each
    with its attempt's id.

    What a later attempt went on from counts. Where none did, the one that began last counts: that goes by the clocks of
    two machines, and may be wrong. Nothing is deleted by that alone, since an abandoned line goes only once a later
    attempt has committed something (``policies.protection``).
    """
    merged = merge_starts(starts)
    of_number: dict[int, list[AttemptStart]] = {}
    for start in merged.values():
        of_number.setdefault(start.attempt, []).append(start)
    if len(of_number) == len(merged):
        return tuple(merged.values())
    held = set(saved)
    for number in sorted(of_number, reverse=True):
        rivals = [start for start in of_number[number] if not start.passed_over]
        if len(rivals) < 2:
            continue
        counts = _continued(rivals, merged, held) or max(
            rivals, key=lambda start: (start.began_s, start.attempt_id)
        )
        for start in rivals:
            if start is not counts:
                merged[start.key] = replace(start, passed_over=True)
    return tuple(merged.values())


def overtaken_starts(
    starts: Iterable[AttemptStart], *, above: int
) -> tuple[tuple[AttemptStart, AttemptStart], ...]:
    """Return the starts that began, by their clocks, after the one of the highest number, each with that one; not those
    that it goes on from.

    A start takes a number above all that it sees, so such a one did not see the other's tiers. The highest number is
    ``above`` those of starts that see all tiers then: else only clocks disagree.
    """
    known = [start for start in starts if not start.passed_over]
    newest = max(known, key=lambda start: start.attempt, default=None)
    if newest is None or newest.attempt <= above:
        return ()
    of_number = {start.attempt: start for start in known}
    line = {newest.attempt}
    start: AttemptStart | None = newest
    while start is not None and start.started_from is not None:
        number = start.started_from.attempt
        line.add(number)
        start = of_number.get(number) if number < start.attempt else None
    return tuple(
        (start, newest)
        for start in known
        if start.attempt not in line and start.began_s > newest.began_s
    )


def _continued(
    rivals: list[AttemptStart],
    merged: Mapping[Key, AttemptStart],
    held: set[tuple[CheckpointId, str]],
) -> AttemptStart | None:
    """Return the one that the newest later attempt went on from, if only one has the step that it started from."""
    later = [
        start.started_from
        for start in sorted(merged.values(), key=lambda start: start.attempt, reverse=True)
        if start.started_from is not None and not start.passed_over
        if start.started_from.attempt == rivals[0].attempt < start.attempt
    ]
    for checkpoint in later:
        having = [start for start in rivals if (checkpoint, start.attempt_id) in held]
        if len(having) == 1:
            return having[0]
    return None


def abandoned(
    checkpoints: Iterable[tuple[CheckpointId, str | None]], starts: Iterable[AttemptStart]
) -> frozenset[CheckpointId]:
    """Return the abandoned ones of ``checkpoints``, each with its attempt's id; ``starts`` are resolved."""
    is_left = abandoned_by(starts)
    return frozenset(checkpoint for checkpoint, id in checkpoints if is_left(checkpoint, id))


def abandoned_by(
    starts: Iterable[AttemptStart],
) -> Callable[[CheckpointId, str | None], bool]:
    """Return what says of a checkpoint, by its attempt's id, whether these ``starts`` have abandoned it."""
    known = list(starts)
    passed_over = {start.key for start in known if start.passed_over}
    least: dict[int, int] = {}
    for start in known:
        if start.key not in passed_over:
            least[start.attempt] = min(start.step, least.get(start.attempt, start.step))
    numbers = sorted(least)
    floors = [least[number] for number in numbers]
    for i in reversed(range(len(floors) - 1)):
        floors[i] = min(floors[i], floors[i + 1])  # what any attempt from here on leaves behind

    def is_left(checkpoint: CheckpointId, attempt_id: str | None) -> bool:
        later = bisect_right(numbers, checkpoint.attempt)
        is_above = later < len(numbers) and checkpoint.step > floors[later]
        return is_above or (checkpoint.attempt, attempt_id) in passed_over

    return is_left
