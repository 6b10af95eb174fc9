"""Conformance checks of writers before, during and after ``publish``, for objects of any length.

Each function checks one promise, which is its docstring.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from tierfall.backends.conformance.kit import (
    Bench,
    get,
    in_memory,
    in_threads,
    keys,
    no_errors,
    pattern,
    piece_bytes,
    put,
    ranges,
    refused,
    write_pieces,
)
from tierfall.core.types.backend import Backend, Publish, SyncedBackend
from tierfall.core.types.errors import (
    BackendError,
    KeyExistsError,
    KeyInvalidError,
    KeyNotFoundError,
)

# More than any backend keeps in memory before it sends.
LONG_BYTES = 21 * 1024 * 1024 + 4099
STEP_BYTES = 4 * 1024 * 1024
RAGGED_BYTES = (0, 1, 4095, 4096, 4097, 65_537, 262_144, 1_048_577)


def nothing_is_visible_before_publish(bench: Bench) -> None:
    """An object is visible under its key after publish, and not before."""
    with bench.backend() as backend, backend.create("run/new", length=5) as writer:
        writer.write(0, memoryview(b"bytes"))
        assert keys(backend) == [], "a scan shows an unpublished object"
        refused(KeyNotFoundError, lambda: backend.stat("run/new"), "stat before publish")
        refused(KeyNotFoundError, lambda: get(backend, "run/new"), "read before publish")
        writer.publish()
        assert keys(backend) == ["run/new"], "a scan does not show a published object"
        assert get(backend, "run/new") == b"bytes", "other bytes came back"


def any_length_comes_back(bench: Bench) -> None:
    """Objects of any length are read as they were written, with the length given at create or not."""
    with bench.backend() as backend:
        for size_bytes in RAGGED_BYTES:
            data = pattern(size_bytes, seed=size_bytes)
            for length in (size_bytes, None):
                key = f"lengths/{size_bytes}-{length is None}"
                with backend.create(key, length=length) as writer:
                    write_pieces(writer, backend.traits, in_memory(data), max(size_bytes, 1))
                    writer.publish()
                assert backend.stat(key).bytes == size_bytes, f"stat of {size_bytes} bytes"
                assert get(backend, key) == data, f"{size_bytes} bytes came back changed"


def an_empty_object_is_an_object(bench: Bench) -> None:
    """An empty object is published without a write, listed, read and replaced."""
    with bench.backend() as backend:
        with backend.create("run/empty", length=0) as writer:
            writer.publish()
        with backend.create("run/empty-too") as writer:
            writer.write(0, memoryview(b""))
            writer.publish()
        for key in ("run/empty", "run/empty-too"):
            assert backend.stat(key).bytes == 0, "an empty object has bytes"
            assert get(backend, key) == b"", "an empty object has bytes when read"
        assert keys(backend) == ["run/empty", "run/empty-too"], "an empty object is not listed"
        put(backend, "run/empty", b"full")
        assert get(backend, "run/empty") == b"full", "an empty object was not replaced"


def disjoint_ranges_from_threads(bench: Bench) -> None:
    """Disjoint ranges may be written from several threads, in any order unless ``ordered_writes``."""
    with bench.backend() as backend:
        step = piece_bytes(backend.traits, 300 * 1024)
        view = in_memory(pattern(6 * step + 4097, seed=1))
        parts = ranges(view.nbytes, step)
        with backend.create("run/parallel", length=view.nbytes) as writer:
            if backend.traits.ordered_writes:
                write_pieces(writer, backend.traits, view, step)
            else:
                parts.reverse()
                no_errors(
                    in_threads(
                        len(parts),
                        lambda index: writer.write(
                            parts[index][0], view[parts[index][0] : parts[index][1]]
                        ),
                    )
                )
            writer.publish()
        assert get(backend, "run/parallel") == view, "parallel writes came back changed"


def ranges_that_share_a_block(bench: Bench) -> None:
    """Ranges that begin and end anywhere, in memory that begins anywhere, do not damage each other."""
    with bench.backend() as backend:
        step = piece_bytes(backend.traits, 300_001)
        view = in_memory(pattern(7 * step - 12_345, seed=2), shift=1)
        parts = ranges(view.nbytes, step)

        def write(index: int) -> None:
            start, end = parts[index]
            writer.write(start, view[start:end])

        with backend.create("run/ragged", length=view.nbytes) as writer:
            if backend.traits.ordered_writes:
                for index in range(len(parts)):
                    write(index)
            else:
                no_errors(in_threads(len(parts), write))
            writer.publish()
        assert get(backend, "run/ragged") == view, "neighbouring ranges damaged each other"


def offsets_and_memory_of_any_alignment(bench: Bench) -> None:
    """Offset and memory of a write may have any alignment, and the view may be read-only."""
    with bench.backend() as backend:
        first_bytes = piece_bytes(backend.traits, 777)
        for shift in (0, 1, 777, 4095):
            data = pattern(first_bytes + 600_000, seed=shift)
            view = in_memory(data, shift=shift).toreadonly()
            with backend.create(f"run/shift-{shift}", length=len(data)) as writer:
                writer.write(0, view[:first_bytes])
                for start, end in ranges(600_000, piece_bytes(backend.traits, 600_000)):
                    writer.write(first_bytes + start, view[first_bytes + start : first_bytes + end])
                writer.publish()
            assert get(backend, f"run/shift-{shift}") == data, f"shift {shift} changed bytes"


def a_writer_keeps_no_reference(bench: Bench) -> None:
    """The caller's memory may be reused as soon as ``write`` has returned."""
    with bench.backend() as backend:
        data = pattern(400_000, seed=3)
        view = in_memory(data)
        with backend.create("run/reused", length=len(data)) as writer:
            write_pieces(writer, backend.traits, view, len(data))
            view[:] = bytes(len(data))
            writer.publish()
        assert get(backend, "run/reused") == data, "memory was read after write had returned"


