"""The parity that a node keeps, where requests of several members meet: one that waited finds the set sealed, given up
or deleted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tierfall.backends.parity.store import ParityStore
from tierfall.core.types.errors import BackendError

KEY = "run/step-00000010-a0001/00000"
FILES = [f"rank-0000{member}-of-00002.safetensors" for member in range(2)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ParityStore]:
    store = ParityStore(tmp_path / "parity")
    yield store
    store.close()


def call(kept: ParityStore, operation: str, member: int, **more: Any) -> None:
    kept.operations[f"parity_{operation}"]({"set": KEY, "member": member, **more})


def join(kept: ParityStore, member: int, writer: str = "w", **more: Any) -> None:
    plan = {
        "nodes": ["a", "b"],
        "at": 0,
        "losses": 1,
        "block_bytes": 4,
        "store": kept.id,
        "bytes": 4,
    }
    call(kept, "join", member, writer=writer, **plan | more)


def finish(store: ParityStore, member: int, size: int) -> None:
    call(store, "finish", member, file=FILES[member], bytes=size)


def fold(store: ParityStore, member: int, offset: int, block: bytes) -> None:
    store.fold({"set": KEY, "member": member, "offset": offset}, memoryview(block))


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "parity").rglob("*") if path.is_file())


@pytest.fixture
def waited(store: ParityStore, monkeypatch: pytest.MonkeyPatch) -> ParityStore:
    """A store whose next request has found the set open, and has waited meanwhile until another one was done. Member 1
    has sent its image, of 4 bytes."""
    join(store, 0)
    join(store, 1)
    fold(store, 1, 0, b"data")
    stale = store._find(KEY)
    find = store._find
    found = iter([stale])
    monkeypatch.setattr(store, "_find", lambda key: next(found, None) or find(key))
    return store


def seal(store: ParityStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seal the set, by requests that do not wait."""
    waiting = store._find
    monkeypatch.setattr(store, "_find", ParityStore._find.__get__(store))
    finish(store, 0, 0)
    finish(store, 1, 4)
    monkeypatch.setattr(store, "_find", waiting)


def test_a_repeated_block_finds_the_set_sealed(
    waited: ParityStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(waited, monkeypatch)
    fold(waited, 1, 0, b"data")


def test_a_repeated_finish_finds_the_set_sealed(
    waited: ParityStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(waited, monkeypatch)
    finish(waited, 1, 4)


def test_a_repeated_finish_of_another_image_is_refused(
    waited: ParityStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(waited, monkeypatch)
    with pytest.raises(BackendError, match=r"sealed without .* of 5 bytes"):
        finish(waited, 1, 5)


def test_a_join_finds_the_set_sealed(waited: ParityStore, monkeypatch: pytest.MonkeyPatch) -> None:
    seal(waited, monkeypatch)
    with pytest.raises(BackendError, match="it is complete"):
        join(waited, 1)


@pytest.mark.parametrize(
    "request_",
    [
        lambda store: fold(store, 1, 0, b"data"),
        lambda store: finish(store, 1, 4),
        lambda store: join(store, 1),
    ],
)
def test_a_request_finds_the_set_deleted(
    waited: ParityStore, request_: Callable[[ParityStore], None]
) -> None:
    call(waited, "delete", 0)
    with pytest.raises(BackendError, match="it is gone: it was deleted"):
        request_(waited)


def test_a_set_that_is_deleted_while_it_is_sealed_is_gone(
    store: ParityStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(store, 0)
    join(store, 1)
    fold(store, 1, 0, b"data")
    finish(store, 0, 0)
    found: Any = store._find(KEY)
    publish = found.publish
    deletion = threading.Thread(target=call, args=(store, "delete", 0))

    def publish_late(*args: Any) -> None:
        deletion.start()
        while not isinstance(store._sets[KEY], str):
            pass
        publish(*args)

    monkeypatch.setattr(found, "publish", publish_late)
    finish(store, 1, 4)
    deletion.join()
    assert files(tmp_path) == []
    with pytest.raises(BackendError, match="it was deleted"):
        finish(store, 1, 4)


def test_a_set_that_all_have_left_can_be_begun_anew(store: ParityStore, tmp_path: Path) -> None:
    join(store, 1)
    fold(store, 1, 0, b"data")
    call(store, "give_up", 1, writer="w", sent=True)
    assert files(tmp_path) == []
    join(store, 1, "another")
    fold(store, 1, 0, b"new!")
    join(store, 0)
    finish(store, 0, 0)
    finish(store, 1, 4)
    assert (tmp_path / "parity" / f"{KEY}.parity").read_bytes() == b"new!"


def test_a_writer_that_gave_up_does_not_end_the_next_one(store: ParityStore) -> None:
    """Its request arrives late."""
    join(store, 0)
    join(store, 1, "next")
    fold(store, 1, 0, b"data")
    call(store, "give_up", 1, writer="w", sent=True)
    finish(store, 0, 0)
    finish(store, 1, 4)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"at": 2}, "members 1 and 2 of a group of 2"),
        ({"losses": 2}, "expected 1 to 1 losses"),
        ({"store": "another"}, "another by now"),
    ],
)
def test_a_set_that_cannot_be_is_refused(
    store: ParityStore, tmp_path: Path, more: dict[str, Any], error: str
) -> None:
    with pytest.raises(BackendError, match=error):
        join(store, 1, **more)
    assert files(tmp_path) == []


def test_what_is_not_of_the_set_is_refused(store: ParityStore) -> None:
    join(store, 1)
    with pytest.raises(BackendError, match="member 0 has not begun its image"):
        fold(store, 0, 0, b"data")
    with pytest.raises(BackendError, match="member 0 has not begun its image"):
        finish(store, 0, 0)
    for block in (b"", b"over one block"):
        with pytest.raises(BackendError):
            fold(store, 1, 0, block)


def test_a_node_has_no_parity_of_its_own_image(store: ParityStore) -> None:
    join(store, 0)
    with pytest.raises(BackendError, match="have none here"):
        fold(store, 0, 0, b"data")


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_store_that_is_closed_leaves_what_is_sealed(tmp_path: Path, is_sealed: bool) -> None:
    store = ParityStore(tmp_path / "parity")
    join(store, 0)
    join(store, 1)
    fold(store, 1, 0, b"data")
    finish(store, 0, 0)
    if is_sealed:
        finish(store, 1, 4)
    store.close()
    assert files(tmp_path) == (["00000.json", "00000.parity"] if is_sealed else [])
