"""A backend over a plug-in's store: every promise, in parts (``test_conformance.py``: without);
and what a wrong store is told."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import pytest
from backend_places import get, put

from tests.memory_backend import MemoryStore
from tierfall.backends.conformance import CHECKS, check_promise
from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.object.client import StoreClient
from tierfall.backends.toolkit import (
    AccessDeniedError,
    BackendError,
    MultipartStore,
    StorageFullError,
    UnreachableError,
)
from tierfall.core.types.backend import Publish

MIB = 1024 * 1024
LONG = bytes(range(256)) * (13 * MIB // 256)
"""Longer than what is put at once."""


class Store(MemoryStore):
    """A store that fails if a test says so: ``failing`` is by a part of the call, such as ``put run/key``."""

    durable = True

    def __init__(self) -> None:
        super().__init__()
        self.failing: dict[str, Exception] = {}
        self.after = False
        """Whether a call fails after it took effect."""

    def put(self, key: str, data: memoryview, if_absent: bool) -> bool:
        if self.after:
            super().put(key, data, if_absent)
        self.fail("put", key)
        return super().put(key, data, if_absent)

    def get(self, key: str, start: int, end: int) -> tuple[memoryview, int] | None:
        self.fail("get", key)
        return super().get(key, start, end)

    def delete(self, key: str) -> None:
        self.fail("delete", key)
        super().delete(key)

    def fail(self, call: str, key: str) -> None:
        for part, error in self.failing.items():
            if part in f"{call} {key}":
                raise error


class InParts(Store, MultipartStore):
    def __init__(self) -> None:
        super().__init__()
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.numbers = count(1)

    def begin(self, key: str) -> str:
        upload = str(next(self.numbers))
        self.uploads[upload] = (key, {})
        return upload

    def put_part(self, key: str, upload: str, number: int, data: memoryview) -> str:
        self.fail(f"part {number}", key)
        self.uploads[upload][1][number] = bytes(data)
        return f"mark {number}"

    def complete(self, key: str, upload: str, parts: Sequence[tuple[int, str]]) -> None:
        self.fail("complete", key)
        _, found = self.uploads.pop(upload)
        assert [mark for _, mark in parts] == [f"mark {number}" for number in sorted(found)]
        data = b"".join(found[number] for number, _ in parts)
        MemoryStore.put(self, key, memoryview(data), False)

    def abort(self, key: str, upload: str) -> None:
        self.uploads.pop(upload, None)

    def pending(self, prefix: str) -> Iterable[tuple[str, str]]:
        uploads = list(self.uploads.items())
        return [(key, upload) for upload, (key, _) in uploads if key.startswith(prefix)]


def opened(store: Store, *, read_only: bool = False) -> ObjectStoreBackend:
    return ObjectStoreBackend(StoreClient(store, place="kv://place"), read_only=read_only)


@pytest.fixture(params=[Store, InParts])
def store(request: pytest.FixtureRequest) -> Store:
    made = request.param()
    assert isinstance(made, Store)
    return made


@pytest.fixture
def backend(store: Store) -> ObjectStoreBackend:
    return opened(store)


@pytest.mark.parametrize("name", CHECKS)
def test_promise(name: str) -> None:
    store = InParts()

    def make() -> ObjectStoreBackend:
        nonlocal store
        store = InParts()
        return opened(store)

    check_promise(name, make, reopen=lambda backend: opened(store))


def test_it_promises_what_the_store_says(store: Store) -> None:
    traits = opened(store).traits
    assert (traits.durable, traits.conditional_create, traits.ordered_writes) == (True, True, False)
    assert store.objects == {}, "an opening leaves nothing"

    class Careless(Store):
        def put(self, key: str, data: memoryview, if_absent: bool) -> bool:
            return super().put(key, data, False)

    assert not opened(Careless()).traits.conditional_create


def test_what_a_killed_process_left_is_aborted_by_the_next_start() -> None:
    store = InParts()
    dead, living = opened(store).create("run/a", length=len(LONG)), opened(store)
    dead.write(0, memoryview(LONG))
    writer = living.create("run/b", length=len(LONG))
    writer.write(0, memoryview(LONG))
    assert living.discard_unfinished("other/") == 0
    assert living.discard_unfinished("run/") == 1
    writer.publish()
    assert store.uploads == {}
    assert get(living, "run/b") == LONG


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ConnectionResetError("gone"), UnreachableError),
        (OSError(errno.ENOSPC, "full"), StorageFullError),
        (PermissionError(errno.EACCES, "no"), AccessDeniedError),
        (KeyError("x"), BackendError),
        (StorageFullError("said so"), StorageFullError),
    ],
)
def test_what_the_stores_library_raises_is_an_error_of_the_tree(
    raised: Exception, kind: type[BackendError], backend: ObjectStoreBackend, store: Store
) -> None:
    put(backend, "run/key", b"old")
    store.failing["run/key"] = raised
    for call in (backend.stat, backend.delete, lambda key: put(backend, key, b"new")):
        with pytest.raises(BackendError) as caught:
            call("run/key")
        assert type(caught.value) is kind
    store.failing.clear()
    assert get(backend, "run/key") == b"old"


# A wrong store ---------------------------------------------------------------------------------------


class Answers(Store):
    """Answers with what is no answer."""

    conditional_create = False

    def get(self, key: str, start: int, end: int) -> Any:
        return "text" if key == "text" else (b"more", 4)

    def list(self, prefix: str, delimiter: str) -> Iterable[Any]:
        return [("key", 1)]


class SaysNothing(Store):
    def put(self, key: str, data: memoryview, if_absent: bool) -> Any:
        super().put(key, data, if_absent)


class Nameless(InParts):
    def begin(self, key: str) -> str:
        return ""


def test_an_answer_of_another_type_is_named() -> None:
    backend = opened(Answers())
    with pytest.raises(BackendError, match=r"Answers.get returned 'text'; expected bytes and the"):
        backend.stat("text")
    with pytest.raises(BackendError, match=r"Answers.get returned more bytes than it was asked"):
        backend.read_into("key", 0, memoryview(bytearray(1)))
    with pytest.raises(
        BackendError, match=r"Answers.list returned \('key', 1\); expected a Stored"
    ):
        backend.scan("")
    with pytest.raises(BackendError, match=r"Nameless.begin returned ''; expected a text"):
        put(opened(Nameless()), "key", LONG)
    client = StoreClient(SaysNothing(), place="kv://place")
    with pytest.raises(BackendError, match=r"SaysNothing.put returned None; expected True, or F"):
        client.put("key", memoryview(b""), Publish.IF_ABSENT, "put")
