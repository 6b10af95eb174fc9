"""The tiers of a run, from its configuration: their rules for the policies, opening and listing them; how much is
written to each at once; and calls to them that end within a bound."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from tierfall.backends.open import is_remote, open_backend
from tierfall.backends.posix.backend import PosixBackend
from tierfall.backends.wrappers import Bounded, Retrying, RetryPolicy
from tierfall.config import Config, FileTierConfig, ObjectTierConfig, PeerTierConfig, Tier
from tierfall.config import StoredTierConfig as StoredSection
from tierfall.core.compression.codec import LEVEL_MIN, frame_bytes_max
from tierfall.core.flush.lane import LaneLimits
from tierfall.core.format.catalog import FoundCopy, Listing
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.restore.inventory import SharedListings, describe
from tierfall.core.runtime.bounded_calls import BoundedCalls, CallResult, NotAskedError
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.runtime.threads import run_in_parallel
from tierfall.core.types import keys
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    ConfigError,
    IntegrityError,
    KeyNotFoundError,
    LostWriteError,
    StorageFullError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId, Codec, LossClass, Shard, TierKind, survives
from tierfall.core.types.view import TierRules
from tierfall.setup.peers import PeerMemory, view_kept
from tierfall.tiers.host import HostTier
from tierfall.tiers.host_folder import measure_room
from tierfall.tiers.image_writer import Packing
from tierfall.tiers.peers import PeerCache
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")
T = TypeVar("T")

SHARD = Shard(0, 1)
SLOT = 0
SYNCS_AT_ONCE = 64
"""Concurrent flushes of a disk's cache: the disk carries them out as one."""
READ_BYTES_PER_S_MIN = 1 << 20
"""A call may take longer, by its bytes divided by this, in seconds: it answers only once it is complete."""
SHARES = 16
"""Calls that share a tier's configured rate at most."""
STORAGE_TRIES = 5
SLOWER = 10
"""Factor of ``max_wait`` for waits on other ranks that move bytes: how long those take depends on the size of the
state."""
ANSWER_S = 5.0
"""Seconds that a tier has to answer at least, also where ``max_wait`` is less."""

BUDGET_BYTES = 64 << 20
WORKERS_MAX = 4


def tier_rules(config: Config, *, read_too: bool = False) -> tuple[TierRules, ...]:
    """Return the rules of each tier that is written to, for the policies; ``read_too``: those of read-only tiers,
    too."""
    rules = []
    for tier in config.chain:
        if isinstance(tier, StoredSection) and tier.read_only and not read_too:
            continue
        stored = tier if isinstance(tier, StoredSection) else None
        rules.append(
            TierRules(
                name=tier.name,
                kind=tier.kind,
                survives=_survives(tier),
                capacity_bytes=tier.capacity_bytes,
                flush_every=stored.flush.every if stored else 1,
                retain=stored.retain.rules() if stored else (),
                evict_high=stored.evict.high if stored else None,
                evict_low=stored.evict.low if stored else None,
                evict=stored.evict.rule() if stored else None,
                within_s=stored.flush.within_s if stored else None,
                flush_order=stored.flush.rule() if stored else None,
                when_full=tier.when_full,
                max_wait_s=stored.max_wait_s if stored else None,
                yields=stored.flush.yields if stored else False,
                bandwidth_share=stored.bandwidth_share if stored else None,
            )
        )
    return tuple(rules)


def _survives(tier: Tier) -> LossClass:
    """Return the largest loss that copies on a tier survive: a URL of a folder counts as a folder, one of memory as
    memory of this process."""
    if not isinstance(tier, StoredSection):
        return survives(tier.kind, shared=False)
    kind = tier.kind
    if isinstance(tier, ObjectTierConfig):
        scheme = tier.url.partition("://")[0]
        if scheme == "memory":
            return LossClass.NONE
        kind = kind if is_remote(tier.url) else TierKind.FILE
    return survives(kind, shared=bool(tier.shared))


def is_shared(tier: StoredSection) -> bool:
    """Return whether all nodes see the same files there."""
    return bool(shared_setting(tier))


def shared_setting(tier: StoredSection) -> bool | None:
    """Return whether all nodes see a tier's files; None where that is neither configured nor probed."""
    return True if isinstance(tier, ObjectTierConfig) else tier.shared


def is_owner(tier: StoredSection, ranks: Ranks) -> bool:
    """Return whether this rank commits, collects and deletes there."""
    return ranks.topology.is_root if is_shared(tier) else ranks.topology.is_leader


