"""What peer memory promises, held against the bytes in the memory of the machines that are there.

Of the newest step that was reported committed on ``peers``, each image is on ``copies`` + 1 machines. A machine that is
lost after that takes one of them, also where the job was started again meanwhile: only the next step that is committed
makes all whole again. So no more than ``copies`` losses cost that step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.memory_backend import MemoryBackend
from tests.simulation.many import SHARED_TIER
from tests.simulation.peer_wires import RUN
from tests.simulation.peer_world import PEER_TIER, Machine, PeerWorld
from tests.simulation.rank import image_of
from tests.simulation.world import (
    CommitReader,
    abandoned,
    commit_in_memory,
    read_image,
    start_in,
)
from tierfall.core.format.commit_files import image_file, shards_of
from tierfall.core.format.records import Commit
from tierfall.core.ranks.messages import Topic
from tierfall.core.types import keys
from tierfall.core.types.errors import TierfallError
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.tiers.host import image_files
from tierfall.tiers.image_file import PAGE_BYTES
from tierfall.tiers.kept_images import ImageHere
from tierfall.tiers.stored import StoredTier

RECORD = f"/{keys.COMMIT_NAME}"
Holders = dict[Shard, set[int]]
"""Of each image, the machines that have it."""


@dataclass
class Promise:
    """A step that was reported, the machines that were there then, and those that keep its images for others."""

    id: CheckpointId
    machines: tuple[Machine, ...]
    shards: tuple[Shard, ...]
    kept: Holders


@dataclass
class Found:
    """What is known of a checkpoint, and where its good images are."""

    commit: Commit
    kept: Holders = field(default_factory=lambda: defaultdict(set))
    in_memory: Holders = field(default_factory=lambda: defaultdict(set))
    elsewhere: Holders = field(default_factory=lambda: defaultdict(set))

    def holders(self, shard: Shard) -> set[int]:
        return self.kept[shard] | self.in_memory[shard]

    def is_on(self, least: int) -> bool:
        """Say whether each image is on so many machines, at least."""
        count = self.commit.world_size
        return all(len(self.holders(Shard(number, count))) >= least for number in range(count))

    @property
    def is_whole(self) -> bool:
        count = self.commit.world_size
        shards = (Shard(number, count) for number in range(count))
        return all(self.holders(shard) or self.elsewhere[shard] for shard in shards)


class PeerWatch:
    """Looks at a world: ``look`` after each event, ``check_started`` after each start, ``check_settled`` at the end."""

    def __init__(self, world: PeerWorld) -> None:
        self.world = world
        self.promise: Promise | None = None
        self.counts: Counter[str] = Counter()
        self._announced: list[CheckpointId] = []
        self._good: dict[tuple[str, str, Shard], tuple[object, ...]] = {}
        self._images: dict[Path, tuple[bytes, ImageHere | None]] = {}
        self._read = CommitReader().read
        world.said = self._on_said

    # After each event ----------------------------------------------------------------------------

    def _on_said(self, topic: Topic, body: Any) -> None:
        if topic[0] == "CommittedCopy" and topic[3] == PEER_TIER:
            self._announced.append(CheckpointId(int(topic[1]), int(topic[2])))

    def look(self) -> None:
        """Take note of a step that a handle, or rank 0, reports for the first time: it is where that says it is."""
        newest = self.promise.id if self.promise is not None else CheckpointId(-1, 0)
        reported = {id for id in self._announced if id >= newest}
        for rank in self.world.alive:
            for id, handle in reversed(rank.handles.items()):
                if id <= newest:
                    break
                if PEER_TIER in handle.tiers and handle.done(PEER_TIER):
                    reported.add(id)
        self._announced.clear()
        for id in sorted(reported):
            self.counts["made_again" if id.attempt < self.world.attempt.number else "reported"] += 1
            found = self._find(id)
            assert found is not None, f"{id} is reported, and nothing of it is there"
            shards = tuple(
                Shard(n, found.commit.world_size) for n in range(found.commit.world_size)
            )
            self.promise = Promise(id, tuple(self.world.present), shards, found.kept)
            self.check()

    def down(self) -> list[int]:
        """The machines of the promised step that are there no more."""
        assert self.promise is not None
        there = {machine.number for machine in self.world.present} - self.world.wires.lost
        return [m.number for m in self.promise.machines if m.number not in there]

    def check(self) -> None:
        """Each image of the promised step, or of a newer one, is on as many machines as the losses have left."""
        if self.promise is None or self._is_stored(self.promise.id):
            return
        promise, down = self.promise, self.down()
        least = 1 + self.world.copies - len(down)
        if least < 1:
            return  # more than was promised: the next start shows what is left
        wrong = self._wrong(promise, least, down)
        newer = (self._find(id) for id in self._ids() if id > promise.id) if wrong else ()
        assert not wrong or any(one is not None and one.is_on(least) for one in newer), (
            f"{promise.id} was reported, {down} are down: {wrong}"
        )

    def _wrong(self, promise: Promise, least: int, down: list[int]) -> str:
        found = self._find(promise.id)
        if found is None:
            return "nothing of it is there"
        for shard in promise.shards:
            if gone := promise.kept[shard] - found.kept[shard] - set(down):
                return f"machines {gone} keep the image of {shard} no more"
            if len(holders := found.holders(shard)) < least:
                return f"the image of {shard} is on machines {sorted(holders)}, expected {least}"
        return ""

    def _is_stored(self, id: CheckpointId) -> bool:
        """Say whether storage has a step as new."""
        disk = self.world.disk(SHARED_TIER, 0)
        stored = (
            keys.parse_step_folder(key.split("/")[1])
            for key in disk._objects
            if key.endswith(RECORD)
        )
        return any(other is not None and other >= id for other in stored)

    # After a start -------------------------------------------------------------------------------

    def check_started(self) -> None:
        """The run goes on from the promised step or a newer one; in any case from the newest of which all is left."""
        world, found = self.world, self.world.started_from
        whole = self.newest_whole()
        if self.promise is not None:
            id, down = self.promise.id, self.down()
            self.counts["down"] += bool(down)
            kept = len(down) <= world.copies
            assert not kept or (found is not None and found >= id), (
                f"{id} was reported, {down} are down, and the run goes on from {found}"
            )
            if found is None or found < id:
                self.counts["gone"] += 1
                self.promise = None
        assert whole is None or (found is not None and found >= whole), (
            f"all of {whole} is there, and the run goes on from {found}"
        )
        self.check()

    def newest_whole(self) -> CheckpointId | None:
        """The newest step of the live lineage of which every image is in some memory, or on storage."""
        starts, lives = set(), defaultdict(set)
        for disk in self._disks():
            for attempt, attempt_id, step in filter(None, map(start_in, disk._objects)):
                starts.add((attempt, step))
                lives[attempt].add(attempt_id)
        found = {id: one for id in self._ids() if (one := self._find(id)) is not None}
        left = abandoned({id: one.commit for id, one in found.items()}, starts)
        return max(
            (
                id
                for id, one in found.items()
                if one.is_whole and id not in left and len(lives[id.attempt]) <= 1
            ),
            default=None,
        )

    # Once all is done ----------------------------------------------------------------------------

    def check_settled(self) -> None:
        """Nothing waits, and no machine keeps what is neither the newest nor asked for."""
        for rank in self.world.ranks:
            assert not rank.door.is_busy, f"rank {rank.number}: {rank.door.owed}"
            for handle in rank.handles.values():
                assert handle.is_settled(), f"rank {rank.number}: {handle} is not settled"
        newest = None if self.promise is None else self.promise.id
        is_ours = newest is not None and newest.attempt == self.world.attempt.number
        assert is_ours, f"all is well, and {newest} is the newest that was reported"
        there = self.world.ranks[0].committed(PEER_TIER)
        for rank in self.world.ranks:
            assert rank.committed(PEER_TIER) == there, f"rank {rank.number} knows of others"
        for machine in self.world.present:
            kept = {image.commit.lineage.checkpoint for image in self._kept(machine)}
            assert kept <= there, (
                f"machine {machine.number} keeps {sorted(kept - there)} for nothing"
            )

    # Where images are ----------------------------------------------------------------------------

    def _machines(self) -> Iterator[Machine]:
        lost = self.world.wires.lost
        return (machine for machine in self.world.present if machine.number not in lost)

    def _disks(self) -> list[MemoryBackend]:
        return [self.world.disk(SHARED_TIER, 0)] if SHARED_TIER in self.world.stored else []

    def _kept(self, machine: Machine) -> list[ImageHere]:
        """What a machine keeps for others; a file is read again only if its header has changed."""
        found = []
        for path in [path for paths in image_files(machine.kept.folder).values() for path in paths]:
            with path.open("rb") as file:
                header = file.read(PAGE_BYTES)
            if self._images.get(path, (b"", None))[0] != header:
                images, problems = machine.kept.images()
                assert not problems, problems
                here = {image.path: image for image in images}
                self._images[path] = header, here.get(path)
                if path in here:
                    self._check_bytes(here[path], machine.number)
            image = self._images[path][1]
            found += [image] if image is not None else []
        return found

    def _check_bytes(self, image: ImageHere, where: int) -> None:
        """Compare a sealed image with what was saved."""
        image.verify()
        id, data = image.commit.lineage.checkpoint, bytearray(image.seal.image_bytes)
        image.read(0, [memoryview(data)])
        assert data == image_of(id, image.shard.rank), f"{image.shard} of {id} on {where}"

    def _ids(self) -> set[CheckpointId]:
        found = {
            id for disk in self._disks() for key in disk._objects if (id := id_of(key)) is not None
        }
        for machine in self._machines():
            found |= {image.commit.lineage.checkpoint for image in self._kept(machine)}
            for memory in machine.memories:
                found |= {c.lineage.checkpoint for c in commits_in(memory.regions)}
        return found

    def _find(self, id: CheckpointId) -> Found | None:
        """Look for the images of a checkpoint."""
        found: Found | None = None
        for machine in self._machines():
            for memory in machine.memories:
                for region in memory.regions:
                    commit = commit_in_memory(region.commit()) if region.sealed else None
                    if commit is not None and commit.lineage.checkpoint == id:
                        found = found or Found(commit)
                        (shard,) = shards_of(commit)
                        assert bytes(region.image) == image_of(id, shard.rank), (
                            f"{shard} of {id} in memory"
                        )
                        found.in_memory[shard].add(machine.number)
            for image in self._kept(machine):
                if image.commit.lineage.checkpoint == id:
                    found = found or Found(image.commit)
                    found.kept[image.shard].add(machine.number)
        if SHARED_TIER in self.world.stored:
            found = self._find_stored(self.world.disk(SHARED_TIER, 0), id, found)
        return found

    def _find_stored(
        self, disk: MemoryBackend, id: CheckpointId, found: Found | None
    ) -> Found | None:
        data = disk._objects.get(keys.step_prefix(RUN, id) + keys.COMMIT_NAME)
        if data is None:
            return found
        commit = self._read(data)
        found = found or Found(commit)
        for shard in shards_of(commit):
            if self._is_good(disk, commit, shard):
                found.elsewhere[shard].add(-1)
        return found

    def _is_good(self, disk: MemoryBackend, commit: Commit, shard: Shard) -> bool:
        """Read an image by its record, again only where its files are others than before."""
        id = commit.lineage.checkpoint
        prefix = keys.step_prefix(RUN, id)
        file = image_file(commit, shard)
        assert file is not None
        names = (file.file.name, keys.manifest_name(shard), keys.COMMIT_NAME)
        files = tuple(disk._objects.get(prefix + name) for name in names)
        known = (disk.place, prefix, shard)
        before = self._good.get(known)
        if before is not None and all(
            one is other for one, other in zip(files, before, strict=True)
        ):
            return True
        try:
            image = read_image(StoredTier(name=SHARED_TIER, run=RUN, backend=disk), commit, shard)
        except TierfallError:
            return False
        assert image == image_of(id, shard.rank), f"{prefix}: {shard} is another one's"
        self._good[known] = files
        return True


def id_of(key: str) -> CheckpointId | None:
    """Whose file an object is; None where it is no checkpoint's."""
    return keys.parse_step_folder(key.removeprefix(f"{RUN}/").partition("/")[0])


def commits_in(regions: Any) -> list[Commit]:
    return [commit_in_memory(region.commit()) for region in regions if region.sealed]
