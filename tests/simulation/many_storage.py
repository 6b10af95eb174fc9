"""What happens to the storage of several ranks in their hours: copies are damaged, nodes are lost, tiers go away and
come back, folders cannot be written; and what must hold of it whatever the ranks do.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable
from functools import partial

from tests.core.ranks.network import Network
from tests.simulation.clock import Clock
from tests.simulation.many import NODE_TIER, SHARED_TIER, Many
from tests.simulation.mounts import remembers
from tests.simulation.rank import Rank, Troubled
from tests.simulation.world import (
    Place,
    Zombie,
    abandoned,
    flip_bit,
    image_key,
    images_of,
    newest_attempt,
    objects_on,
    start_in,
)
from tierfall.core.format.catalog import UNSEEN_ATTEMPTS
from tierfall.core.format.records import Commit, parse_attempt_record, parse_commit
from tierfall.core.types import keys
from tierfall.core.types.events import SetAside
from tierfall.core.types.values import CheckpointId

Part = tuple[str, int, CheckpointId, int]
"""One rank's image of a checkpoint on a node's disk of a tier."""


def id_of(key: str) -> CheckpointId | None:
    """Return whose file an object is; None where it is no checkpoint's."""
    return keys.parse_step_folder(key.removeprefix("run/").partition("/")[0])


class Damage:
    """The images on the disks of a world that were purged, or of which a bit has flipped, under their records."""

    def __init__(self, world: Many, seed: int) -> None:
        self.world = world
        self.draw = random.Random(f"damage {seed}")
        self._bad: dict[Part, tuple[str, object | None]] = {}
        self.ever: set[tuple[str, CheckpointId]] = set()
        """The copies that were damaged when the present start began: it may take them for damaged to its end."""
        self.counts: Counter[str] = Counter()

    @property
    def bad(self) -> set[Part]:
        """What is damaged still: it was not written anew, nor has its record gone."""
        for part, (key, data) in list(self._bad.items()):
            tier, node, id, _ = part
            objects = self.world.disk(tier, node)._objects
            has_record = keys.step_prefix("run", id) + keys.COMMIT_NAME in objects
            if not has_record or objects.get(key) is not data:
                del self._bad[part]
        return set(self._bad)

    def on(self, tier: str) -> set[CheckpointId]:
        """The checkpoints of which a part on a tier is damaged, or was as this start began."""
        return {id for name, id in self.ever if name == tier}

    def begin_anew(self) -> None:
        """Another start begins."""
        self.ever = {(tier, id) for tier, _, id, _ in self.bad}

    def good(self, tier: str, *, repaired: bool = False) -> set[CheckpointId]:
        """What is committed on every disk of a tier, so that no power cut takes it away, and was not damaged when this
        start began; ``repaired``: nor is now."""
        bad = {id for name, _, id, _ in self.bad if name == tier} if repaired else self.on(tier)
        return self.world.committed(tier) - bad - self._unsynced(tier)

    def _unsynced(self, tier: str) -> set[CheckpointId]:
        """What a power cut would take away on some disk of a tier."""
        return {
            id
            for node, disk in self.world.disks(tier).items()
            for key in self.world.unsynced(tier, node).keys & disk._objects.keys()
            if (id := id_of(key)) is not None
        }

    def check_seen(self) -> None:
        """A start takes no copy for good that its listing shows to lack an image, or that a power cut takes away."""
        for tier in sorted(set(self.world.stored) - self.world.unread):
            unsynced = self._unsynced(tier)
            taken = [rank.number for rank in self.world.ranks if unsynced & rank.committed(tier)]
            assert not taken, f"{tier}: ranks {taken} take {unsynced} for durable"
        for tier, node, id, number in self.bad:
            if self._bad[tier, node, id, number][1] is None and tier not in self.world.unread:
                taken = [rank.number for rank in self.world.ranks if id in rank.committed(tier)]
                assert not taken, f"{tier}: ranks {taken} take {id} for good, which was purged"

    def purge(self) -> None:
        """A tier loses an image; its commit record stays."""
        if (part := self._draw_part(newest=False)) is not None:
            tier, node, id, number = part
            disk = self.world.disk(tier, node)
            key = image_key(self.world.records(tier, node)[id], self.world.ranks[number].shard)
            del disk._objects[key]
            self._note("purged", part, key, None)

    def flip(self) -> None:
        """A bit flips in the newest image that any tier has: no listing tells."""
        if (part := self._draw_part(newest=True)) is not None:
            tier, node, id, number = part
            key = image_key(self.world.records(tier, node)[id], self.world.ranks[number].shard)
            self._note("rotten", part, key, flip_bit(self.world.disk(tier, node), key, self.draw))

    def _draw_part(self, *, newest: bool) -> Part | None:
        """The run keeps another good copy of something."""
        copies = sorted((id, tier) for tier in self.world.stored for id in self.good(tier))
        if len(copies) < 2:
            return None
        copies = [copy for copy in copies if copy[0] == copies[-1][0]] if newest else copies
        id, tier = self.draw.choice(copies)
        rank = self.draw.choice(self.world.ranks)
        return tier, 0 if tier == SHARED_TIER else rank.node, id, rank.number

    def _note(self, what: str, part: Part, key: str, data: object | None) -> None:
        self._bad[part] = key, data
        self.ever.add((part[0], part[2]))
        self.counts[what] += 1
        self.world.trace.append(f"{what}: {key} on {part[:2]}")

    # What can be restored ----------------------------------------------------------------------------

    def newest_restorable(self, but: Collection[CheckpointId]) -> CheckpointId | None:
        """The newest live checkpoint, ``but`` some, of which a good part of every rank is where this start can look."""
        known: dict[CheckpointId, Commit] = {}
        starts: set[tuple[int, int]] = set()
        lives: dict[int, set[str]] = {}
        for tier in self.world.stored:
            for node, disk in self.world.disks(tier).items():
                known |= self.world.records(tier, node)
                for attempt, attempt_id, step in filter(None, map(start_in, disk._objects)):
                    starts.add((attempt, step))
                    lives.setdefault(attempt, set()).add(attempt_id)
        in_memory = {
            (id, image.region.shard): parse_commit(image.region.commit(), what="memory")
            for rank in self.world.ranks
            for id, image in images_of(rank.memory)
        }
        known |= {id: commit for (id, _), commit in in_memory.items()}
        twice = {id for id in known if len(lives.get(id.attempt, ())) > 1}
        for id in sorted(known.keys() - abandoned(known, starts) - set(but) - twice, reverse=True):
            if all(
                (id, rank.shard) in in_memory or self._has_part(id, rank)
                for rank in self.world.ranks
            ):
                return id
        return None

    def _has_part(self, id: CheckpointId, rank: Rank) -> bool:
        bad = self.bad
        return any(
            id in self.world.records(tier, node) and (tier, node, id, rank.number) not in bad
            for tier in self.world.stored
            if tier not in self.world.unread
            for node in (0 if tier == SHARED_TIER else rank.node,)
        )


