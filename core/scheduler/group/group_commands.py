"""Commands where there are several ranks: given once, to rank 0, and carried out by each rank where it writes.

    rank 0                           every rank
    a command about 400@1         -> marks: in its memory, and on the tiers where it owns the records
    all have marked: delete       <- marked
                                  -> its copies are deleted, once every copy on every node bears its tombstone
    all have deleted: ended       <- deleted
                                  -> all ranks know what failed on any

Before rank 0 deletes a copy of which each node has a part, the marks on all nodes are read: a person may have written
one on any of them (``NodeMarks``). All of it belongs to the coordinator's thread and does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tierfall.core.ranks.message_tree import MessageTree
from tierfall.core.ranks.messages import CheckpointTopic, ErrorMessage
from tierfall.core.ranks.ranks import DecisionAnnounced, MessagesGathered, RankMessage, RankReported
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.group.commands import DELETED, Commands
from tierfall.core.scheduler.group.commits import Commits
from tierfall.core.scheduler.group.messages import (
    BegunCommand,
    CommandPart,
    EndedCommand,
    GroupMessages,
    MarksRequest,
    MessageKind,
    NodeMarksFound,
    kind_of,
    read_all,
)
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
from tierfall.core.types.values import CheckpointId

logger = logging.getLogger("tierfall")

OTHERS = "other ranks"
"""One of the tiers that a command waits for, as long as other ranks have not finished."""
_KINDS = frozenset(
    (
        MessageKind.COMMAND,
        MessageKind.MARKED,
        MessageKind.DELETE,
        MessageKind.DELETED,
        MessageKind.COMMAND_ENDED,
        MessageKind.TOMBSTONE_FOUND,
    )
)


@dataclass(slots=True)
class _OwnPart:
    """This rank's part in a command: what it contributes next, and whether it has."""

    number: int
    command: Command
    contributes: MessageKind = MessageKind.MARKED
    contributed: bool = False


