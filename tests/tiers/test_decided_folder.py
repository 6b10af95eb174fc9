"""The list of what is decided on one tier: nothing in it is lost, and no deletion goes against it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_stored import attempt, commit, commit_of, keys, steps, tier_on, unsynced

from tests.faults import Fault, FaultKind, Faulty, Operation
from tests.memory_backend import MemoryBackend
from tierfall.backends.wrappers import Wrapper
from tierfall.core.format.decided import Decided, DecidedList, Word
from tierfall.core.types.backend import StoredObject
from tierfall.core.types.errors import BackendError, IntegrityError, UnreachableError
from tierfall.core.types.values import CheckpointId
from tierfall.tiers.stored import StoredTier

ONE = CheckpointId(1, 1)
ATTEMPT = "a" * 32
PIN = "decided/000001-pin-step-00000001-a0001-aaaaaaaaaaaaaaaa"


class Listings(Wrapper):
    """Counts the listings of what is decided, and leaves out of them the keys in ``hidden``."""

    def __init__(self, disk: MemoryBackend) -> None:
        super().__init__(disk)
        self.count = 0
        self.hidden: set[str] = set()

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        self.count += "/decided/" in prefix
        return (s for s in super().scan(prefix) if s.key.removeprefix("run/") not in self.hidden)


@pytest.fixture
def disk() -> MemoryBackend:
    return MemoryBackend("disk")


def decide(tier: StoredTier, word: Word, tag: str = "") -> Decided:
    """As a person's command: read the list, then add to it."""
    entry = tier.decided.read().next(word, ONE, ATTEMPT, tag)
    tier.decided.add(entry)
    return entry


def drop(tier: StoredTier, known: DecidedList | None) -> DecidedList | None:
    return tier.delete(ONE, attempt=None, known=known)


# Adding ----------------------------------------------------------------------------------------------


def test_two_processes_that_decide_at_once_lose_nothing(disk: MemoryBackend) -> None:
    one, other = tier_on(disk), tier_on(disk)
    seen = one.decided.read()
    assert other.decided.read() == seen
    for tier, word, tag in [(one, Word.PIN, ""), (other, Word.TAG, "best"), (other, Word.PIN, "")]:
        tier.decided.add(seen.next(word, ONE, ATTEMPT, tag))
    for tier in (one, other, tier_on(disk)):
        known = tier.list().decided
        assert known.is_pinned(ONE, ATTEMPT)
        assert known.tags(ONE, ATTEMPT) == {"best"}
    assert keys(disk) == [PIN, f"{PIN}-best".replace("pin", "tag")]


def test_an_entry_is_never_replaced(disk: MemoryBackend) -> None:
    tier = tier_on(disk)
    entry = DecidedList().next(Word.PIN, ONE, ATTEMPT)
    tier.decided.add(entry, reason="the good one")
    before = disk._objects[f"run/{PIN}"]
    tier_on(disk).decided.add(entry, reason="another")
    assert disk._objects[f"run/{PIN}"] is before
    assert tier.decided.reason(entry) == "the good one"


def test_an_entry_counts_though_its_reason_cannot_be_read(disk: MemoryBackend) -> None:
    tier = tier_on(disk)
    disk._objects[f"run/{PIN}"] = b""
    known = tier.decided.read()
    assert known.is_pinned(ONE, ATTEMPT)
    assert f"its entry {PIN} cannot be read" in tier.decided.reason(next(iter(known)))


def test_an_entry_is_durable_once_it_is_added(disk: MemoryBackend) -> None:
    """Where the fsync of the folder fails, adding it fails, and the next try leaves it durable."""
    faulty = unsynced(disk, "*/decided/*")
    tier = tier_on(faulty)
    entry = DecidedList().next(Word.PIN, ONE, ATTEMPT)
    with pytest.raises(BackendError, match="may not survive a power cut"):
        tier.decided.add(entry)
    assert not tier.decided.known
    tier.decided.add(entry)
    assert faulty.cut_power() == ()
    assert tier_on(disk).decided.read() == tier.decided.known == DecidedList([entry])


# Reading ---------------------------------------------------------------------------------------------