def abort_leaves_nothing(bench: Bench) -> None:
    """Abort, once or twice, and leaving the ``with`` without publish leave nothing, and an older object unchanged."""
    with bench.backend() as backend:
        put(backend, "run/old", b"old")
        writer = backend.create("run/old", length=3)
        writer.write(0, memoryview(b"new"))
        writer.abort()
        writer.abort()
        with backend.create("run/other/new") as writer:
            writer.write(0, memoryview(b"new"))
        _leave_by_error(backend, "run/third")
        assert keys(backend) == ["run/old"], "an aborted object is listed"
        assert get(backend, "run/old") == b"old", "an aborted writer changed an object"
        with bench.reopened(backend) as second:
            assert second.discard_unfinished("") == 0, "an aborted writer left something behind"


def a_finished_writer_refuses(bench: Bench) -> None:
    """After publish or abort, ``write`` and ``publish`` raise; abort after publish changes nothing."""
    with bench.backend() as backend:
        published = backend.create("run/published")
        published.write(0, memoryview(b"bytes"))
        published.publish()
        published.abort()
        aborted = backend.create("run/aborted")
        aborted.abort()
        for writer in (published, aborted):
            _refuses(writer.publish, "publish by a finished writer")
            refused(
                BackendError,
                partial(writer.write, 0, memoryview(b"x")),
                "write by a finished writer",
            )
        assert keys(backend) == ["run/published"], "a finished writer published something"
        assert get(backend, "run/published") == b"bytes", "a finished writer changed its object"


def too_few_bytes_are_refused(bench: Bench) -> None:
    """Publish raises where bytes are missing, at the end or in between; the older object is kept."""
    with bench.backend() as backend:
        put(backend, "run/key", b"old")
        short = backend.create("run/key", length=10)
        short.write(0, memoryview(b"123456789"))
        _refuses(short.publish, "publish of 9 bytes of 10")
        _refuses(short.publish, "publish again")
        if not backend.traits.ordered_writes and not backend.traits.part_bytes_min:
            hole = backend.create("run/key", length=10)
            hole.write(0, memoryview(b"1234"))
            hole.write(5, memoryview(b"67890"))
            _refuses(hole.publish, "publish with a hole")
        _only_old_is_left(bench, backend)


def too_many_bytes_are_refused(bench: Bench) -> None:
    """Bytes beyond the length make write or publish raise; the older object is kept."""
    with bench.backend() as backend:
        put(backend, "run/key", b"old")

        def overfill() -> None:
            with backend.create("run/key", length=3) as writer:
                writer.write(0, memoryview(b"1234"))
                writer.publish()

        refused(BackendError, overfill, "4 bytes where 3 were announced")
        _only_old_is_left(bench, backend)


