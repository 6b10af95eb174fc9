"""What is decided: the name of an entry says all, and of contradicting entries one counts."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from tierfall.core.format.catalog import Listing, decided_in
from tierfall.core.format.decided import Decided, DecidedList, Word, short_id
from tierfall.core.types import keys
from tierfall.core.types.values import CheckpointId

ID = CheckpointId(400, 7)
ATTEMPT = "0123456789abcdef" * 2
OTHER = "f" * 32
TAGS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)


@st.composite
def entries(draw: st.DrawFn) -> Decided:
    word = draw(st.sampled_from(Word))
    return Decided(
        number=draw(st.integers(1, 10**9 - 1)),
        word=word,
        checkpoint=CheckpointId(
            draw(st.integers(0, keys.STEP_MAX)), draw(st.integers(1, keys.ATTEMPT_MAX))
        ),
        attempt_id=draw(st.sampled_from(("0" * 16, ATTEMPT[:16], "f" * 16))),
        tag=draw(TAGS) if word in (Word.TAG, Word.UNTAG) else "",
    )


def said(*words: str, about: str = ATTEMPT) -> DecidedList:
    """The list of entries that are given as ``1 pin`` or ``2 tag best``."""
    found = []
    for text in words:
        number, word, *tag = text.split()
        found.append(Decided(int(number), Word(word), ID, short_id(about), *tag))
    return DecidedList(found)


# Names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "",
        "notes.txt",
        "1-pin-step-00000400-a0007-0123456789abcdef",
        "000001-pin-step-00000400-a0007",
        "000001-pin-step-00000400-a0007-0123456789ABCDEF",
        "000001-pin-step-00000400-a0007-0123456789abcdef\n",
        "000001-pin-step-00000400-a0007-0123456789abcdef.tmp",
        "000001-pin-step-00000400-a0007-0123456789abcdef-best",
        "000001-tag-step-00000400-a0007-0123456789abcdef",
        "000001-tag-step-00000400-a0007-0123456789abcdef-",
        "000001-tag-step-00000400-a0007-0123456789abcdef-a/b",
        "000001-frozen-step-00000400-a0007-0123456789abcdef",
    ],
)
def test_a_name_of_others_and_a_word_of_a_later_version_are_left_out(name: str) -> None:
    assert Decided.parse(name) is None
    good = said("2 pin")
    assert DecidedList.parse((name, *good.names)) == good


# What counts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "pinned"),
    [
        ((), False),
        (("1 pin",), True),
        (("1 pin", "2 unpin"), False),
        (("2 pin", "1 unpin"), True),
        (("1 pin", "2 unpin", "3 pin"), True),
        (("4 pin", "4 unpin"), True),
        (("1 unpin",), False),
    ],
)
def test_the_highest_number_counts_and_of_equal_ones_the_one_that_keeps(
    words: tuple[str, ...], pinned: bool
) -> None:
    decided = said(*words)
    assert decided.is_pinned(ID, ATTEMPT) is pinned
    assert DecidedList.parse(decided.names[::-1]) == decided, "their order does not matter"


def test_what_another_attempt_of_that_number_was_told_does_not_count() -> None:
    decided = said("1 pin", "2 tag best", about=OTHER) | said("3 deleted", about=OTHER)
    assert not decided.is_pinned(ID, ATTEMPT)
    assert not decided.is_deleted(ID, ATTEMPT)
    assert decided.tags(ID, ATTEMPT) == set()
    assert decided.is_pinned(ID, OTHER)
    assert not decided.is_pinned(CheckpointId(400, 8), OTHER)


def test_without_a_record_that_can_be_read_the_entries_of_every_attempt_count() -> None:
    assert said("1 pin", about=OTHER).is_pinned(ID, None)
    of_any = DecidedList().adding(Word.DELETED, ID, None)
    assert of_any.is_deleted(ID, ATTEMPT)
    assert of_any.is_deleted(ID, OTHER)


def test_an_attempt_id_that_tierfall_does_not_make_gives_a_name_that_parses() -> None:
    decided = DecidedList().adding(Word.PIN, ID, "../../x")
    assert DecidedList.parse(decided.names).is_pinned(ID, "../../x")
    assert not decided.is_pinned(ID, "../../y")


# Damage ----------------------------------------------------------------------------------------------


def test_damage_concerns_the_copy_of_one_tier_until_it_is_mended() -> None:
    bad, kept = said("2 damaged", "3 tag best", "4 damaged"), said("1 pin")
    assert bad.damage(ID, ATTEMPT) == Decided(4, Word.DAMAGED, ID, ATTEMPT[:16])
    assert kept.damage(ID, ATTEMPT) is None
    assert bad.adding(Word.MENDED, ID, ATTEMPT).damage(ID, ATTEMPT) is None
    assert said("2 mended", "2 damaged").is_damaged(ID, ATTEMPT), "it is read again"
    listings = [Listing(tier="nvme", decided=bad), Listing(tier="store", decided=kept)]
    assert decided_in(listings) == said("1 pin", "3 tag best")
