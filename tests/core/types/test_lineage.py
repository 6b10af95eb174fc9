"""Lineages: what a later attempt continues, and what it abandons."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from tierfall.core.types.lineage import AttemptStart, abandoned_by, first_good, resolve
from tierfall.core.types.values import CheckpointId

Pair = tuple[CheckpointId, CheckpointId | None]


def left_behind(
    saved: Iterable[tuple[CheckpointId, str]], starts: Iterable[AttemptStart]
) -> set[CheckpointId]:
    is_abandoned = abandoned_by(starts)
    return {id for id, attempt_id in saved if is_abandoned(id, attempt_id)}


def at(text: str) -> CheckpointId:
    step, attempt = text.split("@")
    return CheckpointId(int(step), int(attempt))


def start(id: CheckpointId, started_from: CheckpointId | None, **members: Any) -> AttemptStart:
    given = {"attempt_id": "x", "began_s": float(id.attempt), **members}
    return AttemptStart(attempt=id.attempt, started_from=started_from, **given)


def abandoned(known: Iterable[Pair]) -> frozenset[CheckpointId]:
    known = list(known)
    saved = [(id, "x") for id, _ in known]
    return left_behind(saved, resolve([start(id, begun) for id, begun in known], saved))


steps = st.integers(0, 8)
pairs = st.lists(
    st.tuples(
        st.builds(CheckpointId, steps, st.integers(1, 4)),
        st.none() | st.builds(CheckpointId, steps, st.integers(1, 3)),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(pairs)
def test_what_is_abandoned_does_not_depend_on_order(known: list[Pair]) -> None:
    assert abandoned(known) == abandoned(reversed(known)) == abandoned(sorted(known, key=str))


@settings(max_examples=40, deadline=None)
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


# Attempts whose checkpoints are gone, and numbers that were taken twice -------------------------------


def test_of_two_attempts_of_one_number_the_one_that_began_last_counts() -> None:
    old, new = start(at("1@1"), None), start(at("1@1"), None, attempt_id="y", began_s=5.0)
    saved = [(at("100@1"), "x"), (at("500@1"), "x"), (at("10@1"), "y")]
    for order in ([old, new], [new, old]):
        assert left_behind(saved, resolve(order, saved)) == {at("100@1"), at("500@1")}


def test_what_a_later_attempt_went_on_from_counts_whatever_clocks_say() -> None:
    """A person went back to the other one, or the clock of one machine was wrong."""
    starts = [
        start(at("1@1"), None),
        start(at("1@1"), None, attempt_id="y", began_s=5.0),
        start(at("6@2"), at("500@1")),
    ]
    saved = [(at("100@1"), "x"), (at("500@1"), "x"), (at("10@1"), "y"), (at("600@2"), "x")]
    assert left_behind(saved, resolve(starts, saved)) == {at("10@1")}


def test_an_attempt_that_is_passed_over_leaves_nothing_behind() -> None:
    starts = [
        start(at("1@1"), None),
        start(at("1@2"), None, began_s=2.0),
        start(at("1@2"), at("300@1"), attempt_id="y", began_s=3.0),
    ]
    saved = [(at("200@1"), "x"), (at("10@2"), "x"), (at("400@2"), "y")]
    assert left_behind(saved, resolve(starts, saved)) == {at("10@2")}


@settings(max_examples=40, deadline=None)
@given(pairs, st.lists(st.sampled_from("xyz"), min_size=12, max_size=12), st.randoms())
def test_what_several_ranks_resolve_again_stays_as_it_is(
    known: list[Pair], ids: list[str], random: Any
) -> None:
    """Rank 0 resolves for all; each rank brings that together with what it sees itself."""
    starts = [
        start(id, begun, attempt_id=of, began_s=random.random())
        for (id, begun), of in zip(known, ids, strict=False)
    ]
    saved = [(id, of) for (id, _), of in zip(known, ids, strict=False)]
    resolved = resolve(starts, saved)
    kept = [one for one in saved if random.random() < 0.5]
    assert set(resolve([*resolved, *starts], kept)) == set(resolved)
    shuffled = random.sample(starts, len(starts))
    assert set(resolve(shuffled, saved)) == set(resolved)
    for number in {one.attempt for one in resolved}:
        of_number = [one for one in resolved if one.attempt == number]
        assert sum(not one.passed_over for one in of_number) == 1


class Step(NamedTuple):
    id: CheckpointId
    not_finite: frozenset[str]
    started_from: CheckpointId | None = None


def test_thousands_of_steps_with_nan_are_passed_over_in_no_time() -> None:
    bad = [Step(CheckpointId(step, 1), frozenset({"w"})) for step in range(9000, 1000, -1)]
    good = [Step(CheckpointId(step, 1), frozenset()) for step in range(1000, 0, -1)]
    began = time.thread_time()
    assert first_good([*bad, *good]) == len(bad)
    assert time.thread_time() - began < 2
