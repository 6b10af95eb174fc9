"""A person in the histories of several ranks: orders given to rank 0, and marks left on disks beside the trainer.

What was pinned stays wherever the pin is, until it is taken away; what was deleted is nowhere in the end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

from tests.simulation.many import Many
from tests.simulation.world import Place
from tierfall.core.format.records import Mark
from tierfall.core.scheduler.ledger.tasks import CommandKind
from tierfall.core.types import keys
from tierfall.core.types.values import CheckpointId
from tierfall.tiers.stored import StoredTier


class Person:
    """Gives orders in a world, and remembers what was promised. ``doomed`` are those whose deletion was asked for."""

    def __init__(self, world: Many, draw: random.Random) -> None:
        self.world = world
        self.draw = draw
        self.doomed: set[CheckpointId] = set()
        self.deleted: set[CheckpointId] = set()
        self.refused: set[CheckpointId] = set()
        """What this start did not delete everywhere, as it said: a pin on one node, say, keeps the part there."""
        self.counts: Counter[str] = Counter()
        self._pins: dict[CheckpointId, set[Place]] = {}
        self._pins_of_ranks: set[CheckpointId] = set()  # wherever they are, memory included
        self._answers: list[tuple[CommandKind, CheckpointId, list[dict[str, BaseException]]]] = []

    def _known(self) -> list[CheckpointId]:
        return sorted({id for place in self._places() for id in self.world.records(*place)})

    def _places(self) -> list[Place]:
        return [(tier, node) for tier in self.world.stored for node in self.world.disks(tier)]

    def _holding(self, id: CheckpointId) -> set[Place]:
        return {place for place in self._places() if id in self.world.records(*place)}

    def order(self) -> None:
        """All ranks call pin, unpin or delete: rank 0 gives the order."""
        held = {id for rank in self.world.ranks for id in rank.sealed()}
        if not (known := sorted({*self._known(), *held})):
            return
        id, kind = self.draw.choice(known), self.draw.choice(tuple(CommandKind))
        self.world.trace.append(f"a person: {kind} {id}")
        if kind is CommandKind.UNPIN:
            self._pins.pop(id, None)
            self._pins_of_ranks.discard(id)
        if kind is CommandKind.DELETE:
            self.doomed.add(id)
        self._answers.append((kind, id, self.world.ranks[0].order(kind, id)))

    def leave_mark(self) -> None:
        """A command on one node leaves a mark on what that node sees, beside the trainer."""
        node = self.draw.choice(sorted(set(self.world.node_of)))
        seen = [(t, n) for t, n in self._places() if n == node or len(self.world.disks(t)) == 1]
        if not (known := sorted({id for place in seen for id in self.world.records(*place)})):
            return
        id = self.draw.choice(known)
        name = self.draw.choice((keys.PIN_MARK, keys.PIN_MARK, keys.TOMBSTONE_MARK))
        pinned = any(keys.PIN_MARK in self._store(place).marks(id) for place in seen)
        if name == keys.TOMBSTONE_MARK and pinned:
            return
        self.world.trace.append(f"a command on node {node}: {name} {id}")
        self.counts["mark"] += 1
        for place in self._holding(id).intersection(seen):
            self._store(place).add_mark(Mark(name=name, checkpoint=id, wall_time_s=0.0))
            messages = id in self.world.ranks[0].committed(place[0])  # else it may be taken back
            if name == keys.PIN_MARK and messages and not self._is_unpinning(id):
                self._pins.setdefault(id, set()).add(place)
        if name == keys.TOMBSTONE_MARK:
            self.doomed.add(id)

    def _is_unpinning(self, id: CheckpointId) -> bool:
        return any(kind is CommandKind.UNPIN and of == id for kind, of, _ in self._answers)

    def _store(self, place: Place) -> StoredTier:
        return StoredTier(name=place[0], run="run", backend=self.world.disk(*place))

    def look(self) -> None:
        """Take the answers that have come, and see that what is pinned stays where it is."""
        self._take_answers()
        for id, places in self._pins.items():
            for place in places:
                assert id in self.world.records(*place), f"{id} is pinned, and went from {place}"
                assert keys.PIN_MARK in self._store(place).marks(id), f"the pin of {id} is gone"

    def _take_answers(self) -> None:
        for kind, id, answer in [a for a in self._answers if a[2]]:
            self._answers.remove((kind, id, answer))
            done = not answer[0]
            self.counts[f"{kind}"] += done
            self.world.trace.append(f"a person: {kind} {id} ended: {answer[0]}")
            if kind is CommandKind.PIN and done and not self._is_unpinning(id):
                self._pins_of_ranks.add(id)
                messages = self.world.ranks[0].committed  # what is not may be taken back
                holding = {place for place in self._holding(id) if id in messages(place[0])}
                self._pins.setdefault(id, set()).update(holding)
            if kind is CommandKind.DELETE:
                (self.deleted if done else self.refused).add(id)

    def crash(self) -> None:
        """Nobody answers any more; what was being pinned is not promised."""
        self._take_answers()
        self._answers.clear()
        self.refused.clear()

    def forget(self, places: Collection[Place], *, above: int) -> None:
        """These disks are lost with what was pinned there. Attempts ``above`` are counted anew: others will be called
        the same."""
        for id, pinned in list(self._pins.items()):
            pinned.difference_update(places)
            if not pinned:
                del self._pins[id]
        self._pins_of_ranks -= {id for id in self._pins_of_ranks if id.attempt > above}
        for gone_for_ever in (self.doomed, self.deleted):
            gone_for_ever -= {id for id in gone_for_ever if id.attempt > above}

    def check_settled(self) -> None:
        assert not self._answers, f"nobody answers: {self._answers}"
        for id in self.deleted:
            assert not self._holding(id), f"{id} was deleted, and is on {self._holding(id)}"
            there = [rank.number for rank in self.world.ranks if id in rank.sealed()]
            assert not there, f"{id} was deleted, and ranks {there} have it in memory"

    def check_started(self) -> None:
        """After a start nothing bears a tombstone and no pin: no commit is needed for it to be seen."""
        for place in self._places():
            for id in self.world.records(*place):
                marks = self._store(place).marks(id)
                assert keys.TOMBSTONE_MARK not in marks or self._is_pinned(id), f"{id} on {place}"

    def pinned_at(self, tier: str, node: int) -> set[CheckpointId]:
        store, there = self._store((tier, node)), self.world.records(tier, node)
        return {id for id in there if keys.PIN_MARK in store.marks(id)}

    def pinned_on(self, tier: str) -> set[CheckpointId]:
        return set().union(*(self.pinned_at(tier, node) for node in self.world.disks(tier)))

    def _is_pinned(self, id: CheckpointId) -> bool:
        # a pin that ranks gave where memory alone had it is in memory, and a command on a tier does not see it
        in_memory = id in self._pins_of_ranks and any(
            id in rank.sealed() for rank in self.world.ranks
        )
        return in_memory or any(
            keys.PIN_MARK in self._store(p).marks(id) for p in self._holding(id)
        )
