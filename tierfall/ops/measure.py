"""Measuring tiers: is each one there, how fast is it, and what does it promise.

Real bytes go through a tier's backend the way a flush and a restore take them, under a name of their own beside the
runs, and are removed again, after a failure too; what a kill left there the next check from this node removes. They are
random, so that nothing on the way can compress them.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from mmap import PAGESIZE
from pathlib import Path

import numpy as np

from tierfall.backends.open import place_of
from tierfall.config import Config, HostTierConfig, Tier
from tierfall.core.capture.copier import chunk_digest
from tierfall.core.copies.chunk_reader import run_in_threads
from tierfall.core.copies.images import READ_THREADS
from tierfall.core.runtime.buffers import BufferPool, allocate
from tierfall.core.scheduler.flush.lane import LaneLimits
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    CapacityError,
    IntegrityError,
    TierfallError,
)
from tierfall.core.types.units import format_size
from tierfall.core.types.values import TierKind
from tierfall.ops.reader import RunReader
from tierfall.ops.write_copy import writable
from tierfall.setup.tiers import lane_limits, open_stores, run_folder
from tierfall.tiers.arena.folder import room_for_arena
from tierfall.tiers.stored import StoredTier

PROBE_PREFIX = "tierfall-check-"
SIZE_MAX_BYTES = 4 << 30
TRIPS = 5
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMeasurement:
    """What was found of one tier; what is not known is None.

    Rates are in bytes per second, ``round_trip_s`` is the median of a few questions for one object's length.
    ``fenced``: a newer start keeps an older one from committing there, whatever the moment. ``free_bytes`` is what the
    medium has left, ``capacity_bytes`` what the configuration allows. ``read_only``: it is restored from, and not
    written to. ``error`` says why no more is known.
    """

    name: str
    kind: TierKind
    place: str
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    round_trip_s: float | None = None
    durable: bool | None = None
    fenced: bool | None = None
    direct_io: bool | None = None
    free_bytes: int | None = None
    read_only: bool = False
    capacity_bytes: int | None = None
    error: TierfallError | None = None


def measure(
    config: Config, size_bytes: int, say: Say = lambda what: None
) -> tuple[TierMeasurement, ...]:
    """Open every tier and measure it with ``size_bytes`` bytes; ``say`` is told which tier is at its turn.

    What a tier refuses, and that it does not answer, is reported with it, never raised.
    """
    found = []
    with RunReader(config) as reader:
        missing = reader.missing()
    for tier in config.chain:
        say(tier.name)
        if isinstance(tier, HostTierConfig):
            found.append(_measure_host(config, tier))
        else:
            why = missing.get(tier.name)
            found.append(_measure_stored(config, tier, size_bytes, why))
    return tuple(found)


def _measure_host(config: Config, tier: HostTierConfig) -> TierMeasurement:
    """Memory is not measured: an arena is filled while it is captured. Only its room is told."""
    folder = run_folder(config, config.run)
    known = TierMeasurement(
        name=tier.name, kind=tier.kind, place=str(folder), capacity_bytes=tier.capacity_bytes
    )
    try:
        free = room_for_arena(_nearest(folder)).free_bytes
    except TierfallError as error:
        return replace(known, error=error)
    return replace(known, free_bytes=free)


def _nearest(folder: Path) -> Path:
    """Return the folder, or what of its path is there."""
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def _measure_stored(
    config: Config, tier: Tier, size_bytes: int, missing: TierfallError | None
) -> TierMeasurement:
    """``missing`` says why the tier counts as not mounted: what lies at its place now is another disk."""
    section = next(each for each in config.stored if each.name == tier.name)
    known = TierMeasurement(
        name=section.name,
        kind=section.kind,
        place=_shown(section.place),
        capacity_bytes=section.capacity_bytes,
    )
    if missing is not None:
        return replace(known, read_only=section.read_only, error=missing)
    if section.read_only:
        return replace(known, read_only=True, error=_read_error(config, section.name))
    try:
        with writable(config, section.name) as store:
            traits = store.backend.traits
            known = replace(
                known,
                place=store.place,
                durable=traits.durable,
                fenced=traits.conditional_create,
                direct_io=traits.direct_io,
                free_bytes=_free_bytes(section.folder),
            )
            limits = lane_limits(store, config)
            _sweep(store)
            _check_capacity(store, known, size_bytes)
            return _measure_bytes(store, known, limits, config.chunk_bytes, size_bytes)
    except AccessDeniedError as error:
        is_read = _read_error(config, section.name) is None
        return replace(known, read_only=is_read, error=error)
    except TierfallError as error:
        return replace(known, error=error)


def _read_error(config: Config, tier: str) -> TierfallError | None:
    """Return what keeps a tier from being read; None where it can be."""
    only = config.model_copy(update={"tiers": [t for t in config.tiers if t.name == tier]})
    stores, errors = open_stores(only, config.run, read_only=True)
    try:
        return errors[tier] if tier in errors else stores[tier].list().error
    finally:
        for store in stores.values():
            store.close()


def _free_bytes(folder: Path | None) -> int | None:
    if folder is None:
        return None
    return room_for_arena(folder).file_system_free_bytes


def _measure_bytes(
    store: StoredTier, known: TierMeasurement, limits: LaneLimits, chunk_bytes: int, size_bytes: int
) -> TierMeasurement:
    if known.free_bytes is not None and 2 * size_bytes > known.free_bytes:
        raise CapacityError(
            f"{store.place}: {format_size(known.free_bytes)} are free, so {format_size(size_bytes)} were not written: "
            "free some, or measure with a smaller --size"
        )
    piece_bytes = max(chunk_bytes, limits.run_bytes_min)
    ranges = [
        (start, min(start + piece_bytes, size_bytes)) for start in range(0, size_bytes, piece_bytes)
    ]
    data = allocate(min(piece_bytes, size_bytes))
    _fill(data)
    digests = {end - start: chunk_digest(data[: end - start]) for start, end in ranges}
    with _probe(store) as key:
        write_s = _timed(lambda: _write(store, key, data, ranges, limits.parallel))
        trips = [_timed(lambda: store.backend.stat(key)) for _ in range(TRIPS)]
        read_s = _read(store, key, ranges, digests)
    return replace(
        known,
        write_bytes_per_s=size_bytes / write_s,
        read_bytes_per_s=size_bytes / read_s,
        round_trip_s=statistics.median(trips),
    )


def _fill(view: memoryview) -> None:
    step = 1 << 20
    for start in range(0, len(view), step):
        view[start : start + step] = os.urandom(min(step, len(view) - start))


def _sweep(store: StoredTier) -> None:
    """Remove what an earlier check from this node left when it was killed; one from another node may be at work."""
    prefix = _folder()
    for left in list(store.backend.scan(prefix)):
        try:
            store.backend.delete(left.key)
        except TierfallError as error:
            raise BackendError(_log_left(store, left.key, error)) from error
    store.backend.discard_unfinished(prefix)


def _folder() -> str:
    """Name the folder, beside those of runs, in which checks from this node write."""
    return f"{PROBE_PREFIX}{re.sub(r'[^A-Za-z0-9._-]', '-', socket.gethostname())[:64]}/"


def _check_capacity(store: StoredTier, known: TierMeasurement, size_bytes: int) -> None:
    """Raise CapacityError where the tier's capacity, if it has one, does not hold what is to be written."""
    if known.capacity_bytes is None:
        return
    listing = store.list()
    if listing.error is not None:
        raise listing.error
    used = sum(copy.bytes for copy in listing.copies) + sum(listing.unfinished.values())
    room = max(0, known.capacity_bytes - used)
    if size_bytes > room:
        raise CapacityError(
            f"{store.place}: of the capacity of {format_size(known.capacity_bytes)} there is room for "
            f"{format_size(room)}, so {format_size(size_bytes)} were not written: measure with a smaller --size, or "
            "raise the capacity"
        )


