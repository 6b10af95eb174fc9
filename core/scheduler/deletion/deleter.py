"""Dropping: how copies leave stored tiers, by retention, by room that is needed, and by a person's order.

Whoever plans a deletion reads the marks afresh: a plan of the policy says what may go, the marks of that are read, with
those that a person has changed since, and what the policy says then still may go does. Nothing here does I/O; it says
what is to be done as tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from tierfall.core.format.records import Commit, stops_drop
from tierfall.core.scheduler.deletion.planner import AgeTimer, DeletionPlanner
from tierfall.core.scheduler.ledger.emitter import EventEmitter
from tierfall.core.scheduler.ledger.entry import LedgerEntry, entry_of
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.policies import Policies
from tierfall.core.scheduler.ledger.tasks import DeleteCopy, NotWholeError, Outcome, ReadMarks
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.values import CheckpointId, CopyState, Shard
from tierfall.core.types.view import Decision, View

logger = logging.getLogger("tierfall")

RETRY_S = 30.0


class Deleter:
    """What is leaving, and which tiers' marks are to be read before more may leave.

    ``plans`` says that retention is worked out here; ``has_dropped`` hears of each copy that went by it, or is to go
    on all nodes. ``read_marks`` has marks read; ``asks_first`` has those of a copy that is to go read where other nodes
    have parts of it, and says whether it does. ``is_split`` says that other nodes have parts of what a tier holds.
    ``verifies_elsewhere`` has the other copies of what is to make room read, and says whether that is waited for.
    ``found_damage`` is told of copies that a drop relies on, and that turned out to lack files.
    ``alone``: no other ranks go on to flush what was deleted; else the order about it ends that, on all of them.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        tiers: Iterable[str],
        policies: Policies,
        hooks: Hooks,
        emitter: EventEmitter,
    ) -> None:
        self._ledger = ledger
        self._planner = DeletionPlanner(ledger, policies)
        self._age_timer = AgeTimer(ledger, policies)
        self._hooks = hooks
        self._emitter = emitter
        self._leaving: dict[str, set[CheckpointId]] = {tier: set() for tier in tiers}
        self._due: set[str] = set()
        self._surveying: set[str] = set()
        self._to_read: dict[str, set[CheckpointId]] = {tier: set() for tier in self._leaving}
        self._failed: dict[tuple[str, CheckpointId], tuple[DeleteCopy, float]] = {}
        self._asks_again_s: dict[str, float] = {}
        self.reserved: set[CheckpointId] = set()
        self.awaited: set[CheckpointId] = set()
        self._changed: set[CheckpointId] = set()
        self.dropped = 0
        self.paused = False
        self._trusted: set[str] = set()
        self._to_announce: set[tuple[str, CheckpointId]] = set()
        self._cancelled = False

    @property
    def plans(self) -> bool:
        """Return whether this rank works out the retention of tiers; with several ranks, rank 0 does."""
        return self._hooks.group.decides

    def survey(self, tier: str) -> None:
        """Ask for the marks of a tier to be read, and for its retention to be worked out after that."""
        if self.plans and not self._cancelled:
            self._due.add(tier)

    @property
    def gated(self) -> bool:
        """Say whether nothing may be dropped by rule yet: what is good is known once this start has restored, or has
        committed a checkpoint of its own."""
        return not (self._ledger.knows_good or self._trusted)

    def trust(self) -> None:
        """Carry a person's order out: apply the rules of each tier once, now, as if every copy had been verified."""
        self._trusted = set(self._leaving)
        self.survey_all()

    def survey_found(self, tier: str, id: CheckpointId) -> None:
        """Do so, for a copy that was found to be there: what marks it has is not known."""
        self._to_read[tier].add(id)
        self.survey(tier)

    def survey_all(self) -> None:
        for tier in self._leaving:
            self.survey(tier)

    def busy(self, tier: str | None = None) -> bool:
        """Say whether something is on its way out (of one tier); what failed to go is not waited for."""
        if tier is not None:
            return self._is_under_way([tier])
        due = self._due and not self.gated
        return bool(due or self._surveying) or self.is_dropping()

    def _is_under_way(self, tiers: Iterable[str]) -> bool:
        return any((tier, id) not in self._failed for tier in tiers for id in self._leaving[tier])

    def retry(self, now_s: float) -> None:
        """Try again what could not be dropped, once its pause is over, and let go what has become too old."""
        for tier in self._age_timer.take_due() if self._looks_by_itself() else ():
            if self._plan(tier):
                self.survey(tier)
        for key, (task, not_before_s) in list(self._failed.items()):
            if now_s < not_before_s or self.paused:
                continue
            del self._failed[key]
            # what a rule let go is decided on again, if its commit record is there; else what is left of it goes
            ordered = task.tombstoned or task.void or self._hooks.is_split(task.tier)
            self._hooks.dispatch(replace(task, unfinished=task.unfinished or not ordered))

    def retry_now(self, id: CheckpointId) -> tuple[str, ...]:
        """Try what could not be dropped of a checkpoint again at once; name the tiers."""
        tiers = tuple(tier for tier, failed in self._failed if failed == id)
        for tier in tiers:
            task, _ = self._failed.pop((tier, id))
            self._hooks.dispatch(task)
        return tiers

    def next_s(self) -> float | None:
        """Say when something is to be tried again; while a restore reads the tiers, nothing is."""
        if self.paused:
            return None
        times = [when for _, when in self._failed.values()]
        times += [when for when in self._asks_again_s.values() if when > self._ledger.now_s]
        if self._looks_by_itself() and (look_s := self._age_timer.next_s()) is not None:
            times.append(look_s)
        return min(times, default=None)

    def _looks_by_itself(self) -> bool:
        return self.plans and not (self.paused or self.gated or self._cancelled)

    def reserve(self, id: CheckpointId) -> None:
        """A person's order begins to change this checkpoint's marks: what a survey has read of them is old."""
        self.reserved.add(id)
        if self._surveying:
            self._changed.add(id)

    def is_dropping(self) -> bool:
        """Say whether a copy is just being dropped somewhere; one that failed to go is not."""
        return self._is_under_way(self._leaving)

    def dispatch_surveys(self) -> None:
        """Read the marks that are due, of what may go, unless a restore is reading the tiers, or nothing may be dropped
        yet."""
        if self.paused or self.gated:
            return
        for tier in sorted(self._due - self._surveying):
            self._due.discard(tier)
            if not any(_has_record(e, tier) for e in self._ledger.entries.values()):
                self._trusted.discard(tier)
                continue
            ids = {decision.checkpoint for decision in self._plan(tier)} | self._to_read[tier]
            self._to_read[tier].clear()
            self._surveying.add(tier)
            self._hooks.read_marks(ReadMarks(tier=tier, ids=tuple(sorted(ids))))

    def cancel(self) -> None:
        """Nothing more is dropped by this process of its own accord; a person's order still is."""
        self._cancelled = True
        self._due.clear()
        for tier, id in self._failed:
            self._leaving[tier].discard(id)
        self._failed.clear()

    def take_marks(self, task: ReadMarks, outcome: Outcome) -> None:
        """Learn a tier's marks, then carry out its retention."""
        self._surveying.discard(task.tier)
        outdated = self.reserved | self._changed
        if not self._surveying:
            self._changed.clear()
        read: Mapping[CheckpointId, frozenset[str]] = outcome.value or {}
        self._update(task.tier, {id: marks for id, marks in read.items() if id not in outdated})
        if outcome.error is not None:
            self._trusted.discard(task.tier)
            logger.warning(
                "%s: nothing is dropped there, its marks could not be read: %s",
                task.tier,
                outcome.error,
            )
            self._to_read[task.tier].update(id for id in task.ids if id not in read)
            self._age_timer.look_in(task.tier, RETRY_S)
            return
        if self._cancelled:
            return
        if self.paused:
            self._due.add(task.tier)
            return
        plan = self._plan(task.tier)
        drops = {d.checkpoint: d.reason for d in plan if d.checkpoint in read}
        newest = self._newest_left(task.tier, without=drops) if drops else None
        relied = self._planner.relied_on(self._view(task.tier), task.tier, drops)
        for id, reason in drops.items():
            self._delete(task.tier, id, reason, next_latest=newest, relies_on=relied)
        if len(drops) < len(plan):
            self.survey(task.tier)  # what was read has changed the plan
        else:
            self._trusted.discard(task.tier)
        self.look_again(but=task.tier)

    def look_again(self, *, but: str | None = None) -> None:
        """Something may go now that could not before: survey the tiers, ``but`` one, where retention would drop it."""
        for tier in self._leaving:
            if tier != but and self._plan(tier):
                self.survey(tier)

    def news(self, tier: str, found: Mapping[CheckpointId, frozenset[str]]) -> set[CheckpointId]:
        """Name those of which other marks were known so far."""
        entries = self._ledger.entries
        return {
            id
            for id, marks in found.items()
            if (entry := entries.get(id)) is not None
            and _has_record(entry, tier)
            and entry.marks.get(tier, frozenset()) != marks
        }

    def _update(self, tier: str, found: dict[CheckpointId, frozenset[str]]) -> None:
        for id, marks in found.items():
            entry = self._ledger.entries.get(id)
            if entry is not None and _has_record(entry, tier):
                entry.marks[tier] = marks
                if entry.tombstoned and not self._hooks.group.land_only:
                    entry.give_up(self._leaving, entry.given_up("it was deleted by a person"))

    def _plan(self, tier: str) -> list[Decision]:
        if self._planner.keeps_all(tier):
            return []
        view = self._view(tier)
        self._age_timer.note(view, tier)
        self._planner.warn_missing_metrics(view)
        busy = self._busy_on(tier)
        planned = self._planner.plan(view, tier, busy)
        if self._ledger.has_unverified and len(planned) < len(
            self._planner.plan(replace(view, trusting=True), tier, busy)
        ):
            self._hooks.verify(tier)
        return planned

    def _view(self, tier: str) -> View:
        return replace(self._ledger.view(), trusting=tier in self._trusted)

    def _busy_on(self, tier: str) -> set[CheckpointId]:
        """Return the checkpoints that are being deleted from a tier, or that a command is about."""
        return self._leaving[tier] | self.reserved | self.awaited

    def damaged_for_room(self, view: View, tier: str) -> tuple[list[Decision], list[CheckpointId]]:
        """See ``DeletionPlanner.damaged_for_room``."""
        return self._planner.damaged_for_room(view, tier, self._busy_on(tier))

    def drop(
        self,
        tier: str,
        id: CheckpointId,
        reason: str,
        *,
        ordered: bool = False,
        beside: Collection[CheckpointId] = (),
    ) -> bool:
        """Let a committed copy go, while those ``beside`` it go too; False where a person's order about it, not this
        one, is being carried out."""
        newest = self._newest_left(tier, without={id, *beside})
        relied = () if ordered or newest is None else (newest,)
        return self._delete(tier, id, reason, ordered=ordered, next_latest=newest, relies_on=relied)

    def _delete(
        self,
        tier: str,
        id: CheckpointId,
        reason: str,
        *,
        next_latest: CheckpointId | None,
        ordered: bool = False,
        relies_on: tuple[CheckpointId, ...] = (),
    ) -> bool:
        if not ordered and (self._cancelled or id in self.reserved | self.awaited):
            return False
        entry = self._ledger.entries[id]
        if not ordered and entry.tombstoned:
            self._hooks.finish_deletion(id)  # a tombstone is for all copies: it goes with the last
            return False
        task = DeleteCopy(
            tier=tier,
            id=id,
            reason=reason,
            tombstoned=entry.tombstoned,
            next_latest=next_latest,
            relies_on=relies_on if entry.state(tier) is CopyState.COMMITTED else (),
        )
        if ordered and self._hooks.is_split(tier):
            self.leave(task)  # each node is told so by the order
        elif not ordered and self._hooks.read_marks_first(task):
            entry.set_state(tier, CopyState.LEAVING)
            self._leaving[tier].add(id)
        else:
            self._to_announce.add((tier, id))
            self.leave(task)
        return True

    def take_answer(self, task: DeleteCopy, outcome: Outcome) -> None:
        """The marks of a copy that is to go have been read on all nodes: let it go, unless they stop that."""
        self._leaving[task.tier].discard(task.id)
        entry = self._ledger.entries.get(task.id)
        if entry is None:
            return
        entry.note_kept(task.tier)
        if self._cancelled or isinstance(outcome.error, IntegrityError):
            return  # what it relies on is not whole: that is known to all in a moment
        if outcome.error is not None:
            logger.warning(
                "%s: %s is not dropped, its marks could not be read: %s",
                task.tier,
                task.id,
                outcome.error,
            )
            self._asks_again_s[task.tier] = self._ledger.now_s + RETRY_S
            return
        entry.marks[task.tier] = outcome.value[task.id]
        if self.paused or stops_drop(outcome.value[task.id], tombstoned=task.tombstoned):
            logger.info("%s: %s stays after all: it was marked", task.tier, task.id)
            self.survey(task.tier)
            return
        self._hooks.group.has_dropped(task)
        self.leave(replace(task, relies_on=()))  # all nodes have looked

    def waits_for_marks(self, tier: str) -> bool:
        """Say whether a drop was kept off a moment ago as marks could not be read: the next one waits."""
        return self._ledger.now_s < self._asks_again_s.get(tier, 0.0)

    def collect(
        self, tier: str, id: CheckpointId, reason: str, *, shard: Shard | None = None
    ) -> bool:
        """Remove what is left of a copy that was never committed; of one ``shard`` only, where others' may go on. As
        ``leave`` says, False where it is on its way out."""
        return self.leave(DeleteCopy(tier=tier, id=id, reason=reason, unfinished=True, shard=shard))

    def collect_unfinished(self, tier: str, id: CheckpointId, reason: str) -> bool:
        """Delete this rank's files of a copy that was never committed; return False where that was begun before."""
        entry = self._ledger.entries.get(id)
        own = entry is not None and entry.parts is None and self._hooks.group.land_only
        shard = entry.shard if own and entry is not None else None
        return self.collect(tier, id, reason, shard=shard)

    def leave(self, task: DeleteCopy) -> bool:
        """Let a copy go, whatever was planned; False where it is on its way out already, or that failed."""
        entry = self._ledger.entries.get(task.id)
        if entry is not None and not task.unfinished:
            entry.set_state(task.tier, CopyState.LEAVING)
        if task.id in self._leaving[task.tier] or (self._cancelled and task.unfinished):
            return False
        self._leaving[task.tier].add(task.id)
        logger.info("%s: %s is dropped: %s", task.tier, task.id, task.reason)
        self._hooks.dispatch(task)
        return True

    def take_dropped(self, task: DeleteCopy, outcome: Outcome, now_s: float) -> bool:
        """Take what became of a deletion; True when there is more room now.

        One that failed half-way counts as leaving until it succeeds: its commit record may be gone.
        """
        entry = self._ledger.entries.get(task.id)
        if isinstance(outcome.error, NotWholeError):
            self._is_kept(entry, task, outcome.error)
            return False
        if outcome.error is not None:
            logger.warning("%s: could not drop %s: %s", task.tier, task.id, outcome.error)
            self._emitter.drop_failed(task, outcome.error)
            if self._cancelled:
                self._leaving[task.tier].discard(task.id)
            else:
                # it has looked, and may have begun: what it relied on may go meanwhile
                unfinished = task.unfinished and not _is_leaving(entry, task.tier)
                task = replace(task, relies_on=(), unfinished=unfinished)
                self._failed[task.tier, task.id] = (task, now_s + RETRY_S)
            return False
        self._leaving[task.tier].discard(task.id)
        if task.unfinished:
            return self._took_rest(entry, task, outcome)
        if entry is not None:
            return self._on_gone(entry, task, outcome)
        is_part = self._hooks.group.land_only and not task.void
        if is_part and stops_drop(outcome.value, tombstoned=task.tombstoned):
            # a part that a mark keeps, or a deletion is to find
            self._ledger.partial.add((task.tier, task.id))
        return False

    def _took_rest(self, entry: LedgerEntry | None, task: DeleteCopy, outcome: Outcome) -> bool:
        """What was left of a copy is gone: of one that was never committed, or of one whose deletion had failed. Or its
        commit record is there: then it is a copy."""
        size = self._ledger.unfinished.pop((task.tier, task.id), 0)
        leaving = _is_leaving(entry, task.tier)
        if entry is not None:
            entry.in_doubt.discard(task.tier)
        if outcome.value is not None:
            self._on_still_committed(task, outcome.value)
            if leaving:
                self.survey(task.tier)
            return not leaving
        if entry is not None and leaving:
            return self._on_gone(entry, replace(task, unfinished=False), outcome)
        self._emitter.dropped(task, size, outcome.seconds)
        return True

    def _is_kept(self, entry: LedgerEntry | None, task: DeleteCopy, error: NotWholeError) -> None:
        """What a deletion relies on is not whole: the copy is still there, and what may go is planned anew."""
        self._leaving[task.tier].discard(task.id)
        self._to_announce.discard((task.tier, task.id))
        logger.warning("%s: %s is not dropped: %s", task.tier, task.id, error)
        if entry is not None and entry.state(task.tier) is CopyState.LEAVING:
            entry.note_kept(task.tier)
        self.not_whole(task.tier, error)
        if error.damaged:
            self.survey(task.tier)
        else:
            self._asks_again_s[task.tier] = self._ledger.now_s + RETRY_S
            self._age_timer.look_in(task.tier, RETRY_S)

    def not_whole(self, tier: str, error: NotWholeError) -> None:
        """Copies that a deletion relies on lack files: they count for nothing from now on."""
        for id, (why, has_record) in error.damaged.items():
            self._hooks.found_damage(tier, id, why, repairable=has_record)

    def _on_still_committed(self, task: DeleteCopy, commit: Commit) -> None:
        """What looked unfinished is a checkpoint: the answer to its commit was lost."""
        entry = self._ledger.entries.get(task.id)
        if self._hooks.is_split(task.tier):  # this node's part of it is
            self._ledger.partial.add((task.tier, task.id))
            if self._hooks.was_deleted(task.id):
                self._hooks.finish_deletion(task.id)
            return
        if entry is None:
            entry = self._ledger.entries[task.id] = entry_of(task.id, commit, self._ledger.shard)
        if entry.attempt_id != commit.line.attempt_id:
            return
        self._to_announce.discard((task.tier, task.id))
        entry.bytes[task.tier] = commit.stored_bytes
        entry.note_kept(task.tier)
        self._to_read[task.tier].add(task.id)
        if self._hooks.was_deleted(task.id):
            self._hooks.finish_deletion(task.id)

    def _on_gone(self, entry: LedgerEntry, task: DeleteCopy, outcome: Outcome) -> bool:
        tells = (task.tier, task.id) in self._to_announce
        self._to_announce.discard((task.tier, task.id))
        if stops_drop(outcome.value or (), tombstoned=task.tombstoned):
            self._on_kept(entry, task, outcome.value)
            return False
        self._emitter.dropped(task, entry.bytes.get(task.tier, 0), outcome.seconds)
        entry.note_gone(task.tier)
        self.dropped += 1
        if tells:
            self._hooks.group.has_dropped(task)
        self._ledger.forget_if_gone(entry)
        return True

    def _on_kept(self, entry: LedgerEntry, task: DeleteCopy, marks: frozenset[str]) -> None:
        logger.info("%s: %s stays after all: it was marked", task.tier, entry.id)
        if self._hooks.is_split(task.tier):  # other nodes' parts are gone, or may be
            entry.note_gone(task.tier)
            self._ledger.partial.add((task.tier, entry.id))
            self._ledger.forget_if_gone(entry)
        elif entry.state(task.tier) is CopyState.LEAVING:
            entry.note_kept(task.tier)
            entry.marks[task.tier] = marks
            self.survey(task.tier)

    def _newest_left(self, tier: str, *, without: Collection[CheckpointId]) -> CheckpointId | None:
        left, entries = self._ledger.abandoned(), self._ledger.entries
        return next(
            (
                id
                for id in entries.ids(newest_first=True)
                if id not in left
                and id not in without
                and entries.peek(id).state(tier) is CopyState.COMMITTED
                and not entries.peek(id).tombstoned
            ),
            None,
        )


def _is_leaving(entry: LedgerEntry | None, tier: str) -> bool:
    return entry is not None and entry.state(tier) is CopyState.LEAVING


def _has_record(entry: LedgerEntry, tier: str) -> bool:
    """Say whether a commit record of it is on a tier, of a good copy or of a damaged one."""
    state = entry.state(tier)
    return state is CopyState.COMMITTED or (state is CopyState.ABSENT and tier in entry.damage)
