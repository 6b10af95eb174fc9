"""A person's orders where there are several ranks: given once, to rank 0, and carried out by each where it writes.

    rank 0                          every rank
    an order about 400@1        ->  marks: in its memory, and on the tiers where records are its to write
    all have marked: delete     <-  marked
                                ->  its copies go, once every copy on every node bears its tombstone
    all have dropped: ended     <-  deleted
                                ->  what failed anywhere is known to all

Before rank 0 lets go of a copy that each node has a part of, the marks on all nodes are read: a person may have left
one on any of them (``NodeMarks``). All of it belongs to the coordinator's thread and does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tierfall.core.ranks.message_tree import Bodies, MessageTree
from tierfall.core.ranks.ranks import DecisionAnnounced, MessagesGathered, RankMessage, RankReported
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.group.commands import DELETED, Commands
from tierfall.core.scheduler.group.commits import Commits
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import (
    Command,
    CommandKind,
    DeleteCopy,
    NotWholeError,
    Outcome,
    ReadMarks,
)
from tierfall.core.types import keys
from tierfall.core.types.errors import IntegrityError, RanksError, TierfallError, error_class
from tierfall.core.types.values import CheckpointId

logger = logging.getLogger("tierfall")

OTHERS = "other ranks"
"""Stands among the tiers that an order waits for, as long as other ranks are at it."""
_ORDER, _MARKED, _DELETE, _DELETED, _ENDED = "order", "marked", "delete", "deleted", "ended"
_FOUND = "found"
_TOPICS = frozenset({_ORDER, _MARKED, _DELETE, _DELETED, _ENDED, _FOUND})
_ASK, _ANSWER = "marks", "marks_read"


@dataclass(slots=True)
class _CommandPart:
    """This rank's part in an order: what it says next, and whether it has."""

    number: int
    order: Command
    says: str = _MARKED
    said: bool = False


