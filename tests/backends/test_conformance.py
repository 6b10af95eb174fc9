"""Every backend, bare and wrapped, keeps every promise of the contract; and the suite notices one that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from backend_places import KINDS

from tests.memory_backend import MemoryBackend
from tierfall.backends.conformance import CHECKS, check_promise
from tierfall.backends.wrappers import Wrapper, WriterWrapper
from tierfall.core.types.backend import Backend, Publish, StoredObject, Traits, Writer
from tierfall.core.types.errors import BackendError, KeyNotFoundError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHECKS)
def test_promise(kind: str, name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = tmp_path
    if kind.startswith("direct"):
        request.getfixturevalue("direct_folder")
    check_promise(name, KINDS[kind].maker(folder), reopen=KINDS[kind].reopener)


class _Changed(Wrapper):
    """A backend with one mistake in it."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())

    @property
    def memory(self) -> MemoryBackend:
        assert isinstance(self._inner, MemoryBackend)
        return self._inner


class _Visible(_Changed):
    def create(self, key: str, **words: Any) -> Writer:
        writer = super().create(key, **words)
        self.memory.store.put(key, memoryview(b""), if_absent=False)
        return writer


class _Unconditional(_Changed):
    def create(self, key: str, **words: Any) -> Writer:
        return super().create(key, length=words.get("length"))


class _Lenient(_Changed):
    def create(self, key: str, **words: Any) -> Writer:
        return super().create(key, publish=words.get("publish", Publish.REPLACE))


class _Unsorted(_Changed):
    def scan(self, prefix: str) -> Iterator[StoredObject]:
        return iter(list(super().scan(prefix))[::-1])


class _Sloppy(_Changed):
    def scan(self, prefix: str) -> Iterator[StoredObject]:
        folder = prefix.rstrip("/")
        return (each for each in super().scan("") if each.key.startswith(folder))


class _Vague(_Changed):
    def stat(self, key: str) -> StoredObject:
        try:
            return super().stat(key)
        except KeyNotFoundError as error:
            raise BackendError(str(error)) from None


class _Silent(_Changed):
    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        rest = max(0, self.stat(key).bytes - offset)
        super().read_into(key, offset, view[: min(rest, view.nbytes)])


class _InHalves(_Changed):
    """Reads in two calls, between which the object is replaced."""

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        half = view.nbytes // 2
        super().read_into(key, offset, view[:half])
        other = memoryview(b"\xff" * self.stat(key).bytes)
        self.memory.store.put(key, other, if_absent=False)
        super().read_into(key, offset + half, view[half:])


class _Strict(_Changed):
    def delete(self, key: str) -> None:
        self.stat(key)
        super().delete(key)


class _Standing(_Changed):
    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        super().delete_some(keys)
        return keys


class _Hasty(_Changed):
    """Says of a key that it is gone which it never asked for."""

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        super().delete_some(keys[:1])
        return keys[2:]


class _Borrowing(_Changed):
    """Copies only at publish."""

    def create(self, key: str, **words: Any) -> Writer:
        return _BorrowingWriter(super().create(key, **words))


class _BorrowingWriter(WriterWrapper):
    def __init__(self, inner: Writer) -> None:
        super().__init__(inner)
        self._taken: list[tuple[int, memoryview]] = []

    def write(self, offset: int, view: memoryview) -> None:
        self._taken.append((offset, view))

    def publish(self) -> None:
        for offset, view in self._taken:
            self._inner.write(offset, view)
        self._inner.publish()


class _Forgetful(_Changed):
    """Says that what it holds in memory is durable."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, durable=True)


class _Modest(_Changed):
    """Creates conditionally, and says that it does not; as one that ignores the condition looks."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, conditional_create=False)


class _Leaking(_Changed):
    def stat(self, key: str) -> StoredObject:
        raise OSError("what a library says")


def test_a_claim_of_durability_is_held_against_a_second_opening() -> None:
    name = "durable_objects_exist_after_reopening"
    with pytest.raises(AssertionError, match="hand in reopen"):
        check_promise(name, _Forgetful)
    with pytest.raises(AssertionError, match="after a close, the place has other objects"):
        check_promise(name, _Forgetful, reopen=lambda backend: _Forgetful())
    check_promise(name, MemoryBackend)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (_Visible, "nothing_is_visible_before_publish"),
        (_Visible, "abort_leaves_nothing"),
        (_InHalves, "replace_is_atomic"),
        (_Unconditional, "conditional_create_has_one_winner"),
        (_Lenient, "too_few_bytes_are_refused"),
        (_Lenient, "lengths_are_bounds"),
        (_Unsorted, "a_scan_is_sorted_and_complete"),
        (_Unsorted, "a_scan_during_changes_is_consistent"),
        (_Sloppy, "a_prefix_ends_at_a_component"),
        (_Vague, "missing_keys_raise_key_not_found"),
        (_Silent, "reading_past_the_end_raises"),
        (_Strict, "delete_is_idempotent"),
        (_Standing, "delete_some_deletes_all_in_the_end"),
        (_Hasty, "delete_some_deletes_all_in_the_end"),
        (_Borrowing, "a_writer_keeps_no_reference"),
        (_Modest, "conditional_create_has_one_winner"),
        (_Leaking, "any_length_comes_back"),
    ],
)
def test_the_suite_notices_a_broken_promise(make: Callable[[], Backend], name: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_promise(name, make)
    assert any("the promise" in note for note in caught.value.__notes__)