class ZombieRanks:
    """Ranks of a start that were taken for lost, and live. They hear each other still."""

    def __init__(self, ranks: Iterable[Rank], network: Network) -> None:
        self._ranks = [Zombie(rank, {SHARED_TIER}) for rank in ranks]
        self._network = network
        self.number = self._ranks[0].number

    def go_on(self, draw: random.Random, now_s: float, blind: Collection[str]) -> list[str]:
        self._network.deliver(draw.choice((0, 1, 5, 50)))
        return draw.choice(self._ranks).go_on(draw, now_s, blind)


class Faults:
    """What goes wrong with the tiers of a world, at the times of a clock."""

    def __init__(self, world: Many, damage: Damage, clock: Clock, seed: int) -> None:
        self.world, self.damage, self.clock = world, damage, clock
        self.draw = random.Random(f"storage {seed}")
        self._sight = random.Random(f"sight {seed}")
        self._power = random.Random(f"power {seed}")
        self.zombies: list[ZombieRanks] = []
        self.left_by_zombies: set[tuple[Place, str]] = set()
        self.fails_some: set[str] = set()
        """The tiers that take some of what comes, and not all: what alone fails there may be set aside."""
        self.hangs_as_it_drops = self.cuts_power = False
        self._block_next: Place | None = None
        self._events_seen = 0
        self.set_aside: list[SetAside] = []
        self.counts: Counter[str] = Counter()

    @property
    def nodes(self) -> list[int]:
        return sorted(set(self.world.node_of))

    def _views(self, tier: str, node: int | None = None) -> list[Troubled]:
        """What the ranks of a node, or of all, see of a tier."""
        ranks = self.world.ranks
        return [rank.troubles[tier] for rank in ranks if node in (None, rank.node)]

    def _draw_views(self) -> tuple[str, int | None]:
        """A tier, and the node where something happens to it; None: on all."""
        tier = self.draw.choice(self.world.stored)
        everywhere = tier == SHARED_TIER and self.draw.random() < 0.5
        return tier, None if everywhere else self.draw.choice(self.nodes)

    # Tiers that go away ------------------------------------------------------------------------------

    def unmount(self) -> float | None:
        """A tier's file system is unmounted on a node or on all, and mounted again after so many seconds."""
        tier, node = self._draw_views()
        views = self._views(tier, node)
        if not all(view.mounted and view.can_come_back for view in views):
            return None
        return self._take_away(tier, node)

    def _take_away(self, tier: str, node: int | None) -> float:
        seconds, cut_off = self.draw.uniform(20.0, 1200.0), self.draw.random() < 0.5
        self._say(f"{tier} is unmounted on node {node} for {seconds:.0f} s")
        self.counts["unmounted"] += 1
        self.fails_some.add(tier)  # a copy that was under way
        for view in self._views(tier, node):
            view.unmount(cut_off=cut_off)
            self.clock.after(seconds, view.mount)
        return seconds

    def lose_sight(self) -> None:
        """The next start cannot look at a tier: on a node or on all it is not mounted, or some ranks or all get no
        answer; where the former could not be told from an empty one, it is mounted."""
        tier, node = self._draw_views()
        views = self._views(tier, node)
        self.world.unopened = set(self.world.stored) if self.draw.random() < 0.3 else set()
        if self.draw.random() < 0.25 and all(view.mounted for view in views):
            if self.draw.random() < 0.5:
                self._take_away(tier, node)
            else:
                self._fall_silent(tier, self._views(tier))
        if self._sight.random() < 0.3:
            views = self._views(tier := self._sight.choice(self.world.stored))
            self._fall_silent(tier, self._sight.sample(views, self._sight.randint(1, len(views))))
        for name in self.world.stored:
            for at in self.nodes:
                if not self._is_seen(name, at) and not self._remembers(name, at):
                    for view in self._views(name, at):
                        view.mount()

    def _is_numbered_without(self, tier: str) -> bool:
        """Say whether a start that cannot list a tier takes a number above all there; else it is fenced there later, as
        where all other tiers were lost."""
        others = (self.world.disk(*place) for place in self._places() if place[0] != tier)
        return newest_attempt(others) + UNSEEN_ATTEMPTS >= self.newest_attempt()

    def _fall_silent(self, tier: str, views: list[Troubled]) -> None:
        if not self._is_numbered_without(tier):
            return
        self._say(f"{tier} is down for {len(views)} ranks")
        for view in views:
            view.down = True
            self.clock.after(self.draw.uniform(10.0, 600.0), partial(setattr, view, "down", False))

    def _is_seen(self, tier: str, node: int) -> bool:
        return all(view.mounted for view in self._views(tier, node))

    def _remembers(self, tier: str, node: int) -> bool:
        disks = {name: self.world.disk(name, node) for name in self.world.stored}
        seen = {name for name in disks if all(v.in_reach for v in self._views(name, node))}
        return remembers(tier, disks, self.world.machines[node], seen)

    def all_is_well(self, *, mounted: bool) -> None:
        for tier in self.world.stored:
            for view in self._views(tier):
                view.down, view.sync_fails = False, 0.0
                if mounted:
                    view.mount()

    # Fsyncs, and the power ---------------------------------------------------------------------------

    def fail_syncs(self) -> None:
        """Fsyncs of a tier's folders fail for a while; the power may be cut meanwhile, or the job killed."""
        tier, node = self._draw_views()
        self._say(f"fsyncs of {tier} fail on node {node}")
        for view in self._views(tier, node):
            view.sync_fails = 0.4
            self.clock.after(600.0, partial(setattr, view, "sync_fails", 0.0))
        self.cuts_power = self.draw.random() < 0.5
        self.fails_some.add(tier)

    def is_unsynced(self) -> bool:
        return any(self.world.unsynced(*place).keys for place in self._places())

    def _places(self) -> list[Place]:
        return [(tier, node) for tier in self.world.stored for node in self.world.disks(tier)]

    def loses_power(self) -> bool:
        """Say whether the power is cut; else the job is killed, and the next start finds what no fsync made durable."""
        return self._power.random() < 0.5

    def cut_power(self) -> None:
        """What no fsync has made durable is gone. Nobody was told that it is there."""
        self._say("the power is cut")
        messages = {
            (tier, id)
            for rank in self.world.ranks
            for id, handle in rank.handles.items()
            for tier in handle.tiers
            if handle.done(tier) and id in self.world.committed(tier)
        }
        for place in self._places():
            unsynced = self.world.unsynced(*place)
            for key in sorted(unsynced.keys & self.world.disk(*place)._objects.keys()):
                del self.world.disk(*place)._objects[key]
                self.world.trace.append(f"{place}: {key} is gone")
                self.counts["unsynced"] += 1
            unsynced.keys.clear()
        for tier, id in messages:
            there = id in self.world.committed(tier)
            assert there, f"{id} was told to be on {tier}, and the power cut"

    # Folders that cannot be written ------------------------------------------------------------------

    def replace_next_folder(self) -> None:
        """The folder of what is saved next is not tierfall's on some tier."""
        tier = self.draw.choice(self.world.stored)
        self._block_next = tier, 0 if tier == SHARED_TIER else self.draw.choice(self.nodes)

    def block(self, id: CheckpointId) -> None:
        """A rank begins to save a checkpoint: nothing can be made in its folder, where that was drawn."""
        if self._block_next is None:
            return
        (tier, node), prefix = self._block_next, keys.step_prefix("run", id)
        if any(key.startswith(prefix) for key in self.world.disk(tier, node)._objects):
            return
        self._block_next = None
        self._say(f"{tier} of node {node}: {id} cannot be written there")
        self.counts["blocked"] += 1
        for view in self._views(tier, None if tier == SHARED_TIER else node):
            view.blocked.add(prefix)

    def is_blocked(self, tier: str, id: CheckpointId) -> bool:
        return any(keys.step_prefix("run", id) in view.blocked for view in self._views(tier))

    def mend(self) -> None:
        """Whatever stood in the place of a folder is taken away."""
        for tier in self.world.stored:
            for view in self._views(tier):
                view.blocked.clear()

    def check_set_aside(self) -> None:
        """What alone cannot be written is set aside, and nothing else, whatever tiers do."""
        events = self.world.ranks[0].door.events
        for event in events[self._events_seen :]:
            if isinstance(event, SetAside):
                self.set_aside.append(event)
                may_be = self.is_blocked(event.tier, event.id) or event.tier in self.fails_some
                may_be |= any(event.id in self.damage.on(tier) for tier in self.world.stored)
                assert may_be, f"{event.id} is set aside, and can be written to {event.tier}"
        self._events_seen = len(events)

    # Nodes that are lost, and live -------------------------------------------------------------------

    def lose_nodes(self, nodes: Collection[int]) -> None:
        """Other machines go on in the place of these: their disks and memory are empty. The processes may live."""
        self._say(f"nodes {sorted(nodes)} are lost")
        self.counts["node"] += 1
        lost = [rank for rank in self.world.ranks if rank.node in nodes]
        if SHARED_TIER in self.world.stored:
            self.zombies.append(ZombieRanks(lost, self.world.network))
        for node in nodes:
            self.world.machines[node].data = None
            if NODE_TIER in self.world.stored:
                self.world.disk(NODE_TIER, node)._objects.clear()
                self.world.unsynced(NODE_TIER, node).keys.clear()
                for view in self._views(NODE_TIER, node):
                    view.blocked.clear()

    def newest_attempt(self) -> int:
        """The newest attempt that any disk knows of."""
        return newest_attempt(self.world.disk(*place) for place in self._places())

    def wake_zombies(self) -> None:
        """Processes that were taken for lost go on for a moment: whatever they do, nothing that lies where the newer
        attempt is known goes, or changes."""
        for zombies in self.zombies:
            if self.draw.random() < 0.2:
                disks = {(SHARED_TIER, 0): self.world.disk(SHARED_TIER, 0)}
                before = objects_on(disks)
                knows = newest_attempt(disks.values()) > zombies.number
                blind = set() if knows else {SHARED_TIER}
                self.world.trace += zombies.go_on(self.draw, self.world.now_s, blind)
                after = objects_on(disks)
                gone = [key for key, data in before.items() if after.get(key) is not data]
                assert not gone, f"a zombie took away {gone}"
                # an image that it had begun: the next start collects that
                self.left_by_zombies |= after.keys() - before.keys()

    def check_number(self) -> None:
        """No tier has a record of another attempt by the number of this start, unless both began while some tier could
        not be listed."""
        attempt = self.world.attempt
        key = keys.attempt_key("run", attempt.number)
        for place in self._places():
            if (record := self.world.disk(*place)._objects.get(key)) is None:
                continue
            known = parse_attempt_record(bytes(record), what=key).id
            both_blind = {known, attempt.id} <= self.world.blind
            assert known == attempt.id or both_blind, f"{place} has another {attempt.number}"

    def begin_anew(self) -> None:
        """Another start begins."""
        self.left_by_zombies.clear()
        self.fails_some.clear()
        self._events_seen = 0

    def skew_clocks(self) -> None:
        self.world.wall_ahead_s = {
            node: self.draw.choice((0.0, 0.0, -1000.0, 1000.0, 1e9)) for node in self.nodes
        }

    def _say(self, what: str) -> None:
        self.world.trace.append(f"{self.world.now_s:.0f} s: {what}")
