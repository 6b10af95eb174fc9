"""Several ranks of one run in miniature: each with the production coordinator, ledger, policies, tiers and task runner,
its own memory, the disk of its node and one disk that all see; their councils over a network that a seed delivers.

One thread and a virtual clock drive it all. Tasks, messages and coordinators go on when the test says so, in an order
that a seed decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from tests.core.ranks.network import Network
from tests.simulation.noted import Life
from tests.simulation.rank import Rank
from tests.simulation.world import (
    CommitReader,
    host_rules,
)
from tierfall.backends.memory import MemoryBackend
from tierfall.core.capture.snapshot import Share
from tierfall.core.format.catalog import merge, starts_in
from tierfall.core.format.records import Attempt, Commit, read_commit
from tierfall.core.ranks.message_tree import Topic
from tierfall.core.restore.agreement import choose_together, complete, whole_on
from tierfall.core.restore.candidates import Request
from tierfall.core.restore.inventory import describe, merge_ranks
from tierfall.core.scheduler.ledger.tasks import Task
from tierfall.core.types import keys
from tierfall.core.types.errors import RestoreError
from tierfall.core.types.values import CheckpointId, Codec, WhenFull
from tierfall.core.types.view import TierRules
from tierfall.session.leftovers import inherited
from tierfall.session.start import Start, damaged_copies, held_by_all

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
        share: Callable[[CheckpointId, int], Share | None] = lambda id, rank: None,
    ) -> None:
        """``rules`` are those of the tiers ``nvme``, which each node has for itself, and ``pfs``, which all see;
        ``share`` says what a rank digested of a checkpoint that all ranks compare."""
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
        self.lives: list[Life] = []
        self.said: Callable[[Topic, Any], None] = lambda topic, body: None
        self.ran: Callable[[Rank, Task], None] = lambda rank, task: None
        self._disks: dict[tuple[str, int | None], MemoryBackend] = {}
        self._read = CommitReader().read
        self.starts = 0
        self.started_from: CheckpointId | None = None
        self.ranks = [Rank(self, number, memory_images) for number in range(len(self.node_of))]
        self.start()

    def disk(self, tier: str, node: int) -> MemoryBackend:
        key = (tier, None if tier == SHARED_TIER else node)
        return self._disks.setdefault(key, MemoryBackend(place=f"{tier} of node {node}"))

    def disks(self, tier: str) -> dict[int, MemoryBackend]:
        """The disks of a tier by node; the shared one under 0."""
        nodes = sorted(set(self.node_of)) if tier == NODE_TIER else [0]
        return {node: self.disk(tier, node) for node in nodes}

    # Starts --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the run on all ranks as one new attempt, and go on from the newest checkpoint that all can restore."""
        self.starts += 1
        self.network = Network(
            self.node_of, seed=self.seed + 1000 * self.starts, fan_out=self.fan_out
        )
        listings = {rank: rank.open() for rank in self.ranks}
        described = {
            rank.number: describe(listings[rank], mine=self._told_by(rank)) for rank in self.ranks
        }
        order = [rules.name for rules in self.rules]
        together = merge_ranks(described, order)
        found, _ = complete(together)
        known = {copy.id: copy.commit for listing in together for copy in listing.copies}
        numbers = [n for x in together for n in x.attempts] + [id.attempt for id in known]
        numbers += [n for listed in listings.values() for x in listed for n in x.attempts]
        self.attempt = _attempt(1 + max(numbers, default=0))
        start = Start(
            attempt=self.attempt,
            whole={
                x.tier: frozenset(c.id for c in x.copies if whole_on(x, c.id)) for x in together
            },
            complete=found,
            seen=frozenset(x.tier for x in together if x.error is None),
            first=not known,
            inherited=tuple(
                read_commit(text.encode(), what="inherited")
                for text in inherited(
                    together, described, host="host", world_size=len(self.node_of)
                )
            ),
            marks={x.tier: {c.id: c.marks for c in x.copies if c.marks} for x in together},
            deleted=frozenset(c.id for c in merge(together) if c.tombstoned and not c.pinned),
            damaged={
                tier: {CheckpointId(step, attempt): why for step, attempt, why in said}
                for tier, said in damaged_copies(together, host="host").items()
            },
            starts=starts_in(together, found),
        )
        self.started_from = self._chosen(described, order)
        commit = known.get(self.started_from) if self.started_from else None
        self.trace.append(f"attempt {self.attempt.number} goes on from {self.started_from}")
        host = SimpleNamespace(host=SimpleNamespace(name="host"))
        for rank in self.ranks:
            session = SimpleNamespace(config=host, listings=listings[rank], ranks=rank)
            rank.ordinal = commit.line.ordinal if commit else 0
            rank.start(start, listings[rank], held_by_all(cast(Any, session), start))
        for rank in self.ranks:
            rank.step()

    def _chosen(
        self, described: Mapping[int, Mapping[str, Any]], order: Sequence[str]
    ) -> CheckpointId | None:
        try:
            chosen = choose_together(described, order, Request())["order"]
        except RestoreError as error:  # a person decides to begin anew
            self.trace.append(f"fresh: {error}")
            return None
        return CheckpointId(*chosen[0]) if chosen else None

    def _told_by(self, rank: Rank) -> tuple[str, ...]:
        topology = self.network.councils[rank.number].topology
        told = ["host"]
        told += [NODE_TIER] if topology.is_leader and NODE_TIER in self.stored else []
        told += [SHARED_TIER] if topology.is_root else []
        return tuple(told)

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
        """Let every coordinator go on that was told something."""
        for rank in self.ranks:
            if rank.is_told:
                rank.step()

    def deliver(self, limit: int | None = None) -> None:
        self.network.deliver(limit)

    def settle(self, *, limit_s: float = 3000.0, after_each: Callable[[], None] = int) -> None:
        """Carry out everything, letting time pass where a coordinator waits for it."""
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
            folder, _, rest = key.removeprefix("run/").partition("/")
            id = keys.parse_step_folder(folder)
            if id is not None and rest == keys.COMMIT_NAME:
                found[id] = self._read(data)
        return found

    def committed(self, tier: str) -> set[CheckpointId]:
        """What is committed on every disk of a tier."""
        found = [set(self.records(tier, node)) for node in self.disks(tier)]
        return set.intersection(*found)


def _attempt(number: int) -> Attempt:
    attempt = Attempt(run="run", number=1, id="", node="n", pid=1, wall_time_s=0.0)
    return replace(attempt, number=number, id=f"{number:032x}")
