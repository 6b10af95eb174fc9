"""The conformance checks: each public function checks one promise, which is its docstring."""

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
    read,
    refused,
    write_pieces,
)
from tierfall.core.types.backend import Backend, Publish, StoredObject, SyncedBackend, Writer
from tierfall.core.types.errors import (
    BackendError,
    KeyExistsError,
    KeyInvalidError,
    KeyNotFoundError,
    TruncatedError,
)

# More than any backend keeps in memory before it sends.
LONG_BYTES = 21 * 1024 * 1024 + 4099
STEP_BYTES = 4 * 1024 * 1024
RAGGED_BYTES = (0, 1, 4095, 4096, 4097, 65_537, 262_144, 1_048_577)
ODD_KEYS = (
    "run-1/x",
    "run/-dash",
    "run/.hidden",
    "run/..almost",
    "run/a b",
    "run/a-b",
    "run/a.b",
    "run/a/b",
    "run/a%2Fb",
    "run/a'\"`$*?[]{}|&;<>b",
    "run/d/e/f/g/h/i/j",
    "run/~home",
    "run/été",
    "run/数据",
    "run/🔥",
    "run/" + "l" * 255,
    "run/" + "é" * 127,
)
INVALID_KEYS = (
    "",
    "/",
    "/absolute",
    "trailing/",
    "a//b",
    ".",
    "..",
    "../up",
    "a/../b",
    "a/..",
    "./a",
    "a/./b",
    "a\\b",
    "..\\up",
    "nul\0",
    "new\nline",
    "tab\t",
    "escape\x1b[2J",
    "delete\x7f",
    "c1\x85",
    "surrogate\udc80",
    "l" * 256,
    "é" * 128,
    "/".join(["p" * 100] * 11),
)


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
    """Objects of any length are read as they were written, with ``length``, ``length_max`` or neither, and replace
    another."""
    with bench.backend() as backend:
        for size_bytes in (*RAGGED_BYTES, LONG_BYTES):
            put(backend, "run/key", b"old")
            lengths: tuple[dict[str, Any], ...] = (
                {"length": size_bytes},
                {"length_max": 2 * size_bytes},
                {},
            )
            for seed, words in enumerate(lengths):
                data = pattern(size_bytes, seed=seed)
                with backend.create("run/key", **words) as writer:
                    write_pieces(writer, backend.traits, in_memory(data), STEP_BYTES)
                    assert backend.stat("run/key").bytes in (3, size_bytes), "visible in part"
                    writer.publish()
                assert backend.stat("run/key").bytes == size_bytes, f"stat of {size_bytes} bytes"
                assert get(backend, "run/key") == data, f"{size_bytes} bytes came back changed"
        assert keys(backend) == ["run/key"], "more than the object is listed"


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
    """Disjoint ranges may be written from several threads, in any order unless ``ordered_writes``. They begin and end
    anywhere, in memory that begins anywhere and may be read-only."""
    with bench.backend() as backend:
        for shift, wanted in ((0, 300 * 1024), (1, 300_001), (777, 777), (4095, 600_000)):
            step = piece_bytes(backend.traits, wanted)
            data = pattern(6 * step + 4097, seed=shift)
            view = in_memory(data, shift=shift).toreadonly()
            with backend.create("run/parallel", length=view.nbytes) as writer:
                if backend.traits.ordered_writes:
                    write_pieces(writer, backend.traits, view, step)
                else:
                    _write_in_threads(writer, view, step)
                writer.publish()
            assert get(backend, "run/parallel") == data, f"shift {shift}: bytes changed"


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
    """Abort, once or twice, leaving the ``with`` without publish, and a publish of a part leave nothing, and an older
    object unchanged, after few and after many writes."""
    with bench.backend() as backend:
        put(backend, "run/old", b"old")
        long = in_memory(pattern(5 * STEP_BYTES))
        for view, size_bytes in ((memoryview(b"new"), 4), (long, LONG_BYTES)):
            for key in ("run/old", "run/other/new"):
                writer = backend.create(key, length=size_bytes)
                write_pieces(writer, backend.traits, view, STEP_BYTES)
                writer.abort()
                writer.abort()
                with backend.create(key) as writer:
                    write_pieces(writer, backend.traits, view, STEP_BYTES)
                short = backend.create(key, length=size_bytes)
                write_pieces(short, backend.traits, view, STEP_BYTES)
                _refuses(short.publish, "publish of a part of an object")
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


