"""An hour of training of several ranks on a clock: they save at the same steps, each at its own pace, and all may go
wrong for one of them. The promises are those of a ``ManyHistory``.
"""

from __future__ import annotations

import math
from functools import partial

from tests.simulation.clock import INSTANT, Clock, Medium
from tests.simulation.hour import HOUR_S
from tests.simulation.many_history import ManyHistory
from tests.simulation.rank import CUT, Rank
from tierfall.core.scheduler.tasks import CopyRun, OpenShard, ReadMarks, Task

MESSAGE_S = 0.002
CAPTURE_S = 2.0
LATE_S = 3.0
"""The most that a rank comes to a step behind the others."""


class ManyHour(ManyHistory):
    """A run from its first start on. ``go_for`` lets time pass."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        draw = self.draw
        self.clock = Clock(draw)
        self.save_every_s = draw.choice((180.0, 300.0, 600.0))
        image_s = {tier: self.save_every_s * draw.choice((0.02, 0.3, 1.2)) for tier in self.tiers}
        self.media = {
            (tier, node): Medium(image_s=image_s[tier] / len(self.world.node_of), latency_s=0.05)
            for tier in self.tiers
            for node in self.world.disks(tier)
        }
        self._under_way: dict[int, Task] = {}
        self._is_delivering = False
        self._is_changed = True
        self._is_settling = False

    def go_for(self, seconds: float) -> None:
        """Let so much time pass, with all that happens in it."""
        world, clock = self.world, self.clock
        end_s = clock.now_s + seconds
        clock.after(self.save_every_s, self._begin_step)
        clock.now_and_then(self.crash, 0.6 * seconds)
        clock.now_and_then(self._trouble, 0.4 * seconds)
        clock.now_and_then(self.fail_capture, 0.5 * seconds)
        if self.has_person:
            clock.now_and_then(self.person.order, 0.2 * seconds)
            clock.now_and_then(self.person.leave_mark, 0.4 * seconds)
        while True:
            self._schedule()
            waits = [rank.next_s for rank in world.ranks if rank.next_s is not None]
            wake_s = min(waits, default=math.inf)
            if wake_s <= min(clock.next_s, end_s):
                clock.now_s = world.now_s = max(wake_s, clock.now_s)
                world.step()
            elif clock.next_s < end_s:
                act = clock.take()
                world.now_s = clock.now_s
                act()
            else:
                world.now_s = clock.now_s = end_s
                clock.clear()
                return
            self._after()

    def _schedule(self) -> None:
        for rank in self.world.ranks:
            for task in rank.tasks:
                if id(task) not in self._under_way:
                    self._under_way[id(task)] = task
                    medium = self.media.get((task.tier, rank.node)) or self.media.get(
                        (task.tier, 0)
                    )
                    seconds = (medium or INSTANT).done_after_s(task, self.clock.now_s)
                    self.clock.after(seconds, partial(self._done, rank, task))
        if self.world.network.waiting and not self._is_delivering:
            self._is_delivering = True
            self.clock.after(MESSAGE_S, self._deliver)

    def _deliver(self) -> None:
        self._is_delivering = False
        self.world.deliver(self.draw.choice((1, 5, 50)))

    def _done(self, rank: Rank, task: Task) -> None:
        if self._under_way.pop(id(task), None) is not None:  # else the process that had it is dead
            rank.run(task)
            self._is_changed |= not isinstance(task, OpenShard | CopyRun | ReadMarks)

    def check(self) -> None:
        """Look, where something was changed that is looked at."""
        if self._is_changed or self._is_settling:
            super().check()
            self._is_changed = False

    # The training ------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Every rank comes to the next step that all save, some a little later."""
        self._is_changed = True
        for rank in self.world.ranks:
            late_s = self.draw.uniform(0.0, LATE_S)
            self.clock.after(late_s, partial(self._save_or_wait, rank))
        self.clock.after(self.save_every_s, self._begin_step)

    def _save_or_wait(self, rank: Rank) -> None:
        """Save; or, where the loop is still in the save before, come to this one afterwards."""
        loop = self.loops[rank.number]
        if not loop.between_saves:
            self.clock.after(1.0, partial(self._save_or_wait, rank))
            return
        self.train_on(rank)
        self.clock.after(CAPTURE_S, partial(self._capture, rank))

    def _capture(self, rank: Rank) -> None:
        loop = self.loops[rank.number]
        if loop.capture is not None:
            self.train_on(rank)
        if not loop.between_saves:
            self.clock.after(CAPTURE_S / CUT.chunk_count, partial(self._capture, rank))

    def settle(self, *, heal: bool = True) -> None:
        self._is_settling = True
        super().settle(heal=heal)
        self._is_settling = False

    # What goes wrong ---------------------------------------------------------------------------------

    def _trouble(self) -> None:
        self.trouble()
        self.clock.after(self.draw.uniform(10.0, 300.0), self.recover)

    def crash(self) -> None:
        self._under_way.clear()
        super().crash()


def run_many_hour(seed: int, *, seconds: float = HOUR_S) -> ManyHour:
    """Live through one hour; what is wrong is said with the seed, how to see it again, and what happened."""
    hour = ManyHour(seed)
    try:
        hour.go_for(seconds)
        hour.settle()
        hour.check_settled()
        hour.crash()
        hour.settle()
        hour.check_settled()
        hour.person.check_started()
    except Exception as error:
        lately = "\n".join(hour.world.trace[-150:])
        rules = "\n".join(map(str, hour.world.rules))
        raise AssertionError(
            f"seed {seed}, ranks on nodes {hour.world.node_of}: {error!r} "
            f"(again: python -m tests.simulation --ranks --first {seed} --seeds 1)\n{rules}\n{lately}"
        ) from error
    return hour
