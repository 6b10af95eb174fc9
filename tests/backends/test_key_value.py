"""A backend over a key-value store: every promise, whatever a value may hold; pieces; what a wrong store is told."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Any

import pytest
from backend_places import get, put

from tierfall.backends.conformance import CHECKS, check_promise
from tierfall.backends.memory import MemoryStore
from tierfall.backends.toolkit import (
    AccessDeniedError,
    BackendError,
    ConfigError,
    KeyExistsError,
    KeyNotFoundError,
    KeyValueBackend,
    KeyValueStore,
    Publish,
    StorageFullError,
    StoredObject,
    UnreachableError,
)

PIECE = 4096
LONG = bytes(range(256)) * 50
"""Four pieces, the last one shorter."""


class Store(MemoryStore):
    """A store whose values are short, that fails where a test says so."""

    durable = True
    value_bytes = PIECE

    def __init__(self) -> None:
        super().__init__()
        self.failing: dict[str, Exception] = {}
        self.after = False

    def put(self, key: str, value: memoryview, if_absent: bool) -> bool:
        if self.after:
            is_new = super().put(key, value, if_absent)
        self._fail("put", key)
        return is_new if self.after else super().put(key, value, if_absent)

    def get(self, key: str) -> bytes | None:
        self._fail("get", key)
        return super().get(key)

    def delete(self, key: str) -> None:
        self._fail("delete", key)
        super().delete(key)

    def _fail(self, call: str, key: str) -> None:
        for part, error in self.failing.items():
            if part in f"{call} {key}":
                raise error


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def backend(store: Store) -> KeyValueBackend:
    return KeyValueBackend(store, place="kv://place")


def reopened(store: Store) -> KeyValueBackend:
    """A backend of another process on the same store."""
    return KeyValueBackend(store, place="kv://place")


def pieces(store: Store) -> list[str]:
    return [key for key in store.objects if ".part/" in key]


@pytest.mark.parametrize("value_bytes", [PIECE, 1024 * 1024, None])
@pytest.mark.parametrize("name", CHECKS)
def test_promise(name: str, value_bytes: int | None) -> None:
    def make() -> KeyValueBackend:
        store = Store()
        store.value_bytes = value_bytes
        return KeyValueBackend(store, place="kv://place")

    def reopen(backend: Any) -> KeyValueBackend:
        return KeyValueBackend(backend.values._store, place="kv://place")

    check_promise(name, make, reopen=reopen, leaves_unfinished=False)


def test_no_value_is_longer_than_the_store_takes(backend: KeyValueBackend, store: Store) -> None:
    put(backend, "run/long", LONG)
    put(backend, "run/short", LONG[:PIECE])
    assert max(map(len, store.objects.values())) == PIECE
    assert store.objects["run/short"] == LONG[:PIECE]
    assert {s.key: s.bytes for s in backend.scan("run/")} == {
        "run/long": len(LONG),
        "run/short": PIECE,
    }


def test_bytes_that_look_like_a_head_are_kept_as_they_are(
    backend: KeyValueBackend, store: Store
) -> None:
    put(backend, "run/long", LONG)
    head = store.objects["run/long"]
    for data in (head, head[:18], head + b"more"):
        put(backend, "run/copy", data)
        assert get(backend, "run/copy") == data
    assert [s.bytes for s in backend.scan("run/")] == [len(head) + 4, len(LONG)]
    store.objects["run/bad"] = b"tierfall pieces 1 nonsense"
    with pytest.raises(BackendError, match="damaged") as caught:
        backend.stat("run/bad")
    assert not isinstance(caught.value, KeyNotFoundError)


def test_what_is_replaced_or_deleted_leaves_no_pieces(
    backend: KeyValueBackend, store: Store
) -> None:
    for data in (LONG, LONG[::-1], b"short", LONG):
        put(backend, "run/key", data)
        assert get(backend, "run/key") == data
    assert len(pieces(store)) == 4
    versions = {backend.stat("run/key").version}
    put(backend, "run/key", LONG)
    assert len(versions | {backend.stat("run/key").version}) == 2
    backend.delete("run/key")
    assert store.objects == {}


def test_pieces_of_the_dead_go_and_those_of_objects_and_the_living_stay(
    backend: KeyValueBackend, store: Store
) -> None:
    put(backend, "run/whole", LONG)
    dead, living = backend.create("run/deep/x"), reopened(store)
    dead.write(0, memoryview(LONG))
    writer = living.create("run/y", length=len(LONG))
    writer.write(0, memoryview(LONG))
    assert [s.key for s in living.scan("")] == ["run/whole"]
    assert living.discard_unfinished("run/deep/") == 1
    assert living.discard_unfinished("") == 0
    writer.publish()
    assert get(living, "run/y") == get(living, "run/whole") == LONG
    assert reopened(store).discard_unfinished("") == 0


@pytest.mark.parametrize("failing", ["put", "/00000000", "/00000001"])
def test_a_failed_write_is_tried_again_and_no_byte_is_lost(
    failing: str, backend: KeyValueBackend, store: Store
) -> None:
    """The range that fails begins in a piece that another range began, and may have been stored in part."""
    with backend.create("run/key", length=len(LONG)) as writer:
        writer.write(0, memoryview(LONG)[:100])
        store.failing[failing] = TimeoutError("slow")
        for _ in range(2):
            with pytest.raises(UnreachableError, match="TimeoutError"):
                writer.write(100, memoryview(LONG)[100:9000])
        store.failing.clear()
        writer.write(100, memoryview(LONG)[100:9000])
        writer.write(9000, memoryview(LONG)[9000:])
        writer.publish()
    assert get(backend, "run/key") == LONG


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
    raised: Exception, kind: type[BackendError], backend: KeyValueBackend, store: Store
) -> None:
    put(backend, "run/key", b"old")
    store.failing["run/key"] = raised
    for call in (backend.stat, backend.delete, lambda key: put(backend, key, b"new")):
        with pytest.raises(BackendError) as caught:
            call("run/key")
        assert type(caught.value) is kind
    store.failing.clear()
    assert get(backend, "run/key") == b"old"


def test_a_publish_whose_answer_is_lost_is_asked_for_again(
    backend: KeyValueBackend, store: Store
) -> None:
    put(backend, "run/key", LONG[::-1])
    writer = backend.create("run/key", length=len(LONG))
    writer.write(0, memoryview(LONG))
    store.failing["put run/key"], store.after = TimeoutError(), True
    with pytest.raises(UnreachableError):
        writer.publish()
    with pytest.raises(BackendError, match="waiting to be published again"):
        writer.write(0, memoryview(b"x"))
    store.failing.clear()
    writer.publish()
    writer.abort()
    assert get(backend, "run/key") == LONG
    assert reopened(store).discard_unfinished("") == 1, "the pieces of the replaced object"


@pytest.mark.parametrize("publish", Publish)
def test_an_object_that_became_visible_unreported_keeps_its_pieces(
    publish: Publish, backend: KeyValueBackend, store: Store
) -> None:
    writer = backend.create("run/key", length=len(LONG), publish=publish)
    writer.write(0, memoryview(LONG))
    store.failing["put run/key"], store.after = TimeoutError(), True
    with pytest.raises(UnreachableError):
        writer.publish()
    writer.abort()
    store.failing.clear()
    assert reopened(store).discard_unfinished("") == 0
    assert get(backend, "run/key") == LONG


def test_a_refused_publish_leaves_nothing(backend: KeyValueBackend, store: Store) -> None:
    put(backend, "run/key", b"old")
    for publish, error in (
        (Publish.IF_ABSENT, None),
        (Publish.REPLACE, OSError(errno.ENOSPC, "x")),
    ):
        if error:
            store.failing["put run/key"] = error
        writer = backend.create("run/key", length=len(LONG), publish=publish)
        writer.write(0, memoryview(LONG))
        with pytest.raises(StorageFullError if error else KeyExistsError):
            writer.publish()
        assert pieces(store) == []
    assert get(backend, "run/key") == b"old"


def test_an_object_without_one_of_its_pieces_is_damaged_and_not_missing(
    backend: KeyValueBackend, store: Store
) -> None:
    put(backend, "run/key", LONG)
    for lost in pieces(store)[1:3]:
        store.objects[lost] = b"cut"
    with pytest.raises(
        BackendError, match=r"it is damaged: its piece .*/00000001' is not there"
    ) as e:
        get(backend, "run/key")
    assert not isinstance(e.value, KeyNotFoundError)


def test_a_reader_meets_an_object_that_is_replaced_under_it(store: Store) -> None:
    class Racing(Store):
        def get(self, key: str) -> bytes | None:
            if ".part/" in key and not self.failing:
                self.failing["no key of ours"] = KeyError()
                put(backend, "run/key", LONG[::-1])
            return super().get(key)

    backend = KeyValueBackend(Racing(), place="kv://place")
    put(backend, "run/key", LONG)
    assert get(backend, "run/key") == LONG[::-1]


def test_read_only_changes_nothing(store: Store) -> None:
    put(reopened(store), "run/key", LONG)
    before = dict(store.objects)
    only = KeyValueBackend(store, place="kv://place", read_only=True)
    for call in (only.create, only.delete, lambda key: only.discard_unfinished("")):
        with pytest.raises(AccessDeniedError, match="opened for reading only"):
            call("run/key")
    assert get(only, "run/key") == LONG
    assert store.objects == before


# A wrong store ---------------------------------------------------------------------------------------


class Wrong(MemoryStore):
    durable = True


class Undecided(KeyValueStore):
    conditional_create = True
    get = MemoryStore.get  # type: ignore[assignment]
    put = MemoryStore.put  # type: ignore[assignment]
    delete = MemoryStore.delete  # type: ignore[assignment]
    list = MemoryStore.list  # type: ignore[assignment]


class Short(Wrong):
    def put(self, key: str, value: memoryview) -> bool:  # type: ignore[override]
        return True


class Tiny(Wrong):
    value_bytes = 10


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (object(), "object is no KeyValueStore; derive the class from it"),
        (Undecided(), "Undecided does not set durable; expected durable = True or"),
        (Short(), r"Short.put: its parameters are \(.*\); expected \(key, value, if_absent\)"),
        (Tiny(), "Tiny.value_bytes is 10; expected 4096 or more, or None"),
    ],
)
def test_a_store_that_lacks_something_is_refused_at_once(store: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KeyValueBackend(store, place="kv://place")


def test_a_store_without_a_method_cannot_be_made() -> None:
    class Half(KeyValueStore):
        def get(self, key: str) -> None: ...

    with pytest.raises(
        TypeError, match=r"abstract methods 'delete', 'list', 'put'|abstract methods delete"
    ):
        Half()  # type: ignore[abstract]


class Answers(Store):
    """Answers with what is no answer."""

    def get(self, key: str) -> Any:
        return "text"

    def put(self, key: str, value: memoryview, if_absent: bool) -> Any:
        return None

    def list(self, prefix: str) -> Iterable[Any]:
        return [("key", 1)]


def test_an_answer_of_another_type_is_named() -> None:
    backend = KeyValueBackend(Answers(), place="kv://place")
    with pytest.raises(BackendError, match=r"Answers.get returned 'text'; expected bytes, or None"):
        backend.stat("key")
    with pytest.raises(
        BackendError, match=r"Answers.list returned \('key', 1\); expected a Stored"
    ):
        backend.scan("")
    writer = backend.create("key", publish=Publish.IF_ABSENT)
    with pytest.raises(BackendError, match=r"Answers.put returned None; expected True, or False"):
        writer.publish()


def test_a_store_may_list_more_than_it_was_asked_for(
    backend: KeyValueBackend, store: Store
) -> None:
    class Loose(Store):
        def list(self, prefix: str) -> Iterable[StoredObject]:
            return super().list("")

    loose = KeyValueBackend(Loose(), place="kv://place")
    for key in ("a/x", "b/x"):
        put(loose, key, LONG)
    assert [s.key for s in loose.scan("a/")] == ["a/x"]
