"""What only object stores promise, through a filesystem of fsspec's; and what such filesystems raise."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from backend_places import get, put
from fsspec.registry import _registry  # type: ignore[import-untyped]
from fsspec_stand_in import Store
from s3_stub import refused

from tierfall.backends.conformance import CHECKS, check_promise
from tierfall.backends.fsspec.client import store_error
from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.open import open_backend
from tierfall.core.types.backend import Backend, Publish
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
    StorageFullError,
    UnreachableError,
)
from tierfall.core.types.values import Driver

OPERATIONS: dict[str, Callable[[Backend], object]] = {
    "read": lambda backend: backend.read_into("run/key", 0, memoryview(bytearray(1))),
    "stat": lambda backend: backend.stat("run/key"),
    "scan": lambda backend: list(backend.scan("run/")),
    "delete some": lambda backend: backend.delete_some(["run/key", "run/other"]),
    "discard": lambda backend: backend.discard_unfinished("run/"),
    "put": lambda backend: put(backend, "run/key", b"bytes"),
}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> type[Store]:
    monkeypatch.setitem(_registry, "gs", Store)
    monkeypatch.setattr(Store, "objects", {})
    monkeypatch.setattr(Store, "buckets", {"bucket"})
    return Store


def open_store() -> ObjectStoreBackend:
    backend = open_backend("gs://bucket/below", driver=Driver.FSSPEC)
    assert isinstance(backend, ObjectStoreBackend)
    return backend


@pytest.mark.parametrize("name", CHECKS)
def test_a_filesystem_over_an_object_store(name: str, store: type[Store]) -> None:
    def make() -> Backend:
        store.objects.clear()
        return open_store()

    check_promise(name, make, reopen=lambda backend: open_store())


def test_an_object_store_keeps_its_promises(store: type[Store]) -> None:
    backend = open_store()
    assert backend.traits.durable
    assert backend.traits.conditional_create
    put(backend, "run/key", b"old")
    with (
        backend.create("run/key", publish=Publish.IF_ABSENT) as writer,
        pytest.raises(KeyExistsError),
    ):
        writer.publish()
    store.objects["bucket/below"] = b"an object of the place's name"
    store.objects["bucket/below-not"] = b"beside"
    assert [each.key for each in backend.scan("")] == ["run/key"]
    assert get(open_backend("gs://bucket", driver=Driver.FSSPEC), "below/run/key") == b"old"


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_bucket_that_is_gone_is_not_nothing_there(store: type[Store], name: str) -> None:
    backend = open_store()
    store.buckets.clear()
    store.objects.clear()
    error = refused(lambda: OPERATIONS[name](backend))
    assert type(error) is BackendError or name == "put"
    for read_only in (True, False):
        refused(
            lambda read_only=read_only: open_backend(
                "gs://bucket", driver=Driver.FSSPEC, read_only=read_only
            )
        )


def test_a_condition_that_is_ignored_is_not_promised(
    store: type[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Store.pipe_file
    monkeypatch.setattr(Store, "pipe_file", lambda self, path, value, mode: real(self, path, value))
    assert not open_store().traits.conditional_create


class Answered(Exception):
    """As the libraries of other stores raise: the status is a number beside a text that nobody should see."""

    def __init__(self, name: str, status: int) -> None:
        super().__init__("hunter2")
        setattr(self, name, status)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Answered("code", 403), AccessDeniedError),
        (Answered("status", 503), UnreachableError),
        (Answered("status_code", 412), KeyExistsError),
        (Answered("code", 404), KeyNotFoundError),
        (Answered("code", 7), BackendError),
        (TimeoutError("hunter2"), UnreachableError),
        (ConnectionResetError("hunter2"), UnreachableError),
        (PermissionError("hunter2"), AccessDeniedError),
        (OSError(errno.ENOSPC, "hunter2"), StorageFullError),
        (OSError(errno.EIO, "hunter2"), UnreachableError),
        (OSError("hunter2"), UnreachableError),
        (ValueError("hunter2"), BackendError),
    ],
)
def test_what_filesystems_raise_is_distinguished(
    error: Exception, kind: type[BackendError]
) -> None:
    found = store_error(error, "read 'key'")
    assert type(found) is kind
    assert "hunter2" not in str(found)
    assert "read 'key'" in str(found)
    caused = OSError("hunter2")
    caused.__cause__ = error
    if isinstance(error, Answered) and kind is not BackendError:
        assert type(store_error(caused, "x")) is kind
