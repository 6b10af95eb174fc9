"""Images of other ranks that an earlier start left in memory: which of them give way to a save, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from tests.simulation.peer_hour import peer_rules
from tests.simulation.world import file_rules, host_rules
from tierfall.core.capture.snapshot import HostRegion
from tierfall.core.flush.facts import Ledger, LedgerEntry
from tierfall.core.format.decided import DecidedList, Word
from tierfall.core.types.values import CheckpointId, CopyState, Shard
from tierfall.setup.host_memory import Leftovers

PEERS, STORE = "peers", "store"
OLD, NEW, STRAY = CheckpointId(10, 1), CheckpointId(20, 2), CheckpointId(90, 3)


def given_up(leftovers: Leftovers) -> list[CheckpointId]:
    """Make room as often as it can be made; return what was deleted, in order."""

    def each() -> Iterator[CheckpointId]:
        before = set(leftovers.images)
        while leftovers.evict_oldest():
            yield from before - set(leftovers.images)
            before = set(leftovers.images)

    return list(each())


def left(
    few: dict[CheckpointId, bool],
    committed: dict[CheckpointId, str],
    *,
    restored_from: CheckpointId | None,
    has_other_images: bool = False,
    has_peers: bool = True,
) -> Leftovers:
    """A part of each of the three checkpoints is in memory. ``few`` are on too few nodes."""
    peers = (peer_rules(),) if has_peers else ()
    ledger = Ledger((host_rules(), *peers, file_rules(STORE)), "host")
    ledger.load((), (), decided=DecidedList(), on_few_nodes={PEERS: few})
    copies = [(id, tier, CopyState.COMMITTED) for id, tier in committed.items()]
    if has_other_images:
        copies.append((CheckpointId(30, 4), "host", CopyState.SEALED))
    for id, tier, state in copies:
        ledger.entries[id] = LedgerEntry(id=id, ordinal=1, started_from=None, shard=Shard(0, 1))
        ledger.entries[id].set_state(tier, state, 1)
    ledger.restored_from = restored_from
    leftovers = Leftovers(ledger, [])
    for id in (OLD, NEW, STRAY):
        region = cast(HostRegion, SimpleNamespace(release=lambda: None))
        leftovers.images[id] = [region]
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


def test_the_restored_one_gives_way_to_what_peer_memory_counts_on() -> None:
    """The image of this rank that was reported stays, though the restored one is newer: that was never reported."""
    mine = CheckpointId(30, 4)
    leftovers = left({mine: True}, {mine: PEERS}, restored_from=STRAY, has_other_images=True)
    assert given_up(leftovers) == [OLD, NEW, STRAY]


@pytest.mark.parametrize(
    ("has_other_images", "order"), [(False, [OLD, STRAY]), (True, [OLD, NEW, STRAY])]
)
def test_without_peers_the_restored_one_stays_until_all_memory_has_a_newer_one(
    has_other_images: bool, order: list[CheckpointId]
) -> None:
    others = {"has_other_images": has_other_images, "has_peers": False}
    assert given_up(left({}, {}, restored_from=NEW, **others)) == order


def test_what_a_person_has_deleted_is_released_once_the_lists_say_so() -> None:
    """Also what this start was restored from: else no save would find room."""
    leftovers = left({}, {}, restored_from=NEW)
    deleted = DecidedList().next(Word.DELETED, NEW, None)
    leftovers.ledger.decided = DecidedList([deleted])
    leftovers.free_deleted(lambda id: False)
    assert NEW in leftovers.images
    leftovers.free_deleted(lambda id: True)
    assert leftovers.images.keys() == {OLD, STRAY}
