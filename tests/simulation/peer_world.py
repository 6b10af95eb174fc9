"""A run in miniature whose ranks keep their images in each other's memory. Machines come and go: each has the memory of
its ranks and what it keeps for others, and is a node of the starts that it takes part in.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.memory_backend import MemoryBackend
from tests.simulation.many import Many
from tests.simulation.mounts import MachineFile
from tests.simulation.peer_wires import RUN, WiredPeer, Wires
from tests.simulation.rank import Rank
from tests.simulation.world import FakeMemory, FakeRegion
from tierfall.core.types.errors import RestoreError
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.policies.placement import place_copies
from tierfall.setup import peers
from tierfall.setup.host_memory import is_ours
from tierfall.setup.peers import recover_image
from tierfall.setup.start import Start
from tierfall.tiers.kept_images import KeptFolder, KeptImages
from tierfall.tiers.peers import PeerCache
from tierfall.tiers.stored import StoredTier

PEER_TIER = "peers"


SHARED = Path("/dev/shm")


class Machine:
    """A machine with its memory. ``kept`` is what it keeps for others."""

    def __init__(self, number: int, *, slots: int, images: int, copies: int, domain: str) -> None:
        self.number = number
        self.domain = domain
        folder = tempfile.mkdtemp(dir=SHARED if SHARED.is_dir() else None)
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.kept = KeptFolder(Path(folder), RUN)
        self.memories = [FakeMemory(images) for _ in range(slots)]
        self.file = MachineFile()


def kill(images: KeptImages) -> None:
    """The process that has these files is killed: it closes nothing."""
    for file in images._files:
        file.closed = True
        file.release_descriptor()


class StartFailedError(Exception):
    """A machine was lost, or the processes were killed, before all ranks had agreed on a start."""


class HostMemory:
    """A machine's memory as a start sees it that brings an image back: there, records take no room."""

    name = "host"

    def __init__(self, memory: FakeMemory) -> None:
        self._memory = memory

    def ensure_capacity(self, *, image_bytes: int, records_bytes: int) -> None:
        """It has all that it will have."""

    def allocate(self, *, image_bytes: int, records_bytes: int) -> FakeRegion | None:
        return self._memory.allocate(image_bytes=image_bytes, records_bytes=0)


def _in_turn(threads: int, do: Callable[[int], None], numbers: Iterable[int]) -> None:
    """Do in this thread what ``run_in_threads`` does in several, in an order that a seed does not decide."""
    for number in numbers:
        do(number)


class PeerRank(Rank):
    """A process on a machine; it finds there what earlier processes have left."""

    if TYPE_CHECKING:
        world: PeerWorld

    def __init__(self, world: PeerWorld, number: int, memory_images: int) -> None:
        super().__init__(world, number, memory_images)
        self.machine = world.present[self.node]
        self.memory = self.machine.memories[number % world.slots]
        self.recovered: CheckpointId | None = None

    def open(self) -> None:
        super().open()
        if not self.sealed():
            self._recover()

    def _recover(self) -> None:
        """Bring this rank's image back from the machines that keep it, as ``OpenedTiers`` does before it lists."""
        known = partial(is_ours, self.stores, self.listings)
        with (
            patch.object(peers, "run_in_threads", _in_turn),
            patch.object(self.world.wires, "on_request", self.world.on_recovery_request),
        ):
            for client in self.world.keepers_of(self):
                keeper = self._cache(client)
                memory = HostMemory(self.memory)
                found = recover_image(memory, keeper, self.shard, self.listings, known)
                self.recovered = self.recovered or found
                if found is not None:
                    break
        self.listings = (self._in_memory(self.memory), *self.listings[1:])

    def _open_store(self, tier: str) -> StoredTier:
        if tier != PEER_TIER:
            return super()._open_store(tier)
        images = self.world.processes[self.node, self.number % self.world.slots]
        sent = self.world.keepers_of(self)
        return self._cache(self.machine.kept, images=images, sent=sent, shard=self.shard)

    def _cache(self, kept: Any, **more: Any) -> PeerCache:
        folder = self.machine.kept.folder
        return PeerCache(name=PEER_TIER, run=RUN, folder=folder, kept=kept, **more)


