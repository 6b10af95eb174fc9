"""What the coordinator's components share, and their events, with the time of the coordinator's clock. The event log
has them, and the figures of a run count them.

Belongs to the coordinator's thread and does no I/O: the receiver of an event must return at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierfall.core.flush.facts import LedgerEntry
from tierfall.core.flush.tasks import DeleteCopy
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.types import events
from tierfall.core.types.events import Notify
from tierfall.core.types.values import CheckpointId, SaveOutcome

if TYPE_CHECKING:
    from tierfall.core.flush.coordinator import Coordinator

logger = logging.getLogger("tierfall")

REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class _Copying:
    """When a copy began, and what its lane had read from each source by then."""

    id: CheckpointId
    since_s: float
    read: dict[str, int]


class EventEmitter:
    """The coordinator sets ``now_s`` at the start of each step."""

    def __init__(self, notify: Notify = events.ignore) -> None:
        self._notify = notify
        self.now_s = 0.0
        self._saves: dict[CheckpointId, float] = {}
        self._ended: dict[CheckpointId, float] = {}
        self._copies: dict[str, _Copying] = {}

    def emit(
        self, kind: Callable[..., events.Event], *, reason: object = None, **facts: object
    ) -> None:
        """Emit an event of this step; ``reason`` is a text or an error."""
        if reason is not None:
            facts["reason"] = str(reason) or repr(reason)
        self._notify(kind(at_s=self.now_s, **facts))

    # Saves -------------------------------------------------------------------------------------------

    def save_begun(self, entry: LedgerEntry) -> None:
        began_s = self.now_s if entry.handle is None else entry.handle.began_s
        self._remember(self._saves, entry.id, began_s)
        self.emit(
            events.SaveBegun,
            id=entry.id,
            bytes=image_bytes_of(entry),
            lazy_bytes=entry.snapshot.lazy_bytes if entry.snapshot is not None else 0,
            tiers=tuple(sorted(entry.owed)),
        )

    def captured(self, entry: LedgerEntry) -> None:
        stats = entry.handle.stats if entry.handle is not None else None
        self.emit(
            events.Captured,
            id=entry.id,
            bytes=image_bytes_of(entry),
            seconds=self.now_s - self._saves.get(entry.id, self.now_s),
            blocked_s=stats.blocked_s if stats else 0.0,
            lazy=stats.lazy if stats else False,
        )

    def save_ended(self, id: CheckpointId, outcome: SaveOutcome, error: BaseException) -> None:
        """Emit the end of a save once: at the first report of any component."""
        self._saves.pop(id, None)
        if id in self._ended:
            return
        self._remember(self._ended, id, self.now_s)
        self.emit(events.SaveEnded, id=id, outcome=outcome, reason=error)

    def _remember(self, times: dict[CheckpointId, float], id: CheckpointId, at_s: float) -> None:
        times[id] = at_s
        if len(times) > REMEMBERED:
            del times[next(iter(times))]

    # Copies ------------------------------------------------------------------------------------------

    def flush_begun(
        self, tier: str, entry: LedgerEntry, read: Mapping[str, int], *, tries: int
    ) -> None:
        """A copy begins, after ``tries`` failures of its tier; ``read`` has the bytes read from each source so far."""
        self._copies[tier] = _Copying(entry.id, self.now_s, dict(read))
        self.emit(
            events.FlushBegun,
            id=entry.id,
            tier=tier,
            bytes=image_bytes_of(entry),
            tries=tries,
        )

    def flush_done(self, tier: str, entry: LedgerEntry, read: Mapping[str, int]) -> None:
        """A copy is uploaded; ``read`` is as in ``flush_begun``."""
        begun = self._copies.get(tier, _Copying(entry.id, self.now_s, {}))
        sources = {
            source: count - begun.read.get(source, 0)
            for source, count in read.items()
            if count > begun.read.get(source, 0)
        }
        self.emit(
            events.FlushDone,
            id=entry.id,
            tier=tier,
            bytes=image_bytes_of(entry),
            seconds=self.now_s - begun.since_s,
            sources=sources,
        )

    def flush_failed(self, tier: str, id: CheckpointId, error: BaseException) -> None:
        """A copy, or its commit record, could not be written."""
        begun = self._copies.get(tier)
        since_s = begun.since_s if begun is not None and begun.id == id else self.now_s
        self.emit(
            events.FlushFailed,
            id=id,
            tier=tier,
            reason=error,
            seconds=self.now_s - since_s,
        )

    def committed(self, tier: str, id: CheckpointId, bytes: int) -> None:
        since_s = self._saves.get(id)
        self.emit(
            events.Committed,
            id=id,
            tier=tier,
            bytes=bytes,
            seconds=None if since_s is None else self.now_s - since_s,
        )

    # Leaving -----------------------------------------------------------------------------------------

    def deleted(self, task: DeleteCopy, bytes: int, seconds: float) -> None:
        logger.info("%s: %s is deleted: %s", task.tier, task.id, task.reason)
        self.emit(
            events.Dropped,
            id=task.id,
            tier=task.tier,
            bytes=bytes,
            reason=task.reason,
            seconds=seconds,
            unfinished=task.unfinished,
        )


def image_bytes_of(entry: LedgerEntry) -> int:
    """Return the bytes of this rank's image; 0 while unknown."""
    if entry.geometry is not None:
        return entry.geometry.image_bytes
    return entry.commit.image_bytes if entry.commit is not None else 0


class Component:
    """A component of the coordinator, which it reaches the others by."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._planner = coordinator
        self._lanes = coordinator.lanes
        self._ledger = coordinator.ledger
        self._group = coordinator.ledger.group
        self._messages = coordinator.messages
        self._emitter = coordinator.emitter
        self._dispatch = coordinator.dispatch
        self._wake_at = coordinator.wake_at
        self._conditions = Conditions()
