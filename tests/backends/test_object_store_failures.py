"""What an object store does wrong, or is asked wrongly, is told apart; nothing half-written is ever seen."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from backend_places import get, put, retrying

from tests.object_store import KEY, SECRET, SeaweedFS
from tierfall.backends.object_store import ObjectStoreBackend
from tierfall.core.contracts import Backend
from tierfall.core.errors import (
    AccessDeniedError,
    BackendError,
    KeyNotFoundError,
    UnreachableError,
)

MIB = 1024 * 1024
PART_BYTES = 5 * MIB

READ_ONLY_OR_NOT = pytest.mark.parametrize("read_only", [True, False])
OPERATIONS: dict[str, Callable[[Backend], object]] = {
    "read": lambda backend: backend.read_into("key", 0, memoryview(bytearray(1))),
    "stat": lambda backend: backend.stat("key"),
    "scan": lambda backend: list(backend.scan("")),
    "delete": lambda backend: backend.delete("key"),
    "discard": lambda backend: backend.discard_unfinished(""),
    "put": lambda backend: put(backend, "key", b"bytes"),
    "begin": lambda backend: put(backend, "key", bytes(9 * MIB)),
}


def parts(seed: int, number: int) -> list[bytes]:
    return [bytes([seed + index]) * PART_BYTES for index in range(number)]


@pytest.fixture
def backend(s3_server: SeaweedFS, bucket: str) -> Iterator[ObjectStoreBackend]:
    made = ObjectStoreBackend(f"s3://{bucket}/run", options=s3_server.options())
    yield made
    made.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[SeaweedFS]:
    """A server that the test may kill."""
    server = SeaweedFS(tmp_path)
    server.start()
    server.make_bucket("bucket")
    yield server
    server.kill()


def refused(call: Callable[[], object], kind: type[BackendError]) -> BackendError:
    """Return the error, which must be of this very kind and give no credential away."""
    with pytest.raises(BackendError) as caught:
        call()
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert type(caught.value) is kind, shown
    assert SECRET not in shown
    assert KEY not in shown
    return caught.value


@pytest.mark.parametrize("name", ["key", "secret"])
@READ_ONLY_OR_NOT
def test_wrong_keys_are_denied_at_open(
    s3_server: SeaweedFS, bucket: str, name: str, read_only: bool
) -> None:
    options = s3_server.options(**{name: "tierfall-wrong-9c"})
    error = refused(
        lambda: ObjectStoreBackend(f"s3://{bucket}", options=options, read_only=read_only),
        AccessDeniedError,
    )
    assert "tierfall-wrong-9c" not in str(error)
    assert not error.retryable


@pytest.mark.parametrize("name", OPERATIONS)
def test_keys_that_turn_wrong_are_denied(
    backend: ObjectStoreBackend, s3_server: SeaweedFS, name: str
) -> None:
    # What a store answers to keys that were revoked: the same place with other keys.
    options = s3_server.options(secret="tierfall-wrong-9c")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectStoreBackend, "_probed", lambda self: True)
        stranger = ObjectStoreBackend(backend.place, options=options)
    refused(lambda: OPERATIONS[name](stranger), AccessDeniedError)
    stranger.close()


@READ_ONLY_OR_NOT
def test_a_missing_bucket_is_said_at_open(s3_server: SeaweedFS, read_only: bool) -> None:
    error = refused(
        lambda: ObjectStoreBackend(
            "s3://not-there", options=s3_server.options(), read_only=read_only
        ),
        BackendError,
    )
    assert "there is no such bucket" in str(error)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_bucket_that_is_gone_is_not_nothing_there(
    backend: ObjectStoreBackend, s3_server: SeaweedFS, bucket: str, name: str
) -> None:
    put(backend, "key", b"bytes")
    s3_server.remove_bucket(bucket)
    error = refused(lambda: OPERATIONS[name](backend), BackendError)
    assert "there is no such bucket" in str(error)


@READ_ONLY_OR_NOT
def test_no_server_is_unreachable_at_open(tmp_path: Path, read_only: bool) -> None:
    never_started = SeaweedFS(tmp_path)
    error = refused(
        lambda: ObjectStoreBackend(
            "s3://bucket", options=never_started.options(), read_only=read_only
        ),
        UnreachableError,
    )
    assert error.retryable


def test_an_outage_in_mid_upload_costs_only_its_parts(own_server: SeaweedFS) -> None:
    backend = ObjectStoreBackend("s3://bucket/run", options=own_server.options())
    data = parts(1, 4)
    with backend.create("key", length=4 * PART_BYTES) as writer:
        for index in (3, 0):
            writer.write(index * PART_BYTES, memoryview(data[index]))
        own_server.kill()
        for call in (
            *OPERATIONS.values(),
            lambda _: writer.write(PART_BYTES, memoryview(data[1])),
        ):
            assert refused(lambda call=call: call(backend), UnreachableError).retryable
        own_server.start()
        own_server.make_bucket("bucket")
        assert list(backend.scan("")) == []
        for index in (1, 2):
            writer.write(index * PART_BYTES, memoryview(data[index]))
        writer.publish()
    assert get(backend, "key") == b"".join(data)
    assert backend.discard_unfinished("") == 0
    backend.close()


def test_a_begin_that_got_no_answer_is_tried_again(own_server: SeaweedFS) -> None:
    backend = ObjectStoreBackend("s3://bucket", options=own_server.options())
    with backend.create("key") as writer:
        own_server.kill()
        refused(lambda: writer.write(0, memoryview(bytes(PART_BYTES))), UnreachableError)
        own_server.start()
        own_server.make_bucket("bucket")
        writer.write(0, memoryview(bytes(PART_BYTES)))
        writer.publish()
    assert backend.stat("key").bytes == PART_BYTES
    backend.close()


def test_what_a_killed_process_left_is_collected(
    backend: ObjectStoreBackend, s3_server: SeaweedFS, bucket: str
) -> None:
    """The writer is dropped as a killed process drops it: without abort."""
    for key in ("a/b", "a/odd %&?+ é", "c"):
        backend.create(key).write(0, memoryview(bytes(PART_BYTES)))
    other = ObjectStoreBackend(f"s3://{bucket}/running", options=s3_server.options())
    other.create("a/b").write(0, memoryview(bytes(PART_BYTES)))
    assert list(backend.scan("")) == []
    with pytest.raises(KeyNotFoundError):
        backend.stat("a/b")
    fresh = ObjectStoreBackend(backend.place, options=s3_server.options())
    assert [fresh.discard_unfinished(prefix) for prefix in ("a/", "", "")] == [2, 1, 0]
    assert other.discard_unfinished("") == 0, "its own living writer"
    for each in (fresh, other):
        each.close()


def test_a_failed_upload_leaves_nothing(backend: ObjectStoreBackend, s3_server: SeaweedFS) -> None:
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
    fresh = ObjectStoreBackend(backend.place, options=s3_server.options())
    assert fresh.discard_unfinished("") == 0
    fresh.close()


def test_small_last_pieces_are_joined(backend: ObjectStoreBackend) -> None:
    data = b"".join(parts(7, 2)) + b"ab" + b"cde"
    with backend.create("key") as writer:
        for start, end in ((0, PART_BYTES), (PART_BYTES, 2 * PART_BYTES)):
            writer.write(start, memoryview(data)[start:end])
        writer.write(2 * PART_BYTES, memoryview(b"ab"))
        writer.write(2 * PART_BYTES + 2, memoryview(b"cde"))
        writer.publish()
    assert get(backend, "key") == data


def test_parts_are_bounded_in_number(backend: ObjectStoreBackend, s3_server: SeaweedFS) -> None:
    view = memoryview(bytes(PART_BYTES))
    large = backend.create("large", length=200 * 1024 * MIB)
    large.write(0, view)
    assert "bytes or more at a time" in str(
        refused(lambda: large.write(PART_BYTES, view), BackendError)
    )
    endless = backend.create("endless")
    endless.write(9_999 * PART_BYTES, view)
    refused(lambda: endless.write(10_000 * PART_BYTES, view), BackendError)
    fresh = ObjectStoreBackend(backend.place, options=s3_server.options())
    assert fresh.discard_unfinished("") == 0, "a refused writer left its upload"
    fresh.close()


def test_the_same_part_may_be_written_again(backend: ObjectStoreBackend) -> None:
    with backend.create("key", length=2 * PART_BYTES) as writer:
        for seed in (1, 2):
            writer.write(0, memoryview(bytes([seed]) * PART_BYTES))
        writer.write(PART_BYTES, memoryview(bytes(PART_BYTES)))
        writer.publish()
    assert get(backend, "key") == b"\2" * PART_BYTES + bytes(PART_BYTES)


def test_credentials_of_the_environment_serve(
    s3_server: SeaweedFS, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = s3_server.options()
    for name, value in (
        ("AWS_ACCESS_KEY_ID", options.pop("key")),
        ("AWS_SECRET_ACCESS_KEY", options.pop("secret")),
        ("AWS_ENDPOINT_URL_S3", options.pop("endpoint_url")),
    ):
        monkeypatch.setenv(name, value)
    backend = ObjectStoreBackend(f"s3://{bucket}/a b", options=options)
    data = b"".join(parts(1, 2))
    put(backend, "odd %&?+ é", data)
    assert get(backend, "odd %&?+ é") == data
    backend.create("left").write(0, memoryview(bytes(PART_BYTES)))
    fresh = ObjectStoreBackend(f"s3://{bucket}/a b", options=options)
    assert fresh.discard_unfinished("") == 1
    for each in (backend, fresh):
        each.close()


def test_an_upload_needs_no_memory_of_its_own(s3_server: SeaweedFS, bucket: str) -> None:
    """256 MiB in parts of 16 MiB, four at once, from one part's memory: less than what is in flight may be added."""
    part_bytes, parallel, total = 16 * MIB, 4, 256 * MIB
    backend = retrying(ObjectStoreBackend(f"s3://{bucket}", options=s3_server.options()))
    source = memoryview(bytearray(b"\x5a" * part_bytes))
    targets = [memoryview(bytearray(part_bytes)) for _ in range(parallel)]
    with Peak() as peak, ThreadPoolExecutor(parallel) as pool:
        with backend.create("key", length=total) as writer:
            list(pool.map(lambda at: writer.write(at, source), range(0, total, part_bytes)))
            writer.publish()
        written_bytes = peak.grown_bytes
        list(
            pool.map(
                lambda index: backend.read_into(
                    "key", index * part_bytes, targets[index % parallel]
                ),
                range(total // part_bytes),
            )
        )
    print(
        f"RssAnon grew by {written_bytes / MIB:.1f} MiB writing, {peak.grown_bytes / MIB:.1f} both"
    )
    assert all(target == source for target in targets)
    assert written_bytes < part_bytes * parallel + 16 * MIB
    assert peak.grown_bytes < part_bytes * parallel + 32 * MIB
    backend.close()


class Peak:
    """The most that this process's anonymous memory grows by in a block."""

    def __enter__(self) -> Peak:
        self._start_bytes, self._peak_bytes = _anonymous_bytes(), 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *args: Any) -> None:
        self._done.set()
        self._thread.join()

    @property
    def grown_bytes(self) -> int:
        return self._peak_bytes - self._start_bytes

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self._peak_bytes = max(self._peak_bytes, _anonymous_bytes())


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
