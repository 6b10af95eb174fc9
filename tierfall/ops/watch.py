"""The processes of a run on this node: their statuses, locks and last events.

It reads beside a living trainer and changes nothing. Whether a process is alive is known by its lock, not its status.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierfall.config import Config
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.runtime.run_lock import LockOwner, RunLock
from tierfall.core.types.errors import TierfallError
from tierfall.ops.reader import known_slots
from tierfall.setup.places import run_folder
from tierfall.telemetry.event_log import LogTail
from tierfall.telemetry.status import Status, read_status
from tierfall.tiers.host import lock_name

LIST_EVERY_S = 10.0
"""How often tiers are listed where no trainer is alive: an object store charges for listings."""
EVENTS_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """One slot of this node: its living owner, and the last status that was written there."""

    number: int
    owner: LockOwner | None
    status: Status | None

    @property
    def alive(self) -> bool:
        """Whether the process that wrote the status is alive."""
        return self.status is not None and self.owner is not None and _same(self.owner, self.status)


def _same(owner: LockOwner, status: Status) -> bool:
    if owner.start_ticks is not None and status.start_ticks is not None:
        return (owner.pid, owner.start_ticks) == (status.pid, status.start_ticks)
    return owner.pid == status.pid


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """The processes of a run at one moment. ``problems`` name what could not be read.

    ``main`` is the slot of the lowest rank, living ones first; None where there is no status.
    """

    wall_time_s: float
    slots: tuple[RankProcess, ...]
    events: tuple[dict[str, Any], ...]
    problems: tuple[str, ...]

    @property
    def main(self) -> RankProcess | None:
        with_status = [slot for slot in self.slots if slot.status is not None]
        return min(
            with_status, key=lambda s: (not s.alive, s.status.rank if s.status else 0), default=None
        )

    @property
    def live(self) -> Status | None:
        """The status of ``main``, if its process is alive."""
        main = self.main
        return main.status if main is not None and main.alive else None

    @property
    def last_status(self) -> Status | None:
        """The last status of ``main``, if its process has ended."""
        main = self.main
        return main.status if main is not None and not main.alive else None

    @property
    def owner(self) -> LockOwner | None:
        return next((slot.owner for slot in self.slots if slot.owner is not None), None)

    def age_s(self, status: Status) -> float:
        return max(0.0, self.wall_time_s - status.wall_time_s)


def find_living_status(config: Config, *, run: str) -> Status | None:
    """Return the status of a living trainer on this node; None where there is none, or it could not be read."""
    return Watcher(config, run=run).take_snapshot().live


class Watcher:
    """Takes snapshots of a run's processes."""

    def __init__(self, config: Config, *, run: str) -> None:
        self._folder = run_folder(config, run)
        path = config.events and config.events.file_of(run=run, rank=0)
        self._tail = LogTail(Path(path)) if path else None
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_MAX)
        self._conditions = Conditions()

    def take_snapshot(self) -> RunSnapshot:
        problems: list[str] = []
        slots = tuple(self._slot(number, problems) for number in self._numbers(problems))
        snapshot = RunSnapshot(wall_time_s=time.time(), slots=slots, events=(), problems=())
        main = snapshot.main
        recent = main.status.events if main is not None and main.status is not None else ()
        return replace(
            snapshot, events=self._from_log(problems) or recent, problems=tuple(problems)
        )

    def living_statuses(self) -> tuple[Status, ...]:
        """Return the statuses of the living processes of this node, by slot; for any thread."""
        slots = []
        for number in self._numbers([]):
            problems: list[str] = []
            slots.append(self._slot(number, problems))
            for problem in problems:
                self._conditions.report(number, logging.WARNING, "%s", problem)
            if not problems:
                self._conditions.end(number, "the status in slot %d is read again", number)
        return tuple(slot.status for slot in slots if slot.alive and slot.status is not None)

    def _numbers(self, problems: list[str]) -> list[int]:
        try:
            return known_slots(self._folder)
        except TierfallError as error:
            problems.append(str(error))
            return []

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
        """Return the last events of the run's log, which has older ones than a process keeps."""
        if self._tail is None:
            return ()
        try:
            self._events.extend(self._tail.read())
        except OSError as error:
            problems.append(f"the event log could not be read: {error}")
        return tuple(self._events)