class PeerWorld(Many):
    """``present`` are the machines of this start, in the order of their nodes; ``slots`` ranks are on each."""

    ranks: list[PeerRank]  # type: ignore[assignment]

    def __init__(
        self,
        machines: Sequence[Machine],
        rules: Iterable[Any],
        *,
        copies: int,
        seed: int,
        **options: Any,
    ) -> None:
        self.present = list(machines)
        self.slots = len(machines[0].memories)
        self.copies = copies
        self.wires = Wires(seed)
        self.starts = 0
        self.processes: dict[tuple[int, int], KeptImages] = {}
        """By node and slot, what each process keeps for others."""
        self.world_sizes: dict[int, int] = {}
        """The number of ranks of each attempt."""
        self.refused: RestoreError | None = None
        """Why this start may not go on from anything."""
        self.on_recovery_request: Callable[[int, int], None] = lambda one, other: None
        """Called before a request by which a start brings an image back: from one machine to another one."""
        super().__init__(self._nodes(), rules, seed=seed, **options)

    def _nodes(self) -> tuple[int, ...]:
        return tuple(node for node in range(len(self.present)) for _ in range(self.slots))

    def disk(self, tier: str, node: int) -> MemoryBackend:
        return MemoryBackend(place=tier) if tier == PEER_TIER else super().disk(tier, node)

    def make_rank(self, number: int, memory_images: int) -> PeerRank:
        return PeerRank(self, number, memory_images)

    def keepers_of(self, rank: PeerRank) -> list[WiredPeer]:
        """The processes that keep a rank's images, on other machines."""
        slot = rank.number % self.slots
        return [
            WiredPeer(
                self.wires,
                rank.machine.number,
                self.present[node].number,
                partial(self.processes.__getitem__, (node, slot)),
            )
            for node in self.placement.holders[rank.node][1:]
        ]

    # Starts --------------------------------------------------------------------------------------

    @property
    def peer_copies(self) -> dict[str, int]:
        return {PEER_TIER: self.copies}

    def start(self) -> None:
        """Begin anew on the machines ``present``."""
        self.wires.lost.clear()
        self.refused = None
        self.node_of = self._nodes()
        self.machines = {node: machine.file for node, machine in enumerate(self.present)}
        self.starts += 1
        for images in self.processes.values():
            kill(images)
        self.processes = {
            (node, slot): KeptImages(machine.kept, slot)
            for node, machine in enumerate(self.present)
            for slot in range(self.slots)
        }
        self.placement = place_copies([machine.domain for machine in self.present], self.copies)
        self.ranks = [self.make_rank(number, 0) for number in range(len(self.node_of))]
        super().start()

    def _take_attempt(self) -> Start:
        if self.wires.lost:
            raise StartFailedError(f"machines {sorted(self.wires.lost)} are lost")
        return super()._take_attempt()

    def _restore(self) -> CheckpointId | None:
        self.world_sizes[self.attempt.number] = len(self.ranks)
        return super()._restore()

    def on_refused(self, error: RestoreError) -> None:
        self.refused = error

    def is_read_whole(self, id: CheckpointId) -> bool:
        """Say whether each part, of what may have been another number of ranks, can be read by some rank."""
        count = self.world_sizes[id.attempt]
        return all([self._is_read(id, Shard(number, count)) for number in range(count)])

    def _is_read(self, id: CheckpointId, shard: Shard) -> bool:
        own = [rank for rank in self.ranks if rank.shard == shard]
        return any(rank.read(id, shard) for rank in (*own, *self.ranks))

    def lose(self, machine: Machine) -> None:
        """A machine is lost with its memory; the others go on until the job is ended."""
        self.wires.lost.add(machine.number)
        self.network.lost.update(rank.number for rank in self.ranks if rank.machine is machine)
        self.trace.append(f"{self.now_s:.0f} s: machine {machine.number} is lost")

    @property
    def alive(self) -> list[PeerRank]:
        return [rank for rank in self.ranks if rank.machine.number not in self.wires.lost]

    # Driving -------------------------------------------------------------------------------------

    def step(self) -> None:
        for rank in self.alive:
            rank.step()

    def hear(self) -> None:
        for rank in self.alive:
            if rank.is_told:
                rank.step()
