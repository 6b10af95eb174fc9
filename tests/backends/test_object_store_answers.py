"""What a store may answer, or not answer, that a good server never does: from a stand-in that says what it is told."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from backend_places import put

from tierfall.backends.object_options import open_site
from tierfall.backends.object_store import ObjectStoreBackend
from tierfall.backends.s3_signature import Keys, sign_with
from tierfall.core.contracts import Publish
from tierfall.core.errors import (
    AccessDeniedError,
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
    StorageFullError,
    UnreachableError,
)

PART_BYTES = 5 * 1024 * 1024
SECRET = "tierfall-test-secret-5f1d"
KEY = "tierfall-test-key"

Reply = tuple[int, str]


def error_body(code: str) -> str:
    return f"<Error><Code>{code}</Code><Message>no</Message><AWSAccessKeyId>{KEY}</AWSAccessKeyId></Error>"


class Stub:
    """Answers every request by ``reply(method, query)``; None answers nothing at all."""

    def __init__(self) -> None:
        self.reply: Callable[[str, dict[str, list[str]]], Reply | None] = lambda *_: (200, "")
        self.requests: list[str] = []
        self.ended = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                stub.requests.append(f"{self.command} {self.path}")
                reply = stub.reply(self.command, query)
                if reply is None:
                    stub.ended.wait(60)
                    self.close_connection = True
                    return
                body = reply[1].encode() if self.command != "HEAD" else b""
                self.send_response(reply[0])
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"etag"')
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def options(self) -> dict[str, Any]:
        return {
            "endpoint_url": f"http://127.0.0.1:{self._server.server_port}",
            "key": KEY,
            "secret": SECRET,
            "config_kwargs": {"connect_timeout": 1, "read_timeout": 0.5},
        }

    def close(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    yield made
    made.close()


@pytest.fixture
def backend(stub: Stub) -> Iterator[ObjectStoreBackend]:
    made = ObjectStoreBackend("s3://bucket/run", options=stub.options)
    stub.reply = lambda method, query: (
        200,
        "<R><UploadId>1</UploadId></R>" if "uploads" in query else "",
    )
    yield made
    made.close()


def refused(call: Callable[[], object]) -> BackendError:
    with pytest.raises(BackendError) as caught:
        call()
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert SECRET not in shown
    assert KEY not in shown, "the store's own text is not repeated"
    return caught.value


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "SlowDown", UnreachableError),
        (503, "", UnreachableError),
        (500, "InternalError", UnreachableError),
        (429, "TooManyRequests", UnreachableError),
        (400, "RequestTimeout", UnreachableError),
        (403, "AccessDenied", AccessDeniedError),
        (403, "RequestTimeTooSkewed", AccessDeniedError),
        (400, "ExpiredToken", AccessDeniedError),
        (301, "PermanentRedirect", AccessDeniedError),
        (404, "NoSuchBucket", BackendError),
        (507, "", StorageFullError),
        (403, "QuotaExceeded", StorageFullError),
        (400, "InvalidRequest", BackendError),
    ],
)
def test_answers_are_told_apart(
    backend: ObjectStoreBackend, stub: Stub, status: int, code: str, kind: type[BackendError]
) -> None:
    writer = backend.create("key")
    writer.write(0, memoryview(bytes(PART_BYTES)))
    stub.reply = lambda method, query: (status, error_body(code) if code else "")
    for call in (
        lambda: backend.read_into("key", 0, memoryview(bytearray(1))),
        lambda: backend.stat("key"),
        lambda: list(backend.scan("")),
        lambda: backend.delete("key"),
        lambda: backend.discard_unfinished(""),
        lambda: put(backend, "key", b"small"),
        lambda: backend.create("key").write(0, memoryview(bytes(PART_BYTES))),
        lambda: writer.write(PART_BYTES, memoryview(bytes(PART_BYTES))),
    ):
        error = refused(call)
        assert type(error) is kind
        assert error.retryable is (kind is UnreachableError)


def test_a_part_that_is_throttled_is_sent_again(backend: ObjectStoreBackend, stub: Stub) -> None:
    good, left = stub.reply, [503, 500, 503]

    def reply(method: str, query: dict[str, list[str]]) -> Reply | None:
        return (left.pop(), "") if "partNumber" in query and left else good(method, query)

    stub.reply = reply
    with backend.create("key") as writer:
        for _ in range(3):
            assert refused(lambda: writer.write(0, memoryview(bytes(PART_BYTES)))).retryable
        writer.write(0, memoryview(bytes(PART_BYTES)))
        writer.publish()
    assert sum("uploads=" in request for request in stub.requests) == 1, "one upload for all tries"
    assert not any(request.startswith("DELETE /bucket/run/key") for request in stub.requests)


def test_a_refused_part_aborts_the_upload(backend: ObjectStoreBackend, stub: Stub) -> None:
    good = stub.reply
    stub.reply = lambda method, query: (403, "") if "partNumber" in query else good(method, query)
    writer = backend.create("key")
    refused(lambda: writer.write(0, memoryview(bytes(PART_BYTES))))
    assert stub.requests[-1].startswith("DELETE /bucket/run/key?")
    assert not refused(lambda: writer.write(0, memoryview(bytes(PART_BYTES)))).retryable


def test_an_error_behind_a_good_status_is_one(backend: ObjectStoreBackend, stub: Stub) -> None:
    """S3 sends 200 before it knows how completing ends."""
    good = stub.reply
    stub.reply = lambda method, query: (
        (200, error_body("InternalError"))
        if method == "POST" and "uploadId" in query
        else good(method, query)
    )
    writer = backend.create("key")
    writer.write(0, memoryview(bytes(PART_BYTES)))
    assert type(refused(writer.publish)) is UnreachableError
    assert stub.requests[-1].startswith("DELETE /bucket/run/key?")


def test_silence_ends_with_the_timeout(backend: ObjectStoreBackend, stub: Stub) -> None:
    stub.reply = lambda method, query: None
    for call in (
        lambda: backend.stat("key"),
        lambda: backend.read_into("key", 0, memoryview(bytearray(1))),
        lambda: backend.create("key").write(0, memoryview(bytes(PART_BYTES))),
    ):
        start_s = time.monotonic()
        assert type(refused(call)) is UnreachableError
        assert time.monotonic() - start_s < 10


def test_a_store_that_ignores_the_condition_promises_none(stub: Stub) -> None:
    backend = ObjectStoreBackend("s3://bucket", options=stub.options)
    assert not backend.traits.conditional_create
    backend.close()


@pytest.mark.parametrize("status", [400, 501])
def test_a_store_that_refuses_the_condition_promises_none(stub: Stub, status: int) -> None:
    left = [status]
    stub.reply = lambda method, query: (left.pop(), "") if left else (200, "")
    backend = ObjectStoreBackend("s3://bucket", options=stub.options)
    assert not backend.traits.conditional_create
    backend.close()


def test_a_store_that_keeps_the_condition_promises_it(stub: Stub) -> None:
    left = [412, 200]
    stub.reply = lambda method, query: (left.pop(), "") if left else (200, "")
    backend = ObjectStoreBackend("s3://bucket", options=stub.options)
    assert backend.traits.conditional_create
    assert stub.requests[-1].startswith("DELETE"), "the probe is left behind"
    backend.close()


def test_a_listing_of_uploads_goes_on_over_pages(backend: ObjectStoreBackend, stub: Stub) -> None:
    def page(key: str, more: str) -> str:
        return (
            f"<L xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><IsTruncated>{more}</IsTruncated>"
            f"<NextKeyMarker>{key}</NextKeyMarker><NextUploadIdMarker>7</NextUploadIdMarker>"
            f"<Upload><Key>{key}</Key><UploadId>7</UploadId></Upload></L>"
        )

    def reply(method: str, query: dict[str, list[str]]) -> Reply:
        if "uploads" not in query:
            return 204, ""
        return 200, page("run/b", "false") if "key-marker" in query else page("run/a", "true")

    stub.reply = reply
    assert backend.discard_unfinished("") == 2
    stub.reply = lambda method, query: (200, page("run/a", "true"))
    assert "does not go on" in str(refused(lambda: backend.discard_unfinished("")))
    stub.reply = lambda method, query: (200, "no xml")
    assert "no XML" in str(refused(lambda: backend.discard_unfinished("")))


def test_more_than_the_range_is_refused(backend: ObjectStoreBackend, stub: Stub) -> None:
    """A store that ignores the range sends the object from its start: other bytes."""
    stub.reply = lambda method, query: (200, "the whole object")
    error = refused(lambda: backend.read_into("key", 4, memoryview(bytearray(4))))
    assert not isinstance(error, KeyNotFoundError)


def test_a_lost_create_is_a_taken_key(stub: Stub) -> None:
    left = [412, 200]
    stub.reply = lambda method, query: (left.pop(), "") if left else (200, "")
    backend = ObjectStoreBackend("s3://bucket", options=stub.options)
    left[:] = [412]
    with (
        backend.create("key", publish=Publish.IF_ABSENT) as writer,
        pytest.raises(KeyExistsError),
    ):
        writer.publish()
    backend.close()


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://", {}),
        ("s3://key:secret@bucket", {}),
        ("gs://bucket", {}),
        ("s3://bucket/a/../b", {}),
        ("s3://bucket", {"endpoint_url": f"http://{KEY}:{SECRET}@127.0.0.1:1"}),
        ("s3://bucket", {"endpoint_url": "127.0.0.1:1"}),
        ("s3://bucket", {"secrt": SECRET}),
        ("s3://bucket", {"client_kwargs": {"regin": "x"}}),
        ("s3://bucket", {"client_kwargs": "x"}),
        ("s3://bucket", {"config_kwargs": {"s3": {"adressing_style": "virtual"}}}),
        ("memory://", {"key": KEY}),
    ],
)
def test_a_wrong_address_or_option_is_refused(url: str, options: dict[str, Any]) -> None:
    assert not refused(lambda: open_site(url, options)).retryable


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ({}, "https://s3.eu-west-3.amazonaws.com/bucket"),
        (
            {"config_kwargs": {"s3": {"addressing_style": "virtual"}}},
            "https://bucket.s3.eu-west-3.amazonaws.com",
        ),
        ({"endpoint_url": "https://host:9000/"}, "https://host:9000/bucket"),
        (
            {"client_kwargs": {"region_name": "eu-west-3"}},
            "https://s3.eu-west-3.amazonaws.com/bucket",
        ),
    ],
)
def test_parts_go_where_obstore_goes(
    options: dict[str, Any], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    keys = {"key": KEY, "secret": SECRET, "token": "token"}
    for credentials in ({}, keys, {"anon": True}):
        uploads = open_site("s3://bucket/prefix", {**credentials, **options}).uploads
        assert uploads is not None
        assert uploads.address == address
    signing = open_site("s3://bucket", {**keys, **options}).uploads
    assert signing is not None
    assert "%2Feu-west-3%2Fs3%2F" in signing.sign("GET", address)


def test_nothing_shows_a_credential(backend: ObjectStoreBackend, stub: Stub) -> None:
    site = open_site("s3://bucket", stub.options)
    for each in (backend, backend.place, site, site.uploads, vars(site.uploads), backend.traits):
        assert SECRET not in repr(each), repr(each)
        assert KEY not in repr(each), repr(each)


def test_the_signature_is_the_one_that_is_documented() -> None:
    """The example of "Authenticating Requests: Using Query Parameters" in the Amazon S3 API Reference."""
    keys = Keys(
        key="AKIAIOSFODNN7EXAMPLE",
        secret="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        region="us-east-1",
    )
    url = sign_with(
        keys,
        "GET",
        "https://examplebucket.s3.amazonaws.com/test.txt",
        now=datetime(2013, 5, 24, tzinfo=UTC),
        valid=timedelta(days=1),
    )
    assert url.endswith("=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404")