def reported_tiers(config: Config, ranks: Ranks) -> tuple[str, ...]:
    """Return the tiers whose listings this rank reports to the others: its memory, and those that it owns."""
    owned = (tier.name for tier in config.stored if is_owner(tier, ranks))
    return (config.host.name, *owned)


def reporters(config: Config, ranks: Ranks) -> dict[str, int]:
    """Return, per stored tier, the rank that reports its listing to this rank."""
    leader = ranks.topology.local_ranks[0]
    return {tier.name: 0 if is_shared(tier) else leader for tier in config.stored}


def open_slot(folder: Path, slot: int, *, name: str, run: str, writable: bool = True) -> HostTier:
    """Open a slot of host memory, to read or adopt images of any rank."""
    return HostTier(name=name, run=run, folder=folder, slot=slot, shard=SHARD, writable=writable)


def patience_s(config: Config) -> float:
    """Return how many seconds one rank waits for another where bytes are moved."""
    return SLOWER * config.max_wait_s


def start_patience_s(config: Config) -> float:
    """Return how many seconds later than the first rank the last may call in ``open``: it may have waited for a silent
    tier, once to open it and once to list it, and have allocated host memory for its image and brought it back from
    peers."""
    slowest_s = max((bounds_s(config)[tier.name] for tier in config.stored), default=0.0)
    recovery_s = 0.0 if config.peers is None else patience_s(config)
    return config.max_wait_s + 2 * slowest_s + recovery_s


def bounds_s(config: Config) -> dict[str, float]:
    """Return how many seconds each stored tier has to answer before it counts as unreachable."""
    return {
        tier.name: max(tier.max_wait_s or config.max_wait_s, ANSWER_S) for tier in config.stored
    }


def bounded(
    backend: Backend, tier: StoredSection, config: Config, last_answer_s: Callable[[], float]
) -> Bounded:
    """Return a tier's backend with a bound for each call. With a configured rate, its bound is longer by the time that
    SHARES calls take at that rate."""
    limits = (tier.bandwidth_bytes_per_s, tier.read_bandwidth)
    slowest = min((READ_BYTES_PER_S_MIN, *(limit / SHARES for limit in limits if limit)))
    return Bounded(
        backend,
        tier=tier.name,
        bound_s=bounds_s(config)[tier.name],
        bytes_per_s_min=slowest,
        last_answer_s=last_answer_s,
    )


def open_stores(
    config: Config,
    *,
    read_only: bool = False,
    find_read_only: bool = False,
    offline: bool = False,
    peers: PeerMemory | None = None,
) -> tuple[dict[str, StoredTier], dict[str, TierfallError]]:
    """Open every stored tier, side by side; return them, and the errors of those that did not answer in time.

    A permanent refusal is raised; with ``read_only`` or ``offline`` it is returned with the other errors. With
    ``find_read_only``, a tier that refuses writes and has files of the run is opened for reading. ``offline``, for a
    command: a tier whose folder is missing is unreachable, and not created. With it, and with ``read_only``, each call
    to a tier ends within its bound; a trainer bounds its waits by itself.
    """
    is_bounded = offline or read_only

    def open_one(tier: FileTierConfig | ObjectTierConfig) -> StoredTier:
        only = "it is only to be read" if read_only or tier.read_only else ""
        _check_mounted(tier, only, creates=not offline)
        try:
            if isinstance(tier, PeerTierConfig):
                if peers is None:
                    return view_kept(tier, config.run)
                return peers.open_tier(RateLimiter(tier.bandwidth_bytes_per_s))
            backend = _open_backend(tier, read_only=bool(only))
        except AccessDeniedError as error:
            found = _open_to_read(tier, config, error) if find_read_only else None
            if found is None:
                raise
            return found
        return _store(tier, backend, config, read_only=only, is_bounded=is_bounded)

    opened = BoundedCalls().call_all(
        {tier.name: partial(open_one, tier) for tier in config.stored},
        bounds_s(config),
        doing="open",
        log_slow=True,
        too_late=lambda store: store.close(),
    )
    stores = {name: x.get() for name, x in opened.items() if x.error is None}
    errors: dict[str, TierfallError] = {}
    try:
        for name, answer in opened.items():
            if answer.error is not None:
                errors[name] = _error_of(name, answer.error, read_only=read_only, offline=offline)
    except BaseException:
        for store in stores.values():
            store.close()
        raise
    return stores, errors


def _error_of(tier: str, error: BaseException, *, read_only: bool, offline: bool) -> TierfallError:
    """Return the error of a tier without which the others are opened; raise it if it ends the opening."""
    match error:
        case BackendError() | ConfigError() if offline:
            return error
        case BackendError() if read_only or isinstance(error, UnreachableError):
            later = "" if read_only else " (open again once it answers)"
            return type(error)(f"{error}{later}")
        case BackendError() | ConfigError():
            raise type(error)(f"open: tier {tier}: {error}") from error
        case _:
            raise error


