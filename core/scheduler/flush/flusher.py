"""Flushing: which copy each lane brings next, room for it, and what follows when one is committed, stalls or fails.

It belongs to the coordinator's thread, decides by the policies that it is handed, and does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Protocol

from tierfall.core.format.records import Mark
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.flush.admission import PlanEviction
from tierfall.core.scheduler.flush.copy_progress import Transfer
from tierfall.core.scheduler.flush.deadline import PreemptedError
from tierfall.core.scheduler.flush.lane import LONGEST_RETRY_S, FlushLane
from tierfall.core.scheduler.flush.queue import FlushQueue
from tierfall.core.scheduler.ledger.ledger import CopyFailures, Ledger, LedgerEntry
from tierfall.core.scheduler.ledger.notes import EventEmitter, image_bytes_of
from tierfall.core.scheduler.ledger.one_rank import OneRank
from tierfall.core.types import keys
from tierfall.core.types.errors import (
    CapacityError,
    FencedError,
    FlushError,
    IntegrityError,
    LostWriteError,
    NotSupportedError,
    StorageFullError,
)
from tierfall.core.types.text import few_of
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.core.types.view import Decision, Eviction, View

logger = logging.getLogger("tierfall")
TRIES_BEFORE_REPORT = 3
ARRIVALS_BEFORE_SET_ASIDE = 8
"""A copy whose failures may pass is set aside once it failed again after so many others had come."""
OLDER_OWED_MAX = 64
"""So many that are still owed, the newest, are named in a commit record."""
DURABLE_REMEMBERED = 1024
_NO_REPAIR = (FlushError, IntegrityError, NotSupportedError, StorageFullError)
"""What ends the repair of a damaged copy at once: it has no source or no room, or it is not ours to replace."""


class PlanRelief(Protocol):
    def __call__(
        self, view: View, tier_name: str, *, missing_bytes: int
    ) -> tuple[Decision, ...]: ...


@dataclass(slots=True, kw_only=True)
class Counters:
    """What happened so far, in numbers."""

    flush_failures: int = 0
    given_up_copies: int = 0
    set_aside_copies: int = 0
    commits: dict[str, int] = field(default_factory=dict)


class Flusher:
    """See the module. ``memory_is_short`` tells whether a save wants room in memory, ``is_unpinning`` whether a pin is
    just being taken away; ``has_committed`` hears of every commit; ``others`` are the other ranks of the run;
    ``durable`` names the last copies that came."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        lanes: Mapping[str, FlushLane],
        dropper: Deleter,
        turns: FlushQueue,
        plan_eviction: PlanEviction,
        plan_relief: PlanRelief,
        max_wait_s: float,
    ) -> None:
        self._ledger = ledger
        self._lanes = lanes
        self._dropper = dropper
        self._plan_eviction = plan_eviction
        self._plan_relief = plan_relief
        self._max_wait_s = {r.name: r.max_wait_s or max_wait_s for r in ledger.rules}
        self.others = OneRank(ledger)
        self.turns = turns
        self.notes = EventEmitter()
        self.memory_is_short: Callable[[], bool] = lambda: False
        self.is_unpinning: Callable[[CheckpointId], bool] = lambda id: False
        self._source_of_repairs: set[str] = set()
        self.has_committed: Callable[[str, LedgerEntry], None] = lambda tier, entry: None
        self.has_arrived: Callable[[str, CheckpointId], None] = lambda tier, id: None
        self.fenced: FencedError | None = None
        self.errors: list[BaseException] = []
        self.counters = Counters()
        self.durable: dict[tuple[CheckpointId, str], None] = {}
        self._said_failing: dict[str, CheckpointId] = {}

    def drive(self, lane: FlushLane, now_s: float, *, begin: bool) -> None:
        """Advance a lane; ``begin`` says whether another copy may be begun."""
        while True:
            free = lane.active is None and self.fenced is None and now_s >= lane.not_before_s
            if free and begin:
                self._begin_next(lane, now_s)
            if lane.active is None:
                return
            entry = lane.active.entry
            # a save wants room: read from storage what lies there too, so that memory becomes free
            lane.spare_memory = self.memory_is_short()
            others = (other for other in self._lanes.values() if other is not lane)
            lane.advance(
                now_s,
                self.marks_of(entry),
                name_latest=partial(self.is_newest, lane.tier, entry),
                older_owed=partial(self.older_owed, lane.tier, entry),
                beside=[run for other in others for run in other.reading()],
            )
            transfer = lane.aborted()
            if transfer is None:
                return
            self._on_copy_failed(lane, transfer, now_s)

    def _begin_next(self, lane: FlushLane, now_s: float) -> None:
        waiting = sorted(self.turns.waiting(lane.tier), key=partial(_rounds_failed, lane))
        left = self._ledger.abandoned() if waiting else ()
        for entry in waiting:
            if entry.id in left:
                self.turns.give_up(entry, lane.tier, "its line was left behind")
            elif (part := entry.next_part(lane.tier)) is not None and lane.hopeless(part):
                error = FlushError(
                    f"flush of {entry.id} to {lane.tier}: no tier holds a good copy of it any more"
                )
                if not self.others.cannot(entry, lane.tier, error, for_good=True):
                    self.give_up_copy(entry, lane.tier, error)
            else:
                if self._make_room(lane, entry, now_s):
                    self._begin(lane, entry, part)
                if lane.tier in entry.owed:
                    return

    def _begin(self, lane: FlushLane, entry: LedgerEntry, part: LedgerEntry | None) -> None:
        """Begin a copy that has room; of what other ranks saved, this one may have no part to bring."""
        if part is not None:
            self.notes.flush_begun(lane, part)
            lane.begin(part, leftover=(lane.tier, entry.id) in self._ledger.unfinished)
        self.others.has_begun(lane.tier, entry)
        if part is None:
            self.others.landed(lane.tier, entry, ())

    def _make_room(self, lane: FlushLane, entry: LedgerEntry, now_s: float) -> bool:
        """Admit a copy to a tier before it begins: drop what may go, and wait while it goes."""
        if self._dropper.paused or self._dropper.busy(lane.tier):
            return False
        if not self.others.decides and (not lane.full or lane.tier in entry.damage):
            return True  # rank 0 has made it
        rules = next(r for r in self._ledger.rules if r.name == lane.tier)
        capacity = rules.capacity_bytes
        need, free = self._need_and_free(lane, entry, capacity)
        if lane.tier in entry.damage:
            return self._has_room_for_repair(lane, entry, need=need, free=free)
        if free >= need and (capacity is None or not rules.is_high(capacity - free + need)):
            return True
        held = self._dropper.reserved | self._dropper.awaited  # a person's orders see to those
        view = self._ledger.view(held)
        damaged = self._damaged_for_room(view, lane, need - free)
        plan = self._plan_eviction(
            view, lane.tier, need_bytes=need, free_bytes=free + sum(d.bytes for d in damaged)
        )
        plan = replace(plan, drops=(*damaged, *plan.drops))
        if lane.full and plan.drops:
            # how much a full disk lacks is not known: one copy goes, and then it is tried again
            plan = Eviction(drops=plan.drops[:1], missing_bytes=0)
        return self._apply_plan(plan, lane, entry, need=need, free=free, now_s=now_s)

    def _damaged_for_room(self, view: View, lane: FlushLane, short_bytes: int) -> list[Decision]:
        """Return the damaged copies that go first where so many bytes are short: they count for nothing."""
        chosen: list[Decision] = []
        for decision in self._dropper.damaged_for_room(view, lane.tier)[0]:
            if short_bytes <= 0:
                break
            chosen.append(decision)
            short_bytes -= decision.bytes
        return chosen

    def _has_room_for_repair(
        self, lane: FlushLane, entry: LedgerEntry, *, need: int, free: int
    ) -> bool:
        """Say whether a damaged copy can be written anew in the room that it takes and that is free: no good copy goes
        for its sake. Where it cannot, it stays as it is."""
        free += entry.bytes.get(lane.tier, 0)  # it is written over
        if free >= need:
            return True
        error = CapacityError(
            f"repair of {entry.id} on {lane.tier}: it needs {format_size(need)}, there is room for "
            f"{format_size(max(free, 0))}, and no other copy is dropped for it"
        )
        self.give_up_for_all(entry, lane.tier, error)
        return False

    def _apply_plan(
        self,
        plan: Eviction,
        lane: FlushLane,
        entry: LedgerEntry,
        *,
        need: int,
        free: int,
        now_s: float,
    ) -> bool:
        """Carry an eviction out, and say whether a copy may be begun at once."""
        fits = free >= need
        if not fits and not self.others.land_only and self._clear_up(lane, entry):
            return False
        if self._dropper.gated and plan.drops:
            return fits  # room is made once this start knows what is good
        if self.others.decides and self.turns.leaves_room(lane.tier, entry, plan, fits=fits):
            return False
        if plan.drops and self.others.decides and plan.missing_bytes == 0:
            return not self._drop_for_room(plan, lane) and fits
        if fits:
            return True  # above the high watermark, where nothing more may go
        if self.others.decides and (
            self._dropper.verifies(lane.tier, hurry=True) or self._is_source_of_repairs(lane.tier)
        ):
            return False  # what was not read yet, or is written anew, may let others go
        if self.others.decides and self._relieve(lane, plan.missing_bytes):
            return False
        self._on_room_missing(lane, entry, need, max(free, 0), now_s)
        return False

    def _drop_for_room(self, plan: Eviction, lane: FlushLane) -> bool:
        """Let copies go; False where that has to wait. One that is damaged elsewhere is to be repaired from here."""
        if self._dropper.waits_for_marks(lane.tier) or self._dropper.verifies_elsewhere(
            lane.tier, [decision.checkpoint for decision in plan.drops]
        ):
            return False
        lane.full = False
        going = [decision.checkpoint for decision in plan.drops]
        for decision in plan.drops:
            self._dropper.drop(lane.tier, decision.checkpoint, decision.reason, beside=going)
        return True

    def _is_source_of_repairs(self, tier: str) -> bool:
        """Say whether copies on another tier are being written anew from here: it takes some at present, and does not
        wait for room by this itself."""
        self._source_of_repairs.discard(tier)
        idle = self._ledger.failing.keys() | self._source_of_repairs
        if any(
            entry.owed.intersection(entry.damage) - idle
            for entry in self._ledger.open()
            if entry.state(tier) is CopyState.COMMITTED
        ):
            self._source_of_repairs.add(tier)
        return tier in self._source_of_repairs

    def _need_and_free(
        self, lane: FlushLane, entry: LedgerEntry, capacity: int | None
    ) -> tuple[int, int]:
        """Reckon the bytes that a copy of all ranks is expected to take on a tier, and those that there are for it."""
        need = self._expected_bytes(lane.tier, entry)
        free = need if capacity is None else capacity - self._ledger.used_bytes(lane.tier)
        free += self._ledger.unfinished.get((lane.tier, entry.id), 0)  # it is written over
        if lane.full:
            free = min(free, 0)
        if free >= need and capacity is not None:
            free += self._ledger.leaving_bytes(lane.tier)  # what failed to go counts as gone here
        return need, free

    def _expected_bytes(self, tier: str, entry: LedgerEntry) -> int:
        """Return the bytes that a copy is expected to take on a tier: as many of its images' as the newest copy there
        takes of its own, where the tier packs them; all where there is none yet."""
        raw_bytes, entries = self._raw_bytes(tier, entry), self._ledger.entries
        newest_first = map(entries.peek, entries.ids(newest_first=True))
        there = (e for e in newest_first if e.state(tier) is CopyState.COMMITTED)
        newest = next(there, None)
        if newest is None or not (newest_bytes := newest.bytes.get(tier, 0)):
            return raw_bytes
        return min(raw_bytes, -(-raw_bytes * newest_bytes // self._raw_bytes(tier, newest)))

    def _raw_bytes(self, tier: str, entry: LedgerEntry) -> int:
        """Return the bytes of all images that ranks bring of a checkpoint to what this rank sees of a tier."""
        if entry.parts is not None:
            return image_bytes_of(entry)
        return image_bytes_of(entry) * self.others.ranks_on(tier)

    def _clear_up(self, lane: FlushLane, entry: LedgerEntry) -> bool:
        """Remove what failed tries have left of other copies, and say whether that has begun: a copy that comes later
        would wait for this one, and this one for its room."""
        unfinished = [id for tier, id in self._ledger.unfinished if tier == lane.tier]
        others = [id for id in unfinished if id != entry.id]
        why = "it was left unfinished, and room is needed"
        return any([self.collect(lane.tier, id, why) for id in others])

    def collect(self, tier: str, id: CheckpointId, reason: str) -> bool:
        """Remove what is left of this rank's part of a copy that was never committed; False where that was tried."""
        entry = self._ledger.entries.get(id)
        own = entry is not None and entry.parts is None and self.others.land_only
        shard = entry.shard if own and entry is not None else None
        return self._dropper.collect(tier, id, reason, shard=shard)

    def _relieve(self, lane: FlushLane, missing_bytes: int) -> bool:
        """Give up what slower tiers are owed of one checkpoint, where their rules say so and it makes room here."""
        entries = self._ledger.entries
        settling = {e.id for e in self._ledger.open() if e.in_doubt or e.landed}
        settling |= {other.active.entry.id for other in self._lanes.values() if other.active}
        settling |= self._dropper.reserved | self._dropper.awaited
        view = self._ledger.view(settling=settling, restoring=self._dropper.paused)
        decisions = self._plan_relief(view, lane.tier, missing_bytes=missing_bytes)
        for decision in decisions:
            entry, reason = entries[decision.checkpoint], decision.reason
            self.turns.give_up(entry, decision.tier, reason, level=logging.WARNING)
        return bool(decisions)

    def _on_room_missing(
        self, lane: FlushLane, entry: LedgerEntry, need: int, free: int, now_s: float
    ) -> None:
        then = f"it is tried again when room is made, and every {LONGEST_RETRY_S:g} s"
        if self.others.land_only:
            then = "all ranks give it up there"
        found = "the disk is full" if lane.full else f"there is room for {format_size(free)}"
        lane.full = False
        lane.not_before_s = now_s + LONGEST_RETRY_S  # others share the disk, and leave marks there
        self._dropper.survey(lane.tier)
        _, damaged = self._dropper.damaged_for_room(self._ledger.view(), lane.tier)
        stay = ""
        if damaged:
            named = few_of([str(id) for id in damaged])
            stay = f" Damaged, and not dropped without a person's order: {named}."
        self._is_failing(
            lane,
            entry,
            CapacityError(
                f"flush of {entry.id} to {lane.tier}: it needs {format_size(need)}, {found}, and nothing more may be "
                f"dropped there; {then}.{stay} Raise the capacity, keep fewer checkpoints (retain), unpin some, free "
                "the disk, or remove one ('tierfall rm ID')"
            ),
            for_good=True,
        )

    def _is_failing(
        self, lane: FlushLane, entry: LedgerEntry, error: BaseException, *, for_good: bool = False
    ) -> None:
        """A tier does not take copies at present: whoever waits for one, now or later, is told why."""
        said, self._said_failing[lane.tier] = self._said_failing.get(lane.tier), entry.id
        is_news = said != entry.id or lane.tier not in self._ledger.failing
        if (for_good or is_news) and self.others.cannot(entry, lane.tier, error, for_good=for_good):
            return
        self.is_failing(lane.tier, error)

    def is_failing(self, tier: str, error: BaseException) -> None:
        """A tier does not take copies at present, from this rank or from another."""
        if tier not in self._ledger.failing:
            self._ledger.failing[tier] = error
            self.notes.tier_failing(tier, error)
            self.errors.append(error)
            logger.error("%s", error)
        for entry in self._ledger.open():
            if tier in entry.owed:
                self.tell_failing(entry, tier)

    def save_begun(self, entry: LedgerEntry) -> None:
        """Tell a save of tiers that do not take copies at present; where that may be the fault of one, it is tried."""
        for tier in entry.owed & self._ledger.failing.keys():
            lane = self._lanes[tier]
            if self._may_be_one(lane):
                lane.not_before_s = min(lane.not_before_s, self._ledger.now_s)
            else:
                self.tell_failing(entry, tier)

    def tell_failing(self, entry: LedgerEntry, tier: str) -> None:
        if entry.handle is not None:
            entry.handle.tell_tier_failed(tier, self._ledger.failing[tier])

    def room_was_made(self, lane: FlushLane, now_s: float) -> None:
        lane.full = False
        lane.not_before_s = min(lane.not_before_s, now_s)
        self.recovered(lane.tier)

    def recovered(self, tier: str) -> None:
        """A tier takes copies from this rank again."""
        if not self.others.is_stuck(tier):
            self._accepts_copies(tier)

    def _accepts_copies(self, tier: str) -> None:
        if self._ledger.failing.pop(tier, None) is not None:
            self.notes.tier_recovered(tier)

    def committed(self, tier: str, id: CheckpointId, stored_bytes: int) -> None:
        """A checkpoint is committed on a tier, where it takes ``stored_bytes``."""
        entry, lane = self._ledger.entries[id], self._lanes[tier]
        marks = entry.marks.get(tier, frozenset()) if tier in entry.damage else frozenset()
        entry.forget_damage(lane.tier)
        entry.set_state(lane.tier, CopyState.COMMITTED, stored_bytes)
        entry.marks[lane.tier] = marks.union(mark.name for mark in self.marks_of(entry))
        entry.verified.add(lane.tier)
        if entry.handle is not None:
            self._ledger.knows_what_is_good()
        entry.owed.discard(lane.tier)
        self._ledger.unfinished.pop((lane.tier, id), None)
        entry.in_doubt.discard(lane.tier)
        for fault in (entry.failures, entry.set_aside):
            fault.pop(lane.tier, None)
        entry.overtaken.discard(lane.tier)
        lane.succeeded(entry)
        self._accepts_copies(lane.tier)
        self.notes.committed(lane.tier, id, stored_bytes)
        self.counters.commits[lane.tier] = self.counters.commits.get(lane.tier, 0) + 1
        self.durable[id, lane.tier] = None
        if len(self.durable) > DURABLE_REMEMBERED:
            del self.durable[next(iter(self.durable))]
        self._dropper.survey(lane.tier)
        self.has_arrived(lane.tier, id)
        if entry.handle is not None:
            entry.handle.tell_committed(lane.tier)
        self.has_committed(lane.tier, entry)

    def _on_copy_failed(self, lane: FlushLane, transfer: Transfer, now_s: float) -> None:
        """A copy ended in an error; it stays owed unless that is hopeless. What may be left of it is noted."""
        entry, error = transfer.entry, transfer.error
        assert error is not None
        self.notes.flush_failed(lane.tier, entry.id, error)
        entry.set_state(lane.tier, CopyState.ABSENT)
        repairs = lane.tier in entry.damage  # what is there stays, and is known
        if transfer.published and not repairs:
            self._ledger.unfinished[lane.tier, entry.id] = image_bytes_of(entry)
            entry.in_doubt.add(lane.tier)
        if lane.tier not in entry.owed:
            if entry.tombstoned:
                lane.forget_stall()
            self._ledger.forget_if_gone(entry)
            return
        if isinstance(error, PreemptedError):
            logger.info("%s", error)
            return
        if repairs and isinstance(error, _NO_REPAIR):
            self.give_up_for_all(entry, lane.tier, error)
            return
        if isinstance(error, StorageFullError):
            lane.full = True
            logger.warning("flush of %s to %s: no space: %s", entry.id, lane.tier, error)
            return
        lane.back_off(entry, now_s)
        self.counters.flush_failures += 1
        if not self._ends_the_copy(lane, transfer, error):
            self._is_tried_again(lane, entry, error, now_s)

    def _ends_the_copy(self, lane: FlushLane, transfer: Transfer, error: BaseException) -> bool:
        """Give up a repair that fails for good, and set a copy aside that fails while the tier takes others, unless it
        is its source that does not answer."""
        entry = transfer.entry
        failures = entry.failures.setdefault(lane.tier, CopyFailures())
        passes = getattr(error, "retryable", False) or isinstance(error, LostWriteError)
        failures.note(lane.arrivals, lasts=not passes)
        tried = failures.count >= TRIES_BEFORE_REPORT
        others_needed = 1 if failures.lasts else ARRIVALS_BEFORE_SET_ASIDE
        alone = tried and failures.others_came >= others_needed and not transfer.source_is_silent
        if lane.tier in entry.damage:
            if alone or (tried and failures.lasts):
                self.give_up_for_all(entry, lane.tier, error)
                return True
            return False
        entry.overtaken.add(lane.tier)
        if alone:
            self._set_aside(entry, lane.tier, error)
        return alone

    def _is_tried_again(
        self, lane: FlushLane, entry: LedgerEntry, error: BaseException, now_s: float
    ) -> None:
        """Say that a copy failed, and that the tier does where that may be its fault, or has gone on for long."""
        failures = entry.failures[lane.tier]
        logger.log(
            logging.WARNING if failures.count == lane.tries == 1 else logging.DEBUG,
            "flush of %s to %s failed (try %d), again in %.1f s: %s",
            entry.id, lane.tier, failures.count, lane.not_before_s - now_s, error,
        )  # fmt: skip
        lasts = failures.lasts and lane.tries >= TRIES_BEFORE_REPORT and not self._may_be_one(lane)
        if lasts or lane.failing_for_s(now_s) >= self._max_wait_s[lane.tier]:
            self._is_failing(lane, entry, _flush_error(entry, lane.tier, error))

    def _may_be_one(self, lane: FlushLane) -> bool:
        """Say whether all failures since the tier last took a copy are of one, and last, and another waits."""
        failed = [self._ledger.entries.get(id) for id in lane.failed]
        if len(failed) != 1 or failed[0] is None or not failed[0].failures[lane.tier].lasts:
            return False
        others = (e for e in self._ledger.open() if e is not failed[0])
        return any(lane.tier in e.owed and lane.tier not in e.landed for e in others)

    def _set_aside(self, entry: LedgerEntry, tier: str, cause: BaseException) -> None:
        """Try one copy no more that fails again and again while the tier takes others; no rank does."""
        error = FlushError(
            f"flush of {entry.id} to {tier} is set aside: it failed {entry.failures[tier].count} times, and {tier} "
            f"takes others: {cause}. Mend what keeps it from being written there: the next start tries it again"
        )
        error.__cause__ = cause
        if not self.others.sets_aside(entry, tier, error):
            self.set_aside(entry, tier, error)

    def set_aside(self, entry: LedgerEntry, tier: str, error: BaseException) -> None:
        """Try a copy no more in this start; the records of those that come after it say that it is still owed."""
        entry.set_aside[tier] = error
        entry.overtaken.add(tier)
        entry.owed.discard(tier)
        self.counters.set_aside_copies += 1
        self.notes.set_aside(tier, entry.id, error)
        self._report(entry, tier, error)
        self.stop_copy(entry, tier, error)

    def stalled(
        self, lane: FlushLane, id: CheckpointId, error: BaseException, now_s: float
    ) -> None:
        """A copy could not go on, and keeps what has arrived: it is tried again from there."""
        if not lane.stall(now_s):
            return
        assert lane.active is not None
        self.notes.flush_stalled(lane.tier, id, error, lane.not_before_s)
        self.counters.flush_failures += 1
        logger.log(
            logging.WARNING if lane.active.stalls == 1 else logging.DEBUG,
            "flush of %s to %s stalls, and goes on in %.1f s: %s",
            id, lane.tier, lane.not_before_s - now_s, error,
        )  # fmt: skip
        if lane.failing_for_s(now_s) >= self._max_wait_s[lane.tier]:
            entry = lane.active.entry
            self._is_failing(lane, entry, _flush_error(entry, lane.tier, error))

    def _report(self, entry: LedgerEntry, tier: str, error: BaseException) -> None:
        if entry.handle is not None:
            entry.handle.tell_tier_failed(tier, error)
        self.errors.append(error)
        logger.error("%s", error)

    def note_fence(self, error: BaseException | None) -> None:
        """Take what a task ended with: where its tier knows a newer attempt, no rank writes any more."""
        if isinstance(error, FencedError):
            self.fence(error)
            self.others.is_fenced(error)

    def fence(self, error: FencedError) -> None:
        """A newer attempt exists: nothing more is written by this process."""
        if self.fenced is None:
            self.fenced = error
            self.notes.failed("fence", error)
            self.errors.append(error)
            logger.error("%s", error)
        for entry in self._ledger.open():
            entry.give_up(tuple(entry.owed), error)
        for lane in self._lanes.values():
            lane.give_up(error)
        self._dropper.cancel()

    def marks_of(self, entry: LedgerEntry) -> tuple[Mark, ...]:
        """The marks that go along with a copy."""
        if not entry.pinned or entry.commit is None or self.is_unpinning(entry.id):
            return ()
        wall_time_s = entry.commit.wall_time_s
        return (Mark(name=keys.PIN_MARK, checkpoint=entry.id, wall_time_s=wall_time_s),)

    def is_newest(self, tier: str, entry: LedgerEntry) -> bool:
        """Say whether ``latest`` of a tier may come to name this one: it never goes back."""
        left, entries = self._ledger.abandoned(), self._ledger.entries
        newer = takewhile(lambda id: id > entry.id, entries.ids(newest_first=True))
        return not any(
            id not in left and entries.peek(id).state(tier) is CopyState.COMMITTED for id in newer
        )

    def older_owed(self, tier: str, entry: LedgerEntry) -> tuple[CheckpointId, ...]:
        """Name the older checkpoints that the tier is still to get, though newer ones come before them."""
        left = self._ledger.abandoned()
        found = (
            e.id
            for e in self._ledger.overtaken()
            if tier in e.overtaken
            and e.order < entry.order
            and not (e.id in left or e.tombstoned or e.state(tier) is CopyState.COMMITTED)
        )
        return tuple(sorted(found)[-OLDER_OWED_MAX:])

    def give_up_for_all(self, entry: LedgerEntry, tier: str, error: BaseException) -> None:
        """Give up a copy that this rank can bring no more; so no rank brings it."""
        self.others.cannot(entry, tier, error, for_good=True)
        self.give_up_copy(entry, tier, error)

    def give_up_copy(self, entry: LedgerEntry, tier: str, error: BaseException) -> None:
        entry.owed.discard(tier)
        if tier in entry.damage:
            logger.warning("%s: %s stays damaged: %s", tier, entry.id, error)
            self.stop_copy(entry, tier, error)
            return
        self.counters.given_up_copies += 1
        self.notes.flush_given_up(tier, entry.id, error)
        self._report(entry, tier, error)
        self.stop_copy(entry, tier, error)
        if not any(lane.is_at(entry.id) for lane in self._lanes.values()):
            self._ledger.forget_if_gone(entry)

    def stop_copy(self, entry: LedgerEntry, tier: str, error: BaseException) -> None:
        """Let a copy that is given up come to no end where it is under way."""
        lane = self._lanes[tier]
        if lane.is_at(entry.id):
            lane.give_up(error)


def _rounds_failed(lane: FlushLane, entry: LedgerEntry) -> int:
    """Say how often a copy has let others go first: each time that it failed some times in a row. It is in its turn
    again once the tier has taken another one."""
    failures = entry.failures.get(lane.tier)
    if failures is None or failures.arrivals != lane.arrivals:
        return 0
    return failures.count // TRIES_BEFORE_REPORT


def _flush_error(entry: LedgerEntry, tier: str, cause: BaseException) -> FlushError:
    error = FlushError(f"flush of {entry.id} to {tier} failed and is still being tried: {cause}")
    error.__cause__ = cause
    return error