class GroupCommands(Commands):
    """See the module. Rank 0 accepts commands as in a run of one rank; the other ranks join those that it announces."""

    def __init__(self, *, message_tree: MessageTree, commits: Commits, **alone: Any) -> None:
        """``alone`` are the arguments of ``Commands`` except ``owns``."""
        super().__init__(**alone, owns=commits.owns)
        self._messages = GroupMessages(message_tree)
        self._commits = commits
        self._decides = commits.decides
        self._count = 0
        self._now_s = 0.0
        self._parts: dict[CheckpointId, _OwnPart] = {}

    @staticmethod
    def handles(news: RankMessage) -> bool:
        """Return whether ``on_message`` processes a message."""
        return kind_of(news) in _KINDS

    # As in a run of one rank -----------------------------------------------------------------------

    def finish_deletion(self, id: CheckpointId) -> None:
        """Carry out, once, a tombstone that any rank has found."""
        if not self._decides:
            self._messages.report(MessageKind.TOMBSTONE_FOUND, id)
        elif not any(c.id == id and c.kind is CommandKind.DELETE for c in self._open):
            self._deleted.add(id)
            super().finish_deletion(id)

    def advance(self, now_s: float) -> None:
        self._now_s = now_s
        super().advance(now_s)
        for part in list(self._parts.values()):
            if not part.contributed and not part.command.waiting - {OTHERS}:
                self._contribute(part)

    def _begin_unknown(self, command: Command) -> None:
        """Another rank may have a part of a checkpoint that was deleted."""
        if command.kind is CommandKind.DELETE and command.id in self._deleted:
            self._begin(command, None)
        else:
            super()._begin_unknown(command)

    def _is_settling(self, entry: LedgerEntry) -> bool:
        if entry.awaiting_ranks or self._commits.is_committing(entry.id):
            return True
        return super()._is_settling(entry)

    def _begin(self, command: Command, entry: LedgerEntry | None) -> None:
        """Begin a command on all ranks; for rank 0."""
        held = self._held(command.id)
        self._count += 1
        body = BegunCommand(kind=command.kind, wall_time_s=command.wall_time_s)
        self._messages.announce(MessageKind.COMMAND, command.id, body=body, number=self._count)
        self._begin_part(self._count, command, entry)
        if command.kind is CommandKind.DELETE:
            for lane in self._lanes:
                if lane.tier not in held:  # some ranks may have uploaded their images
                    self._commits.give_up(lane.tier, command.id, f"it was {DELETED}")

    def _begin_part(self, number: int, command: Command, entry: LedgerEntry | None) -> None:
        self._parts[command.id] = _OwnPart(number, command)
        super()._begin(command, entry)
        command.waiting.add(OTHERS)

    def _drop_all(self, command: Command) -> None:
        super()._drop_all(command)
        command.waiting.add(OTHERS)
        part = self._parts[command.id]
        part.contributes, part.contributed = MessageKind.DELETED, False

    def _held(self, id: CheckpointId) -> list[str]:
        """A node may have a part of a copy that is not whole: it is deleted, too."""
        partial = [tier for tier, of in sorted(self._ledger.partial) if of == id]
        return [*super()._held(id), *partial]

    def _release_memory(self, tier: str, id: CheckpointId) -> None:
        if (tier, id) in self._ledger.partial:
            self._ledger.partial.discard((tier, id))
            if self._owns(tier):
                self._deleter.delete(DeleteCopy(tier=tier, id=id, reason=DELETED, tombstoned=True))
        elif self._owns(tier):
            super()._release_memory(tier, id)
        elif self._hooks.is_split(tier):  # else rank 0 announces it once it is deleted
            entry = self._ledger.entries[id]
            entry.note_gone(tier)

    def _try_later(self, id: CheckpointId, now_s: float) -> None:
        if self._decides:
            super()._try_later(id, now_s)

    # All ranks -------------------------------------------------------------------------------------

    def _contribute(self, part: _OwnPart) -> None:
        """Contribute what this rank could not do of a command."""
        part.contributed = True
        failed = {tier: ErrorMessage.of(error) for tier, error in part.command.failed.items()}
        body = CommandPart(failed=failed, unmarked=part.command.unmarked)
        self._messages.contribute(part.contributes, part.command.id, body=body, number=part.number)

    def on_message(self, news: RankMessage) -> None:
        topic = CheckpointTopic.parse(news.topic)
        part = self._parts.get(topic.id)
        if isinstance(news, RankReported):
            self.finish_deletion(topic.id)
        elif topic.kind == MessageKind.COMMAND:
            if not self._decides:
                assert isinstance(news, DecisionAnnounced)
                self._join(topic, BegunCommand.from_json(news.body, rank=0))
        elif part is None or part.number != topic.number:
            return  # the command has ended on this rank
        elif isinstance(news, MessagesGathered):
            if not news.passed:
                self._on_all_have(part, topic, read_all(CommandPart, news.bodies))
        elif topic.kind == MessageKind.DELETE:
            part.command.waiting.discard(OTHERS)
        elif topic.kind == MessageKind.COMMAND_ENDED:
            self._ended(part, EndedCommand.from_json(news.body, rank=0))

    def _join(self, topic: CheckpointTopic, begun: BegunCommand) -> None:
        """Join a command that rank 0 has begun."""
        command = Command(
            kind=begun.kind,
            id=topic.id,
            wall_time_s=begun.wall_time_s,
            on_answer=_ignore_failed,
            begun=True,
        )
        self.submit(command)
        self._begin_part(topic.number, command, self._ledger.entries.get(topic.id))

    def _on_all_have(
        self, part: _OwnPart, topic: CheckpointTopic, parts: Mapping[int, CommandPart]
    ) -> None:
        """All ranks have marked, or deleted, what they could."""
        command = part.command
        for rank, one in parts.items():
            command.unmarked |= one.unmarked
            for tier, error in one.failed.items():
                command.failed.setdefault(tier, error.error_of(rank))
        is_marked = topic.kind == MessageKind.MARKED and not command.unmarked
        if is_marked and command.kind is CommandKind.DELETE:
            self._messages.announce(MessageKind.DELETE, command.id, number=part.number)
        else:
            body = EndedCommand(failed=tuple(sorted(command.failed)), unmarked=command.unmarked)
            self._messages.announce(
                MessageKind.COMMAND_ENDED, command.id, body=body, number=part.number
            )

    def _ended(self, part: _OwnPart, message: EndedCommand) -> None:
        command = part.command
        entry = self._ledger.entries.get(command.id)
        if command.kind is CommandKind.UNPIN and entry is not None:
            for tier in set(self._held(command.id)) - set(message.failed):
                entry.set_mark(tier, keys.PIN_MARK, there=False)
        command.unmarked = message.unmarked
        command.deletes = False
        command.waiting.clear()
        del self._parts[command.id]
        self._end(command, self._now_s)


