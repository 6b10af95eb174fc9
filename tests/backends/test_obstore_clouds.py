"""gs:// and az:// through obstore: which store is built from which options, and what it asks a stand-in for.

Neither Google Cloud Storage nor Azure is here; the requests are obstore's own, and only their order is looked at.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_stub import SECRET, Reply, Stub, error_body, refused

from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.object.client import NotServedError
from tierfall.backends.obstore.client import ObstoreClient
from tierfall.backends.obstore.options import open_client
from tierfall.core.types.backend import Publish, delete_all
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
    UnreachableError,
)

MIB = 1024 * 1024
PIECE = memoryview(bytes(10 * MIB))
ACCOUNT_KEY = "dGllcmZhbGwtdGVzdC1zZWNyZXQtNWYxZA=="
SERVICE = {
    "type": "service_account",
    "disable_oauth": True,
    "client_email": "",
    "private_key": "",
    "private_key_id": SECRET,
}


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    made.reply = taking
    yield made
    made.close()


def taking(method: str, query: dict[str, list[str]]) -> Reply:
    body = "<R><UploadId>1</UploadId><Bucket>b</Bucket><Key>k</Key><Location>l</Location><ETag>e</ETag></R>"
    return (201 if method == "PUT" else 200), body


def cloud(name: str, stub: Stub) -> ObstoreClient:
    address = stub.options["endpoint_url"]
    if name == "gs":
        return open_client("gs://bucket/run", {"token": SERVICE, "endpoint_url": address})
    text = f"AccountName=acc;AccountKey={ACCOUNT_KEY};BlobEndpoint={address}/acc"
    return open_client("az://bucket/run", {"connection_string": text})


@pytest.fixture(params=["gs", "az"])
def client(request: pytest.FixtureRequest, stub: Stub) -> ObstoreClient:
    return cloud(request.param, stub)


@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        ("gs://bucket/a/b", {"project": "p"}, {}),
        ("gs://bucket", {"token": "google_default"}, {}),
        ("gcs://bucket", {"token": "anon"}, {"skip_signature": "true"}),
        ("gs://bucket", {"token": "ya29.access"}, {"bearer_token": "ya29.access"}),
        ("gs://bucket", {"token": "ya29.a/b"}, {"bearer_token": "ya29.a/b"}),
        ("gs://bucket", {"token": SERVICE}, {"service_account_key": json.dumps(SERVICE)}),
        (
            "gs://bucket",
            {"token": f"\n{json.dumps(SERVICE)}"},
            {"service_account_key": json.dumps(SERVICE)},
        ),
        ("gs://bucket", {"endpoint_url": "http://h:1/"}, {"base_url": "http://h:1"}),
        (
            "az://bucket/a",
            {"account_name": "acc", "account_key": ACCOUNT_KEY},
            {"account_name": "acc", "account_key": ACCOUNT_KEY},
        ),
        (
            "abfss://bucket@acc.dfs.core.windows.net/a",
            {"sas_token": "sv=1&sig=x"},
            {"account_name": "acc", "sas_key": "sv=1&sig=x"},
        ),
        (
            "az://bucket",
            {"account_name": "acc", "credential": "?sv=1&sig=x"},
            {"account_name": "acc", "sas_key": "?sv=1&sig=x"},
        ),
        (
            "az://bucket",
            {"account_name": "acc", "client_id": "i", "client_secret": "s", "tenant_id": "t"},
            {"account_name": "acc", "client_id": "i", "client_secret": "s", "tenant_id": "t"},
        ),
        (
            "az://bucket",
            {"account_name": "acc", "anon": True},
            {"account_name": "acc", "skip_signature": "true"},
        ),
        (
            "az://bucket",
            {"account_name": "acc", "account_key": ACCOUNT_KEY, "anon": True},
            {"account_name": "acc", "account_key": ACCOUNT_KEY},
        ),
        (
            "az://bucket",
            {"account_name": "acc", "anon": False, "account_host": "host"},
            {"account_name": "acc", "endpoint": "https://host"},
        ),
        (
            "abfs://bucket",
            {
                "connection_string": "DefaultEndpointsProtocol=https;AccountName=acc;"
                f"AccountKey={ACCOUNT_KEY};EndpointSuffix=core.example;QueueEndpoint=https://q"
            },
            {
                "account_name": "acc",
                "account_key": ACCOUNT_KEY,
                "endpoint": "https://acc.blob.core.example",
            },
        ),
    ],
)
def test_options_mean_what_they_mean_to_fsspec(
    url: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    client = open_client(url, options)
    for store in (client.store, client.streams):
        found = dict(store.config)  # type: ignore[union-attr,arg-type]
        assert found.pop("bucket", None) or found.pop("container_name") == "bucket"
        assert found == expected
    assert client.store.retry_config["max_retries"] == 0  # type: ignore[union-attr,index]
    assert client.streams.retry_config["max_retries"] > 0  # type: ignore[union-attr,index]
    assert client.durable
    assert "bucket" in client.place


def test_a_key_file_is_distinguished_from_other_credentials(tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    path.write_text(json.dumps(SERVICE))
    assert open_client("gs://bucket", {"token": str(path)}).store.config == {  # type: ignore[union-attr]
        "bucket": "bucket",
        "service_account": str(path),
    }
    path.write_text(
        json.dumps(
            {
                "type": "authorized_user",
                "client_id": "i",
                "client_secret": "s",
                "refresh_token": "r",
            }
        )
    )
    assert open_client("gs://bucket", {"token": str(path)}).store.config == {  # type: ignore[union-attr]
        "bucket": "bucket",
        "application_credentials": str(path),
    }


@pytest.mark.parametrize(
    ("url", "options", "kind"),
    [
        ("gs://bucket", {"token": "/not/there.json"}, BackendError),
        ("gs://bucket", {"token": f"/{SECRET}"}, BackendError),
        ("gs://bucket", {"token": f"{SECRET}.json"}, BackendError),
        ("gs://bucket", {"token": f'{{"private_key": "{SECRET}/x"'}, BackendError),
        ("gs://bucket", {"token": f'{{"private_key": "{SECRET}/x"}}'}, NotServedError),
        ("gs://bucket", {"timeout": "long"}, BackendError),
        ("gs://bucket", {"consistency": "md5"}, NotServedError),
        ("gs://bucket", {"token": {"type": "authorized_user"}}, NotServedError),
        ("gs://bucket", {"token": "cloud"}, NotServedError),
        ("gs://bucket", {"token": object()}, NotServedError),
        ("az://bucket", {"account_name": "acc", "account_key": f"{SECRET}?"}, BackendError),
        ("az://bucket", {}, BackendError),
        ("az://bucket", {"account_name": "acc", "credential": object()}, NotServedError),
        ("az://bucket", {"account_name": "acc", "location_mode": "x"}, NotServedError),
        ("az://bucket", {"connection_string": SECRET}, BackendError),
        ("az://bucket", {"connection_string": f"AccountKei={SECRET}"}, NotServedError),
    ],
)
def test_wrong_options_are_refused_without_showing_them(
    url: str, options: dict[str, Any], kind: type[BackendError]
) -> None:
    assert type(refused(lambda: open_client(url, options))) is kind


@pytest.mark.parametrize("name", ["gs", "az"])
def test_nothing_shows_a_credential(name: str, stub: Stub) -> None:
    client = cloud(name, stub)
    for each in (client, client.place, client.store, client.streams):
        assert SECRET not in repr(each)
        assert ACCOUNT_KEY not in repr(each)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "ServerBusy", UnreachableError),
        (429, "", UnreachableError),
        (403, "AuthenticationFailed", AccessDeniedError),
        (401, "", AccessDeniedError),
        (404, "BlobNotFound", KeyNotFoundError),
        (404, "ContainerNotFound", BackendError),
        (404, "NoSuchBucket", BackendError),
        (409, "BlobAlreadyExists", KeyExistsError),
        (412, "", KeyExistsError),
    ],
)
def test_answers_are_distinguished(
    client: ObstoreClient, stub: Stub, status: int, code: str, kind: type[BackendError]
) -> None:
    stub.reply = lambda method, query: (status, error_body(code) if code else "")
    for call in (
        lambda: client.head("run/key", "look"),
        lambda: client.read_into("run/key", 0, memoryview(bytearray(1)), "read"),
        lambda: client.put("run/key", memoryview(b"x"), Publish.IF_ABSENT, "put"),
        lambda: client.delete("run/key", "delete"),
    ):
        assert type(refused(call)) is kind
    if kind is not KeyNotFoundError:
        assert type(refused(lambda: list(client.list("run/", "list")))) is kind


def test_no_answer_is_unreachable(client: ObstoreClient, stub: Stub) -> None:
    stub.close()
    assert type(refused(client.check_open)) is UnreachableError
    assert type(refused(lambda: client.head("run/key", "look"))) is UnreachableError


def backend_of(client: ObstoreClient, monkeypatch: pytest.MonkeyPatch) -> ObjectStoreBackend:
    """Azure deletes by a batch, whose answer the stand-in does not know; so nothing is probed."""
    monkeypatch.setattr(ObjectStoreBackend, "_probed", lambda self: True)
    return ObjectStoreBackend(client)


def test_a_long_object_goes_in_order_and_is_completed_last(
    client: ObstoreClient, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_of(client, monkeypatch)
    assert backend.traits.ordered_writes
    assert backend.traits.durable
    with backend.create("key", length=4 * PIECE.nbytes) as writer:
        for number in range(4):
            writer.write(number * PIECE.nbytes, PIECE)
        assert not any(is_end(request) for request in stub.requests)
        writer.publish()
    assert [is_end(request) for request in stub.requests].index(True) == len(stub.requests) - 1


def is_end(request: str) -> bool:
    return "blocklist" in request or (request.startswith("POST") and "uploadId" in request)


def test_a_long_object_given_up_is_never_completed(
    client: ObstoreClient, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_of(client, monkeypatch)
    writer = backend.create("key")
    for number in range(4):
        writer.write(number * PIECE.nbytes, PIECE)
    writer.abort()
    writer.abort()
    assert not any(is_end(request) for request in stub.requests)
    if client.place.startswith("gs"):
        # Not the last request: obstore does not wait for the parts that are under way.
        assert any(request.startswith("DELETE") for request in stub.requests)


BLOBS = [f"step/rank-{number:05}.json" for number in range(600)]


class Container:
    """Answers deletions as Azure does: each request is a batch, whose parts say of each key how it went."""

    def __init__(self, stub: Stub, there: Collection[str]) -> None:
        self._stub = stub
        self.there = set(there)
        self.sizes: list[int] = []
        stub.kind = "multipart/mixed; boundary=batch"
        stub.reply = self.reply

    def reply(self, method: str, query: dict[str, list[str]]) -> Reply:
        assert (method, query["comp"]) == ("POST", ["batch"])
        lines = self._stub.body.decode().splitlines()
        paths = [line.split()[1] for line in lines if line.startswith("DELETE ")]
        self.sizes.append(len(paths))
        parts = "".join(self._part(number, path) for number, path in enumerate(paths))
        return 202, f"{parts}--batch--\r\n"

    def _part(self, number: int, path: str) -> str:
        key = path.partition("/run/")[2].partition("?")[0]
        status = "202 Accepted" if key in self.there else "404 Not Found"
        self.there.discard(key)
        head = f"Content-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
        return f"--batch\r\n{head}HTTP/1.1 {status}\r\nx-ms-version: 1\r\n\r\n\r\n"


@pytest.fixture
def azure(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> ObjectStoreBackend:
    monkeypatch.setattr(ObjectStoreBackend, "_probed", lambda self: True)
    text = (
        f"AccountName=acc;AccountKey={ACCOUNT_KEY};BlobEndpoint={stub.options['endpoint_url']}/acc"
    )
    return ObjectStoreBackend(open_client("az://bucket/run", {"connection_string": text}))


def test_azure_takes_256_at_once(azure: ObjectStoreBackend, stub: Stub) -> None:
    container = Container(stub, BLOBS[:600])
    delete_all(azure, BLOBS[:600])
    assert container.sizes == [256, 256, 88]
    assert container.there == set()


def test_what_azure_does_not_find_keeps_no_other(azure: ObjectStoreBackend, stub: Stub) -> None:
    """As after an answer that was lost: the batch says no more than that one of its keys is not there."""
    container = Container(stub, [*BLOBS[5:10], *BLOBS[300:310]])
    delete_all(azure, [*BLOBS[:10], *BLOBS[300:310]])
    assert container.there == set()
    container.there, container.sizes = set(BLOBS[:4]), []
    delete_all(azure, BLOBS[:4])
    assert container.sizes == [4], "it was no refusal of the batch"


def test_google_is_asked_one_by_one(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore would make ten requests at once of one call, whatever the tier's limit says."""
    stub.reply = lambda method, query: (204, "")
    delete_all(backend_of(cloud("gs", stub), monkeypatch), BLOBS[:4])
    assert [request.partition(" ")[0] for request in stub.requests] == ["DELETE"] * 4
