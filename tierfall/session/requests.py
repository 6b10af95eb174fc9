"""Requests to the coordinator of a live session: a person's command, and what host memory is still needed for."""

from __future__ import annotations

import time

from tierfall.config.sections import OnClose
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import Command, CommandKind
from tierfall.core.types.errors import (
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.session.session import Session


def submit(session: Session, kind: CommandKind, id: CheckpointId) -> dict[str, BaseException]:
    """Give an order to the coordinator, and wait for ``max_wait`` at most; returns the tiers that could not do it.

    What a tier has not done by then goes on behind.
    """
    done = InterruptibleEvent()
    failed: dict[str, BaseException] = {}

    def tell(failures: dict[str, BaseException]) -> None:
        failed.update(failures)
        done.ring()

    order = Command(kind=kind, id=id, wall_time_s=time.time(), answer=tell)
    session.coordinator.post(order)
    if session.wait(done, session.config.max_wait_s):
        return failed
    waited = f"{session.config.max_wait_s:g} s (max_wait)"
    late = session.ask(lambda: tuple(order.waiting))
    if done.rung:  # just now
        return failed
    if not late:
        why = f"{id} is noted; something is still being read, written or dropped after {waited}, and it goes on then"
        return {"tierfall": TierfallError(f"{kind}: {why}")}
    return {tier: UnreachableError(f"no answer within {waited}; it goes on") for tier in late}


def must_keep_memory(session: Session) -> bool:
    """Say whether host memory holds something that no stored tier has, or that one is still owed."""
    if session.config.host.on_close is OnClose.KEEP or session.inheritance.parts:
        return True

    def ask() -> bool:
        ledger = session.coordinator.ledger
        if any(entry.owed for entry in ledger.entries.values()):
            return True
        return any(CopyState.COMMITTED not in e.states.values() for e in images_needed(ledger))

    return session.ask(ask)


def images_needed(ledger: Ledger) -> list[LedgerEntry]:
    """Name what lies in memory, and must not be lost with it: the newest of the line, and what a person wants kept."""
    left = ledger.abandoned()
    held = [
        e
        for e in ledger.entries.values()
        if e.state(ledger.host) is CopyState.SEALED and e.id not in left and not e.tombstoned
    ]
    newest = max(held, key=lambda e: e.id, default=None)
    return [e for e in held if e is newest or e.pinned or e.set_aside]
