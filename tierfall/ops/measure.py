"""Measuring tiers: rates, round trip, free bytes and traits of the backend.

Random bytes, which nothing can compress, are written as a flush writes and read as a restore reads, under a key beside
the runs. They are removed again, after an error too; what a killed check left is removed by the next one of this node.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from mmap import PAGESIZE
from pathlib import Path

import numpy as np

from tierfall.backends.open import place_of
from tierfall.config import Config, FileTierConfig, HostTierConfig, ObjectTierConfig
from tierfall.core.capture.copier import chunk_digest
from tierfall.core.copies.images import READ_THREADS
from tierfall.core.flush.lane import LaneLimits
from tierfall.core.format.catalog import Listing
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.runtime.buffers import BufferPool, allocate
from tierfall.core.runtime.threads import run_in_threads
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    CapacityError,
    IntegrityError,
    TierfallError,
)
from tierfall.core.types.units import format_size
from tierfall.core.types.values import TierKind
from tierfall.ops.commands import check_room
from tierfall.ops.reader import RunReader, known_slots
from tierfall.ops.sync import open_writable
from tierfall.setup.places import memory_root, run_folder
from tierfall.setup.tiers import call_tiers, lane_limits
from tierfall.tiers.host_folder import measure_room, prepare_folder
from tierfall.tiers.stored import StoredTier

PROBE_PREFIX = "tierfall-check-"
SIZE_MAX_BYTES = 4 << 30
TRIPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMeasurement:
    """The measurements of one tier; None: not known.

    ``round_trip_s`` is the median of ``TRIPS`` bounded calls of ``stat``. ``fenced``: a newer start stops an older one
    from committing there, at any moment. ``free_bytes`` is by the medium, without what ``keep_free`` keeps,
    ``capacity_bytes`` by the configuration; ``run_bytes`` are those of this run's checkpoints there.
    ``read_only``: it is restored from, and not written to. ``error`` ended the measurement.
    """

    name: str
    kind: TierKind
    place: str
    write_bytes_per_second: float | None = None
    read_bytes_per_second: float | None = None
    round_trip_s: float | None = None
    durable: bool | None = None
    fenced: bool | None = None
    direct_io: bool | None = None
    free_bytes: int | None = None
    read_only: bool = False
    capacity_bytes: int | None = None
    run_bytes: int | None = None
    not_created: bool = False
    error: TierfallError | None = None


def measure(
    config: Config, size_bytes: int, on_tier: Callable[[str], None] = lambda tier: None
) -> tuple[TierMeasurement, ...]:
    """Open every tier and measure it with ``size_bytes`` bytes; before each, ``on_tier`` is called with its name.

    The error of a tier is in its measurement, never raised.
    """
    found = []
    with RunReader(config) as reader:
        listings, missing, new = reader.survey()
    listed = {listing.tier: listing for listing in listings}
    for tier in config.chain:
        on_tier(tier.name)
        if isinstance(tier, HostTierConfig):
            found.append(_measure_host(config, tier))
        else:
            listing = listed.get(tier.name, Listing(tier=tier.name))
            measured = _measure_stored(config, tier, size_bytes, listing, missing.get(tier.name))
            if tier.name in new:
                measured = replace(measured, not_created=True, error=None)
            used = listing.used_bytes if tier.name in listed and listing.error is None else None
            found.append(replace(measured, run_bytes=used))
    return tuple(found)


def _measure_host(config: Config, tier: HostTierConfig) -> TierMeasurement:
    """Return the free bytes of host memory; its rate is not measured."""
    folder = memory_root(config) / config.run
    known = TierMeasurement(
        name=tier.name, kind=tier.kind, place=str(folder), capacity_bytes=tier.capacity_bytes
    )
    try:
        known_slots(prepare_folder(run_folder(config, config.run), create=False))
        # Of the folder, or its nearest parent that this user can see.
        nearest = next(each for each in (folder, *folder.parents) if os.path.isdir(each))
        free = measure_room(nearest).free_bytes
    except TierfallError as error:
        return replace(known, error=error)
    return replace(known, free_bytes=free)


def _measure_stored(
    config: Config,
    section: FileTierConfig | ObjectTierConfig,
    size_bytes: int,
    listing: Listing,
    missing: TierfallError | None,
) -> TierMeasurement:
    """``listing`` is what was read there; ``missing`` the error of a tier that is not mounted: its path is on another
    disk now."""
    known = TierMeasurement(
        name=section.name,
        kind=section.kind,
        place=place_of(section.place) if "://" in section.place else section.place,
        capacity_bytes=section.capacity_bytes,
    )
    if missing is not None:
        return replace(known, read_only=section.read_only, error=missing)
    if section.read_only:
        return replace(known, read_only=True, error=listing.error)
    try:
        with open_writable(config, section.name) as store:
            traits = store.backend.traits
            free = call_tiers(
                [store], lambda each: _room_bytes(section.folder, each), config, BoundedCalls()
            )
            known = replace(
                known,
                place=store.place,
                durable=traits.durable,
                fenced=traits.conditional_create,
                direct_io=traits.direct_io,
                free_bytes=free[store.name].get(),
            )
            limits = lane_limits(store, config)
            _remove_leftovers(store)
            if section.capacity_bytes is not None:
                if listing.error is not None:
                    raise listing.error
                advice = "measure with a smaller --size"
                check_room(config, listing, size_bytes, doing="check of", advice=advice)
            return _measure_bytes(store, known, limits, config.chunk_bytes, size_bytes)
    except AccessDeniedError as error:
        return replace(known, read_only=listing.error is None, error=error)
    except TierfallError as error:
        return replace(known, error=error)


def _room_bytes(folder: Path | None, store: StoredTier) -> int | None:
    """Return what may be written there, as far as the disk decides that."""
    free_bytes = _free_bytes(folder)
    return (
        free_bytes if free_bytes is None else int(min(free_bytes, max(0, store.room_bytes(None))))
    )


def _free_bytes(folder: Path | None) -> int | None:
    return None if folder is None else measure_room(folder).file_system_free_bytes


def _measure_bytes(
    store: StoredTier, known: TierMeasurement, limits: LaneLimits, chunk_bytes: int, size_bytes: int
) -> TierMeasurement:
    if known.free_bytes is not None and 2 * size_bytes > known.free_bytes:
        raise CapacityError(
            f"{store.place}: only {format_size(known.free_bytes)} are free, so {format_size(size_bytes)} were not "
            "written: free some, or measure with a smaller --size"
        )
    range_bytes = max(chunk_bytes, limits.run_bytes_min)
    ranges = [
        (start, min(start + range_bytes, size_bytes)) for start in range(0, size_bytes, range_bytes)
    ]
    data = allocate(min(range_bytes, size_bytes))
    data[:] = os.urandom(len(data))
    digests = {end - start: chunk_digest(data[: end - start]) for start, end in ranges}
    with _probe(store) as key:
        write_s = _timed(lambda: _write(store, key, data, ranges, limits.parallel))
        trips = [_timed(lambda: store.backend.stat(key)) for _ in range(TRIPS)]
        read_s = _read(store, key, ranges, digests)
    return replace(
        known,
        write_bytes_per_second=size_bytes / write_s,
        read_bytes_per_second=size_bytes / read_s,
        round_trip_s=statistics.median(trips),
    )


def _remove_leftovers(store: StoredTier) -> None:
    """Remove what a killed check of this node left; one of another node may be running."""
    prefix = _folder()
    for left in list(store.backend.scan(prefix)):
        _delete(store, left.key)
    store.backend.discard_unfinished(prefix)


def _delete(store: StoredTier, key: str) -> None:
    try:
        store.backend.delete(key)
    except TierfallError as error:
        raise BackendError(f"{key} may be left in {store.place}, remove it: {error}") from error


def _folder() -> str:
    """Return the folder, beside those of runs, in which checks of this node write."""
    return f"{PROBE_PREFIX}{re.sub(r'[^A-Za-z0-9._-]', '-', socket.gethostname())[:64]}/"


@contextmanager
def _probe(store: StoredTier) -> Iterator[str]:
    """Give a key that no run uses, and delete it at the end, unfinished files too."""
    key = f"{_folder()}{secrets.token_hex(8)}/probe"
    try:
        yield key
    except BaseException:
        with suppress(TierfallError):  # else the next check removes it
            store.backend.delete(key)
        raise
    _delete(store, key)


def _timed(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return max(time.perf_counter() - began, 1e-9)


def _write(
    store: StoredTier,
    key: str,
    data: memoryview,
    ranges: list[tuple[int, int]],
    threads: int,
) -> None:
    """Write as a flush does, several ranges at once, until they are durable."""
    with store.backend.create(key, length=ranges[-1][1]) as writer:

        def write(number: int) -> None:
            start, end = ranges[number]
            writer.write(start, data[: end - start])

        run_in_threads(threads, write, range(len(ranges)))
        writer.publish()


def _read(
    store: StoredTier, key: str, ranges: list[tuple[int, int]], digests: dict[int, str]
) -> float:
    """Read as a restore does, and verify; return the seconds."""
    threads = min(READ_THREADS, len(ranges))
    longest = ranges[0][1] - ranges[0][0]
    pool = BufferPool(bytes=longest, count=threads)
    with ExitStack() as lent:
        # page faults of the buffers are not measured: a restore reuses its own
        for _ in range(threads):
            np.frombuffer(lent.enter_context(pool.lend_view(longest)), np.uint8)[::PAGESIZE] = 0
    wrong: list[int] = []

    def read(number: int) -> None:
        start, end = ranges[number]
        with pool.lend_view(end - start) as buffer:
            view = buffer[: end - start]
            store.backend.read_into(key, start, view)
            if chunk_digest(view) != digests[end - start]:
                wrong.append(start)

    seconds = _timed(lambda: run_in_threads(threads, read, range(len(ranges))))
    if wrong:
        raise IntegrityError(
            f"{store.place}: what was read back differs from what was written, at byte {min(wrong)}: do not use this "
            "medium before it is repaired"
        )
    return seconds