def a_long_object_comes_back(bench: Bench) -> None:
    """A long object is read as it was written, with ``length``, ``length_max`` or neither, and replaces another."""
    with bench.backend() as backend:
        put(backend, "run/key", b"old")
        lengths: tuple[dict[str, Any], ...] = (
            {"length": LONG_BYTES},
            {"length_max": 2 * LONG_BYTES},
            {},
        )
        for seed, words in enumerate(lengths):
            data = pattern(LONG_BYTES, seed=seed)
            with backend.create("run/key", **words) as writer:
                write_pieces(writer, backend.traits, in_memory(data), STEP_BYTES)
                assert backend.stat("run/key").bytes in (3, LONG_BYTES), "visible in part"
                writer.publish()
            assert get(backend, "run/key") == data, "a long object came back changed"
        assert keys(backend) == ["run/key"], "more than the object is listed"


def an_aborted_long_object_leaves_nothing(bench: Bench) -> None:
    """A long object that is aborted after many writes leaves nothing, and an older object unchanged."""
    with bench.backend() as backend:
        put(backend, "run/key", b"old")
        view = in_memory(pattern(LONG_BYTES))
        for key in ("run/key", "run/new"):
            writer = backend.create(key, length=LONG_BYTES)
            write_pieces(writer, backend.traits, view[: 5 * STEP_BYTES], STEP_BYTES)
            writer.abort()
            short = backend.create(key, length=LONG_BYTES)
            write_pieces(short, backend.traits, view[: 5 * STEP_BYTES], STEP_BYTES)
            refused(BackendError, short.publish, "publish of a part of a long object")
        assert keys(backend) == ["run/key"], "an aborted object is listed"
        assert get(backend, "run/key") == b"old", "an aborted writer changed an object"
        with bench.reopened(backend) as second:
            assert second.discard_unfinished("") == 0, "an aborted writer left something behind"


def length_max_is_a_bound(bench: Bench) -> None:
    """An object may have up to ``length_max`` bytes and no more; invalid lengths raise at create."""
    with bench.backend() as backend:
        for size_bytes in (0, 9, 10):
            with backend.create("run/key", length_max=10) as writer:
                writer.write(0, memoryview(bytes(size_bytes)))
                writer.publish()
            assert backend.stat("run/key").bytes == size_bytes
        with backend.create("run/key", length_max=10) as writer:
            refused(
                BackendError,
                partial(writer.write, 1, memoryview(bytes(10))),
                "bytes beyond length_max",
            )
        invalid: tuple[dict[str, Any], ...] = (
            {"length": -1},
            {"length_max": -1},
            {"length": 11, "length_max": 10},
        )
        for words in invalid:
            refused(BackendError, partial(backend.create, "run/new", **words), f"{words}")
        assert keys(backend) == ["run/key"], "a refused object is listed"
        assert backend.stat("run/key").bytes == 10, "a refused object changed another"


def the_last_publish_wins(bench: Bench) -> None:
    """Of two writers of one key the last publish wins, whichever object is longer."""
    with bench.backend() as backend:
        first = backend.create("run/key")
        second = backend.create("run/key")
        second.write(0, memoryview(b"the second, longer"))
        first.write(0, memoryview(b"first"))
        second.publish()
        assert get(backend, "run/key") == b"the second, longer"
        first.publish()
        assert get(backend, "run/key") == b"first", "a shorter object did not replace a longer one"
        assert keys(backend) == ["run/key"]


def replace_is_atomic(bench: Bench) -> None:
    """A reader during a replacement gets the whole old object or the whole new one, never an error."""
    with bench.backend() as backend:
        if not backend.traits.atomic_replace:
            return
        size_bytes, rounds = 300 * 1024 + 1, 12
        put(backend, "run/key", bytes(size_bytes))

        def write(index: int) -> None:
            for number in range(1, rounds):
                put(backend, "run/key", bytes([number]) * size_bytes)

        def check(index: int) -> None:
            for _ in range(rounds * 4):
                found = get(backend, "run/key")
                assert found == found[:1] * size_bytes, "a reader saw a mixture of two objects"
                assert keys(backend, "run/") == ["run/key"], "a scan saw more or less than the key"

        no_errors(in_threads(3, lambda index: write(index) if index == 0 else check(index)))
        assert get(backend, "run/key") == bytes([rounds - 1]) * size_bytes


