"""Commands of a person to a run in progress: pin, unpin, delete. Rank 0 receives each; it is carried out on every tier
that has a copy of the checkpoint, by each rank on the tiers that it writes to.

    rank 0                           every rank
    a command about 400@1         -> writes marks: in its memory, and on the tiers where it owns the records
    all have marked: delete       <- marked
                                  -> deletes its copies, once every copy on every node has its tombstone
    all have deleted: ended       <- deleted
                                  -> all ranks have the failures of all ranks

A pin is effective as soon as it is requested. A deletion writes tombstones first, so that the next start completes it
after a kill, and then waits until no task reads or writes the checkpoint. A tombstone that another process has written
to one tier is carried out like a command: on every tier, including memory. It belongs to the coordinator's thread and
does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from tierfall.core.format.records import Mark
from tierfall.core.ranks.message_tree import (
    DecisionAnnounced,
    MessagesGathered,
    MessageTree,
    RankMessage,
    RankReported,
)
from tierfall.core.ranks.messages import CheckpointTopic, ErrorMessage
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.flush.admission import Admissions
from tierfall.core.scheduler.flush.lane import FlushLane
from tierfall.core.scheduler.group.commits import Commits
from tierfall.core.scheduler.group.messages import (
    BegunCommand,
    CommandPart,
    EndedCommand,
    GroupMessages,
    MessageKind,
    read_all,
)
from tierfall.core.scheduler.group.pins import Pins
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import (
    ChangeMark,
    Command,
    CommandKind,
    DeleteCopy,
    Outcome,
)
from tierfall.core.types import keys
from tierfall.core.types.errors import FencedError, StepError, TierfallError, UnreachableError
from tierfall.core.types.values import CheckpointId, CopyState

logger = logging.getLogger("tierfall")

DELETED = "deleted by a person"
RETRY_S = 30.0
ALL_RANKS = "other ranks"
"""Listed among the tiers that a command waits for, until rank 0 has announced that all ranks have done their part."""


@dataclass(slots=True)
class _OwnPart:
    """This rank's part in a command: the kind of message that it contributes next, and whether it has done so."""

    number: int
    command: Command
    contributes: MessageKind = MessageKind.MARKED
    contributed: bool = False


