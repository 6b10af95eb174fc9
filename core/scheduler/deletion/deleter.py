"""Deletion of copies from stored tiers: by retention, for room, and by command.

A deletion by retention reads marks first: the policy plans, the marks of the planned checkpoints are read (and those
that a person has changed since), and what a second plan still contains is deleted. No I/O: tasks are dispatched.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

from tierfall.core.format.records import Commit, prevents_deletion
from tierfall.core.runtime import retries
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.scheduler.deletion.planner import AgeTimer, DeletionPlanner
from tierfall.core.scheduler.ledger.emitter import EventEmitter
from tierfall.core.scheduler.ledger.entry import LedgerEntry, entry_of
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import DeleteCopy, NotWholeError, Outcome, ReadMarks
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.values import CheckpointId, CopyState, Shard
from tierfall.core.types.view import Decision, View

logger = logging.getLogger("tierfall")


class Deleter:
    """The deletions in progress, and the tiers whose marks must be read before the next.

    Retention is planned again after each change of any checkpoint: a deletion needs no commit once its reason to wait
    has gone. ``reserved`` checkpoints are the subject of a command in progress, ``awaited`` ones of a deletion by
    command.
    ``paused``: a restore reads the tiers. Without ``retains``, retention deletes nothing.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        tiers: Iterable[str],
        hooks: Hooks,
        emitter: EventEmitter,
        retains: bool = True,
    ) -> None:
        self._ledger = ledger
        self._planner = DeletionPlanner(ledger)
        self._age_timer = AgeTimer(ledger)
        self._hooks = hooks
        self._emitter = emitter
        self._retains = retains
        self._leaving: dict[str, set[CheckpointId]] = {tier: set() for tier in tiers}
        self._due: set[str] = set()
        self._surveying: set[str] = set()
        self._to_read: dict[str, set[CheckpointId]] = {tier: set() for tier in self._leaving}
        self._failed: dict[tuple[str, CheckpointId], tuple[DeleteCopy, float]] = {}
        self._not_before_s: dict[str, float] = {}
        """By tier: no rule deletes there before this time, since marks, or a copy that a deletion relies on, could not
        be read."""
        self._conditions = Conditions()
        self._seen: tuple[View, set[CheckpointId]] | None = None
        self.reserved: set[CheckpointId] = set()
        self.awaited: set[CheckpointId] = set()
        self._changed: set[CheckpointId] = set()
        self.paused = False
        self._trusted: set[str] = set()
        self._to_announce: set[tuple[str, CheckpointId]] = set()
        self._cancelled = False

    def set_paused(self, paused: bool) -> None:
        """Pause deletions while a restore reads the tiers, or resume them."""
        self.paused = paused

    @property
    def plans(self) -> bool:
        """Return whether this process applies retention: with several ranks only rank 0 does."""
        return self._retains and self._hooks.group.decides

    def plan_tier(self, tier: str) -> None:
        """Schedule retention on a tier: its marks are read first."""
        if self.plans and not self._cancelled:
            self._due.add(tier)

    @property
    def rules_are_suspended(self) -> bool:
        """Return whether this start has neither restored nor committed: which copies are good is not known yet; or
        whether a listing has left out what is there."""
        return self._ledger.lags or not (self._ledger.may_delete_by_rule or self._trusted)

    def trust(self) -> None:
        """Apply the rules of each tier once, as if every copy were verified, because a command says so."""
        self._trusted = set(self._leaving)
        self.plan_all_tiers()

    def plan_found_copy(self, tier: str, id: CheckpointId) -> None:
        """Schedule retention because of a copy that was found there, whose marks are unknown."""
        self._to_read[tier].add(id)
        self.plan_tier(tier)

    def plan_all_tiers(self) -> None:
        for tier in self._leaving:
            self.plan_tier(tier)

    def busy(self, tier: str | None = None) -> bool:
        """Return whether a deletion (from ``tier``) or a survey is in progress; failed deletions do not count."""
        if tier is not None:
            return self.is_deleting(tier)
        due = any(map(self.is_due, self._due)) and not self.rules_are_suspended
        return due or bool(self._surveying) or self.is_deleting()

    def retry(self, now_s: float) -> None:
        """Retry failed deletions that are due, and schedule retention where a rule depends on age."""
        for tier in self._age_timer.pop_due() if self._applies_rules() else ():
            if self._plan(tier):
                self.plan_tier(tier)
        for key, (task, not_before_s) in list(self._failed.items()):
            if now_s < not_before_s or self.paused:
                continue
            del self._failed[key]
            # a deletion by rule is planned anew if the commit record is still there; else the rest is deleted
            by_command = task.tombstoned or task.unreadable or self._hooks.is_split(task.tier)
            self._hooks.dispatch(replace(task, unfinished=task.unfinished or not by_command))

    def try_now(self) -> None:
        """Try at once whatever waits for its next try."""
        self._not_before_s.clear()
        for key, (task, _) in self._failed.items():
            self._failed[key] = (task, 0.0)

    def retry_now(self, id: CheckpointId) -> tuple[str, ...]:
        """Retry the failed deletions of a checkpoint at once; return their tiers."""
        tiers = tuple(tier for tier, failed in self._failed if failed == id)
        for tier in tiers:
            self._hooks.dispatch(self._failed.pop((tier, id))[0])
        return tiers

    def next_s(self) -> float | None:
        """Return when to retry or survey next; None while a restore reads the tiers."""
        if self.paused:
            return None
        times = [when for _, when in self._failed.values()]
        times += [when for when in self._not_before_s.values() if when > self._ledger.now_s]
        if self._applies_rules() and (look_s := self._age_timer.next_s()) is not None:
            times.append(look_s)
        return min(times, default=None)

    def _applies_rules(self) -> bool:
        return self.plans and not (self.paused or self.rules_are_suspended or self._cancelled)

    def reserve(self, id: CheckpointId) -> None:
        """A command begins to change a checkpoint's marks: marks of it that a survey has read are outdated."""
        self.reserved.add(id)
        if self._surveying:
            self._changed.add(id)

    def is_deleting(self, only: str | None = None) -> bool:
        """Return whether a copy is being deleted (from ``only``); failed deletions do not count."""
        tiers = self._leaving if only is None else (only,)
        return any((tier, id) not in self._failed for tier in tiers for id in self._leaving[tier])

    def dispatch_surveys(self) -> None:
        """Read the marks of what retention would delete, on each tier that is due."""
        if self.paused or self.rules_are_suspended:
            return
        for tier in sorted(filter(self.is_due, self._due - self._surveying)):
            self._due.discard(tier)
            if not any(e.has_record_on(tier) for e in self._ledger.entries.values()):
                self._trusted.discard(tier)
                continue
            ids = {decision.checkpoint for decision in self._plan(tier)} | self._to_read[tier]
            self._to_read[tier].clear()
            self._surveying.add(tier)
            self._hooks.read_marks(ReadMarks(tier=tier, ids=tuple(sorted(ids))))

    def cancel(self) -> None:
        """Stop deleting by rule; commands are still carried out."""
        self._cancelled = True
        self._due.clear()
        for tier, id in self._failed:
            self._leaving[tier].discard(id)
        self._failed.clear()

    def on_marks_read(self, task: ReadMarks, outcome: Outcome) -> None:
        """Note a tier's marks, then apply its retention."""
        self._surveying.discard(task.tier)
        outdated = self.reserved | self._changed
        if not self._surveying:
            self._changed.clear()
        read: Mapping[CheckpointId, frozenset[str]] = outcome.value or {}
        self._update(task.tier, {id: marks for id, marks in read.items() if id not in outdated})
        if outcome.error is not None:
            self._trusted.discard(task.tier)
            self._to_read[task.tier].update(id for id in task.ids if id not in read)
            why = f"nothing is deleted there, its marks could not be read: {outcome.error}"
            self._delay(task.tier, why)
            self.plan_tier(task.tier)
            return
        if self._cancelled:
            return
        if self.paused:
            self._due.add(task.tier)
            return
        plan = self._plan(task.tier)
        drops = {d.checkpoint: d.reason for d in plan if d.checkpoint in read}
        newest = self._ledger.newest_on(task.tier, without=drops) if drops else None
        relied = self._planner.relied_on(self._view(task.tier), task.tier, drops) if drops else ()
        deletion = partial(DeleteCopy, tier=task.tier, next_latest=newest, relies_on=relied)
        for id, reason in drops.items():
            self._delete(deletion(id=id, reason=reason))
        if not drops:
            self._end_delay(task.tier)
        if len(drops) < len(plan):
            self.plan_tier(task.tier)  # the marks have changed the plan
        else:
            self._trusted.discard(task.tier)

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

    def survey_changed(self) -> None:
        """Schedule retention on each tier where it would delete something now, if any checkpoint has changed."""
        tiers = [tier for tier in self._leaving if not self._planner.keeps_all(tier)]
        if not (tiers and self._applies_rules()):
            return
        view = replace(self._ledger.view(), wall_time_s=0.0, read_bytes_per_s={})
        seen = view, self.reserved | self.awaited
        if seen == self._seen:
            return
        self._seen = seen
        for tier in tiers:
            if self._plan(tier):
                self.plan_tier(tier)

    def _update(self, tier: str, found: dict[CheckpointId, frozenset[str]]) -> None:
        for id, marks in found.items():
            entry = self._ledger.entries.get(id)
            if entry is not None and entry.has_record_on(tier):
                entry.marks[tier] = marks

    def _plan(self, tier: str) -> list[Decision]:
        if self._planner.keeps_all(tier):
            return []
        view = self._view(tier)
        self._age_timer.schedule(view, tier)
        self._planner.warn_missing_metrics(view)
        busy = self._busy_on(tier)
        planned = self._planner.plan(view, tier, busy)
        if self._ledger.has_unverified() and len(planned) < len(
            self._planner.plan(replace(view, assume_verified=True), tier, busy)
        ):
            self._hooks.verify(tier)
        return planned

    def _view(self, tier: str) -> View:
        return replace(self._ledger.view(), assume_verified=tier in self._trusted)

    def _busy_on(self, tier: str) -> set[CheckpointId]:
        """Return the checkpoints that are being deleted from a tier, or that a command is about."""
        return self._leaving[tier] | self.reserved | self.awaited

    def damaged_for_room(self, view: View, tier: str) -> tuple[list[Decision], list[CheckpointId]]:
        """See ``DeletionPlanner.damaged_for_room``."""
        return self._planner.damaged_for_room(view, tier, self._busy_on(tier))

    def request_delete(
        self,
        tier: str,
        id: CheckpointId,
        reason: str,
        *,
        ordered: bool = False,
        beside: Collection[CheckpointId] = (),
    ) -> bool:
        """Delete a committed copy; those ``beside`` it are deleted, too. ``ordered``: by command. Return False if
        another command about it is in progress."""
        newest = self._ledger.newest_on(tier, without={id, *beside})
        relied = () if ordered or newest is None else (newest,)
        task = DeleteCopy(tier=tier, id=id, reason=reason, next_latest=newest, relies_on=relied)
        return self._delete(task, ordered=ordered)

    def _delete(self, task: DeleteCopy, *, ordered: bool = False) -> bool:
        tier, id = task.tier, task.id
        if not ordered and (self._cancelled or id in self.reserved | self.awaited):
            return False
        entry = self._ledger.entries[id]
        if not ordered and entry.tombstoned:
            self._hooks.finish_deletion(id)  # a tombstone concerns all copies, and is deleted last
            return False
        relied = task.relies_on if entry.state(tier) is CopyState.COMMITTED else ()
        task = replace(task, tombstoned=entry.tombstoned, relies_on=relied)
        if ordered and self._hooks.is_split(tier):
            self.delete(task)  # the command reaches each node by itself
        elif not ordered and self._hooks.read_marks_first(task):
            entry.set_state(tier, CopyState.LEAVING)
            self._leaving[tier].add(id)
        else:
            self._to_announce.add((tier, id))
            self.delete(task)
        return True

    def on_node_marks_read(self, task: DeleteCopy, outcome: Outcome) -> None:
        """Delete a copy whose marks were read on all nodes, unless they prevent it."""
        self._leaving[task.tier].discard(task.id)
        entry = self._ledger.entries.get(task.id)
        if entry is None:
            return
        entry.note_kept(task.tier)
        if self._cancelled or isinstance(outcome.error, IntegrityError):
            return  # a copy that it relies on is damaged: all ranks learn that by its own message
        if outcome.error is not None:
            why = f"{task.id} is not deleted, its marks could not be read: {outcome.error}"
            self._delay(task.tier, why)
            return
        entry.marks[task.tier] = outcome.value[task.id]
        if self.paused or prevents_deletion(outcome.value[task.id], tombstoned=task.tombstoned):
            logger.info("%s: %s is kept after all: it was marked", task.tier, task.id)
            self.plan_tier(task.tier)
            return
        self._hooks.group.on_deleted(task)
        self.delete(replace(task, relies_on=()))  # all nodes have checked those

    def collect_garbage(
        self, tier: str, id: CheckpointId, reason: str, *, shard: Shard | None = None
    ) -> bool:
        """Delete the files of a copy that was never committed; only those of ``shard`` where other ranks' are kept.
        Return as ``delete`` does."""
        task = DeleteCopy(tier=tier, id=id, reason=reason, unfinished=True, shard=shard)
        return self.delete(task)

    def collect_unfinished(self, tier: str, id: CheckpointId, reason: str) -> bool:
        """Delete this rank's files of a copy that was never committed, in peer memory all that an earlier start left;
        return False where that was begun before, or where a listing has left out what is there."""
        if self._ledger.lags:
            return False
        entry, shard = self._ledger.entries.get(id), None
        if entry is not None and entry.shards is None:
            shard = None if self._ledger.is_of_earlier_start(tier, entry) else entry.shard
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
                # it may have begun after its check of relied-on copies, which may be deleted meanwhile
                unfinished = task.unfinished and not _is_leaving(entry, task.tier)
                task = replace(task, relies_on=(), unfinished=unfinished)
                self._failed[task.tier, task.id] = (task, now_s + retries.wait_s(failures))
            return False
        self._leaving[task.tier].discard(task.id)
        if not (task.unfinished and outcome.value is not None):  # else it is still committed
            text = "%s: the deletion of %s is not refused any more"
            self._conditions.end((task.tier, task.id), text, task.tier, task.id)
            self._end_delay(task.tier)
        if task.unfinished:
            return self._on_rest_deleted(entry, task, outcome)
        if entry is not None:
            return self._on_gone(entry, task, outcome)
        is_part = self._hooks.is_split(task.tier) and not task.unreadable
        if is_part and prevents_deletion(outcome.value, tombstoned=task.tombstoned):
            # a mark keeps this node's part, or a deletion by command is to find it
            self._ledger.partial.add((task.tier, task.id))
        return False

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
            if leaving:
                self.plan_tier(task.tier)
            return not leaving
        if entry is not None and leaving:
            return self._on_gone(entry, replace(task, unfinished=False), outcome)
        self._emitter.deleted(task, size, outcome.seconds)
        return True

    def _on_not_whole(
        self, entry: LedgerEntry | None, task: DeleteCopy, error: NotWholeError
    ) -> None:
        """A copy that the deletion relies on is damaged: nothing was deleted, and retention is planned anew."""
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
        """Report copies that a deletion relies on, and that lack files, as damaged."""
        for id, (why, has_record) in error.damaged.items():
            self._hooks.found_damage(tier, id, why, repairable=has_record)

    def _on_still_committed(self, task: DeleteCopy, commit: Commit) -> None:
        """What looked uncommitted is a checkpoint: the response to its commit was lost."""
        entry = self._ledger.entries.get(task.id)
        if self._hooks.is_split(task.tier):  # only this node's part is known to be committed
            self._ledger.partial.add((task.tier, task.id))
            if self._hooks.was_deleted(task.id):
                self._hooks.finish_deletion(task.id)
            return
        if entry is None:
            entry = self._ledger.entries[task.id] = entry_of(task.id, commit, self._ledger.shard)
        if entry.attempt_id != commit.lineage.attempt_id:
            return
        self._to_announce.discard((task.tier, task.id))
        entry.bytes[task.tier] = commit.stored_bytes
        entry.note_kept(task.tier)
        self._to_read[task.tier].add(task.id)
        if self._hooks.was_deleted(task.id):
            self._hooks.finish_deletion(task.id)

    def _on_gone(self, entry: LedgerEntry, task: DeleteCopy, outcome: Outcome) -> bool:
        announces = (task.tier, task.id) in self._to_announce
        self._to_announce.discard((task.tier, task.id))
        if prevents_deletion(outcome.value or (), tombstoned=task.tombstoned):
            self._on_kept(entry, task, outcome.value)
            return False
        self._emitter.deleted(task, entry.bytes.get(task.tier, 0), outcome.seconds)
        entry.note_gone(task.tier)
        self._emitter.counters.deleted_copies += 1
        if announces:
            self._hooks.group.on_deleted(task)
        self._ledger.forget_if_gone(entry)
        return True

    def _on_kept(self, entry: LedgerEntry, task: DeleteCopy, marks: frozenset[str]) -> None:
        logger.info("%s: %s is kept after all: it was marked", task.tier, entry.id)
        if self._hooks.is_split(task.tier):  # other nodes' parts may be gone
            entry.note_gone(task.tier)
            self._ledger.partial.add((task.tier, entry.id))
            self._ledger.forget_if_gone(entry)
        elif entry.state(task.tier) is CopyState.LEAVING:
            entry.note_kept(task.tier)
            entry.marks[task.tier] = marks
            self.plan_tier(task.tier)


def _is_leaving(entry: LedgerEntry | None, tier: str) -> bool:
    return entry is not None and entry.state(tier) is CopyState.LEAVING
