"""Flushing: which copy each lane begins next and what makes room for it, and what follows when one is committed, stalls
or fails; and the captures of saves, from their beginning until their image is sealed or given up.

Rank 0 orders copies by the policy; the other ranks follow what it has admitted. A copy that has begun is finished
whatever is saved meanwhile: a tier that is slower than the saves would otherwise never receive a whole one. Belongs to
the coordinator's thread and does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from tierfall.core.capture.snapshot import (
    CaptureAdvanced,
    CaptureBegun,
    CaptureFailed,
    CaptureSealed,
)
from tierfall.core.flush.component import Component
from tierfall.core.flush.drain import PreemptedError
from tierfall.core.flush.facts import CopyFailures, LedgerEntry, without
from tierfall.core.flush.lane import TRIES_BEFORE_REPORT, FlushLane, Transfer
from tierfall.core.flush.messages import (
    AdmittedCopy,
    DeletedCopy,
    FullTier,
    GivenUpCopy,
    NewerAttempt,
    Ordinal,
    StuckCopy,
)
from tierfall.core.flush.tasks import DeleteCopy, KeptFreeError
from tierfall.core.types import events
from tierfall.core.types.errors import (
    CapacityError,
    FencedError,
    FlushError,
    LostWriteError,
    StorageFullError,
)
from tierfall.core.types.text import format_some
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, CopyState, SaveOutcome
from tierfall.core.types.view import Decision, Eviction, Verdict, View
from tierfall.policies.backpressure import plan_relief
from tierfall.policies.eviction import plan_eviction
from tierfall.policies.flush import plan_flush

if TYPE_CHECKING:
    from tierfall.core.flush.coordinator import Coordinator

logger = logging.getLogger("tierfall")


@dataclass(frozen=True, slots=True)
class RoomDecision:
    """Whether a copy may begin now. If not: ``error`` says that no room can be made, ``never`` that none ever can;
    without an error, the copy waits."""

    admitted: bool
    error: CapacityError | None = None
    never: bool = False


ADMIT, WAIT = RoomDecision(True), RoomDecision(False)


ARRIVALS_BEFORE_SET_ASIDE = 8
"""A copy with retryable failures is set aside once so many of them each followed another's commit."""
ROOM_S = 1.0
"""A rank that found no space waits so many seconds, then twice as many: its leader has probably made rank 0's deletion,
too, by then."""
ASK_AGAIN_S = 4.0
"""It asks rank 0 again so many seconds after it has asked: rank 0 makes no room while a deletion is in progress."""
OLDER_OWED_MAX = 64
"""A commit record names at most so many older checkpoints that are still owed, the newest."""
DURABLE_REMEMBERED = 1024