def conditional_create_has_one_winner(bench: Bench) -> None:
    """Of many writers that create one key IF_ABSENT at once, one wins; the others raise KeyExistsError. Without the
    trait ``conditional_create``, each create raises."""
    with bench.backend() as backend:
        if not backend.traits.conditional_create:
            what = "creating IF_ABSENT without the trait conditional_create"
            refused(BackendError, partial(_create_as, backend, "attempts/0", 0), what)
            assert keys(backend) == [], "what was refused is listed"
            return
        for number in range(6):
            key, count = f"attempts/{number}", 8
            errors = in_threads(count, partial(_create_as, backend, key))
            winners = [index for index in range(count) if errors[index] is None]
            losers = [error for error in errors if error is not None]
            assert len(winners) == 1, f"{len(winners)} writers won"
            assert all(isinstance(error, KeyExistsError) for error in losers), f"{losers!r}"
            assert get(backend, key) == bytes(winners), "the object is not the winner's"


def a_refused_conditional_create_leaves_nothing(bench: Bench) -> None:
    """A writer whose IF_ABSENT fails leaves the existing object unchanged and nothing else, and is dead."""
    with bench.backend() as backend:
        if not backend.traits.conditional_create:
            return
        put(backend, "run/key", b"first", publish=Publish.IF_ABSENT)
        loser = backend.create("run/key", length=6, publish=Publish.IF_ABSENT)
        loser.write(0, memoryview(b"second"))
        error = refused(KeyExistsError, loser.publish, "a second create")
        assert isinstance(error, FileExistsError), "KeyExistsError is no FileExistsError"
        assert not error.retryable, "the error of a refused create is retryable"
        _refuses(loser.publish, "publish by the loser")
        assert get(backend, "run/key") == b"first", "the loser changed the object"
        assert keys(backend) == ["run/key"]
        with bench.reopened(backend) as second:
            assert second.discard_unfinished("") == 0, "the loser left something behind"
        backend.delete("run/key")
        put(backend, "run/key", b"third", publish=Publish.IF_ABSENT)
        assert get(backend, "run/key") == b"third", "a deleted key cannot be created again"


def durable_objects_exist_after_reopening(bench: Bench) -> None:
    """With the trait ``durable``, a backend that is opened after this one was closed has what was published, and not
    what was deleted. (No test can show that this survives a power cut.)"""
    with bench.backend() as backend:
        if not backend.traits.durable:
            return
        assert bench.reopen is not None, (
            "the trait durable cannot be checked: hand in reopen, which opens a second backend on the place of the "
            "first, or set durable=False"
        )
        for key in ("run/kept", "run/deleted"):
            put(backend, key, b"bytes")
        backend.delete("run/deleted")
    with bench.reopened(backend) as second:
        assert keys(second) == ["run/kept"], "after a close, the place has other objects"
        assert get(second, "run/kept") == b"bytes", "after a close, the object has other bytes"


def visible_objects_can_be_synced(bench: Bench) -> None:
    """With the trait ``needs_sync``, ``sync`` changes no object, and raises KeyNotFoundError for a missing folder."""
    with bench.backend() as backend:
        if not backend.traits.needs_sync:
            return
        synced = cast(SyncedBackend, backend)
        put(backend, "run/step/key", b"data")
        with bench.reopened(backend) as second:
            for folder in ("run/step", "run"):
                synced.sync(folder)
                cast(SyncedBackend, second).sync(folder)
        assert get(backend, "run/step/key") == b"data"
        assert keys(backend) == ["run/step/key"], "a sync left something behind"
        refused(KeyNotFoundError, lambda: synced.sync("run/other"), "a missing folder")
        refused(KeyInvalidError, lambda: synced.sync("../run"), "a folder outside")


def _create_as(backend: Backend, key: str, index: int) -> None:
    put(backend, key, bytes([index]), publish=Publish.IF_ABSENT)


def _refuses(call: Callable[[], object], what: str) -> None:
    refused(BackendError, call, what)


def _leave_by_error(backend: Backend, key: str) -> None:
    class Left(Exception):
        pass

    try:
        with backend.create(key) as writer:
            writer.write(0, memoryview(b"bytes"))
            raise Left
    except Left:
        return


def _only_old_is_left(bench: Bench, backend: Backend) -> None:
    assert get(backend, "run/key") == b"old", "a refused object replaced an older one"
    assert keys(backend) == ["run/key"]
    with bench.reopened(backend) as second:
        assert second.discard_unfinished("") == 0, "a refused object left something behind"
