"""Merging the listings of several tiers: absent, damaged and unreadable are three different results."""

from __future__ import annotations

from tierfall.core.format.catalog import FoundCopy, Listing, merge, to_view
from tierfall.core.format.decided import DecidedList, Word
from tierfall.core.format.records import Commit, Lineage, NamedFile
from tierfall.core.types.errors import IntegrityError
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
