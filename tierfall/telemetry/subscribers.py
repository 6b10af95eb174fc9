"""Subscribers: user functions that receive each event of a run, each on its own thread.

``put`` only appends to a bounded queue, so a slow function delays no save, no flush and no other subscriber. Events
that arrive while the queue is full are lost, counted and reported by an ``events_lost`` event, as in the event log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from tierfall.core.runtime.callbacks import CallbackThread
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.types.events import Event, EventsLost
from tierfall.telemetry.event_log import WAITING_MAX, wall_time

logger = logging.getLogger("tierfall")
Receive = Callable[[dict[str, Any]], object]
Format = Callable[[float, Event], dict[str, Any]]
"""Converts a time, in seconds since 1970, and an event to the members of a line of the event log."""


class Subscriber:
    """Passes events to ``receive``; see the module."""

    def __init__(
        self, receive: Receive, *, format: Format, name: str, waiting_max: int = WAITING_MAX
    ) -> None:
        self._receive = receive
        self._format = format
        self._ended = False
        self._reported = 0
        self._conditions = Conditions()
        self._thread = CallbackThread(name, waiting_max=waiting_max)
        self._waiting_max = waiting_max
        self._thread.start()

    @property
    def lost(self) -> int:
        """The number of events that did not fit into the queue."""
        return self._thread.dropped

    def put(self, event: Event) -> None:
        """Enqueue an event; it is lost if the queue is full. May be called from any thread; never blocks."""
        if self._thread.put(self._deliver, wall_time(event.at_s), event):
            return
        self._conditions.report(
            "slow", logging.WARNING,
            "subscribe: %r is slow: %d events wait for it; later ones are lost, and counted in its next events_lost; "
            "training continues",
            self._receive, self._waiting_max,
        )  # fmt: skip

    def end(self, timeout_s: float = 0.0) -> None:
        """Deliver the queued events for at most ``timeout_s`` seconds. The rest is lost; a running call continues."""
        ended = self._thread.close(timeout_s)
        self._ended = True
        if timeout_s and not ended and (left := self._thread.waiting - 1) > 0:
            logger.warning(
                "close: %r did not get the last %d events: it is slow", self._receive, left
            )

    def _deliver(self, wall_time_s: float, event: Event) -> None:
        if self._ended:
            return
        self._receive(self._format(wall_time_s, event))
        lost = self._thread.dropped
        if lost > self._reported and not self._thread.waiting:
            lost, self._reported = lost - self._reported, lost
            text = "subscribe: %r has caught up; lost: %d events"
            self._conditions.end("slow", text, self._receive, lost)
            self._receive(self._format(time.time(), EventsLost(at_s=time.monotonic(), count=lost)))
