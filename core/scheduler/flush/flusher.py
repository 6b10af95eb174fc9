"""Flushing: which copy each lane begins next, and what follows when one is committed, stalls or fails.

Belongs to the coordinator's thread and does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import takewhile

from tierfall.core.runtime import retries
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.flush.backlog import Backlog
from tierfall.core.scheduler.flush.drain_schedule import PreemptedError
from tierfall.core.scheduler.flush.lane import TRIES_BEFORE_REPORT, FlushLane
from tierfall.core.scheduler.flush.queue import FlushQueue
from tierfall.core.scheduler.flush.room import TierRoom
from tierfall.core.scheduler.flush.transfer import Transfer
from tierfall.core.scheduler.ledger.emitter import EventEmitter, image_bytes_of
from tierfall.core.scheduler.ledger.entry import CopyFailures, LedgerEntry
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.types.errors import (
    CapacityError,
    FencedError,
    FlushError,
    LostWriteError,
    StorageFullError,
)
from tierfall.core.types.values import CheckpointId, CopyState

logger = logging.getLogger("tierfall")
ARRIVALS_BEFORE_SET_ASIDE = 8
"""A copy with retryable failures is set aside once it failed again after so many others were committed."""
OLDER_OWED_MAX = 64
"""A commit record names at most so many older checkpoints that are still owed, the newest."""
DURABLE_REMEMBERED = 1024


class Flusher:
    """See the module. ``fenced`` is the error that reports a newer attempt; ``errors`` are reported at close;
    ``durable`` holds the last committed copies (checkpoint, tier), oldest first."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        lanes: Mapping[str, FlushLane],
        deleter: Deleter,
        queue: FlushQueue,
        room: TierRoom,
        backlog: Backlog,
        hooks: Hooks,
        emitter: EventEmitter,
        max_wait_s: float,
    ) -> None:
        self._ledger = ledger
        self._lanes = lanes
        self._deleter = deleter
        self.queue = queue
        self._room = room
        self._backlog = backlog
        self._hooks = hooks
        self._emitter = emitter
        self._max_wait_s = {r.name: r.max_wait_s or max_wait_s for r in ledger.rules}
        self.fenced: FencedError | None = None
        self.errors: list[BaseException] = []
        self.durable: dict[tuple[CheckpointId, str], None] = {}
        self._reported_failing: dict[str, CheckpointId] = {}
        self._conditions = Conditions()

    def drive(self, lane: FlushLane, now_s: float, *, begin: bool, has_news: bool = False) -> None:
        """Advance a lane; ``begin``: another copy may begin. ``has_news``: there may be room for it by now."""
        while True:
            is_due = now_s >= lane.not_before_s
            if is_due and lane.lacks_room:  # a write shows whether the disk is still full
                lane.disk_full = lane.lacks_room = False
            is_due = is_due or (lane.lacks_room and has_news)
            free = lane.active is None and self.fenced is None and is_due
            if free and begin and not self._hooks.group.is_committing_on(lane.tier):
                self._begin_next(lane, now_s)
            if lane.active is None:
                return
            # a save needs memory: read from a stored tier where possible, so that images can be evicted
            lane.spare_memory = self._hooks.memory_is_short()
            others = (other for other in self._lanes.values() if other is not lane)
            lane.advance(now_s, [run for other in others for run in other.reading()])
            transfer = lane.aborted()
            if transfer is None:
                return
            self._on_copy_failed(lane, transfer, now_s)

    def _begin_next(self, lane: FlushLane, now_s: float) -> None:
        waiting = sorted(self.queue.waiting(lane.tier), key=lane.rounds_failed)
        abandoned = self._ledger.abandoned() if waiting else ()
        for entry in waiting:
            if entry.id in abandoned:
                self.queue.give_up(entry, lane.tier, "it is abandoned")
            elif lane.has_no_source(entry):
                error = FlushError(
                    f"flush of {entry.id} to {lane.tier}: no tier has a good copy of it any more"
                )
                self._hooks.group.give_up_copy(entry, lane.tier, error)
            else:
                decision = self._room.try_admit(lane, entry)
                if decision.admitted:
                    lane.lacks_room = False
                    lane.not_before_s = min(lane.not_before_s, now_s)
                    self._begin(lane, entry)
                elif decision.error is not None and decision.never:
                    self.give_up_for_all(entry, lane.tier, decision.error)
                elif decision.error is not None:
                    self._on_no_room(lane, entry, decision.error, now_s)
                if lane.tier in entry.owed:
                    return

    def _begin(self, lane: FlushLane, entry: LedgerEntry) -> None:
        """Begin a copy that has room."""
        self._emitter.flush_begun(lane.tier, entry, lane.edge_bytes, tries=lane.tries)
        lane.begin(entry, leftover=(lane.tier, entry.id) in self._ledger.unfinished)
        self._hooks.group.on_copy_begun(lane.tier, entry)

    def _on_no_room(
        self, lane: FlushLane, entry: LedgerEntry, error: CapacityError, now_s: float
    ) -> None:
        lane.lacks_room = True
        if now_s >= lane.not_before_s:
            # other processes may free room on the disk, or have unpinned a checkpoint
            lane.not_before_s = now_s + retries.longest_s(has_deadline=self._hooks.has_deadline())
            self._deleter.plan_tier(lane.tier)
        if self._ledger.many_ranks:  # they do not wait for one of them
            self._hooks.group.give_up_copy(entry, lane.tier, error)
        else:
            self._report_failing(lane.tier, entry, error)

    def _report_failing(self, tier: str, entry: LedgerEntry, error: BaseException) -> None:
        """Report, once for a copy, that a tier does not accept it at present."""
        last, self._reported_failing[tier] = self._reported_failing.get(tier), entry.id
        is_news = last != entry.id or tier not in self._ledger.failing
        self.mark_failing(tier, error)
        if is_news:
            self._hooks.group.tier_failing(entry, tier, error)

    def mark_failing(self, tier: str, error: BaseException) -> None:
        """A tier does not accept copies at present, of this rank or another: every handle that waits for it reports
        the error."""
        if tier not in self._ledger.failing:
            self._ledger.failing[tier] = error
            self._emitter.tier_failing(tier, error)
            self.errors.append(error)
            self._conditions.report(tier, logging.ERROR, "%s", error)
        for entry in self._ledger.open():
            if tier in entry.owed:
                self._fail_handle(entry, tier)

    def save_begun(self, entry: LedgerEntry) -> None:
        """Report tiers that do not accept copies at present to a new save. Where only one copy has failed since the
        last commit, that copy may be the cause: the new one is tried at once."""
        for tier in entry.owed & self._ledger.failing.keys():
            lane = self._lanes[tier]
            if self._may_be_one_copy(lane):
                lane.not_before_s = min(lane.not_before_s, self._ledger.now_s)
            else:
                self._fail_handle(entry, tier)

    def _fail_handle(self, entry: LedgerEntry, tier: str) -> None:
        if entry.handle is not None:
            entry.handle.on_tier_failed(tier, self._ledger.failing[tier])

    def on_room_made(self, lane: FlushLane, now_s: float) -> None:
        lane.not_before_s = min(lane.not_before_s, now_s)
        if lane.lacks_room:
            self.on_recovered(lane.tier)
        lane.disk_full = lane.lacks_room = False

    def on_recovered(self, tier: str) -> None:
        """A tier accepts copies of this rank again."""
        if not self._hooks.group.is_stuck(tier):
            self._accepts_copies(tier)

    def _accepts_copies(self, tier: str) -> None:
        if self._ledger.failing.pop(tier, None) is not None:
            self._emitter.tier_recovered(tier)
        owed = sum(tier in entry.owed for entry in self._ledger.open())
        text = "tier %s accepts copies again; copies that it is still owed: %d"
        self._conditions.end(tier, text, tier, owed)

    def committed(self, tier: str, id: CheckpointId, stored_bytes: int) -> None:
        """A checkpoint was committed on a tier, where it occupies ``stored_bytes``."""
        entry, lane = self._ledger.entries[id], self._lanes[tier]
        entry.set_state(lane.tier, CopyState.COMMITTED, stored_bytes)
        entry.verified.add(lane.tier)
        if entry.handle is not None:
            self._ledger.has_begun = True
        entry.owed.discard(lane.tier)
        self._ledger.unfinished.pop((lane.tier, id), None)
        entry.commit_unknown_on.discard(lane.tier)
        for fault in (entry.failures, entry.set_aside):
            fault.pop(lane.tier, None)
        entry.overtaken.discard(lane.tier)
        lane.succeeded(entry)
        self._room.on_committed(tier)
        self._accepts_copies(lane.tier)
        self._conditions.end(
            (tier, CapacityError), "tier %s has room for a step again: %s", tier, id
        )
        self._emitter.committed(lane.tier, id, stored_bytes)
        self._emitter.counters.commits[lane.tier] += 1
        self.durable[id, lane.tier] = None
        if len(self.durable) > DURABLE_REMEMBERED:
            del self.durable[next(iter(self.durable))]
        self._deleter.plan_tier(lane.tier)
        self._backlog.on_committed(lane.tier, id)
        if entry.handle is not None:
            entry.handle.on_committed(lane.tier)
        self._hooks.on_committed(lane.tier, entry)

    def _on_copy_failed(self, lane: FlushLane, transfer: Transfer, now_s: float) -> None:
        """A copy failed. It is still owed unless no attempt can succeed; files that it may have left are noted."""
        entry, error = transfer.entry, transfer.error
        assert error is not None
        self._emitter.flush_failed(lane.tier, entry.id, error)
        entry.set_state(lane.tier, CopyState.ABSENT)
        if transfer.published:
            self._ledger.unfinished[lane.tier, entry.id] = image_bytes_of(entry)
            entry.commit_unknown_on.add(lane.tier)
        if lane.tier not in entry.owed:
            if entry.deleted:
                lane.forget_stall()
            self._ledger.forget_if_gone(entry)
            return
        if isinstance(error, PreemptedError):
            logger.info("%s", error)
            return
        if isinstance(error, StorageFullError):
            self._room.on_disk_full(lane, error)
            return
        lane.back_off(entry, error, now_s)
        self._emitter.counters.flush_failures += 1
        if not self._stop_trying(lane, transfer, error):
            self._report_failure(lane, entry, error, now_s)

    def _stop_trying(self, lane: FlushLane, transfer: Transfer, error: BaseException) -> bool:
        """Set aside a copy that fails while the tier receives others, unless its source could not be read; return
        whether that was done."""
        entry = transfer.entry
        failures = entry.failures.setdefault(lane.tier, CopyFailures())
        is_retryable = getattr(error, "retryable", False) or isinstance(error, LostWriteError)
        failures.record(lane.arrivals, lasts=not is_retryable)
        tried = failures.count >= TRIES_BEFORE_REPORT
        others_needed = 1 if failures.lasts else ARRIVALS_BEFORE_SET_ASIDE
        alone = tried and failures.others_arrived >= others_needed and not transfer.source_is_unread
        entry.overtaken.add(lane.tier)
        if alone:
            self._set_aside(entry, lane.tier, error)
        return alone

    def _report_failure(
        self, lane: FlushLane, entry: LedgerEntry, error: BaseException, now_s: float
    ) -> None:
        """Log a failed copy; report the tier as failing where it may be at fault, or has failed for long."""
        failures = entry.failures[lane.tier]
        self._conditions.report(
            lane.tier, logging.WARNING, "flush of %s to %s failed (try %d), again in %.1f s: %s",
            entry.id, lane.tier, failures.count, lane.not_before_s - now_s, error,
        )  # fmt: skip
        lasts = (
            failures.lasts and lane.tries >= TRIES_BEFORE_REPORT and not self._may_be_one_copy(lane)
        )
        if lasts or lane.failing_for_s(now_s) >= self._max_wait_s[lane.tier]:
            self._report_failing(lane.tier, entry, _flush_error(entry, lane.tier, error))

    def _may_be_one_copy(self, lane: FlushLane) -> bool:
        """Return whether all failures since the last commit are of one copy, are not retryable, and another waits."""
        failed = [self._ledger.entries.get(id) for id in lane.failed]
        # it may have been forgotten, and found again on another tier
        failures = failed[0].failures.get(lane.tier) if len(failed) == 1 and failed[0] else None
        if failures is None or not failures.lasts:
            return False
        others = (e for e in self._ledger.open() if e is not failed[0])
        return any(lane.tier in e.owed and lane.tier not in e.uploaded_to for e in others)

    def _set_aside(self, entry: LedgerEntry, tier: str, cause: BaseException) -> None:
        """Stop trying a copy, on all ranks, that fails again and again while the tier receives others."""
        error = FlushError(
            f"flush of {entry.id} to {tier} is set aside: it failed {entry.failures[tier].count} times, and {tier} "
            f"accepts others: {cause}. Fix what prevents it from being written there: the next start tries it again"
        )
        error.__cause__ = cause
        self._hooks.group.set_aside(entry, tier, error)

    def set_aside(self, entry: LedgerEntry, tier: str, error: BaseException) -> None:
        """Stop trying a copy in this start. Commit records of later ones say that it is still owed."""
        entry.set_aside[tier] = error
        entry.overtaken.add(tier)
        entry.owed.discard(tier)
        self._emitter.counters.set_aside_copies += 1
        self._emitter.set_aside(tier, entry.id, error)
        self._report(entry, tier, error)
        self.stop_copy(entry, tier, error)

    def stalled(self, lane: FlushLane, error: BaseException, now_s: float) -> None:
        """A copy could not continue. Its written chunks are kept, and it is retried from there."""
        if lane.stall(now_s):
            assert lane.active is not None
            since_s = now_s - lane.failing_for_s(now_s)
            until_s = lane.not_before_s
            self.note_stall(lane.tier, lane.active.entry, error, since_s, until_s)

    def note_stall(
        self,
        tier: str,
        entry: LedgerEntry,
        error: BaseException,
        since_s: float,
        until_s: float,
    ) -> None:
        """A tier has accepted nothing of a copy, or of its commit record, since ``since_s``; the next try is
        at ``until_s``."""
        now_s = self._ledger.now_s
        self._emitter.flush_stalled(tier, entry.id, error, until_s)
        self._emitter.counters.flush_failures += 1
        self._conditions.report(
            tier, logging.WARNING, "flush of %s to %s stalls, and continues in %.1f s: %s",
            entry.id, tier, until_s - now_s, error,
        )  # fmt: skip
        if now_s - since_s >= self._max_wait_s[tier]:
            self._report_failing(tier, entry, _flush_error(entry, tier, error))

    def commit_failed(self, tier: str, entry: LedgerEntry, error: BaseException) -> None:
        """A copy was uploaded, and its commit record cannot be written: it has failed, and is still owed."""
        transfer = Transfer(entry=entry, error=error, published=True)
        self._on_copy_failed(self._lanes[tier], transfer, self._ledger.now_s)

    def _report(self, entry: LedgerEntry, tier: str, error: BaseException) -> None:
        if entry.handle is not None:
            entry.handle.on_tier_failed(tier, error)
        self.errors.append(error)
        if isinstance(error, CapacityError):  # later steps are no smaller, as a rule
            self._conditions.report((tier, CapacityError), logging.ERROR, "%s", error)
        else:
            logger.error("%s", error)

    def on_task_error(self, error: BaseException | None) -> None:
        """Stop writing, on all ranks, if a task failed because its tier has a record of a newer attempt."""
        if isinstance(error, FencedError):
            self.fence(error)
            self._hooks.group.on_fenced(error)

    def fence(self, error: FencedError) -> None:
        """A newer attempt exists: this process writes nothing more."""
        if self.fenced is None:
            self.fenced = error
            self._emitter.failed("fence", error)
            self.errors.append(error)
            logger.error("%s", error)
        for entry in self._ledger.open():
            entry.give_up(tuple(entry.owed), error)
        for lane in self._lanes.values():
            lane.give_up(error)
        self._deleter.cancel()

    def is_newest(self, tier: str, entry: LedgerEntry) -> bool:
        """Return whether ``latest`` of a tier may name this checkpoint: it never goes back."""
        abandoned, entries = self._ledger.abandoned(), self._ledger.entries
        newer = takewhile(lambda id: id > entry.id, entries.ids(newest_first=True))
        return not any(
            id not in abandoned and entries.peek(id).state(tier) is CopyState.COMMITTED
            for id in newer
        )

    def older_owed(self, tier: str, entry: LedgerEntry) -> tuple[CheckpointId, ...]:
        """Return the older checkpoints that the tier is still owed while newer ones are committed there."""
        abandoned = self._ledger.abandoned()
        found = (
            e.id
            for e in self._ledger.overtaken()
            if tier in e.overtaken
            and e.age_order < entry.age_order
            and not (e.id in abandoned or e.deleted or e.state(tier) is CopyState.COMMITTED)
        )
        return tuple(sorted(found)[-OLDER_OWED_MAX:])

    def give_up_for_all(self, entry: LedgerEntry, tier: str, error: BaseException) -> None:
        """Give up a copy that this rank can never make, on all ranks."""
        self._hooks.group.give_up_copy(entry, tier, error)
        self.give_up_copy(entry, tier, error)

    def give_up_copy(self, entry: LedgerEntry, tier: str, error: BaseException) -> None:
        entry.owed.discard(tier)
        self._emitter.counters.given_up_copies += 1
        self._emitter.flush_given_up(tier, entry.id, error)
        self._report(entry, tier, error)
        self.stop_copy(entry, tier, error)
        if not any(lane.is_copying(entry.id) for lane in self._lanes.values()):
            self._ledger.forget_if_gone(entry)

    def stop_copy(self, entry: LedgerEntry, tier: str, error: BaseException) -> None:
        """Abort a copy that was given up, if it is in progress."""
        lane = self._lanes[tier]
        if lane.is_copying(entry.id):
            lane.give_up(error)


def _flush_error(entry: LedgerEntry, tier: str, cause: BaseException) -> FlushError:
    error = FlushError(f"flush of {entry.id} to {tier} failed and is still being tried: {cause}")
    error.__cause__ = cause
    return error
