"""Ranges that were written, against a set of positions."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tierfall.backends.toolkit.writers import Coverage

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=20)


@given(spans, st.none() | st.integers(0, 50))
def test_against_a_set_of_positions(added: list[tuple[int, int]], length: int | None) -> None:
    coverage, positions = Coverage(), set()
    for start, size in added:
        coverage.add(start, start + size)
        positions |= set(range(start, start + size))
    end = max(positions) + 1 if positions else 0
    assert coverage.end == end
    whole = positions == set(range(end if length is None else length))
    assert (coverage.missing(length) is None) is whole


@pytest.mark.parametrize(
    ("added", "length", "text"),
    [
        ([(0, 4), (5, 10)], 10, "9 of 10 bytes"),
        ([(0, 4), (0, 4)], 8, "4 of 8 bytes"),
        ([(0, 9)], 8, "9 bytes were written, 8 expected"),
        ([(1, 9)], None, "8 of 9 bytes"),
        ([], 1, "0 of 1 bytes"),
    ],
)
def test_what_is_missing_is_counted(
    added: list[tuple[int, int]], length: int | None, text: str
) -> None:
    coverage = Coverage()
    for start, end in added:
        coverage.add(start, end)
    assert text in (coverage.missing(length) or "")
