"""Dropping: how copies leave stored tiers, by retention, by room that is needed, and by a person's order.

Whoever plans a deletion reads the marks afresh: a plan of the policy says what may go, the marks of that are read, with
those that a person has changed since, and what the policy says then still may go does. Nothing here does I/O; it says
what is to be done as tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from tierfall.core.format.records import Commit, stops_drop
from tierfall.core.scheduler.deletion.age_timer import AgeTimer
from tierfall.core.scheduler.ledger.ledger import Ledger, LedgerEntry, entry_of
from tierfall.core.scheduler.ledger.notes import EventEmitter
from tierfall.core.scheduler.ledger.tasks import DeleteCopy, NotWholeError, Outcome, ReadMarks, Task
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.values import CheckpointId, CopyState, Shard
from tierfall.core.types.view import CheckpointView, CopyView, Decision, TierRules, Verdict, View

logger = logging.getLogger("tierfall")

RETRY_S = 30.0
RELIED_ON_MAX = 16
"""So many copies at most, the newest, are looked at before another one is dropped because of them."""
ASKED_OF_MAX = 500
"""Of more copies than these the policy is not asked which a drop relies on: each time it looks at all of them."""
SAVES_WITHOUT_METRICS = 3
"""So many saves in a row without any are no accident."""
PlanDeletions = Callable[[View, str], tuple[Decision, ...]]


class MissingMetrics(Protocol):
    def __call__(self, view: View, *, saves_min: int) -> Mapping[str, str]: ...


class VerifiesCopies(Protocol):
    """Has what nobody has verified on a tier read; False where there is nothing to. ``hurry``: room waits for it."""

    def __call__(self, tier: str, *, hurry: bool = False) -> bool: ...


class ReportDamage(Protocol):
    def __call__(self, tier: str, id: CheckpointId, why: str, *, repairable: bool) -> None: ...


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
        plan_drops: PlanDeletions,
        keeps_all_live: Callable[[TierRules], bool],
        next_due_s: Callable[[View, str], float | None],
        missing_metrics: MissingMetrics,
        dispatch: Callable[[Task], None],
    ) -> None:
        self._ledger = ledger
        self._plan_drops = plan_drops
        self._keeps_all_live = {t.name: keeps_all_live(t) for t in ledger.rules}
        self._missing_metrics = missing_metrics
        self._said_missing: set[str] = set()
        self._ageing = AgeTimer(ledger, next_due_s)
        self._dispatch = dispatch
        self.alone = True
        self.notes = EventEmitter()
        self.delete: Callable[[CheckpointId], None] = lambda id: None
        self.was_deleted: Callable[[CheckpointId], bool] = lambda id: False
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
        self.plans = True
        self.verifies: VerifiesCopies = lambda tier, *, hurry=False: False
        self.verifies_elsewhere: Callable[[str, Sequence[CheckpointId]], bool] = lambda tier, ids: (
            False
        )
        self.has_dropped: Callable[[DeleteCopy], None] = lambda task: None
        self.read_marks: Callable[[ReadMarks], None] = dispatch
        self.asks_first: Callable[[DeleteCopy], bool] = lambda task: False
        self.is_split: Callable[[str], bool] = lambda tier: False
        self.found_damage: ReportDamage = lambda tier, id, why, *, repairable: None
        self._to_tell: set[tuple[str, CheckpointId]] = set()
        self._cancelled = False

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
        for tier in self._ageing.take_due() if self._looks_by_itself() else ():
            if self._plan(tier):
                self.survey(tier)
        for key, (task, not_before_s) in list(self._failed.items()):
            if now_s < not_before_s or self.paused:
                continue
            del self._failed[key]
            # what a rule let go is decided on again, if its commit record is there; else what is left of it goes
            ordered = task.tombstoned or task.void or self.is_split(task.tier)
            self._dispatch(replace(task, unfinished=task.unfinished or not ordered))

    def retry_now(self, id: CheckpointId) -> tuple[str, ...]:
        """Try what could not be dropped of a checkpoint again at once; name the tiers."""
        tiers = tuple(tier for tier, failed in self._failed if failed == id)
        for tier in tiers:
            task, _ = self._failed.pop((tier, id))
            self._dispatch(task)
        return tiers

    def next_s(self) -> float | None:
        """Say when something is to be tried again; while a restore reads the tiers, nothing is."""
        if self.paused:
            return None
        times = [when for _, when in self._failed.values()]
        times += [when for when in self._asks_again_s.values() if when > self._ledger.now_s]
        if self._looks_by_itself() and (look_s := self._ageing.next_s()) is not None:
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
            self.read_marks(ReadMarks(tier=tier, ids=tuple(sorted(ids))))

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
            self._ageing.look_in(task.tier, RETRY_S)
            return
        if self._cancelled:
            return
        if self.paused:
            self._due.add(task.tier)
            return
        plan = self._plan(task.tier)
        drops = {d.checkpoint: d.reason for d in plan if d.checkpoint in read}
        newest = self._newest_left(task.tier, without=drops) if drops else None
        relied = self._relied_on(task.tier, drops)
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
                if entry.tombstoned and self.alone:
                    entry.give_up(self._leaving, entry.given_up("it was deleted by a person"))

    def _plan(self, tier: str) -> list[Decision]:
        if self._keeps_all_live[tier] and self._ledger.all_live:
            return []  # however many lie there
        view = self._view(tier)
        self._ageing.note(view, tier)
        self._warn_missing_metrics(view)
        planned = self._planned_deletions(view, tier)
        if self._ledger.has_unverified and len(planned) < len(
            self._planned_deletions(replace(view, trusting=True), tier)
        ):
            self.verifies(tier)
        return planned

    def _view(self, tier: str) -> View:
        return replace(self._ledger.view(), trusting=tier in self._trusted)

    def _relied_on(self, tier: str, drops: Collection[CheckpointId]) -> tuple[CheckpointId, ...]:
        """Name the copies on a tier because of which retention lets others go: its newest one, and each without which
        one of them would stay. Damaged ones go because of none."""
        view = self._view(tier)
        planned = {d.checkpoint for d in self._plan_drops(view, tier)}
        going = planned.intersection(drops)
        kept = [
            c.id
            for c in view.live
            if c.state(tier) is CopyState.COMMITTED and c.id not in planned.union(drops)
        ]
        if not going or not kept:
            return ()

        def stay_planned(without: Collection[CheckpointId]) -> bool:
            left = tuple(_without(c, tier) if c.id in without else c for c in view.checkpoints)
            plan = self._plan_drops(replace(view, checkpoints=left), tier)
            return going <= {d.checkpoint for d in plan}

        if len(kept) > ASKED_OF_MAX:
            return tuple(kept[:RELIED_ON_MAX])
        found, groups = kept[:1], [kept[1:]]
        while groups and len(found) < RELIED_ON_MAX:
            group = groups.pop()
            if not group or stay_planned(frozenset(group)):
                continue
            if len(group) == 1:
                found += group
                continue
            newer = -(-len(group) // 4)  # most rules go by the newest
            groups += [group[newer:], group[:newer]]
        return tuple(found)

    def _planned_deletions(self, view: View, tier: str) -> list[Decision]:
        busy = self._leaving[tier] | self.reserved | self.awaited
        decisions = (*self._plan_drops(view, tier), *self._plan_damaged(view, tier))
        return [d for d in decisions if d.checkpoint not in busy]

    def _plan_damaged(self, view: View, tier: str) -> Iterator[Decision]:
        """Decide on damaged copies that are not written anew: each goes where a whole one in its place would go. Good
        copies are decided on without them."""
        left = {e.id: e.bytes.get(tier, 0) for e in self._damaged_entries(tier)}
        if not left:
            return

        def as_if_whole(checkpoint: CheckpointView) -> CheckpointView:
            if checkpoint.id not in left:
                return checkpoint
            copy = CopyView(state=CopyState.COMMITTED, bytes=left[checkpoint.id])
            return replace(checkpoint, copies={**checkpoint.copies, tier: copy})

        whole = replace(view, checkpoints=tuple(map(as_if_whole, view.checkpoints)))
        yield from (d for d in self._plan_drops(whole, tier) if d.checkpoint in left)

    def _damaged_entries(self, tier: str) -> list[LedgerEntry]:
        """Name the damaged copies on a tier that are not written anew, and that nobody reads."""
        return [
            e
            for e in self._ledger.repairable()
            if tier in e.repairable and e.state(tier) is CopyState.ABSENT and tier not in e.owed
            if e.leases.get(tier, 0) <= 0 and self._ledger.reading[e.id] <= 0
        ]

    def damaged_for_room(self, view: View, tier: str) -> tuple[list[Decision], list[CheckpointId]]:
        """Return the damaged copies that go first where a tier needs room, in that order, and name those that stay.

        Those go that nothing can come of any more: but for what this run was restored from, what bears a pin, and
        what may make one whole checkpoint together with a damaged copy on another tier. None goes while no copy that
        survives as much is known to be good."""
        survives = view.tier(tier).survives
        safe_on = tuple(t.name for t in view.tiers if t.survives.covers(survives))
        good = view.safe_on(safe_on)
        continued = any(c.started_from == view.restored_from for c in good)
        busy = self._leaving[tier] | self.reserved | self.awaited
        views = {checkpoint.id: checkpoint for checkpoint in view.checkpoints}
        goes, stays = [], []
        for entry in self._damaged_entries(tier):
            began = entry.id == view.restored_from and not continued
            together = not entry.is_whole and len(entry.damage) > 1
            if not good or began or together or entry.pinned or entry.id in busy:
                stays.append(entry.id)
                continue
            reason = "room is needed, and it is damaged and cannot be repaired"
            size = entry.bytes.get(tier, 0)
            goes.append(
                Decision(
                    checkpoint=entry.id, tier=tier, verdict=Verdict.DROP, reason=reason, bytes=size
                )
            )
        goes.sort(key=lambda d: (views[d.checkpoint].live, d.checkpoint))
        return goes, stays

    def _warn_missing_metrics(self, view: View) -> None:
        """A rule that goes by a metric which no save gives is said once."""
        missing = self._missing_metrics(view, saves_min=SAVES_WITHOUT_METRICS)
        for metric in missing.keys() - self._said_missing:
            self._said_missing.add(metric)
            logger.warning("%s", missing[metric])

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
            self.delete(id)  # a tombstone is for all copies: it goes with the last
            return False
        task = DeleteCopy(
            tier=tier,
            id=id,
            reason=reason,
            tombstoned=entry.tombstoned,
            next_latest=next_latest,
            relies_on=relies_on if entry.state(tier) is CopyState.COMMITTED else (),
        )
        if ordered and self.is_split(tier):
            self.leave(task)  # each node is told so by the order
        elif not ordered and self.asks_first(task):
            entry.set_state(tier, CopyState.LEAVING)
            self._leaving[tier].add(id)
        else:
            self._to_tell.add((tier, id))
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
        self.has_dropped(task)
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

    def leave(self, task: DeleteCopy) -> bool:
        """Let a copy go, whatever was planned; False where it is on its way out already, or that failed."""
        entry = self._ledger.entries.get(task.id)
        if entry is not None and not task.unfinished:
            entry.set_state(task.tier, CopyState.LEAVING)
        if task.id in self._leaving[task.tier] or (self._cancelled and task.unfinished):
            return False
        self._leaving[task.tier].add(task.id)
        logger.info("%s: %s is dropped: %s", task.tier, task.id, task.reason)
        self._dispatch(task)
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
            self.notes.drop_failed(task, outcome.error)
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
        if not (self.alone or task.void) and stops_drop(outcome.value, tombstoned=task.tombstoned):
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
        self.notes.dropped(task, size, outcome.seconds)
        return True

    def _is_kept(self, entry: LedgerEntry | None, task: DeleteCopy, error: NotWholeError) -> None:
        """What a deletion relies on is not whole: the copy is still there, and what may go is planned anew."""
        self._leaving[task.tier].discard(task.id)
        self._to_tell.discard((task.tier, task.id))
        logger.warning("%s: %s is not dropped: %s", task.tier, task.id, error)
        if entry is not None and entry.state(task.tier) is CopyState.LEAVING:
            entry.note_kept(task.tier)
        self.not_whole(task.tier, error)
        if error.damaged:
            self.survey(task.tier)
        else:
            self._asks_again_s[task.tier] = self._ledger.now_s + RETRY_S
            self._ageing.look_in(task.tier, RETRY_S)

    def not_whole(self, tier: str, error: NotWholeError) -> None:
        """Copies that a deletion relies on lack files: they count for nothing from now on."""
        for id, (why, has_record) in error.damaged.items():
            self.found_damage(tier, id, why, repairable=has_record)

    def _on_still_committed(self, task: DeleteCopy, commit: Commit) -> None:
        """What looked unfinished is a checkpoint: the answer to its commit was lost."""
        entry = self._ledger.entries.get(task.id)
        if self.is_split(task.tier):  # this node's part of it is
            self._ledger.partial.add((task.tier, task.id))
            if self.was_deleted(task.id):
                self.delete(task.id)
            return
        if entry is None:
            entry = self._ledger.entries[task.id] = entry_of(task.id, commit, self._ledger.shard)
        if entry.attempt_id != commit.line.attempt_id:
            return
        self._to_tell.discard((task.tier, task.id))
        entry.bytes[task.tier] = commit.stored_bytes
        entry.note_kept(task.tier)
        self._to_read[task.tier].add(task.id)
        if self.was_deleted(task.id):
            self.delete(task.id)

    def _on_gone(self, entry: LedgerEntry, task: DeleteCopy, outcome: Outcome) -> bool:
        tells = (task.tier, task.id) in self._to_tell
        self._to_tell.discard((task.tier, task.id))
        if stops_drop(outcome.value or (), tombstoned=task.tombstoned):
            self._on_kept(entry, task, outcome.value)
            return False
        self.notes.dropped(task, entry.bytes.get(task.tier, 0), outcome.seconds)
        entry.note_gone(task.tier)
        self.dropped += 1
        if tells:
            self.has_dropped(task)
        self._ledger.forget_if_gone(entry)
        return True

    def _on_kept(self, entry: LedgerEntry, task: DeleteCopy, marks: frozenset[str]) -> None:
        logger.info("%s: %s stays after all: it was marked", task.tier, entry.id)
        if self.is_split(task.tier):  # other nodes' parts are gone, or may be
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


def _without(checkpoint: CheckpointView, tier: str) -> CheckpointView:
    copies = {name: copy for name, copy in checkpoint.copies.items() if name != tier}
    return replace(checkpoint, copies=copies)


def _is_leaving(entry: LedgerEntry | None, tier: str) -> bool:
    return entry is not None and entry.state(tier) is CopyState.LEAVING


def _has_record(entry: LedgerEntry, tier: str) -> bool:
    """Say whether a commit record of it is on a tier, of a good copy or of a damaged one."""
    state = entry.state(tier)
    return state is CopyState.COMMITTED or (state is CopyState.ABSENT and tier in entry.damage)
