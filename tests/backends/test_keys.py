"""What may be a key: the edges of the rules, and names of unfinished objects that are never keys."""

from __future__ import annotations

import string

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tierfall.backends.toolkit.keys import (
    check_key,
    check_prefix,
    is_key,
    is_part,
    is_unfinished,
    unfinished_name,
)
from tierfall.core.types.errors import BackendError, KeyInvalidError


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


def test_the_empty_prefix_is_valid() -> None:
    assert check_prefix("") == ""


def test_no_unfinished_name_is_a_part() -> None:
    names = {unfinished_name() for _ in range(100)}
    assert len(names) == 100
    assert all(is_unfinished(name) for name in names)
    assert not any(is_part(name) or is_key(name) for name in names)
    assert not is_unfinished(".tierfall-note")
    assert not is_unfinished("commit.json")
    assert not is_unfinished(unfinished_name() + "x")
    assert not is_unfinished(unfinished_name() + "\n")


@given(st.text())
def test_a_valid_key_stays_below_its_root(key: str) -> None:
    if not is_key(key):
        return
    parts = key.split("/")
    assert not {"", ".", ".."} & set(parts)
    assert all(len(part.encode()) <= 255 for part in parts)
    assert not set(key) & set(map(chr, range(32)))


@given(st.lists(st.text(string.ascii_letters + string.digits + "._-%", min_size=1), min_size=1))
def test_plain_names_are_valid_but_for_the_dots_and_the_length(parts: list[str]) -> None:
    key = "/".join(parts)
    plain = all(part not in (".", "..") and len(part) <= 255 for part in parts)
    reserved = any(part.lower().startswith(".tierfall-") for part in parts)
    assert is_key(key) is (plain and not reserved and len(key) <= 1024)
