"""An hour of training with peer memory on a clock: machines are lost and replaced, come to other places, cannot reach
each other, are slow, break connections; processes are killed. What must hold is in ``PeerWatch``.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tests.simulation import peer_world
from tests.simulation.clock import INSTANT, Clock, Medium
from tests.simulation.many import SHARED_TIER
from tests.simulation.many_history import Loop
from tests.simulation.noted import check_life
from tests.simulation.peer_watch import PeerWatch
from tests.simulation.peer_world import PEER_TIER, Machine, PeerRank, PeerWorld
from tests.simulation.rank import CUT
from tests.simulation.world import FakeRegion, file_rules
from tierfall.core.flush.tasks import AbortShard, CommitCopy, DeleteCopy, Task
from tierfall.core.types.errors import CaptureError
from tierfall.core.types.values import TierKind, WhenFull
from tierfall.core.types.view import TierRules

HOUR_S = 3600.0
MESSAGE_S = 0.002
CAPTURE_PARTS = 3


def peer_rules(**members: Any) -> TierRules:
    """The rules of peer memory; it survives the loss of a node, as a shared folder does."""
    return replace(file_rules(PEER_TIER, shared=True, **members), kind=TierKind.PEER)


class PeerHour:
    """A run from its first start on; ``nodes`` machines, or as many as the seed says."""

    def __init__(self, seed: int, *, nodes: int | None = None, copies: int = 1) -> None:
        self.draw = draw = random.Random(f"peers {seed}")
        self.draw_recovery = random.Random(f"recovery {seed}")
        self.copies = copies
        self.nodes = nodes or draw.choice((2, 3, 4, 4, 5, 6, 8)) + copies - 1
        self.slots = 1 if self.nodes > 8 else draw.choice((1, 1, 2))
        self.images = draw.choice((2, 3, 3))
        self.racks = draw.choice((1, 1, 2, 4))
        self._made = 0
        self.counts: Counter[str] = Counter()
        self.away: list[Machine] = []
        self.world = PeerWorld(
            [self._machine() for _ in range(self.nodes)],
            self._rules(),
            copies=copies,
            seed=seed,
            memory_images=self.images,
            fan_out=draw.choice((2, 64)),
            max_wait_s=draw.choice((30.0, 120.0)),
            when_full=draw.choice(tuple(WhenFull)),
        )
        self.watch = PeerWatch(self.world)
        self.clock = Clock(draw)
        self.save_every_s = draw.choice((60.0, 120.0, 300.0))
        self.image_s = {
            tier: self.save_every_s * draw.choice((0.05, 0.3, 0.9)) for tier in self.world.stored
        }
        self.slow: dict[int, float] = {}
        self.step = 0
        self.loops: dict[int, Loop] = {}
        self.media: dict[tuple[str, int], Medium] = {}
        self._under_way: dict[int, Task] = {}
        self._is_delivering = self._is_changed = self._is_calm = False
        self._is_saving = True
        self._regions: set[FakeRegion] = set()
        self._begin_training()

    def _rules(self) -> list[Any]:
        draw = self.draw
        peers = peer_rules(retain_last=draw.choice((1, 1, 2)), flush_every=draw.choice((1, 1, 2)))
        # often only the attempts are there: without them, a start that begins anew would use their numbers again
        every = draw.choice((1, 3, 10)) if draw.random() < 0.5 else 1000
        return [peers, file_rules(SHARED_TIER, shared=True, retain_last=2, flush_every=every)]

    def _machine(self, domain: str | None = None) -> Machine:
        self._made += 1
        domain = domain or f"rack {self._made // self.racks}"
        return Machine(
            self._made, slots=self.slots, images=self.images, copies=self.copies, domain=domain
        )

    # Time ----------------------------------------------------------------------------------------

    def live(self, seconds: float) -> None:
        """Let so much time pass, with all that goes wrong in it."""
        troubles = (
            (self.lose_machines, 0.25),
            (self.restart, 0.4),
            (self.part, 0.2),
            (self.break_connections, 0.3),
            (self.slow_down, 0.5),
        )
        for trouble, every_h in troubles:
            self.clock.now_and_then(partial(self._befall, trouble), every_h * HOUR_S)
        self.go_for(seconds)

    def _befall(self, trouble: Callable[[], None]) -> None:
        if not self._is_calm:
            trouble()

    def go_for(self, seconds: float) -> None:
        """Let so much time pass."""
        world, clock = self.world, self.clock
        end_s = clock.now_s + seconds
        while True:
            self._schedule()
            waits = [rank.next_s for rank in world.alive if rank.next_s is not None]
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
                return
            self._after()

    def _after(self) -> None:
        self.world.hear()
        self._take_answers()
        self.watch.look()
        regions = {region for rank in self.world.ranks for region in rank.memory.regions}
        if self._is_changed or self._regions - regions:
            self._is_changed = False
            self.watch.check()
        self._regions = regions

    def _schedule(self) -> None:
        for rank in self.world.alive:
            for task in rank.tasks:
                if id(task) not in self._under_way:
                    self._under_way[id(task)] = task
                    self.clock.after(self._seconds(rank, task), partial(self._done, rank, task))
        if self.world.network.waiting and not self._is_delivering:
            self._is_delivering = True
            self.clock.after(MESSAGE_S, self._deliver)

    def _seconds(self, rank: PeerRank, task: Task) -> float:
        if task.tier not in self.image_s:
            return INSTANT.done_after_s(task, self.clock.now_s)
        medium = self.media.setdefault(
            (task.tier, rank.machine.number),
            Medium(image_s=self.image_s[task.tier], latency_s=0.05),
        )
        return medium.done_after_s(task, self.clock.now_s) * self.slow.get(rank.machine.number, 1.0)

    def _deliver(self) -> None:
        self._is_delivering = False
        self.world.deliver(self.draw.choice((1, 5, 50)))

    def _done(self, rank: PeerRank, task: Task) -> None:
        is_there = rank.machine.number not in self.world.wires.lost
        if self._under_way.pop(id(task), None) is not None and is_there:
            rank.run(task)
            self._is_changed |= isinstance(task, DeleteCopy | AbortShard | CommitCopy)

    # Training ------------------------------------------------------------------------------------

    def _begin_training(self) -> None:
        start = self.world.started_from
        self.step = 0 if start is None else start.step
        self.loops = {rank.number: Loop() for rank in self.world.ranks}
        self.clock.after(self.save_every_s, self._of_this_start(self.world.starts, self._save))

    def _save(self) -> None:
        """All ranks save the next step, or wait for one that still does."""
        starts = self.world.starts
        if not self._is_saving:
            return
        if not all(self.loops[rank.number].between_saves for rank in self.world.alive):
            self.clock.after(1.0, self._of_this_start(starts, self._save))
            return
        self.step += self.draw.choice((1, 1, 5))
        self.world.trace.append(f"{self.clock.now_s:.0f} s: all save {self.step}")
        for rank in self.world.alive:
            self.loops[rank.number].asked = (self.step, [])
            ask = self._of_this_start(starts, partial(self._ask, rank, self.step))
            self.clock.after(self.draw.uniform(0.0, 0.5), ask)
        self.clock.after(self.save_every_s, self._of_this_start(starts, self._save))

    def _of_this_start(self, starts: int, act: Any) -> Any:
        return lambda: act() if self.world.starts == starts else None

    def _ask(self, rank: PeerRank, step: int) -> None:
        self.loops[rank.number].asked = (step, rank.ask(step))

    def _take_answers(self) -> None:
        for rank in self.world.alive:
            loop = self.loops[rank.number]
            if loop.asked is None or not loop.asked[1]:
                continue
            step, (region, error) = loop.asked
            loop.asked = None
            if error is not None:
                self.world.trace.append(f"rank {rank.number} skips {step}: {error}")
                self.counts["skipped"] += 1
                rank.skip(step, error)
                continue
            loop.capture = (rank.begin(step, region), 0)
            self.clock.after(
                0.3, self._of_this_start(self.world.starts, partial(self._capture, rank))
            )

    def _capture(self, rank: PeerRank) -> None:
        """A part of a capture has gone by."""
        loop = self.loops[rank.number]
        if loop.capture is None:
            return
        snapshot, final = loop.capture
        if not self._is_calm and self.draw.random() < 0.002:
            loop.capture = None
            self.counts["capture_failed"] += 1
            rank.fail_capture(snapshot, CaptureError("on purpose"))
            return
        final = self.draw.randint(final, CUT.chunk_count)
        loop.capture = None if final == CUT.chunk_count else (snapshot, final)
        rank.advance(snapshot, final)
        if loop.capture is not None:
            self.clock.after(
                0.3, self._of_this_start(self.world.starts, partial(self._capture, rank))
            )

    # What goes wrong -----------------------------------------------------------------------------

    def part(self) -> None:
        """Two machines do not reach each other for a while."""
        one, other = self.draw.sample(self.world.present, 2)
        pair = frozenset((one.number, other.number))
        self._say(f"machines {sorted(pair)} are parted")
        self.counts["parted"] += 1
        self._part(pair, self.draw.uniform(5.0, 900.0))

    def _part(self, pair: frozenset[int], seconds: float) -> None:
        self.world.wires.parted.add(pair)
        self.clock.after(seconds, partial(self.world.wires.parted.discard, pair))

    def break_connections(self) -> None:
        """The connections from one machine break for a while."""
        machine = self.draw.choice(self.world.present)
        chance = self.draw.choice((0.05, 0.3))
        pairs = [
            frozenset((machine.number, m.number)) for m in self.world.present if m is not machine
        ]
        self._say(f"connections of machine {machine.number} break: {chance}")
        self.counts["breaks"] += 1
        for pair in pairs:
            self.world.wires.breaks[pair] = chance
            self.clock.after(600.0, partial(self.world.wires.breaks.pop, pair, None))

    def slow_down(self) -> None:
        machine = self.draw.choice(self.world.present)
        self._say(f"machine {machine.number} is slow")
        self.counts["slow"] += 1
        self.slow[machine.number] = self.draw.choice((3.0, 20.0))
        self.clock.after(
            self.draw.uniform(60.0, 900.0), partial(self.slow.pop, machine.number, None)
        )

    def lose_machines(self) -> None:
        """Machines are lost, with all that is in their memory; the job is ended soon after that."""
        alive = [m for m in self.world.present if m.number not in self.world.wires.lost]
        count = self.draw.choice((1, 1, 1, 1, 1, self.copies, self.copies + 1, 3))
        for machine in self.draw.sample(alive, min(count, len(alive))):
            self.world.lose(machine)
            self.counts["lost"] += 1
        self._is_changed = True
        starts = self.world.starts
        self.clock.after(self.draw.uniform(0.0, 60.0), self._of_this_start(starts, self.restart))

    def restart(self) -> None:
        """All processes are killed, and started again, on other machines where some are lost."""
        self._say("all are killed")
        self.counts["restart"] += 1
        for rank in self.world.alive:
            for task in list(rank.tasks):
                if self.draw.random() < 0.3:
                    rank.runner.run(task)  # it may have taken effect
        self.world.crash()
        self._under_way.clear()
        for rank in self.world.ranks:
            rank.handles.clear()
        self._change_machines()
        self.start()

    def start(self) -> None:
        """Start again, and once more as often as a person has to mend the network first."""
        self._start_until_it_works()
        while self.world.refused is not None and self.world.unread:
            self._say(f"a person mends the network: {self.world.refused}")
            self.counts["refused"] += 1
            self.world.wires.heal()
            self.world.crash()
            self._start_until_it_works()
        self.counts["recovered"] += sum(rank.recovered is not None for rank in self.world.ranks)
        self.watch.check_started()
        self._begin_training()

    def _start_until_it_works(self) -> None:
        """Start; where a machine is lost meanwhile, or all are killed, start again."""
        world = self.world
        world.on_recovery_request = self._trouble_of_recovery()
        while True:
            try:
                world.start()
            except peer_world.StartFailedError as error:
                self._say(f"the start fails: {error}")
                self.counts["start_failed"] += 1
                world.crash()
                self._change_machines()
            else:
                return

    def _trouble_of_recovery(self) -> Callable[[int, int], None]:
        """Draw what goes wrong, once, while a start brings images back."""
        draw = self.draw_recovery
        requests = draw.randint(1, 40) if not self._is_calm and draw.random() < 0.5 else 0
        trouble = draw.choice((self._cut_off, self._cut_off, self._lose_keeper, self._kill))

        def count(one: int, other: int) -> None:
            nonlocal requests
            requests -= 1
            if requests == 0:
                trouble(one, other)

        return count

    def _cut_off(self, one: int, other: int) -> None:
        self._say(f"machines {one} and {other} are parted while an image is brought back")
        self.counts["cut_off"] += 1
        self._part(frozenset((one, other)), self.draw_recovery.uniform(5.0, 900.0))

    def _lose_keeper(self, one: int, other: int) -> None:
        self.counts["keeper_lost"] += 1
        self.world.lose(next(m for m in self.world.present if m.number == other))

    def _kill(self, one: int, other: int) -> None:
        raise peer_world.StartFailedError("all are killed while images are brought back")

    def _change_machines(self) -> None:
        """Lost machines are replaced, in their place or another one, or not at all; one may leave or come back."""
        world, draw = self.world, self.draw
        lost = world.wires.lost
        present = []
        for machine in world.present:
            if machine.number not in lost:
                present.append(machine)
            elif draw.random() < 0.7 or len(world.present) <= self.copies + 2:
                is_beside = self.draw_recovery.random() < 0.7
                present.append(self._machine(machine.domain if is_beside else None))
        if draw.random() < 0.15 and len(present) > max(self.copies + 1, self.nodes - 2):
            self.away.append(present.pop(draw.randrange(len(present))))
            self.counts["left"] += 1
        while len(present) < self.copies + 1 or (
            len(present) < self.nodes + 2 and draw.random() < 0.2
        ):
            comes_back = self.away and draw.random() < 0.5
            present.insert(
                draw.randint(0, len(present)),
                self.away.pop() if comes_back else self._machine(),
            )
            self.counts["came_back" if comes_back else "added"] += 1
        if draw.random() < 0.2:
            draw.shuffle(present)
        world.present = present
        self._say(f"machines {[m.number for m in present]}")

    def _say(self, what: str) -> None:
        self.world.trace.append(f"{self.clock.now_s:.0f} s: {what}")

    # The end -------------------------------------------------------------------------------------

    def end(self) -> None:
        """All is well again: what is saved is kept as promised, nothing is left over, and a last loss costs nothing."""
        self._settle()
        for machine in self.draw.sample(self.world.present, self.copies):
            self.world.lose(machine)
        self.restart()
        self._settle()

    def _settle(self) -> None:
        self._is_calm = True
        self.world.wires.heal()
        self.slow.clear()
        if self.world.wires.lost:
            self.restart()
        begun = list(self._under_way.values())
        while any(id(task) in self._under_way for task in begun):
            self.go_for(self.save_every_s)  # it may have begun on a slow machine
        self.go_for(8 * self.save_every_s)
        self._is_saving = False
        self.go_for(8 * self.save_every_s)
        self.clock.clear()
        self._is_delivering = False
        self._under_way.clear()
        self.world.settle(after_each=self._after)
        self.clock.now_s = self.world.now_s  # lists are read on meanwhile
        self.watch.check_settled()
        self._is_calm, self._is_saving = False, True


def run_peer_hour(
    seed: int, *, seconds: float = HOUR_S, nodes: int | None = None, copies: int = 1
) -> PeerHour:
    """Live through one hour; what is wrong is said with the seed, how to see it again, and what happened."""
    hour = PeerHour(seed, nodes=nodes, copies=copies)
    try:
        hour.live(seconds)
        hour.end()
        for life in hour.world.lives:
            check_life(life)
    except Exception as error:
        lately = "\n".join(hour.world.trace[-150:])
        rules = "\n".join(map(str, hour.world.rules))
        many = "" if nodes is None else f" --nodes {nodes}"
        raise AssertionError(
            f"seed {seed}, {len(hour.world.present)} machines: {error!r} (again: python -m tests.simulation --peers"
            f"{many} --copies {copies} --hours {seconds / HOUR_S:g} --first {seed} --seeds 1)\n{rules}\n{lately}"
        ) from error
    hour.counts.update(hour.watch.counts)
    return hour
