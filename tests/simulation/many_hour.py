"""An hour of training of several ranks on a clock: rank 0's cadence says which steps all save, and all may go wrong for
one of them. The promises are those of a ``ManyHistory`` and of a ``Watch``, and that all save the same steps.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import partial

from tests.simulation.cadence_watch import Watch
from tests.simulation.clock import INSTANT, Clock, Medium
from tests.simulation.hour import CAPTURE_PARTS, HOUR_S
from tests.simulation.many import NODE_TIER, SHARED_TIER
from tests.simulation.many_history import Loop, ManyHistory
from tests.simulation.many_storage import Faults, id_of
from tests.simulation.noted import check_life
from tests.simulation.rank import Rank
from tests.simulation.training import Training, draw_pace
from tests.simulation.tries import check_tries
from tests.simulation.world import IMAGE
from tierfall.core.flush.tasks import CopyRun, DeleteCopy, OpenShard, ReadDecided, Task
from tierfall.core.types.values import CheckpointId
from tierfall.run.cadence import TOPIC, AnnouncedSteps

MESSAGE_S = 0.002
LATE_S = 0.5
"""The most that a rank comes to the end of a step behind the first."""


class ManyHour(ManyHistory):
    """A run from its first start on. ``go_for`` lets time pass. A rank ends a step once all are through with it, or,
    in some hours, is up to ``drift`` steps ahead of the slowest."""

    def __init__(self, seed: int, *, storage: bool = False) -> None:
        """``storage``: what ``Faults`` and ``Damage`` do happens, too."""
        self.storage = storage
        self.folders_chance = 0.7 if storage else 0.0
        super().__init__(seed)
        draw = self.draw
        self.clock = Clock(draw)
        self.faults = Faults(self.world, self.damage, self.clock, seed)
        self.world.does_without = self._restores_without
        self._is_calm = False
        save_every_s = draw.choice((180.0, 300.0, 600.0))
        image_s = {tier: save_every_s * draw.choice((0.02, 0.3, 1.2)) for tier in self.tiers}
        self.media = {
            (tier, node): Medium(image_s=image_s[tier] / len(self.world.node_of), latency_s=0.05)
            for tier in self.tiers
            for node in self.world.disks(tier)
        }
        self._steps = random.Random(f"training many {seed}")
        self.pace = draw_pace(
            self._steps,
            self.world.rules,
            step_s=self._steps.choice((3.0, 5.0, 10.0)),
            save_every_s=save_every_s,
            copy_s=max(image_s.values()),
        )
        self.drift = self._steps.choice((0, 0, 0, 40))
        self._late_s = [self._steps.uniform(0.0, LATE_S) for _ in self.world.ranks]
        self.watches = [
            Watch(self.pace.rules, step_s=self.pace.step_s, exact=False, decides=rank.number == 0)
            for rank in self.world.ranks
        ]
        self._under_way: dict[int, Task] = {}
        self._is_delivering = False
        self._is_changed = True
        self._is_settling = False
        self.counts |= {"late": 0, "unread": 0, "anew": 0}
        self.left_out: Counter[tuple[int, int]] = Counter()
        self._saved: dict[int, set[int]] = {}
        self._train_anew()

    def go_for(self, seconds: float) -> None:
        """Let so much time pass, with all that happens in it."""
        world, clock = self.world, self.clock
        end_s = clock.now_s + seconds
        clock.now_and_then(self.crash, 0.6 * seconds)
        clock.now_and_then(self._trouble, 0.4 * seconds)
        clock.now_and_then(self.fail_capture, 0.5 * seconds)
        if self.has_person:
            clock.now_and_then(self.person.order, 0.2 * seconds)
            clock.now_and_then(self.person.decide_beside, 0.4 * seconds)
        draw = self.faults.draw
        events = (self._unmount, self.faults.fail_syncs, self.faults.replace_next_folder)
        for event in events if self.storage else ():
            for _ in range(draw.choice((0, 1, 1, 2))):
                clock.after(draw.uniform(0.0, seconds), event)
        while True:
            self._schedule()
            waits = [rank.next_s for rank in world.ranks if rank.next_s is not None]
            wake_s = min(waits, default=math.inf)
            if self._train_until(min(wake_s, clock.next_s, end_s)):
                self._is_changed = True
            elif wake_s <= min(clock.next_s, end_s):
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
            self._wake()

    def _wake(self) -> None:
        """What waits for its moment may happen now."""
        faults = self.faults
        drops = faults.hangs_as_it_drops and any(
            isinstance(task, DeleteCopy) and task.tier == SHARED_TIER
            for rank in self.world.ranks
            for task in rank.tasks
        )
        if drops or (faults.cuts_power and faults.is_unsynced()):
            self.crash()
        faults.wake_zombies()

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
            self._is_changed |= not isinstance(task, OpenShard | CopyRun | ReadDecided)

    def check(self) -> None:
        """Look, where something was changed that is looked at."""
        if self._is_changed or self._is_settling:
            super().check()
            self.faults.check_set_aside()
            self._is_changed = False

    # The training ------------------------------------------------------------------------------------

    def _train_anew(self) -> None:
        """All ranks begin to train, from where the run goes on; steps are worth the same on all of them."""
        self.left_out.clear()
        self._saved.clear()
        self.trainings = [self._training(rank) for rank in self.world.ranks]
        for number, training in enumerate(self.trainings):
            if self.world.started_from is not None:
                training.go_on_from(self.world.started_from.step)
            self.loops[number].at = training.step

    def _training(self, rank: Rank) -> Training:
        others = AnnouncedSteps(
            self.world.network.message_trees[rank.number],
            run_aside=lambda call: call(),
            leave_out=partial(self._leave_out, rank),
        )
        rank.listeners[TOPIC] = others.on_message
        return Training(
            self.pace,
            random.Random(f"{self.world.seed} {self.world.starts}"),
            self.clock,
            self.watches[rank.number],
            images=lambda image_bytes: rank.memory.capacity_bytes // image_bytes,
            copying=lambda: rank.door.is_copying,
            others=others,
        )

    def _leave_out(self, rank: Rank, step: int, error: BaseException) -> None:
        self.world.trace.append(f"rank {rank.number} leaves {step} out")
        self.left_out[step, rank.number] += 1
        self.counts["late"] += 1
        rank.leave_out(step, error)

    def _train_until(self, until_s: float) -> bool:
        """Train until then, or until one rank has something to say or to save, and say whether one has."""
        while True:
            at_s, rank = min(self._ends(), key=lambda end: end[0])
            if at_s > until_s:
                return False
            self.clock.now_s = self.world.now_s = max(at_s, self.clock.now_s)
            if self._end_step(rank) or (self.world.network.waiting and not self._is_delivering):
                return True

    def _ends(self) -> list[tuple[float, Rank]]:
        """When each rank ends its step, as things are."""
        free_s = [
            training.due_s if self.loops[number].between_saves else math.inf
            for number, training in enumerate(self.trainings)
        ]
        slowest = min(training.step for training in self.trainings)
        lead = [training.step - slowest for training in self.trainings]
        if self.drift == 0:
            all_s = max(s for s, ahead in zip(free_s, lead, strict=True) if ahead == 0)
            free_s = [all_s + late_s for late_s in self._late_s]
        return [
            (seconds if ahead <= self.drift else math.inf, rank)
            for seconds, ahead, rank in zip(free_s, lead, self.world.ranks, strict=True)
        ]

    def _end_step(self, rank: Rank) -> bool:
        """Let a rank end its step; True where it is to save it."""
        training = self.trainings[rank.number]
        wanted = training.end_step(is_slowed=any(isinstance(task, CopyRun) for task in rank.tasks))
        self.loops[rank.number].at = training.step
        if wanted:
            self._save(rank, training)
        return wanted

    def _save(self, rank: Rank, training: Training) -> None:
        step = training.step
        self._saved.setdefault(step, set()).add(rank.number)
        if self.careless and self.draw.random() < 0.05:
            self.world.trace.append(f"rank {rank.number} never saves {step}")
            training.begin_step(is_slowed=False)
            return
        self.world.trace.append(f"rank {rank.number} saves {step}")
        self.loops[rank.number].asked = (step, rank.ask(step))

    def _take_answers(self) -> None:
        answered = [
            (rank, loop.asked[0])
            for rank in self.world.ranks
            if (loop := self.loops[rank.number]).asked is not None and loop.asked[1]
        ]
        super()._take_answers()
        for rank, step in answered:
            handle = rank.handles[CheckpointId(step, self.world.attempt.number)]
            self.trainings[rank.number].saved(handle, IMAGE)
            self._capture_soon(rank, CAPTURE_PARTS)
            if self.loops[rank.number].capture is not None:
                self.faults.block(CheckpointId(step, self.world.attempt.number))

    def _capture_soon(self, rank: Rank, parts: int) -> None:
        self.clock.after(self.pace.capture_s / CAPTURE_PARTS, partial(self._capture, rank, parts))

    def _capture(self, rank: Rank, parts: int) -> None:
        """A part of a capture has gone by; with the last one it ends."""
        loop = self.loops[rank.number]
        if loop.capture is not None:
            self.capture_on(rank)
        while loop.capture is not None and parts == 1:
            self.capture_on(rank)
        if loop.capture is not None:
            self._capture_soon(rank, parts - 1)

    # The end -----------------------------------------------------------------------------------------

    def train_on(self, rank: Rank) -> None:
        """Go on with a save, or train until the next one, or until all ranks are at the same step."""
        loop = self.loops[rank.number]
        if loop.capture is not None:
            self.capture_on(rank)
            return
        while loop.asked is None and not self._is_even(loop):
            if self._end_step(rank):
                return

    def _is_even(self, loop: Loop) -> bool:
        return loop.between_saves and loop.at == max(other.at for other in self.loops.values())

    def settle(self, *, heal: bool = True) -> None:
        """Let storage heal, every rank come to the same step, and all work be done."""
        self._is_settling = True
        self.faults.all_is_well(mounted=True)
        if heal:
            for rank in self.world.ranks:
                for trouble in rank.troubles.values():
                    trouble.stop()
        self._work_off()
        for training in self.trainings:
            training.cadence.end()
        self._work_off()
        self._is_settling = False

    def _work_off(self) -> None:
        self.world.settle(after_each=self._after)
        while behind := [r for r in self.world.ranks if not self._is_even(self.loops[r.number])]:
            self.train_on(self.draw.choice(behind))
            self._after()
            if not any(self._can_go_on(self.loops[r.number]) for r in behind):
                self.world.settle(after_each=self._after)
        self.world.settle(after_each=self._after)
        self.world.trace.append("settled")

    def _can_go_on(self, loop: Loop) -> bool:
        return loop.asked is None and not self._is_even(loop)

    def check_settled(self, *, healed: bool = True) -> None:
        super().check_settled(healed=healed)
        self._check_alike(math.inf)

    def _check_alike(self, until: float) -> None:
        """What one rank saves all save, or those that have passed it say so, and it is whole nowhere; ranks that wait
        for each other at every step always hear of it in time."""
        assert self.drift or not self.left_out, f"heard too late: {self.left_out}"
        for step, ranks in self._saved.items():
            others = [rank.number for rank in self.world.ranks if rank.number not in ranks]
            if step <= until:
                messages = [self.left_out[step, number] for number in others]
                assert messages == [1] * len(others), f"ranks {others} pass {step}: {messages}"
            if others:
                id = CheckpointId(step, self.world.attempt.number)
                assert id not in self.whole, f"{id} is whole without ranks {others}"

    # What goes wrong ---------------------------------------------------------------------------------

    def _trouble(self) -> None:
        self.trouble()
        self.clock.after(self.draw.uniform(10.0, 300.0), self.recover)

    def trouble(self) -> None:
        super().trouble()
        self.faults.fails_some.update(self.tiers)

    def _unmount(self) -> None:
        seconds = self.faults.unmount()
        if seconds is not None and self.faults.draw.random() < 0.3:
            self.clock.after(self.faults.draw.uniform(0.0, seconds), self.crash)

    def crash(self) -> None:
        faults = self.faults
        if self.drift == 0:
            self._check_alike(min(training.step for training in self.trainings))
        may_hang = self.storage and not (faults.hangs_as_it_drops or self._is_calm)
        if may_hang and faults.draw.random() < 0.1:
            faults.hangs_as_it_drops = True  # from the moment on that it next drops something
            return
        self._under_way.clear()
        super().crash()
        self.faults.check_number()
        self.damage.check_seen()
        self._check_restored()
        self._train_anew()

    def lose(self, nodes: list[int]) -> list[int]:
        faults, everywhere = self.faults, self.faults.nodes
        if self._is_calm or not self.storage:
            return nodes
        cuts_power = faults.cuts_power and faults.is_unsynced()
        hangs = faults.hangs_as_it_drops
        faults.hangs_as_it_drops = faults.cuts_power = False
        if cuts_power and faults.loses_power():
            faults.cut_power()
            return everywhere
        if hangs or (nodes and faults.draw.random() < 0.5):
            nodes = everywhere if hangs or faults.draw.random() < 0.2 else nodes
            faults.lose_nodes(nodes)
            lost = {(NODE_TIER, node) for node in nodes}
            self.person.forget(lost, above=faults.newest_attempt())
        for rank in self.world.ranks:
            for task in rank.tasks if rank.node not in nodes else ():
                if faults.draw.random() < 0.3:
                    rank.runner.run(task)  # it may have taken effect
        return nodes

    def change_storage(self) -> None:
        faults, damage = self.faults, self.damage
        faults.begin_anew()
        if not self.storage:
            return
        damage.begin_anew()
        if damage.draw.random() < 0.3:
            damage.purge()
        if damage.draw.random() < 0.5:
            damage.flip()
        faults.all_is_well(mounted=self._is_calm)
        faults.skew_clocks()
        self._begins_anew = False
        if not self._is_calm:
            faults.lose_sight()

    def _restores_without(self) -> bool:
        """A person restores without what cannot be looked at, or begins anew."""
        self._begins_anew = self.faults.draw.random() < 0.3
        return not self._begins_anew

    def _check_restored(self) -> None:
        """The ranks go on from the newest checkpoint of which all of them have a good part in reach."""
        world = self.world
        self.counts["unread"] += bool(world.unread)
        if world.unread and self._begins_anew:
            self.counts["anew"] += 1
            return
        best = self.damage.newest_restorable(self.person.doomed | self.unlike)
        found = world.started_from
        assert best is None or (found is not None and found >= best), (
            f"{best} could be restored, and the run goes on from {found}"
        )

    def may_be_left(self, tier: str, node: int, key: str) -> bool:
        id = id_of(key)
        is_blocked = id is not None and self.faults.is_blocked(tier, id)  # elsewhere it could land
        return is_blocked or ((tier, node), key) in self.faults.left_by_zombies

    def mend(self) -> None:
        """From now on nothing goes wrong but what is killed."""
        self.faults.mend()
        self._is_calm = True


def run_many_hour(seed: int, *, seconds: float = HOUR_S, storage: bool = False) -> ManyHour:
    """Live through one hour; what is wrong is said with the seed, how to see it again, and what happened."""
    hour = ManyHour(seed, storage=storage)
    try:
        hour.go_for(seconds)
        hour.settle()
        hour.check_settled()
        hour.mend()
        hour.crash()
        hour.settle()
        hour.check_settled()
        if not hour.world.unread:  # a deletion waits for a start that can look everywhere
            hour.person.check_started()
        check_tries(hour.world.trace)
        for lived in hour.world.lives:
            check_life(lived)
    except Exception as error:
        lately = "\n".join(hour.world.trace[-150:])
        rules = "\n".join(map(str, hour.world.rules))
        kind = "--storage" if storage else "--ranks"
        raise AssertionError(
            f"seed {seed}, ranks on nodes {hour.world.node_of}: {error!r} "
            f"(again: python -m tests.simulation {kind} --first {seed} --seeds 1)\n{rules}\n{lately}"
        ) from error
    return hour
