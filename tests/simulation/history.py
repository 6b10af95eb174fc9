"""Histories: what may happen to a run, drawn by a seed, and what must hold after each event whatever happened.

The checks look at disks and memory, with rules of their own: nothing here asks the planner or the policies what is
true.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.memory_backend import MemoryBackend
from tests.rules import NEWEST_FIRST, SCATTERED, order
from tests.simulation.door import Answer
from tests.simulation.wants import Wants, draw_wants
from tests.simulation.weather import Weather, draw_faults
from tests.simulation.world import (
    CHUNK,
    IMAGE,
    SHARD,
    CommitReader,
    World,
    abandoned,
    decided_on,
    file_rules,
    flip_bit,
    image_key,
    read_image,
    start_in,
)
from tierfall.core.capture.snapshot import Snapshot
from tierfall.core.flush.tasks import CommandKind, DeleteCopy, Task
from tierfall.core.format.commit_files import image_file
from tierfall.core.format.decided import Decided, DecidedList, Word
from tierfall.core.format.documents import sha256
from tierfall.core.format.records import Commit
from tierfall.core.types import keys
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import CapacityError, CaptureError
from tierfall.core.types.values import (
    LOSS_CLASSES,
    CheckpointId,
    Codec,
    LossClass,
    SaveOutcome,
    WhenFull,
)
from tierfall.core.types.view import TierRules
from tierfall.tiers.stored import StoredTier

RANK = {LossClass.NONE: 0, LossClass.PROCESS: 1, LossClass.NODE: 2, LossClass.SITE: 3}
GARBAGE = b"\x55" * IMAGE
MAX_WAIT_S = 5.0
PATIENCE_S = 600.0


def draw_rules(draw: random.Random, seed: int) -> tuple[list[TierRules], dict[str, Wants]]:
    """One to three tiers, the second or third of them perhaps shared, small or sparing, and what each is to retain."""
    rules, wants = [], {}
    retain = random.Random(f"retain {seed}")
    for place, name in enumerate(("nvme", "disk", "pfs")[: draw.choice((1, 2, 2, 3))]):
        shared = place > 0 and draw.random() < 0.6
        flush_every = draw.choice((1, 1, 1, 2, 3))
        wants[name] = Wants(last=draw.choice((None, 1, 1, 2, 3)))
        if retain.random() < 0.6:
            wants[name] = draw_wants(retain)
        high = retain.choice((None, None, 0.7, 1.0))
        rules.append(
            file_rules(
                name,
                shared=shared,
                flush_every=flush_every,
                retain=wants[name].rules(),
                capacity_bytes=draw.choice((None, None, int(2.5 * IMAGE), int(3.5 * IMAGE))),
                evict_high=high,
                evict_low=high and retain.choice((None, 0.5)),
                evict=retain.choice((None, None, order("oldest"))),
            )
        )
    return rules, wants


@dataclass
class Asked:
    """A save that waits for its region."""

    step: int
    deadline_s: float
    answer: list[Any]


@dataclass
class Held:
    """What lies on one disk, or in memory, as a look at the bytes finds it, and what is decided by the disk's list."""

    commits: dict[CheckpointId, Commit] = field(default_factory=dict)
    decided: DecidedList = field(default_factory=DecidedList)


