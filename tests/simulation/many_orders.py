"""A person in the histories of several ranks: orders given to rank 0, and entries left on disks beside the trainer.

What was pinned stays wherever the pin is, until it is taken away; what was deleted is nowhere in the end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

from tests.simulation.many import Many
from tests.simulation.world import Place, decided_on
from tierfall.core.flush.tasks import CommandKind
from tierfall.core.format.decided import DecidedList, Word
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
        kinds = (CommandKind.PIN, CommandKind.UNPIN, CommandKind.DELETE)
        id, kind = self.draw.choice(known), self.draw.choice(kinds)
        self.world.trace.append(f"a person: {kind} {id}")
        if kind is CommandKind.UNPIN:
            self._pins.pop(id, None)
        if kind is CommandKind.DELETE:
            self.doomed.add(id)
        self._answers.append((kind, id, self.world.ranks[0].order(kind, id)))

    def decide_beside(self) -> None:
        """A command on one node adds to the lists of what that node sees, beside the trainer."""
        node = self.draw.choice(sorted(set(self.world.node_of)))
        seen = [(t, n) for t, n in self._places() if n == node or len(self.world.disks(t)) == 1]
        if not (known := sorted({id for place in seen for id in self.world.records(*place)})):
            return
        id = self.draw.choice(known)
        word = self.draw.choice((Word.PIN, Word.PIN, Word.DELETED))
        decided = self._decided(seen)
        if decided.is_pinned(id, None) if word is Word.DELETED else decided.is_deleted(id, None):
            return  # the command line refuses that
        self.world.trace.append(f"a command on node {node}: {word} {id}")
        self.counts["beside"] += 1
        commit = next(c for p in seen if (c := self.world.records(*p).get(id)) is not None)
        entry = decided.next(word, id, commit.lineage.attempt_id)
        holding = self._holding(id)
        for place in seen:
            self._store(place).decided.add(entry)
            messages = id in self.world.ranks[0].committed(place[0])  # else it may be taken back
            if word is Word.PIN and place in holding and messages and not self._is_unpinning(id):
                self._pins.setdefault(id, set()).add(place)
        if word is Word.DELETED:
            self.doomed.add(id)

    def _is_unpinning(self, id: CheckpointId) -> bool:
        return any(kind is CommandKind.UNPIN and of == id for kind, of, _ in self._answers)

    def _store(self, place: Place) -> StoredTier:
        return StoredTier(name=place[0], run="run", backend=self.world.disk(*place))

    def _decided(self, places: Collection[Place]) -> DecidedList:
        return decided_on(self.world.disk(*place) for place in places)

    def look(self) -> None:
        """Take the answers that have come, and see that what is pinned stays where it is."""
        self._take_answers()
        decided = self._decided(self._places()) if self._pins else DecidedList()
        for id, places in self._pins.items():
            assert not places or decided.is_pinned(id, None), f"the pin of {id} is gone"
            for place in places:
                assert id in self.world.records(*place), f"{id} is pinned, and went from {place}"

    def _take_answers(self) -> None:
        for kind, id, answer in [a for a in self._answers if a[2]]:
            self._answers.remove((kind, id, answer))
            done = not answer[0]
            self.counts[f"{kind}"] += done
            self.world.trace.append(f"a person: {kind} {id} ended: {answer[0]}")
            if kind is CommandKind.PIN and done and not self._is_unpinning(id):
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
        for gone_for_ever in (self.doomed, self.deleted):
            gone_for_ever -= {id for id in gone_for_ever if id.attempt > above}

    def check_settled(self) -> None:
        assert not self._answers, f"nobody answers: {self._answers}"
        for id in self.deleted:
            assert not self._holding(id), f"{id} was deleted, and is on {self._holding(id)}"
            there = [rank.number for rank in self.world.ranks if id in rank.sealed()]
            assert not there, f"{id} was deleted, and ranks {there} have it in memory"

    def check_started(self) -> None:
        """After a start nothing is there that was deleted and is not pinned: no commit is needed for it to be seen."""
        decided = self._decided(self._places())
        for place in self._places():
            for id in self.world.records(*place):
                assert not decided.is_deleted(id, None), f"{id} on {place}"

    def pinned_at(self, tier: str, node: int) -> set[CheckpointId]:
        decided, there = self._decided([(tier, node)]), self.world.records(tier, node)
        return {id for id in there if decided.is_pinned(id, None)}

    def pinned_on(self, tier: str) -> set[CheckpointId]:
        return set().union(*(self.pinned_at(tier, node) for node in self.world.disks(tier)))