class GroupCommands(Commands):
    """See the module. Rank 0 takes orders as one rank does; the others take up what it announces."""

    def __init__(self, *, council: MessageTree, commits: Commits, **alone: Any) -> None:
        """``alone`` are the arguments of ``Commands``, but for who owns a tier."""
        super().__init__(**alone, owns=commits.owns)
        self._council = council
        self._commits = commits
        self._conducts = commits.decides
        self._count = 0
        self._now_s = 0.0
        self._parts: dict[CheckpointId, _CommandPart] = {}

    @staticmethod
    def is_about(news: RankMessage) -> bool:
        """Say whether this is what hears of it."""
        return news.topic[0] in _TOPICS

    # As with one rank ------------------------------------------------------------------------------

    def finish_deletion(self, id: CheckpointId) -> None:
        """Carry out a tombstone that was found by any rank, once."""
        if not self._conducts:
            self._council.tell((_FOUND, 0, id.step, id.attempt), None)
        elif not any(o.id == id and o.kind is CommandKind.DELETE for o in self._open):
            self._deleted.add(id)
            super().finish_deletion(id)

    def carry_out(self, now_s: float) -> None:
        self._now_s = now_s
        super().carry_out(now_s)
        for part in list(self._parts.values()):
            if not part.said and not part.order.waiting - {OTHERS}:
                self._report(part)

    def _begin_unknown(self, order: Command) -> None:
        """Another rank may know of it: a part of what was deleted, or was found to be."""
        if order.kind is CommandKind.DELETE and order.id in self._deleted:
            self._begin(order, None)
        else:
            super()._begin_unknown(order)

    def _is_settling(self, entry: LedgerEntry) -> bool:
        if entry.awaits_others or self._commits.is_ending(entry.id):
            return True
        return super()._is_settling(entry)

    def _begin(self, order: Command, entry: LedgerEntry | None) -> None:
        """Begin an order on all ranks; for rank 0."""
        held = self._held(order.id)
        self._count += 1
        self._announce(_ORDER, self._count, order.id, [str(order.kind), order.wall_time_s])
        self._begin_part(self._count, order, entry)
        if order.kind is CommandKind.DELETE:
            for lane in self._lanes:
                if lane.tier not in held:  # some ranks may have brought their parts
                    self._commits.give_up(lane.tier, order.id, f"it was {DELETED}")

    def _begin_part(self, number: int, order: Command, entry: LedgerEntry | None) -> None:
        self._parts[order.id] = _CommandPart(number, order)
        super()._begin(order, entry)
        order.waiting.add(OTHERS)

    def _drop_all(self, order: Command) -> None:
        super()._drop_all(order)
        order.waiting.add(OTHERS)
        part = self._parts[order.id]
        part.says, part.said = _DELETED, False

    def _held(self, id: CheckpointId) -> list[str]:
        """A node may have a part of what is not whole on a tier: that goes, too."""
        partial = [tier for tier, of in sorted(self._ledger.partial) if of == id]
        return [*super()._held(id), *partial]

    def _release_memory(self, tier: str, id: CheckpointId) -> None:
        if (tier, id) in self._ledger.partial:
            self._ledger.partial.discard((tier, id))
            if self._owns(tier):
                self._dropper.leave(DeleteCopy(tier=tier, id=id, reason=DELETED, tombstoned=True))
        elif self._owns(tier):
            super()._release_memory(tier, id)
        elif self._hooks.is_split(tier):  # else rank 0 says so once it is gone
            entry = self._ledger.entries[id]
            entry.note_gone(tier)

    def _try_later(self, id: CheckpointId, now_s: float) -> None:
        if self._conducts:
            super()._try_later(id, now_s)

    # All ranks -------------------------------------------------------------------------------------

    def _announce(self, what: str, number: int, id: CheckpointId, body: Any) -> None:
        self._council.announce((what, number, id.step, id.attempt), body)

    def _report(self, part: _CommandPart) -> None:
        """Tell rank 0 what this rank has done, and what it could not do."""
        part.said = True
        order = part.order
        body = {"failed": _errors_to_json(order.failed), "unmarked": order.unmarked}
        topic = (part.says, part.number, order.id.step, order.id.attempt)
        self._council.contribute(topic, body)

    def hear(self, news: RankMessage) -> None:
        what, number, step, attempt = news.topic
        id = CheckpointId(int(step), int(attempt))
        part = self._parts.get(id)
        mine = part is not None and part.number == number
        match news:
            case RankReported():
                self.finish_deletion(id)
            case DecisionAnnounced() if what == _ORDER and not self._conducts:
                self._join(int(number), id, *news.body)
            case MessagesGathered(passed=False) if part is not None and mine:
                self._on_all_have(part, str(what), news.bodies)
            case DecisionAnnounced() if part is not None and mine and what == _DELETE:
                part.order.waiting.discard(OTHERS)
            case DecisionAnnounced() if part is not None and mine and what == _ENDED:
                self._ended(part, news.body)

    def _join(self, number: int, id: CheckpointId, kind: str, wall_time_s: float) -> None:
        """Take up an order that rank 0 has begun."""
        order = Command(
            kind=CommandKind(kind),
            id=id,
            wall_time_s=wall_time_s,
            answer=_ignore_failed,
            begun=True,
        )
        self.give(order)
        self._begin_part(number, order, self._ledger.entries.get(id))

    def _on_all_have(self, part: _CommandPart, what: str, bodies: Bodies) -> None:
        """All ranks have marked, or dropped, what they could."""
        order = part.order
        for rank, body in bodies.items():
            order.unmarked |= body["unmarked"]
            for tier, said in body["failed"].items():
                order.failed.setdefault(tier, _error_from_json(said, rank))
        if what == _MARKED and order.kind is CommandKind.DELETE and not order.unmarked:
            self._announce(_DELETE, part.number, order.id, None)
        else:
            body = {"failed": sorted(order.failed), "unmarked": order.unmarked}
            self._announce(_ENDED, part.number, order.id, body)

    def _ended(self, part: _CommandPart, body: Mapping[str, Any]) -> None:
        order = part.order
        entry = self._ledger.entries.get(order.id)
        if order.kind is CommandKind.UNPIN and entry is not None:
            for tier in set(self._held(order.id)) - set(body["failed"]):
                entry.set_mark(tier, keys.PIN_MARK, there=False)
        order.unmarked = body["unmarked"]
        order.dropping = False
        order.waiting.clear()
        del self._parts[order.id]
        self._end(order, self._now_s)