def test_what_was_read_or_added_stays_known_though_a_listing_leaves_it_out(
    disk: MemoryBackend,
) -> None:
    decide(tier_on(disk), Word.PIN)
    lagging = Listings(disk)
    tier = tier_on(lagging)
    assert tier.list().decided.is_pinned(ONE, ATTEMPT)
    decide(tier, Word.TAG, "best")
    lagging.hidden.update(keys(disk))
    for known in (tier.list().decided, tier.decided.read(), tier.decided.known):
        assert known.is_pinned(ONE, ATTEMPT)
        assert known.tags(ONE, ATTEMPT) == {"best"}
    assert not tier_on(lagging).list().decided


# Deleting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [Word.PIN, Word.UNPIN, Word.TAG, Word.UNTAG, Word.DELETED])
def test_nothing_is_deleted_if_more_is_decided_than_the_caller_knows(
    disk: MemoryBackend, word: Word
) -> None:
    tier = tier_on(disk)
    commit(tier, 1)
    tag = "best" if word in (Word.TAG, Word.UNTAG) else ""
    entry = decide(tier_on(disk), word, tag)
    assert drop(tier, DecidedList()) == DecidedList([entry])
    assert steps(tier) == ["1@1"]
    assert drop(tier, DecidedList([entry])) is None
    assert steps(tier) == []


def test_damage_of_a_copy_hinders_no_deletion(disk: MemoryBackend) -> None:
    tier = tier_on(disk)
    commit(tier, 1)
    tier_on(disk).note_damaged(commit_of(1), "a flipped bit")
    assert drop(tier, DecidedList()) is None
    assert steps(tier) == []


def test_a_copy_whose_commit_was_revoked_goes_whatever_is_decided(disk: MemoryBackend) -> None:
    tier = tier_on(disk)
    commit(tier, 1)
    decide(tier_on(disk), Word.PIN)
    assert drop(tier, None) is None
    assert steps(tier) == []


def test_nothing_is_deleted_if_the_list_cannot_be_read(disk: MemoryBackend) -> None:
    commit(tier_on(disk), 1)
    fault = Fault(kind=FaultKind.FAIL_BEFORE, operation=Operation.SCAN, keys="*/decided/*")
    with pytest.raises(UnreachableError):
        drop(tier_on(Faulty(disk, seed=0, plan=[fault])), DecidedList())
    assert steps(tier_on(disk)) == ["1@1"]


def test_each_deletion_reads_the_list_once(disk: MemoryBackend) -> None:
    counting = Listings(disk)
    tier = tier_on(counting)
    tier.delete(CheckpointId(9, 1), attempt=None, known=DecidedList())
    assert counting.count == 1
    commit(tier, 1)
    decide(tier_on(disk), Word.PIN)
    assert drop(tier, DecidedList())
    assert counting.count == 2


# Damage ----------------------------------------------------------------------------------------------


def damage_of(tier: StoredTier) -> str:
    (copy,) = tier.list().copies
    if copy.damage is None:
        return ""
    assert isinstance(copy.damage, IntegrityError)
    assert copy.commit == commit_of(1)
    return str(copy.damage)


@pytest.mark.parametrize("repairs", [True, False])
def test_a_damaged_copy_that_is_written_again_is_mended(disk: MemoryBackend, repairs: bool) -> None:
    commit(tier_on(disk), 1)
    tier_on(disk).note_damaged(commit_of(1), "a flipped bit")
    tier = tier_on(disk)
    assert damage_of(tier) == "nvme: 1@1 was found damaged: a flipped bit"
    if not repairs:
        disk.delete("run/step-00000001-a0001/commit.json")
    tier.commit(commit_of(1), attempt=attempt(), repairs=repairs)
    assert damage_of(tier) == damage_of(tier_on(disk)) == ""
    other = tier_on(disk)
    other.decided.read()
    other.note_damaged(commit_of(1), "another one")
    assert damage_of(tier).endswith("another one")


def test_a_damaged_copy_whose_record_is_there_already_is_not_mended_by_its_commit(
    disk: MemoryBackend,
) -> None:
    commit(tier_on(disk), 1)
    tier_on(disk).note_damaged(commit_of(1), "a flipped bit")
    tier = tier_on(disk)
    tier.commit(commit_of(1), attempt=attempt())
    assert damage_of(tier).endswith("a flipped bit")
