"""Which checkpoints the newest attempt of a run continues, and which are abandoned.

From the first commit of an attempt that started from step s, every step above s of earlier attempts is abandoned:
listed, never chosen automatically, and deleted once the new lineage is as safe. Each tier records the start of every
attempt that committed there, so this remains true after the attempt's own checkpoints are deleted.

Two starts that could not see each other's tiers may use the same attempt number. One of them counts; the checkpoints
of the other are abandoned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from tierfall.core.types.values import CheckpointId

Key = tuple[int, str]
"""An attempt's number and id; the number alone may be used twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStart:
    """The start of an attempt that has committed a checkpoint. ``started_from`` is the checkpoint that it restored
    first (None: none); ``began_s`` is in seconds since 1970 by its own clock. ``passed_over``: another attempt of this
    number counts."""

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
        """The step above which it abandons the checkpoints of earlier attempts."""
        return -1 if self.started_from is None else self.started_from.step


def merge_starts(starts: Iterable[AttemptStart]) -> dict[Key, AttemptStart]:
    """Merge several records of the same attempt: the earliest origin and time apply."""
    merged: dict[Key, AttemptStart] = {}
    for start in starts:
        known = merged.setdefault(start.key, start)
        if known is not start and known != start:
            merged[start.key] = replace(
                min(known, start, key=lambda each: (each.step, str(each.started_from))),
                began_s=min(known.began_s, start.began_s),
                passed_over=known.passed_over or start.passed_over,
            )
    return merged


def resolve(
    starts: Iterable[AttemptStart], saved: Iterable[tuple[CheckpointId, str]]
) -> tuple[AttemptStart, ...]:
    """Decide which attempt counts where several share a number. ``saved`` are the existing checkpoints, each with its
    attempt's id.

    An attempt that a later one continued counts. Without such a one, the attempt that began last counts. That
    compares clocks of two machines and may be wrong; nothing is deleted because of it alone, since an abandoned lineage
    is deleted only once a later attempt has committed (``policies.protection``).
    """
    merged = merge_starts(starts)
    of_number: dict[int, list[AttemptStart]] = {}
    for start in merged.values():
        of_number.setdefault(start.attempt, []).append(start)
    if len(of_number) == len(merged):
        return tuple(merged.values())
    existing = set(saved)
    for number in sorted(of_number, reverse=True):
        rivals = [start for start in of_number[number] if not start.passed_over]
        if len(rivals) < 2:
            continue
        chosen = _continued(rivals, merged, existing) or max(
            rivals, key=lambda start: (start.began_s, start.attempt_id)
        )
        for start in rivals:
            if start is not chosen:
                merged[start.key] = replace(start, passed_over=True)
    return tuple(merged.values())


def _continued(
    rivals: list[AttemptStart],
    merged: Mapping[Key, AttemptStart],
    existing: set[tuple[CheckpointId, str]],
) -> AttemptStart | None:
    """The rival that the newest later attempt continued, if exactly one has the checkpoint that it started from."""
    later = [
        start.started_from
        for start in sorted(merged.values(), key=lambda start: start.attempt, reverse=True)
        if start.started_from is not None and not start.passed_over
        if start.started_from.attempt == rivals[0].attempt < start.attempt
    ]
    for checkpoint in later:
        owners = [start for start in rivals if (checkpoint, start.attempt_id) in existing]
        if len(owners) == 1:
            return owners[0]
    return None


def abandoned_by(
    starts: Iterable[AttemptStart],
) -> Callable[[CheckpointId, str | None], bool]:
    """A predicate of a checkpoint and its attempt's id: whether these resolved ``starts`` abandoned it."""
    known = list(starts)
    passed_over = {start.key for start in known if start.passed_over}
    least: dict[int, int] = {}
    for start in known:
        if start.key not in passed_over:
            least[start.attempt] = min(start.step, least.get(start.attempt, start.step))
    numbers = sorted(least)
    floors = [least[number] for number in numbers]
    for i in reversed(range(len(floors) - 1)):
        floors[i] = min(floors[i], floors[i + 1])  # the lowest of this and all later attempts

    def is_abandoned(checkpoint: CheckpointId, attempt_id: str | None) -> bool:
        later = bisect_right(numbers, checkpoint.attempt)
        is_above = later < len(numbers) and checkpoint.step > floors[later]
        return is_above or (checkpoint.attempt, attempt_id) in passed_over

    return is_abandoned


# NaN and infinities -------------------------------------------------------------------------------------


class Noted(Protocol):
    """A checkpoint; ``not_finite`` names what is NaN or infinite in it."""

    @property
    def id(self) -> CheckpointId: ...

    @property
    def started_from(self) -> CheckpointId | None: ...

    @property
    def not_finite(self) -> frozenset[str]: ...


N = TypeVar("N", bound=Noted)


def gone_bad(checkpoint: Noted, older: Noted) -> frozenset[str]:
    """What is NaN or infinite in a checkpoint and is not in an ``older`` one: so a value that always is does not
    count."""
    return checkpoint.not_finite - older.not_finite if older.id < checkpoint.id else frozenset()


def may_replace(older: Noted, *passed: Noted) -> bool:
    """Whether a restore goes back to an ``older`` checkpoint because of what has ``gone_bad`` since in all that it
    ``passed`` over. It does not go behind the one that a training continued from: who continued from that has accepted
    what was in it."""
    for each in passed:
        start = each.started_from
        if (start is not None and older.id.step < start.step) or not gone_bad(each, older):
            return False
    return True


def first_good(newest_first: Sequence[N], is_good: Callable[[N], bool] = lambda _: True) -> int:
    """The place of the checkpoint that a restart takes: each before it may be replaced by an older one, one that
    ``is_good``."""
    passed: dict[object, Noted] = {}
    older = 0  # the newest that may replace all that are passed over: none before it may replace more of them
    for at, checkpoint in enumerate(newest_first):
        passed[checkpoint.not_finite, checkpoint.started_from] = checkpoint
        while older <= at or not (
            may_replace(newest_first[older], *passed.values()) and is_good(newest_first[older])
        ):
            older += 1
            if older >= len(newest_first) or not checkpoint.not_finite:
                return at
    return 0


def newest_and_first_good(newest_first: Sequence[N]) -> Sequence[N]:
    """Return the newest checkpoint, and the older one that a restart takes because of NaN; none of no checkpoints."""
    return [newest_first[at] for at in {0, first_good(newest_first)} if newest_first]
