"""A publish whose answer is lost is asked for again; it ends with the object, or by saying that it is dead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from backend_places import get
from s3_stub import PART_BYTES, Reply, Stub, refused, taking

from tests.object_store import SeaweedFS
from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.object.client import UploadGoneError
from tierfall.backends.open import open_backend
from tierfall.core.types.backend import Backend, Publish, Writer
from tierfall.core.types.errors import BackendError, UnreachableError

DATA = bytes(range(1, 251)) * (2 * PART_BYTES // 250) + b"the last piece"


@pytest.fixture
def real(s3_server: SeaweedFS, bucket: str) -> Iterator[ObjectStoreBackend]:
    made = open_backend(f"s3://{bucket}/run", options=s3_server.options())
    assert isinstance(made, ObjectStoreBackend)
    yield made
    made.close()


def written(backend: Backend, *, length: int | None = len(DATA)) -> Writer:
    writer = backend.create("key", length=length)
    for start in range(0, len(DATA), PART_BYTES):
        writer.write(start, memoryview(DATA)[start : start + PART_BYTES])
    return writer


class Lost:
    """Stands before ``complete``: raises each of ``answers`` in its place, then passes calls on."""

    def __init__(self, backend: ObjectStoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self._complete = backend._client.complete
        self.answers: list[type[BackendError]] = []
        monkeypatch.setattr(backend._client, "complete", self._answer)

    def _answer(self, *args: Any) -> None:
        if self.answers:
            raise self.answers.pop(0)("on purpose")
        self._complete(*args)


@pytest.fixture
def lost(real: ObjectStoreBackend, monkeypatch: pytest.MonkeyPatch) -> Lost:
    return Lost(real, monkeypatch)


def left_behind(backend: ObjectStoreBackend) -> list[Any]:
    return list(backend._client.pending(backend._client.prefix, "look"))


def test_a_completion_without_an_answer_is_asked_for_again(
    real: ObjectStoreBackend, lost: Lost
) -> None:
    lost.answers = [UnreachableError]
    with written(real) as writer:
        assert refused(writer.publish).retryable
        assert not refused(lambda: writer.write(0, memoryview(DATA[:PART_BYTES]))).retryable
        writer.publish()
        assert not refused(writer.publish).retryable
    assert get(real, "key") == DATA
    assert left_behind(real) == []


def test_an_upload_that_is_gone_kills_the_writer(real: ObjectStoreBackend, lost: Lost) -> None:
    """The lost answer may have been that it is completed: nobody can tell, and nothing is claimed."""
    lost.answers = [UnreachableError, UploadGoneError]
    writer = written(real)
    refused(writer.publish)
    assert not refused(writer.publish).retryable
    assert not refused(writer.publish).retryable
    assert left_behind(real) == []


def test_abort_after_a_failed_publish_removes_the_upload(
    real: ObjectStoreBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise UnreachableError("on purpose")

    monkeypatch.setattr(real._client, "complete", fail)
    with written(real) as writer:
        refused(writer.publish)
        assert len(left_behind(real)) == 1, "it may be asked again"
        assert real.discard_unfinished("") == 0, "the writer lives"
    assert left_behind(real) == []
    assert list(real.scan("")) == []


def refusing(number: int, status: int, matches: Callable[[str, Any], bool]) -> Any:
    """Answer the first requests that match by a status, all others well."""
    left = [status] * number

    def reply(method: str, query: dict[str, list[str]]) -> Reply:
        if matches(method, query) and left:
            return left.pop(), ""
        return taking(method, query)

    return reply


def test_a_small_object_is_put_again_only_where_that_cannot_hurt(
    stubbed: Backend, stub: Stub
) -> None:
    for mode, again in ((Publish.REPLACE, True), (Publish.IF_ABSENT, False)):
        stub.reply = refusing(1, 503, lambda method, query: method == "PUT")
        writer = stubbed.create("key", publish=mode)
        writer.write(0, memoryview(b"small"))
        assert refused(writer.publish).retryable
        stub.requests.clear()
        if again:
            writer.publish()
        else:
            assert not refused(writer.publish).retryable
        assert len(stub.requests) == again