def _check_mounted(
    tier: FileTierConfig | ObjectTierConfig, read_only: str, *, creates: bool
) -> None:
    """Raise UnreachableError if the folder of a tier that is to be written is missing, and is not to be created; or if
    neither that of a shared tier nor the one above it is there: created on the disk of this machine, it would be shared
    with nobody."""
    if read_only or tier.folder is None or tier.folder.exists():
        return
    if not creates:
        raise UnreachableError(f"{tier.name}: {missing_folders({tier.name: tier.folder})}")
    if may_create(tier):
        return
    raise UnreachableError(
        f"{tier.name} is shared, and {tier.folder.parent} is not there: mount its file system, or create that "
        "folder on it"
    )


def missing_folders(folders: Mapping[str, Path]) -> str:
    """Say which folders of tiers are missing, and what to do."""
    named = ", ".join(f"tier {name}: {folder}" for name, folder in folders.items())
    return (
        f"a folder is missing ({named}): mount or restore it. A new tier's folder is created by the first training, or "
        "by hand"
    )


def may_create(tier: FileTierConfig | ObjectTierConfig) -> bool:
    """Return whether an open for writing creates the folder of a tier, if that is missing."""
    return not tier.shared or tier.folder is None or tier.folder.parent.exists()


def _open_to_read(
    tier: FileTierConfig | ObjectTierConfig, config: Config, refusal: AccessDeniedError
) -> StoredTier | None:
    """Open a tier that refuses writes for reading; None where it cannot be read, or has no file of the run."""
    why = str(refusal)
    try:
        store = _store(tier, _open_backend(tier, read_only=True), config, read_only=why)
    except BackendError as error:
        logger.debug("open: tier %s cannot be read either: %s", tier.name, error)
        return None
    if has_files(store.list()):
        return store
    store.close()
    return None


def has_files(listing: Listing) -> bool:
    """Return whether a listing has anything that a start of the run has written."""
    return bool(listing.copies or listing.unfinished or listing.attempts)


def holds_any(listing: Listing) -> bool:
    """Return whether a listing has any file of the run, damaged ones included."""
    return has_files(listing) or bool(listing.damaged)


def check_written(config: Config, why: str = "", doing: str = "open") -> None:
    """Raise ConfigError where the chain has stored tiers and all of them are read-only; ``why`` is added to it."""
    if config.storage and all(tier.read_only for tier in config.storage):
        only = ", ".join(tier.name for tier in config.storage)
        raise ConfigError(
            f"{doing}: of the tiers below host memory none can be written to ({only}: read-only{why}), so that nothing "
            "would last. Add a tier that can be, name the file of the run that writes there, or, to read a checkpoint, "
            "use tierfall.load"
        )


@contextmanager
def open_store(config: Config, tier: str) -> Iterator[StoredTier]:
    """Open one stored tier for writing, for the length of the block."""
    section = next(section for section in config.stored if section.name == tier)
    backend = _open_backend(section, read_only=False)
    store = _store(section, backend, config, read_only="")
    try:
        yield store
    finally:
        store.close()


def _store(
    tier: FileTierConfig | ObjectTierConfig,
    backend: Backend,
    config: Config,
    *,
    read_only: str,
    is_bounded: bool = False,
) -> StoredTier:
    def room_bytes(id: CheckpointId | None) -> float:
        if not isinstance(tier, FileTierConfig) or tier.keep_free is None:
            return math.inf
        disk = measure_room(tier.folder)
        share = tier.keep_free if isinstance(tier.keep_free, float) else 0
        kept = int(share * disk.file_system_bytes) or tier.keep_free
        there_bytes = 0
        for path in (tier.folder / keys.step_prefix(config.run, id)).glob("*") if id else ():
            with suppress(OSError):  # it was renamed meanwhile, or removed
                there_bytes += path.stat().st_blocks * 512
        return disk.file_system_free_bytes - kept + there_bytes

    limit = tier.bandwidth_bytes_per_s
    pace = RateLimiter(limit) if tier.flush.yields or tier.bandwidth_share or limit else None
    reads = RateLimiter(tier.read_bandwidth) if tier.read_bandwidth else None
    answering = Retrying(backend, RetryPolicy(tries=STORAGE_TRIES), writes=pace, reads=reads)
    wrapped: Backend = answering
    if is_bounded:
        wrapped = bounded(wrapped, tier, config, lambda: answering.last_answer_s)
    return StoredTier(
        name=tier.name,
        run=config.run,
        backend=wrapped,
        packing=_packing(tier, config),
        pace=pace,
        set_identity_check=backend.set_identity_check
        if isinstance(backend, PosixBackend)
        else None,
        names=backend.names if isinstance(backend, PosixBackend) else lambda folder: (),
        read_only=read_only,
        last_answer_s=lambda: answering.last_answer_s,
        room_bytes=room_bytes,
    )


