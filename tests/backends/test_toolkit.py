"""What the toolkit gives to backends: what may be a key, which ranges were written, and views of memory."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tierfall.backends.toolkit.base import Coverage
from tierfall.backends.toolkit.keys import (
    check_key,
    check_prefix,
    is_key,
)
from tierfall.core.types.errors import BackendError, KeyInvalidError

# Keys -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "a",
        "gpt/step-00000400-a0007/rank-00000-of-00004.safetensors",
        "gpt/attempts/a0007.json",
        "...",
        "a..b",
        ".hidden",
        "l" * 255,
        "/".join(["p" * 127] * 8),
        "é" * 127 + "x",
    ],
)
def test_valid(key: str) -> None:
    assert check_key(key) == key
    assert is_key(key)
    assert check_prefix(key + "/") == key + "/"


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "empty"),
        ("/a", "empty"),
        ("a/", "empty"),
        ("a//b", "empty"),
        ("..", "leads out"),
        ("a/../../etc/passwd", "leads out"),
        ("a/.", "leads out"),
        ("a\\..\\b", "separator"),
        ("a\0b", "control"),
        ("a\rb", "control"),
        ("\x7f", "control"),
        ("\x9f", "control"),
        ("\ud800", "control"),
        ("l" * 256, "longer than 255"),
        ("é" * 128, "longer than 255"),
        ("/".join(["p" * 127] * 8) + "/p", "longer than 1024"),
        (".tierfall-1-0123456789abcdef.part", "kept for unfinished"),
        (".commit.json.tierfall-1-0123456789abcdef", "kept for unfinished"),
        ("run/.tierfall-x", "kept for unfinished"),
        ("run/.TierFall-x/y", "kept for unfinished"),
        (None, "no text"),
        (b"bytes", "no text"),
    ],
)
def test_invalid(key: str, reason: str) -> None:
    with pytest.raises(KeyInvalidError, match=reason) as caught:
        check_key(key)
    assert isinstance(caught.value, (BackendError, ValueError))
    assert not is_key(key)


@pytest.mark.parametrize("prefix", ["a", "/", "a//", "../", "\0/", None, ".tierfall-x/"])
def test_invalid_prefix(prefix: str) -> None:
    with pytest.raises(KeyInvalidError):
        check_prefix(prefix)


# Ranges ---------------------------------------------------------------------------------------------

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=20)


@settings(max_examples=50, deadline=None)
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