class NodeMarks:
    """The marks of tiers of which each node has its own, as rank 0 asks for them: those on all nodes together."""

    def __init__(
        self,
        *,
        council: MessageTree,
        ledger: Ledger,
        shared: Mapping[str, bool],
        dropper: Deleter,
        hooks: Hooks,
    ) -> None:
        self._council = council
        self._ledger = ledger
        self._topology = council.topology
        self._shared = shared
        self._dropper = dropper
        self._hooks = hooks
        self._count = 0
        self._asked: dict[int, ReadMarks] = {}
        self._changed: dict[str, set[CheckpointId]] = {tier: set() for tier in shared}
        self._going: dict[int, DeleteCopy] = {}

    @staticmethod
    def is_about(news: RankMessage) -> bool:
        """Say whether this is what hears of it."""
        return news.topic[0] in (_ASK, _ANSWER)

    def read(self, task: ReadMarks) -> None:
        """Have marks read: here, or on all nodes."""
        if self.is_split(task.tier):
            ids = self._changed[task.tier].union(task.ids)
            self._ask(replace(task, ids=tuple(sorted(ids))))
        else:
            self._hooks.dispatch(task)

    def asks_first(self, task: DeleteCopy) -> bool:
        """Have the marks of a copy that is to go read on all nodes first; False where this node sees all of it."""
        if not self.is_split(task.tier):
            return False
        self._going[self._count + 1] = task
        self._ask(ReadMarks(tier=task.tier, ids=(task.id,), relies_on=task.relies_on))
        return True

    def is_split(self, tier: str) -> bool:
        """Say whether other nodes have parts of what a tier holds."""
        return not self._shared[tier] and len(self._topology.nodes) > 1

    def _ask(self, task: ReadMarks) -> None:
        self._count += 1
        self._asked[self._count] = task
        body = [[[id.step, id.attempt] for id in ids] for ids in (task.ids, task.relies_on)]
        self._council.announce((_ASK, self._count, task.tier, 0), body)

    def hear(self, news: RankMessage) -> None:
        _, number, tier, _ = news.topic
        match news:
            case DecisionAnnounced() if self._topology.is_leader:
                ids, relied = (tuple(CheckpointId(*pair) for pair in pairs) for pairs in news.body)
                task = ReadMarks(tier=str(tier), ids=ids, number=int(number), relies_on=relied)
                self._hooks.dispatch(task)
            case MessagesGathered(passed=False):
                self._on_answers(int(number), news.bodies)

    def took(self, task: ReadMarks, outcome: Outcome) -> None:
        """Take marks that were read here: for this rank, or for rank 0."""
        if not task.number:
            self._dropper.take_marks(task, outcome)
            return
        if isinstance(outcome.error, NotWholeError):
            self._dropper.not_whole(task.tier, outcome.error)
            body: dict[str, Any] = {"failed": [IntegrityError.__name__, str(outcome.error)]}
        elif outcome.error is not None:
            body = {"failed": _errors_to_json({task.tier: outcome.error})[task.tier]}
        else:
            read = outcome.value.items()
            body = {"marks": [[id.step, id.attempt, sorted(marks)] for id, marks in read]}
        topic = (_ANSWER, task.number, task.tier, 0)
        self._council.contribute(topic, body, leaders_only=True)

    def _on_answers(self, number: int, bodies: Bodies) -> None:
        """All nodes have answered. Where a person has changed marks on one of them, it has read all that lie there: of
        what is news, all nodes are asked in turn."""
        task = self._asked.pop(number)
        failed = [
            _error_from_json(b["failed"], rank) for rank, b in bodies.items() if "failed" in b
        ]
        read = _merge_nodes(body["marks"] for body in bodies.values() if "marks" in body)
        changed = self._changed[task.tier]
        changed |= self._ledger.changed_marks(task.tier, read)
        if not failed:
            changed -= set(task.ids)
        if not failed and changed and number not in self._going:
            self.read(task)
            return
        value = None if failed else {id: read.get(id, frozenset()) for id in task.ids}
        outcome = Outcome(task=task, error=failed[0] if failed else None, value=value)
        going = self._going.pop(number, None)
        if going is None:
            self._dropper.take_marks(task, outcome)
        else:
            self._dropper.take_answer(going, outcome)


def _merge_nodes(
    nodes: Iterable[list[tuple[int, int, list[str]]]],
) -> dict[CheckpointId, frozenset[str]]:
    found: dict[CheckpointId, frozenset[str]] = {}
    for marks_of_node in nodes:
        for step, attempt, marks in marks_of_node:
            id = CheckpointId(step, attempt)
            found[id] = found.get(id, frozenset()) | frozenset(marks)
    return found


def _errors_to_json(failed: Mapping[str, BaseException]) -> dict[str, list[str]]:
    return {tier: [type(error).__name__, str(error)] for tier, error in failed.items()}


def _error_from_json(said: list[str], rank: int) -> TierfallError:
    """Make an error of what another rank said of it: of its kind, where that is one of tierfall's own."""
    return error_class(said[0], RanksError)(f"rank {rank}: {said[1]}")


def _ignore_failed(failed: Mapping[str, BaseException]) -> None:
    """Rank 0 hears what failed."""