class History:
    """One run's life: what may happen in it, and what must hold whatever happened."""

    make_world: type[World] = World
    make_weather: type[Weather] = Weather

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(f"history {seed}")
        self.weathers: list[Weather] = []
        self._folders = random.Random(f"folders {seed}")
        stored = random.Random(f"stored {seed}")
        memory = random.Random(f"memory {seed}")
        self.when_full = memory.choice((*WhenFull, WhenFull.SUPERSEDE))
        order = random.Random(f"order {seed}")
        own = random.Random(f"own order {seed}").choice((NEWEST_FIRST, SCATTERED))
        drawn, self.wants = draw_rules(self.draw, seed)
        rules = [
            replace(
                rules,
                flush_order=order.choice((None, own, None)),
                when_full=order.choice((WhenFull.SKIP, *[WhenFull.SUPERSEDE] * 2, *[None] * 3)),
            )
            for rules in drawn
        ]
        self.gives_up = self.when_full is WhenFull.SUPERSEDE or any(
            r.when_full in (WhenFull.SKIP, WhenFull.SUPERSEDE) for r in rules
        )
        self.world = self.make_world(
            rules,
            memory_images=self.draw.choice((1, 2, 2, 3, 4)) + memory.choice((0, 0, 1)),
            seed=seed,
            max_wait_s=MAX_WAIT_S,
            when_full=self.when_full,
            wrap=self._wrap,
            codecs={tier.name: stored.choice((*Codec, Codec.NONE)) for tier in rules},
            run_bytes_min=stored.choice((0, 2 * CHUNK)),
        )
        self.world.sees = self._check_retained
        self.log = self.world.trace
        self.step = 0
        self.asked: list[Asked] = []
        self.captures: list[tuple[Snapshot, int]] = []
        self.pinned: dict[CheckpointId, set[str]] = {}
        self.unpins: Counter[CheckpointId] = Counter()
        self.unpinning: Counter[CheckpointId] = Counter()
        self.deleted: set[CheckpointId] = set()
        self.buried: set[CheckpointId] = set()
        self.ever: dict[CheckpointId, Commit] = {}
        self.superseded: set[CheckpointId] = set()
        self._drops: dict[int, DeleteCopy] = {}
        self._read = CommitReader().read
        self._judged: dict[int, object] = {}
        self.seen_drops: list[DeleteCopy] = []
        self.purges = random.Random(f"purge {seed}")
        self.purged: set[tuple[str, CheckpointId]] = set()
        self.rot = random.Random(f"rot {seed}")
        self.rotten: dict[tuple[str, CheckpointId], tuple[object, Commit]] = {}
        self.left_by_zombies: set[tuple[str, str]] = set()
        self.skews = random.Random(f"clock {seed}")
        self._starts: set[tuple[int, int]] = set()
        self._lives: dict[int, set[str]] = {}
        """The ids of the attempts of each number that have ever committed something."""
        self.before = self.look()

    def _wrap(self, name: str, inner: Backend) -> Backend:
        assert isinstance(inner, MemoryBackend)
        plan = draw_faults(self.draw, has_folders=self._folders.random() < 0.7)
        self.weathers.append(self.make_weather(inner, seed=len(self.weathers), plan=plan))
        return self.weathers[-1]

    # Events ------------------------------------------------------------------------------------------

    def ask_for(self, step: int) -> None:
        self.step = step
        self.log.append(f"save {step}")
        deadline = self.world.now_s + MAX_WAIT_S
        self.asked.append(Asked(step, deadline, self.world.ask_for_region(step)))
        assert self.when_full is not WhenFull.SKIP or self.asked[0].answer, "a save waits"

    def take_answers(self) -> None:
        for asked in list(self.asked):
            if not asked.answer:
                assert self.world.now_s < asked.deadline_s, "a save waits past max_wait"
                continue
            self.asked.remove(asked)
            region, error = asked.answer
            if error is None:
                snapshot = self.world.begin(asked.step, region)
                region.image[:] = GARBAGE  # above the watermark nothing is what it will be
                self.captures.append((snapshot, 0))
                self.world.step()

    def capture_on(self) -> None:
        """Let the watermark rise, and the capture end at last."""
        for number, (snapshot, final) in enumerate(self.captures):
            count = snapshot.image_plan.chunk_count
            final = self.draw.randint(final, count)
            end = snapshot.image_plan.chunk_range(final - 1)[1] if final else 0
            snapshot.region.image[:end] = self.world.image(snapshot.id)[:end]
            self.captures[number] = (snapshot, final)
            if final == count:
                self.captures.pop(number)
                self.world.seal(snapshot)
            else:
                self.world.advance(snapshot, final)
            self.world.step()
            return

    def fail_capture(self) -> None:
        for snapshot, _ in self.captures:
            self.captures.clear()
            self.world.fail_capture(snapshot, CaptureError("on purpose"))
            self.world.step()
            return

    def _order(self, kind: CommandKind, id: CheckpointId) -> list[Answer]:
        self.log.append(f"{kind} {id}")
        answer: list[Answer] = []
        number = self.unpins[id]

        def tell(failed: Answer) -> None:
            answer.append(failed)
            self.unpinning[id] -= kind is CommandKind.UNPIN
            if kind is CommandKind.PIN and not failed and number == self.unpins[id]:
                self.pinned[id] = {t for t, held in self.look().items() if id in held.commits}
                self.log.append(f"{id} is pinned on {sorted(self.pinned[id])}")

        self.world.door.command(kind, id, tell)
        self.world.step()
        return answer

    def _any(self) -> CheckpointId | None:
        known = sorted({id for held in self.look().values() for id in held.commits})
        return self.draw.choice(known) if known else None

    def pin(self) -> None:
        if (id := self._any()) is not None and not self._is_rotten(id):
            self._order(CommandKind.PIN, id)

    def unpin(self) -> None:
        id = self.draw.choice(sorted(self.pinned)) if self.pinned else self._any()
        if id is not None:
            self.pinned.pop(id, None)
            self.unpins[id] += 1
            self.unpinning[id] += 1
            self._order(CommandKind.UNPIN, id)

    def delete(self) -> None:
        if (id := self._any()) is not None and id not in self.pinned:
            self.deleted.add(id)
            self._order(CommandKind.DELETE, id)

    def decide_from_outside(self) -> None:
        """A command line beside the trainer adds to the list of a tier."""
        tier = self.draw.choice(sorted(self.world.disks))
        held = self.look()[tier].commits
        if not held:
            return
        id = self.draw.choice(sorted(held))
        word = self.draw.choice((Word.PIN, Word.DELETED))
        if word is Word.DELETED:
            if id in self.pinned:
                return  # a command line refuses to delete what is pinned
            self.deleted.add(id)
            self.buried.add(id)
        elif id not in self.deleted and not self.unpinning[id] and not self._is_rotten(id):
            self.pinned.setdefault(id, set()).add(tier)
        self.log.append(f"{word} of {id} on {tier} from outside")
        entry = self._decided(self.look()).next(word, id, held[id].lineage.attempt_id)
        self._clean(tier).decided.add(entry)

    def begin_anew(self, *, calm: bool) -> None:
        """The process dies; the next one restores, mostly what is newest, and goes on."""
        self.world.crash()
        if self.purges.random() < 0.3:
            self.purge()
        if self.rot.random() < 0.9:
            self.rot_silently()
        self.world.wall_ahead_s = self.skews.choice((0.0, 0.0, -1000.0, 1000.0, 1e9))
        self.asked.clear()
        self.captures.clear()
        self.unpinning.clear()
        self.world.handles.clear()
        for weather in self.weathers:
            weather.bad = not calm
        self.world.start()
        for weather in self.weathers:
            weather.bad = True
        self._forget_pins_of_memory()
        self._go_on_from(self._choose_restore())
        self.world.step()

    def _forget_pins_of_memory(self) -> None:
        """The pin of an image that is only in memory is in the lists of the tiers: it holds for a start that can read
        one of them."""
        known = self.world.door.ledger.decided
        for id in [id for id, tiers in self.pinned.items() if tiers == {"host"}]:
            if not known.is_pinned(id, None):
                del self.pinned[id]

    def purge(self) -> None:
        """While no trainer lives a tier loses an image; its commit record stays. A tier that survives as much has
        another copy."""
        now = self.look()
        spare = self._twice(now)
        if not spare:
            return
        tier, id = self.purges.choice(spare)
        del self.world.disks[tier]._objects[image_key(now[tier].commits[id])]
        self.log.append(f"the image of {id} is purged on {tier}")
        self.purged.add((tier, id))

    def _twice(self, now: dict[str, Held]) -> list[tuple[str, CheckpointId]]:
        """Name the copies that a tier may lose: one that survives as much has another."""
        ranks = {rules.name: RANK[rules.survives] for rules in self.world.rules[1:]}
        return [
            (tier, id)
            for tier in sorted(ranks)
            for id in sorted(now[tier].commits)
            if id not in self.pinned
            if any(
                id in now[other].commits and ranks[other] >= ranks[tier]
                for other in ranks
                if other != tier
            )
        ]

    def rot_silently(self) -> None:
        """While no trainer lives a bit flips in the newest image that a tier has: no listing tells. Another tier that
        survives as much, or memory, has it too."""
        now = self.look()
        spare = self._twice(now)
        for tier in self.world.disks:
            newest = max(now[tier].commits, default=None)
            if newest in now["host"].commits and newest not in self.pinned:
                assert newest is not None
                spare.append((tier, newest))
        if not spare:
            return
        tier, id = max(spare, key=lambda copy: (copy[1], self.rot.random()))
        commit = now[tier].commits[id]
        data = flip_bit(self.world.disks[tier], image_key(commit), self.rot)
        self.log.append(f"a bit of {id} flips on {tier}")
        self.rotten[tier, id] = data, commit
        self.before = self.look()

    def go_back_in_process(self) -> None:
        """A restore after a save takes a new attempt."""
        if self.asked or self.captures or self.draw.random() < 0.5:
            return
        chosen = self._choose_restore()
        if chosen is None:
            return
        for weather in self.weathers:
            weather.bad = False
        self.world.take_new_attempt()
        for weather in self.weathers:
            weather.bad = True
        self._go_on_from(chosen)
        self.world.step()

    def _choose_restore(self) -> CheckpointId | None:
        known = self._known(self._seen())
        fit = sorted(id for id in known if id not in self._deleted(self.look()))
        live = [id for id in fit if id not in self._abandoned(known)]
        if not live:
            return None
        if self.draw.random() < 0.7:
            return live[-1]
        return self.draw.choice(fit if self.draw.random() < 0.2 else live)

    def _go_on_from(self, id: CheckpointId | None) -> None:
        self.log.append(f"attempt {self.world.attempt.number} goes on from {id}")
        self.world.started_from = id
        self.world.ordinal = 0 if id is None else self._known(self.look())[id].lineage.ordinal
        self.world.door.continue_from(id, attempt=self.world.attempt.number)
        self.step = -1 if id is None else id.step

    def settle(self) -> None:
        """Let storage heal, every capture end, all work be done, and what was asked from outside be seen."""
        for weather in self.weathers:
            weather.bad = False
        self._work_off()
        while self.captures or self.asked:
            self.capture_on()
            self._work_off()
        self.world.door.apply_rules()
        self._work_off()
        self.log.append("settled")

    def _work_off(self) -> None:
        """Carry out every task, letting time pass where that is waited for, and look after each."""
        until = self.world.now_s + PATIENCE_S
        while True:
            next_s = self.world.step()
            self.take_answers()
            self.check()
            if self.world.run_one():
                continue
            next_s = self.world.step()
            if self.world.tasks or (self.asked and self.asked[0].answer):
                continue
            if next_s is None or next_s > until:
                return
            self.world.now_s = max(self.world.now_s, next_s)

    # Looking -----------------------------------------------------------------------------------------

    def _clean(self, tier: str) -> StoredTier:
        """A tier as another process sees it, which no fault strikes."""
        return StoredTier(name=tier, run="run", backend=self.world.disks[tier])

    def _seen(self) -> dict[str, Held]:
        """What a restore finds."""
        return self.look()

    def look(self) -> dict[str, Held]:
        """What is committed on every disk, so that no power cut takes it away, and sealed in memory."""
        self._starts.clear()
        found = {tier: self._look_at(tier, disk) for tier, disk in self.world.disks.items()}
        for tier, weather in zip(self.world.disks, self.weathers, strict=True):
            for key in weather.unsynced & self.world.disks[tier]._objects.keys():
                if (id := self._id_of(key)) is not None:
                    found[tier].commits.pop(id, None)
        memory = found.setdefault("host", Held())
        for region in self.world.memory.regions:
            if region.sealed:
                commit = self._read(region.commit())
                memory.commits[commit.lineage.checkpoint] = commit
        return found

    def _id_of(self, key: str) -> CheckpointId | None:
        """Return whose file an object is; None where it is no checkpoint's."""
        return keys.parse_step_folder(key.removeprefix("run/").partition("/")[0])

    def _look_at(self, tier: str, disk: MemoryBackend) -> Held:
        held = Held(decided=decided_on([disk]))
        for key, data in disk._objects.items():
            folder, _, rest = key.removeprefix("run/").partition("/")
            if (began := start_in(key)) is not None:
                attempt, attempt_id, step = began
                self._starts.add((attempt, step))
                self._lives.setdefault(attempt, set()).add(attempt_id)
            id = keys.parse_step_folder(folder)
            if id is not None and rest == keys.COMMIT_NAME:
                held.commits[id] = self._read(data)
        for id in [id for where, id in self.purged if where == tier]:
            commit = held.commits.get(id)
            file = None if commit is None else image_file(commit, SHARD)
            if file is None or keys.step_prefix("run", id) + file.file.name in disk._objects:
                self.purged.discard((tier, id))  # it has gone
            else:
                del held.commits[id]
        for id in [id for where, id in self.rotten if where == tier]:
            data, commit = self.rotten[tier, id]
            file = image_file(commit, SHARD)
            assert file is not None
            if disk._objects.get(keys.step_prefix("run", id) + file.file.name) is data:
                held.commits.pop(id, None)
            else:
                del self.rotten[tier, id]  # it has gone
        return held

    def _is_taken_twice(self, id: CheckpointId) -> bool:
        """Say whether two attempts have the number: one of them counts, and what the other saved is passed over. One
        that has committed nothing may have left something in memory."""
        in_memory = {
            commit.lineage.attempt_id
            for commit in self.before["host"].commits.values()
            if commit.lineage.checkpoint.attempt == id.attempt
        }
        return len(self._lives.get(id.attempt, set()) | in_memory) > 1

    def _is_rotten(self, id: CheckpointId) -> bool:
        """Say whether a tier has a copy that nobody knows to be damaged: what is pinned may rely on it."""
        return any(id == rotten for _, rotten in self.rotten)

    def _bad(self) -> set[tuple[str, CheckpointId]]:
        """Copies that are damaged, seen or unseen."""
        return self.purged | self.rotten.keys()

    def _known(self, now: dict[str, Held]) -> dict[CheckpointId, Commit]:
        return {id: commit for held in now.values() for id, commit in held.commits.items()}

    def _abandoned(self, known: dict[CheckpointId, Commit]) -> set[CheckpointId]:
        return abandoned(known, self._starts)

    def _decided(self, now: dict[str, Held]) -> DecidedList:
        entries: set[Decided] = set()
        return DecidedList(entries.union(*(held.decided.entries for held in now.values())))

    def _deleted(self, now: dict[str, Held]) -> set[CheckpointId]:
        """What a person has deleted, here or by a command line, pinned or not."""
        return self._noted_deleted(now) | self.deleted

    def _noted_deleted(self, now: dict[str, Held]) -> set[CheckpointId]:
        return {e.checkpoint for e in self._decided(now) if e.word is Word.DELETED}

    def _pinned(self, now: dict[str, Held]) -> set[CheckpointId]:
        decided = self._decided(now)
        return {id for id in decided.checkpoints if decided.is_pinned(id, None)}

    # What must hold ----------------------------------------------------------------------------------

    def check(self) -> None:
        now = self.look()
        self._check_bytes(now)
        self._check_pins(now)
        self._check_newest(now)
        self._check_drops(now)
        self._check_handles(now)
        self._check_superseded(now)
        self._check_lives(now)
        self.before = now

    def _check_lives(self, now: dict[str, Held]) -> None:
        """All checkpoints of one attempt's number are of one attempt: else two of them may share a name. Two may take a
        number of which neither could see that the other has it."""
        ids: dict[int, str] = {}
        for tier, held in now.items():
            for id, commit in held.commits.items():
                other = commit.lineage.attempt_id
                lives = {ids.setdefault(id.attempt, other), other}
                assert len(lives) == 1 or lives <= self.world.blind, f"{id} on {tier} is another's"

    def _check_bytes(self, now: dict[str, Held]) -> None:
        """Invariant 1, and 5: what is committed holds the bytes of that step and attempt, on every tier alone."""
        for tier, disk in self.world.disks.items():
            for checkpoint, commit in now[tier].commits.items():
                prefix = keys.step_prefix("run", checkpoint)
                file = image_file(commit, SHARD)
                assert file is not None
                image = disk._objects.get(prefix + file.file.name)
                manifest = disk._objects.get(prefix + keys.manifest_name(SHARD))
                assert image is not None, f"{checkpoint} is committed on {tier} without its image"
                assert manifest is not None, f"{checkpoint} is committed on {tier} without manifest"
                if id(image) in self._judged:
                    continue
                assert len(image) == file.file.bytes, f"wrong length on {tier}"
                found = read_image(self._clean(tier), commit)
                assert found == self.world.image(checkpoint), f"wrong bytes on {tier}"
                named = commit.file(keys.manifest_name(SHARD))
                assert named is not None
                assert named.digest == sha256(bytes(manifest))
                assert commit.lineage.checkpoint == checkpoint
                self._judged[id(image)] = image  # keeps the object, and so its id
        for region in self.world.memory.regions:
            if region.sealed:
                sealed = self._read(region.commit()).lineage.checkpoint
                assert bytes(region.image) == self.world.image(sealed), "wrong bytes in memory"

    def _check_pins(self, now: dict[str, Held]) -> None:
        """Invariant 3: what is pinned stays, on each tier where it lay; memory may go where a tier has it."""
        for id, tiers in self.pinned.items():
            for tier in tiers - {"host"}:
                assert id in now[tier].commits, f"{id} was pinned on {tier} and is gone"
            assert any(id in held.commits for held in now.values()), f"{id} was pinned and is gone"

    def _check_newest(self, now: dict[str, Held]) -> None:
        """Invariants 2 and 3: per loss class, the durable live checkpoint that a restart takes stays, or a newer one
        takes its place, unless a person deleted it or the run went back behind it."""
        known = self._known(self.before) | self._known(now)
        left = self._abandoned(known)
        deleted = self._deleted(now)
        for lost in LOSS_CLASSES:
            had = self._durable(self.before, lost) - left - deleted
            had = {id for id in had if not self._is_taken_twice(id)}  # which one counts may change
            has = (
                self._durable(now, lost) - left
            )  # what is to be deleted counts for as long as it is there
            if had:
                assert has, f"nothing survives the loss of a {lost} any more: {max(had)} did"
                # What this start went on from counts as accepted, or, to a restart that knows nothing of it, not.
                starts = (None, self.world.started_from)
                taken = {_taken_by_a_restart(had | has, known, start) for start in starts}
                gone = ", ".join(map(str, taken))
                assert taken & has, f"{gone} survived the loss of a {lost}, and is gone"

    def _durable(self, held: dict[str, Held], lost: LossClass) -> set[CheckpointId]:
        return {
            id
            for rules in self.world.rules[1:]
            if RANK[rules.survives] >= RANK[lost]
            for id in held[rules.name].commits
        }

    def _check_drops(self, now: dict[str, Held]) -> None:
        """A line that was left behind goes by retention only once the new one is as safe."""
        known = self._known(now)
        left = self._abandoned(known)
        for task in self.world.tasks:
            if not isinstance(task, DeleteCopy) or id(task) in self._drops:
                continue  # a person may have deleted since what it was judged by
            self._drops[id(task)] = task
            if "left behind" not in task.reason:
                continue
            need = RANK[self.world.rules_of(task.tier).survives]
            assert any(
                id.attempt > task.id.attempt and id not in left
                for rules in self.world.rules[1:]
                if RANK[rules.survives] >= need
                for id in now[rules.name].commits
            ), f"{task.id} leaves {task.tier}, and the new line has nothing that is as safe"

    def _check_retained(self, task: Task) -> None:
        """What no rule is said to keep, none wants, among all that lies there and was not left behind: asked as the
        drop is decided, since a person may delete another one a moment later."""
        if (
            not isinstance(task, DeleteCopy)
            or task.unfinished
            or "no rule keeps it" not in task.reason
        ):
            return
        again = any(task is seen for seen in self.seen_drops)
        if again or self.world.door.unread:
            return  # what lies where it could not look, it cannot count
        self.seen_drops.append(task)
        now = self.look()
        left = self._abandoned(self._known(now))
        # the run may not have read yet what a command has just deleted: such a checkpoint is counted
        held = {id: c for id, c in now[task.tier].commits.items() if id not in left}
        # what nobody has read yet takes up a place; what is noted as damaged does not, but for its own decision
        noted = now[task.tier].decided
        held |= {
            id: c
            for (tier, id), (_, c) in self.rotten.items()
            if tier == task.tier
            if id == task.id or not noted.is_damaged(id, c.lineage.attempt_id)
        }
        wanted = self.wants[task.tier].wanted(held, self.world.wall_s)
        assert task.id not in wanted, f"{task.id} is to stay on {task.tier}: {task.reason}"

    def _check_handles(self, now: dict[str, Held]) -> None:
        for id, handle in self.world.handles.items():
            for tier in handle.tiers:
                if id in now[tier].commits:
                    self.ever[id] = now[tier].commits[id]
                elif handle.done(tier):
                    assert id in self.ever, f"{id} is told to be on {tier} and never was"

    def _check_superseded(self, now: dict[str, Held]) -> None:
        """What was given up is nowhere, and never again; and it was neither pinned, nor the newest, in memory or on its
        way to where it survives a loss."""
        messages = {
            id for id, h in self.world.handles.items() if h.outcome is SaveOutcome.SUPERSEDED
        }
        for id in self.superseded | messages:
            there = [tier for tier, held in now.items() if id in held.commits]
            assert not there, f"{id} was superseded, and is on {there}"
        for id in messages - self.superseded:
            self.superseded.add(id)
            assert self.gives_up, f"{id} is superseded, and no tier asks for that"
            assert id not in self.pinned, f"{id} was pinned, and is superseded"
            handle = self.world.handles[id]
            assert isinstance(handle.exception(), CapacityError)
            for wait in (handle.captured, handle.wait):
                with pytest.raises(CapacityError, match=f"superseded by step {self.step}:"):
                    wait(timeout=0)
            self._check_missed(id, now)

    def _check_missed(self, id: CheckpointId, now: dict[str, Held]) -> None:
        assert id in self.before["host"].commits, f"{id} was not sealed, and is superseded"
        for tier in self.world.disks:  # one that it has left at the same moment has had it
            left = self.log[-1] == f"DeleteCopy {id} on {tier}: done"
            assert left or id not in self.before[tier].commits, f"{id} was on {tier}"
        known = self._known(now)
        commit = self.before["host"].commits[id]
        if id in self._abandoned(known | {id: commit}):
            return
        newer = {i for i in set(known) - self._abandoned(known) - self._deleted(now) if i > id}
        assert newer & set(now["host"].commits), f"{id} was the newest in memory"
        for rules in self.world.rules[1:]:
            if commit.lineage.ordinal % rules.flush_every or rules.name not in self.world.stores:
                continue
            assert any(
                i in now[other.name].commits
                or (i in now["host"].commits and not known[i].lineage.ordinal % other.flush_every)
                for other in self.world.rules[1:]
                if RANK[other.survives] >= RANK[rules.survives]
                for i in newer
            ), f"{id} was the newest on its way to {rules.name}, or any that survives as much"

    def check_settled(self) -> None:
        """Invariant 7, and that all comes to an end: nothing half done, nothing owed that could be had, nothing left
        lying about."""
        world, door = self.world, self.world.door
        now = self.look()
        assert not door.is_busy, "the planner is still busy"
        pinned = self._pinned(now)
        left_undone = door.owed
        for id, tier in left_undone:
            free = not (self._is_full(tier, now) or self.is_blocked(tier, id))
            assert not free, f"{id} is still owed to {tier}, which has room"
        unread = door.unread  # what lies there is for the next start to see
        for tier, disk in world.disks.items():
            for key in disk._objects:
                folder, _, _rest = key.removeprefix("run/").partition("/")
                id = keys.parse_step_folder(folder)
                known = id is None or id in now[tier].commits or tier in unread
                known |= (tier, id) in self._bad() or (tier, key) in self.left_by_zombies
                known |= (id, tier) in left_undone  # it is written over once there is room
                assert known, f"{tier}: {key} is a leftover"
            gone = self._noted_deleted({t: now[t] for t in now.keys() - unread}) | self.buried
            for id in set(now[tier].commits) & gone - pinned - set(self.pinned):
                unseen = id not in door.whole_on(tier) or tier in unread
                # another start has its number, or the list that says so could not be read
                postponed = door.is_fenced or bool(unread)
                assert unseen or postponed, f"{id} was deleted, and is still on {tier}"
            latest = self._clean(tier).latest.read()
            there = latest in now[tier].commits or (tier, latest) in self._bad()
            assert latest is None or there, f"{tier}: latest names {latest}"
        owed = {id for id, _ in left_undone}
        for id, handle in world.handles.items():
            messages = handle.outcome is not SaveOutcome.PENDING
            assert messages or id in owed, f"whoever waits for {id} waits for ever"
        kept = set(now["host"].commits) & self.buried - pinned - set(self.pinned)
        kept &= self._noted_deleted({tier: now[tier] for tier in now.keys() - unread})
        kept -= kept if door.is_fenced else set()
        assert not kept, f"{kept} was deleted from outside, and is still in memory"
        assert all(region.sealed for region in world.memory.regions), "memory is leaked"
        # a commit whose answer was lost before the copy was given up is found by the next start
        purged = {id for _, id in self._bad()}
        assert set(door.checkpoints) <= set(self._known(now)) | purged, "what is not there is known"
        for checkpoint in door.checkpoints.values():
            assert not any(checkpoint.leases.values()), f"{checkpoint.id} is leased for ever"

    def is_blocked(self, tier: str, id: CheckpointId) -> bool:
        """Say whether nothing can be made in a checkpoint's folder on a tier."""
        return False

    def check_facts_are_true(self) -> None:
        """After a start that could look everywhere, the planner knows what lies there."""
        now = self.look()
        for tier, held in now.items():
            messages = self.world.door.whole_on(tier)
            messages -= {id for where, id in self.rotten if where == tier}
            messages = {id for id in messages if not self._is_taken_twice(id)}
            there = {id for id in held.commits if not self._is_taken_twice(id)}
            assert messages == there, f"{tier}: the planner says {messages}"
        self._check_flushed(now)

    def _check_flushed(self, now: dict[str, Held]) -> None:
        """What an earlier start left in memory has come to every tier that is owed it."""
        gone = self._abandoned(self._known(now)) | self._noted_deleted(now)
        gone |= {id for id in now["host"].commits if self._is_taken_twice(id)}
        for rules in self.world.rules[1:]:
            there = set(now[rules.name].commits) - gone
            due_there = {
                id: commit
                for id, commit in now["host"].commits.items()
                if id not in gone and commit.lineage.ordinal % rules.flush_every == 0
            }
            both = {**due_there, **{id: now[rules.name].commits[id] for id in there}}
            wanted = self.wants[rules.name].wanted(both, self.world.wall_s)
            sends_all = not (rules.in_order or rules.retain or rules.capacity_bytes)
            for id in due_there:
                due = id in wanted or not rules.retain
                beside = there | {i for tier, i in self._bad() if tier == rules.name}
                passed = id in beside or (not sends_all and any(other > id for other in beside))
                full = self._is_full(rules.name, now, below=rules.evict_high or 1.0)
                evicted = f"DeleteCopy {id} on {rules.name}: done" in self.log
                assert not due or passed or full or evicted, (
                    f"{id} lies in memory, and never came to {rules.name}"
                )

    def _is_full(self, tier: str, now: dict[str, Held], *, below: float = 1.0) -> bool:
        """Say whether another image is more than so much of a tier's capacity takes."""
        capacity = self.world.rules_of(tier).capacity_bytes
        if capacity is None:
            return False
        used = sum(len(data) for data in self.world.disks[tier]._objects.values())
        return used + IMAGE > below * capacity


