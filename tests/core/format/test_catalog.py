"""Merging the listings of several tiers: absent, damaged and unreadable are three different results."""

from __future__ import annotations

from dataclasses import replace

from tierfall.core.format.catalog import FoundCopy, Listing, merge, next_attempt, to_view
from tierfall.core.format.decided import DecidedList, Word
from tierfall.core.format.records import Attempt, Commit, Lineage, NamedFile
from tierfall.core.types.errors import IntegrityError, UnreachableError
from tierfall.core.types.values import CheckpointId, CopyState, LossClass, TierKind
from tierfall.core.types.view import TierRules

RULES = (
    TierRules(name="host", kind=TierKind.HOST, survives=LossClass.PROCESS),
    TierRules(name="nvme", kind=TierKind.FILE, survives=LossClass.PROCESS),
    TierRules(name="store", kind=TierKind.OBJECT, survives=LossClass.SITE),
)


def commit(step: int, attempt: int = 1, started_from: CheckpointId | None = None) -> Commit:
    return Commit(
        lineage=Lineage(
            run="run",
            checkpoint=CheckpointId(step, attempt),
            attempt_id="a" * 32,
            ordinal=step * 10,
            started_from=started_from,
        ),
        world_size=1,
        files=(NamedFile(name="rank-00000-of-00001.safetensors", bytes=7, digest=None),),
        nodes=("n",),
        wall_time_s=1.0,
    )


def copy(step: int, attempt: int = 1, **members: object) -> FoundCopy:
    given = {
        "id": CheckpointId(step, attempt),
        "state": CopyState.COMMITTED,
        "bytes": 7,
        "commit": commit(step, attempt),
        **members,
    }
    return FoundCopy(**given)  # type: ignore[arg-type]


def decided(word: Word, step: int, attempt_id: str = "a" * 32, tag: str = "") -> DecidedList:
    return DecidedList().adding(word, CheckpointId(step, 1), attempt_id, tag)


def test_what_the_list_of_any_tier_says_counts_for_the_checkpoint() -> None:
    """Also of a tier that has no copy of it."""
    (known,) = merge(
        [
            Listing(tier="nvme", copies=(copy(1),), decided=decided(Word.TAG, 1, tag="best")),
            Listing(tier="store", decided=decided(Word.PIN, 1)),
        ]
    )
    assert known.pinned
    assert not known.deleted
    assert known.tags == {"best"}


def test_a_damaged_record_abandons_nothing() -> None:
    bad = copy(2, 2, commit=None, damage=IntegrityError("digest"))
    known = merge([Listing(tier="nvme", copies=(copy(1), copy(3), bad))])
    assert [c.abandoned for c in known] == [False, False, False]


def test_a_view_for_policies_holds_what_was_found_but_not_what_is_damaged() -> None:
    bad = copy(2, commit=None, damage=IntegrityError("digest"))
    known = merge(
        [
            Listing(tier="nvme", copies=(copy(1), bad), decided=decided(Word.PIN, 1)),
            Listing(tier="store", copies=(copy(1),)),
        ]
    )
    view = to_view(RULES, known, wall_time_s=0.0, failing=frozenset({"store"}))
    assert view.failing == {"store"}
    first, second = view.checkpoints
    assert (first.ordinal, first.pinned, set(first.copies)) == (10, True, {"nvme", "store"})
    assert first.copies["nvme"].bytes == 7
    assert dict(second.copies) == {}


def test_a_copy_of_another_life_is_damage_and_what_was_decided_of_it_is_not_of_the_living_one() -> (
    None
):
    """The same step and attempt twice: a run began anew while a tier could not be asked."""
    old = commit(1)
    new = replace(old, wall_time_s=2.0, lineage=replace(old.lineage, attempt_id="f" * 32))
    (known,) = merge(
        [
            Listing(tier="nvme", copies=(copy(1, commit=new),)),
            Listing(
                tier="store",
                copies=(copy(1, commit=old),),
                decided=decided(Word.DELETED, 1, old.lineage.attempt_id),
            ),
        ]
    )
    assert known.commit == new
    assert not known.deleted
    assert known.copies["nvme"].damage is None
    assert "another attempt" in str(known.copies["store"].damage)


def test_of_copies_of_one_name_that_counts_which_the_run_went_on_from() -> None:
    """The clock of the machine that saved the other one was fast."""
    one, later = commit(1), commit(2)
    foreign = replace(one, wall_time_s=9.0, lineage=replace(one.lineage, attempt_id="f" * 32))
    went_on = commit(3, 2, started_from=CheckpointId(2, 1))
    known = merge(
        [
            Listing(
                tier="nvme", copies=(copy(1), copy(2, commit=later), copy(3, 2, commit=went_on))
            ),
            Listing(tier="store", copies=(copy(1, commit=foreign),)),
        ]
    )
    assert [(str(c.id), c.abandoned) for c in known] == [
        ("1@1", False), ("2@1", False), ("3@2", False),
    ]  # fmt: skip
    assert known[0].commit == one
    assert known[0].copies["nvme"].damage is None
    assert "another attempt" in str(known[0].copies["store"].damage)


def test_the_next_attempt_is_above_all_that_a_tier_which_cannot_be_asked_may_know() -> None:
    away = Listing(tier="store", error=UnreachableError("timeout"))
    seen = Listing(tier="nvme", copies=(copy(2, 3),), attempts=(1, 3))
    assert next_attempt([seen]) == 4
    first = next_attempt([seen, away])
    assert first > 1000
    # one start after the other that saves nothing, or goes back while it runs, stays close to that
    again = replace(seen, attempts=(1, 3, first))
    assert next_attempt([again, away]) == first + 1
    own = Attempt(run="run", number=first, id="a" * 32, node="n", pid=1, wall_time_s=0.0)
    assert next_attempt([replace(again, copies=(copy(9, first),)), away], own) == first + 1
    assert next_attempt([replace(again, copies=(copy(9, first),)), away]) > first + 1000