@contextmanager
def _probe(store: StoredTier) -> Iterator[str]:
    """Give a key that no run has, and remove what lies there in the end, half-written too."""
    key = f"{_folder()}{secrets.token_hex(8)}/probe"
    try:
        yield key
    except TierfallError as error:
        try:
            store.backend.delete(key)
        except TierfallError as second:
            raise BackendError(f"{error}; {_log_left(store, key, second)}") from error
        raise
    except BaseException:
        store.backend.delete(key)
        raise
    try:
        store.backend.delete(key)
    except TierfallError as error:
        raise BackendError(_log_left(store, key, error)) from error


def _log_left(store: StoredTier, key: str, error: TierfallError) -> str:
    return f"{key} may be left in {store.place}, remove it: {error}"


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
    """Write as a flush does, several pieces at once, up to where they count as durable."""
    with store.backend.create(key, length=ranges[-1][1]) as writer:

        def write(number: int) -> None:
            start, end = ranges[number]
            writer.write(start, data[: end - start])

        run_in_threads(threads, write, range(len(ranges)))
        writer.publish()


def _read(
    store: StoredTier, key: str, ranges: list[tuple[int, int]], digests: dict[int, str]
) -> float:
    """Read as a restore does, and compare; return the seconds."""
    threads = min(READ_THREADS, len(ranges))
    longest = ranges[0][1] - ranges[0][0]
    pool = BufferPool(bytes=longest, count=threads)
    with ExitStack() as lent:  # a restore's buffers are kept: first touches are not to be measured
        for _ in range(threads):
            np.frombuffer(lent.enter_context(pool.take(longest)), np.uint8)[::PAGESIZE] = 0
    wrong: list[int] = []

    def read(number: int) -> None:
        start, end = ranges[number]
        with pool.take(end - start) as buffer:
            view = buffer[: end - start]
            store.backend.read_into(key, start, view)
            if chunk_digest(view) != digests[end - start]:
                wrong.append(start)

    seconds = _timed(lambda: run_in_threads(threads, read, range(len(ranges))))
    if wrong:
        raise IntegrityError(
            f"{store.place}: what was read back differs from what was written, at byte {min(wrong)}: do not trust this "
            "medium before it was repaired"
        )
    return seconds


def _shown(place: str) -> str:
    """An address, as messages may show it."""
    return place_of(place) if "://" in place else place
