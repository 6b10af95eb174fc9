"""Damage: what a reader finds is recorded in the ledgers of all ranks, and repaired where that is possible.

    any rank             rank 0                            every rank
    finds damage      -> announces it                   -> the copy protects nothing any more
                         it can be repaired: announces  -> the copy is owed, and uploaded as any other

A repair replaces the files in place, each once all of it was read from a good copy and verified, the commit record
last: the good files of a damaged copy are kept until then. A repair evicts nothing, and has a lower priority than
copies that a tier lacks. It belongs to the coordinator's thread and does no I/O.

A mark beside the copy records the damage. A repair removes the mark, and a deletion all files: both wait until the mark
is written. A mark that was written after them would call a good copy damaged, or be left over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from tierfall.core.format.commit_files import damage_mark
from tierfall.core.format.records import Mark
from tierfall.core.ranks.message_tree import MessageTree
from tierfall.core.ranks.messages import CheckpointTopic
from tierfall.core.ranks.ranks import DecisionAnnounced, RankMessage, RankReported
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.group.commits import Commits
from tierfall.core.scheduler.group.messages import (
    FoundDamage,
    GroupMessages,
    MessageKind,
    Reason,
    kind_of,
)
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import (
    ChangeMark,
    CommitCopy,
    DeleteCopy,
    FinishCopy,
    Outcome,
    Task,
)
from tierfall.core.types import keys
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.policies.flush import needs_repair

logger = logging.getLogger("tierfall")


class DamageReports:
    """See the module. ``tiers`` are those that copies are flushed to."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        tiers: Iterable[str],
        deleter: Deleter,
        hooks: Hooks,
        message_tree: MessageTree,
        commits: Commits,
    ) -> None:
        self._ledger = ledger
        self._tiers = frozenset(tiers)
        self._deleter = deleter
        self._hooks = hooks
        self._messages = GroupMessages(message_tree)
        self._topology = message_tree.topology
        self._commits = commits
        self._tried: set[tuple[str, CheckpointId]] = set()
        self._conditions = Conditions()
        self._marking: dict[tuple[str, CheckpointId], list[Task]] = {}
        """The copies whose mark is being written, and the tasks that wait for it."""

    def report(self, tier: str, id: CheckpointId, why: str, *, repairable: bool = True) -> None:
        """A reader of this rank has found a damaged copy; not ``repairable``: its commit record is missing, too."""
        entry = self._ledger.entries.get(id)
        if entry is None or entry.state(tier) is not CopyState.COMMITTED:
            return  # it is known, or the copy was deleted meanwhile
        body = FoundDamage(text=why, repairable=repairable)
        self._messages.report(MessageKind.DAMAGE_FOUND, id, tier, body)

    def plan_repairs(self, only: LedgerEntry | None = None) -> None:
        """Begin the repairs that are possible now, of all checkpoints or of one; for rank 0. A repair that failed is
        not tried again by this process."""
        if not (self._hooks.may_write() and self._commits.decides):
            return
        entries = self._ledger.repairable() if only is None else (only,)
        wanted = [(e, tier) for e in entries for tier in e.repairable if self._may_repair(e, tier)]
        if not wanted:
            return
        view = self._ledger.view()
        views = {checkpoint.id: checkpoint for checkpoint in view.checkpoints}
        for entry, tier in sorted(wanted, key=lambda one: (one[0].id, one[1])):
            if needs_repair(view, views[entry.id], tier):
                self._tried.add((tier, entry.id))
                body = Reason(text=entry.damage[tier])
                self._messages.announce(MessageKind.REPAIR, entry.id, tier, body)

    def _may_repair(self, entry: LedgerEntry, tier: str) -> bool:
        """Return whether the ranks of this run can write the images that they have saved of it."""
        ours = entry.shards is not None or entry.shard == self._ledger.shard
        return (
            ours
            and tier in self._tiers
            and entry.commit is not None
            and entry.state(tier) is CopyState.ABSENT
            and entry.id not in self._ledger.scattered
            and tier not in entry.owed
            and (tier, entry.id) not in self._tried
            and not self._commits.has_given_up(tier, entry.id)
        )

    @staticmethod
    def handles(news: RankMessage) -> bool:
        """Return whether ``on_message`` processes a message."""
        return kind_of(news) in (MessageKind.DAMAGE_FOUND, MessageKind.REPAIR)

    def on_message(self, news: RankMessage) -> None:
        topic = CheckpointTopic.parse(news.topic)
        entry = self._ledger.entries.get(topic.id)
        match news:
            case DecisionAnnounced() if topic.kind == MessageKind.REPAIR:
                why = Reason.from_json(news.body, rank=0).text
                self._repair_with_all(entry, topic.id, topic.tier, why)
            case _ if entry is None or entry.state(topic.tier) is not CopyState.COMMITTED:
                return
            case RankReported():
                damage = FoundDamage.from_json(news.body, rank=news.rank)
                text = self._topology.name_rank(news.rank, damage.text)
                body = replace(damage, text=text)
                self._messages.announce(MessageKind.DAMAGE_FOUND, topic.id, topic.tier, body)
            case DecisionAnnounced():
                damage = FoundDamage.from_json(news.body, rank=0)
                self._record(entry, topic.tier, damage.text, damage.repairable)

    def _record(self, entry: LedgerEntry, tier: str, why: str, repairable: bool) -> None:
        text = "%s: %s is damaged, and protects nothing: %s"
        self._conditions.report((tier, entry.id), logging.ERROR, text, tier, entry.id, why)
        entry.note_damage(tier, why, repairable=repairable)
        if not repairable:
            entry.bytes.pop(tier, None)  # it is gone: no room can be made by its deletion
        self._deleter.plan_tier(tier)
        if repairable:
            self._leave_mark(entry, tier, why)
        self.plan_repairs(entry)

    def _leave_mark(self, entry: LedgerEntry, tier: str, why: str) -> None:
        """Record the damage on the tier, for later listings; a repair removes the mark."""
        if entry.commit is None or tier not in self._tiers:
            return
        if self._hooks.may_write() and self._commits.owns(tier):
            name = damage_mark(entry.commit.lineage)
            wall_time_s = self._ledger.now_s + self._ledger.wall_offset_s
            mark = Mark(name=name, checkpoint=entry.id, wall_time_s=wall_time_s, reason=why)
            self._marking[tier, entry.id] = []
            self._hooks.dispatch(ChangeMark(tier=tier, mark=mark))

    def on_committed(self, tier: str, entry: LedgerEntry) -> None:
        """A checkpoint was committed on a tier: a damaged copy is repaired, and the new one may repair others."""
        self._conditions.end((tier, entry.id), "%s: %s is whole again", tier, entry.id)
        if entry.repairable:
            self.plan_repairs(entry)

    def is_marking(self, task: ChangeMark) -> bool:
        """Return whether a task records damage, and is no person's command."""
        return keys.is_damage_mark(task.mark.name)

    def defers(self, task: Task) -> bool:
        """Hold back a task that ends a damaged copy until its mark is written; return whether it was held back."""
        if not isinstance(task, FinishCopy | CommitCopy | DeleteCopy):
            return False
        waiting = self._marking.get((task.tier, task.id))
        if waiting is None:
            return False
        waiting.append(task)
        return True

    def on_mark_written(self, task: ChangeMark, outcome: Outcome) -> None:
        """The mark is written, or could not be: dispatch the tasks that waited for it."""
        id = task.mark.checkpoint
        if outcome.error is not None:
            logger.warning(
                "%s: the damage of %s could not be recorded there: %s", task.tier, id, outcome.error
            )
        for waiting in self._marking.pop((task.tier, id)):
            self._hooks.dispatch(waiting)

    def _repair_with_all(
        self, entry: LedgerEntry | None, id: CheckpointId, tier: str, why: str
    ) -> None:
        """Write this rank's images, though they may be good: a copy is committed when all ranks have uploaded."""
        if entry is None or entry.commit is None:
            reason = Reason(text="it does not know the checkpoint")
            self._messages.report(MessageKind.COPY_FAILED, id, tier, reason)
            return
        if tier not in entry.damage:
            entry.note_damage(tier, why, repairable=True)
        logger.info("%s: %s is damaged, and is written anew", tier, entry.id)
        entry.owed.add(tier)
