"""The coordinator's queue of events. Any thread may post events; the coordinator's thread processes them in order."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from tierfall.core.capture.snapshot import CaptureBegun
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.scheduler.ledger.tasks import (
    AdmissionRequest,
    AssignmentRequest,
    Command,
    Event,
    LedgerQuery,
    OpenShard,
    Outcome,
)
from tierfall.core.types.errors import BackendError
from tierfall.core.types.values import SaveOutcome

logger = logging.getLogger("tierfall")
ABORT_S = 1.0
"""Bound in seconds on aborting the writer of a refused copy: the aborting thread may be the one that closes the run."""


class Inbox:
    """See the module. ``stopped`` is the error with which all further events are refused."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._received: deque[Event] = deque()
        self._caused: deque[Event] = deque()
        self._processing_thread: int | None = None
        self.stopped: BaseException | None = None

    def post(self, event: Event) -> None:
        """Add an event. An event that the coordinator's thread posts while it handles another one, such as a message to
        its own rank, precedes those that have arrived: a query then sees all effects of earlier events."""
        if self._processing_thread == threading.get_ident():
            self._caused.append(event)
        else:
            self._arrived.put(event)
        if self.stopped is not None:
            self._refuse_all(self.stopped)

    @property
    def is_empty(self) -> bool:
        return not (self._caused or self._received) and self._arrived.empty()

    def wait(self, timeout: float | None) -> None:
        """Block until an event has arrived."""
        try:
            self._received.append(self._arrived.get(timeout=timeout))
        except queue.Empty:
            return

    def take(self) -> Iterator[Event]:
        """Yield the events that have arrived. If the caller fails, ``stop`` refuses the remaining ones."""
        while not self._arrived.empty():
            self._received.append(self._arrived.get_nowait())
        self._processing_thread = threading.get_ident()
        try:
            while events := self._caused or self._received:
                yield events.popleft()
        finally:
            self._processing_thread = None

    def stop(self, error: BaseException) -> None:
        """Refuse all present and future events: callers that wait for an answer receive ``error``."""
        if self.stopped is None:
            self.stopped = error
        self._refuse_all(self.stopped)

    def _refuse_all(self, error: BaseException) -> None:
        # several threads may run this at once
        while True:
            try:
                event = (self._caused or self._received).popleft()
            except IndexError:
                try:
                    event = self._arrived.get_nowait()
                except queue.Empty:
                    return
            refuse = _REFUSALS.get(type(event))
            if refuse is not None:
                refuse(event, error)


def _refuse_outcome(outcome: Outcome, error: BaseException) -> None:
    """Abort the writer that a refused ``OpenShard`` has opened: no task will continue its copy."""
    if not isinstance(outcome.task, OpenShard) or not isinstance(outcome.value, tuple):
        return
    writer, _ = outcome.value
    if writer is None:
        return
    tier = outcome.task.tier
    aborted = BoundedCalls().call_all({tier: writer.abort}, {tier: ABORT_S}, doing="abort")[tier]
    match aborted.error:
        case BackendError() as failure:
            logger.warning("%s: an unfinished file remains: %s", tier, failure)
        case _:
            aborted.get()


def _refuse_save(event: CaptureBegun, error: BaseException) -> None:
    event.snapshot.handle.on_given_up(SaveOutcome.FAILED, error)


_REFUSALS: dict[type[Any], Callable[[Any, BaseException], None]] = {
    CaptureBegun: _refuse_save,
    AdmissionRequest: lambda request, error: request.on_answer(None, error),
    LedgerQuery: lambda query, error: query.on_answer(None, error),
    Command: lambda command, error: command.on_answer({"tierfall": error}),
    AssignmentRequest: lambda request, error: request.on_answer(None),
    Outcome: _refuse_outcome,
}
"""How an event of each type is refused. For other types no caller waits, and they are discarded."""
