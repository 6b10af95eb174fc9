"""The events that wait for the coordinator. Any thread may post; the coordinator's thread takes them in their order."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from tierfall.core.capture.events import CaptureBegun
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
"""Seconds that the abort of a copy which nobody continues may take: this thread may be the one that closes."""


class Inbox:
    """See the module. ``stopped`` is the error with which all further events are refused."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._taken: deque[Event] = deque()
        self._caused: deque[Event] = deque()
        self._taker: int | None = None
        self.stopped: BaseException | None = None

    def post(self, event: Event) -> None:
        """Add an event. One that the coordinator's thread posts while it handles another, such as a message to itself,
        comes before those that have arrived: a query then sees all that an earlier event has caused."""
        if self._taker == threading.get_ident():
            self._caused.append(event)
        else:
            self._arrived.put(event)
        if self.stopped is not None:
            self._refuse_all(self.stopped)

    @property
    def is_empty(self) -> bool:
        return not (self._caused or self._taken) and self._arrived.empty()

    def wait(self, timeout: float | None) -> None:
        """Block until an event has arrived."""
        try:
            self._taken.append(self._arrived.get(timeout=timeout))
        except queue.Empty:
            return

    def take(self) -> Iterator[Event]:
        """Yield the events that have arrived by now. Those left when the caller fails are refused by ``stop``."""
        while not self._arrived.empty():
            self._taken.append(self._arrived.get_nowait())
        self._taker = threading.get_ident()
        try:
            while events := self._caused or self._taken:
                yield events.popleft()
        finally:
            self._taker = None

    def stop(self, error: BaseException) -> None:
        """Refuse all events from now on: whoever waits for an answer receives ``error``."""
        if self.stopped is None:
            self.stopped = error
        self._refuse_all(self.stopped)

    def _refuse_all(self, error: BaseException) -> None:
        # several threads may be here at once
        while True:
            try:
                event = (self._caused or self._taken).popleft()
            except IndexError:
                try:
                    event = self._arrived.get_nowait()
                except queue.Empty:
                    return
            refuse = _REFUSALS.get(type(event))
            if refuse is not None:
                refuse(event, error)


def _refuse_outcome(outcome: Outcome, error: BaseException) -> None:
    """Close the writer of a copy that nobody will continue."""
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
"""What is done with an event that is refused. Nobody waits for an answer to any other."""
