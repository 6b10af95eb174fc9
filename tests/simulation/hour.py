"""An hour of training on a clock: saves as often as the loop asks, tiers that take their time, and what goes wrong meanwhile.

The promises, and how they are looked after, are those of a ``History``; here things happen when it is their time, as
long as they last. A task of the coordinator's takes effect at its end.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

from tests.simulation.history import (
    MAX_WAIT_S,
    RANK,
    History,
    Weather,
    check_restorable,
    live,
)
from tests.simulation.world import IMAGE
from tierfall.backends.faults import Fault, FaultKind, Faulty, Operation
from tierfall.core.contracts import Backend
from tierfall.core.errors import TierfallError
from tierfall.core.scheduler.tasks import CopyRun, Task
from tierfall.core.values import CheckpointId, LossClass

HOUR_S = 3600.0
CAPTURE_PARTS = 2


class Outage(Weather):
    """A backend with its faults, none, or an answer to nothing."""

    def __init__(self, inner: Backend, faulty: Faulty, silent: Faulty) -> None:
        super().__init__(inner, faulty)
        self._silent = silent
        self.down = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._silent, name) if self.down else super().__getattr__(name)


class Hour(History):
    """A run from its first start on. ``go_for`` lets time pass; each event is followed by a look at what must hold."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        draw = self.draw
        self.hurry = 0
        self.save_every_s = draw.choice((90.0, 180.0, 360.0, 600.0))
        self.capture_s = draw.choice((0.5, 5.0, 20.0))
        self.latency_s = {tier: draw.choice((0.001, 0.05, 0.5)) for tier in self.world.disks}
        self.image_s = {
            tier: self.save_every_s * draw.choice((0.02, 0.3, 0.9, 1.5))
            for tier in self.world.disks
        }
        self.blocked_s = 0.0
        self.lost: dict[LossClass, int] = {}
        self._free_at_s = dict.fromkeys(self.world.disks, 0.0)
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._scheduled: dict[int, Task] = {}

    def _wrap(self, name: str, inner: Backend) -> Backend:
        weather = super()._wrap(name, inner)
        assert isinstance(weather, Weather)
        everything = [
            Fault(kind=FaultKind.FAIL_BEFORE, operation=operation, keys="*", times=None)
            for operation in Operation
        ]
        outage = Outage(inner, weather._faulty, Faulty(inner, seed=0, plan=everything))
        outage.bad = False
        self.weathers[-1] = outage
        return outage  # type: ignore[return-value]

    # The clock ---------------------------------------------------------------------------------------

    def go_for(self, seconds: float) -> None:
        """Let so much time pass, with all that happens in it."""
        end_s = self.world.now_s + seconds
        self._later(self.save_every_s, self._want_save)
        for what, every_s in (
            (self._trouble, 0.5 * seconds),
            (self._outage, 0.4 * seconds),
            (self._person, 0.25 * seconds),
        ):
            self._later(self.draw.expovariate(1 / every_s), self._again(what, every_s))
        while True:
            wake_s = self.world.step()
            self._schedule()
            at_s = min(self._coming[0][0], end_s)
            if wake_s is not None and wake_s <= at_s:
                self._pass_to(wake_s)
                self.world.step()
            elif at_s >= end_s:
                self._pass_to(end_s)
                self._coming.clear()
                self._scheduled.clear()
                return
            else:
                _, _, what = heapq.heappop(self._coming)
                self._pass_to(at_s)
                what()
            self._look_after()

    def _pass_to(self, at_s: float) -> None:
        if self.asked:
            self.blocked_s += max(0.0, at_s - self.world.now_s)
        self.world.now_s = max(self.world.now_s, at_s)

    def _look_after(self) -> None:
        self.take_answers()
        self.check()

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._coming, (self.world.now_s + seconds, next(self._count), what))

    def _again(self, what: Callable[[], None], every_s: float) -> Callable[[], None]:
        def act() -> None:
            what()
            self._later(self.draw.expovariate(1 / every_s), act)

        return act

    def _schedule(self) -> None:
        """Give each new task the time at which it is done: what a tier carries goes one after the other."""
        for task in self.world.tasks:
            if id(task) in self._scheduled:
                continue
            self._scheduled[id(task)] = task
            start_s = self.world.now_s
            if isinstance(task, CopyRun):
                start_s = max(start_s, self._free_at_s[task.tier])
                start_s += self.image_s[task.tier] * (task.end - task.start) / IMAGE
                self._free_at_s[task.tier] = start_s
            done_s = start_s + self.latency_s.get(task.tier, 0.0)
            self._later(done_s - self.world.now_s, lambda task=task: self._done(task))  # type: ignore[misc]

    def _done(self, task: Task) -> None:
        if self._scheduled.pop(id(task), None) is None:
            return  # the process that had it is dead
        self.world.run(task)

    # The training ------------------------------------------------------------------------------------

    def _want_save(self) -> None:
        """Save, or wait as the loop does that is blocked in the save before."""
        if self.asked or self.captures:
            self._later(1.0, self._want_save)
            return
        self.ask()
        self._later(self.capture_s, self._capture)
        self._later(self.save_every_s, self._want_save)

    def _capture(self) -> None:
        self.take_answers()
        if self.captures and self.draw.random() < 0.02:
            self.fail_capture()
        self.capture_on()
        if self.captures or self.asked:
            self._later(self.capture_s / CAPTURE_PARTS, self._capture)

    # What goes wrong ---------------------------------------------------------------------------------

    def _trouble(self) -> None:
        what = self.draw.choices((self._die, self._lose_node, self.go_back_in_process), (4, 2, 1))
        self.log.append(f"{self.world.now_s:.0f} s: {what[0].__name__}")
        what[0]()

    def _die(self) -> None:
        """The process dies; what it was doing may have taken effect."""
        for task in self.world.tasks:
            if self.draw.random() < 0.3:
                self.world.runner.run(task)
        self._start_again(LossClass.PROCESS)

    def _lose_node(self) -> None:
        """Another machine goes on: memory, and the disks that it does not share, are empty."""
        self.world.memory.regions.clear()
        gone = {r.name for r in self.world.rules[1:] if RANK[r.survives] < RANK[LossClass.NODE]}
        for tier in gone:
            self.world.disks[tier]._objects.clear()
        for id, tiers in list(self.pinned.items()):
            if left := tiers - gone - {"host"}:
                self.pinned[id] = left
            else:
                del self.pinned[id]
        self._start_again(LossClass.NODE)

    def _start_again(self, lost: LossClass) -> None:
        known = self._known(self.before)
        safe = self._durable(self.before, lost) - self._abandoned(known) - self._tombstoned(self.before)
        self._scheduled.clear()
        self.before = self.look()
        self.begin_anew(calm=True)
        there = set(self._known(self.look()))
        assert not safe or max(safe) in there, f"{max(safe)} was to survive the loss of a {lost}"
        self.lost[lost] = self.lost.get(lost, 0) + 1

    def begin_anew(self, *, calm: bool) -> None:
        self._all_is_well()
        super().begin_anew(calm=calm)
        self._all_is_well()

    def go_back_in_process(self) -> None:
        self._all_is_well()
        super().go_back_in_process()
        self._all_is_well()

    def _all_is_well(self) -> None:
        for weather in self.weathers:
            assert isinstance(weather, Outage)
            weather.bad = weather.down = False

    def _outage(self) -> None:
        """A tier answers nothing, or badly, for some minutes."""
        weather = self.draw.choice(self.weathers)
        assert isinstance(weather, Outage)
        how = self.draw.choice(("down", "bad"))
        setattr(weather, how, True)
        self._later(self.draw.uniform(10.0, 600.0), lambda: setattr(weather, how, False))

    def _person(self) -> None:
        self.draw.choices(
            (self.pin, self.unpin, self.delete, self.mark_from_outside), (3, 2, 1, 1)
        )[0]()

    def settle(self) -> None:
        self._all_is_well()
        super().settle()


def run_hour(seed: int, *, seconds: float = HOUR_S) -> Hour:
    """Live through one hour; what is wrong is said with the seed, how to see it again, and what happened."""
    hour = Hour(seed)
    try:
        hour.go_for(seconds)
        hour.settle()
        hour.check_settled()
        hour.begin_anew(calm=True)
        hour.settle()
        hour.check_settled()
        hour.check_ledger_is_true()
        check_restorable(hour)
    except (AssertionError, TierfallError, KeyError) as error:
        rules = "\n".join(map(str, hour.world.rules))
        raise AssertionError(
            f"seed {seed}: {error!r} (again: python -m tests.simulation --first {seed} --seeds 1)\n{rules}\n{live(hour)}"
        ) from error
    return hour
