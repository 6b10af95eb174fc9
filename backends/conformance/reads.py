"""Conformance checks of listing, reading and deleting objects, and of keys.

Each function checks one promise, which is its docstring.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
    read,
    refused,
)
from tierfall.core.types.backend import Backend, Publish, StoredObject
from tierfall.core.types.errors import (
    BackendError,
    KeyInvalidError,
    KeyNotFoundError,
    TruncatedError,
)

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
        assert traits.part_bytes_max == 0 or traits.part_bytes_max >= traits.part_bytes_min


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
