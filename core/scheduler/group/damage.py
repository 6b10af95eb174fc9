"""Damaged copies: what any reader finds comes to the ledger of all ranks, and is written anew where that is possible.

    any rank                 rank 0                            every rank
    finds damage         ->  the copy counts for nothing   ->  the copy counts for nothing
                             it can be repaired: owe it    ->  it is owed, and brought as any other copy

A repair replaces the files in place, each once all of it was read from a good copy and verified, the commit record
last: what is still good in a damaged copy stays until then. It evicts nothing, and comes after what a tier does not
have yet. It belongs to the coordinator's thread and does no I/O.

A mark beside the copy records the damage. A repair removes the mark, and a deletion all that lies there: both wait
until the mark is written. One that came after them would say of a good copy that it is damaged, or be left over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from tierfall.core.format.commit_files import damage_mark
from tierfall.core.format.records import Mark
from tierfall.core.ranks.message_tree import MessageTree
from tierfall.core.ranks.messages import Topic
from tierfall.core.ranks.ranks import DecisionAnnounced, RankMessage, RankReported
from tierfall.core.scheduler.group.commits import Commits
from tierfall.core.scheduler.ledger.ledger import Ledger, LedgerEntry
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
from tierfall.core.types.view import CheckpointView, View

logger = logging.getLogger("tierfall")
_FOUND, _REPAIR = "damage_found", "damage_repaired"


class NeedsRepair(Protocol):
    def __call__(self, view: View, checkpoint: CheckpointView, tier_name: str) -> bool: ...


class DamageReports:
    """See the module. ``tiers`` are those that copies are brought to. Other ranks are reached by ``council``, and
    ``commits`` says what all of them have given up. ``has_lost`` is told of a tier that has a good copy less,
    and ``dispatch`` has it recorded there; ``may_write`` says whether this process may bring copies at all."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        tiers: Iterable[str],
        needs_repair: NeedsRepair,
        has_lost: Callable[[str], None],
        may_write: Callable[[], bool],
        dispatch: Callable[[Task], None],
        council: MessageTree | None = None,
        commits: Commits | None = None,
    ) -> None:
        self._ledger = ledger
        self._tiers = frozenset(tiers)
        self._needs_repair = needs_repair
        self._has_lost = has_lost
        self._may_write = may_write
        self._dispatch = dispatch
        self._council = council
        self._commits = commits
        self._tried: set[tuple[str, CheckpointId]] = set()
        self._marking: dict[tuple[str, CheckpointId], list[Task]] = {}
        """The copies whose mark is just being written, and the tasks that wait for that."""

    def found(self, tier: str, id: CheckpointId, why: str, *, repairable: bool = True) -> None:
        """A reader of this rank has found that a copy is not what was written; not ``repairable``: its commit record
        has gone, too."""
        entry = self._ledger.entries.get(id)
        if entry is None or entry.state(tier) is not CopyState.COMMITTED:
            return  # it is known, or the copy has left meanwhile
        if self._council is None:
            self._record(entry, tier, why, repairable)
        else:
            self._council.tell(_topic(_FOUND, id, tier), [why, repairable])

    def plan_repairs(self, only: LedgerEntry | None = None) -> None:
        """Owe the tiers what can be repaired now, of all checkpoints or of one; for rank 0. A repair that failed is not
        tried again by this process."""
        if not self._may_write() or not (self._commits is None or self._commits.decides):
            return
        entries = self._ledger.repairable() if only is None else (only,)
        wanted = [(e, tier) for e in entries for tier in e.repairable if self._may_repair(e, tier)]
        if not wanted:
            return
        view = self._ledger.view()
        views = {checkpoint.id: checkpoint for checkpoint in view.checkpoints}
        for entry, tier in sorted(wanted, key=lambda one: (one[0].id, one[1])):
            if self._needs_repair(view, views[entry.id], tier):
                self._tried.add((tier, entry.id))
                self._begin(entry, tier)

    def _may_repair(self, entry: LedgerEntry, tier: str) -> bool:
        """Say whether all ranks of now can bring what they have saved of it: other ranks' images are not theirs."""
        ours = entry.parts is not None or entry.shard == self._ledger.shard
        return (
            ours
            and tier in self._tiers
            and entry.commit is not None
            and entry.state(tier) is CopyState.ABSENT
            and entry.id not in self._ledger.scattered
            and tier not in entry.owed
            and (tier, entry.id) not in self._tried
            and not (self._commits is not None and self._commits.has_ended(tier, entry.id))
        )

    def _begin(self, entry: LedgerEntry, tier: str) -> None:
        if self._council is None:
            self._owe(entry, tier)
        else:
            self._council.announce(_topic(_REPAIR, entry.id, tier), entry.damage[tier])

    @staticmethod
    def is_about(news: RankMessage) -> bool:
        """Say whether this is what hears of it."""
        return news.topic[0] in (_FOUND, _REPAIR)

    def hear(self, news: RankMessage) -> None:
        """Hear what a rank has found, or what rank 0 says of it."""
        what, step, attempt, tier = news.topic
        id, tier = CheckpointId(int(step), int(attempt)), str(tier)
        entry = self._ledger.entries.get(id)
        match news:
            case RankReported(body=[why, repairable]):
                if entry is not None and entry.state(tier) is CopyState.COMMITTED:
                    assert self._council is not None
                    text = f"rank {news.rank}: {why}"
                    self._council.announce(_topic(_FOUND, id, tier), [text, repairable])
            case DecisionAnnounced(body=[why, repairable]) if what == _FOUND and entry is not None:
                if entry.state(tier) is CopyState.COMMITTED:
                    self._record(entry, tier, why, repairable)
            case DecisionAnnounced() if what == _REPAIR:
                self._repair_together(entry, id, tier, str(news.body))

    def _record(self, entry: LedgerEntry, tier: str, why: str, repairable: bool) -> None:
        logger.error("%s: %s is damaged, and protects nothing: %s", tier, entry.id, why)
        entry.note_damage(tier, why, repairable=repairable)
        if not repairable:
            entry.bytes.pop(tier, None)  # it has gone: it takes no room that could be made
        self._has_lost(tier)
        if repairable:
            self._leave_mark(entry, tier, why)
        self.plan_repairs(entry)

    def _leave_mark(self, entry: LedgerEntry, tier: str, why: str) -> None:
        """Let whoever lists the tier later know it too; a repair takes the mark away."""
        if entry.commit is None or tier not in self._tiers:
            return
        if self._may_write() and (self._commits is None or self._commits.owns(tier)):
            name = damage_mark(entry.commit.line)
            wall_time_s = self._ledger.now_s + self._ledger.wall_offset_s
            mark = Mark(name=name, checkpoint=entry.id, wall_time_s=wall_time_s, reason=why)
            self._marking[tier, entry.id] = []
            self._dispatch(ChangeMark(tier=tier, mark=mark))

    def is_marking(self, task: ChangeMark) -> bool:
        """Say whether a task records damage, and is no person's order."""
        return keys.is_damage_mark(task.mark.name)

    def holds_back(self, task: Task) -> bool:
        """Keep what ends a damaged copy until its mark is written, and say so: it is dispatched then."""
        if not isinstance(task, FinishCopy | CommitCopy | DeleteCopy):
            return False
        waiting = self._marking.get((task.tier, task.id))
        if waiting is None:
            return False
        waiting.append(task)
        return True

    def take_mark(self, task: ChangeMark, outcome: Outcome) -> None:
        """The mark is written, or could not be: what waited for it goes on."""
        id = task.mark.checkpoint
        if outcome.error is not None:
            logger.warning(
                "%s: that %s is damaged is not recorded there: %s", task.tier, id, outcome.error
            )
        for waiting in self._marking.pop((task.tier, id)):
            self._dispatch(waiting)

    def _repair_together(
        self, entry: LedgerEntry | None, id: CheckpointId, tier: str, why: str
    ) -> None:
        """Bring this rank's part, though that may be whole: a checkpoint is committed when all have brought theirs."""
        assert self._council is not None
        if entry is None or entry.commit is None:
            self._council.tell(_topic("cannot", id, tier), "it does not know the checkpoint")
            return
        if tier not in entry.damage:
            entry.note_damage(tier, why, repairable=True)
        self._owe(entry, tier)

    def _owe(self, entry: LedgerEntry, tier: str) -> None:
        logger.info("%s: %s is damaged, and is written anew", tier, entry.id)
        entry.owed.add(tier)


def _topic(what: str, id: CheckpointId, tier: str) -> Topic:
    return (what, id.step, id.attempt, tier)