def _taken_by_a_restart(
    ids: set[CheckpointId], known: dict[CheckpointId, Commit], start: CheckpointId | None
) -> CheckpointId:
    """The newest; but one with NaN is passed over if an older one has less. A restart does not go behind the one from
    which a training that is passed over went on, nor behind ``start`` while that is there."""
    newest_first = sorted(ids, reverse=True)
    for place, id in enumerate(newest_first):
        passed = [known[each] for each in newest_first[: place + 1]]
        starts = [commit.lineage.started_from for commit in passed] + [start] * (start in ids)
        least = max((start.step for start in starts if start is not None), default=-1)
        if not any(
            older.step >= least
            and all({*commit.not_finite} - {*known[older].not_finite} for commit in passed)
            for older in newest_first[place + 1 :]
        ):
            return id
    raise AssertionError("no step is there")


def check_restorable(history: History) -> None:
    """What a look at any single tier calls committed can be read from it, chunk by chunk."""
    for tier in history.world.disks:
        store = history._clean(tier)
        listing = store.list()
        assert listing.error is None
        for copy in listing.copies:
            assert copy.commit is not None
            if (tier, copy.id) in history.rotten:
                continue
            if copy.damage is not None:
                assert (tier, copy.id) in history.purged, f"{copy.id} is damaged on {tier}"
                continue
            assert read_image(store, copy.commit) == history.world.image(copy.id)


def live(history: History) -> str:
    return "\n".join(history.log[-120:])
