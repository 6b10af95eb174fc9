"""Marks on tiers of which each node has its own disk: rank 0 has them read on all nodes.

Before rank 0 deletes a copy of which each node has a part, the marks on all nodes are read: a person may have written
one on any of them. It belongs to the coordinator's thread and does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import filterfalse

from tierfall.core.ranks.message_tree import (
    DecisionAnnounced,
    MessagesGathered,
    MessageTree,
    RankMessage,
)
from tierfall.core.ranks.messages import CheckpointTopic, ErrorMessage
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.group.messages import (
    GroupMessages,
    MarksRequest,
    MessageKind,
    NodeMarksFound,
    read_all,
)
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import DeleteCopy, NotWholeError, Outcome, ReadMarks
from tierfall.core.types.errors import UnreachableError
from tierfall.core.types.values import CheckpointId

_NO_ID = CheckpointId(0, 0)
"""In the topics of messages that are about a tier alone."""


class NodeMarks:
    """See the module."""

    KINDS = frozenset((MessageKind.READ_MARKS, MessageKind.MARKS))

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
                has_no_part = partial(self._ledger.has_no_part, topic.tier)
                task = ReadMarks(
                    tier=topic.tier,
                    ids=request.ids,
                    number=topic.number,
                    relies_on=tuple(filterfalse(has_no_part, request.relies_on)),
                )
                self._hooks.dispatch(task)
            case MessagesGathered(passed=False):
                self._on_answers(topic.number, read_all(NodeMarksFound, news.bodies))

    def on_outcome(self, task: ReadMarks, outcome: Outcome) -> None:
        """Marks were read on this node: for this rank, or for rank 0."""
        if not task.number:
            self._deleter.on_marks_read(task, outcome)
            return
        error = outcome.error
        if isinstance(error, NotWholeError):
            self._deleter.on_damage_found(task.tier, error)
            if not error.damaged:  # a copy could not be read: rank 0 asks again later
                error = UnreachableError(str(error))
        if error is not None:
            body = NodeMarksFound(failed=ErrorMessage.of(error))
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
