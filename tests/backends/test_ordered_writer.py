"""Where parts cannot be sent again one by one: bytes in order, through obstore's own writer, against S3."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from backend_places import get, put, retrying
from obstore.store import S3Store
from s3_stub import Reply, Stub, refused

from tests.object_store import SeaweedFS
from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.obstore.client import ObstoreClient
from tierfall.backends.obstore.options import NO_RETRIES
from tierfall.backends.open import open_backend
from tierfall.backends.s3.options import open_client
from tierfall.core.types.backend import Backend, Publish
from tierfall.core.types.errors import BackendError, UnreachableError

PIECE = memoryview(bytes(10 * 1024 * 1024))
BEGUN = "<R><UploadId>1</UploadId><Bucket>b</Bucket><Key>k</Key><Location>l</Location><ETag>e</ETag></R>"


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    left = [412, 200]
    made.reply = lambda method, query: (left.pop(), "") if left else (200, "")
    yield made
    made.close()


@pytest.fixture
def stubbed(stub: Stub) -> Iterator[ObjectStoreBackend]:
    """A client whose writers wait little between their tries."""
    streams = S3Store(
        "bucket",
        endpoint=stub.options["endpoint_url"],
        access_key_id="key",
        secret_access_key="secret",
        client_options={"allow_http": True},
        retry_config={
            "max_retries": 2,
            "retry_timeout": timedelta(seconds=20),
            "backoff": {
                "init_backoff": timedelta(milliseconds=5),
                "max_backoff": timedelta(milliseconds=10),
                "base": 2,
            },
        },
    )
    store = S3Store(
        "bucket",
        endpoint=stub.options["endpoint_url"],
        access_key_id="key",
        secret_access_key="secret",
        client_options={"allow_http": True},
        retry_config=NO_RETRIES,
        disable_bulk_delete=True,
    )
    made = ObjectStoreBackend(client_of(store, streams))
    stub.reply = taking
    stub.requests.clear()
    yield made
    made.close()


def taking(method: str, query: dict[str, list[str]]) -> Reply:
    return 200, BEGUN


def client_of(store: S3Store, streams: S3Store) -> ObstoreClient:
    return ObstoreClient(
        place="s3://bucket/run", prefix="run/", durable=True, store=store, streams=streams
    )


def write_pieces(backend: Backend, number: int, *, publish: bool) -> None:
    with backend.create("key") as writer:
        for index in range(number):
            writer.write(index * PIECE.nbytes, PIECE)
        if publish:
            writer.publish()


def test_what_is_given_up_is_aborted_at_the_store(s3_server: SeaweedFS, bucket: str) -> None:
    """obstore leaves an upload behind when its writer is only dropped."""
    store = s3_server.store(bucket)
    backend = ObjectStoreBackend(client_of(store, store))
    real = open_client(f"s3://{bucket}/run", s3_server.options())
    put(backend, "key", b"old")
    write_pieces(backend, 4, publish=False)
    assert list(real.pending("run/", "look")) == []
    assert get(backend, "key") == b"old"
    write_pieces(backend, 4, publish=True)
    assert backend.stat("key").bytes == 4 * PIECE.nbytes
    assert list(real.pending("run/", "look")) == []
    real.close()


def test_a_part_that_is_throttled_is_sent_again_by_obstore(
    stubbed: ObjectStoreBackend, stub: Stub
) -> None:
    left = [503]

    def reply(method: str, query: dict[str, list[str]]) -> Reply:
        return (left.pop(), "") if "partNumber" in query and left else taking(method, query)

    stub.reply = reply
    write_pieces(stubbed, 4, publish=True)
    assert left == []
    assert not any(request.startswith("DELETE") for request in stub.requests)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_part_that_is_never_taken_kills_the_writer(
    stubbed: ObjectStoreBackend, stub: Stub, wrapped: bool
) -> None:
    stub.reply = lambda method, query: (503, "") if "partNumber" in query else taking(method, query)
    backend = retrying(stubbed) if wrapped else stubbed
    error = refused(lambda: write_pieces(backend, 6, publish=True))
    assert not error.retryable, "the bytes before are lost"
    assert "write a new object" in str(error)
    assert isinstance(error.__cause__, UnreachableError)
    assert any(request.startswith("DELETE") for request in stub.requests)
    assert not any(
        request.startswith("POST") and "uploadId" in request for request in stub.requests
    )


def test_a_completion_that_fails_kills_the_writer(stubbed: ObjectStoreBackend, stub: Stub) -> None:
    stub.reply = lambda method, query: (
        (503, "") if method == "POST" and "uploadId" in query else taking(method, query)
    )
    with stubbed.create("key") as writer:
        for index in range(3):
            writer.write(index * PIECE.nbytes, PIECE)
        assert not refused(writer.publish).retryable
        assert not refused(writer.publish).retryable


def test_a_small_object_may_be_published_again(stubbed: ObjectStoreBackend, stub: Stub) -> None:
    left = [503]
    stub.reply = lambda method, query: (left.pop(), "") if left else taking(method, query)
    with stubbed.create("key") as writer:
        writer.write(0, memoryview(b"small"))
        assert refused(writer.publish).retryable
        writer.publish()


@pytest.mark.parametrize("offset", [0, 2, 9])
def test_bytes_out_of_order_kill_the_writer(offset: int) -> None:
    backend = open_backend("memory://order")
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
