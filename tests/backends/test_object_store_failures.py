"""What an object store does wrong, or is asked wrongly, is told apart; nothing half-written is ever seen."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator

import pytest
from backend_places import OPERATIONS, get, put

from tests.object_store import KEY, SECRET, SeaweedFS
from tierfall.backends.open import open_backend
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import BackendError

MIB = 1024 * 1024
PART_BYTES = 5 * MIB


@pytest.fixture
def backend(s3_server: SeaweedFS, bucket: str) -> Iterator[Backend]:
    made = open_backend(f"s3://{bucket}/run", options=s3_server.options())
    yield made
    made.close()


def refused(call: Callable[[], object], kind: type[BackendError]) -> BackendError:
    """Return the error, which must be of this very kind and give no credential away."""
    with pytest.raises(BackendError) as caught:
        call()
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert type(caught.value) is kind, shown
    assert SECRET not in shown
    assert KEY not in shown
    return caught.value


def test_a_bucket_that_is_gone_is_not_nothing_there(
    backend: Backend, s3_server: SeaweedFS, bucket: str
) -> None:
    put(backend, "key", b"bytes")
    s3_server.remove_bucket(bucket)
    for call in OPERATIONS.values():
        error = refused(lambda call=call: call(backend), BackendError)
        assert "there is no such bucket" in str(error)


def test_a_writer_outlives_its_backend_to_its_abort(s3_server: SeaweedFS, bucket: str) -> None:
    backend = open_backend(f"s3://{bucket}", options=s3_server.options())
    writer = backend.create("key")
    writer.write(0, memoryview(bytes(PART_BYTES)))
    backend.close()
    backend.close()
    writer.abort()
    fresh = open_backend(f"s3://{bucket}", options=s3_server.options())
    assert fresh.discard_unfinished("") == 0
    fresh.close()


def test_a_failed_upload_leaves_nothing(backend: Backend, s3_server: SeaweedFS) -> None:
    put(backend, "key", b"old")
    hole = backend.create("key", length=3 * PART_BYTES)
    hole.write(0, memoryview(bytes(PART_BYTES)))
    hole.write(2 * PART_BYTES, memoryview(bytes(PART_BYTES)))
    refused(hole.publish, BackendError)
    small_in_the_middle = backend.create("key")
    small_in_the_middle.write(0, memoryview(bytes(PART_BYTES)))
    small_in_the_middle.write(PART_BYTES, memoryview(b"small"))
    small_in_the_middle.write(PART_BYTES + 5, memoryview(bytes(PART_BYTES)))
    refused(small_in_the_middle.publish, BackendError)
    assert get(backend, "key") == b"old"
    fresh = open_backend(backend.place, options=s3_server.options())
    assert fresh.discard_unfinished("") == 0
    fresh.close()


def test_parts_are_bounded_in_number(backend: Backend, s3_server: SeaweedFS) -> None:
    view = memoryview(bytes(PART_BYTES))
    large = backend.create("large", length=200 * 1024 * MIB)
    large.write(0, view)
    assert "bytes or more at a time" in str(
        refused(lambda: large.write(PART_BYTES, view), BackendError)
    )
    endless = backend.create("endless")
    endless.write(9_999 * PART_BYTES, view)
    refused(lambda: endless.write(10_000 * PART_BYTES, view), BackendError)
    fresh = open_backend(backend.place, options=s3_server.options())
    assert fresh.discard_unfinished("") == 0, "a refused writer left its upload"
    fresh.close()
