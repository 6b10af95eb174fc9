"""A person's orders to a living run: pin, unpin, delete. Each is carried out on every tier that holds the checkpoint.

A pin protects from the moment that it is asked for. A deletion leaves a tombstone first, so that a kill in the middle
is finished by the next start, and waits until nobody reads or writes the checkpoint. A tombstone that is found on one
tier (another process left it) is carried out as if it had been ordered here: on every tier, memory included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping

from tierfall.core.format.records import Mark
from tierfall.core.ranks.ranks import RankMessage
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.flush.admission import Admissions
from tierfall.core.scheduler.flush.lane import FlushLane
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import ChangeMark, Command, CommandKind, Outcome
from tierfall.core.types import keys
from tierfall.core.types.errors import FencedError, StepError, TierfallError, UnreachableError
from tierfall.core.types.values import CheckpointId, CopyState

logger = logging.getLogger("tierfall")

UNPIN_MARK = "unpin"
DELETED = "deleted by a person"
RETRY_S = 30.0


class Commands:
    """Orders that were given and not yet answered."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        lanes: Iterable[FlushLane],
        dropper: Deleter,
        admissions: Admissions,
        hooks: Hooks,
        unread: Collection[str],
        owns: Callable[[str], bool] = lambda tier: True,
    ) -> None:
        """``owns`` says of a stored tier whether marks and deletions there are this rank's to do."""
        self._owns = owns
        self._unread = frozenset(unread)
        self._ledger = ledger
        self._lanes = list(lanes)
        self._dropper = dropper
        self._admissions = admissions
        self._hooks = hooks
        self._open: list[Command] = []
        self._again: dict[CheckpointId, float] = {}
        self._deleted: set[CheckpointId] = set()

    @staticmethod
    def is_about(news: RankMessage) -> bool:
        """Say whether this is what hears of it: with one rank, nothing."""
        return False

    def hear(self, news: RankMessage) -> None:
        raise AssertionError(f"a run of one rank has no messages: {news}")

    def give(self, order: Command) -> None:
        self._open.append(order)
        if order.kind is CommandKind.DELETE:
            self._dropper.awaited.add(order.id)
            self._again.pop(order.id, None)

    def finish_deletion(self, id: CheckpointId) -> None:
        """Carry out a tombstone that was found, or what is left of a deletion."""
        logger.info("%s was deleted by a person: it leaves every tier", id)
        self.give(Command(kind=CommandKind.DELETE, id=id, wall_time_s=0.0, answer=_log_failed(id)))

    def answer_all(self, error: BaseException) -> None:
        """Nothing more is carried out."""
        for order in self._open:
            order.answer({"tierfall": error})
        self._open.clear()

    def was_deleted(self, id: CheckpointId) -> bool:
        """Say whether a person's deletion of a checkpoint was carried out by this process."""
        return id in self._deleted

    def busy(self) -> bool:
        return bool(self._open)

    def next_s(self) -> float | None:
        return min(self._again.values(), default=None)

    def carry_out(self, now_s: float) -> None:
        """Begin what can begin, and answer what is done."""
        for id in [id for id, when in self._again.items() if now_s >= when]:
            self.finish_deletion(id)
        for order in list(self._open):
            if not order.begun:
                self._try_to_begin(order)
            if order.dropping and not order.waiting and self._may_drop(order):
                self._drop_all(order)
            if order.begun and not order.waiting and not order.dropping:
                self._end(order, now_s)

    def _end(self, order: Command, now_s: float) -> None:
        self._open.remove(order)
        if order.reserving:
            self._dropper.reserved.discard(order.id)
        if order.kind is CommandKind.DELETE:
            if order.reserving and order.unmarked:  # it stays awaited until then, or for good
                if not _is_fenced(order):
                    self._try_later(order.id, now_s)
            elif not any(o.id == order.id and o.kind is order.kind for o in self._open):
                self._dropper.awaited.discard(order.id)
            if order.reserving:
                self._deleted.add(order.id)
        order.answer(order.failed)

    def _try_later(self, id: CheckpointId, now_s: float) -> None:
        if not self._unread:
            self._again[id] = now_s + RETRY_S

    def _try_to_begin(self, order: Command) -> None:
        entry = self._ledger.entries.get(order.id)
        if order.id in self._dropper.reserved:
            return  # one order about a checkpoint after the other
        if entry is None:
            self._begin_unknown(order)
        elif order.kind is CommandKind.PIN and entry.tombstoned:
            order.failed["tierfall"] = StepError(f"pin: {entry.id} was deleted by a person")
        elif order.kind is CommandKind.DELETE and entry.pinned:
            order.failed["tierfall"] = StepError(f"delete: {entry.id} is pinned; unpin it first")
        elif self._is_settling(entry):
            return
        elif order.kind is CommandKind.PIN and not (self._ledger.whole(entry) or entry.damage):
            order.failed["tierfall"] = StepError(f"pin: {entry.id} is just being dropped")
        else:
            self._begin(order, entry)
        order.begun = True

    def _begin_unknown(self, order: Command) -> None:
        """There is nothing to be done any more, if it was deleted."""
        if order.kind is not CommandKind.DELETE or order.id not in self._deleted:
            order.failed["tierfall"] = StepError(f"{order.kind}: {order.id} is not known")

    def _is_settling(self, entry: LedgerEntry) -> bool:
        """Say whether a copy is just being sealed or committed: it would escape the order, or carry old marks.

        One whose end was tried, and not answered, may be committed already: the order waits until that is known."""
        return entry.snapshot is not None or any(lane.is_ending(entry.id) for lane in self._lanes)

    def is_unpinning(self, id: CheckpointId) -> bool:
        return any(o.id == id and o.begun and o.kind is CommandKind.UNPIN for o in self._open)

    def _take_from_lanes(self, entry: LedgerEntry) -> None:
        entry.give_up(tuple(entry.owed), entry.given_up(f"it was {DELETED}"))
        for lane in self._lanes:
            if lane.is_at(entry.id):
                lane.give_up(StepError(f"{entry.id} was {DELETED}"))

    def _may_drop(self, order: Command) -> bool:
        """Say whether nobody is at work on a checkpoint any more, nor reads the tiers to restore from them."""
        entry = self._ledger.entries.get(order.id)
        if entry is None:  # a mere part of it may just be tried to be dropped
            return not self._dropper.is_dropping()
        busy = self._dropper.paused or any(count > 0 for count in entry.leases.values())
        arriving = CopyState.ARRIVING in entry.states.values()
        # what is leaving now may have been let go because of this one
        return not (busy or arriving or self._dropper.is_dropping())

    def _begin(self, order: Command, entry: LedgerEntry | None) -> None:
        order.reserving = True
        self._dropper.reserve(order.id)
        name = keys.TOMBSTONE_MARK if order.kind is CommandKind.DELETE else keys.PIN_MARK
        mark = Mark(name=name, checkpoint=order.id, wall_time_s=order.wall_time_s)
        removing = order.kind is CommandKind.UNPIN
        if entry is None:
            pass
        elif order.kind is CommandKind.DELETE:
            entry.deleted = True  # however many tiers take the tombstone
            self._take_from_lanes(entry)
        else:
            self._note_in_memory(order, entry)
        for tier in self._held(order.id):
            if not removing and entry is not None:
                entry.set_mark(tier, name, there=True)
            if self._owns(tier):
                order.waiting.add(tier)
                self._hooks.dispatch(ChangeMark(tier=tier, mark=mark, remove=removing))
        order.dropping = order.kind is CommandKind.DELETE
        if order.dropping and self._unread:  # one of those may have a copy, without the mark
            order.unmarked = True
            for tier in self._unread:
                order.failed[tier] = UnreachableError(
                    f"it could not be read when the run was opened: {order.id} is marked, and goes from everywhere at "
                    "the next start that can read all tiers"
                )

    def _drop_all(self, order: Command) -> None:
        """Every copy bears its tombstone: let them go. Where one does not, all stay, to be tried again: the mark is for
        all of them, and must not go with the first."""
        order.dropping = False
        if order.unmarked:
            return
        held = self._held(order.id)
        order.waiting = {*filter(self._owns, held), *self._dropper.retry_now(order.id)}
        for tier in held:
            self._release_memory(tier, order.id)
        if (entry := self._ledger.entries.get(order.id)) is not None:
            self._admissions.free(entry)

    def _release_memory(self, tier: str, id: CheckpointId) -> None:
        self._dropper.drop(tier, id, DELETED, ordered=True)

    def _held(self, id: CheckpointId) -> list[str]:
        """Name the stored tiers that have a commit record of it, a damaged one too."""
        entry = self._ledger.entries.get(id)
        if entry is None:
            return []
        return [
            lane.tier
            for lane in self._lanes
            if entry.state(lane.tier) is CopyState.COMMITTED or lane.tier in entry.damage
        ]

    def _note_in_memory(self, order: Command, entry: LedgerEntry) -> None:
        """Mark its images in memory, unless that is as it should be: marks are appended, and their room is bounded."""
        host = self._ledger.host
        pinning = order.kind is CommandKind.PIN
        pinned = keys.PIN_MARK in entry.marks.get(host, ())
        regions = [region for region in entry.regions if region.sealed]
        if pinning == pinned or not (regions or entry.parts == ()):
            return
        name = keys.PIN_MARK if pinning else UNPIN_MARK
        mark = Mark(name=name, checkpoint=entry.id, wall_time_s=order.wall_time_s)
        try:
            for region in regions:
                region.add_mark(mark.encode())
        except TierfallError as error:
            order.failed[host] = error
        else:
            entry.set_mark(host, keys.PIN_MARK, there=pinning)

    def take_mark(self, task: ChangeMark, outcome: Outcome) -> None:
        """A mark is there, or gone: an unpin and a pin are done with that, a deletion goes on."""
        entry = self._ledger.entries.get(task.mark.checkpoint)
        if task.remove and outcome.error is None and entry is not None:
            entry.set_mark(task.tier, task.mark.name, there=False)
        if outcome.error is not None and task.mark.name == keys.TOMBSTONE_MARK:
            for order in self._open:
                order.unmarked |= order.id == task.mark.checkpoint and order.reserving
        self.done(task.tier, task.mark.checkpoint, outcome.error)

    def done(self, tier: str, id: CheckpointId, error: BaseException | None) -> None:
        """Note that one tier has carried out whatever was ordered for this checkpoint."""
        for order in self._open:
            if order.id == id and order.begun and tier in order.waiting:
                order.waiting.discard(tier)
                if error is not None:
                    order.failed[tier] = error


def _is_fenced(order: Command) -> bool:
    """Say whether a newer attempt exists: it carries out what is marked, and nothing is tried here again."""
    return any(isinstance(error, FencedError) for error in order.failed.values())


def _log_failed(id: CheckpointId) -> Callable[[Mapping[str, BaseException]], None]:
    """Nobody waits for this answer; what could not be done is tried again."""

    def say(failed: Mapping[str, BaseException]) -> None:
        for tier, error in failed.items():
            logger.warning("%s: the deletion of %s is not done yet: %s", tier, id, error)

    return say
