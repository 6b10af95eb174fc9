"""Histories of several ranks: what may happen to them, drawn by a seed, and what must hold whatever happened.

The checks look at disks, memory, handles and what rank 0 has said. The planners are asked only whether they agree.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.faults import Fault, FaultKind, Operation
from tests.simulation.many import NODE_TIER, SHARED_TIER, Many
from tests.simulation.many_orders import Person
from tests.simulation.many_storage import Damage
from tests.simulation.rank import CUT, Rank, image_of
from tests.simulation.wants import draw_wants
from tests.simulation.world import IMAGE, file_rules, read_image
from tierfall.core.capture.snapshot import ReplicaShare, Snapshot
from tierfall.core.flush.tasks import CommitCopy, Task
from tierfall.core.format.commit_files import image_file
from tierfall.core.format.documents import sha256
from tierfall.core.format.records import Commit
from tierfall.core.image.dedup import ReplicaDigests
from tierfall.core.ranks.messages import Topic
from tierfall.core.types import keys as names
from tierfall.core.types.errors import (
    BackendError,
    CaptureError,
    StorageFullError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId, Codec, CopyState, SaveOutcome, WhenFull
from tierfall.tiers.stored import StoredTier

MAX_WAIT_S = 30.0
KEYS = "run/step-*"
COMMITS = "run/step-*/commit.json"
UNLIKE = 0.05
"""So often ranks that compare what they hold find that it is not alike."""
ENTRY_BYTES = IMAGE + 2000
"""About what one rank's part takes on a tier, records included."""


@dataclass
class Loop:
    """One rank's training loop: where it is among the steps that all save."""

    at: int = 0
    asked: tuple[int, list[Any]] | None = None
    capture: tuple[Snapshot, int] | None = None

    @property
    def between_saves(self) -> bool:
        return self.asked is None and self.capture is None


