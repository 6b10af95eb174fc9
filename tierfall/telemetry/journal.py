"""A session's journal: keeps the last events for its status, counts all of them, and passes them to the subscribers, of
which the event log is one."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from tierfall.config import Config
from tierfall.core.format.records import Attempt
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.runtime.callbacks import CallbackThread
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.types import events
from tierfall.core.types.events import Event, EventsLost
from tierfall.core.types.values import CheckpointId, SaveOutcome
from tierfall.telemetry.event_log import LogFile, to_line, wall_time
from tierfall.telemetry.figures import EventTally
from tierfall.telemetry.reports import RestoreReport

logger = logging.getLogger("tierfall")
CLOSE_S = 1.0
"""How long a close waits for events to be written, in seconds: a log must not stop a program from ending."""
WAITING_MAX = 10_000
"""Events that may wait in memory for a subscriber."""
Method = TypeVar("Method", bound=Callable[..., Any])
Receive = Callable[[dict[str, Any]], object]


class Subscriber:
    """Passes each event of a run to ``receive``, as the members of a line, on a thread of its own.

    ``put`` only appends to a bounded queue, so a slow function or disk delays no save, no flush and no other
    subscriber. Events that arrive while the queue is full are lost, counted and reported by an ``events_lost`` event.
    ``common`` are members of every line, such as run and rank; ``what`` names the subscriber in messages.
    """

    def __init__(
        self,
        receive: Receive,
        *,
        common: Mapping[str, Any],
        what: str,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        self._receive = receive
        self._common = common
        self._what = what
        self._ended = False
        self._reported = 0
        self._conditions = Conditions()
        self._thread = CallbackThread(
            f"tierfall-{common['run']}-subscriber", waiting_max=waiting_max
        )
        self._waiting_max = waiting_max

    def start(self) -> None:
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
            "%s is slow: %d events wait for it; later ones are lost, and counted in its next events_lost; training "
            "continues",
            self._what, self._waiting_max,
        )  # fmt: skip

    def end(self, timeout_s: float = 0.0) -> None:
        """Deliver the queued events for at most ``timeout_s`` seconds. The rest is lost; a running call continues."""
        ended = self._thread.close(timeout_s)
        self._ended = True
        if timeout_s and not ended and (left := self._thread.waiting - 1) > 0:
            logger.warning("%s did not get the last %d events: it is slow", self._what, left)

    def _deliver(self, wall_time_s: float, event: Event) -> None:
        if self._ended:
            return
        self._receive(to_line(wall_time_s, event, self._common))
        lost = self._thread.dropped
        if lost > self._reported and not self._thread.waiting:
            lost, self._reported = lost - self._reported, lost
            self._conditions.end("slow", "%s has caught up; lost: %d events", self._what, lost)
            told = EventsLost(at_s=time.monotonic(), count=lost)
            self._receive(to_line(time.time(), told, self._common))


class Journal:
    """See the module. ``notify`` may be called from any thread, and never waits."""

    def __init__(self, config: Config, *, run: str, ranks: Ranks, node: str) -> None:
        self._node = node
        self._world_size = ranks.topology.world_size
        self.recent: deque[Event] = deque(maxlen=16)
        self.tally = EventTally([tier.name for tier in config.written])
        self._file: LogFile | None = None
        self._log: Subscriber | None = None
        self._lock = threading.RLock()  # a signal handler may subscribe while its thread does
        self._subscribers: tuple[Subscriber, ...] = ()
        self._unread = 0
        rank = ranks.topology.rank
        self._common = {"run": run, "rank": rank}
        wanted = config.events
        if wanted is not None and (path := wanted.file_of(run=run, rank=rank)) is not None:
            self._file = LogFile(path, max_bytes=wanted.max_bytes)
            self._log = Subscriber(self._file.write, common=self._common, what=f"events: {path}")

    @property
    def lost(self) -> int:
        """The number of events that the event log has lost since open."""
        return self._log.lost if self._log else 0

    @property
    def unread(self) -> int:
        """The number of events that subscribers did not get, as they were slow."""
        return self._unread + sum(subscriber.lost for subscriber in self._subscribers)

    def notify(self, event: Event) -> None:
        self.recent.append(event)
        self.tally.add(event)
        if self._log is not None:
            self._log.put(event)
        for subscriber in self._subscribers:
            subscriber.put(event)

    def subscribe(self, receive: Receive) -> Callable[[], None]:
        """Pass later events to ``receive``; return what ends that."""
        subscriber = Subscriber(receive, common=self._common, what=f"subscribe: {receive!r}")
        subscriber.start()
        with self._lock:
            self._subscribers = (*self._subscribers, subscriber)

        pid = os.getpid()

        def unsubscribe() -> None:
            # a forked child has no such thread, and perhaps a lock that is held
            if os.getpid() != pid:
                return
            with self._lock:
                if subscriber in self._subscribers:
                    self._unread += subscriber.lost
                self._subscribers = tuple(s for s in self._subscribers if s is not subscriber)
            subscriber.end()

        return unsubscribe

    def start(self, attempt: Attempt | None) -> None:
        if self._log is not None:
            self._log.start()
        self.notify(
            events.Opened(
                at_s=time.monotonic(),
                attempt=attempt.number if attempt else None,
                pid=os.getpid(),
                node=self._node,
                world_size=self._world_size,
            )
        )

    def close(self) -> None:
        self.notify(events.Closed(at_s=time.monotonic(), lost_events=self.lost))
        if self._file is not None:
            self._file.closing.set()
        ends_s = time.monotonic() + CLOSE_S
        for subscriber in (*filter(None, [self._log]), *self._subscribers):
            subscriber.end(max(0.001, ends_s - time.monotonic()))

    def restored(self, report: RestoreReport) -> RestoreReport:
        sources: Counter[str] = Counter()
        for source in report.sources:
            sources[source.tier] += source.bytes
        self.notify(
            events.StateRestored(
                at_s=time.monotonic(),
                id=CheckpointId(report.step, report.attempt),
                bytes=report.bytes,
                seconds=report.seconds,
                sources=sources,
                fallbacks=tuple(f"{passed.what}: {passed.reason}" for passed in report.fallbacks),
            )
        )
        return report

    def save_ended(self, id: CheckpointId, outcome: SaveOutcome, error: BaseException) -> None:
        """Emit the end of a save whose capture did not begin, unless it was emitted already."""
        if any(isinstance(e, events.SaveEnded) and e.id == id for e in self.recent.copy()):
            return
        self.notify(
            events.SaveEnded(
                at_s=time.monotonic(),
                id=id,
                outcome=outcome,
                reason=str(error) or repr(error),
            )
        )

    def failed(self, doing: str, error: BaseException) -> None:
        reason = str(error) or repr(error)
        self.notify(events.OperationFailed(at_s=time.monotonic(), doing=doing, reason=reason))


def log_failures(doing: str) -> Callable[[Method], Method]:
    """Decorate a method so that the journal of its object emits an event for what the method raises."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except BaseException as error:
                self._journal.failed(doing, error)
                raise

        return cast("Method", noting)

    return decorate
