"""Where parts cannot be sent again one by one: bytes in order, through s3fs's upload in parts, against S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from backend_places import get, put, retrying
from s3_stub import Stub, probed, refused, taking

from tests.object_store import SeaweedFS
from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.open import open_backend
from tierfall.backends.s3.client import open_client
from tierfall.core.types.backend import Backend, Publish
from tierfall.core.types.errors import BackendError, UnreachableError
from tierfall.core.types.values import Driver

PIECE = memoryview(bytes(10 * 1024 * 1024))


@pytest.fixture
def stubbed(stub: Stub) -> Iterator[ObjectStoreBackend]:
    stub.reply = probed(200, 412)
    made = open_backend("s3://bucket/run", options=stub.options, driver=Driver.FSSPEC)
    assert isinstance(made, ObjectStoreBackend)
    stub.reply = taking
    stub.requests.clear()
    yield made
    made.close()


def write_pieces(backend: Backend, number: int, *, publish: bool) -> None:
    with backend.create("key") as writer:
        for index in range(number):
            writer.write(index * PIECE.nbytes, PIECE)
        if publish:
            writer.publish()


def test_what_is_given_up_is_aborted_at_the_store(s3_server: SeaweedFS, bucket: str) -> None:
    options = s3_server.options()
    backend = open_backend(f"s3://{bucket}/run", options=options, driver=Driver.FSSPEC)
    real = open_client(f"s3://{bucket}/run", options)
    put(backend, "key", b"old")
    write_pieces(backend, 2, publish=False)
    assert list(real.pending("run/", "look")) == []
    assert get(backend, "key") == b"old"
    write_pieces(backend, 2, publish=True)
    assert backend.stat("key").bytes == 2 * PIECE.nbytes
    assert list(real.pending("run/", "look")) == []
    real.close()


def test_a_part_that_is_never_taken_kills_the_writer(
    stubbed: ObjectStoreBackend, stub: Stub
) -> None:
    stub.reply = lambda method, query: (503, "") if "partNumber" in query else taking(method, query)
    backend = retrying(stubbed)
    error = refused(lambda: write_pieces(backend, 4, publish=True))
    assert not error.retryable, "the bytes before are lost"
    assert "write a new object" in str(error)
    assert isinstance(error.__cause__, UnreachableError)
    assert any(request.startswith("DELETE") for request in stub.requests)
    assert not any(
        request.startswith("POST") and "uploadId" in request for request in stub.requests
    )


@pytest.mark.parametrize("offset", [0, 2, 9])
def test_bytes_out_of_order_kill_the_writer(offset: int, tmp_path: Path) -> None:
    backend = open_backend(f"file://{tmp_path}", driver=Driver.FSSPEC)
    writer = backend.create("key")
    writer.write(0, memoryview(b"abc"))
    assert "rising order" in str(refused(lambda: writer.write(offset, memoryview(b"d"))))
    refused(writer.publish)
    assert list(backend.scan("")) == []


def test_too_much_for_a_conditional_create_is_refused(
    stubbed: ObjectStoreBackend, stub: Stub
) -> None:
    assert stubbed.traits.conditional_create
    with stubbed.create("key", publish=Publish.IF_ABSENT) as writer:
        for index in range(6):
            writer.write(index * PIECE.nbytes, PIECE)
        with pytest.raises(BackendError, match="too many bytes for a single put"):
            writer.write(6 * PIECE.nbytes, PIECE)
    assert stub.requests == []
