"""Room on a stored tier for the next copy: what is evicted or given up for it, and when a copy has to wait.

The policies decide; rank 0 decides for all ranks. No I/O: the deleter dispatches evictions as tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from tierfall.core.runtime import retries
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.flush.lane import FlushLane
from tierfall.core.scheduler.flush.queue import FlushQueue
from tierfall.core.scheduler.ledger.emitter import image_bytes_of
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.types.errors import CapacityError, StorageFullError
from tierfall.core.types.text import format_some
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.core.types.view import Decision, Eviction, View
from tierfall.policies.backpressure import plan_relief
from tierfall.policies.eviction import plan_eviction

logger = logging.getLogger("tierfall")
FITTING_UNTIL_ROOM = 3
"""A disk has room again once so many copies in a row were written without a deletion: images differ in size."""


@dataclass(slots=True)
class FullDisk:
    """A tier's disk, from the first write that found no space until it has room again. ``error`` is that of the last
    such write, ``deleted`` are the copies deleted for room, ``fitting`` counts the copies written since."""

    error: StorageFullError
    deleted: list[CheckpointId] = field(default_factory=list)
    fitting: int = 0


@dataclass(frozen=True, slots=True)
class RoomDecision:
    """Whether a copy may begin now. If not: ``error`` says that no room can be made, ``never`` that none ever can;
    without an error, the copy waits."""

    admitted: bool
    error: CapacityError | None = None
    never: bool = False


ADMIT, WAIT = RoomDecision(True), RoomDecision(False)


class TierRoom:
    """See the module."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        lanes: Mapping[str, FlushLane],
        deleter: Deleter,
        queue: FlushQueue,
        hooks: Hooks,
    ) -> None:
        self._ledger = ledger
        self._lanes = lanes
        self._deleter = deleter
        self._queue = queue
        self._hooks = hooks
        self._full: dict[str, FullDisk] = {}

    def on_disk_full(self, lane: FlushLane, error: StorageFullError) -> None:
        """A copy to a tier found no space on its disk."""
        lane.disk_full = True
        full = self._full.setdefault(lane.tier, FullDisk(error))
        full.error, full.fitting = error, -1  # that copy, once it is written, needed a deletion

    def on_committed(self, tier: str) -> None:
        """A copy was committed on a tier: log that its disk has room again, where that is so."""
        if tier not in self._full:
            return
        self._full[tier].fitting += 1
        if self._full[tier].fitting == FITTING_UNTIL_ROOM and (
            deleted := self._full.pop(tier).deleted
        ):
            logger.warning(
                "tier %s is not full any more: the last %d checkpoints needed no deletion. Deleted before: %s",
                tier, FITTING_UNTIL_ROOM, format_some([str(id) for id in deleted]),
            )  # fmt: skip

    def try_admit(self, lane: FlushLane, entry: LedgerEntry) -> RoomDecision:
        """Decide whether a copy may begin; start the evictions that it needs."""
        if self._deleter.paused or self._deleter.is_deleting(lane.tier):
            return WAIT
        if not self._hooks.group.decides and not lane.disk_full:
            return ADMIT  # rank 0 has made room already
        rules = self._ledger.rules_of(lane.tier)
        capacity = rules.capacity_bytes
        need, free = self._need_and_free(lane, entry, capacity)
        if capacity is not None and need > capacity:
            return RoomDecision(False, _outgrown(lane.tier, entry, need, capacity), never=True)
        if free >= need and (capacity is None or not rules.is_high(capacity - free + need)):
            return ADMIT
        view = self._ledger.view()
        if free < need and not self._ledger.many_ranks and self._collect_unfinished(lane, entry):
            return WAIT
        plan = self._plan(view, lane, need=need, free=free)
        if self._hooks.group.decides and self._gives_way(view, plan, lane, entry, need, free):
            return WAIT
        return self._apply(plan, lane, entry, need=need, free=free)

    def _plan(self, view: View, lane: FlushLane, *, need: int, free: int) -> Eviction:
        """Return what is evicted for a copy, damaged copies first."""
        damaged = self._damaged_for_room(view, lane, need - free)
        plan = plan_eviction(
            view, lane.tier, need_bytes=need, free_bytes=free + sum(d.bytes for d in damaged)
        )
        plan = replace(plan, deletions=(*damaged, *plan.deletions))
        if lane.disk_full and plan.deletions:
            # a full disk does not say how much is missing: evict one copy, then try again
            return Eviction(deletions=plan.deletions[:1], missing_bytes=0)
        return plan

    def _gives_way(
        self, view: View, plan: Eviction, lane: FlushLane, entry: LedgerEntry, need: int, free: int
    ) -> bool:
        """Return whether newer copies on the tier leave this one no room, so that it is given up. It waits while older
        ones may be evicted for it once a copy there is verified."""
        displaces_newer = partial(self._queue.displaces_newer, lane.tier, entry, fits=free >= need)
        if not displaces_newer(plan):
            return False
        best = self._plan(replace(view, assume_verified=True), lane, need=need, free=free)
        if displaces_newer(best) or not self._hooks.is_verifying(lane.tier):
            reason = "newer ones came first, and there is no room beside them"
            self._queue.give_up(entry, lane.tier, reason)
        return True

    def _damaged_for_room(self, view: View, lane: FlushLane, short_bytes: int) -> list[Decision]:
        """Return the damaged copies to evict where ``short_bytes`` are missing, before any good copy."""
        chosen: list[Decision] = []
        for decision in self._deleter.damaged_for_room(view, lane.tier)[0]:
            if short_bytes <= 0:
                break
            chosen.append(decision)
            short_bytes -= decision.bytes
        return chosen

    def _apply(
        self, plan: Eviction, lane: FlushLane, entry: LedgerEntry, *, need: int, free: int
    ) -> RoomDecision:
        """Carry out an eviction plan. A copy that fits begins at once; evictions that only restore the low watermark
        run meanwhile."""
        tier, decides = lane.tier, self._hooks.group.decides
        fits = free >= need
        if self._deleter.rules_are_suspended and plan.deletions:
            return (
                ADMIT if fits else WAIT
            )  # nothing is evicted before it is known which copies are good
        if plan.deletions and decides and plan.missing_bytes == 0:
            return ADMIT if not self._evict(plan, lane) and fits else WAIT
        if fits:
            return ADMIT  # above the high watermark, and nothing more may be evicted
        if decides and self._hooks.is_verifying(tier):
            return WAIT  # once that is verified, others may be evicted
        if decides and self._relieve(lane, plan.missing_bytes):
            return WAIT
        return RoomDecision(False, self._no_room(lane, entry, need, max(free, 0)))

    def _evict(self, plan: Eviction, lane: FlushLane) -> bool:
        """Start the evictions; return False where they have to wait."""
        ids = [decision.checkpoint for decision in plan.deletions]
        if not self._deleter.is_due(lane.tier):
            return False
        for decision in plan.deletions:
            begun = self._deleter.request_delete(
                lane.tier, decision.checkpoint, decision.reason, beside=ids
            )
            if begun and lane.disk_full:
                self._log_deleted_for_disk(lane.tier, decision)
        lane.disk_full = False
        return True

    def _log_deleted_for_disk(self, tier: str, decision: Decision) -> None:
        """Log the first copy that is deleted because a disk is full, and which ones are kept."""
        full = self._full[tier]
        full.deleted.append(decision.checkpoint)
        if len(full.deleted) > 1:
            return
        entries = self._ledger.entries
        newest_first = map(entries.peek, entries.ids(newest_first=True))
        kept = [str(e.id) for e in newest_first if e.state(tier) is CopyState.COMMITTED]
        logger.warning(
            "tier %s is full, and deletes older checkpoints for each new one. Deleted: %s (%s). Kept: %s. Later "
            "deletions are logged at level INFO. Free space there, keep fewer checkpoints (retain), or use a larger "
            "disk. The write that failed: %s",
            tier, decision.checkpoint, decision.reason, format_some(kept) or "none", full.error,
        )  # fmt: skip

    def _need_and_free(
        self, lane: FlushLane, entry: LedgerEntry, capacity: int | None
    ) -> tuple[int, int]:
        """Return the bytes that a copy of all ranks is expected to occupy, and those available to it."""
        need = self._expected_bytes(lane.tier, entry)
        free = need if capacity is None else capacity - self._ledger.used_bytes(lane.tier)
        free += self._ledger.unfinished.get((lane.tier, entry.id), 0)  # it is overwritten
        if lane.disk_full:
            free = min(free, 0)
        if free >= need and capacity is not None:
            free += self._ledger.bytes_being_deleted(
                lane.tier
            )  # a deletion that failed counts as done
        return need, free

    def _expected_bytes(self, tier: str, entry: LedgerEntry) -> int:
        """Return the bytes that a copy is expected to occupy: on a tier that compresses, scaled by the ratio of the
        newest copy there; before there is one, those of its images."""
        raw_bytes, entries = self._raw_bytes(tier, entry), self._ledger.entries
        newest_first = map(entries.peek, entries.ids(newest_first=True))
        committed = (e for e in newest_first if e.state(tier) is CopyState.COMMITTED)
        newest = next(committed, None)
        if newest is None or not (newest_bytes := newest.bytes.get(tier, 0)):
            return raw_bytes
        # what peer memory keeps here may be images of other ranks alone
        newest_raw_bytes = self._raw_bytes(tier, newest) or newest_bytes
        return min(raw_bytes, -(-raw_bytes * newest_bytes // newest_raw_bytes))

    def _raw_bytes(self, tier: str, entry: LedgerEntry) -> int:
        """Return the bytes of all images of a checkpoint that this rank sees on a tier."""
        return image_bytes_of(entry) * self._hooks.group.ranks_on(tier)

    def _collect_unfinished(self, lane: FlushLane, entry: LedgerEntry) -> bool:
        """Delete what failed attempts left of other checkpoints; return whether any deletion began. Without this the
        later copy would wait for this one, and this one for its room."""
        unfinished = [id for tier, id in self._ledger.unfinished if tier == lane.tier]
        why = "it was left unfinished, and room is needed"
        others = [id for id in unfinished if id != entry.id]
        return any([self._deleter.collect_unfinished(lane.tier, id, why) for id in others])

    def _relieve(self, lane: FlushLane, missing_bytes: int) -> bool:
        """Give up what slower tiers are owed of one checkpoint, where their rules permit it and that makes room."""
        entries = self._ledger.entries
        settling = {e.id for e in self._ledger.open() if e.commit_unknown_on or e.uploaded_to}
        settling |= {other.active.entry.id for other in self._lanes.values() if other.active}
        view = self._ledger.view(settling=settling, restoring=self._deleter.paused)
        decisions = plan_relief(view, lane.tier, missing_bytes=missing_bytes)
        for decision in decisions:
            entry, reason = entries[decision.checkpoint], decision.reason
            self._queue.give_up(entry, decision.tier, reason, level=logging.WARNING)
        return bool(decisions)

    def _no_room(self, lane: FlushLane, entry: LedgerEntry, need: int, free: int) -> CapacityError:
        every_s = retries.longest_s(has_deadline=self._hooks.has_deadline())
        then = f"it is tried again when room is made, and every {every_s:g} s"
        if self._ledger.many_ranks:
            then = "all ranks give it up there"
        found = f"there is room for {format_size(free)}"
        if lane.disk_full:
            found = f"the disk is full ({self._full[lane.tier].error})"
        _, damaged = self._deleter.damaged_for_room(self._ledger.view(), lane.tier)
        kept = ""
        if damaged:
            named = format_some([str(id) for id in damaged])
            kept = f" Damaged, and not deleted without a command: {named}."
        return CapacityError(
            f"flush of {entry.id} to {lane.tier}: it needs {format_size(need)}, {found}, and nothing more may be "
            f"deleted there; {then}.{kept} Raise the capacity, keep fewer checkpoints (retain), unpin some, free "
            "the disk, or remove one ('tierfall rm ID')"
        )


def _outgrown(tier: str, entry: LedgerEntry, need: int, capacity: int) -> CapacityError:
    return CapacityError(
        f"flush of {entry.id} to {tier}: it takes {format_size(need)} ({need} bytes) there, and the tier's capacity is "
        f"{format_size(capacity)} ({capacity} bytes): it is left out. Raise the capacity, or take the tier out of the "
        "chain"
    )
