"""Every place where two ranks can be killed or stopped: ``python -m tests.simulation.exhaustive``.

Two ranks of two nodes save three checkpoints to a disk of each node and one that both see. A training step, a message
that arrives and a request that a task makes of a disk are *events*. For each event there is a life in which all
processes are killed at it, one in which a node loses its memory too, and one for each rank in which that rank is
stopped at it, until nothing goes on without it. Two starts follow, and each of them saves. What holds in the histories
of ``many_history`` holds in each life, and a start goes on from the newest checkpoint that was promised before.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from tests.faults import Fault, FaultKind, Operation
from tests.simulation.many import NODE_TIER, SHARED_TIER, Many
from tests.simulation.many_history import MAX_WAIT_S, Loop, ManyHistory
from tests.simulation.many_orders import Person
from tests.simulation.many_storage import Damage
from tests.simulation.rank import CUT, Rank, Troubled
from tests.simulation.world import file_rules
from tierfall.core.types.values import CheckpointId

SAVES = 3
ROUNDS_MAX = 5_000


class Blow(StrEnum):
    """What happens at an event."""

    KILL = "all processes are killed"
    KILL_AND_LOSE = "all processes are killed, and node 1 loses its memory"
    STOP_0 = "rank 0 is stopped for a time"
    STOP_1 = "rank 1 is stopped for a time"


class Order(StrEnum):
    """Which events come first if several may."""

    MESSAGES = "messages before tasks"
    TASKS = "tasks before messages"
    RANK_1 = "rank 1 before rank 0"


@dataclass(slots=True)
class Events:
    """Counts the events of a first start, and strikes at one of them. ``at`` None: at none."""

    blow: Blow | None = None
    at: int | None = None
    count: int = 0
    is_open: bool = False
    has_struck: bool = False

    def happens(self) -> None:
        if self.is_open:
            self.count += 1
            self.has_struck = self.has_struck or self.count == self.at

    @property
    def is_killed(self) -> bool:
        return self.has_struck and self.blow in (Blow.KILL, Blow.KILL_AND_LOSE)


class Killed(BaseException):
    """A process that is dead makes no further request."""


class CountedDisk(Troubled):
    """A disk whose requests are events: a process that is killed at one does not make it."""

    events: Events

    @contextmanager
    def inject(
        self, operation: Operation, key: str, size_bytes: int = 0
    ) -> Iterator[Mapping[FaultKind, Fault]]:
        self.events.happens()
        if self.events.is_killed and self.events.is_open:
            raise Killed
        with super().inject(operation, key, size_bytes) as faults:
            yield faults


class MortalRank(Rank):
    """A rank whose task may be the one in which it is killed."""

    world: TwoRanks

    def step(self) -> None:
        if not (self.world.events.is_killed and self.world.events.is_open):
            super().step()


class TwoRanks(Many):
    """Two ranks, each on a node of its own."""

    def __init__(self, events: Events, seed: int) -> None:
        self.events = events
        rules = (
            file_rules(NODE_TIER, retain_last=1),
            file_rules(SHARED_TIER, shared=True, retain_last=1),
        )
        super().__init__((0, 1), rules, seed=seed, memory_images=2, max_wait_s=MAX_WAIT_S)

    def make_rank(self, number: int, memory_images: int) -> Rank:
        return MortalRank(self, number, memory_images)

    def seen_by(self, rank: Rank, tier: str) -> Troubled:
        disk = CountedDisk(
            self.disk(tier, rank.node), seed=rank.number, unsynced=self.unsynced(tier, rank.node)
        )
        disk.events = self.events
        return disk


class Life(ManyHistory):
    """One life: a first start with its blow, and two more starts."""

    def __init__(self, order: Order, events: Events) -> None:
        self.order, self.events = order, events
        self.draw = random.Random(0)
        self.tiers = (NODE_TIER, SHARED_TIER)
        self.world = TwoRanks(events, seed=len(order))
        self.damage = Damage(self.world, 0)
        self.unlike, self.compares, self.careless = set(), False, False
        self.tidy, self.has_person, self.memory_images = True, False, 2
        self.whole = []
        self.committed, self.given_up, self.found = set(), set(), set()
        self.durable = {}
        self.counts = dict.fromkeys(("WholeCheckpoint", "GivenUpCopy", "crash", "CommittedCopy"), 0)
        self.counts |= dict.fromkeys(
            ("SaveFailure", "DeletedCopy", "ImagesAlike", "ImagesUnlike"), 0
        )
        self.person = Person(self.world, self.draw)
        self.world.said, self.world.ran = self._said, self._ran
        self.stopped: Rank | None = None
        self.until_s = 0.0
        self._begin_loops()

    def _begin_loops(self) -> None:
        start = self.world.started_from
        first = 0 if start is None else start.step
        self.saves = SAVES if self.world.starts == 1 else 1
        self.steps = [first + n for n in range(self.saves + 1)]
        self.loops = {rank.number: Loop() for rank in self.world.ranks}
        self.whole = []

    # Driving -------------------------------------------------------------------------------------

    @property
    def going(self) -> list[Rank]:
        """The ranks that are not stopped, in the order of this life."""
        ranks = [rank for rank in self.world.ranks if rank is not self.stopped]
        return ranks[::-1] if self.order is Order.RANK_1 else ranks

    def live(self) -> None:
        """Train, until all is saved and nothing is left to do, or all are killed."""
        self.events.is_open = True
        self.until_s = self.world.now_s + 3 * MAX_WAIT_S
        for _ in range(ROUNDS_MAX):
            if self.events.is_killed:
                break
            if self.events.has_struck and self.stopped is None and self.events.blow is not None:
                self.stopped = self.world.ranks[0 if self.events.blow is Blow.STOP_0 else 1]
                self.until_s = self.world.now_s + 3 * MAX_WAIT_S
                self.world.trace.append(f"rank {self.stopped.number} is stopped")
                self.events.blow = None
            if self._goes_on() or self._time_passes():
                continue
            if self.stopped is None:
                break
            self.world.trace.append(f"rank {self.stopped.number} goes on")
            self.stopped, self.until_s = None, self.world.now_s + 3 * MAX_WAIT_S
        else:
            raise AssertionError("it never comes to rest")
        self.events.is_open = False

    def _goes_on(self) -> bool:
        talk, work = self._hears_one, self._works
        both = (work, talk) if self.order is Order.TASKS else (talk, work)
        for act in (*both, self._trains):
            if act():
                self._after_each()
                return True
        return False

    def _after_each(self) -> None:
        for rank in self.going:
            if rank.is_told:
                rank.step()
        if not self.events.is_killed:
            self._take_answers()
            self.check()

    def _hears_one(self) -> bool:
        if not self.world.network.waiting:
            return False
        self.world.deliver(1)
        self.events.happens()
        return True

    def _works(self) -> bool:
        rank = next((rank for rank in self.going if rank.tasks), None)
        if rank is not None:
            rank.run(rank.tasks[0])
        return rank is not None

    def _trains(self) -> bool:
        """Let the rank that is behind go on with its save, or begin the next one."""
        for rank in sorted(self.going, key=lambda rank: self.loops[rank.number].at):
            loop = self.loops[rank.number]
            is_ahead = loop.at > min(other.at for other in self.loops.values()) + 1
            if loop.asked is None and (loop.capture or (loop.at < self.saves and not is_ahead)):
                self.train_on(rank)
                self.events.happens()
                return True
        return False

    def train_on(self, rank: Rank) -> None:
        loop = self.loops[rank.number]
        if loop.capture is not None:
            snapshot, final = loop.capture
            final = CUT.chunk_count if final else 1
            loop.capture = None if final == CUT.chunk_count else (snapshot, final)
            rank.advance(snapshot, final)
        elif loop.at < self.saves:
            loop.at += 1
            step = self.steps[loop.at]
            self.world.trace.append(f"rank {rank.number} saves {step}")
            loop.asked = (step, rank.ask(step))

    def _time_passes(self) -> bool:
        """Let time pass until a planner wants to go on, if something waits for that."""
        waits = [rank.next_s for rank in self.going if rank.next_s is not None]
        is_over = self.world.now_s > self.until_s
        if is_over or not waits or not any(map(self._waits, self.going)):
            return False
        self.world.now_s = max(self.world.now_s, min(waits))
        for rank in self.going:
            rank.step()
        return True

    def _waits(self, rank: Rank) -> bool:
        return not self.loops[rank.number].between_saves or bool(rank.door.owed)

    def settle(self) -> None:
        """Let all that is begun come to an end."""
        self.world.settle(limit_s=2 * MAX_WAIT_S, after_each=self._after)

    # What must hold ------------------------------------------------------------------------------

    def promised(self, *, loses_memory: bool) -> CheckpointId | None:
        """The newest checkpoint that a start has to go on from."""
        there = set().union(*(self.world.committed(tier) for tier in self.tiers))
        if not loses_memory:
            held = [rank.sealed() for rank in self.world.ranks]
            there |= set(self.whole).intersection(*held)
        return max(filter(self._live, there), default=None)

    def start_again(self, *, loses_memory: bool) -> None:
        promised = self.promised(loses_memory=loses_memory)
        self.world.trace.append(f"all are killed; promised is {promised}")
        self.world.crash(nodes_lost=[1] if loses_memory else [])
        for rank in self.world.ranks:
            rank.handles.clear()
        self.given_up.clear()
        self.committed.clear()
        self.found = {(tier, id) for tier in self.tiers for id in self.world.committed(tier)}
        self.world.start()
        came = self.world.started_from
        assert promised is None or (came is not None and came >= promised), (
            f"{promised} was promised, and {came} is restored"
        )
        self._begin_loops()
        self.durable = {}
        self._after_each()


def live_through(order: Order, blow: Blow | None = None, at: int | None = None) -> int:
    """Live through one life; return how many events its first start had. What is wrong is said with all that
    happened."""
    life = Life(order, events := Events(blow, at))
    try:
        life.live()
        count, loses = events.count, blow is Blow.KILL_AND_LOSE and events.has_struck
        for number in range(2):
            if not (number or events.is_killed):
                life.settle()
                life.check_settled()
            killed_now, events.blow = not number, None
            life.start_again(loses_memory=bool(loses and killed_now))
            life.live()
            life.settle()
            life.check_settled()
    except Exception as error:
        lately = "\n".join(life.world.trace[-200:])
        raise AssertionError(f"{order}, {blow} at {at}: {error!r}\n{lately}") from error
    return count


def search(orders: Sequence[Order] = tuple(Order), *, every: int = 1, first: int = 1) -> int:
    """Live through all lives, or through each ``every``th from ``first`` on; return their number."""
    lives = 0
    for order in orders:
        count = live_through(order)
        for blow in Blow:
            for at in range(first, count + 1, every):
                live_through(order, blow, at)
                lives += 1
    return lives


def main(arguments: Sequence[str]) -> None:
    logging.disable()
    every = int(arguments[0]) if arguments else 1
    print(f"{search(every=every)} lives: no promise broken")


if __name__ == "__main__":
    main(sys.argv[1:])
