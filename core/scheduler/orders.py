"""A person's orders to a living run: pin, unpin, delete. Each is carried out on every tier that holds the checkpoint.

A pin protects from the moment that it is asked for. A deletion leaves a tombstone first, so that a kill in the middle
is finished by the next start, and waits until nobody reads or writes the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tierfall.core import names
from tierfall.core.errors import StepError
from tierfall.core.records import Mark
from tierfall.core.scheduler.dropping import Dropper
from tierfall.core.scheduler.lane import Lane, Phase
from tierfall.core.scheduler.ledger import Entry, Ledger
from tierfall.core.scheduler.tasks import ChangeMark, Order, Outcome, PersonsOrder, Task
from tierfall.core.values import CheckpointId, CopyState

UNPIN_MARK = "unpin"


class Orders:
    """Orders that were given and not yet answered."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        lanes: Iterable[Lane],
        dropper: Dropper,
        free_region: Callable[[Entry], None],
        dispatch: Callable[[Task], None],
    ) -> None:
        self._ledger = ledger
        self._lanes = list(lanes)
        self._dropper = dropper
        self._free_region = free_region
        self._dispatch = dispatch
        self._open: list[Order] = []

    def give(self, order: Order) -> None:
        self._open.append(order)

    def busy(self) -> bool:
        return bool(self._open)

    def carry_out(self) -> None:
        """Begin what can begin, and answer what is done."""
        for order in list(self._open):
            if not order.begun:
                self._try_to_begin(order)
            if order.begun and not order.waiting:
                self._open.remove(order)
                if order.reserving:
                    self._dropper.reserved.discard(order.id)
                order.answer(order.failed)

    def _try_to_begin(self, order: Order) -> None:
        entry = self._ledger.entries.get(order.id)
        if entry is None:
            order.failed["tierfall"] = StepError(f"{order.kind}: {order.id} is not known")
        elif order.id in self._dropper.reserved:
            return  # one order about a checkpoint after the other
        elif order.kind is PersonsOrder.PIN and entry.tombstoned:
            order.failed["tierfall"] = StepError(f"pin: {entry.id} was deleted by a person")
        elif order.kind is PersonsOrder.DELETE and entry.pinned:
            order.failed["tierfall"] = StepError(f"delete: {entry.id} is pinned; unpin it first")
        elif self._is_settling(entry) or (
            order.kind is PersonsOrder.DELETE and not self._is_quiet(entry)
        ):
            return
        elif order.kind is PersonsOrder.PIN and not (self._ledger.whole(entry) or entry.damage):
            order.failed["tierfall"] = StepError(f"pin: {entry.id} is just being dropped")
        else:
            self._begin(order, entry)
        order.begun = True

    def _is_settling(self, entry: Entry) -> bool:
        """Say whether a copy is just being sealed or committed: it would escape the order, or carry old marks."""
        return entry.snapshot is not None or any(
            lane.active is not None
            and lane.active.entry is entry
            and lane.active.phase is Phase.FINISHING
            for lane in self._lanes
        )

    def _is_quiet(self, entry: Entry) -> bool:
        """Take the checkpoint from whoever is at work on it; say whether all are done."""
        entry.owed.clear()
        for lane in self._lanes:
            if lane.active is not None and lane.active.entry is entry:
                lane.give_up(StepError(f"{entry.id} was deleted by a person"))
        busy = any(count > 0 for count in entry.leases.values())
        arriving = CopyState.ARRIVING in entry.states.values()
        return not (busy or arriving or self._dropper.leaving(entry.id))

    def _begin(self, order: Order, entry: Entry) -> None:
        order.reserving = True
        self._dropper.reserve(order.id)
        name = names.TOMBSTONE_MARK if order.kind is PersonsOrder.DELETE else names.PIN_MARK
        mark = Mark(name=name, checkpoint=entry.id, wall_time_s=order.wall_time_s)
        removing = order.kind is PersonsOrder.UNPIN
        if entry.region is not None and entry.region.sealed:
            noted = Mark(
                name=UNPIN_MARK if removing else name,
                checkpoint=entry.id,
                wall_time_s=order.wall_time_s,
            )
            entry.region.add_mark(noted.encode())
            entry.set_mark(self._ledger.host, name, there=not removing)
        held = [
            lane.tier
            for lane in self._lanes
            if entry.state(lane.tier) is CopyState.COMMITTED or lane.tier in entry.damage
        ]
        order.waiting = set(held)
        for tier in held:
            if not removing:
                entry.set_mark(tier, name, there=True)
            self._dispatch(ChangeMark(tier=tier, mark=mark, remove=removing))
        if order.kind is PersonsOrder.DELETE:
            self._free_region(entry)

    def take_mark(self, task: ChangeMark, outcome: Outcome) -> None:
        """A mark is there, or gone: an unpin and a pin are done with that, a deletion goes on."""
        entry = self._ledger.entries.get(task.mark.checkpoint)
        if task.remove and outcome.error is None and entry is not None:
            entry.set_mark(task.tier, task.mark.name, there=False)
        if outcome.error is None and task.mark.name == names.TOMBSTONE_MARK:
            self._dropper.drop(
                task.tier, task.mark.checkpoint, "deleted by a person", by_person=True
            )
            return
        self.done(task.tier, task.mark.checkpoint, outcome.error)

    def done(self, tier: str, id: CheckpointId, error: BaseException | None) -> None:
        """Note that one tier has carried out whatever was ordered for this checkpoint."""
        for order in self._open:
            if order.id == id and order.begun and tier in order.waiting:
                order.waiting.discard(tier)
                if error is not None:
                    order.failed[tier] = error
