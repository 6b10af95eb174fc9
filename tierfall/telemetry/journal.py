"""The events of a run: a ``Journal`` keeps the last ones for the status, counts all of them, and passes them to the
subscribers. One of these is the event log: a file of bounded size with a JSON object per line, which ``LogTail`` reads.

``LogFile.write`` is called on a thread of its own. Nothing here can fail a training run.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from tierfall.config import Config
from tierfall.core.format.records import Attempt
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.runtime.callbacks import CallbackThread
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.types import events
from tierfall.core.types.events import Event, EventsLost
from tierfall.core.types.values import CheckpointId, SaveOutcome
from tierfall.telemetry.figures import EventTally
from tierfall.telemetry.reports import RestoreReport

logger = logging.getLogger("tierfall")

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0


def wall_time(at_s: float) -> float:
    """Convert a time of ``time.monotonic`` to seconds since 1970, by this machine's clock."""
    return at_s + time.time() - time.monotonic()


def to_line(wall_time_s: float, event: Event, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of an event's line. ``common`` are those of every line, such as run and rank."""
    return {
        "format": events.FORMAT,
        "wall_time_s": round(wall_time_s, 3),
        **common,
        **events.event_to_json(event),
    }


def older_half(path: Path) -> Path:
    """Return the path of the older half of a log."""
    return path.with_name(f"{path.name}.1")


class LogFile:
    """A file that events are appended to as lines. Beyond half of ``max_bytes`` it is rotated: renamed over the older
    half. Both take ``max_bytes`` at most, unless one line is longer.

    Other processes may append to it, or move it away: each line is written to the file that has the name then. A torn
    line, of a killed process or a full disk, is ended first, so that readers lose only that line.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self.path = path
        self.closing = threading.Event()
        """Once it is set, a line that the disk does not accept is not tried again."""
        self._part_bytes = max_bytes // 2
        self._conditions = Conditions()

    def write(self, event: Mapping[str, Any]) -> None:
        """Append an event, and wait for a disk that is full or refuses it."""
        line = json.dumps(event, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        retry_s = FIRST_RETRY_S
        while True:
            try:
                self.append(line)
                break
            except OSError as error:
                self._conditions.report(
                    "file", logging.WARNING,
                    "events: %s is not written: %s. Events wait in memory; if too many wait, later ones are lost, and "
                    "counted in statistics().lost_events; training continues",
                    self.path, error,
                )  # fmt: skip
            if self.closing.is_set():
                return
            self.closing.wait(retry_s)
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)
        self._conditions.end("file", "events: %s is written again", self.path)

    def append(self, line: bytes) -> None:
        """Append a line. Raises OSError if it could not be written whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # O_NONBLOCK: opening a pipe of that name must not wait; it has no effect on a regular file.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(self.path, flags, 0o666)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{self.path} is not a regular file")
            if is_full := 0 < status.st_size >= self._part_bytes - len(line):
                os.replace(self.path, older_half(self.path))
            else:
                is_whole = status.st_size == 0 or os.pread(fd, 1, status.st_size - 1) == b"\n"
                data = line if is_whole else b"\n" + line
                if os.write(fd, data) < len(data):
                    raise OSError("less than a line was written: is the disk full?")
        finally:
            os.close(fd)
        if is_full:
            self.append(line)


# Reading -------------------------------------------------------------------------------------------


class LogTail:
    """Follows a log over rotations of its file; ``read`` returns the events that were added since the last call.

    The first call returns all that are there, the older half included. A line is returned once it has its end; a line
    that is no JSON object, such as a torn one, is skipped. Raises OSError if the file exists and cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with ExitStack() as opened:
            files = [_open(path, opened) for path in (older_half(self._path), self._path)]
            there = [(os.fstat(file.fileno()).st_ino, file) for file in files if file is not None]
            read = next((i for i, (inode, _) in enumerate(there) if inode == self._inode), 0)
            for inode, file in there[read:]:
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                lines = file.read().split(b"\n")[:-1]
                self._offset += sum(len(line) + 1 for line in lines)
                found += [event for line in lines if (event := _parsed(line)) is not None]
        return found


def _open(path: Path, opened: ExitStack) -> BinaryIO | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    return opened.enter_context(os.fdopen(fd, "rb"))


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("kind"), str) else None


# The journal ----------------------------------------------------------------------------------------
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
