"""A writer under ``Publish.RESUME`` continues what a dead process, or an aborted RESUME, has left of its key: no byte
is sent twice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.object_store import SeaweedFS
from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.open import open_backend
from tierfall.backends.posix.backend import PosixBackend, PosixWriter
from tierfall.core.types.backend import Backend, Publish, Writer
from tierfall.core.types.errors import BackendError

PART = 5 << 20
DATA = bytes(range(1, 251)) * (4 * PART // 250)
KEY = "run/image"


def part(number: int) -> memoryview:
    return memoryview(DATA)[number * PART : (number + 1) * PART]


def begun(backend: Backend, *numbers: int, publish: Publish = Publish.REPLACE) -> Writer:
    """Begin an object, and write these of its four parts."""
    writer = backend.create(KEY, length=len(DATA), publish=publish)
    for number in numbers:
        writer.write(number * PART, part(number))
    return writer


def content(backend: Backend) -> bytes:
    found = bytearray(len(DATA))
    backend.read_into(KEY, 0, memoryview(found))
    return bytes(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """In it a dead process has left the parts 0 and 2, and a wrong part 3."""
    child = os.fork()
    if child == 0:
        try:
            writer = begun(PosixBackend(tmp_path), 0, 2)
            writer.write(3 * PART, memoryview(bytes(part(3))[::-1]))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return tmp_path


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets that are written to a file."""
    offsets: list[int] = []
    real = PosixWriter._put

    def note(self: PosixWriter, offset: int, data: memoryview) -> None:
        offsets.append(offset)
        real(self, offset, data)

    monkeypatch.setattr(PosixWriter, "_put", note)
    return offsets


def test_a_file_is_continued_and_what_differs_is_written_again(
    folder: Path, put: list[int]
) -> None:
    (left,) = (folder / "run").iterdir()
    number = left.stat().st_ino
    backend = PosixBackend(folder)
    begun(backend, 0, 1, 2, 3, publish=Publish.RESUME).publish()
    assert put == [1 * PART, 3 * PART]
    assert content(backend) == DATA
    assert (folder / KEY).stat().st_ino == number
    assert list((folder / "run").iterdir()) == [folder / KEY]
    backend.close()


def test_an_aborted_writer_leaves_its_file_to_the_next_and_a_refused_one_nothing(
    tmp_path: Path, put: list[int]
) -> None:
    backend = PosixBackend(tmp_path)
    begun(backend, 0, 2, publish=Publish.RESUME).abort()
    begun(backend, 0, 1, 2, 3, publish=Publish.RESUME).publish()
    assert put == [0, 2 * PART, 1 * PART, 3 * PART]
    assert content(backend) == DATA
    with pytest.raises(BackendError, match="were written"):
        begun(backend, 0, publish=Publish.RESUME).publish()
    for writer in (begun(backend, 0), begun(backend, publish=Publish.RESUME)):
        writer.abort()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["image"]
    backend.close()


def test_a_file_of_unknown_length_may_be_shorter_than_what_was_left(
    tmp_path: Path, put: list[int]
) -> None:
    """Another version of a codec may pack it better."""
    backend = PosixBackend(tmp_path)
    for length in (2 * PART, PART):
        writer = backend.create(KEY, length_max=3 * PART, publish=Publish.RESUME)
        for number in range(length // PART):
            writer.write(number * PART, part(number))
        (writer.abort if length > PART else writer.publish)()
    assert put == [0, PART]
    assert (tmp_path / KEY).read_bytes() == part(0)
    backend.close()


def test_a_file_that_a_living_writer_holds_is_left_to_it(folder: Path, put: list[int]) -> None:
    one, two = PosixBackend(folder), PosixBackend(folder)
    first = begun(one, 0, publish=Publish.RESUME)
    second = begun(two, 0, 1, 2, 3, publish=Publish.RESUME)
    assert put == [number * PART for number in range(4)], "it has begun anew"
    second.publish()
    for number in (1, 2, 3):
        first.write(number * PART, part(number))
    first.publish()
    assert content(one) == DATA
    for backend in (one, two):
        backend.close()


def test_another_key_and_another_length_are_not_continued(folder: Path, put: list[int]) -> None:
    backend = PosixBackend(folder)
    with backend.create("run/other", length=PART, publish=Publish.RESUME) as writer:
        writer.write(0, part(0))
        writer.publish()
    with backend.create(KEY, length=PART, publish=Publish.RESUME) as writer:
        writer.write(0, part(0))
        writer.publish()
    assert put == [0, 0]
    assert (folder / KEY).read_bytes() == part(0)
    backend.close()


@pytest.mark.parametrize("aborted", [False, True])
def test_parts_of_an_upload_are_not_sent_again(
    s3_server: SeaweedFS, bucket: str, monkeypatch: pytest.MonkeyPatch, aborted: bool
) -> None:
    options = s3_server.options()
    dead, backend = (open_backend(f"s3://{bucket}/x", options=options) for _ in range(2))
    assert isinstance(backend, ObjectStoreBackend)
    if aborted:
        dead = backend
        begun(dead, 0, 2, publish=Publish.RESUME).abort()
    else:
        begun(dead, 0, 2)
    sent: list[int] = []
    real = backend._client.put_part

    def note(key: str, upload: str, number: int, view: memoryview, what: str) -> Any:
        sent.append(number)
        return real(key, upload, number, view, what)

    monkeypatch.setattr(backend._client, "put_part", note)
    begun(backend, 0, 1, 2, 3, publish=Publish.RESUME).publish()
    assert sent == [2, 4]
    assert content(backend) == DATA
    assert not list(backend._client.pending(backend._client.prefix, "look"))
    for each in {dead, backend}:
        each.close()
