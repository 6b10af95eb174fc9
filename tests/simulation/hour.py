"""An hour of training on a clock: steps, saves when the cadence asks for them, tiers that take their time, and what
goes wrong.

The promises, and how they are looked after, are those of a ``History``, and of a ``Watch`` over the cadence; here
things happen when it is their time, as long as they last. A task takes effect at its end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from functools import partial

from tests.memory_backend import MemoryBackend
from tests.simulation.cadence_watch import Watch
from tests.simulation.clock import INSTANT, Clock, Medium
from tests.simulation.history import RANK, Asked, Held, History, check_restorable, live
from tests.simulation.mounts import MountedWorld
from tests.simulation.noted import check_life
from tests.simulation.training import Training, draw_pace
from tests.simulation.tries import check_tries
from tests.simulation.weather import Outage, Weather
from tests.simulation.world import IMAGE, Place, Zombie, newest_attempt, objects_on
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.flush.tasks import CopyRun, DeleteCopy, Task
from tierfall.core.format.records import parse_attempt_record
from tierfall.core.types import keys as names
from tierfall.core.types.errors import TierfallError
from tierfall.core.types.events import SetAside
from tierfall.core.types.values import CheckpointId, LossClass, SaveOutcome
from tierfall.core.types.view import TierRules

HOUR_S = 3600.0
CAPTURE_PARTS = 2


class Hour(History):
    """A run from its first start on. ``go_for`` lets time pass; each event is followed by a look at what must hold."""

    make_world = MountedWorld
    make_weather = Outage
    world: MountedWorld

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        draw = self.draw
        save_every_s = draw.choice((120.0, 240.0, 400.0, 600.0))
        image_s = {
            tier: save_every_s * draw.choice((0.02, 0.3, 0.9, 1.5)) for tier in self.world.disks
        }
        self.media = {
            tier: Medium(image_s=seconds, latency_s=draw.choice((0.001, 0.05, 0.5)))
            for tier, seconds in image_s.items()
        }
        self.clock = Clock(draw)
        self._steps = random.Random(f"training {seed}")
        self.pace = draw_pace(
            self._steps,
            self.world.rules,
            step_s=self._steps.choice((1.0, 2.0, 5.0)),
            save_every_s=save_every_s,
            copy_s=max(image_s.values()),
        )
        self.watch = Watch(self.pace.rules, step_s=self.pace.step_s)
        self._train_anew()
        self._wakes = random.Random(f"zombies {seed}")
        self.zombies: list[Zombie] = []
        self._hangs_as_it_drops = False
        self.lost: dict[LossClass, int] = {}
        self._block = random.Random(f"block {seed}")
        self._drains = random.Random(f"drain {seed}")
        self._block_next: str | None = None
        self._events_seen = 0
        self.set_aside: list[SetAside] = []
        self._under_way: dict[int, Task] = {}
        self._mounts = random.Random(f"mounts {seed}")
        self._cuts_power = False
        self._fails_some: set[Weather] = set()
        self._denied: set[Weather] = set()
        self.counts: Counter[str] = Counter()

    # The clock ---------------------------------------------------------------------------------------

    def go_for(self, seconds: float) -> None:
        """Let so much time pass, with all that happens in it."""
        clock, end_s = self.clock, self.clock.now_s + seconds
        clock.now_and_then(self._trouble, 0.5 * seconds)
        clock.now_and_then(self._outage, 0.4 * seconds)
        clock.now_and_then(self._person, 0.25 * seconds)
        for _ in range(self._block.choice((0, 1, 1, 2))):
            clock.after(self._block.uniform(0.0, seconds), self._replace_next_folder)
        for _ in range(self._mounts.choice((0, 1, 1, 2))):
            clock.after(self._mounts.uniform(0.0, seconds), self._unmount)
        for _ in range(self._mounts.choice((0, 1, 1, 2))):
            clock.after(self._mounts.uniform(0.0, seconds), self._fail_syncs)
        while True:
            wake_s = self.world.step()
            self._schedule()
            next_s = min(clock.next_s, end_s if wake_s is None else wake_s, end_s)
            if self._train_until(next_s):
                self.ask_for(self.training.step)
            elif wake_s is not None and wake_s <= min(clock.next_s, end_s):
                clock.now_s = self.world.now_s = max(wake_s, clock.now_s)
                self.world.step()
            elif clock.next_s < end_s:
                act = clock.take()
                self.world.now_s = clock.now_s
                act()
            else:
                self.world.now_s = clock.now_s = end_s
                clock.clear()
                return
            self.take_answers()
            self.check()
            self._wake()

    def _wake(self) -> None:
        """A process that was taken for lost goes on for a moment: whatever it does, nothing that lies on a tier where
        the newer attempt is known goes, or changes."""
        if self._hangs_as_it_drops and any(
            isinstance(task, DeleteCopy) and task.tier in self._shared()
            for task in self.world.tasks
        ):
            self._hangs_as_it_drops = False
            self._lose_node()
        if self._cuts_power and any(outage.unsynced for outage in self.weathers):
            self._cuts_power = False
            self._restart_machine()
        for zombie in self.zombies:
            if self._wakes.random() < 0.2:
                before = objects_on(self._places())
                blind = {t for t in self.world.disks if self._newest_number([t]) <= zombie.number}
                output = zombie.go_on(self._wakes, self.world.now_s, blind)
                self.log.extend(output)
                after = objects_on(self._places())
                gone = [key for key, data in before.items() if after.get(key) is not data]
                assert not gone, f"a zombie took away {gone}"
                # an image that it had begun: the next start collects that
                self.left_by_zombies |= {(t, key) for (t, _), key in after.keys() - before.keys()}
                self.check()

    def _places(self) -> dict[Place, MemoryBackend]:
        return {(tier, 0): disk for tier, disk in self.world.disks.items()}

    def _schedule(self) -> None:
        """Give each new task the time at which it is done."""
        for task in self.world.tasks:
            if id(task) not in self._under_way:
                self._under_way[id(task)] = task
                seconds = self.media.get(task.tier, INSTANT).done_after_s(task, self.clock.now_s)
                self.clock.after(seconds, partial(self._done, task))

    def _done(self, task: Task) -> None:
        if self._under_way.pop(id(task), None) is not None:  # else the process that had it is dead
            self.world.run(task)

    # The training ------------------------------------------------------------------------------------

    def _train_anew(self) -> None:
        """A process begins to train."""
        self.training = Training(
            self.pace,
            self._steps,
            self.clock,
            self.watch,
            images=lambda image_bytes: self.world.memory.capacity_bytes // image_bytes,
            copying=lambda: self.world.door.is_copying,
        )

    def _train_until(self, until_s: float) -> bool:
        """Train until then, or until a step is to be saved, and say so; a capture under way holds the next step up."""
        training = self.training
        is_slowed = any(isinstance(task, CopyRun) for task in self.world.tasks)
        while not self.captures and training.due_s <= until_s:
            self.clock.now_s = self.world.now_s = max(training.due_s, self.clock.now_s)
            if training.end_step(is_slowed=is_slowed):
                return True
        return False

    def take_answers(self) -> None:
        asked = list(self.asked)
        super().take_answers()
        if asked and not self.asked:
            self._answered(asked[0])

    def _answered(self, asked: Asked) -> None:
        """The save goes on beside the training, or is skipped."""
        id = CheckpointId(asked.step, self.world.attempt.number)
        handle = self.world.handles.get(id)
        if handle is None:
            handle = SaveHandle(id, (), in_memory="host")
            handle.on_given_up(SaveOutcome.SKIPPED, asked.answer[1])
        else:
            self._capture_soon(CAPTURE_PARTS)
            if self._block_next is not None:
                self._outage_of(self._block_next).blocked.add(names.step_prefix("run", id))
                self.log.append(f"{self._block_next}: {id} cannot be written there")
                self._block_next = None
        self.training.saved(handle, IMAGE)

    def _capture(self, parts: int) -> None:
        """A part of a capture has gone by; with the last one it ends."""
        if self.captures and self.draw.random() < 0.02:
            self.fail_capture()
        self.capture_on()
        while self.captures and parts == 1:
            self.capture_on()
        if self.captures:
            self._capture_soon(parts - 1)

    def _capture_soon(self, parts: int) -> None:
        self.clock.after(self.pace.capture_s / CAPTURE_PARTS, partial(self._capture, parts))

    # What goes wrong ---------------------------------------------------------------------------------

    def _trouble(self) -> None:
        what = self.draw.choices((self._die, self._lose_node, self.go_back_in_process), (4, 2, 1))
        self.log.append(f"{self.world.now_s:.0f} s: {what[0].__name__}")
        if what[0] == self._lose_node and self._shared() and self._wakes.random() < 0.5:
            self._hangs_as_it_drops = True  # from the moment on that it next drops something
        else:
            what[0]()

    def _die(self) -> None:
        """The process dies; what it was doing may have taken effect."""
        for task in self.world.tasks:
            if self.draw.random() < 0.3:
                self.world.runner.run(task)
        self._start_again(LossClass.PROCESS)

    def _lose_node(self) -> None:
        """Another machine goes on: memory, and the disks that it does not share, are empty. The process of the lost one
        may only have hung."""
        if shared := self._shared():
            self.zombies.append(Zombie(self.world, shared))
        self.world.take_other_memory()  # a zombie goes on with that of its own machine
        self.world.machine.data = None
        gone = {r.name for r in self.world.rules[1:] if RANK[r.survives] < RANK[LossClass.NODE]}
        for tier in gone:
            self.world.disks[tier]._objects.clear()
            self._outage_of(tier).blocked.clear()
        if not any(held.commits for held in self.look().values()):
            self.mend()
            self._forget_above(0)
        self._forget_above(self._newest_number(self.world.disks))
        self._forget_pins(gone | {"host"})
        # a deletion of which only the lost disks knew
        self.buried &= self._noted_deleted(self.look())
        self._start_again(LossClass.NODE)

    def _restart_machine(self) -> None:
        """The power is cut: memory is lost, and what no fsync has made durable. Nobody was told that it is there."""
        self.log.append(f"{self.world.now_s:.0f} s: the machine is restarted")
        self.world.memory.regions.clear()
        self.world.machine.data = None
        messages = {
            (tier, id)
            for tier, disk in self.world.disks.items()
            for id in self._look_at(tier, disk).commits
            if (handle := self.world.handles.get(id)) is not None
            if tier in handle.tiers and handle.done(tier)
        }
        for tier, weather in zip(self.world.disks, self.weathers, strict=True):
            for key in weather.cut_power():
                self.log.append(f"{tier}: {key} is gone")
                self.counts["unsynced"] += 1
        left = self.look()
        for tier, id in messages:
            assert id in left[tier].commits, f"{id} was told to be on {tier}, and the power cut"
        self._forget_pins({"host"})
        self._start_again(LossClass.PROCESS)

    def _newest_number(self, tiers: Iterable[str]) -> int:
        """The newest attempt that a tier knows of."""
        return newest_attempt(self.world.disks[tier] for tier in tiers)

    def _forget_above(self, number: int) -> None:
        """Attempts are counted anew from here on: others will be called the same."""
        for gone_for_ever in (self.deleted, self.buried, self.superseded):
            gone_for_ever -= {id for id in gone_for_ever if id.attempt > number}
        for lost in [lost for lost in self._lives if lost > number]:
            del self._lives[lost]

    def _forget_pins(self, gone: set[str]) -> None:
        """What was pinned on these tiers is lost with them."""
        for id, tiers in list(self.pinned.items()):
            if left := tiers - gone:
                self.pinned[id] = left
            else:
                del self.pinned[id]

    def _shared(self) -> set[str]:
        return {r.name for r in self.world.rules[1:] if RANK[r.survives] >= RANK[LossClass.NODE]}

    def _start_again(self, lost: LossClass) -> None:
        known = self._known(self.before)
        safe = (
            self._durable(self.before, lost) - self._abandoned(known) - self._deleted(self.before)
        )
        self._under_way.clear()
        self.before = self.look()
        self._all_is_well()
        self._lose_sight(lost)
        self.begin_anew(calm=True)
        there = set(self._known(self.look()))
        assert not safe or max(safe) in there, f"{max(safe)} was to survive the loss of a {lost}"
        self._check_said()
        self.lost[lost] = self.lost.get(lost, 0) + 1

    def _lose_sight(self, lost: LossClass) -> None:
        """A tier does not answer this start, or is not mounted; where that could not be told from an empty one, it is
        mounted."""
        draw = self._mounts
        tiers = list(self.world.disks)
        if lost is LossClass.NODE:  # the others are empty
            tiers = sorted(self._shared()) or tiers
        outage = self._outage_of(tier := draw.choice(tiers))
        self.world.unopened = set(self.world.disks) if draw.random() < 0.3 else set()
        if draw.random() < (0.4 if lost is LossClass.NODE else 0.2) and outage.mounted:
            if draw.random() < 0.5 and self.world.remembers(tier):
                self._take_away(tier)
            else:
                outage.down = True
                self.clock.after(draw.uniform(10.0, 600.0), partial(setattr, outage, "down", False))
        for tier in self.world.disks:
            if not self._outage_of(tier).mounted and not self.world.remembers(tier):
                self._outage_of(tier).mount()

    def _check_said(self) -> None:
        """A start says of each tier that it cannot look at that it could not: what lies there is not gone."""
        unread = self.world.door.unread
        if unread:
            self.counts["unread"] += 1
            self.watch.cannot_measure()
        for tier, held in self.look().items():
            if tier != "host" and held.commits and not self._outage_of(tier).answers:
                assert tier in unread, f"{tier} is away, and counts as empty"
        self._check_number()

    def _check_number(self) -> None:
        """No tier knows another attempt by the number of this start, wherever it could look; two may both have begun
        without a look at the other's."""
        attempt = self.world.attempt
        for tier, disk in self.world.disks.items():
            record = disk._objects.get(names.attempt_key("run", attempt.number))
            known = (
                attempt.id if record is None else parse_attempt_record(bytes(record), what=tier).id
            )
            both_blind = {known, attempt.id} <= self.world.blind
            assert known == attempt.id or both_blind, f"{tier} has another attempt {attempt.number}"

    def _unmount(self) -> None:
        """A tier's file system is unmounted, and mounted again after a while; the process may end meanwhile."""
        tier = self._mounts.choice(list(self.world.disks))
        if self._outage_of(tier).can_come_back and self._outage_of(tier).mounted:
            seconds = self._take_away(tier)
            if self._mounts.random() < 0.3:
                self.clock.after(self._mounts.uniform(0.0, seconds), self._die)

    def _fail_syncs(self) -> None:
        """Fsyncs of a tier's folders fail for a while; the power may be cut meanwhile."""
        outage, seconds = self._outage_of(self._mounts.choice(list(self.world.disks))), 600.0
        outage.sync_fails = 0.4
        self.clock.after(seconds, partial(setattr, outage, "sync_fails", 0.0))
        self._cuts_power = self._mounts.random() < 0.5
        self._fails_some.add(outage)

    def _take_away(self, tier: str) -> float:
        outage, seconds = self._outage_of(tier), self._mounts.uniform(20.0, 1200.0)
        self.log.append(f"{self.world.now_s:.0f} s: {tier} is unmounted for {seconds:.0f} s")
        self.counts["unmounted"] += 1
        self._fails_some.add(outage)  # a copy that was under way
        if seconds > 120.0:
            self.watch.cannot_measure()
        outage.unmount(cut_off=self._mounts.random() < 0.5)
        self.clock.after(seconds, outage.mount)
        return seconds

    def _seen(self) -> dict[str, Held]:
        """A restore does without what cannot be looked at: a person said so."""
        seen = self.look()
        for tier in self.world.disks:
            if tier not in self.world.stores or not self._outage_of(tier).answers:
                del seen[tier]
        return seen

    def _choose_restore(self) -> CheckpointId | None:
        chosen = super()._choose_restore()
        is_whole = len(self._seen()) > len(self.world.disks)
        if not is_whole and self._mounts.random() < 0.3:
            self.counts["anew"] += chosen is not None
            return None  # a person begins anew
        return chosen

    def begin_anew(self, *, calm: bool) -> None:
        self._events_seen = 0
        self.left_by_zombies.clear()
        self._train_anew()
        super().begin_anew(calm=calm)
        self._be_calm()

    def go_back_in_process(self) -> None:
        self._all_is_well()
        super().go_back_in_process()
        self._be_calm()

    def _go_on_from(self, id: CheckpointId | None) -> None:
        super()._go_on_from(id)
        if id is not None:
            self.training.go_on_from(id.step)

    def _all_is_well(self) -> None:
        """All that is mounted answers."""
        self._be_calm()
        for weather in self.weathers:
            assert isinstance(weather, Outage)
            weather.down = weather.denied = False
            weather.sync_fails = 0.0

    def _be_calm(self) -> None:
        for weather in self.weathers:
            weather.bad = False

    def _outage_of(self, tier: str) -> Outage:
        weather = self.weathers[list(self.world.disks).index(tier)]
        assert isinstance(weather, Outage)
        return weather

    def _replace_next_folder(self) -> None:
        """The folder of what is saved next is not tierfall's on some tier."""
        self._block_next = self._block.choice(list(self.world.disks))

    def is_blocked(self, tier: str, id: CheckpointId) -> bool:
        return names.step_prefix("run", id) in self._outage_of(tier).blocked

    def mend(self) -> None:
        """Whatever stood in the place of a folder is taken away."""
        for tier in self.world.disks:
            self._outage_of(tier).blocked.clear()

    def check(self) -> None:
        super().check()
        self._check_set_aside()

    def _check_set_aside(self) -> None:
        """What alone cannot be written is set aside, and nothing else, whatever tiers do."""
        events = self.world.door.events
        for event in events[self._events_seen :]:
            if isinstance(event, SetAside):
                self.set_aside.append(event)
                blocked = self.is_blocked(event.tier, event.id)
                blocked |= self._outage_of(event.tier) in self._fails_some
                blocked |= self._is_rotten(event.id)  # it may have no good source
                assert blocked, f"{event.id} is set aside, and can be written to {event.tier}"
        self._events_seen = len(events)

    def check_mended(self, was_set_aside: list[SetAside]) -> None:
        """The next start brings what can be written now, where neither a rule nor want of room keeps it off."""
        now = self.look()
        gone = self._abandoned(self._known(now)) | self._deleted(now)
        owed = {(event.tier, event.id) for event in was_set_aside}
        for event in was_set_aside:
            rules = self.world.rules_of(event.tier)
            commit = self._known(now).get(event.id)
            if (
                commit is None
                or event.id in gone
                or self._is_full(rules.name, now, below=low(rules))
            ):
                continue
            beside = {id: c for id, c in now[rules.name].commits.items() if id not in gone}
            both = {**beside, event.id: commit}
            # what is damaged unseen takes up a place there, and where this start had it to bring
            both |= {
                id: c
                for (t, id), (_, c) in self.rotten.items()
                if t == rules.name or (rules.name, id) in owed
            }
            if not rules.retain or event.id in self.wants[rules.name].wanted(
                both, self.world.wall_s
            ):
                assert event.id in beside, f"{event.id} is not owed to {rules.name} any more"

    def _outage(self) -> None:
        """A tier answers nothing, or badly, for some minutes, or refuses everything for a while."""
        weather = self.draw.choice(self.weathers)
        assert isinstance(weather, Outage)
        how, seconds = self.draw.choice(("down", "bad")), self.draw.uniform(10.0, 600.0)
        if self._block.random() < 0.3:
            # briefly: what saves cost cannot be measured while no copy is begun
            how, seconds = "denied", self._block.uniform(10.0, 120.0)
            if weather in self._denied:  # one copy may meet both, and others come in between
                self._fails_some.add(weather)
            self._denied.add(weather)
        setattr(weather, how, True)
        self.clock.after(seconds, lambda: setattr(weather, how, False))

    def _person(self) -> None:
        self.draw.choices(
            (self.pin, self.unpin, self.delete, self.decide_from_outside), (3, 2, 1, 1)
        )[0]()
        self._drain()

    def _drain(self) -> None:
        """A deadline comes up: what the lanes take changes, and nothing that was promised."""
        until_s = self.world.now_s + self._drains.choice((0.5, 5.0, 50.0))
        self.log.append(f"drain until {until_s:.1f}")
        self.world.coordinator.drain_schedule.begin(self._drains.random(), until_s)

    def settle(self) -> None:
        self._all_is_well()
        for tier in self.world.disks:
            self._outage_of(tier).mount()
        super().settle()


def low(rules: TierRules) -> float:
    """The share of its capacity that a tier is kept below."""
    return rules.evict_low or rules.evict_high or 1.0


def run_hour(seed: int, *, seconds: float = HOUR_S) -> Hour:
    """Live through one hour; what is wrong is said with the seed, how to see it again, and what happened."""
    hour = Hour(seed)
    try:
        hour.go_for(seconds)
        hour.watch.end()
        hour.settle()
        hour.check_settled()
        was_set_aside = [e for e in hour.world.door.events if isinstance(e, SetAside)]
        hour.mend()
        hour.begin_anew(calm=True)
        hour.settle()
        hour.check_settled()
        hour.check_mended(was_set_aside)
        hour.check_facts_are_true()
        check_restorable(hour)
        check_tries(hour.log)
        for lived in hour.world.lives:
            check_life(lived)
    except (AssertionError, TierfallError, KeyError) as error:
        rules = "\n".join(map(str, hour.world.rules))
        raise AssertionError(
            f"seed {seed}: {error!r} (again: python -m tests.simulation --first {seed} --seeds 1)\n"
            f"{rules}\n{live(hour)}"
        ) from error
    return hour
