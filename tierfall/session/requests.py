"""Requests to the coordinator of a session: a region for a save, a person's command, what must stay in memory."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import Any

from tierfall.config.sections import OnClose
from tierfall.core.capture.snapshot import HostRegion
from tierfall.core.flush.facts import Ledger, LedgerEntry
from tierfall.core.flush.tasks import AdmissionRequest, Command, CommandKind
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.types.errors import (
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, CopyState, TierKind
from tierfall.session.session import Session

logger = logging.getLogger("tierfall")
_IN_MEMORY = (TierKind.DEVICE, TierKind.HOST, TierKind.PEER)


class RegionRequest:
    """A request for a region of host memory. It is waited for, or cancelled."""

    def __init__(
        self, session: Session, id: CheckpointId, *, image_bytes: int, records_bytes: int
    ) -> None:
        self._session = session
        self._done = InterruptibleEvent()
        self._lock = threading.Lock()
        self._answer: list[Any] = []
        self._request = AdmissionRequest(
            id=id,
            image_bytes=image_bytes,
            records_bytes=records_bytes,
            deadline_s=time.monotonic() + session.config.max_wait_s,
            on_answer=self._on_answer,
        )
        session.coordinator.post(self._request)

    def _on_answer(self, region: HostRegion | None, error: BaseException | None) -> None:
        with self._lock:
            self._answer.extend((region, error))
            if self._request.cancelled.is_set() and region is not None:
                region.release()
        self._done.set()

    def wait(self) -> tuple[HostRegion | None, BaseException | None]:
        """Return the region, or None and the reason."""
        try:
            with self._session.holds.hold(f"save of step {self._request.id.step}", self._describe):
                self._session.wait(self._done)
        except BaseException:  # Ctrl-C, for example
            self.cancel()
            raise
        return self._answer[0], self._answer[1]

    def _describe(self) -> str:
        host = self._session.host
        need, room = format_size(self._request.image_bytes), format_size(host.capacity_bytes)
        return (
            f"no room in {host.name} ({room}) for {need}; {self._session.status.describe_flushes()}"
        )

    def cancel(self) -> None:
        """Release the region, now or when it comes; no other image is evicted for it any more."""
        with self._lock:
            self._request.cancelled.set()
            if self._answer and self._answer[0] is not None:
                self._answer[0].release()


def submit(
    session: Session, kind: CommandKind, id: CheckpointId, tag: str = ""
) -> dict[str, BaseException]:
    """Send a command to the coordinator, wait for ``max_wait`` at most, and return the error of each tier that failed.

    After that, the command continues in the background.
    """
    done = InterruptibleEvent()
    failed: dict[str, BaseException] = {}

    def on_done(failures: dict[str, BaseException]) -> None:
        failed.update(failures)
        done.set()

    command = Command(kind=kind, id=id, tag=tag, on_answer=on_done)
    session.coordinator.post(command)
    if session.wait(done, session.config.max_wait_s):
        return failed
    waited = f"{session.config.max_wait_s:g} s (max_wait)"
    late = session.call(partial(session.coordinator.late_tiers, command))
    if done.is_set:  # since the wait has ended
        return failed
    if not late:
        why = f"{id} is noted; something is still being read, written or deleted after {waited}, and it goes on then"
        return {"tierfall": TierfallError(f"{kind}: {why}")}
    return {tier: UnreachableError(f"no answer within {waited}; it goes on") for tier in late}


def must_keep_memory(session: Session) -> bool:
    """Return whether host memory has something that no stored tier has, or that one is still owed."""
    return session.call(partial(_needs_memory, session))


def free_memory_at_end(session: Session, timeout_s: float) -> None:
    """Delete the files of host memory, unless something in them is needed or a save is in progress: the process ends
    now."""
    done = InterruptibleEvent()

    def free() -> None:
        entries = session.coordinator.ledger.entries.values()
        try:
            if not (_needs_memory(session) or any(e.snapshot is not None for e in entries)):
                session.tiers.discard_memory()
        except TierfallError as error:
            logger.warning("host memory is not freed: %s", error)
        finally:
            done.set()

    session.call_soon(free)
    session.wait(done, timeout_s)


def _needs_memory(session: Session) -> bool:
    """See ``must_keep_memory``; on the coordinator's thread."""
    leftovers = session.leftovers
    if session.config.host.on_close is OnClose.KEEP:
        return True
    if not all(leftovers.durable_on(id) for id in leftovers.images):
        return True
    ledger = session.coordinator.ledger
    if any(entry.owed for entry in ledger.entries.values()):
        return True
    stored = [rules.name for rules in ledger.rules if rules.kind not in _IN_MEMORY]
    return not all(
        any(entry.state(tier) is CopyState.COMMITTED for tier in stored)
        for entry in images_needed(ledger)
    )


def images_needed(ledger: Ledger) -> list[LedgerEntry]:
    """Return the images in memory that must not be lost with it: the newest of the live lineage, those that are pinned,
    those set aside, and those whose copy on some tier is damaged."""
    left = ledger.abandoned()
    held = [
        e
        for e in ledger.entries.values()
        if e.state(ledger.host) is CopyState.SEALED and e.id not in left and not e.deleted
    ]
    newest = max(held, key=lambda e: e.id, default=None)
    return [e for e in held if e is newest or e.pinned or e.set_aside or e.damage]
