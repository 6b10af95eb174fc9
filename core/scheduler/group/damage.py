"""Damage: what a reader finds is recorded in the ledgers of all ranks: the copy protects nothing any more.

An entry in the tier's list of what is decided records the damage for later starts. Belongs to the coordinator's thread
and does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

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
from tierfall.core.scheduler.ledger.tasks import NoteDamage, Outcome
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
            self._note(entry, tier, why)

    def _note(self, entry: LedgerEntry, tier: str, why: str) -> None:
        """Note the damage on the tier, for later listings."""
        if entry.commit is None or tier not in self._tiers:
            return
        if self._hooks.fenced is None and self._commits.owns(tier):
            self._hooks.dispatch(NoteDamage(tier=tier, id=entry.id, commit=entry.commit, why=why))

    def on_noted(self, outcome: Outcome) -> None:
        task = outcome.task
        assert isinstance(task, NoteDamage)
        if outcome.error is not None:
            text = "%s: the damage of %s could not be noted there: %s"
            logger.warning(text, task.tier, task.id, outcome.error)
