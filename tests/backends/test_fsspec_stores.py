"""What only object stores promise, through filesystems of fsspec; and what such filesystems raise."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from backend_places import OPERATIONS
from s3_stub import Stub, refused

from tests.object_store import SeaweedFS
from tierfall.backends.fsspec.client import FsspecClient, open_client
from tierfall.backends.object.client import BareAbsenceError, library_error
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

REQUESTS: dict[str, Callable[[FsspecClient], object]] = {
    "head": lambda client: client.head(f"{client.prefix}key", "look"),
    "read": lambda client: client.read_into(
        f"{client.prefix}key", 0, memoryview(bytearray(1)), "read"
    ),
    "list": lambda client: list(client.list(client.prefix, "list")),
    "put": lambda client: client.put(
        f"{client.prefix}key", memoryview(b"x"), Publish.IF_ABSENT, "put"
    ),
    "delete": lambda client: client.delete(f"{client.prefix}key", "delete"),
}


def by_s3fs(server: SeaweedFS, url: str, *, read_only: bool = False) -> Backend:
    return open_backend(
        url,
        options=server.options(),
        driver=Driver.FSSPEC,
        read_only=read_only,
        sleep=lambda s: None,
    )


def test_a_bucket_that_is_gone_is_not_nothing_there(s3_server: SeaweedFS) -> None:
    s3_server.make_bucket("doomed")
    backend = by_s3fs(s3_server, "s3://doomed/below")
    s3_server.remove_bucket("doomed")
    for call in OPERATIONS.values():
        assert type(refused(lambda call=call: call(backend))) is BackendError
    for read_only in (True, False):
        refused(lambda read_only=read_only: by_s3fs(s3_server, "s3://doomed", read_only=read_only))


@pytest.fixture(params=["s3", "gs", "az"])
def client(request: pytest.FixtureRequest, stub: Stub) -> FsspecClient:
    """A client of a stand-in that says what it is told."""
    address = stub.options["endpoint_url"]
    options = {
        "s3": stub.options,
        "gs": {"token": "anon", "endpoint_url": address},
        "az": {"connection_string": f"AccountName=acc;AccountKey=a2V5;BlobEndpoint={address}/acc"},
    }[request.param]
    return open_client(f"{request.param}://bucket/run", options)


def test_no_answer_is_unreachable(client: FsspecClient, stub: Stub) -> None:
    stub.close()
    for call in REQUESTS.values():
        assert type(refused(lambda call=call: call(client))) is UnreachableError


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_no_silence(client: FsspecClient, stub: Stub, status: int) -> None:
    stub.reply = lambda method, query: (status, "")
    for call in REQUESTS.values():
        assert type(refused(lambda call=call: call(client))) is AccessDeniedError


def test_the_404_of_a_proxy_is_not_nothing_there(client: FsspecClient, stub: Stub) -> None:
    stub.reply = lambda method, query: (404, "")
    for name in ("head", "read", "list", "delete"):
        error = refused(lambda name=name: REQUESTS[name](client))
        assert not isinstance(error, KeyNotFoundError) or name == "list", "no listing is absent"


def test_a_condition_that_is_ignored_is_not_promised(stub: Stub) -> None:
    stub.reply = lambda method, query: (200, "")
    backend = open_backend("s3://bucket/run", options=stub.options, driver=Driver.FSSPEC)
    assert not backend.traits.conditional_create


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
        (Answered("code", 404), BareAbsenceError),
        (FileNotFoundError("hunter2"), KeyNotFoundError),
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
    found = library_error(error, "read 'key'")
    assert type(found) is kind
    assert "hunter2" not in str(found)
    assert "read 'key'" in str(found)
    caused = OSError("hunter2")
    caused.__cause__ = error
    if isinstance(error, Answered) and kind is not BackendError:
        assert type(library_error(caused, "x")) is kind
