"""Superseding: a snapshot on its way is given up, where memory is full, for the one that is to be saved now.

Which one is the policy's to say. What follows is done here, in an order that a crash cannot break: the image's seal is
taken away first, by one store, so that no later start knows of it; then whoever waits is told; its region is free once
nobody reads it any more. What a lane is at work on is never given up, so no copy has to be aborted. No I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from tierfall.core.capture.snapshot import HostRegion
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.flush.lane import FlushLane
from tierfall.core.scheduler.ledger.emitter import EventEmitter
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.policies import Policies
from tierfall.core.types.errors import CapacityError
from tierfall.core.types.values import CheckpointId, CopyState, SaveOutcome
from tierfall.core.types.view import Verdict

logger = logging.getLogger("tierfall")


class Superseder:
    """Gives up snapshots; ``superseded`` counts them. ``others`` are the other ranks, which follow."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        lanes: Mapping[str, FlushLane],
        deleter: Deleter,
        policies: Policies,
        hooks: Hooks,
        emitter: EventEmitter,
    ) -> None:
        self._ledger = ledger
        self._lanes = lanes
        self._deleter = deleter
        self._policies = policies
        self._hooks = hooks
        self._emitter = emitter
        self.superseded = 0
        self.kept: tuple[str, ...] = ()

    def make_room(
        self, saved: CheckpointId, would_fit: Callable[[Collection[HostRegion]], bool]
    ) -> bool:
        """Give up one snapshot for ``saved``; False where none may go, and ``kept`` says why, image by image.

        ``would_fit`` says whether ``saved`` had room if those regions were free.
        """
        view = self._ledger.view(settling=self._settling(), restoring=self._deleter.paused)
        host = self._ledger.host
        entries = self._ledger.entries
        decisions = self._policies.plan_superseding(
            view,
            host,
            fits=lambda gone: would_fit([r for id in gone if (r := entries[id].region)]),
        )
        self.kept = tuple(f"{d.checkpoint}: {d.reason}" for d in decisions)
        for decision in decisions:
            if decision.verdict is Verdict.DROP:
                self._give_up(entries[decision.checkpoint], decision.reason, saved)
                return True
        return False

    def _settling(self) -> set[CheckpointId]:
        """Name what a lane is at work on, what may be committed already, and what is a person's to decide about.

        A tier that is slower than the saves gets one copy after the other only because what it copies is held. What
        other ranks left is no snapshot of this process.
        """
        doubted = {e.id for e in self._ledger.open() if e.in_doubt}
        copied = {lane.active.entry.id for lane in self._lanes.values() if lane.active}
        copied |= {e.id for e in self._ledger.open() if e.landed or e.parts is not None}
        return doubted | copied | self._deleter.reserved | self._deleter.awaited

    def _give_up(self, entry: LedgerEntry, reason: str, saved: CheckpointId) -> None:
        host = self._ledger.host
        assert entry.region is not None
        error = CapacityError(
            f"save of step {entry.id.step} is superseded by step {saved.step}: tier {host} had no room for both "
            f"(when_full), and of what lies there {reason}. It was still owed to "
            f"{', '.join(sorted(entry.owed))}, and nothing of it is kept. Raise the tier's capacity, save less often, "
            "or flush less"
        )
        self.superseded += 1
        self._emitter.save_ended(entry.id, SaveOutcome.SUPERSEDED, error)
        if entry.region.sealed:
            entry.region.unseal()
        entry.owed.clear()
        entry.set_state(host, CopyState.LEAVING)
        if entry.handle is not None:
            entry.handle.tell_given_up(SaveOutcome.SUPERSEDED, error)
        logger.warning("%s", error)
        self._hooks.group.lost(entry.id, error, SaveOutcome.SUPERSEDED)
