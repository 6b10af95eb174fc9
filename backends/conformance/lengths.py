"""Conformance checks about long objects and about lengths that are known, bounded, or not known at all.

Each function is one promise; its docstring says it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tierfall.backends.conformance.kit import (
    Bench,
    get,
    in_memory,
    keys,
    pattern,
    put,
    refused,
    write_pieces,
)
from tierfall.core.types.errors import BackendError

# More than any backend keeps in memory before it begins to send.
LONG_BYTES = 21 * 1024 * 1024 + 4099
STEP_BYTES = 4 * 1024 * 1024


def a_long_object_comes_back(bench: Bench) -> None:
    """An object of many pieces comes back whole, its length told, bounded or not said, and replaces another."""
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
                assert backend.stat("run/key").bytes in (3, LONG_BYTES), "seen before its end"
                writer.publish()
            assert get(backend, "run/key") == data, "a long object came back changed"
        assert keys(backend) == ["run/key"], "more than the object is listed"


def a_long_object_given_up_leaves_nothing(bench: Bench) -> None:
    """A long object that is given up after many pieces leaves nothing, and an older object as it was."""
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
        assert keys(backend) == ["run/key"], "what was given up is listed"
        assert get(backend, "run/key") == b"old", "what was given up changed an object"
        with bench.reopened(backend) as second:
            assert second.discard_unfinished("") == 0, "what was given up left something behind"


def length_max_is_a_bound(bench: Bench) -> None:
    """An object may have fewer bytes than its length_max, as many, and never more; senseless numbers are refused."""
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
        senseless: tuple[dict[str, Any], ...] = (
            {"length": -1},
            {"length_max": -1},
            {"length": 11, "length_max": 10},
        )
        for words in senseless:
            refused(BackendError, partial(backend.create, "run/new", **words), f"{words}")
        assert keys(backend) == ["run/key"], "a refused object is listed"
        assert backend.stat("run/key").bytes == 10, "a refused object changed another"
