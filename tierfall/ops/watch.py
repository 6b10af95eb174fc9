"""Watching a run from outside: what the trainers of this node say of it, or, where none lives, what its tiers hold.

It reads beside a living trainer and changes nothing. Who lives is the lock's to say, never the status's.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tierfall.config import Config
from tierfall.core.runtime.run_lock import LockOwner, RunLock
from tierfall.core.types.errors import TierfallError
from tierfall.ops.reader import known_slots
from tierfall.setup.tiers import run_folder
from tierfall.telemetry.event_log import LogTail
from tierfall.telemetry.status import Status, read_status
from tierfall.tiers.arena.arena import lock_name

LIST_EVERY_S = 10.0
"""How often tiers are listed where no trainer says what they hold: an object store charges for it."""
EVENTS_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """One rank's place on this node: its owner, if one lives, and what its process said last."""

    number: int
    owner: LockOwner | None
    status: Status | None

    @property
    def alive(self) -> bool:
        """Whether the process that said it lives."""
        return self.status is not None and self.owner is not None and _same(self.owner, self.status)


def _same(owner: LockOwner, status: Status) -> bool:
    if owner.start_ticks is not None and status.start_ticks is not None:
        return (owner.pid, owner.start_ticks) == (status.pid, status.start_ticks)
    return owner.pid == status.pid


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """One look at a run's processes. ``main`` is the slot whose view of the run is shown, rank 0's where it is on this
    node; None where no status is there. ``problems`` say what could not be read."""

    wall_time_s: float
    slots: tuple[RankProcess, ...]
    events: tuple[dict[str, Any], ...]
    problems: tuple[str, ...]

    @property
    def main(self) -> RankProcess | None:
        said = [slot for slot in self.slots if slot.status is not None]
        return min(
            said, key=lambda s: (not s.alive, s.status.rank if s.status else 0), default=None
        )

    @property
    def live(self) -> Status | None:
        """What a living process says of the run."""
        main = self.main
        return main.status if main is not None and main.alive else None

    @property
    def last_words(self) -> Status | None:
        """What the process said last that was the run's, where no process of the run lives."""
        main = self.main
        return main.status if main is not None and not main.alive else None

    @property
    def owner(self) -> LockOwner | None:
        return next((slot.owner for slot in self.slots if slot.owner is not None), None)

    def age_s(self, status: Status) -> float:
        return max(0.0, self.wall_time_s - status.wall_time_s)


def living(config: Config, *, run: str) -> Status | None:
    """Return what a trainer that lives on this node says of a run; None where none does, or it could not be read."""
    with Watcher(config, run=run) as watcher:
        return watcher.look().live


class Watcher:
    """Looks at a run again and again. Used in a with."""

    def __init__(self, config: Config, *, run: str) -> None:
        self._folder = run_folder(config, run)
        path = config.events and config.events.file_of(run=run, rank=0)
        self._tail = LogTail(Path(path)) if path else None
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_MAX)

    def look(self) -> RunSnapshot:
        problems: list[str] = []
        slots = tuple(self._slot(number, problems) for number in known_slots(self._folder))
        glimpse = RunSnapshot(
            wall_time_s=time.time(), slots=slots, events=(), problems=tuple(problems)
        )
        main = glimpse.main
        said = main.status.events if main is not None and main.status is not None else ()
        return RunSnapshot(
            wall_time_s=glimpse.wall_time_s,
            slots=slots,
            events=self._from_log(problems) or said,
            problems=tuple(problems),
        )

    def _slot(self, number: int, problems: list[str]) -> RankProcess:
        owner: LockOwner | None = None
        status: Status | None = None
        try:
            owner = RunLock.owner(self._folder / lock_name(number))
            status = read_status(self._folder, number)
        except TierfallError as error:
            problems.append(str(error))
        return RankProcess(number=number, owner=owner, status=status)

    def _from_log(self, problems: list[str]) -> tuple[dict[str, Any], ...]:
        """The last events of the run's log, which go back further than a process's own."""
        if self._tail is None:
            return ()
        try:
            self._events.extend(self._tail.read())
        except OSError as error:
            problems.append(f"the event log could not be read: {error}")
        return tuple(self._events)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._tail is not None:
            self._tail.close()
