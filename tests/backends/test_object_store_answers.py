"""What a store may answer, or not answer, that a good server never does: from a stand-in that says what it is told."""

from __future__ import annotations

import time

import pytest
from backend_places import put
from s3_stub import PART_BYTES, Reply, Stub, error_body, probed, refused, taking

from tierfall.backends.open import open_backend
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyNotFoundError,
    StorageFullError,
    UnreachableError,
)

ANSWERS: list[tuple[int, str, type[BackendError]]] = [
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
]


def test_answers_are_distinguished(stubbed: Backend, stub: Stub) -> None:
    part = memoryview(bytes(PART_BYTES))
    for status, code, kind in ANSWERS:
        stub.reply = taking
        writer = stubbed.create("key")
        writer.write(0, part)
        answer = (status, error_body(code) if code else "")
        stub.reply = lambda method, query, answer=answer: answer
        for call in (
            lambda: stubbed.read_into("key", 0, memoryview(bytearray(1))),
            lambda: stubbed.stat("key"),
            lambda: list(stubbed.scan("")),
            lambda: stubbed.delete("key"),
            lambda: stubbed.delete_some(["key", "other"]),
            lambda: stubbed.discard_unfinished(""),
            lambda: put(stubbed, "key", b"small"),
            lambda: stubbed.create("key").write(0, part),
            lambda writer=writer: writer.write(PART_BYTES, part),
        ):
            error = refused(call)
            assert type(error) is kind, (status, code)
            assert error.retryable is (kind is UnreachableError)


def test_a_listing_goes_on_over_pages(stubbed: Backend, stub: Stub) -> None:
    def page(key: str, more: str) -> str:
        token = "<NextContinuationToken>7</NextContinuationToken>" if more == "true" else ""
        return (
            f"<ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><IsTruncated>{more}</IsTruncated>"
            f"<Contents><Key>{key}</Key><Size>3</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>e</ETag></Contents>{token}</ListBucketResult>"
        )

    stub.reply = lambda method, query: (
        200,
        page("run/a", "false") if "continuation-token" in query else page("run/b", "true"),
    )
    assert [each.key for each in stubbed.scan("")] == ["a", "b"]
    stub.reply = lambda method, query: (200, page("run/a", "true"))
    assert "does not go on" in str(refused(lambda: list(stubbed.scan(""))))


def test_a_part_that_is_throttled_is_sent_again(stubbed: Backend, stub: Stub) -> None:
    good, left = stub.reply, [503, 500, 503]

    def reply(method: str, query: dict[str, list[str]]) -> Reply | None:
        return (left.pop(), "") if "partNumber" in query and left else good(method, query)

    stub.reply = reply
    with stubbed.create("key") as writer:
        for _ in range(3):
            assert refused(lambda: writer.write(0, memoryview(bytes(PART_BYTES)))).retryable
        writer.write(0, memoryview(bytes(PART_BYTES)))
        writer.publish()
    assert sum("uploads" in request for request in stub.requests) == 1, "one upload for all tries"
    assert not any(request.startswith("DELETE /bucket/run/key") for request in stub.requests)


def test_an_error_behind_a_good_status_is_one(stubbed: Backend, stub: Stub) -> None:
    """S3 sends 200 before it knows how completing ends."""
    good = stub.reply
    stub.reply = lambda method, query: (
        (200, error_body("InternalError"))
        if method == "POST" and "uploadId" in query
        else good(method, query)
    )
    writer = stubbed.create("key")
    writer.write(0, memoryview(bytes(PART_BYTES)))
    assert type(refused(writer.publish)) is UnreachableError
    writer.abort()
    assert stub.requests[-1].startswith("DELETE /bucket/run/key?")


def test_silence_ends_with_the_timeout(stubbed: Backend, stub: Stub) -> None:
    stub.reply = lambda method, query: None
    for call in (
        lambda: stubbed.stat("key"),
        lambda: stubbed.read_into("key", 0, memoryview(bytearray(1))),
        lambda: stubbed.create("key").write(0, memoryview(bytes(PART_BYTES))),
    ):
        start_s = time.monotonic()
        assert type(refused(call)) is UnreachableError
        assert time.monotonic() - start_s < 10


@pytest.mark.parametrize("status", [200, 400, 501])
def test_a_store_that_ignores_or_refuses_the_condition_promises_none(
    stub: Stub, status: int
) -> None:
    stub.reply = probed(status)
    backend = open_backend("s3://bucket", options=stub.options)
    assert not backend.traits.conditional_create
    backend.close()


def test_a_listing_of_uploads_goes_on_over_pages(stubbed: Backend, stub: Stub) -> None:
    def page(key: str, more: str) -> str:
        return (
            "<ListMultipartUploadsResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>"
            f"<IsTruncated>{more}</IsTruncated><NextKeyMarker>{key}</NextKeyMarker><NextUploadIdMarker>7</NextUploadIdMarker>"
            f"<Upload><Key>{key}</Key><UploadId>7</UploadId></Upload>"
            "</ListMultipartUploadsResult>"
        )

    def reply(method: str, query: dict[str, list[str]]) -> Reply:
        if "uploads" not in query:
            return taking(method, query)
        return 200, page("run/b", "false") if "key-marker" in query else page("run/a", "true")

    stub.reply = reply
    assert stubbed.discard_unfinished("") == 2
    stub.reply = lambda method, query: (200, page("run/a", "true"))
    assert "does not go on" in str(refused(lambda: stubbed.discard_unfinished("")))
    stub.reply = lambda method, query: (200, "no xml")
    assert refused(lambda: stubbed.discard_unfinished("")).retryable


@pytest.mark.parametrize("status", [200, 206])
@pytest.mark.parametrize("offset", [0, 4])
def test_no_more_than_the_range_is_taken(
    stubbed: Backend, stub: Stub, status: int, offset: int
) -> None:
    stub.reply = lambda method, query: (status, "longer than was asked for")
    view = memoryview(bytearray(8))
    error = refused(lambda: stubbed.read_into("key", offset, view[:4]))
    assert not isinstance(error, KeyNotFoundError)
    assert bytes(view[4:]) == bytes(4), "nothing is written beyond the view"
    stub.reply = lambda method, query: (206, "four")
    stubbed.read_into("key", offset, view[:4])
    assert bytes(view[:4]) == b"four", "the connection is not what is left of the last answer"


def test_an_answer_that_breaks_off_may_be_asked_for_again(stubbed: Backend, stub: Stub) -> None:
    stub.cut_bytes = 4
    stub.reply = lambda method, query: (206, "half")
    error = refused(lambda: stubbed.read_into("key", 0, memoryview(bytearray(8))))
    assert type(error) is UnreachableError