class Commands:
    """The commands that were submitted and are not answered yet."""

    KINDS = frozenset(
        (
            MessageKind.COMMAND,
            MessageKind.MARKED,
            MessageKind.DELETE,
            MessageKind.DELETED,
            MessageKind.COMMAND_ENDED,
            MessageKind.TOMBSTONE_FOUND,
        )
    )

    def __init__(
        self,
        *,
        message_tree: MessageTree,
        commits: Commits,
        ledger: Ledger,
        lanes: Iterable[FlushLane],
        deleter: Deleter,
        admissions: Admissions,
        hooks: Hooks,
        pins: Pins,
        unread: Collection[str],
    ) -> None:
        self._messages = GroupMessages(message_tree)
        self._commits = commits
        self._owns = commits.owns
        self._unread = frozenset(unread)
        self._ledger = ledger
        self._lanes = list(lanes)
        self._deleter = deleter
        self._admissions = admissions
        self._hooks = hooks
        self._pins = pins
        self._open: list[Command] = []
        self._retries: dict[CheckpointId, float] = {}
        self._deleted: set[CheckpointId] = set()
        self._parts: dict[CheckpointId, _OwnPart] = {}
        self._count = 0
        self._now_s = 0.0
        self._conditions = Conditions()

    def submit(self, command: Command) -> None:
        self._open.append(command)
        if command.kind is CommandKind.DELETE:
            self._deleter.awaited.add(command.id)
            self._retries.pop(command.id, None)

    def finish_deletion(self, id: CheckpointId) -> None:
        """Submit, once, the deletion of a checkpoint whose tombstone any rank has found, or that is unfinished."""
        if not self._commits.decides:
            self._messages.report(MessageKind.TOMBSTONE_FOUND, id)
            return
        if any(c.id == id and c.kind is CommandKind.DELETE for c in self._open):
            return
        self._deleted.add(id)
        logger.info("%s was deleted by a person: it is deleted from every tier", id)
        self._finish(CommandKind.DELETE, id)

    def finish_pins(self) -> None:
        """Write pins that were found in memory to the tiers that lack them; for rank 0 at a start."""
        self._pins.note_found()
        for entry in self._pins.missing():
            self._finish(CommandKind.PIN, entry.id)

    def finish_unpins(self) -> None:
        """Remove pins from memory that a person has removed from the stored tiers; for rank 0."""
        for entry in self._pins.removed():
            if not any(c.id == entry.id for c in self._open):
                self._finish(CommandKind.UNPIN, entry.id)

    def _finish(self, kind: CommandKind, id: CheckpointId) -> None:
        answer = partial(self._log_failed, kind, id)
        self.submit(Command(kind=kind, id=id, wall_time_s=0.0, on_answer=answer))

    def _log_failed(
        self, kind: CommandKind, id: CheckpointId, failed: Mapping[str, BaseException]
    ) -> None:
        """Log the failures of a command that no person waits for, and which is retried; or that it is done."""
        if failed:
            why = "; ".join(f"{tier}: {error}" for tier, error in failed.items())
            text = "the command to %s %s is not done yet: %s"
            self._conditions.report((kind, id), logging.WARNING, text, kind, id, why)
        else:
            self._conditions.end((kind, id), "the command to %s %s is done", kind, id)

    def try_now(self) -> None:
        """Retry at once the deletions that could not reach a tier."""
        self._retries = dict.fromkeys(self._retries, 0.0)

    def fail_all(self, error: BaseException) -> None:
        """Answer all commands with ``error``: the coordinator has stopped."""
        for command in self._open:
            command.on_answer({"tierfall": error})
        self._open.clear()

    def was_deleted(self, id: CheckpointId) -> bool:
        """Return whether this process has carried out the deletion of a checkpoint."""
        return id in self._deleted

    def busy(self) -> bool:
        return bool(self._open)

    def next_s(self) -> float | None:
        return min(self._retries.values(), default=None)

    def advance(self, now_s: float) -> None:
        """Begin the commands that may begin, and answer those that are done."""
        self._now_s = now_s
        for id in [id for id, when in self._retries.items() if now_s >= when]:
            del self._retries[id]
            self.finish_deletion(id)
        for command in list(self._open):
            if not command.begun:
                self._try_to_begin(command)
            if command.deletes and not command.waiting and self._may_drop(command):
                self._drop_all(command)
            if command.begun and not command.waiting and not command.deletes:
                self._end(command)
        for part in list(self._parts.values()):
            if not part.contributed and not part.command.waiting - {ALL_RANKS}:
                self._contribute(part)

    def _end(self, command: Command) -> None:
        self._open.remove(command)
        if command.reserving:
            self._deleter.reserved.discard(command.id)
        if command.kind is CommandKind.DELETE:
            if command.reserving and command.unmarked:  # stays awaited until a retry, or for good
                if self._commits.decides and not self._unread and not _is_fenced(command):
                    self._retries[command.id] = self._now_s + RETRY_S
            elif not any(c.id == command.id and c.kind is command.kind for c in self._open):
                self._deleter.awaited.discard(command.id)
            if command.reserving:
                self._deleted.add(command.id)
        command.on_answer(command.failed)

    def _try_to_begin(self, command: Command) -> None:
        entry = self._ledger.entries.get(command.id)
        if command.id in self._deleter.reserved:
            return  # another command about this checkpoint is in progress
        if entry is None:
            self._begin_unknown(command)
        elif command.kind is CommandKind.PIN and entry.tombstoned:
            command.failed["tierfall"] = StepError(f"pin: {entry.id} was deleted by a person")
        elif command.kind is CommandKind.DELETE and entry.pinned:
            command.failed["tierfall"] = StepError(f"delete: {entry.id} is pinned; unpin it first")
        elif self._is_settling(entry):
            return
        elif command.kind is CommandKind.PIN and not (entry.is_whole or entry.damage):
            command.failed["tierfall"] = StepError(f"pin: {entry.id} is just being dropped")
        else:
            self._begin(command, entry)
        command.begun = True

    def _begin_unknown(self, command: Command) -> None:
        """Fail a command about an unknown checkpoint, unless it was deleted: another rank may have a part of it."""
        if command.kind is CommandKind.DELETE and command.id in self._deleted:
            self._begin(command, None)
        else:
            command.failed["tierfall"] = StepError(f"{command.kind}: {command.id} is not known")

    def _is_settling(self, entry: LedgerEntry) -> bool:
        """Return whether a copy is being sealed or committed: the command would miss it, or it would lack the mark.

        A commit with an unknown outcome may have succeeded: the command waits until the outcome is known."""
        if entry.awaiting_ranks or self._commits.is_committing(entry.id):
            return True
        return entry.snapshot is not None or any(
            lane.is_publishing(entry.id) for lane in self._lanes
        )

    def is_unpinning(self, id: CheckpointId) -> bool:
        return any(c.id == id and c.begun and c.kind is CommandKind.UNPIN for c in self._open)

    def _stop_flushes(self, entry: LedgerEntry) -> None:
        entry.give_up(tuple(entry.owed), entry.given_up(f"it was {DELETED}"))
        for lane in self._lanes:
            if lane.is_copying(entry.id):
                lane.give_up(StepError(f"{entry.id} was {DELETED}"))

    def _may_drop(self, command: Command) -> bool:
        """Return whether no task works on a checkpoint, and no restore reads the tiers."""
        entry = self._ledger.entries.get(command.id)
        if entry is None:  # this process may be deleting a part of it
            return not self._deleter.is_deleting()
        busy = self._deleter.paused or any(count > 0 for count in entry.leases.values())
        arriving = CopyState.ARRIVING in entry.states.values()
        # A deletion in progress may rely on this checkpoint.
        return not (busy or arriving or self._deleter.is_deleting())

    def _begin(self, command: Command, entry: LedgerEntry | None) -> None:
        """Begin a command on all ranks; for rank 0."""
        self._count += 1
        body = BegunCommand(kind=command.kind, wall_time_s=command.wall_time_s)
        self._messages.announce(MessageKind.COMMAND, command.id, body=body, number=self._count)
        self._begin_part(self._count, command, entry)
        if command.kind is CommandKind.DELETE:
            for lane in self._lanes:
                # some ranks may have uploaded images
                if entry is None or entry.state(lane.tier) is not CopyState.COMMITTED:
                    self._commits.give_up(lane.tier, command.id, f"it was {DELETED}")

    def _begin_part(self, number: int, command: Command, entry: LedgerEntry | None) -> None:
        """Begin this rank's part in a command."""
        self._parts[command.id] = _OwnPart(number, command)
        command.waiting.add(ALL_RANKS)
        command.reserving = True
        self._deleter.reserve(command.id)
        name = keys.TOMBSTONE_MARK if command.kind is CommandKind.DELETE else keys.PIN_MARK
        mark = Mark(name=name, checkpoint=command.id, wall_time_s=command.wall_time_s)
        removing = command.kind is CommandKind.UNPIN
        if entry is None:
            pass
        elif command.kind is CommandKind.DELETE:
            entry.deleted = True  # also if no tier accepts the tombstone
            self._stop_flushes(entry)
        else:
            self._pin_in_memory(command, entry)
        for tier in self._held(command.id):
            if not removing and entry is not None:
                entry.set_mark(tier, name, there=True)
            if self._owns(tier):
                command.waiting.add(tier)
                self._hooks.dispatch(ChangeMark(tier=tier, mark=mark, remove=removing))
        command.deletes = command.kind is CommandKind.DELETE
        if command.deletes and self._unread:  # an unread tier may have a copy without the mark
            command.unmarked = True
            for tier in self._unread:
                command.failed[tier] = UnreachableError(
                    f"it could not be read when the run was opened: {command.id} is marked, and is deleted everywhere "
                    "by the next start that can read all tiers"
                )

    def _drop_all(self, command: Command) -> None:
        """Delete all copies if every copy has its tombstone. Otherwise keep all and retry the command: deleting a copy
        deletes its tombstone, which a later start needs to delete copies that have none."""
        command.deletes = False
        part = self._parts[command.id]
        part.contributes, part.contributed = MessageKind.DELETED, False
        command.waiting.add(ALL_RANKS)
        if command.unmarked:
            return
        held = self._held(command.id)
        command.waiting.update(filter(self._owns, held), self._deleter.retry_now(command.id))
        for tier in held:
            self._delete_on(tier, command.id)
        if (entry := self._ledger.entries.get(command.id)) is not None:
            self._admissions.free(entry)

    def _delete_on(self, tier: str, id: CheckpointId) -> None:
        if (tier, id) in self._ledger.partial:
            self._ledger.partial.discard((tier, id))
            if self._owns(tier):
                self._deleter.delete(DeleteCopy(tier=tier, id=id, reason=DELETED, tombstoned=True))
        elif self._owns(tier):
            self._deleter.request_delete(tier, id, DELETED, ordered=True)
        elif self._hooks.is_split(tier):  # else rank 0 announces its deletion
            self._ledger.entries[id].note_gone(tier)

    def _held(self, id: CheckpointId) -> list[str]:
        """Return the stored tiers with a commit record of a checkpoint, also of a damaged copy, and those on which this
        node has a part of an incomplete copy."""
        entry = self._ledger.entries.get(id)
        partial = [tier for tier, of in sorted(self._ledger.partial) if of == id]
        if entry is None:
            return partial
        return [
            lane.tier
            for lane in self._lanes
            if entry.state(lane.tier) is CopyState.COMMITTED or lane.tier in entry.damage
        ] + partial

    def _pin_in_memory(self, command: Command, entry: LedgerEntry) -> None:
        try:
            self._pins.note(entry, command)
        except TierfallError as error:
            command.failed[self._ledger.host] = error

    def on_mark_written(self, task: ChangeMark, outcome: Outcome) -> None:
        """Apply the outcome of writing or removing a mark. It ends a pin or an unpin; a deletion continues."""
        entry = self._ledger.entries.get(task.mark.checkpoint)
        if task.remove and outcome.error is None and entry is not None:
            entry.set_mark(task.tier, task.mark.name, there=False)
        if outcome.error is not None and task.mark.name == keys.TOMBSTONE_MARK:
            for command in self._open:
                command.unmarked |= command.id == task.mark.checkpoint and command.reserving
        self.on_done(task.tier, task.mark.checkpoint, outcome.error)

    def on_done(self, tier: str, id: CheckpointId, error: BaseException | None) -> None:
        """Record that one tier has carried out the command for a checkpoint, or the error of its failure."""
        for command in self._open:
            if command.id == id and command.begun and tier in command.waiting:
                command.waiting.discard(tier)
                if error is not None:
                    command.failed[tier] = error

    # All ranks -------------------------------------------------------------------------------------

    def _contribute(self, part: _OwnPart) -> None:
        """Contribute the failures of this rank's part in a command."""
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
            if not self._commits.decides:
                assert isinstance(news, DecisionAnnounced)
                self._join(topic, BegunCommand.from_json(news.body, rank=0))
        elif part is None or part.number != topic.number:
            return  # the command has ended on this rank
        elif isinstance(news, MessagesGathered):
            if not news.passed:
                self._on_all_contributed(part, topic, read_all(CommandPart, news.bodies))
        elif topic.kind == MessageKind.DELETE:
            part.command.waiting.discard(ALL_RANKS)
        elif topic.kind == MessageKind.COMMAND_ENDED:
            self._on_ended(part, EndedCommand.from_json(news.body, rank=0))

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

    def _on_all_contributed(
        self, part: _OwnPart, topic: CheckpointTopic, parts: Mapping[int, CommandPart]
    ) -> None:
        """Announce the next stage of a command, after all ranks have marked or deleted their copies."""
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

    def _on_ended(self, part: _OwnPart, message: EndedCommand) -> None:
        command = part.command
        entry = self._ledger.entries.get(command.id)
        done = set(self._held(command.id)) - set(message.failed)
        if command.kind is CommandKind.PIN and entry is not None:
            self._pins.note_written(entry, done)
        if command.kind is CommandKind.UNPIN and entry is not None:
            for tier in done:
                entry.set_mark(tier, keys.PIN_MARK, there=False)
        command.unmarked = message.unmarked
        command.deletes = False
        command.waiting.clear()
        del self._parts[command.id]
        self._end(command)


def _is_fenced(command: Command) -> bool:
    """Return whether a newer attempt exists: that one carries out the marks, and this process does not retry."""
    return any(isinstance(error, FencedError) for error in command.failed.values())


def _ignore_failed(failed: Mapping[str, BaseException]) -> None:
    """Do nothing: the failures were contributed to rank 0."""
