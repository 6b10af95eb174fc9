"""Several ranks of one run in miniature: each with the production planner, policies, tiers and task runner, its own
memory, the disk of its node and one disk that all see; their message_trees over a network that a seed delivers.

One thread and a virtual clock drive it all. Tasks, messages and planners go on when the test says so, in an order
that a seed decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from tests.core.ranks.network import Network
from tests.memory_backend import MemoryBackend
from tests.simulation.mounts import MachineFile
from tests.simulation.rank import Rank, Troubled, Unsynced
from tests.simulation.world import CommitReader, attempt_of, host_rules
from tierfall.core.capture.snapshot import ReplicaShare
from tierfall.core.flush.tasks import Task
from tierfall.core.format.records import Attempt, Commit
from tierfall.core.ranks.messages import Topic
from tierfall.core.restore.agreement import choose_candidates
from tierfall.core.restore.candidates import RestoreRequest
from tierfall.core.restore.inventory import merge_ranks
from tierfall.core.types import keys
from tierfall.core.types.errors import RestoreError, UnreachableError
from tierfall.core.types.events import Event
from tierfall.core.types.values import CheckpointId, Codec, WhenFull
from tierfall.core.types.view import TierRules
from tierfall.setup.start import FoundAtStart, Start, decide, fill_in, on_all_ranks

NODE_TIER = "nvme"
SHARED_TIER = "pfs"
ROUNDS_MAX = 20_000
"""No run that is left alone has so much to do: it goes round in a circle."""


class Many:
    """One run of several ranks over several starts. ``node_of`` names the node of each rank."""

    def __init__(
        self,
        node_of: Sequence[int],
        rules: Iterable[TierRules],
        *,
        seed: int = 0,
        fan_out: int = 64,
        memory_images: int = 3,
        max_wait_s: float = 60.0,
        when_full: WhenFull = WhenFull.WAIT,
        codecs: Mapping[str, Codec] | None = None,
        share: Callable[[CheckpointId, int], ReplicaShare | None] = lambda id, rank: None,
        folders: Iterable[str] = (),
    ) -> None:
        """``rules`` are those of the tiers ``nvme``, which each node has for itself, and ``pfs``, which all see;
        ``share`` says what a rank digested of a checkpoint that all ranks compare; the tiers ``folders`` have folders
        that need their fsync."""
        self.node_of = tuple(node_of)
        self.rules = (host_rules(when_full), *rules)
        self.stored = tuple(tier.name for tier in self.rules[1:])
        self.shared = {tier: tier == SHARED_TIER for tier in self.stored}
        self.seed, self.fan_out = seed, fan_out
        self.codecs = codecs or {}
        self.share = share
        self.max_wait_s, self.when_full = max_wait_s, when_full
        self.random = random.Random(f"many {seed}")
        self.now_s = 0.0
        self.trace: list[str] = []
        self.lives: list[list[Event]] = []
        self.said: Callable[[Topic, Any], None] = lambda topic, body: None
        self.ran: Callable[[Rank, Task], None] = lambda rank, task: None
        self._disks: dict[tuple[str, int | None], MemoryBackend] = {}
        self._unsynced: dict[tuple[str, int | None], Unsynced] = {}
        self._folders = frozenset(folders)
        self.machines = {node: MachineFile() for node in set(self.node_of)}
        self.wall_ahead_s: dict[int, float] = {}
        self.unopened: set[str] = set()
        """The tiers that a start does without where it cannot list them."""
        self.unread: set[str] = set()
        """The tiers that a rank of this start could not look at."""
        self.does_without: Callable[[], bool] = lambda: False
        """Say whether a person restores without what cannot be looked at, or begins anew."""
        self.blind: set[str] = set()
        """The ids of the attempts that began without a look at some tier."""
        self._read = CommitReader().read
        self.starts = 0
        self.started_from: CheckpointId | None = None
        self.lineage: dict[int, CheckpointId | None] = {}
        """What each attempt went on from, the last one of a number."""
        self.ranks = [self.make_rank(number, memory_images) for number in range(len(self.node_of))]
        self.start()

    def make_rank(self, number: int, memory_images: int) -> Rank:
        return Rank(self, number, memory_images)

    def disk(self, tier: str, node: int) -> MemoryBackend:
        """The disk that a node sees as a tier, at the same place on all nodes."""
        key = (tier, None if tier == SHARED_TIER else node)
        if key not in self._disks:
            self._disks[key] = MemoryBackend(place=tier)
        return self._disks[key]

    def unsynced(self, tier: str, node: int) -> Unsynced:
        key = (tier, None if tier == SHARED_TIER else node)
        return self._unsynced.setdefault(key, Unsynced())

    def seen_by(self, rank: Rank, tier: str) -> Troubled:
        return Troubled(
            self.disk(tier, rank.node),
            seed=rank.number,
            has_folders=tier in self._folders,
            unsynced=self.unsynced(tier, rank.node),
        )

    def disks(self, tier: str) -> dict[int, MemoryBackend]:
        """The disks of a tier by node; the shared one under 0."""
        nodes = sorted(set(self.node_of)) if tier == NODE_TIER else [0]
        return {node: self.disk(tier, node) for node in nodes}

    # Starts --------------------------------------------------------------------------------------

    @property
    def peer_copies(self) -> dict[str, int]:
        """See ``Config.peer_copies``."""
        return {}

    def start(self) -> None:
        """Open the run on all ranks as one new attempt, and go on from the newest checkpoint that all can restore."""
        self.starts += 1
        self.network = Network(
            self.node_of, seed=self.seed + 1000 * self.starts, fan_out=self.fan_out
        )
        for rank in self.ranks:
            rank.open()
        start = self._take_attempt()
        self.started_from = self._restore()
        self.lineage[self.attempt.number] = self.started_from
        if start.partial:
            for rank in self.ranks:
                rank.read_rest(may_fail=True)
            start = decide(self._root(), self._found(0), start.attempt)
            for rank in self.ranks:
                rank.listings = fill_in(rank.listings, start, rank.reporters())
        order = [rules.name for rules in self.rules]
        described = {rank.number: rank.described() for rank in self.ranks}
        known = {c.id: c.commit for x in merge_ranks(described, order) for c in x.copies}
        commit = known.get(self.started_from) if self.started_from else None
        self.trace.append(f"attempt {self.attempt.number} goes on from {self.started_from}")
        host = SimpleNamespace(host=SimpleNamespace(name="host"))
        for rank in self.ranks:
            session = SimpleNamespace(config=host, listings=rank.listings, ranks=rank)
            rank.ordinal = commit.lineage.ordinal if commit else 0
            rank.start(start, on_all_ranks(cast(Any, session), start))
        for rank in self.ranks:
            rank.go_on_from(self.started_from)
        for rank in self.ranks:
            rank.step()

    def _take_attempt(self) -> Start:
        """Let all ranks take one attempt, without the tiers that one of them cannot reach."""
        root = self.ranks[0]
        number = 1
        while True:
            start = decide(self._root(), self._found(number))
            without = {t: UnreachableError(why) for t, why in start.unreachable.items()}
            for rank in self.ranks:
                rank.go_without(without)
            assert start.attempt is not None
            self.attempt = start.attempt
            if all([rank.adopt(self.attempt) for rank in self.ranks]):
                break
            number = self.attempt.number + 1
        self.unread = {x.tier for rank in self.ranks for x in rank.listings if x.error is not None}
        if self.unread:
            self.blind.add(root.attempt.id)
        for rank in self.ranks:
            rank.listings = fill_in(rank.listings, start, rank.reporters())
        return start

    def _root(self) -> Any:
        """Return what rank 0 decides with."""
        return SimpleNamespace(
            claim_from=self._take_number,
            emptied={},
            config=SimpleNamespace(
                host=SimpleNamespace(name="host"), chain=self.rules, peer_copies=self.peer_copies
            ),
            ranks=SimpleNamespace(topology=self.network.message_trees[0].topology),
        )

    def _found(self, number: int) -> dict[int, FoundAtStart]:
        return {r.number: r.found(max(number, r.next_number())) for r in self.ranks}

    def _take_number(self, number: int) -> Attempt:
        while not self.ranks[0].adopt(attempt := attempt_of(number, self.starts)):
            number += 1
        return attempt

    def _restore(self) -> CheckpointId | None:
        """Read the newest checkpoint that all ranks can, and return it; None where a person begins anew."""
        request = RestoreRequest(ignore_unreachable=self.does_without())
        order = [rules.name for rules in self.rules]
        try:
            for reads_all in (False, True):
                if reads_all and not any(x.is_partial for r in self.ranks for x in r.listings):
                    return None
                for rank in self.ranks if reads_all else ():
                    rank.read_rest()
                described = {rank.number: rank.described() for rank in self.ranks}
                commits = choose_candidates(described, order, request).commits
                chosen = [commit.lineage.checkpoint for commit in commits]
                if (found := next(filter(self.is_read_whole, chosen), None)) is not None:
                    return found
        except RestoreError as error:
            self.trace.append(f"fresh: {error}")
            self.on_refused(error)
        return None

    def on_refused(self, error: RestoreError) -> None:
        """A person begins anew."""

    def is_read_whole(self, id: CheckpointId) -> bool:
        """Say whether each rank's part of a checkpoint can be read."""
        return all([self._is_read_for(id, rank) for rank in self.ranks])

    def _is_read_for(self, id: CheckpointId, rank: Rank) -> bool:
        """Say whether a rank's part can be read by it, or else by another one, which hands it on."""
        others = [other for other in self.ranks if other is not rank]
        return any(reader.read(id, rank.shard) for reader in (rank, *others))

    def crash(self, *, nodes_lost: Iterable[int] = ()) -> None:
        """End every process at once; the nodes that are lost lose their memory too."""
        lost = set(nodes_lost)
        for rank in self.ranks:
            rank.die(memory=rank.node in lost)

    def renumber(self, draw: random.Random) -> None:
        """Let the ranks of each node find at the next start what others of it have left in memory."""
        for node in sorted(set(self.node_of)):
            there = [rank for rank in self.ranks if rank.node == node]
            memories = [rank.memory for rank in there]
            draw.shuffle(memories)
            for rank, memory in zip(there, memories, strict=True):
                rank.memory = memory

    # Driving -------------------------------------------------------------------------------------

    def step(self) -> None:
        for rank in self.ranks:
            rank.step()

    def hear(self) -> None:
        """Let every planner go on that was told something."""
        for rank in self.ranks:
            if rank.is_told:
                rank.step()

    def deliver(self, limit: int | None = None) -> None:
        self.network.deliver(limit)

    def settle(self, *, limit_s: float = 3000.0, after_each: Callable[[], None] = int) -> None:
        """Carry out everything, letting time pass where a planner waits for it."""
        until = self.now_s + limit_s
        for _ in range(ROUNDS_MAX):
            self.deliver(self.random.choice((1, 3, 10)))
            self.hear()
            busy = [rank for rank in self.ranks if rank.tasks]
            if busy:
                self.random.choice(busy).run_one(self.random)
            after_each()
            if busy or self.network.waiting:
                continue
            self.step()
            if self.network.waiting or any(rank.tasks or rank.is_told for rank in self.ranks):
                continue
            waits = [rank.next_s for rank in self.ranks if rank.next_s is not None]
            if not waits or min(waits) > until:
                return
            self.now_s = max(self.now_s, min(waits))
        raise AssertionError("it never comes to rest")

    # Looking -------------------------------------------------------------------------------------

    def records(self, tier: str, node: int) -> dict[CheckpointId, Commit]:
        """The commit records on one disk, as a look at its bytes finds them."""
        found = {}
        for key, data in self.disk(tier, node)._objects.items():
            if key.endswith(f"/{keys.COMMIT_NAME}"):
                folder = key.removeprefix("run/").removesuffix(f"/{keys.COMMIT_NAME}")
                if (id := keys.parse_step_folder(folder)) is not None:
                    found[id] = self._read(data)
        return found

    def committed(self, tier: str) -> set[CheckpointId]:
        """What is committed on every disk of a tier."""
        found = [set(self.records(tier, node)) for node in self.disks(tier)]
        return set.intersection(*found)
