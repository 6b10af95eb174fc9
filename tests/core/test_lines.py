"""Lines of saving: what a later attempt continues, and what it leaves behind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierfall.core.lines import abandoned
from tierfall.core.values import CheckpointId

Pair = tuple[CheckpointId, CheckpointId | None]


def at(text: str) -> CheckpointId:
    step, attempt = text.split("@")
    return CheckpointId(int(step), int(attempt))


def left(*pairs: tuple[str, str | None]) -> list[str]:
    """Name the abandoned ones among (checkpoint, started from) pairs."""
    known: list[Pair] = [(at(a), None if b is None else at(b)) for a, b in pairs]
    return [str(id) for id in sorted(abandoned(known))]


def test_one_line_leaves_nothing_behind() -> None:
    assert left() == []
    assert left(("1@1", None), ("2@1", None)) == []


def test_a_restart_that_goes_on_from_the_newest_leaves_nothing_behind() -> None:
    assert left(("1@1", None), ("2@1", None), ("3@2", "2@1")) == []


def test_going_back_leaves_every_later_step_of_earlier_attempts_behind() -> None:
    pairs = [("100@1", None), ("200@1", None), ("300@1", None), ("400@1", None)]
    assert left(*pairs) == []
    assert left(*pairs, ("250@2", "200@1")) == ["300@1", "400@1"]
    assert left(*pairs, ("300@2", "200@1"), ("400@2", "200@1")) == ["300@1", "400@1"]


def test_the_step_gone_back_to_stays() -> None:
    assert left(("1@1", None), ("2@1", None), ("5@2", "2@1")) == []


def test_a_fresh_start_leaves_everything_before_it_behind() -> None:
    assert left(("0@1", None), ("5@1", None), ("0@2", None)) == ["0@1", "5@1"]


def test_going_back_twice_behind_the_same_step() -> None:
    assert left(("1@1", None), ("2@1", None), ("3@1", None), ("3@2", "2@1"), ("2@3", "1@1")) == [
        "2@1",
        "3@1",
        "3@2",
    ]


def test_an_attempt_that_saved_nothing_leaves_nothing_behind() -> None:
    """It is by its checkpoints alone that an attempt is known here."""
    assert left(("1@1", None), ("2@1", None), ("3@3", "2@1")) == []


steps = st.integers(0, 8)
pairs = st.lists(
    st.tuples(
        st.builds(CheckpointId, steps, st.integers(1, 4)),
        st.none() | st.builds(CheckpointId, steps, st.integers(1, 3)),
    ),
    max_size=12,
)


@given(pairs)
def test_what_is_abandoned_does_not_depend_on_order(known: list[Pair]) -> None:
    assert abandoned(known) == abandoned(reversed(known)) == abandoned(sorted(known, key=str))


@given(pairs)
def test_the_newest_attempt_is_never_abandoned(known: list[Pair]) -> None:
    newest = max((id.attempt for id, _ in known), default=0)
    assert not any(id.attempt == newest for id in abandoned(known))


@given(pairs)
def test_what_is_live_rises_from_attempt_to_attempt(known: list[Pair]) -> None:
    """Along the live line, a later attempt holds no step at or below where it started."""
    gone = abandoned(known)
    starts: dict[int, int] = {}
    for id, start in known:
        step = -1 if start is None else start.step
        starts[id.attempt] = min(step, starts.get(id.attempt, step))
    for id, _ in known:
        if id not in gone:
            assert all(id.step <= s for a, s in starts.items() if a > id.attempt)