_NO_ID = CheckpointId(0, 0)
"""In the topics of messages that are about a tier alone."""


class NodeMarks:
    """The marks on tiers of which each node has its own disk; rank 0 has them read on all nodes."""

    def __init__(
        self,
        *,
        message_tree: MessageTree,
        ledger: Ledger,
        shared: Mapping[str, bool],
        deleter: Deleter,
        hooks: Hooks,
    ) -> None:
        self._messages = GroupMessages(message_tree)
        self._ledger = ledger
        self._topology = message_tree.topology
        self._shared = shared
        self._deleter = deleter
        self._hooks = hooks
        self._count = 0
        self._asked: dict[int, ReadMarks] = {}
        self._changed: dict[str, set[CheckpointId]] = {tier: set() for tier in shared}
        self._going: dict[int, DeleteCopy] = {}

    @staticmethod
    def handles(news: RankMessage) -> bool:
        """Return whether ``on_message`` processes a message."""
        return kind_of(news) in (MessageKind.READ_MARKS, MessageKind.MARKS)

    def read(self, task: ReadMarks) -> None:
        """Have marks read, on this node or on all."""
        if self.is_split(task.tier):
            ids = self._changed[task.tier].union(task.ids)
            self._ask(replace(task, ids=tuple(sorted(ids))))
        else:
            self._hooks.dispatch(task)

    def read_before_deletion(self, task: DeleteCopy) -> bool:
        """Have the marks of a copy read on all nodes before it is deleted; False where this node sees all of it."""
        if not self.is_split(task.tier):
            return False
        self._going[self._count + 1] = task
        self._ask(ReadMarks(tier=task.tier, ids=(task.id,), relies_on=task.relies_on))
        return True

    def is_split(self, tier: str) -> bool:
        """Return whether other nodes have parts of the copies on a tier."""
        return not self._shared[tier] and len(self._topology.nodes) > 1

    def _ask(self, task: ReadMarks) -> None:
        self._count += 1
        self._asked[self._count] = task
        body = MarksRequest(ids=task.ids, relies_on=task.relies_on)
        self._messages.announce(MessageKind.READ_MARKS, _NO_ID, task.tier, body, number=self._count)

    def on_message(self, news: RankMessage) -> None:
        topic = CheckpointTopic.parse(news.topic)
        match news:
            case DecisionAnnounced() if self._topology.is_leader:
                request = MarksRequest.from_json(news.body, rank=0)
                task = ReadMarks(
                    tier=topic.tier,
                    ids=request.ids,
                    number=topic.number,
                    relies_on=request.relies_on,
                )
                self._hooks.dispatch(task)
            case MessagesGathered(passed=False):
                self._on_answers(topic.number, read_all(NodeMarksFound, news.bodies))

    def on_outcome(self, task: ReadMarks, outcome: Outcome) -> None:
        """Marks were read on this node: for this rank, or for rank 0."""
        if not task.number:
            self._deleter.on_marks_read(task, outcome)
            return
        if isinstance(outcome.error, NotWholeError):
            self._deleter.on_damage_found(task.tier, outcome.error)
        if outcome.error is not None:
            body = NodeMarksFound(failed=ErrorMessage.of(outcome.error))
        else:
            body = NodeMarksFound(marks=tuple(outcome.value.items()))
        self._messages.contribute(
            MessageKind.MARKS, _NO_ID, task.tier, body, number=task.number, leaders_only=True
        )

    def _on_answers(self, number: int, answers: Mapping[int, NodeMarksFound]) -> None:
        """All nodes have answered. A node on which a person has changed marks has read all marks there; those that are
        new are then read on all nodes."""
        task = self._asked.pop(number)
        failed = [
            one.failed.error_of(rank) for rank, one in answers.items() if one.failed is not None
        ]
        read: dict[CheckpointId, frozenset[str]] = {}
        for id, marks in (found for one in answers.values() for found in one.marks):
            read[id] = read.get(id, frozenset()) | marks
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
            self._deleter.on_marks_read(task, outcome)
        else:
            self._deleter.on_node_marks_read(going, outcome)


def _ignore_failed(failed: Mapping[str, BaseException]) -> None:
    """What failed was contributed to rank 0."""
