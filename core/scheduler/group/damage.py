"""Damage: what a reader finds is recorded in the ledgers of all ranks: the copy protects nothing any more.

A mark beside the copy records the damage for later starts. A deletion of the copy waits until the mark is written: a
mark that was written after it would be left over. Belongs to the coordinator's thread and does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from tierfall.core.format.commit_files import damage_mark
from tierfall.core.format.records import Mark
from tierfall.core.ranks.message_tree import (
    DecisionAnnounced,
    MessageTree,
    RankMessage,
    RankReported,
)
from tierfall.core.ranks.messages import CheckpointTopic
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.group.commits import Commits
from tierfall.core.scheduler.group.messages import FoundDamage, GroupMessages, MessageKind
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import ChangeMark, DeleteCopy, Outcome, Task
from tierfall.core.types import keys
from tierfall.core.types.values import CheckpointId, CopyState

logger = logging.getLogger("tierfall")


class DamageReports:
    """See the module. ``tiers`` are those that copies are flushed to."""

    KINDS = frozenset((MessageKind.DAMAGE_FOUND,))

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
        self._marking: dict[tuple[str, CheckpointId], list[Task]] = {}
        """The copies whose mark is being written, and the tasks that wait for it."""

    def report(self, tier: str, id: CheckpointId, why: str, *, repairable: bool = True) -> None:
        """A reader of this rank has found a damaged copy; not ``repairable``: its commit record is missing, too."""
        entry = self._ledger.entries.get(id)
        if entry is None or entry.state(tier) is not CopyState.COMMITTED:
            return  # it is known, or the copy was deleted meanwhile
        body = FoundDamage(text=why, repairable=repairable)
        self._messages.report(MessageKind.DAMAGE_FOUND, id, tier, body)

    def on_message(self, news: RankMessage) -> None:
        topic = CheckpointTopic.parse(news.topic)
        entry = self._ledger.entries.get(topic.id)
        if entry is None or entry.state(topic.tier) is not CopyState.COMMITTED:
            return
        match news:
            case RankReported():
                damage = FoundDamage.from_json(news.body, rank=news.rank)
                text = self._topology.name_rank(news.rank, damage.text)
                body = replace(damage, text=text)
                self._messages.announce(MessageKind.DAMAGE_FOUND, topic.id, topic.tier, body)
            case DecisionAnnounced():
                damage = FoundDamage.from_json(news.body, rank=0)
                self._record(entry, topic.tier, damage.text, damage.repairable)

    def _record(self, entry: LedgerEntry, tier: str, why: str, repairable: bool) -> None:
        repair = f"tierfall verify {entry.id} --tier {tier} --repair"
        cure = f" (once the training has ended, '{repair}' rewrites it from a good copy)"
        text = "%s: %s is damaged, and protects nothing: %s%s"
        is_mended = repairable and tier not in self._ledger.peer_tiers
        logger.error(text, tier, entry.id, why, cure if is_mended else "")
        entry.note_damage(tier, why, repairable=repairable)
        if not repairable:
            entry.bytes.pop(tier, None)  # it is gone: no room can be made by its deletion
        self._deleter.plan_tier(tier)
        if repairable:
            self._leave_mark(entry, tier, why)

    def _leave_mark(self, entry: LedgerEntry, tier: str, why: str) -> None:
        """Record the damage on the tier, for later listings."""
        if entry.commit is None or tier not in self._tiers:
            return
        if self._hooks.may_write() and self._commits.owns(tier):
            name = damage_mark(entry.commit.lineage)
            wall_time_s = self._ledger.now_s + self._ledger.wall_offset_s
            mark = Mark(name=name, checkpoint=entry.id, wall_time_s=wall_time_s, reason=why)
            self._marking[tier, entry.id] = []
            self._hooks.dispatch(ChangeMark(tier=tier, mark=mark))

    def is_marking(self, task: ChangeMark) -> bool:
        """Return whether a task records damage, and is no person's command."""
        return keys.is_damage_mark(task.mark.name)

    def defers(self, task: Task) -> bool:
        """Hold back the deletion of a damaged copy until its mark is written; return whether it was held back."""
        if not isinstance(task, DeleteCopy):
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