class Flusher(Component):
    """Which copy each lane begins next, and what follows when one is committed, stalls or fails. ``errors`` are
    reported at close; ``durable`` holds the last committed copies (checkpoint, tier), oldest first."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)
        self._max_wait_s = {
            r.name: r.max_wait_s or coordinator.max_wait_s for r in self._ledger.rules
        }
        self.errors: list[BaseException] = []
        self.durable: dict[tuple[CheckpointId, str], None] = {}
        self._reported_failing: dict[str, CheckpointId] = {}
        self._in_order = {rules.name for rules in self._ledger.rules if rules.in_order}
        self._announced: set[tuple[str, CheckpointId]] = set()
        """The copies that were given up by a rule."""
        self._full: dict[str, StorageFullError] = {}
        """The last write to each tier that found no space on its disk."""
        receive = self._messages.receive
        receive(AdmittedCopy, announced=self._on_admitted)
        receive(DeletedCopy, announced=self._on_deleted_elsewhere)
        receive(FullTier, reported=self._on_full_elsewhere)
        receive(NewerAttempt, reported=self._on_fenced_elsewhere, announced=self._on_fenced)

    def drive(self, lane: FlushLane, now_s: float, *, begin: bool, has_news: bool = False) -> None:
        """Advance a lane; ``begin``: another copy may begin. ``has_news``: there may be room for it by now."""
        while True:
            is_due = now_s >= lane.not_before_s
            if is_due and lane.lacks_room:  # a write shows whether the disk is still full
                lane.disk_full = lane.lacks_room = False
            is_due = is_due or (lane.lacks_room and has_news)
            free = lane.active is None and self._ledger.fenced is None and is_due
            is_committing = any(tier == lane.tier for tier, _ in self._ledger.committing)
            if free and begin and not is_committing:
                self._begin_next(lane, now_s)
            self._wake_at(lane.not_before_s)
            if lane.active is None:
                return
            lane.advance(now_s)
            transfer = lane.aborted()
            if transfer is None:
                return
            self._on_copy_failed(lane, transfer, now_s)

    def _begin_next(self, lane: FlushLane, now_s: float) -> None:
        waiting = sorted(self._waiting(lane.tier), key=lane.rounds_failed)
        abandoned = self._ledger.abandoned() if waiting else ()
        for entry in waiting:
            if entry.id in abandoned:
                self._give_up_by_rule(entry, lane.tier, "it is abandoned")
            elif lane.has_no_source(entry):
                error = FlushError(
                    f"flush of {entry.id} to {lane.tier}: no tier has a good copy of it any more"
                )
                self._messages.report_copy_failed(lane.tier, entry.id, error)
            elif not self._group.decides:
                is_deleting = self._planner.deleter.is_deleting(lane.tier)
                if not (lane.disk_full or is_deleting or self._ledger.restoring):
                    self._begin(lane, entry)  # rank 0 has made room already
                return
            else:
                decision = self._try_admit(lane, entry)
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
        size = entry.own_bytes
        self._emit(events.FlushBegun, id=entry.id, tier=lane.tier, bytes=size, tries=lane.tries)
        # one rank asks for all that write to the same disk
        is_asking = self._group.owns(lane.tier)
        room_bytes = self._expected_bytes(lane.tier, entry) if is_asking else 0
        leftover = (lane.tier, entry.id) in self._ledger.unfinished
        lane.begin(entry, leftover=leftover, room_bytes=room_bytes)
        if self._group.decides:
            self._messages.announce_to_others(AdmittedCopy(), entry.id, lane.tier)

    def _on_admitted(self, tier: str, id: CheckpointId, message: AdmittedCopy) -> None:
        self._ledger.admitted.setdefault(tier, {})[id] = None

    def _on_no_room(
        self, lane: FlushLane, entry: LedgerEntry, error: CapacityError, now_s: float
    ) -> None:
        lane.lacks_room = True
        if now_s >= lane.not_before_s:
            # other processes may free room on the disk, or have unpinned a checkpoint
            lane.not_before_s = now_s + self._ledger.longest_wait_s
            self._planner.deleter.schedule_plan(lane.tier)
        if self._ledger.many_ranks and not self._may_get_room(lane.tier, entry):
            given_up = CapacityError(f"{error}. All ranks give it up there")
            self._messages.report_copy_failed(lane.tier, entry.id, given_up)
            if self._reported_failing.get(lane.tier) == entry.id:  # as on the other ranks
                self.on_recovered(lane.tier)
            return
        again = f"It is tried again when room is made, and every {self._ledger.longest_wait_s:g} s"
        self._report_failing(lane.tier, entry, CapacityError(f"{error}. {again}"))

    def _may_get_room(self, tier: str, entry: LedgerEntry) -> bool:
        """Return whether a stored tier may have room for a copy once a refused deletion there succeeds, or slower tiers
        have what they are owed of it and of what the tier holds. Otherwise the parts of later copies, which some ranks
        have left there, may occupy the room for ever."""
        if tier in self._ledger.peer_tiers:  # the next image takes the place of that of a peer
            return False
        names = [rules.name for rules in self._ledger.rules]
        slower = set(names[names.index(tier) + 1 :])
        return not slower.isdisjoint(entry.owed) or any(
            e.state(tier) is CopyState.LEAVING
            or (e.state(tier) is CopyState.COMMITTED and not slower.isdisjoint(e.owed))
            for e in self._ledger.entries.values()
        )

    def _on_full_elsewhere(self, tier: str, id: CheckpointId, message: FullTier, rank: int) -> None:
        """Make room for a copy that another rank found none for; for rank 0."""
        entry, lane = self._ledger.entries.get(id), self._lanes[tier]
        if entry is None or tier not in entry.owed or message.deletions < lane.deletions:
            return  # else that rank does not know yet what was deleted, and tries again once it does
        own_is_full = lane.disk_full
        kind = KeptFreeError if message.is_kept else StorageFullError
        error = kind(self._group.topology.name_rank(rank, message.reason))
        self._note_full(lane, error)
        decision = self._try_admit(lane, entry)
        lane.disk_full = own_is_full and lane.disk_full
        if decision.error is not None:
            # To wait would be in vain if later copies, of which ranks have written a part, occupy its room.
            given_up = CapacityError(f"{decision.error}. All ranks give it up there")
            self._messages.report_copy_failed(tier, id, given_up)

    def _on_deleted_elsewhere(self, tier: str, id: CheckpointId, message: DeletedCopy) -> None:
        """Rank 0 deletes a copy: delete what this node has of it, if only its leader can. A copy that found no room
        there is tried for a time before a report."""
        entry, lane = self._ledger.entries.get(id), self._lanes[tier]
        lane.deletions += 1
        if entry is None or self._group.decides:
            return
        lane.room_tries = 1
        if lane.lacks_room:
            lane.not_before_s = min(lane.not_before_s, self._ledger.now_s + ROOM_S)
        is_shared = self._group.is_shared(tier)
        if entry.pinned and not is_shared:  # pinned meanwhile: this part stays
            self._ledger.partial.add((tier, id))
        if is_shared or entry.pinned or not self._ledger.owns(tier):
            entry.note_gone(tier)
            self._ledger.forget_if_gone(entry)
            return
        self._planner.deleter.delete(
            DeleteCopy(
                tier=tier,
                id=id,
                reason=message.reason,
                known=self._ledger.decided,
                next_latest=message.next_latest,
            )
        )

    def _on_disk_full(self, lane: FlushLane, entry: LedgerEntry, error: StorageFullError) -> None:
        """A copy of a rank other than 0 found no space: have rank 0 make room, unless it may have done so just now."""
        lane.disk_full = lane.lacks_room = True
        wait_s = ROOM_S * 2**lane.room_tries
        if lane.room_tries and wait_s < self._ledger.longest_wait_s:
            lane.room_tries += 1
        else:
            lane.room_tries, wait_s = 0, min(ASK_AGAIN_S, self._ledger.longest_wait_s)
            self._conditions.report(
                lane.tier, logging.WARNING,
                "flush of %s to %s found no space, rank 0 is asked to make some: %s",
                entry.id, lane.tier, error,
            )  # fmt: skip
            full = FullTier(
                reason=str(error),
                is_kept=isinstance(error, KeptFreeError),
                deletions=lane.deletions,
            )
            self._messages.report(full, entry.id, lane.tier)
        lane.not_before_s = self._ledger.now_s + wait_s

    def _report_failing(self, tier: str, entry: LedgerEntry, error: BaseException) -> None:
        """Report, once for a copy, that a tier does not accept it at present."""
        last, self._reported_failing[tier] = self._reported_failing.get(tier), entry.id
        is_news = last != entry.id or tier not in self._ledger.failing
        self.mark_failing(tier, error)
        if is_news:
            stuck = StuckCopy(rank=self._group.topology.rank, reason=str(error))
            self._messages.report(stuck, entry.id, tier)

    def mark_failing(self, tier: str, error: BaseException) -> None:
        """A tier does not accept copies at present, of this rank or another: every handle that waits for it reports
        the error."""
        if tier not in self._ledger.failing:
            self._ledger.failing[tier] = error
            self._emit(events.TierFailing, tier=tier, reason=error)
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
        if tier not in self._ledger.stuck:
            self._accepts_copies(tier)

    def _accepts_copies(self, tier: str) -> None:
        if self._ledger.failing.pop(tier, None) is not None:
            self._emit(events.TierRecovered, tier=tier)
        owed = sum(tier in entry.owed for entry in self._ledger.open())
        text = "tier %s accepts copies again; copies that it is still owed: %d"
        self._conditions.end(tier, text, tier, owed)

    def committed(self, tier: str, id: CheckpointId, stored_bytes: int, *, found: bool) -> None:
        """A checkpoint was committed on a tier, where it occupies ``stored_bytes``. If ``found`` (see
        ``CommittedCopy``), it is not known to be good: this start has not written or read it all."""
        entry, lane = self._ledger.entries[id], self._lanes[tier]
        entry.set_state(lane.tier, CopyState.COMMITTED, stored_bytes)
        if not found:
            entry.verified |= {tier}
        if entry.handle is not None:
            self._ledger.has_begun = True
        entry.owed -= {tier}
        self._ledger.unfinished.pop((lane.tier, id), None)
        entry.failures = without(entry.failures, tier)
        entry.set_aside = without(entry.set_aside, tier)
        entry.overtaken -= {tier}
        lane.succeeded(entry)
        self._accepts_copies(lane.tier)
        self._conditions.end(
            (tier, CapacityError), "tier %s has room for a step again: %s", tier, id
        )
        # A copy for which others were deleted does not show that the disk has room: the next one does.
        if not lane.disk_full and self._full.pop(tier, None) is None:
            self._conditions.end((tier, StorageFullError), "tier %s has room for %s", tier, id)
        since_s = None if entry.handle is None else self._ledger.now_s - entry.handle.began_s
        self._emit(events.Committed, id=id, tier=tier, bytes=stored_bytes, seconds=since_s)
        self.durable[id, lane.tier] = None
        if len(self.durable) > DURABLE_REMEMBERED:
            del self.durable[next(iter(self.durable))]
        self._planner.deleter.schedule_plan(lane.tier)
        self._planner.backlog.on_committed(lane.tier, id)
        if entry.handle is not None:
            entry.handle.on_committed(lane.tier)

    def _on_copy_failed(self, lane: FlushLane, transfer: Transfer, now_s: float) -> None:
        """A copy failed. It is still owed unless no attempt can succeed; files that it may have left are noted."""
        entry, error = transfer.entry, transfer.error
        assert error is not None
        seconds = self._ledger.now_s - lane.began_s
        if not isinstance(error, KeptFreeError):  # nothing was tried: room is made first
            self._emit(
                events.FlushFailed, id=entry.id, tier=lane.tier, reason=error, seconds=seconds
            )
        entry.set_state(lane.tier, CopyState.ABSENT)
        if transfer.published:
            self._ledger.unfinished[lane.tier, entry.id] = entry.own_bytes
        if lane.tier not in entry.owed:
            if entry.deleted:
                lane.forget_stall()
            self._ledger.forget_if_gone(entry)
            return
        if isinstance(error, PreemptedError):
            logger.info("%s", error)
            return
        if isinstance(error, StorageFullError) and self._group.decides:
            if lane.deletions == transfer.deletions:
                self._note_full(lane, error)
            return
        if isinstance(error, StorageFullError):
            self._on_disk_full(lane, entry, error)
            return
        lane.back_off(entry, error, now_s)
        if not self._stop_trying(lane, transfer, error):
            self._report_failure(lane, entry, error, now_s)

    def _stop_trying(self, lane: FlushLane, transfer: Transfer, error: BaseException) -> bool:
        """Set aside a copy that fails while the tier receives others, unless its source could not be read; return
        whether that was done."""
        entry = transfer.entry
        failures = entry.failures.get(lane.tier, CopyFailures())
        entry.failures = {**entry.failures, lane.tier: failures}
        is_retryable = getattr(error, "retryable", False) or isinstance(error, LostWriteError)
        failures.record(lane.arrivals, lasts=not is_retryable)
        tried = failures.count >= TRIES_BEFORE_REPORT
        others_needed = 1 if failures.lasts else ARRIVALS_BEFORE_SET_ASIDE
        alone = tried and failures.others_arrived >= others_needed and not transfer.source_is_unread
        entry.overtaken |= {lane.tier}
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
        waiting = self._ledger.open()
        failed = [e for e in waiting if lane.has_failed(e)]
        if len(failed) != 1 or not failed[0].failures[lane.tier].lasts:
            return False
        others = (e for e in waiting if e is not failed[0])
        return any(lane.tier in e.owed and lane.tier not in e.uploaded_to for e in others)

    def _set_aside(self, entry: LedgerEntry, tier: str, cause: BaseException) -> None:
        """Stop trying a copy, on all ranks, that fails again and again while the tier receives others."""
        error = FlushError(
            f"flush of {entry.id} to {tier} is set aside: it failed {entry.failures[tier].count} times, and {tier} "
            f"accepts others: {cause}. Fix what prevents it from being written there: the next start tries it again"
        )
        error.__cause__ = cause
        self._messages.report_copy_failed(tier, entry.id, error, set_aside=True)

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
        again_s = max(0.0, until_s - now_s)
        self._emit(events.FlushStalled, id=entry.id, tier=tier, reason=error, again_s=again_s)
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

    def on_task_error(self, error: BaseException | None) -> None:
        """Stop writing, on all ranks, if a task failed because its tier has a record of a newer attempt."""
        if isinstance(error, FencedError):
            self.fence(error)
            self._messages.report(NewerAttempt(text=str(error)))

    def _on_fenced_elsewhere(self, message: NewerAttempt, rank: int) -> None:
        text = self._group.topology.name_rank(rank, message.text)
        self._messages.announce(NewerAttempt(text=text))

    def _on_fenced(self, message: NewerAttempt) -> None:
        self.fence(FencedError(message.text))

    def fence(self, error: FencedError) -> None:
        """A newer attempt exists: this process writes nothing more."""
        if self._ledger.fenced is None:
            self._ledger.fenced = error
            self._emit(events.OperationFailed, doing="fence", reason=error)
            self.errors.append(error)
            logger.error("%s", error)
        for entry in self._ledger.open():
            entry.give_up(tuple(entry.owed), error)
        for lane in self._lanes.values():
            lane.give_up(error)
        self._planner.deleter.cancel()

    def is_newest(self, tier: str, entry: LedgerEntry) -> bool:
        """Return whether ``latest`` of a tier may name this checkpoint: it never goes back."""
        abandoned = self._ledger.abandoned()
        newer = takewhile(lambda e: e.id > entry.id, self._ledger.entries.newest_first())
        return not any(
            e.id not in abandoned and e.state(tier) is CopyState.COMMITTED for e in newer
        )

    def older_owed(self, tier: str, entry: LedgerEntry) -> tuple[CheckpointId, ...]:
        """Return the older checkpoints that the tier is still owed while newer ones are committed there."""
        abandoned = self._ledger.abandoned()
        found = (
            e.id
            for e in self._ledger.entries.values()
            if tier in e.overtaken
            and e.age_order < entry.age_order
            and not (e.id in abandoned or e.deleted or e.state(tier) is CopyState.COMMITTED)
        )
        return tuple(sorted(found)[-OLDER_OWED_MAX:])

    def give_up_for_all(self, entry: LedgerEntry, tier: str, error: BaseException) -> None:
        """Give up a copy that this rank can never make, on all ranks."""
        self._messages.report_copy_failed(tier, entry.id, error)
        self.give_up(entry, tier, error)

    def give_up(
        self,
        entry: LedgerEntry,
        tier: str,
        error: BaseException,
        *,
        by_rule: bool = False,
        set_aside: bool = False,
    ) -> None:
        """Make no copy. ``by_rule``: that is no failure; ``set_aside``: it is still owed, to the next start."""
        self._announced.discard((tier, entry.id))
        if self._lanes[tier].is_copying(entry.id):
            self._lanes[tier].give_up(error)
        if tier not in entry.owed:
            return
        if set_aside:
            entry.set_aside = {**entry.set_aside, tier: error}
        kind = events.SetAside if set_aside else events.FlushGivenUp
        self._emit(kind, id=entry.id, tier=tier, reason=error)
        entry.give_up([tier], error)
        if by_rule:
            return
        self.errors.append(error)
        if isinstance(error, CapacityError):  # later steps are no smaller, as a rule
            self._conditions.report((tier, CapacityError), logging.ERROR, "%s", error)
        else:
            logger.error("%s", error)

    # Order ------------------------------------------------------------------------------------------

    def _waiting(self, tier: str) -> Iterator[LedgerEntry]:
        """Yield the copies that a tier is owed and that this rank may begin, in their order."""
        owing = (e for e in self._ledger.open() if tier in e.owed and tier not in e.uploaded_to)
        waiting = sorted(owing, key=lambda entry: entry.age_order)
        if not self._group.decides:
            admitted = list(self._ledger.admitted.get(tier, ()))
            yield from sorted(
                (entry for entry in waiting if entry.id in admitted),
                key=lambda entry: admitted.index(entry.id),
            )
        elif self._planner.drain_schedule.active:
            yield from self._planner.drain_schedule.in_order(tier, waiting)
        elif tier in self._in_order or not waiting:
            yield from waiting
        else:
            yield from self._planned(tier, {entry.id: entry for entry in waiting})

    def _planned(self, tier: str, waiting: dict[object, LedgerEntry]) -> Iterator[LedgerEntry]:
        planned = []
        for decision in plan_flush(self._ledger.view(), tier):
            entry = waiting.pop(decision.checkpoint, None)
            if entry is None:
                continue
            if decision.verdict is Verdict.DROP:
                self._give_up_by_rule(entry, tier, decision.reason)
            else:
                planned.append(entry)
        # files of a failed attempt occupy room, and the next attempt overwrites them
        begun = [entry for entry in planned if (tier, entry.id) in self._ledger.unfinished]
        yield from begun
        yield from (entry for entry in planned if entry not in begun)
        yield from waiting.values()  # abandoned ones

    def _displaces_newer(
        self, tier: str, entry: LedgerEntry, plan: Eviction, *, fits: bool
    ) -> bool:
        """Return whether newer copies are on the tier, and this one needs the room of one, or does not fit. Copies that
        a person has deleted count as free room. False for a pinned one, and where copies are made in order."""
        draining = self._planner.drain_schedule.active
        is_in_order = tier in self._in_order and not draining and tier not in entry.overtaken
        if entry.pinned or is_in_order:
            return False
        abandoned = self._ledger.abandoned()
        is_late = any(
            e.id > entry.id and e.id not in abandoned and not e.deleted
            for e in self._ledger.entries.values()
            if e.readable_on(tier)
        )
        evicts_newer = any(
            d.checkpoint > entry.id and d.checkpoint not in abandoned
            for d in plan.deletions
            if self._ledger.entries[d.checkpoint].readable_on(tier)
        )
        missing = plan.missing_bytes - self._deleted_bytes(tier)
        return is_late and (evicts_newer or (missing > 0 and not fits))

    def _deleted_bytes(self, tier: str) -> int:
        """Return the bytes of copies on a tier that a person has deleted."""
        doomed = (e for e in self._ledger.entries.values() if e.deleted)
        return sum(e.bytes.get(tier, 0) for e in doomed if e.readable_on(tier))

    def _give_up_by_rule(
        self, entry: LedgerEntry, tier: str, reason: str, *, level: int = logging.INFO
    ) -> None:
        """Give up a copy by a configured rule, on all ranks. The save's handle reports it; it is no failure."""
        if (tier, entry.id) in self._announced:
            return
        logger.log(level, "flush of %s to %s is given up: %s", entry.id, tier, reason)
        self._announced.add((tier, entry.id))
        self._messages.report(GivenUpCopy(reason=reason, by_rule=True), entry.id, tier)

    # Room -------------------------------------------------------------------------------------------

    def _note_full(self, lane: FlushLane, error: StorageFullError) -> None:
        """A copy to a tier found no space on its disk."""
        lane.disk_full = True
        self._full[lane.tier] = error

    def _try_admit(self, lane: FlushLane, entry: LedgerEntry) -> RoomDecision:
        """Decide whether a copy may begin; start the evictions that it needs."""
        if self._ledger.restoring or self._planner.deleter.is_deleting(lane.tier):
            return WAIT
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
        if self._gives_way(view, plan, lane, entry, need, free):
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
        """Return whether newer copies on the tier leave this one no room. It is given up then, or waits if older ones
        may be evicted for it once a copy there is verified."""
        displaces_newer = partial(self._displaces_newer, lane.tier, entry, fits=free >= need)
        if not displaces_newer(plan):
            return False
        best = self._plan(replace(view, assume_verified=True), lane, need=need, free=free)
        if displaces_newer(best) or not self._planner.verifier.hasten(lane.tier):
            reason = "newer ones came first, and there is no room beside them"
            self._give_up_by_rule(entry, lane.tier, reason)
        return True

    def _damaged_for_room(self, view: View, lane: FlushLane, short_bytes: int) -> list[Decision]:
        """Return the damaged copies to evict where ``short_bytes`` are missing, before any good copy."""
        chosen: list[Decision] = []
        for decision in self._planner.deleter.damaged_for_room(view, lane.tier)[0]:
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
        fits = free >= need
        if self._planner.deleter.rules_are_suspended and plan.deletions:
            # nothing is evicted before it is known which copies are good
            return ADMIT if fits else WAIT
        if plan.deletions and plan.missing_bytes == 0:
            return ADMIT if not self._evict(plan, lane) and fits else WAIT
        if fits:
            return ADMIT  # above the high watermark, and nothing more may be evicted
        # after verification others may be evicted
        if self._planner.verifier.hasten(lane.tier) or self._relieve(lane, plan.missing_bytes):
            return WAIT
        return RoomDecision(False, self._no_room(lane, entry, need, max(free, 0)))

    def _evict(self, plan: Eviction, lane: FlushLane) -> bool:
        """Start the evictions; return False where they have to wait."""
        ids = [decision.checkpoint for decision in plan.deletions]
        if not self._planner.deleter.rules_may_delete(lane.tier):
            return False
        for decision in plan.deletions:
            begun = self._planner.deleter.request_delete(
                lane.tier, decision.checkpoint, decision.reason, beside=ids
            )
            if begun and lane.disk_full and not isinstance(self._full[lane.tier], KeptFreeError):
                self._log_deleted_for_disk(lane.tier, decision)
        lane.disk_full = False
        return True

    def _log_deleted_for_disk(self, tier: str, decision: Decision) -> None:
        """Log the first copy that is deleted because a disk is full, and which ones are kept."""
        entries = self._ledger.entries
        kept = [str(e.id) for e in entries.newest_first() if e.state(tier) is CopyState.COMMITTED]
        self._conditions.report(
            (tier, StorageFullError), logging.WARNING,
            "tier %s is full, and deletes older checkpoints for each new one. Deleted: %s (%s). Kept: %s. Later "
            "deletions are logged at level INFO. Free space there, keep fewer checkpoints (retain), or use a larger "
            "disk. The write that failed: %s",
            tier, decision.checkpoint, decision.reason, format_some(kept) or "none", self._full[tier],
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
            # a deletion that failed counts as done
            free += self._ledger.bytes_being_deleted(lane.tier)
        return need, free

    def _expected_bytes(self, tier: str, entry: LedgerEntry) -> int:
        """Return the bytes that a copy is expected to occupy: on a tier that compresses, scaled by the ratio of the
        newest copy there; before there is one, those of its images."""
        raw_bytes, entries = self._raw_bytes(tier, entry), self._ledger.entries
        newest_first = entries.newest_first()
        newest = next((e for e in newest_first if e.state(tier) is CopyState.COMMITTED), None)
        if newest is None or not (newest_bytes := newest.bytes.get(tier, 0)):
            return raw_bytes
        # peer memory here may keep images of other ranks alone
        newest_raw_bytes = self._raw_bytes(tier, newest) or newest_bytes
        return min(raw_bytes, -(-raw_bytes * newest_bytes // newest_raw_bytes))

    def _raw_bytes(self, tier: str, entry: LedgerEntry) -> int:
        """Return the bytes of all images of a checkpoint that this rank sees on a tier."""
        return entry.own_bytes * len(self._group.ranks_on(tier))

    def _collect_unfinished(self, lane: FlushLane, entry: LedgerEntry) -> bool:
        """Delete what failed attempts left of other checkpoints; return whether any deletion began. Else a later copy
        waits for this one, and this one for the room of its files."""
        unfinished = [id for tier, id in self._ledger.unfinished if tier == lane.tier]
        why = "it was left unfinished, and room is needed"
        others = [id for id in unfinished if id != entry.id]
        return any([self._planner.deleter.collect_unfinished(lane.tier, id, why) for id in others])

    def _relieve(self, lane: FlushLane, missing_bytes: int) -> bool:
        """Give up what slower tiers are owed of one checkpoint, where their rules permit it and that makes room."""
        entries = self._ledger.entries
        view = self._ledger.view(settling=self.settling())
        decisions = plan_relief(view, lane.tier, missing_bytes=missing_bytes)
        for decision in decisions:
            entry, reason = entries[decision.checkpoint], decision.reason
            self._give_up_by_rule(entry, decision.tier, reason, level=logging.WARNING)
        return bool(decisions)

    def settling(self) -> set[CheckpointId]:
        """Return what must be kept: what a lane copies, and what this rank has uploaded, which may be committed at any
        time. A tier that is slower than the saves receives whole copies only because their sources are kept."""
        copied = {lane.active.entry.id for lane in self._lanes.values() if lane.active}
        return copied | {entry.id for entry in self._ledger.open() if entry.uploaded_to}

    def _no_room(self, lane: FlushLane, entry: LedgerEntry, need: int, free: int) -> CapacityError:
        found = f"there is room for {format_size(free)}"
        if lane.disk_full:
            why = self._full[lane.tier]
            is_kept = isinstance(why, KeptFreeError)
            found = "keep_free leaves no room for it" if is_kept else f"the disk is full ({why})"
        _, damaged = self._planner.deleter.damaged_for_room(self._ledger.view(), lane.tier)
        kept = ""
        if damaged:
            named = format_some([str(id) for id in damaged])
            kept = f" Damaged, and not deleted without a command: {named}."
        return CapacityError(
            f"flush of {entry.id} to {lane.tier}: it needs {format_size(need)}, {found}, and nothing more may be "
            f"deleted there.{kept} Raise the capacity, keep fewer checkpoints (retain), unpin some, free "
            "the disk, or remove one ('tierfall rm ID')"
        )


def _outgrown(tier: str, entry: LedgerEntry, need: int, capacity: int) -> CapacityError:
    return CapacityError(
        f"flush of {entry.id} to {tier}: it takes {format_size(need)} ({need} bytes) there, and the tier's capacity is "
        f"{format_size(capacity)} ({capacity} bytes): it is left out. Raise the capacity, or take the tier out of the "
        "chain"
    )


def _flush_error(entry: LedgerEntry, tier: str, cause: BaseException) -> FlushError:
    error = FlushError(f"flush of {entry.id} to {tier} failed and is still being tried: {cause}")
    error.__cause__ = cause
    return error


class CaptureEvents(Component):
    """A snapshot from the beginning of its capture until its image is sealed or given up."""

    def on_begun(self, event: CaptureBegun) -> None:
        snapshot = event.snapshot
        entry = LedgerEntry(
            id=snapshot.id,
            ordinal=snapshot.lineage.ordinal,
            started_from=snapshot.lineage.started_from,
            shard=snapshot.shard,
            attempt_id=snapshot.lineage.attempt_id,
            geometry=snapshot.image_plan.geometry(),
            region=snapshot.region,
            snapshot=snapshot,
            handle=snapshot.handle,
            share=snapshot.share,
        )
        entry.owed = frozenset(name for name in event.tiers if name in self._lanes)
        entry.set_state(self._ledger.host, CopyState.ARRIVING, snapshot.image_plan.image_bytes)
        self._ledger.enter(entry)
        self._emit(
            events.SaveBegun,
            id=entry.id,
            bytes=entry.own_bytes,
            lazy_bytes=snapshot.lazy_bytes,
            tiers=tuple(sorted(entry.owed)),
        )
        self._planner.backlog.on_owed(entry.id, event.tiers)
        if (fenced := self._ledger.fenced) is not None:
            entry.give_up(tuple(entry.owed), fenced)
        self._planner.flusher.save_begun(entry)
        for (tier, id), error in self._ledger.lost_copies.items():
            if id == entry.id:
                entry.give_up([tier], error)
        if (lost := self._ledger.lost_saves.get(entry.id)) is not None:
            self.give_up(entry, *lost)
            # this rank's lineage counts that save, others' may not
            self._messages.report(Ordinal(ordinal=entry.ordinal))

    def on_advanced(self, event: CaptureAdvanced) -> None:
        if entry := self._ledger.entries.get(event.id):
            entry.final_chunks = event.final_chunks

    def on_sealed(self, event: CaptureSealed) -> LedgerEntry | None:
        """Return the entry of an image that is complete; None if its save was given up."""
        entry = self._ledger.entries[event.id]
        assert entry.snapshot is not None
        entry.manifest = entry.snapshot.manifest
        entry.commit = entry.snapshot.commit
        entry.decide(self._ledger.decided)  # with its own tags
        entry.snapshot = None
        assert entry.geometry is not None
        entry.final_chunks = entry.geometry.chunk_count
        if entry.failed:
            self._unseal(entry)
            return None
        assert entry.handle is not None
        stats = entry.handle.stats
        self._emit(
            events.Captured,
            id=entry.id,
            bytes=entry.own_bytes,
            seconds=self._ledger.now_s - entry.handle.began_s,
            blocked_s=stats.blocked_s,
            lazy=stats.lazy,
        )
        return entry

    def on_damage_found(self, id: CheckpointId, why: str) -> None:
        """A reader of this rank has found that an image in memory differs from its digests. It is evicted if a tier has
        the checkpoint; otherwise it is kept, as some of its tensors may be good, and its damage is noted."""
        entry, host = self._ledger.entries.get(id), self._ledger.host
        if entry is None or entry.state(host) is not CopyState.SEALED or host in entry.damage:
            return
        logger.error("%s: %s is damaged in memory: %s", host, id, why)
        has_another = any(state is CopyState.COMMITTED for state in entry.states.values())
        if has_another:
            self._unseal(entry)
        else:
            entry.note_damage_kept(host, why)

    def _unseal(self, entry: LedgerEntry) -> None:
        """Evict an image from memory, for later starts as well."""
        if entry.region is not None and entry.region.sealed:
            entry.region.unseal()
        entry.awaiting_ranks = False
        entry.set_state(self._ledger.host, CopyState.LEAVING)

    def give_up(self, entry: LedgerEntry, error: BaseException, outcome: SaveOutcome) -> None:
        """Give up a save, as rank 0 has announced to all ranks."""
        is_held = entry.state(self._ledger.host) in (CopyState.ARRIVING, CopyState.SEALED)
        if entry.failed or not (is_held or entry.owed):
            return
        entry.failed = True
        self._planner.backlog.forget(entry.id)
        self._emit(events.SaveEnded, id=entry.id, outcome=outcome, reason=error)
        self._planner.flusher.errors.append(error)
        logger.error("%s", error)
        if entry.handle is not None:
            entry.handle.on_given_up(outcome, error)
        entry.owed = frozenset()
        self._stop_lanes(entry, error)
        if entry.snapshot is None and is_held:
            self._unseal(entry)
        self._ledger.forget_if_gone(entry)

    def on_failed(self, event: CaptureFailed) -> None:
        id, error = event.id, event.error
        self._planner.backlog.forget(id)
        entry = self._ledger.entries.get(id)
        if entry is None:  # the save failed before its capture was announced, or was reported
            event.region.release()
            self._messages.report_save_failed(id, error, SaveOutcome.FAILED)
            return
        if entry.snapshot is None:
            return
        if not entry.failed:
            self._emit(events.SaveEnded, id=id, outcome=SaveOutcome.FAILED, reason=error)
        self._planner.flusher.errors.append(error)
        logger.error("save: step %d is given up: %s", id.step, error)
        if entry.handle is not None:
            entry.handle.on_given_up(SaveOutcome.FAILED, error)
        entry.owed = frozenset()
        entry.snapshot = None
        entry.set_state(self._ledger.host, CopyState.LEAVING)
        self._stop_lanes(entry, error)
        if not entry.failed:
            self._messages.report_save_failed(id, error, SaveOutcome.FAILED)

    def _stop_lanes(self, entry: LedgerEntry, error: BaseException) -> None:
        for lane in self._lanes.values():
            if lane.active is not None and lane.active.entry is entry:
                lane.give_up(error)
