"""Deletion of copies from stored tiers: by a person, by retention, and for room.

A deletion is planned by what is known to be decided. The worker that carries it out reads the tier's list, and refuses
if a person has added to it since: then all is planned again. No I/O: tasks are dispatched.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import replace

from tierfall.core.format.decided import DecidedList
from tierfall.core.format.records import Commit
from tierfall.core.runtime import retries
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.scheduler.deletion.planner import AgeTimer, DeletionPlanner
from tierfall.core.scheduler.ledger.emitter import EventEmitter
from tierfall.core.scheduler.ledger.entry import LedgerEntry, entry_of
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import DeleteCopy, NotWholeError, Outcome
from tierfall.core.types.values import CheckpointId, CopyState, Shard
from tierfall.core.types.view import Decision, View

logger = logging.getLogger("tierfall")


class Deleter:
    """The deletions in progress, and the tiers where the next are to be planned.

    Rank 0 plans. Deletions from a tier are planned again after each change of any checkpoint, but only while none is in
    progress there. ``paused``: a restore reads the tiers.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        tiers: Iterable[str],
        hooks: Hooks,
        emitter: EventEmitter,
    ) -> None:
        self._ledger = ledger
        self._planner = DeletionPlanner(ledger)
        self._age_timer = AgeTimer(ledger)
        self._hooks = hooks
        self._emitter = emitter
        self._leaving: dict[str, set[CheckpointId]] = {tier: set() for tier in tiers}
        self._due: set[str] = set()
        self._failed: dict[tuple[str, CheckpointId], tuple[DeleteCopy, float]] = {}
        self._not_before_s: dict[str, float] = {}
        """By tier: no rule deletes there before this time, since a copy that is to stay could not be looked at."""
        self._conditions = Conditions()
        self._seen: View | None = None
        self.paused = False
        self._trusted: set[str] = set()
        self._to_announce: set[tuple[str, CheckpointId]] = set()
        self._cancelled = False
        self._batch = 0

    def set_paused(self, paused: bool) -> None:
        """Pause deletions while a restore reads the tiers, or resume them."""
        self.paused = paused
        if not paused:
            self.plan_all_tiers()

    def plan_tier(self, tier: str) -> None:
        """Schedule a plan of what is deleted from a tier; rank 0 makes it."""
        if self._hooks.group.decides and not self._cancelled:
            self._due.add(tier)

    @property
    def rules_are_suspended(self) -> bool:
        """Return whether this start has neither restored nor committed, so that which copies are good is not known; or
        whether a listing has left out what is there."""
        return self._ledger.lags or not (self._ledger.has_begun or self._trusted)

    def trust(self) -> None:
        """Apply the rules of each tier once, as if every copy were verified, because a command says so."""
        self._trusted = set(self._leaving)
        self.plan_all_tiers()

    def plan_all_tiers(self) -> None:
        for tier in self._leaving:
            self.plan_tier(tier)

    def busy(self) -> bool:
        """Return whether a deletion is in progress or is to be planned; failed deletions do not count."""
        return self.is_deleting() or bool(self._due and not self.paused)

    def retry(self, now_s: float) -> None:
        """Retry failed deletions that are due, and plan where a rule depends on age."""
        for tier in self._age_timer.pop_due() if self._applies_rules() else ():
            self.plan_tier(tier)
        for tier in [tier for tier, when in self._not_before_s.items() if now_s >= when]:
            del self._not_before_s[tier]
            self.plan_tier(tier)
        for key, (task, not_before_s) in list(self._failed.items()):
            if now_s < not_before_s or self.paused:
                continue
            del self._failed[key]
            # what a rule or a person deletes is planned anew if its record is still there; else the rest is deleted
            entry = self._ledger.entries.get(task.id)
            by_person = entry is not None and entry.deleted
            is_planned = task.known is not None and not (
                by_person or self._hooks.is_split(task.tier)
            )
            known = None if task.known is None else self._ledger.decided
            unfinished = task.unfinished or is_planned
            self._hooks.dispatch(replace(task, known=known, unfinished=unfinished))

    def try_now(self) -> None:
        """Try at once whatever waits for its next try."""
        self._not_before_s.clear()
        self.plan_all_tiers()
        for key, (task, _) in self._failed.items():
            self._failed[key] = (task, 0.0)

    def next_s(self) -> float | None:
        """Return when to retry or plan next; None while a restore reads the tiers."""
        if self.paused:
            return None
        times = [when for _, when in self._failed.values()]
        times += self._not_before_s.values()
        if self._applies_rules() and (look_s := self._age_timer.next_s()) is not None:
            times.append(look_s)
        return min(times, default=None)

    def _applies_rules(self) -> bool:
        return self._hooks.group.decides and not (
            self.paused or self.rules_are_suspended or self._cancelled
        )

    def is_deleting(self, only: str | None = None) -> bool:
        """Return whether a copy is being deleted (from ``only``); failed deletions do not count."""
        tiers = self._leaving if only is None else (only,)
        return any((tier, id) not in self._failed for tier in tiers for id in self._leaving[tier])

    def dispatch_planned(self) -> None:
        """Delete what is to be deleted on each tier that is due, and where no deletion is in progress."""
        if self.paused:
            return
        for tier in sorted(self._due):
            if not self.is_deleting(tier):
                self._due.discard(tier)
                self._delete_planned(tier)

    def _delete_planned(self, tier: str) -> None:
        busy = self._leaving[tier]
        deleted = self._planner.deleted(tier, busy)
        by_person = [d for d in deleted if self._hooks.is_noted(d.checkpoint, tier)]
        ids = {d.checkpoint for d in by_person}
        others = busy | {d.checkpoint for d in deleted}
        by_rule = self._plan(tier, others) if self._applies_rules() and self.is_due(tier) else []
        if self.is_due(tier):
            self._trusted.discard(tier)
        drops = {d.checkpoint: d.reason for d in (*by_person, *by_rule)}
        newest = self._ledger.newest_on(tier, without=drops) if drops else None
        stay = self._planner.stay(tier, drops) if by_rule else ()
        self._batch += 1
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
        if self.is_due(tier):
            failures = self._conditions.report(tier, logging.WARNING, "%s: %s", tier, why)
            self._not_before_s[tier] = self._ledger.now_s + retries.wait_s(failures)

    def _end_delay(self, tier: str) -> None:
        self._not_before_s.pop(tier, None)
        self._conditions.end(tier, "%s: the tier's rules are applied again", tier)

    def is_due(self, tier: str) -> bool:
        """Return whether rules may delete from a tier now: no delay by what could not be read there is in progress."""
        return self._ledger.now_s >= self._not_before_s.get(tier, 0.0)

    def plan_changed(self) -> None:
        """Schedule a plan for each tier that has what a person has deleted, and for each with rules, if any checkpoint
        has changed."""
        for tier, leaving in self._leaving.items():
            if self._planner.deleted(tier, leaving):
                self.plan_tier(tier)
        tiers = [tier for tier in self._leaving if not self._planner.keeps_all(tier)]
        if not (tiers and self._applies_rules()):
            return
        seen = replace(self._ledger.view(), wall_time_s=0.0, read_bytes_per_s={})
        if seen == self._seen:
            return
        self._seen = seen
        for tier in tiers:
            self.plan_tier(tier)

    def _plan(self, tier: str, busy: Collection[CheckpointId]) -> list[Decision]:
        """Return what the rules of a tier delete now."""
        if self._planner.keeps_all(tier):
            return []
        view = replace(self._ledger.view(), assume_verified=tier in self._trusted)
        self._age_timer.schedule(view, tier)
        self._planner.warn_missing_metrics(view)
        return self._planner.plan(view, tier, busy)

    def damaged_for_room(self, view: View, tier: str) -> tuple[list[Decision], list[CheckpointId]]:
        """See ``DeletionPlanner.damaged_for_room``."""
        return self._planner.damaged_for_room(view, tier, self._leaving[tier])

    def request_delete(
        self, tier: str, id: CheckpointId, reason: str, *, beside: Collection[CheckpointId] = ()
    ) -> bool:
        """Delete a committed copy; those ``beside`` it are deleted, too. Return False if it is in progress."""
        self._batch += 1
        drops = {id, *beside}
        newest = self._ledger.newest_on(tier, without=drops)
        return self._delete(
            tier, id, reason, next_latest=newest, stay=self._planner.stay(tier, drops)
        )

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
            batch=self._batch,
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
        """Delete this rank's files of a copy that was never committed; return False where that was begun before, or
        where a listing has left out what is there."""
        if self._ledger.lags:
            return False
        entry = self._ledger.entries.get(id)
        shard = None if entry is None else entry.shard
        return self.collect_garbage(tier, id, reason, shard=shard)

    def delete(self, task: DeleteCopy) -> bool:
        """Dispatch a deletion, whatever was planned; return False if it is in progress, or failed and is retried."""
        entry = self._ledger.entries.get(task.id)
        if entry is not None and not task.unfinished:
            entry.set_state(task.tier, CopyState.LEAVING)
        if task.id in self._leaving[task.tier] or (self._cancelled and task.unfinished):
            return False
        self._leaving[task.tier].add(task.id)
        self._hooks.dispatch(task)
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
            self._emitter.deletion_failed(task, outcome.error)
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

    def _on_refused(
        self, entry: LedgerEntry | None, task: DeleteCopy, decided: DecidedList
    ) -> None:
        """The tier's list has what was not known: nothing was deleted, and it is planned again."""
        self._to_announce.discard((task.tier, task.id))
        if entry is None or not self._hooks.group.decides:
            # rank 0 has deleted its part of the copy: this node's part stays, for what was decided here
            self._ledger.partial.add((task.tier, task.id))
            if entry is not None:
                entry.note_gone(task.tier)
                self._ledger.forget_if_gone(entry)
        elif entry.state(task.tier) is CopyState.LEAVING:
            entry.note_kept(task.tier)
        self._hooks.decided(task.tier, decided)
        self.plan_tier(task.tier)

    def _on_rest_deleted(
        self, entry: LedgerEntry | None, task: DeleteCopy, outcome: Outcome
    ) -> bool:
        """Files of an uncommitted copy, or of a failed deletion, are deleted; or a commit record was found there."""
        size = self._ledger.unfinished.pop((task.tier, task.id), 0)
        leaving = _is_leaving(entry, task.tier)
        if entry is not None:
            entry.commit_unknown_on.discard(task.tier)
        if outcome.value is not None:
            self._on_still_committed(task, outcome.value)
            return not leaving
        if entry is not None and leaving:
            return self._on_gone(entry, replace(task, unfinished=False), outcome)
        self._emitter.deleted(task, size, outcome.seconds)
        return True

    def _on_not_whole(
        self, entry: LedgerEntry | None, task: DeleteCopy, error: NotWholeError
    ) -> None:
        """A copy that is to stay is damaged: nothing was deleted, and it is planned again."""
        self._leaving[task.tier].discard(task.id)
        self._to_announce.discard((task.tier, task.id))
        if entry is not None and entry.state(task.tier) is CopyState.LEAVING:
            entry.note_kept(task.tier)
        self.on_damage_found(task.tier, error)
        why = f"{task.id} is not deleted: {error}"
        if error.damaged:
            logger.warning("%s: %s", task.tier, why)
        else:
            self._delay(task.tier, why)
        self.plan_tier(task.tier)

    def on_damage_found(self, tier: str, error: NotWholeError) -> None:
        """Report copies that were to stay, and that lack files, as damaged."""
        for id, (why, has_record) in error.damaged.items():
            self._hooks.found_damage(tier, id, why, repairable=has_record)

    def _on_still_committed(self, task: DeleteCopy, commit: Commit) -> None:
        """What looked uncommitted is a checkpoint: the response to its commit was lost."""
        entry = self._ledger.entries.get(task.id)
        if self._hooks.is_split(task.tier):  # only this node's part is known to be committed
            self._ledger.partial.add((task.tier, task.id))
            return
        if entry is None:
            entry = entry_of(task.id, commit, self._ledger.shard)
            self._ledger.enter(entry)
        if entry.attempt_id != commit.lineage.attempt_id:
            return
        self._to_announce.discard((task.tier, task.id))
        entry.bytes[task.tier] = commit.stored_bytes
        entry.note_kept(task.tier)
        self.plan_tier(task.tier)

    def _on_gone(self, entry: LedgerEntry, task: DeleteCopy, outcome: Outcome) -> bool:
        announces = (task.tier, task.id) in self._to_announce
        self._to_announce.discard((task.tier, task.id))
        self._emitter.deleted(task, entry.bytes.get(task.tier, 0), outcome.seconds)
        entry.note_gone(task.tier)
        self._emitter.counters.deleted_copies += 1
        if announces:
            self._hooks.group.on_deleted(task)
        self._ledger.forget_if_gone(entry)
        return True


def _is_leaving(entry: LedgerEntry | None, tier: str) -> bool:
    return entry is not None and entry.state(tier) is CopyState.LEAVING
