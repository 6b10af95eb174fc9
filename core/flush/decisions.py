"""What persons decide, and what readers find damaged: from commands, readers and the tiers' lists to the ledgers of all
ranks, and to every list.

    a rank that writes to a tier     rank 0                          every rank
    reads the tier's list            a command decides
    reports what is new           -> announces what is new        -> its ledger has it
                                                                     adds it to the lists of the tiers that it owns

A list is read when a copy is committed, before a deletion, and every minute. A command is answered once each tier that
rank 0 writes to has its entry in the list; a deletion, once its copies there are gone, too. Then the deleter deletes,
as for any rule. A list gets what it lacks at its next reading. A damaged copy protects nothing any more; an entry in
the tier's list records the damage for later starts. All of it belongs to the coordinator's thread and does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tierfall.core.flush.component import Component
from tierfall.core.flush.deleter import DELETED
from tierfall.core.flush.facts import LedgerEntry, without
from tierfall.core.flush.messages import DecidedEntries, FoundDamage, GivenUpCopy
from tierfall.core.flush.tasks import (
    AddDecided,
    Command,
    CommandKind,
    DeleteCopy,
    Outcome,
    ReadDecided,
    StoreCall,
    TaskStore,
)
from tierfall.core.format.decided import Decided, DecidedList, Word
from tierfall.core.format.records import Attempt, Commit
from tierfall.core.types.errors import StepError, StorageFullError, TierfallError, UnreachableError
from tierfall.core.types.values import CheckpointId, CopyState

if TYPE_CHECKING:
    from tierfall.core.flush.coordinator import Coordinator

logger = logging.getLogger("tierfall")

READ_EVERY_S = 60.0
READ_APART_S = 0.1
"""Seconds between two readings of a list, however fast commits follow each other."""
WORDS = {
    CommandKind.PIN: Word.PIN,
    CommandKind.UNPIN: Word.UNPIN,
    CommandKind.TAG: Word.TAG,
    CommandKind.UNTAG: Word.UNTAG,
    CommandKind.DELETE: Word.DELETED,
}

_OPPOSITES = {
    Word.PIN: Word.UNPIN,
    Word.UNPIN: Word.PIN,
    Word.TAG: Word.UNTAG,
    Word.UNTAG: Word.TAG,
}


class Decisions(Component):
    """What persons decide. ``unread`` are the tiers that could not be listed when the run was opened."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        decided: Mapping[str, DecidedList],
        unread: Iterable[str],
    ) -> None:
        """``decided`` has what the list of each tier had when the run was opened."""
        super().__init__(coordinator)
        self._unread = tuple(unread)
        peers = self._ledger.peer_tiers
        self._owned = [t for t in self._lanes if self._group.owns(t) and t not in peers]
        """The tiers whose lists this rank reads and adds to."""
        self._lists = {tier: found for tier, found in decided.items() if tier in self._owned}
        """What is in each of them, once it was read."""
        self._adding: set[tuple[str, Decided]] = set()
        self._due_s: dict[str, float] = {}
        self._open: list[Command] = []
        self._own: set[Decided] = set()
        """What was decided by commands of this process."""
        self._to_free: set[CheckpointId] = set()
        """Deleted checkpoints whose image in memory is still read or written."""
        self._messages.receive(
            FoundDamage, reported=self._on_damage_elsewhere, announced=self._on_damage
        )
        self._messages.receive(
            DecidedEntries, reported=self._on_found_elsewhere, announced=self._on_decided
        )

    def start(self) -> None:
        """Carry out what was decided before this start, and read the lists again from time to time."""
        self._due_s = dict.fromkeys(self._owned, self._ledger.now_s + READ_EVERY_S)
        for entry in self._ledger.deleted():
            self._delete(entry)
            names = ", ".join(e.name for e in self._ledger.decided.of(entry.id, entry.attempt_id))
            logger.warning(
                "%s was %s, and is deleted from each tier that still has it. If it was brought back since, remove its "
                "entries from the folder 'decided' of each tier before the start: %s",
                entry.id, DELETED, names,
            )  # fmt: skip
        self._delete_partial()
        for tier in self._lists:
            self._add_missing(tier)
        self._planner.deleter.schedule_all()

    # Commands --------------------------------------------------------------------------------------

    def submit(self, command: Command) -> None:
        """Carry out a command; for rank 0."""
        self._open.append(command)
        why = self._why_not(command)
        entry = self._ledger.entries.get(command.id)
        if why is not None or entry is None:
            command.failed["tierfall"] = why or StepError(
                f"{command.kind}: {command.id} is not known"
            )
            self._end(command)
            return
        self._decide_on(command, entry)

    def _decide_on(self, command: Command, entry: LedgerEntry) -> None:
        word = WORDS[command.kind]
        command.entry = self._ledger.decided.next(word, command.id, entry.attempt_id, command.tag)
        self._own.add(command.entry)
        self._decide(DecidedList([command.entry]))
        command.waiting = {tier for tier, added in self._adding if added == command.entry}

    def _why_not(self, command: Command) -> TierfallError | None:
        entry = self._ledger.entries.get(command.id)
        if entry is None or self._ledger.fenced is not None:
            return self._ledger.fenced
        if command.kind is CommandKind.DELETE:
            if entry.pinned:
                return StepError(f"delete: {entry.id} is pinned; unpin it first")
            if not entry.states and entry.damage and not entry.repairable:
                why = "; ".join(f"{tier}: {text}" for tier, text in entry.damage.items())
                return StepError(
                    f"delete: {entry.id}: nothing is deleted of what cannot be read: {why}"
                )
        elif entry.deleted:
            return StepError(f"{command.kind}: {entry.id} was {DELETED}")
        return None

    def fail_all(self, error: BaseException) -> None:
        """Answer all commands with ``error``: the coordinator has stopped."""
        for command in list(self._open):
            command.failed = {"tierfall": error}
            self._end(command)

    def busy(self) -> bool:
        return bool(self._open)

    def advance(self, now_s: float) -> None:
        """Answer the commands that are done, free deleted images that nobody reads, and read the lists that are due."""
        self._free_deleted()
        for command in list(self._open):
            self._advance(command)
        for tier, due_s in self._due_s.items():
            if now_s >= due_s:
                self._read(tier)
            if self._ledger.fenced is None:
                self._wake_at(self._due_s[tier])

    def _advance(self, command: Command) -> None:
        if command.kind is CommandKind.DELETE and not self._is_adding(command):
            left = self._left(command.id)
            if (fenced := self._ledger.fenced) is not None:  # nothing more is deleted
                on_tiers = left & self._lanes.keys()
                command.failed = {**dict.fromkeys(on_tiers, fenced), **command.failed}
            command.waiting = left - command.failed.keys()
        if command.waiting:
            return
        entry = self._ledger.entries.get(command.id)
        if command.kind is CommandKind.DELETE:
            self._check_deleted(command, entry)
        elif command.kind is CommandKind.PIN and (entry is None or _is_leaving(entry)):
            command.failed["tierfall"] = StepError(f"pin: {command.id} is just being dropped")
        elif entry is not None and not self._settle(command, entry):
            return
        self._end(command)

    def _check_deleted(self, command: Command, entry: LedgerEntry | None) -> None:
        """Note what keeps a deletion from being complete."""
        if entry is not None and entry.pinned:
            why = f"delete: {command.id} is pinned; unpin it first"
            command.failed["tierfall"] = StepError(why)
        for tier in self._unread:
            command.failed[tier] = UnreachableError(
                f"it could not be read when the run was opened: if it has {command.id}, the next start that reaches it "
                "deletes it there"
            )

    def _settle(self, command: Command, entry: LedgerEntry) -> bool:
        """Return whether a command's entry counts, or has failed. Else decide it again: another process has decided the
        opposite, by a higher number."""
        if any(command.entry in known.entries for known in self._lists.values()):
            # a tier that has no copy gets the entry later
            command.failed = {t: e for t, e in command.failed.items() if entry.has_record_on(t)}
        elif not command.failed:
            command.failed["tierfall"] = StepError(
                f"{command.kind}: no tier that can be written to could note it for {command.id}: it holds until this "
                "process ends"
            )
        assert command.entry is not None
        opposite = _OPPOSITES.get(command.entry.word)
        is_overruled = any(
            other.word is opposite
            and other.tag == command.tag
            and other.number > command.entry.number
            and other not in self._own
            for other in self._ledger.decided.of(entry.id, entry.attempt_id)
        )
        if command.failed or not is_overruled:
            return True
        self._decide_on(command, entry)
        return False

    def _is_adding(self, command: Command) -> bool:
        return any(added == command.entry for _, added in self._adding)

    def _left(self, id: CheckpointId) -> set[str]:
        """Return the tiers that have a deleted checkpoint still, and are to delete it; none if a pin keeps it."""
        entry = self._ledger.entries.get(id)
        if entry is None or not entry.deleted:
            return set()
        states = {tier for tier, state in entry.states.items() if state is not CopyState.ABSENT}
        return states | {lane.tier for lane in self._lanes.values() if lane.tier in entry.damage}

    def late_tiers(self, command: Command) -> tuple[str, ...]:
        """Return the tiers whose answer a command waits for: to have its entry noted, or a copy deleted."""
        if self._is_adding(command):
            return tuple(sorted(command.waiting))
        entry = self._ledger.entries.get(command.id)
        leaving = [
            tier for tier in command.waiting if entry and entry.state(tier) is CopyState.LEAVING
        ]
        return tuple(sorted(leaving))

    def _end(self, command: Command) -> None:
        self._open.remove(command)
        command.on_answer(command.failed)

    def on_deleted(self, task: DeleteCopy, outcome: Outcome) -> None:
        """A copy was deleted, or could not be: then the commands about it do not wait for the tier any more."""
        for command in self._open:
            if command.id == task.id and command.kind is CommandKind.DELETE:
                if outcome.error is not None:
                    command.failed[task.tier] = outcome.error
                else:
                    command.failed.pop(task.tier, None)
        if outcome.error is None and task.tier in self._lists:
            self._add_missing(task.tier)  # a full tier may have room for it now

    # Deciding --------------------------------------------------------------------------------------

    def _decide(self, new: DecidedList) -> None:
        """Have all ranks know what is decided; for rank 0."""
        self._apply(new)
        if self._ledger.many_ranks:
            self._messages.announce(DecidedEntries(names=new.names))

    def on_found(self, tier: str, found: DecidedList) -> None:
        """The list of a tier that this rank owns was read."""
        self._note_damage(tier, found - self._lists.get(tier, DecidedList()))
        self._lists[tier] = self._lists.get(tier, found) | found
        if new := found.of_all_tiers - self._ledger.decided:
            logger.info("%s: persons have decided: %s", tier, ", ".join(new.names))
            if self._group.decides:
                self._decide(new)
            else:
                self._messages.report(DecidedEntries(names=new.names))
        self._add_missing(tier)

    def _note_damage(self, tier: str, new: DecidedList) -> None:
        """Other processes have found copies on a tier damaged: they protect nothing any more."""
        for id in sorted(new.checkpoints):
            entry = self._ledger.entries.get(id)
            if (
                entry is not None
                and entry.state(tier) is CopyState.COMMITTED
                and new.is_damaged(id, entry.attempt_id)
            ):
                why = "another process has found it damaged"
                self._messages.report(FoundDamage(text=why), id, tier)

    def _on_found_elsewhere(self, message: DecidedEntries, rank: int) -> None:
        if new := DecidedList.parse(message.names) - self._ledger.decided:
            self._decide(new)

    def _on_decided(self, message: DecidedEntries) -> None:
        if new := DecidedList.parse(message.names) - self._ledger.decided:
            self._apply(new)

    def _apply(self, new: DecidedList) -> None:
        for entry in self._ledger.learn(new):
            if entry.deleted and new.is_deleted(entry.id, entry.attempt_id):
                logger.info("%s was %s: it is deleted from every tier", entry.id, DELETED)
                self._delete(entry)
        self._delete_partial()
        for tier in self._lists:
            self._add_missing(tier)
        self._planner.deleter.schedule_all()

    # Deleting --------------------------------------------------------------------------------------

    def _delete(self, entry: LedgerEntry) -> None:
        """Give up the copies that tiers are owed of a deleted checkpoint, and free its image in memory. What tiers have
        is deleted by the deleter."""
        self._planner.backlog.forget(entry.id)
        why = f"it was {DELETED}"
        owed = frozenset(entry.owed)
        entry.give_up(owed, entry.given_up(why))
        for lane in self._lanes.values():
            if lane.is_copying(entry.id):
                lane.give_up(StepError(f"{entry.id} was {DELETED}"))
            if self._group.decides and lane.tier in owed:  # some ranks may have uploaded images
                self._planner.copies.give_up(lane.tier, entry.id, GivenUpCopy(reason=why))
        self._to_free.add(entry.id)

    def _delete_partial(self) -> None:
        """Delete the parts of deleted checkpoints that this node has on its own tiers."""
        for tier, id in sorted(self._ledger.partial):
            if tier in self._lists and self._ledger.decided.is_deleted(id, None):
                self._ledger.partial.discard((tier, id))
                known = self._ledger.decided
                self._planner.deleter.delete(
                    DeleteCopy(tier=tier, id=id, reason=DELETED, known=known)
                )

    def _free_deleted(self) -> None:
        host = self._ledger.host
        for id in sorted(self._to_free):
            entry = self._ledger.entries.get(id)
            if entry is None or not entry.deleted or entry.state(host) is CopyState.ABSENT:
                self._to_free.discard(id)
            elif self._may_free(entry):
                self._to_free.discard(id)
                self._planner.admissions.free(entry)
        if self._planner.leftovers is not None and not self._ledger.restoring:
            self._planner.leftovers.free_deleted(self.is_noted)

    def _may_free(self, entry: LedgerEntry) -> bool:
        """Return whether the image is complete, and no task and no restore reads it."""
        is_made = entry.snapshot is None and not entry.awaiting_ranks
        is_read = self._ledger.restoring or any(entry.leases.values())
        return is_made and not is_read and self.is_noted(entry.id)

    # Lists -----------------------------------------------------------------------------------------

    def is_noted(self, id: CheckpointId, tier: str | None = None) -> bool:
        """Return whether some tier's list has the deletion, for the next start to complete after a kill, or none
        accepts it; and no entry of it is still being added on ``tier``."""
        entries = [e for e in self._ledger.decided.of(id, None) if e.word is Word.DELETED]
        adding = {on for on, entry in self._adding if entry in entries}
        noted = any(not known.entries.isdisjoint(entries) for known in self._lists.values())
        return tier not in adding and (noted or not adding)

    def on_committed(self, tier: str) -> None:
        """A checkpoint was committed on a tier: read its list now, or soon, if it was read just now."""
        if tier in self._due_s:
            soon_s = self._due_s[tier] - READ_EVERY_S + READ_APART_S
            self._due_s[tier] = min(self._due_s[tier], max(soon_s, self._ledger.now_s))

    def _read(self, tier: str) -> None:
        self._due_s[tier] = self._ledger.now_s + READ_EVERY_S
        if self._ledger.fenced is None:
            self._dispatch(ReadDecided(tier=tier))

    def on_read(self, outcome: Outcome) -> None:
        """Apply the outcome of reading a list."""
        task = outcome.task
        assert isinstance(task, ReadDecided)
        if outcome.error is not None:
            self._conditions.report(
                task.tier, logging.WARNING,
                "%s: what persons have decided could not be read, and is read again within %g s: %s",
                task.tier, READ_EVERY_S, outcome.error,
            )  # fmt: skip
            return
        self._conditions.end(task.tier, "%s: what persons have decided is read again", task.tier)
        self.on_found(task.tier, outcome.value)

    def _add_missing(self, tier: str) -> None:
        """Add what a list lacks of what is decided by the others."""
        for entry in self._ledger.decided - self._lists.get(tier, self._ledger.decided):
            if (tier, entry) not in self._adding:
                self._adding.add((tier, entry))
                self._dispatch(AddDecided(tier=tier, entry=entry))

    def on_added(self, outcome: Outcome) -> None:
        """Apply the outcome of adding an entry to a list."""
        task = outcome.task
        assert isinstance(task, AddDecided)
        self._adding.discard((task.tier, task.entry))
        if outcome.error is None:
            self.on_found(task.tier, outcome.value)
            self._conditions.end(
                (task.tier, "add"), "%s: what was decided is noted there", task.tier
            )
        else:
            self._conditions.report(
                (task.tier, "add"), logging.WARNING, "%s: %s of %s could not be noted there yet: %s",
                task.tier, task.entry.word, task.entry.checkpoint, outcome.error,
            )  # fmt: skip
        if task.entry.word is Word.DELETED:
            self._planner.deleter.schedule_all()
        for command in self._open:
            if command.entry == task.entry:
                command.waiting.discard(task.tier)
                error, deletes = outcome.error, command.kind is CommandKind.DELETE
                # a deletion makes room: the entry is added then
                if error is not None and not (deletes and isinstance(error, StorageFullError)):
                    command.failed[task.tier] = error

    # Damage ----------------------------------------------------------------------------------------

    def _on_damage_elsewhere(
        self, tier: str, id: CheckpointId, damage: FoundDamage, rank: int
    ) -> None:
        entry = self._ledger.entries.get(id)
        if entry is not None and entry.state(tier) is CopyState.COMMITTED:
            text = self._group.topology.name_rank(rank, damage.text)
            self._messages.announce(replace(damage, text=text), id, tier)

    def _on_damage(self, tier: str, id: CheckpointId, damage: FoundDamage) -> None:
        entry = self._ledger.entries.get(id)
        if entry is None or entry.state(tier) is not CopyState.COMMITTED:
            return  # it is known, or the copy was deleted meanwhile
        why, repairable = damage.text, damage.repairable
        repair = f"tierfall verify {entry.id} --tier {tier} --repair"
        cure = f". Once the training has ended, '{repair}' rewrites it, if another copy is good"
        text = "%s: %s is damaged, and no longer counts as a copy: %s%s"
        is_mended = repairable and tier not in self._ledger.peer_tiers
        said = why.removeprefix(f"{tier}: ")
        logger.error(text, tier, entry.id, said, cure if is_mended else "")
        entry.note_damage(tier, why, repairable=repairable)
        if not repairable:  # it is gone: no room can be made by its deletion
            entry.bytes = without(entry.bytes, tier)
        self._planner.deleter.schedule_plan(tier)
        owns = self._ledger.fenced is None and self._group.owns(tier)
        if repairable and entry.commit is not None and tier in self._lanes and owns:
            call = partial(_add_damage, entry.commit, why)
            self._dispatch(StoreCall(tier=tier, call=call, then=partial(self._on_noted, id)))

    def _on_noted(self, id: CheckpointId, outcome: Outcome) -> None:
        if outcome.error is not None:
            text = "%s: the damage of %s could not be noted there: %s"
            logger.warning(text, outcome.task.tier, id, outcome.error)


def _is_leaving(entry: LedgerEntry) -> bool:
    """Return whether all copies of a checkpoint are being deleted."""
    there = [state for state in entry.states.values() if state is not CopyState.ABSENT]
    return not entry.damage and all(state is CopyState.LEAVING for state in there)


def _add_damage(commit: Commit, why: str, store: TaskStore, attempt: Attempt) -> None:
    store.check_newest(attempt, doing=f"damage of {commit.lineage.checkpoint}")
    store.note_damaged(commit, why)