def _open_backend(tier: FileTierConfig | ObjectTierConfig, *, read_only: bool) -> Backend:
    if isinstance(tier, FileTierConfig):
        return PosixBackend(Path(tier.path), read_only=read_only)
    return open_backend(tier.url, options=tier.options, driver=tier.driver, read_only=read_only)


def _packing(tier: FileTierConfig | ObjectTierConfig, config: Config) -> Packing | None:
    if tier.compress.codec is Codec.NONE:
        return None
    return Packing(
        tier.compress.codec,
        level=tier.compress.level or LEVEL_MIN,
        chunk_bytes=config.chunk_bytes,
        parallel=packers(),
    )


def list_all(
    config: Config,
    memory: Listing,
    stores: Mapping[str, StoredTier],
    errors: Mapping[str, TierfallError],
    calls: BoundedCalls,
    *,
    newest: bool = False,
    listed_by_root: Collection[str] = (),
) -> tuple[Listing, ...]:
    """List every stored tier, side by side; return the listings after that of ``memory``, fastest tier first. A tier
    that does not answer in time has that as its error. ``newest`` is as in ``StoredTier.list``. Of tiers
    ``listed_by_root``, which rank 0 lists for this rank, only the record is read, and the listing is empty."""
    opened = [store for name, store in stores.items() if name not in errors]

    def list_one(store: StoredTier) -> Listing:
        if store.name not in listed_by_root:
            return store.list(newest=newest)
        with suppress(IntegrityError):
            store.marker.read()
        return Listing(tier=store.name)

    answers = call_tiers(opened, list_one, config, calls, doing="list", log_slow=True)

    def listing(name: str) -> Listing:
        error = errors[name] if name in errors else answers[name].error
        if isinstance(error, TierfallError):
            return Listing(tier=name, error=error)
        return answers[name].get()

    return (memory, *(listing(tier.name) for tier in config.stored))


def list_together(
    config: Config,
    ranks: Ranks,
    list_here: Callable[..., tuple[Listing, ...]],
    call: str,
    *,
    timeout_s: float | None,
) -> tuple[Listing, ...]:
    """List every tier, on all ranks. Rank 0 lists those that all nodes see, and tells the others, in a ``call`` of all
    ranks; ``list_here`` is ``list_all`` of the tiers of this rank."""
    of_root = listed_by_root(config, ranks)
    found = list_here(listed_by_root=() if ranks.topology.is_root else of_root)
    if not of_root:
        return found
    answer = ranks.agree(
        call,
        None,
        lambda _: SharedListings(tiers=describe(found, mine=of_root)),
        SharedListings,
        timeout_s=timeout_s,
    )
    return tuple(
        answer.tiers[x.tier].listing_of(0, x.tier)
        if x.tier in of_root and not ranks.topology.is_root and x.error is None
        else x
        for x in found
    )


def listed_by_root(config: Config, ranks: Ranks) -> list[str]:
    """Return the stored tiers that rank 0 lists for all ranks; none if there is one rank."""
    return [tier.name for tier in config.storage if is_shared(tier)] if ranks.many else []


def make_durable(store: StoredTier, listing: Listing) -> Listing:
    """Make the copies that a start found on a tier durable: an earlier process may have died before its last fsync.

    A copy that cannot be made durable counts as damaged, or as not read, but can still be restored.
    """
    if not store.backend.traits.needs_sync or not listing.copies:
        return listing
    settled = run_in_parallel(partial(_settle, store), listing.copies, parallel=SYNCS_AT_ONCE)
    return replace(listing, copies=tuple(settled))


def mark_not_durable(tier: str, listing: Listing, error: TierfallError) -> Listing:
    """Return the listing of a tier that has stopped answering, with all copies marked as not read: nothing relies on
    them."""
    logger.warning(
        "open: tier %s: what was found there may not survive a power cut, so nothing relies on it: %s",
        tier, error,
    )  # fmt: skip
    why = UnreachableError(f"{tier}: it may not survive a power cut: {error}")
    copies = (copy if copy.damage else replace(copy, damage=why) for copy in listing.copies)
    return replace(listing, copies=tuple(copies))