def lengths_are_bounds(bench: Bench) -> None:
    """Bytes beyond ``length`` or ``length_max`` make write or publish raise, and invalid lengths create; the older
    object is kept. An object may have up to ``length_max`` bytes."""
    with bench.backend() as backend:
        for size_bytes in (0, 9, 10):
            with backend.create("run/key", length_max=10) as writer:
                writer.write(0, memoryview(bytes(size_bytes)))
                writer.publish()
            assert backend.stat("run/key").bytes == size_bytes
        put(backend, "run/key", b"old")
        bounds: tuple[dict[str, Any], ...] = ({"length": 3}, {"length_max": 3})
        for words in bounds:
            refused(BackendError, partial(_overfill, backend, words), f"4 bytes with {words}")
        invalid: tuple[dict[str, Any], ...] = (
            {"length": -1},
            {"length_max": -1},
            {"length": 11, "length_max": 10},
        )
        for words in invalid:
            refused(BackendError, partial(backend.create, "run/new", **words), f"{words}")
        _only_old_is_left(bench, backend)


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
    """Of many writers that create one key IF_ABSENT at once, one wins; the others raise KeyExistsError, are dead, and
    leave nothing. A deleted key can be created again. Without the trait ``conditional_create``, each create raises."""
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
        loser = backend.create("attempts/0", length=6, publish=Publish.IF_ABSENT)
        loser.write(0, memoryview(b"second"))
        error = refused(KeyExistsError, loser.publish, "a second create")
        assert isinstance(error, FileExistsError), "KeyExistsError is no FileExistsError"
        assert not error.retryable, "the error of a refused create is retryable"
        _refuses(loser.publish, "publish by the loser")
        assert len(keys(backend)) == 6, "a loser is listed"
        with bench.reopened(backend) as second:
            assert second.discard_unfinished("") == 0, "a loser left something behind"
        backend.delete("attempts/0")
        put(backend, "attempts/0", b"third", publish=Publish.IF_ABSENT)
        assert get(backend, "attempts/0") == b"third", "a deleted key cannot be created again"


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


def any_range_can_be_read(bench: Bench) -> None:
    """Any range of an object can be read, into memory of any alignment, and no other byte is changed."""
    with bench.backend() as backend:
        data = pattern(1_300_001, seed=4)
        put(backend, "run/key", data)
        spans = ((0, 1), (1, 4096), (4095, 2), (4096, 524_288), (5, 700_001), (1_300_000, 1))
        for offset, size_bytes in (*spans, (0, len(data)), (4096, len(data) - 4096), (700, 0)):
            for shift in (0, 1, 513):
                found = read(backend, "run/key", offset, size_bytes, shift=shift)
                assert found == data[offset : offset + size_bytes], f"{offset}+{size_bytes}"
        guarded = in_memory(b"\xaa" * 600_000)
        backend.read_into("run/key", 3, guarded[4096:-4096])
        outside = bytes(guarded[:4096]) + bytes(guarded[-4096:])
        assert outside == b"\xaa" * 8192, "bytes outside of the view changed"


