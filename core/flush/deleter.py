"""Deletion of copies from stored tiers: by a person, by retention, and for room.

The policies decide; their decisions are combined with what the ledger knows of damaged copies and of deletions by
persons. A deletion is planned by what is known to be decided. The worker that carries it out reads the tier's list, and
refuses if a person has added to it since: then all is planned again. No I/O: tasks are dispatched.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from tierfall.core.flush.component import Component
from tierfall.core.flush.facts import LedgerEntry, entry_of
from tierfall.core.flush.messages import DeletedCopy, FoundDamage
from tierfall.core.flush.tasks import DeleteCopy, NotWholeError, Outcome
from tierfall.core.format.decided import DecidedList
from tierfall.core.format.records import Commit
from tierfall.core.runtime import retries
from tierfall.core.types import events
from tierfall.core.types.values import CheckpointId, CopyState, Shard
from tierfall.core.types.view import Decision, Verdict, View
from tierfall.policies.protection import surviving
from tierfall.policies.retention import missing_metrics, next_due_s, plan_drops

if TYPE_CHECKING:
    from tierfall.core.flush.coordinator import Coordinator

logger = logging.getLogger("tierfall")

DELETED = "deleted by a person"
STAY = 2
"""So many of the newest copies that stay are looked at right before a deletion by rule."""
SAVES_WITHOUT_METRICS = 3
"""A rule names a metric that so many saves in a row lack: log it."""
WAIT_MAX_S = 86400.0
"""The longest wait in seconds: system calls bound it."""
LATE_S = 0.001
"""Seconds added to a due time, since sums of clocks may round down."""


class Deleter(Component):
    """The deletions in progress, and the tiers where the next are to be planned.

    Rank 0 plans. Deletions from a tier are planned again after each change of any checkpoint, but only while none is in
    progress there, and no restore reads the tiers.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)
        self._warned_metrics: set[str] = set()
        self._by_age_s: dict[str, float] = {}
        """By tier: when retention may next delete something by the age of a checkpoint alone."""
        self._leaving: dict[str, set[CheckpointId]] = {tier: set() for tier in self._lanes}
        self._due: set[str] = set()
        self._failed: dict[tuple[str, CheckpointId], tuple[DeleteCopy, float]] = {}
        self._not_before_s: dict[str, float] = {}
        """By tier: no rule deletes there before this time, since a copy that is to stay could not be looked at."""
        self._seen: View | None = None
        self._trusted: set[str] = set()
        self._to_announce: set[tuple[str, CheckpointId]] = set()
        self._cancelled = False

    def set_paused(self, paused: bool) -> None:
        """Pause deletions while a restore reads the tiers, or resume them."""
        self._ledger.restoring = paused
        if not paused:
            self.schedule_all()

    def schedule_plan(self, tier: str) -> None:
        """Schedule a plan of what is deleted from a tier; rank 0 makes it."""
        if self._group.decides and not self._cancelled:
            self._due.add(tier)

    @property
    def rules_are_suspended(self) -> bool:
        """Return whether rules delete nothing: this start has neither restored nor committed, so that no copy is known
        to be good, or a listing was incomplete."""
        return self._ledger.lags or not (self._ledger.has_begun or self._trusted)

    def trust(self) -> None:
        """Apply the rules of each tier once, as if every copy were verified, because a command says so."""
        self._trusted = set(self._leaving)
        self.schedule_all()

    def schedule_all(self) -> None:
        for tier in self._leaving:
            self.schedule_plan(tier)

    def busy(self) -> bool:
        """Return whether a deletion is in progress or is to be planned; failed deletions do not count."""
        return self.is_deleting() or bool(self._due and not self._ledger.restoring)

    def retry(self, now_s: float) -> None:
        """Retry failed deletions that are due; plan tiers where an age is reached or a delay is over."""
        if self._applies_rules():
            for tier in [tier for tier, at in self._by_age_s.items() if now_s >= at]:
                del self._by_age_s[tier]
                self.schedule_plan(tier)
        for tier in [tier for tier, when in self._not_before_s.items() if now_s >= when]:
            del self._not_before_s[tier]
            self.schedule_plan(tier)
        for key, (task, not_before_s) in list(self._failed.items()):
            if now_s < not_before_s or self._ledger.restoring:
                continue
            del self._failed[key]
            # a rule's deletion is planned anew if the record is still there, else finished; a person's is repeated
            entry = self._ledger.entries.get(task.id)
            by_person = entry is not None and entry.deleted
            is_planned = task.known is not None and not (
                by_person or self._group.is_split(task.tier)
            )
            known = None if task.known is None else self._ledger.decided
            unfinished = task.unfinished or is_planned
            self._dispatch(replace(task, known=known, unfinished=unfinished))

    def try_now(self) -> None:
        """Try at once whatever waits for its next try."""
        self._not_before_s.clear()
        self.schedule_all()
        for key, (task, _) in self._failed.items():
            self._failed[key] = (task, 0.0)

    def _schedule(self) -> None:
        """Have what waits for a time tried at that time."""
        by_age_s = self._by_age_s.values() if self._applies_rules() else ()
        failed_s = (when for _, when in self._failed.values())
        for when in (*failed_s, *self._not_before_s.values(), *by_age_s):
            self._wake_at(when)

    def _applies_rules(self) -> bool:
        return self._group.decides and not (
            self._ledger.restoring or self.rules_are_suspended or self._cancelled
        )

    def is_deleting(self, only: str | None = None) -> bool:
        """Return whether a copy is being deleted (from ``only``); failed deletions do not count."""
        tiers = self._leaving if only is None else (only,)
        return any((tier, id) not in self._failed for tier in tiers for id in self._leaving[tier])

    def dispatch_planned(self) -> None:
        """Delete what is to be deleted on each tier that is due, and where no deletion is in progress."""
        if self._ledger.restoring:
            return
        for tier in sorted(self._due):
            if not self.is_deleting(tier):
                self._due.discard(tier)
                self._delete_planned(tier)
        self._schedule()

    def _delete_planned(self, tier: str) -> None:
        busy = self._leaving[tier]
        deleted = self._deleted(tier)
        by_person = [d for d in deleted if self._planner.decisions.is_noted(d.checkpoint, tier)]
        ids = {d.checkpoint for d in by_person}
        others = busy | {d.checkpoint for d in deleted}
        by_rule = (
            self._plan(tier, others)
            if self._applies_rules() and self.rules_may_delete(tier)
            else []
        )
        if self.rules_may_delete(tier):
            self._trusted.discard(tier)
        drops = {d.checkpoint: d.reason for d in (*by_person, *by_rule)}
        newest = self._ledger.newest_on(tier, without=drops) if drops else None
        stay = self._stay(tier, drops) if by_rule else ()
        for id, reason in drops.items():
            relied = () if id in ids else stay
            self._delete(tier, id, reason, next_latest=newest, stay=relied)

    def cancel(self) -> None:
        """Stop deleting: a newer attempt exists."""
        self._cancelled = True
        self._due.clear()
        for tier, id in self._failed:
            self._leaving[tier].discard(id)
        self._failed.clear()

    def _delay(self, tier: str, why: str) -> None:
        """Delete nothing from a tier by rule for a time, longer after each consecutive refusal."""
        if self.rules_may_delete(tier):
            failures = self._conditions.report(tier, logging.WARNING, "%s: %s", tier, why)
            self._not_before_s[tier] = self._ledger.now_s + retries.wait_s(failures)

    def _end_delay(self, tier: str) -> None:
        self._not_before_s.pop(tier, None)
        self._conditions.end(tier, "%s: the tier's rules are applied again", tier)

    def rules_may_delete(self, tier: str) -> bool:
        """Return whether rules may delete from a tier now: a copy there that could not be looked at delays them."""
        return self._ledger.now_s >= self._not_before_s.get(tier, 0.0)

    def schedule_changed(self) -> None:
        """Schedule a plan for each tier that has what a person has deleted, and for each with rules, if any checkpoint
        has changed."""
        for tier in self._leaving:
            if self._deleted(tier):
                self.schedule_plan(tier)
        tiers = [tier for tier in self._leaving if not self._keeps_all(tier)]
        if not (tiers and self._applies_rules()):
            return
        seen = replace(self._ledger.view(), wall_time_s=0.0, read_bytes_per_s={})
        if seen == self._seen:
            return
        self._seen = seen
        for tier in tiers:
            self.schedule_plan(tier)

    def _plan(self, tier: str, busy: Collection[CheckpointId]) -> list[Decision]:
        """Return what the rules of a tier delete now."""
        if self._keeps_all(tier):
            return []
        view = replace(self._ledger.view(), assume_verified=tier in self._trusted)
        self._by_age_s.pop(tier, None)
        due = next_due_s(view, tier)
        if due is not None and due > view.wall_time_s:
            left_s = min(due - view.wall_time_s + LATE_S, WAIT_MAX_S)
            self._by_age_s[tier] = self._ledger.now_s + left_s
        self._warn_missing_metrics(view)
        return [d for d in plan_drops(view, tier) if d.checkpoint not in busy]

    def request_delete(
        self, tier: str, id: CheckpointId, reason: str, *, beside: Collection[CheckpointId] = ()
    ) -> bool:
        """Delete a committed copy; those ``beside`` it are deleted, too. Return False if it is in progress or is
        retried, or deletions are cancelled."""
        drops = {id, *beside}
        newest = self._ledger.newest_on(tier, without=drops)
        return self._delete(tier, id, reason, next_latest=newest, stay=self._stay(tier, drops))

    def _delete(
        self,
        tier: str,
        id: CheckpointId,
        reason: str,
        *,
        next_latest: CheckpointId | None,
        stay: tuple[CheckpointId, ...],
    ) -> bool:
        if self._cancelled:
            return False
        is_good = self._ledger.entries[id].state(tier) is CopyState.COMMITTED
        task = DeleteCopy(
            tier=tier,
            id=id,
            reason=reason,
            known=self._ledger.decided,
            next_latest=next_latest,
            stay=stay if is_good else (),
        )
        self._to_announce.add((tier, id))
        return self.delete(task)

    def collect_garbage(
        self, tier: str, id: CheckpointId, reason: str, *, shard: Shard | None = None
    ) -> bool:
        """Delete the files of a copy that was never committed; only those of ``shard`` where other ranks' are kept.
        Return as ``delete`` does."""
        task = DeleteCopy(tier=tier, id=id, reason=reason, unfinished=True, shard=shard)
        return self.delete(task)

    def collect_unfinished(self, tier: str, id: CheckpointId, reason: str) -> bool:
        """Delete this rank's files (all, if the ledger lacks the checkpoint) of a copy that was never committed; return
        False if that was begun before, or a listing was incomplete, or a commit record there may be out of reach."""
        if self._ledger.lags or tier in self._ledger.unsure:
            return False
        entry = self._ledger.entries.get(id)
        shard = None if entry is None else entry.shard
        return self.collect_garbage(tier, id, reason, shard=shard)

    def delete(self, task: DeleteCopy) -> bool:
        """Dispatch a deletion, whatever was planned; return False if it is in progress or is retried, or deletions are
        cancelled."""
        entry = self._ledger.entries.get(task.id)
        if entry is not None and not task.unfinished:
            entry.set_state(task.tier, CopyState.LEAVING)
        if task.id in self._leaving[task.tier] or (self._cancelled and task.unfinished):
            return False
        self._leaving[task.tier].add(task.id)
        self._dispatch(task)
        return True

    def on_deleted(self, task: DeleteCopy, outcome: Outcome, now_s: float) -> bool:
        """Apply the outcome of a deletion; return whether room was made.

        A copy whose deletion failed half-way stays LEAVING until it succeeds: its commit record may be gone.
        """
        entry = self._ledger.entries.get(task.id)
        if isinstance(outcome.error, NotWholeError):
            self._on_not_whole(entry, task, outcome.error)
            return False
        if outcome.error is not None:
            failures = self._conditions.report(
                (task.tier, task.id),
                logging.WARNING, "%s: could not delete %s: %s", task.tier, task.id, outcome.error,
            )  # fmt: skip
            self._emit(events.DropFailed, id=task.id, tier=task.tier, reason=outcome.error)
            if self._cancelled:
                self._leaving[task.tier].discard(task.id)
            else:
                # it may have begun after it looked at the copies that stay, which may be deleted meanwhile
                unfinished = task.unfinished and not _is_leaving(entry, task.tier)
                task = replace(task, stay=(), unfinished=unfinished)
                self._failed[task.tier, task.id] = (task, now_s + retries.wait_s(failures))
            return False
        self._leaving[task.tier].discard(task.id)
        if not (task.unfinished and outcome.value is not None):  # else it is still committed
            text = "%s: the deletion of %s is not refused any more"
            self._conditions.end((task.tier, task.id), text, task.tier, task.id)
            self._end_delay(task.tier)
        if task.unfinished:
            return self._on_rest_deleted(entry, task, outcome)
        if isinstance(outcome.value, DecidedList):
            self._on_refused(entry, task, outcome.value)
            return False
        if entry is not None:
            return self._on_gone(entry, task, outcome)
        return False

    def _on_refused(self, entry: LedgerEntry | None, task: DeleteCopy, found: DecidedList) -> None:
        """The tier's list has what was not known: nothing was deleted, and it is planned again."""
        self._to_announce.discard((task.tier, task.id))
        known = task.known
        assert known is not None, "else nothing is refused"
        if not self._group.decides and task.id not in (found - known).checkpoints:
            # rank 0 has deleted its part of the copy, and this is about other checkpoints
            self.delete(replace(task, known=known | found))
        elif entry is None or not self._group.decides:
            # rank 0 has deleted its part of the copy: this node's part stays, for what was decided here
            self._ledger.partial.add((task.tier, task.id))
            if entry is not None:
                entry.note_gone(task.tier)
                self._ledger.forget_if_gone(entry)
        elif entry.state(task.tier) is CopyState.LEAVING:
            entry.note_kept(task.tier)
        self.schedule_plan(task.tier)

    def _on_rest_deleted(
        self, entry: LedgerEntry | None, task: DeleteCopy, outcome: Outcome
    ) -> bool:
        """Files of an uncommitted copy, or of a failed deletion, are deleted; or a commit record was found there."""
        size = self._ledger.unfinished.pop((task.tier, task.id), 0)
        leaving = _is_leaving(entry, task.tier)
        if outcome.value is not None:
            self._on_still_committed(task, outcome.value)
            return not leaving
        if entry is not None and leaving:
            return self._on_gone(entry, replace(task, unfinished=False), outcome)
        self._report_deleted(task, size, outcome.seconds)
        return True

    def _on_not_whole(
        self, entry: LedgerEntry | None, task: DeleteCopy, error: NotWholeError
    ) -> None:
        """A copy that is to stay is damaged: nothing was deleted, and it is planned again."""
        self._leaving[task.tier].discard(task.id)
        self._to_announce.discard((task.tier, task.id))
        if entry is not None and entry.state(task.tier) is CopyState.LEAVING:
            entry.note_kept(task.tier)
        for id, (text, has_record) in error.damaged.items():
            self._messages.report(FoundDamage(text=text, repairable=has_record), id, task.tier)
        why = f"{task.id} is not deleted: {error}"
        if error.damaged:
            logger.warning("%s: %s", task.tier, why)
        else:
            self._delay(task.tier, why)
        self.schedule_plan(task.tier)

    def _on_still_committed(self, task: DeleteCopy, commit: Commit) -> None:
        """The copy is committed after all: the response to its commit was lost."""
        entry = self._ledger.entries.get(task.id)
        if self._group.is_split(task.tier):  # only this node's part is known to be committed
            self._ledger.partial.add((task.tier, task.id))
            return
        if entry is None:
            entry = entry_of(task.id, commit, self._ledger.shard)
            self._ledger.enter(entry)
        if entry.attempt_id != commit.lineage.attempt_id:
            return
        self._to_announce.discard((task.tier, task.id))
        entry.bytes = {**entry.bytes, task.tier: commit.stored_bytes}
        entry.note_kept(task.tier)
        self.schedule_plan(task.tier)

    def _on_gone(self, entry: LedgerEntry, task: DeleteCopy, outcome: Outcome) -> bool:
        announces = (task.tier, task.id) in self._to_announce
        self._to_announce.discard((task.tier, task.id))
        self._report_deleted(task, entry.bytes.get(task.tier, 0), outcome.seconds)
        entry.note_gone(task.tier)
        if announces:
            body = DeletedCopy(reason=task.reason, next_latest=task.next_latest)
            self._messages.announce_to_others(body, task.id, task.tier)
        self._ledger.forget_if_gone(entry)
        return True

    def _report_deleted(self, task: DeleteCopy, size: int, seconds: float) -> None:
        logger.info("%s: %s is deleted: %s", task.tier, task.id, task.reason)
        self._emit(
            events.Dropped,
            id=task.id,
            tier=task.tier,
            bytes=size,
            reason=task.reason,
            seconds=seconds,
            unfinished=task.unfinished,
        )

    # Planning ---------------------------------------------------------------------------------------

    def _keeps_all(self, tier: str) -> bool:
        """Return whether the rules of a tier keep every checkpoint that the ledger has, whatever their number."""
        rules = self._ledger.rules_of(tier)
        return not rules.retain and self._ledger.all_live

    def _damaged_entries(self, tier: str) -> list[LedgerEntry]:
        """Return the damaged copies on a tier that nobody reads."""
        found = (
            e
            for e in self._ledger.entries.values()
            if tier in e.repairable and e.state(tier) is CopyState.ABSENT
            if e.leases.get(tier, 0) <= 0 and self._ledger.reading[e.id] <= 0
        )
        return sorted(found, key=lambda entry: entry.id)

    def damaged_for_room(self, view: View, tier: str) -> tuple[list[Decision], list[CheckpointId]]:
        """Return the damaged copies to delete first where a tier needs room, in this order, and the others.

        Kept are: the checkpoint that this run was restored from, pinned ones, and those of which copies on several
        tiers are damaged, since these may together contain all good bytes. All are kept until a good copy is known
        that survives the same losses."""
        rules = view.tier(tier)
        good = view.restorable_on(surviving(view, rules.survives, rules))
        continued = any(c.started_from == view.restored_from for c in good)
        views = {checkpoint.id: checkpoint for checkpoint in view.checkpoints}
        deleted, kept = [], []
        for entry in self._damaged_entries(tier):
            began = entry.id == view.restored_from and not continued
            together = not entry.is_whole and len(entry.damage) > 1
            if not good or began or together or entry.pinned or entry.id in self._leaving[tier]:
                kept.append(entry.id)
                continue
            reason = "room is needed, and it is damaged"
            size = entry.bytes.get(tier, 0)
            deleted.append(
                Decision(
                    checkpoint=entry.id, tier=tier, verdict=Verdict.DROP, reason=reason, bytes=size
                )
            )
        deleted.sort(key=lambda d: (views[d.checkpoint].live, d.checkpoint))
        return deleted, kept

    def _warn_missing_metrics(self, view: View) -> None:
        """Log, once per metric, that recent saves lack a metric of a rule, after one of them was evaluated."""
        step = self._ledger.evaluated_at
        evaluated = (c for c in view.checkpoints if c.id.step >= step)
        if not any(c.readable for c in evaluated):
            return
        missing = missing_metrics(view, saves_min=SAVES_WITHOUT_METRICS)
        for metric in missing.keys() - self._warned_metrics:
            self._warned_metrics.add(metric)
            logger.warning("%s", missing[metric])

    def _deleted(self, tier: str) -> list[Decision]:
        """Return the copies on a tier that a person has deleted and that nobody reads, damaged ones too, and those
        that could not be read."""
        return [
            Decision(
                checkpoint=entry.id,
                tier=tier,
                verdict=Verdict.DROP,
                reason=DELETED,
                bytes=entry.bytes.get(tier, 0),
            )
            for entry in self._ledger.deleted()
            if entry.has_record_on(tier) and entry.leases.get(tier, 0) <= 0
            if entry.id not in self._leaving[tier]
        ]

    def _stay(self, tier: str, drops: Collection[CheckpointId]) -> tuple[CheckpointId, ...]:
        """Return the newest live copies on a tier beside ``drops`` that this node has a part of."""
        kept = (
            entry.id
            for entry in self._ledger.live_copies(tier)
            if entry.id not in drops and not self._ledger.has_no_part(tier, entry.id)
        )
        return tuple(islice(kept, STAY))


def _is_leaving(entry: LedgerEntry | None, tier: str) -> bool:
    return entry is not None and entry.state(tier) is CopyState.LEAVING