def _settle(store: StoredTier, copy: FoundCopy) -> FoundCopy:
    if copy.commit is None or copy.damage is not None:
        return copy
    try:
        store.sync_commit(copy.id)
    except KeyNotFoundError:
        return copy  # deleted meanwhile
    except BackendError as error:
        logger.warning(
            "open: tier %s: %s may not survive a power cut, so nothing relies on it there: %s",
            store.name, copy.id, error,
        )  # fmt: skip
        may_be_lost = error.is_damage or isinstance(error, LostWriteError | StorageFullError)
        kind = IntegrityError if may_be_lost else UnreachableError
        why = f"{store.name}: {copy.id} may not survive a power cut: {error}"
        return replace(copy, damage=kind(why))
    return copy


def _workers() -> int:
    """Return how many threads write chunks to a disk: more would use cores that training needs."""
    return max(1, min(os.cpu_count() or 1, WORKERS_MAX))


def packers() -> int:
    """Return how many threads pack and send: one more than write, so that one packs while the others send."""
    return 1 + _workers()


def lane_limits(store: StoredTier, config: Config) -> LaneLimits:
    """Return how much may be in flight to a tier at once. A remote tier has more threads, since they mostly wait."""
    traits = store.backend.traits
    threads = _workers()
    is_remote = any(tier.name == store.name and tier.folder is None for tier in config.stored)
    if store.is_packed:
        threads = packers()
    elif is_remote:
        threads = max(WORKERS_MAX, BUDGET_BYTES // config.chunk_bytes)
    parallel = 1 if traits.ordered_writes else max(1, min(traits.max_parallel, threads))
    in_order = store.is_packed or traits.ordered_writes
    return LaneLimits(
        parallel=parallel,
        budget_bytes=BUDGET_BYTES,
        window=parallel + store.is_packed if in_order else 0,
        run_bytes_min=0 if store.is_packed else traits.part_bytes_min,
    )


def lane_pools(config: Config, lanes: Mapping[str, LaneLimits]) -> dict[str, BufferPool]:
    """Return the buffers for copies from one stored tier to each other; memory is allocated at first use.

    All have one length, so that tiers that need the same bytes can exchange them.
    """
    longest = max((limits.run_bytes_min for limits in lanes.values()), default=0)
    size_bytes = frame_bytes_max(max(config.chunk_bytes, longest))
    return {
        tier: BufferPool(
            bytes=size_bytes,
            count=max(1, min(limits.parallel, limits.budget_bytes // size_bytes)),
        )
        for tier, limits in lanes.items()
    }


def call_tiers(
    stores: Iterable[StoredTier],
    call: Callable[[StoredTier], T],
    config: Config,
    calls: BoundedCalls,
    *,
    doing: str = "ask",
    timeout_s: float = math.inf,
    log_slow: bool = False,
) -> dict[str, CallResult[T]]:
    """Call tiers, side by side. One that does not answer within its bound, and ``timeout_s`` at most, has an
    UnreachableError."""
    called = {store.name: store for store in stores}
    return calls.call_all(
        {name: partial(call, store) for name, store in called.items()},
        {name: min(bound_s, timeout_s) for name, bound_s in bounds_s(config).items()},
        doing=doing,
        log_slow=log_slow,
        last_answer_s=lambda name: called[name].last_answer_s(),
    )


def bounded_reads(store: StoredTier, config: Config) -> StoredTier:
    """Return a tier of a trainer for reading, each read with a bound."""
    if isinstance(store, PeerCache):  # its requests have one
        return store
    tier = next(tier for tier in config.stored if tier.name == store.name)
    backend = bounded(store.backend, tier, config, store.last_answer_s)
    reading = StoredTier(
        name=store.name,
        run=config.run,
        backend=backend,
        record=store.marker.last,
        read_only="it is only to be read",
    )
    reading.marker.out_of_reach = store.marker.out_of_reach
    return reading


def close_stores(stores: Mapping[str, StoredTier], timeout_s: float) -> None:
    """Close tiers, side by side. What does not end within ``timeout_s`` seconds is logged, and left to its thread."""
    bounds = dict.fromkeys(stores, timeout_s)
    calls = {name: store.close for name, store in stores.items()}
    for name, answer in BoundedCalls().call_all(calls, bounds, doing="close").items():
        match answer.error:
            case NotAskedError() as error:  # the interpreter ends, and closes what is open
                logger.debug("tier %s is not closed: %s", name, error)
            case TierfallError() as error:
                logger.warning("tier %s was not closed: %s", name, error)
            case _:
                answer.get()
