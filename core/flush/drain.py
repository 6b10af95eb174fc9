"""Drains: until a deadline, each tier receives first the copies that can still arrive. One that cannot is continued
only if no other can.

A policy makes the plan, again as copies arrive and rates change. This module applies it: it orders the lanes' copies
and aborts those that the plan preempts. With several ranks, rank 0 plans for all by its own images and rates, and no
copy is preempted, as other ranks may have finished theirs. Belongs to the coordinator's thread, reads no clock and does
no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from tierfall.core.flush.component import Component
from tierfall.core.flush.facts import LedgerEntry
from tierfall.core.flush.messages import DrainDeadline
from tierfall.core.types.errors import FlushError
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.core.types.view import CheckpointView, CopyView, DrainDecision, View
from tierfall.policies.drain import plan_drain

if TYPE_CHECKING:
    from tierfall.core.flush.coordinator import Coordinator

AGAIN_S = 0.5
"""Seconds after which a plan is made anew."""


class PreemptedError(FlushError):
    """A copy was aborted in favour of one that can still arrive before the deadline. It is still owed."""


class DrainSchedule(Component):
    """See the module. With several drains at once the earliest deadline counts. A drain is not throttled."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)
        self._decides = self._group.decides
        self.plan: tuple[DrainDecision, ...] = ()
        self._until_s = self._ledger.deadlines
        self._planned_at_s = 0.0
        self._shares: dict[str, float] = {}
        self._messages.receive(
            DrainDeadline, reported=self._on_deadline_elsewhere, announced=self._on_deadline
        )

    @property
    def active(self) -> bool:
        """Return whether lanes follow a drain's plan."""
        return self._decides and bool(self._until_s)

    def share(self, left_s: float) -> None:
        """Have all ranks drain for a deadline that this rank knows: rank 0 announces it."""
        message = DrainDeadline(left_s=left_s)
        if self._decides:
            self._messages.announce(message)
        else:
            self._messages.report(message)

    def _on_deadline_elsewhere(self, message: DrainDeadline, rank: int) -> None:
        self.begin(f"rank {rank}", self._ledger.now_s + message.left_s)
        self._messages.announce(message)

    def _on_deadline(self, message: DrainDeadline) -> None:
        if not self._decides:  # rank 0 plans for it
            self.begin("rank 0", self._ledger.now_s + message.left_s)

    def begin(self, asker: object, until_s: float) -> tuple[DrainDecision, ...]:
        """Work towards a deadline until ``asker`` ends it or it has passed; return the outlook of each copy.

        A rank other than 0 stops throttling, and returns no outlook.
        """
        self._planner.try_again()
        if not self._until_s:
            self._shares = {
                tier: self._planner.throttle.shares.get(tier, 1.0) for tier in self._lanes
            }
        self._until_s[asker] = until_s
        if self._decides:
            self._make_plan(self._ledger.now_s)
        return self.plan

    def end(self, asker: object) -> None:
        """End a drain; the plan ends with the last one."""
        self._until_s.pop(asker, None)
        if not self._until_s:
            self.plan = ()

    def tick(self, now_s: float) -> None:
        """End drains whose deadline has passed; renew a plan that is old or incomplete."""
        for asker in [asker for asker, until_s in self._until_s.items() if until_s <= now_s]:
            self.end(asker)
        if self.active and (now_s >= self._planned_at_s + AGAIN_S or self._is_outdated()):
            self._make_plan(now_s)
        for until_s in self._until_s.values():
            self._wake_at(until_s)
        if self.plan:
            self._wake_at(self._planned_at_s + AGAIN_S)

    def in_order(self, tier: str, waiting: Iterable[LedgerEntry]) -> list[LedgerEntry]:
        """Return what a tier is owed in the order of the plan, without copies that the plan holds back. Copies that the
        plan does not contain come last."""
        places = {d.checkpoint: place for place, d in enumerate(self.plan) if d.tier == tier}
        held_back = {d.checkpoint for d in self.plan if d.tier == tier and not d.proceeds}
        return sorted(
            (entry for entry in waiting if entry.id not in held_back),
            key=lambda entry: places.get(entry.id, len(self.plan)),
        )

    def is_held_back(self, id: CheckpointId, tier: str) -> bool:
        """Return whether a copy is owed, but must not begin before the deadline."""
        return any(
            d.checkpoint == id and d.tier == tier and not d.proceeds and not d.displaced
            for d in self.plan
        )

    # Planning --------------------------------------------------------------------------------------

    def _make_plan(self, now_s: float) -> None:
        self._planned_at_s = now_s
        self.plan = plan_drain(
            self._view(),
            bytes_per_s={tier: self._bytes_per_s(tier) for tier in self._lanes},
            left_s=min(self._until_s.values()) - now_s,
        )
        for decision in self.plan:
            if decision.displaced and not self._ledger.many_ranks:  # no other rank copies it
                self._preempt(decision)

    def _bytes_per_s(self, tier: str) -> float | None:
        """Return the expected write rate: the measured one, without the throttle that applied before the drain."""
        delivered = self._ledger.rates.delivered_bytes_per_s(tier)
        possible = self._ledger.rates.write_bytes_per_s(tier)
        if delivered is None or possible is None:
            return delivered
        share = self._shares.get(tier, 1.0)
        return delivered if share == 1.0 else min(possible, delivered / share)

    def _is_outdated(self) -> bool:
        """Return whether a copy was committed, or another is owed, since the plan was made."""
        known = {(d.checkpoint, d.tier) for d in self.plan}
        owed = {(e.id, tier) for e in self._ledger.open() for tier in e.owed}
        abandoned = self._ledger.abandoned() if owed - known else frozenset()
        return bool(known - owed) or any(id not in abandoned for id, _ in owed - known)

    def _view(self) -> View:
        """Return the ledger's view with the bytes that have arrived of each copy. A lane that failed may fail again."""
        view = self._ledger.view()
        delayed = {name for name, lane in self._lanes.items() if lane.failing_since_s is not None}
        return replace(
            view,
            failing=view.failing | delayed,
            checkpoints=tuple(self._with_arrived(one) for one in view.checkpoints),
        )

    def _with_arrived(self, checkpoint: CheckpointView) -> CheckpointView:
        arrived: dict[str, int] = {}
        entry = self._ledger.entries[checkpoint.id]
        for tier, lane in self._lanes.items():
            if lane.active is not None and lane.active.entry.id == checkpoint.id:
                arrived[tier] = lane.active.done_bytes
            elif tier in entry.uploaded_to and entry.geometry is not None:
                arrived[tier] = entry.geometry.image_bytes
        if not arrived:
            return checkpoint
        copies = {
            tier: replace(
                checkpoint.copies.get(tier, CopyView(state=CopyState.ARRIVING, bytes=0)),
                arrived_bytes=count,
            )
            for tier, count in arrived.items()
        }
        return replace(checkpoint, copies={**checkpoint.copies, **copies})

    def _preempt(self, decision: DrainDecision) -> None:
        lane, id = self._lanes[decision.tier], decision.checkpoint
        if lane.is_copying(id) and not lane.is_publishing(id):
            lane.give_up(
                PreemptedError(f"flush of {id} to {decision.tier} is preempted: {decision.reason}")
            )