def cached_bytes_are_the_object(bench: Bench) -> None:
    """``read_cached`` fills the views with the object's bytes, or returns False and changes none."""
    with bench.backend() as backend:
        data = pattern(1_300_001, seed=5)
        put(backend, "run/key", data)
        read(backend, "run/key", 0, len(data))
        for offset, size in ((0, len(data)), (4097, 500_000)):
            views = [in_memory(b"\xee" * part) for part in (1, size // 2, size - size // 2 - 1)]
            is_read = backend.read_cached("run/key", offset, offset + size, views)
            expected = data[offset : offset + size] if is_read else b"\xee" * size
            assert b"".join(map(bytes, views)) == expected, f"{offset}+{size}"


def reading_past_the_end_raises(bench: Bench) -> None:
    """Reading beyond the end of an object raises TruncatedError."""
    with bench.backend() as backend:
        data = pattern(400_000, seed=5)
        put(backend, "run/key", data)
        put(backend, "run/empty", b"")
        cases = (("run/key", 0, 400_001), ("run/key", 399_999, 2), ("run/key", 400_000, 1))
        for key, offset, size in (*cases, ("run/key", 1 << 40, 1), ("run/empty", 0, 1)):
            error = refused(
                TruncatedError,
                partial(read, backend, key, offset, size),
                f"reading {size} bytes at {offset} of {key}",
            )
            assert not error.retryable, "the error of a short object is retryable"


def missing_keys_raise_key_not_found(bench: Bench) -> None:
    """A missing key raises KeyNotFoundError, which is a FileNotFoundError and not retryable. If the medium has folders,
    and one is in place of the file, or a file in place of a folder, another BackendError may say so, not retryable."""
    with bench.backend() as backend:
        put(backend, "run/folder/key", b"bytes")
        for key in ("run/other", "other/run", "run", "run/folder", "run/folder/key/below"):
            is_blocked = key.startswith("run/folder") or key == "run"
            for call in (backend.stat, lambda key: read(backend, key, 0, 1)):
                error = refused(
                    BackendError if is_blocked else KeyNotFoundError,
                    partial(call, key),
                    f"asking for {key!r}",
                )
                assert is_blocked or isinstance(error, FileNotFoundError), "no FileNotFoundError"
                assert not error.retryable, "the error of a missing key is retryable"
                assert key in str(error), "the message does not contain the key"


def a_scan_is_sorted_and_complete(bench: Bench) -> None:
    """A scan lists every object once, with its length, sorted by key, for every valid key."""
    with bench.backend() as backend:
        assert keys(backend) == [], "the listing of an empty place is not empty"
        for number, key in enumerate(reversed(ODD_KEYS)):
            put(backend, key, bytes(number))
        expected = [
            StoredObject(key=key, bytes=number) for number, key in enumerate(reversed(ODD_KEYS))
        ]
        expected.sort(key=lambda each: each.key)
        assert list(backend.scan("")) == expected, "the listing differs from what was written"
        for key in ODD_KEYS:
            assert get(backend, key) == bytes(backend.stat(key).bytes), f"{key!r} does not read"
        with bench.reopened(backend) as second:
            assert list(second.scan("")) == expected, "a second backend lists other objects"


def a_prefix_ends_at_a_component(bench: Bench) -> None:
    """A scan lists only objects below its prefix; without any, the listing is empty."""
    with bench.backend() as backend:
        for key in ("a", "ab/c", "b/c", "b/c-d", "b/d/e", "b/d/f/g", "b-c/d"):
            put(backend, key, b"")
        assert keys(backend, "b/") == ["b/c", "b/c-d", "b/d/e", "b/d/f/g"]
        assert keys(backend, "b/d/") == ["b/d/e", "b/d/f/g"]
        for prefix in ("a/", "c/", "b/c/", "b/x/y/"):
            assert keys(backend, prefix) == [], f"the listing of {prefix!r} is not empty"
        for prefix in ("b", "/", "../", "b//", "b/../", "b/./", "\0/"):
            for call in (lambda prefix: list(backend.scan(prefix)), backend.discard_unfinished):
                refused(
                    KeyInvalidError,
                    partial(call, prefix),
                    f"the prefix {prefix!r}",
                )


def a_scan_during_changes_is_consistent(bench: Bench) -> None:
    """A scan during writes and deletions lists all other objects, sorted, and raises no error."""
    with bench.backend() as backend:
        kept = [f"run/kept-{number}/key" for number in range(5)]
        for key in kept:
            put(backend, key, b"kept")

        def change(index: int) -> None:
            for number in range(25):
                put(backend, f"run/temporary-{index}/{number}/key", b"temporary")
                backend.delete(f"run/temporary-{index}/{number}/key")

        def scan(index: int) -> None:
            for _ in range(25):
                found = keys(backend, "run/")
                assert found == sorted(found), "a listing is not sorted"
                assert [key for key in found if "kept" in key] == kept, "an object is missing"

        no_errors(in_threads(4, lambda index: change(index) if index < 2 else scan(index)))
        assert keys(backend) == kept


def delete_is_idempotent(bench: Bench) -> None:
    """Delete removes one object and no other; deleting a missing key is no error."""
    with bench.backend() as backend:
        for key in ("run/a", "run/a-b", "run/b/c", "run/b/d"):
            put(backend, key, b"bytes")
        for key in ("run/a", "run/a", "run/b/c", "run/b", "run", "other", "run/a-b/below"):
            backend.delete(key)
        assert keys(backend) == ["run/a-b", "run/b/d"], "delete removed too much or too little"
        refused(KeyNotFoundError, lambda: backend.stat("run/a"), "stat after delete")
        put(backend, "run/a", b"again")
        assert get(backend, "run/a") == b"again", "a deleted key cannot be written again"


def delete_some_deletes_all_in_the_end(bench: Bench) -> None:
    """``delete_some`` deletes at least one key and returns the others, until none is left. A missing key is no error,
    and no other object is deleted."""
    with bench.backend() as backend:
        for key in (*ODD_KEYS, "run/d/e/kept", "kept"):
            put(backend, key, b"bytes")
        for _ in range(2):
            left = {*ODD_KEYS, "run/none", "none/run", "run/d/e", "run", "kept/below"}
            while left:
                asked, left = left, set(backend.delete_some(sorted(left)))
                assert left < asked, "no key was deleted, or another key was returned"
                remaining = {*keys(backend), *left} - {"run/d/e/kept", "kept"}
                assert not remaining & (asked - left), "a key that was not returned still exists"
            assert keys(backend) == ["kept", "run/d/e/kept"], "too much or too little was deleted"
        put(backend, ODD_KEYS[0], b"again")
        assert get(backend, ODD_KEYS[0]) == b"again", "a deleted key cannot be written again"


def invalid_keys_are_refused(bench: Bench) -> None:
    """Every call raises KeyInvalidError for an invalid key, and changes nothing."""
    with bench.backend() as backend:
        put(backend, "run/key", b"bytes")
        for key in INVALID_KEYS:
            for name, call in _calls(backend):
                error = refused(
                    KeyInvalidError,
                    partial(call, key),
                    f"{name} of {key!r}",
                )
                assert isinstance(error, ValueError), "KeyInvalidError is no ValueError"
        assert keys(backend) == ["run/key"], "an invalid key left something behind"


def active_writers_are_kept(bench: Bench) -> None:
    """``discard_unfinished`` removes nothing of this backend object's own active writers, and no object."""
    with bench.backend() as backend:
        put(backend, "run/old", b"old")
        with backend.create("run/new", length=3) as writer:
            writer.write(0, memoryview(b"ne"))
            assert backend.discard_unfinished("") == 0, "it counts an active writer"
            assert backend.discard_unfinished("run/") == 0, "it counts an active writer"
            writer.write(2, memoryview(b"w"))
            writer.publish()
        assert get(backend, "run/new") == b"new", "an active writer lost its bytes"
        assert keys(backend) == ["run/new", "run/old"]


def leftovers_of_dead_writers_are_removed(bench: Bench) -> None:
    """``discard_unfinished`` removes what other processes' writers left below the prefix, and returns how many."""
    with bench.backend() as backend:
        if bench.reopen is None:
            return
        put(backend, "run/old", b"old")
        dead = [backend.create(key) for key in ("run/x", "run/deep/y", "other/z", "run/old")]
        # Bytes too few for a part may still be in the writer's memory, and leave nothing at the place.
        data = in_memory(bytes(piece_bytes(backend.traits, 5)))
        for writer in dead:
            writer.write(0, data)
        with bench.reopened(backend) as second:
            assert keys(second) == ["run/old"], "an unfinished object is listed"
            # So few bytes may all be in the memory of an ordered writer.
            few = (0,) if backend.traits.ordered_writes else ()
            one, two = ((1, *few), (2, *few)) if bench.keeps_unfinished else ((0,), (0,))
            assert second.discard_unfinished("run/deep/") in one, "of one below run/deep/"
            assert second.discard_unfinished("run/") in two, "of two more below run/"
            assert second.discard_unfinished("nothing/") == 0, "below a prefix without objects"
            assert second.discard_unfinished("") in one, "of the last"
            assert second.discard_unfinished("") == 0, "an earlier call did not remove them"
        for writer in dead:
            writer.abort()
        assert keys(backend) == ["run/old"]
        assert get(backend, "run/old") == b"old"


def traits_and_place_are_valid(bench: Bench) -> None:
    """Traits are constant and valid, and the place is not empty."""
    with bench.backend() as backend:
        traits = backend.traits
        assert traits == backend.traits
        assert backend.place
        assert traits.alignment_bytes >= 1
        assert traits.max_parallel >= 1
        assert traits.part_bytes_min >= 0


def _write_in_threads(writer: Writer, view: memoryview, step: int) -> None:
    parts = ranges(view.nbytes, step)[::-1]

    def write(index: int) -> None:
        start, end = parts[index]
        writer.write(start, view[start:end])

    no_errors(in_threads(len(parts), write))


def _create_as(backend: Backend, key: str, index: int) -> None:
    put(backend, key, bytes([index]), publish=Publish.IF_ABSENT)


def _overfill(backend: Backend, words: dict[str, Any]) -> None:
    with backend.create("run/key", **words) as writer:
        writer.write(0, memoryview(b"1234"))
        writer.publish()


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


def _calls(backend: Backend) -> list[tuple[str, Callable[[str], object]]]:
    return [
        ("create", backend.create),
        ("conditional create", lambda key: backend.create(key, publish=Publish.IF_ABSENT)),
        ("read", lambda key: backend.read_into(key, 0, memoryview(bytearray(1)))),
        ("stat", backend.stat),
        ("delete", backend.delete),
        ("delete_some", lambda key: backend.delete_some([key, "run/key"])),
        ("delete_some", lambda key: backend.delete_some(["run/key", key])),
    ]
