"""A world whose tiers have a bandwidth: tasks take virtual time, and come back in the order in which they are done."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tests.simulation.world import World
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.flush.tasks import CopyRun, Task
from tierfall.core.types.view import TierRules


class Throttled(World):
    """``bytes_per_s`` says of each stored tier how fast it is; all that goes there at once shares that. ``paces`` are
    what it may be used at, and may be changed at any time."""

    def __init__(
        self, rules: Iterable[TierRules], *, bytes_per_s: Mapping[str, float], **options: Any
    ) -> None:
        self.bytes_per_s = dict(bytes_per_s)
        self.paces: dict[str, float | None] = {}
        self._free_s: dict[str, float] = {}
        self._due: list[tuple[float, int, float, float, Task]] = []
        self._number = 0
        super().__init__(rules, **options)

    def start(self, *, unread: Iterable[str] = ()) -> None:
        self._due.clear()
        self._free_s.clear()
        super().start(unread=unread)

    def set_pace(self, tier: str, bytes_per_s: float | None) -> None:
        self.paces[tier] = bytes_per_s

    def step(self) -> float | None:
        next_s = super().step()
        while self.tasks:
            self._take(self.tasks.pop(0))
        return next_s

    def _take(self, task: Task) -> None:
        """Say when a task will be done, as long as nothing changes: its bytes go when those before them are through."""
        began_s = max(self.now_s, self._free_s.get(task.tier, 0.0))
        work_s = wait_s = 0.0
        if isinstance(task, CopyRun):
            length = task.end - task.start
            work_s = length / self.bytes_per_s[task.tier]
            pace = self.paces.get(task.tier)
            wait_s = 0.0 if pace is None else max(0.0, length / pace - work_s)
            self._free_s[task.tier] = began_s + work_s + wait_s
        self._number += 1
        done_s = began_s + work_s + wait_s
        heapq.heappush(self._due, (done_s, self._number, self.now_s, wait_s, task))

    def go_on(self, seconds: float) -> None:
        """Let time pass, and all be done that is due meanwhile."""
        until_s = self.now_s + seconds
        while True:
            next_s = self.step()
            due_s = min((self._due[0][0] if self._due else until_s), until_s)
            if next_s is not None and self.now_s < next_s < due_s:
                self.now_s = next_s
                continue
            self.now_s = max(self.now_s, due_s)
            if not self._due or self._due[0][0] > until_s:
                self.now_s = until_s
                self.step()
                return
            self._do_next()

    def _do_next(self) -> None:
        _, _, taken_s, wait_s, task = heapq.heappop(self._due)
        outcome = replace(self.runner.run(task), seconds=self.now_s - taken_s, throttled_s=wait_s)
        self.door.post(outcome)

    def run_one(self) -> bool:
        """Do what is due next, however long it takes."""
        self.step()
        if not self._due:
            return False
        self.now_s = max(self.now_s, self._due[0][0])
        self._do_next()
        self.step()
        return True

    def save_soon(self, step: int) -> SaveHandle | None:
        """Save, if there is room now or within ``max_wait``; None where the save was skipped."""
        answer = self.ask_for_region(step)
        until_s = self.now_s + self.max_wait_s
        while not answer and self.now_s < until_s:
            self.go_on(min(0.01, until_s - self.now_s))
        self.step()
        region, _ = answer
        if region is None:
            return None
        snapshot = self.begin(step, region)
        self.seal(snapshot)
        self.step()
        return snapshot.handle