class ManyHistory:
    """One run's life: what may happen in it, and what must hold after each event and once all is done."""

    folders_chance = 0.0
    """How often a tier has folders that need their fsync."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(f"many {seed}")
        nodes = draw.choice((1, 2, 2, 3))
        count = draw.randint(max(2, nodes), 6 if draw.random() < 0.3 else 4)
        node_of = [*range(nodes), *(draw.randrange(nodes) for _ in range(count - nodes))]
        if draw.random() < 0.7:
            node_of.sort()
        local = max(node_of.count(node) for node in node_of)
        rules = [
            file_rules(
                NODE_TIER,
                retain_last=draw.choice((None, 1, 2, 3)),
                capacity_bytes=draw.choice((None, None, int(2.5 * local * ENTRY_BYTES))),
            ),
            file_rules(
                SHARED_TIER,
                shared=True,
                flush_every=draw.choice((1, 1, 2)),
                retain_last=draw.choice((None, 1, 2)),
                capacity_bytes=draw.choice((None, None, int(2.5 * count * ENTRY_BYTES))),
            ),
        ]
        retain = random.Random(f"retain many {seed}")
        for place, rule in enumerate(rules):
            if retain.random() < 0.25:
                rules[place] = replace(rule, retain=draw_wants(retain).rules())
        if draw.random() < 0.15:
            rules.pop(0)
        self.tiers = tuple(r.name for r in rules)
        self.world = Many(
            node_of,
            rules,
            seed=seed,
            fan_out=draw.choice((1, 64)),
            memory_images=draw.choice((1, 2, 2, 3)),
            max_wait_s=MAX_WAIT_S,
            when_full=draw.choice(tuple(WhenFull)),
            codecs={NODE_TIER: draw.choice((*Codec, Codec.NONE)), SHARED_TIER: Codec.NONE},
            share=self._share,
            folders=[tier for tier in self.tiers if retain.random() < self.folders_chance],
        )
        self.damage = Damage(self.world, seed)
        self.unlike: set[CheckpointId] = set()
        self.compares = random.Random(f"compares {seed}").random() < 0.5
        self.careless = draw.random() < 0.2
        self.tidy = draw.random() < 0.4
        self.has_person = draw.random() < 0.5
        self.memory_images = self.world.ranks[0].memory.capacity_bytes // IMAGE
        self.loops: dict[int, Loop] = {}
        self.whole: list[CheckpointId] = []
        self.committed: set[tuple[str, CheckpointId]] = set()
        self.given_up: set[tuple[str, CheckpointId]] = set()
        self.found: set[tuple[str, CheckpointId]] = set()
        """What was committed when this start began."""
        self.durable: dict[str, CheckpointId] = {}
        self.counts = {"WholeCheckpoint": 0, "GivenUpCopy": 0, "crash": 0}
        self.counts |= {"CommittedCopy": 0, "SaveFailure": 0, "DeletedCopy": 0}
        self.counts |= {"ImagesAlike": 0, "ImagesUnlike": 0}
        self.person = Person(self.world, draw)
        self.world.said, self.world.ran = self._said, self._ran
        self._begin_loops()

    def _begin_loops(self) -> None:
        self.loops = {rank.number: Loop() for rank in self.world.ranks}
        self.whole = []

    def _share(self, id: CheckpointId, rank: int) -> ReplicaShare | None:
        """What a rank digested of a checkpoint: now and then one of them has not what the others have."""
        if not self.compares:
            return None
        draw = random.Random(f"unlike {self.world.seed} {id}")
        odd = draw.randrange(len(self.world.ranks)) if draw.random() < UNLIKE else None
        if odd == rank:
            self.unlike.add(id)
        return ReplicaShare(
            structure="s",
            digests=ReplicaDigests(
                keys=np.array([4, 8], dtype=np.uint64),
                values=np.array([id.step, int(odd == rank)], dtype=np.uint64),
                groups=np.array([0, 0]),
            ),
        )

    # What is seen as it happens ------------------------------------------------------------------

    def _said(self, topic: Topic, body: Any) -> None:
        """Rank 0 announces something."""
        what, step, attempt, tier = (*topic, "", "", "")[:4]
        self.world.trace.append(f"announced: {topic} {body}")
        if what in self.counts:
            self.counts[str(what)] += 1
        if what == "WholeCheckpoint":
            self.whole.append(CheckpointId(int(step), int(attempt)))
            assert self.whole[-1] not in self.unlike, f"{self.whole[-1]} is a mixture"
        if what == "CommittedCopy":  # it may be deleted before the next look
            id = CheckpointId(int(step), int(attempt))
            assert id in self.world.committed(str(tier)), f"{id} is not committed on all nodes"
            self.committed.add((str(tier), id))
        if what == "GivenUpCopy":
            copy = str(tier), CheckpointId(int(step), int(attempt))
            # else one is given up that could not be seen when this start began
            if copy not in self.damage.ever | self.found:
                self.given_up.add(copy)
        if what == "SaveFailure":
            id = CheckpointId(int(step), int(attempt))
            assert id not in self.whole[-1:], f"{id}, the newest that was whole, is given up"
            self.given_up |= {(t, id) for t in self.tiers if (t, id) not in self.committed}

    def _ran(self, rank: Rank, task: Task) -> None:
        """A record that a task leaves on a tier: all ranks' parts are on their disks at that moment."""
        if not isinstance(task, CommitCopy) or task.tier not in self.tiers:
            return
        if task.id not in self.world.records(task.tier, rank.node):
            return
        if (task.tier, task.id) in self.given_up | self.damage.ever:
            return  # it is taken back: what is left at the end is looked at
        for other in self.world.ranks:
            folder = names.step_prefix("run", task.id)
            there = {
                names.parse_shard(key.removeprefix(folder))
                for key in self.world.disk(task.tier, other.node)._objects
                if key.startswith(folder)
            }
            assert other.shard in there, (
                f"{task.tier}: rank {rank.number} commits {task.id}, and rank {other.number} has not landed"
            )

    # Events --------------------------------------------------------------------------------------

    def _after(self) -> None:
        self.world.hear()
        self._take_answers()
        self.check()

    def capture_on(self, rank: Rank) -> None:
        """Let the watermark of a rank's capture rise, and the capture end at last."""
        loop = self.loops[rank.number]
        assert loop.capture is not None
        snapshot, final = loop.capture
        final = self.draw.randint(final, CUT.chunk_count)
        loop.capture = None if final == CUT.chunk_count else (snapshot, final)
        rank.advance(snapshot, final)

    def _take_answers(self) -> None:
        for rank in self.world.ranks:
            loop = self.loops[rank.number]
            if loop.asked is None or not loop.asked[1]:
                continue
            step, (region, error) = loop.asked
            loop.asked = None
            if error is not None:
                self.world.trace.append(f"rank {rank.number} skips {step}: {error}")
                rank.skip(step, error)
            else:
                loop.capture = (rank.begin(step, region), 0)

    def fail_capture(self) -> None:
        rank = self.draw.choice(self.world.ranks)
        loop = self.loops[rank.number]
        if loop.capture is not None and not self.tidy:
            self.world.trace.append(f"rank {rank.number}: a capture fails")
            snapshot, _ = loop.capture
            loop.capture = None
            rank.fail_capture(snapshot, CaptureError("on purpose"))

    def trouble(self) -> None:
        """A tier begins to fail for one rank: a little or wholly, in all or in its commits, in passing or for good."""
        rank = self.draw.choice(self.world.ranks)
        tier = self.draw.choice(self.tiers)
        keys = self.draw.choice((KEYS, KEYS, COMMITS))
        kind = self.draw.choice(
            (FaultKind.FAIL_BEFORE, FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER)
        )
        chance = self.draw.choice((0.1, 1.0, 1.0))
        errors: tuple[type[BackendError], ...] = (UnreachableError, UnreachableError)
        error = self.draw.choice((*errors, StorageFullError, BackendError))
        if error is not UnreachableError:
            kind = FaultKind.FAIL_BEFORE
        operations = list(Operation)
        if error is StorageFullError:
            operations = [Operation.CREATE, Operation.WRITE, Operation.PUBLISH]
        self.world.trace.append(
            f"rank {rank.number}: {tier} {kind} {error.__name__} {keys} {chance}"
        )
        rank.troubles[tier].strike(
            [
                Fault(kind=kind, operation=op, keys=keys, chance=chance, times=None, error=error)
                for op in operations
            ]
        )

    def recover(self) -> None:
        for rank in self.world.ranks:
            for trouble in rank.troubles.values():
                if self.draw.random() < 0.5:
                    trouble.stop()

    def crash(self) -> None:
        lost = [n for n in sorted(set(self.world.node_of)) if self.draw.random() < 0.15]
        self.world.trace.append(f"all are killed; nodes {lost} lose their memory")
        self.counts["crash"] += 1
        self.world.crash(nodes_lost=self.lose(lost))
        self.person.crash()
        if self.draw.random() < 0.3:
            self.world.renumber(self.draw)
        for rank in self.world.ranks:
            rank.handles.clear()
        self.given_up.clear()
        self.committed.clear()
        self.change_storage()
        self.found = {(tier, id) for tier in self.tiers for id in self.world.committed(tier)}
        self.world.start()
        self._begin_loops()
        self.durable = {}
        self._after()

    def lose(self, nodes: list[int]) -> list[int]:
        """All processes are about to be killed; return the nodes that lose their memory: ``nodes``, or others."""
        return nodes

    def change_storage(self) -> None:
        """No process lives."""

    # What must hold after each event -------------------------------------------------------------

    def check(self) -> None:
        self._check_memory()
        self._check_durable()
        self.person.look()

    def _check_memory(self) -> None:
        """The newest checkpoint that was whole in memory stays on all ranks until a newer one is; where memory has room
        for one image, until a tier has it or none is owed it."""
        if not self.whole:
            return
        newest = max(self.whole)
        if newest in self.person.doomed:
            return
        for rank in self.world.ranks:
            if newest not in rank.sealed():
                assert self._may_leave_memory(newest), (
                    f"{newest} is the newest that was whole in memory, and rank {rank.number} has it no more"
                )

    def _may_leave_memory(self, id: CheckpointId) -> bool:
        """Say whether memory has room for one image, and a tier has this checkpoint, or rank 0 has given up every copy
        that was owed. The first rank that hears of the latter may use its memory for the next save at once."""
        if self.memory_images > 1:
            return False
        if any(id in self.world.committed(tier) for tier in self.tiers):
            return True
        ended = self.committed | self.given_up
        return all((tier, id) in ended for tier in self.world.ranks[0].handles[id].tiers)

    def _check_durable(self) -> None:
        """The newest checkpoint on what survives a loss never gets older. What was given up before the last record of
        it came, as where an earlier start had left the others, is none; nor is what rank 0 has begun to drop, or who
        deletes the others meanwhile would be to blame. What was written anew may take the place of another copy, and is
        not relied on here."""
        leaving = {
            (tier, id)
            for id, known in self.world.ranks[0].door.checkpoints.items()
            for tier in self.tiers
            if known.state(tier) is CopyState.LEAVING
        }
        sure, there = (
            {
                tier: {
                    id
                    for id in self.damage.good(tier, repaired=repaired)
                    if (tier, id) not in self.given_up | leaving
                }
                for tier in self.tiers
            }
            for repaired in (False, True)
        )
        self.committed |= {(tier, id) for tier, ids in sure.items() for id in ids}
        for lost, tiers in (("node", (SHARED_TIER,)), ("process", self.tiers)):
            newest, sure_newest = self._newest_live(there, tiers), self._newest_live(sure, tiers)
            had = self.durable.get(lost)
            if had is not None and had not in self.person.doomed:
                assert newest is not None, f"nothing survives the loss of a {lost} any more"
                assert newest >= had, f"{had} survived the loss of a {lost}, and is gone"
                sure_newest = max(had, sure_newest or had)
            if sure_newest is not None:
                self.durable[lost] = sure_newest

    def _newest_live(
        self, copies: Mapping[str, Collection[CheckpointId]], tiers: Iterable[str]
    ) -> CheckpointId | None:
        ids = {id for tier in tiers for id in copies[tier]}
        return max(filter(self._live, ids), default=None)

    def _live(self, id: CheckpointId) -> bool:
        """Say whether the line of this start goes through a checkpoint; it may have begun anew above older ones."""
        attempt = self.world.attempt.number
        while id.attempt != attempt:
            start = self.world.lineage[attempt]
            if start is None:
                return False
            attempt = start.attempt
            if id.attempt == attempt:
                return id <= start
        return True

    # What must hold once all is done -------------------------------------------------------------

    def check_settled(self, *, healed: bool = True) -> None:
        self._check_handles()
        if healed or not self.has_person:  # an order waits for what is being committed
            self._check_idle()
        self._check_records()
        if healed:
            if not self.world.unread:  # a deletion waits for a start that can look everywhere
                self.person.check_settled()
            self._check_leftovers()
            self._check_agreement()

    def _check_idle(self) -> None:
        for rank in self.world.ranks:
            assert not rank.door.is_busy, f"rank {rank.number} is still busy: {rank.door.owed}"
            for known in rank.door.checkpoints.values():
                assert not any(known.leases.values()), f"{known.id} is leased for ever"
            assert all(region.sealed for region in rank.memory.regions), "memory is leaked"

    def _check_handles(self) -> None:
        """Every handle ends, and all that a checkpoint has end the same way."""
        for rank in self.world.ranks:
            for id, handle in rank.handles.items():
                assert handle.outcome is not SaveOutcome.PENDING, (
                    f"whoever waits for {id} on rank {rank.number} waits for ever"
                )
                for tier in handle.tiers:
                    output, whole = handle.done(tier), (tier, id) in self.committed
                    # deleted by a person before the last record of it was known to be there
                    unheard = whole and id in self.person.doomed
                    assert output == whole or unheard, (
                        f"rank {rank.number}: {id} is told to be on {tier}: {output}"
                    )

    def _check_records(self) -> None:
        """A record names every image that it stands for, and those are there with the right bytes."""
        for tier in self.tiers:
            for node in self.world.disks(tier):
                for id, commit in self.world.records(tier, node).items():
                    self._check_record(tier, node, id, commit)

    def _check_record(self, tier: str, node: int, id: CheckpointId, commit: Commit) -> None:
        ranks = [r for r in self.world.ranks if tier == SHARED_TIER or r.node == node]
        where = f"{tier} of node {node}: {id}"
        assert id not in self.unlike, f"{where} is a mixture"
        assert commit.lineage.checkpoint == id
        assert commit.world_size == len(self.world.ranks)
        named = {names.parse_shard(file.name) for file in commit.files}
        assert named == {rank.shard for rank in ranks}, f"{where} names {named}"
        disk = self.world.disk(tier, node)
        store = StoredTier(name=tier, run="run", backend=disk)
        for rank in ranks:
            if (tier, node, id, rank.number) in self.damage.bad:
                continue
            manifest = disk._objects.get(
                names.step_prefix("run", id) + names.manifest_name(rank.shard)
            )
            image = image_file(commit, rank.shard)
            assert manifest is not None, f"{where} lacks {rank.shard}"
            assert image is not None, f"{where} lacks {rank.shard}"
            file = commit.file(names.manifest_name(rank.shard))
            assert file is not None, where
            assert file.digest == sha256(bytes(manifest)), where
            found = read_image(store, commit, rank.shard)
            assert found == image_of(id, rank.number), f"{where} has wrong bytes of {rank.shard}"

    def may_be_left(self, tier: str, node: int, key: str) -> bool:
        """Say whether something that is no checkpoint's is for the next start to collect."""
        return False

    def _check_leftovers(self) -> None:
        for tier in set(self.tiers) - self.world.unread:
            for node, disk in self.world.disks(tier).items():
                there = self.world.records(tier, node)
                for key in disk._objects:
                    folder, _, _ = key.removeprefix("run/").partition("/")
                    id = names.parse_step_folder(folder)
                    may_be = id is None or id in there or self.may_be_left(tier, node, key)
                    assert may_be, f"{tier} of node {node}: {key} is a leftover"
                whole = self.world.committed(tier)
                mine = {id for id in whole if id.attempt == self.world.attempt.number}
                parts = {
                    id  # what a start has left half committed, or half dropped, waits for a newer one
                    for id in there
                    if id.attempt < self.world.attempt.number and not mine
                }
                parts |= self.person.pinned_at(tier, node)  # while it was dropped elsewhere
                parts |= self.person.refused  # the next start deletes what no pin keeps any more
                if self.world.unread:  # a deletion waits for a start that can look everywhere
                    parts |= self.person.doomed
                assert set(there) - parts == whole - parts, (
                    f"{tier}: node {node} has records of {sorted(there)}, all nodes of "
                    f"{sorted(self.world.committed(tier))}"
                )

    def _check_agreement(self) -> None:
        for tier in set(self.tiers) - self.world.unread:
            # it stays on some nodes, or all
            both = self.person.doomed & self.person.pinned_on(tier)
            both |= self.damage.on(tier)  # a rank may have noticed
            there = self.world.committed(tier) - both
            for rank in self.world.ranks:
                output = rank.committed(tier) - both
                assert output == there, (
                    f"{tier}: rank {rank.number} says that {sorted(output)} are there, and {sorted(there)} are"
                )
        known = [set(rank.door.checkpoints) for rank in self.world.ranks]
        sealed = [rank.sealed() for rank in self.world.ranks]
        for rank, ids, held in zip(self.world.ranks, known, sealed, strict=True):
            left = ids - held - set().union(*(rank.committed(tier) for tier in self.tiers))
            left -= set().union(*(self.damage.on(tier) for tier in self.tiers))
            assert not left, f"rank {rank.number} knows of {left}, which is nowhere"
