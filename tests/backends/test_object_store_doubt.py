"""Nothing is taken for done, gone or there unless the store itself said so, and said all of it."""

from __future__ import annotations

import pytest
from backend_places import put
from s3_stub import PART_BYTES, Reply, Stub, error_body, refused, taking

from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import (
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
    UnreachableError,
)

PART = memoryview(bytes(PART_BYTES))


@pytest.mark.parametrize(
    ("text", "cut_bytes"),
    [
        ('<?xml version="1.0" encoding="UTF-8"?>\n  ', 300),
        ("  \n", 0),
        ("", 0),
        ("<html>sign in</html>", 0),
        ("<CompleteMultipartUploadResult><ETag>e", 0),
    ],
)
def test_a_completion_counts_only_where_the_store_says_so(
    stubbed: ObjectStoreBackend, stub: Stub, text: str, cut_bytes: int
) -> None:
    left = [text]

    def reply(method: str, query: dict[str, list[str]]) -> Reply:
        stub.cut_bytes = 0
        if method == "POST" and "uploadId" in query and left:
            stub.cut_bytes = cut_bytes
            return 200, left.pop()
        return taking(method, query)

    stub.reply = reply
    with stubbed.create("key") as writer:
        writer.write(0, PART)
        assert type(refused(writer.publish)) is UnreachableError
        writer.publish()


def test_a_listing_that_breaks_off_or_is_none_is_an_error(
    stubbed: ObjectStoreBackend, stub: Stub
) -> None:
    stub.cut_bytes = 200
    for call in (lambda: list(stubbed.scan("")), lambda: stubbed.discard_unfinished("")):
        assert type(refused(call)) is UnreachableError
    stub.cut_bytes = 0
    stub.reply = lambda method, query: (200, "<html>sign in</html>")
    for call in (lambda: list(stubbed.scan("")), lambda: stubbed.discard_unfinished("")):
        assert "is this an S3 server" in str(refused(call))


@pytest.mark.parametrize("body", ["", "<html>404 not found</html>"])
def test_a_404_that_names_nothing_says_nothing(
    stubbed: ObjectStoreBackend, stub: Stub, body: str
) -> None:
    stub.reply = lambda method, query: (404, body)
    for call in (
        lambda: stubbed.stat("key"),
        lambda: stubbed.read_into("key", 0, memoryview(bytearray(1))),
        lambda: list(stubbed.scan("")),
        lambda: stubbed.delete("key"),
        lambda: stubbed.delete_some(["key", "other"]),
        lambda: put(stubbed, "key", b"small"),
    ):
        assert isinstance(refused(call), UnreachableError)


@pytest.mark.parametrize("code", ["NoSuchKey", "NoSuchVersion"])
def test_a_404_that_names_the_key_is_believed(
    stubbed: ObjectStoreBackend, stub: Stub, code: str
) -> None:
    stub.reply = lambda method, query: (404, error_body(code))
    for call in (
        lambda: stubbed.stat("key"),
        lambda: stubbed.read_into("key", 0, memoryview(bytearray(1))),
    ):
        assert type(refused(call)) is KeyNotFoundError
    stubbed.delete("key")
    assert type(refused(lambda: list(stubbed.scan("")))) is UnreachableError, "no listing is absent"


@pytest.mark.parametrize(
    ("code", "conditional", "other"),
    [
        ("OperationAborted", UnreachableError, UnreachableError),
        ("ConditionalRequestConflict", UnreachableError, UnreachableError),
        ("", KeyExistsError, BackendError),
    ],
)
def test_a_conflict_is_a_taken_key_only_where_a_key_was_to_be_free(
    stubbed: ObjectStoreBackend,
    stub: Stub,
    code: str,
    conditional: type[BackendError],
    other: type[BackendError],
) -> None:
    stub.reply = lambda method, query: (409, error_body(code) if code else "")
    writer = stubbed.create("key", publish=Publish.IF_ABSENT)
    assert type(refused(writer.publish)) is conditional
    for call in (
        lambda: put(stubbed, "key", b"small"),
        lambda: stubbed.delete("key"),
        lambda: stubbed.delete_some(["key", "other"]),
        lambda: stubbed.read_into("key", 0, memoryview(bytearray(1))),
    ):
        error = refused(call)
        assert isinstance(error, other)
        assert not isinstance(error, KeyExistsError)


FOREIGN = ["a//b", "../x", "./x", "/x", "x/", "a\\b", "x\ty", "x\x01y"]


def test_foreign_names_are_left_out_of_a_listing(stubbed: ObjectStoreBackend, stub: Stub) -> None:
    """As a store encodes it: bytes that XML cannot hold as %01, a space as '+'."""
    names = [foreign.replace("\t", "%09").replace("\x01", "%01") for foreign in FOREIGN]
    names.append("good+one/a%2Bb%25/%C3%A9")
    rows = "".join(f"<Contents><Key>run/{name}</Key><Size>3</Size></Contents>" for name in names)
    text = f"<ListBucketResult><EncodingType>url</EncodingType>{rows}</ListBucketResult>"
    stub.reply = lambda method, query: (200, text)
    assert [each.key for each in stubbed.scan("")] == ["good one/a+b%/é"]
    assert "encoding-type=url" in stub.requests[-1]
