"""Images of other ranks that an earlier start left in memory: which of them give way to a save, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.core.scheduler.test_superseding import rest
from tests.simulation.peer_hour import peer_rules
from tests.simulation.world import IMAGE, World, file_rules, host_rules
from tierfall.core.capture.snapshot import HostRegion
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.ledger import ALONE, Ledger
from tierfall.core.types.errors import UnreachableError
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.session.leftovers import Leftovers

PEERS, STORE = "peers", "store"
OLD, NEW, STRAY = CheckpointId(10, 1), CheckpointId(20, 2), CheckpointId(90, 3)


def given_up(leftovers: Leftovers) -> list[CheckpointId]:
    """Make room as often as it can be made; return what was deleted, in order."""

    def each() -> Iterator[CheckpointId]:
        before = set(leftovers.partial_images)
        while leftovers.evict_oldest():
            yield from before - set(leftovers.partial_images)
            before = set(leftovers.partial_images)

    return list(each())


def left(
    few: dict[CheckpointId, bool],
    committed: dict[CheckpointId, str],
    *,
    restored_from: CheckpointId | None,
    has_other_images: bool = False,
) -> Leftovers:
    """A part of each of the three checkpoints is in memory. ``few`` are on too few nodes."""
    ledger = Ledger(
        (host_rules(), peer_rules(), file_rules(STORE)), "host", on_few_nodes={PEERS: few}
    )
    copies = [(id, tier, CopyState.COMMITTED) for id, tier in committed.items()]
    if has_other_images:
        copies.append((CheckpointId(30, 4), "host", CopyState.SEALED))
    for id, tier, state in copies:
        ledger.entries[id] = LedgerEntry(id=id, ordinal=1, started_from=None, shard=ALONE)
        ledger.entries[id].set_state(tier, state, 1)
    ledger.restored_from = restored_from
    leftovers = Leftovers(ledger, [])
    for id in (OLD, NEW, STRAY):
        region = cast(HostRegion, SimpleNamespace(release=lambda: None))
        leftovers.partial_images[id] = [region]
    return leftovers


@pytest.mark.parametrize(
    ("few", "committed", "order"),
    [
        ({OLD: True, NEW: True}, {OLD: PEERS, NEW: PEERS}, [OLD, STRAY, NEW]),
        ({OLD: True, NEW: False}, {OLD: PEERS, NEW: PEERS}, [STRAY, NEW, OLD]),
        ({OLD: True}, {OLD: PEERS}, [STRAY, NEW, OLD]),  # the restored one is in memory alone
        ({OLD: True, NEW: True}, {}, [OLD, STRAY, NEW]),
        ({OLD: True}, {}, [STRAY, NEW, OLD]),  # peer memory and host memory are whole only together
        ({OLD: True, STRAY: False}, {OLD: PEERS, STRAY: PEERS}, [STRAY, NEW, OLD]),
        ({OLD: True}, {NEW: PEERS}, [OLD, STRAY, NEW]),  # the newer one is on all nodes
        ({OLD: True}, {NEW: STORE}, [OLD, NEW, STRAY]),
    ],
)
def test_what_peer_memory_counts_on_gives_way_last(
    few: dict[CheckpointId, bool], committed: dict[CheckpointId, str], order: list[CheckpointId]
) -> None:
    assert given_up(left(few, committed, restored_from=NEW)) == order


def test_what_peer_memory_counts_on_stays_while_memory_has_other_images() -> None:
    leftovers = left({OLD: True}, {OLD: PEERS}, restored_from=NEW, has_other_images=True)
    assert given_up(leftovers) == [STRAY]


class OneLeft:
    """An image that an earlier start left in memory."""

    def __init__(self, world: World) -> None:
        self._memory = world.memory
        self.region = world.memory.allocate(image_bytes=IMAGE, records_bytes=0)
        assert self.region is not None
        world.coordinator._leftovers = self

    @property
    def there(self) -> bool:
        return self.region in self._memory.regions

    def on_committed(self, tier: str, newer: Any) -> None: ...

    def evict_oldest(self) -> bool:
        was_there = self.there
        if was_there:
            self.region.release()
        return was_there


def in_memory(world: World) -> list[int]:
    return [e.id.step for e in world.coordinator.ledger.open() if e.region is not None]


@pytest.mark.parametrize("failing", [True, False])
def test_the_newest_image_and_one_that_is_owed_go_after_an_earlier_starts(failing: bool) -> None:
    """Host memory has room for three: the part of another rank, one image that is on the disk, and perhaps one that a
    failing disk is owed."""
    world = World([file_rules("nvme")], memory_images=3 if failing else 2)
    part = OneLeft(world)
    world.save(1)
    world.settle()
    if failing:
        world.coordinator.ledger.failing["nvme"] = UnreachableError("on purpose")
        rest(world)
        world.save(2)
        assert part.there
        world.save(3)
        assert part.there, "step 1 is on the disk"
    world.save(4)
    assert not part.there
    assert in_memory(world) == ([2, 3, 4] if failing else [1, 4])


def test_a_copy_that_peer_memory_may_count_on_is_given_up_once_and_only_where_nothing_else_may_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two images are on the disk, and uploaded to peer memory, which does not commit them."""
    world = World([peer_rules(), file_rules("nvme")], memory_images=3)
    part = OneLeft(world)
    for step in (1, 2):
        world.save(step)
        world.settle()
    for step in (1, 2):
        entry = world.coordinator.ledger.entries[CheckpointId(step, 1)]
        del entry.states[PEERS]
        entry.owed.add(PEERS)
        entry.uploaded_to.add(PEERS)
    group, asked = world.coordinator.group, []
    give_up_copy = group.give_up_copy
    monkeypatch.setattr(group, "give_up_copy", lambda *those: asked.append(those))
    assert world.ask_for_region(3)
    assert (part.there, in_memory(world), asked) == (False, [1, 2], [])
    answer = world.ask_for_region(4)
    for _ in range(3):
        world.step()
    ((entry, tier, error),) = asked
    assert (entry.id.step, tier, answer) == (1, PEERS, [])
    assert f"flush of {entry.id} to {PEERS} is given up: " in str(error)
    give_up_copy(*asked[0])
    world.step()
    assert answer
    assert in_memory(world) == [2]
