"""``tierfall drain``: flush what a dead trainer left in host memory, and free the memory.

It writes on behalf of the attempt that left the images: where a newer attempt exists, the fence stops it. Each tier
receives one copy after the other, on a thread of its own; with a deadline, what can still arrive comes first. No rule
deletes anything, except that a copy which needs room may replace older ones that a newer one of this drain outlives.

The machines of a job that died exchange no messages: each sends its own images, and reads on a shared tier which ones
the others have sent. The last one commits. A node's own disk gets its images with a record of these alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

from tierfall.config import Config, StoredTierConfig
from tierfall.config.model import OnClose
from tierfall.core.copies.verify import CopyVerifier
from tierfall.core.flush.flusher import OLDER_OWED_MAX
from tierfall.core.format.catalog import FoundCopy, KnownCheckpoint, Listing, decided_in, merge
from tierfall.core.format.commit_files import shards_of
from tierfall.core.format.records import Attempt, NamedFile
from tierfall.core.restore.agreement import is_whole
from tierfall.core.runtime import retries
from tierfall.core.types.errors import (
    BackendError,
    FencedError,
    IntegrityError,
    StorageFullError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.lineage import newest_and_first_good
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, CopyState, Shard
from tierfall.core.types.view import ArrivalOutlook, DrainDecision, View
from tierfall.ops.commands import (
    check_room,
    good_on,
    unread,
    view_of,
    without_copy,
)
from tierfall.ops.sync import (
    Source,
    add_decided,
    commit_copy,
    held_files,
    name_latest,
    open_source,
    send,
    sizes_on,
)
from tierfall.policies.drain import describe_drain, plan_drain
from tierfall.policies.eviction import plan_eviction
from tierfall.policies.flush import plan_flush
from tierfall.setup.host_memory import ids_by_commits
from tierfall.setup.opened_tiers import OpenedTiers
from tierfall.setup.places import seen_by_one
from tierfall.setup.start import attempt_of, newest_attempt
from tierfall.setup.tiers import (
    ANSWER_S,
    close_stores,
    lane_limits,
    open_stores,
    shared_setting,
)
from tierfall.telemetry.progress import Progress, Watch
from tierfall.tiers.host import SealedImage, image_files
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")
RETRY_S = 2.0
"""Seconds between tries to open a tier that does not answer."""
LAST_S = 1.0
"""Seconds that a tier has after the deadline to end the request that is under way."""
LOOK_S = 0.2
"""Seconds between looks at what other machines have sent, and at the progress of the tiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwedCopy:
    """A copy that a tier is owed; ``bytes`` is its raw size."""

    checkpoint: CheckpointId
    tier: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.checkpoint} to {self.tier} ({format_size(self.bytes)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainResult:
    """``done`` are the copies that became durable, ``left`` those that are still owed; ``memory_kept``: host memory was
    not freed."""

    done: tuple[OwedCopy, ...] = ()
    left: tuple[OwedCopy, ...] = ()
    problems: tuple[str, ...] = ()
    memory_kept: bool = False
    seconds: float = 0.0


def drain(
    config: Config,
    deadline_s: float | None,
    watch: Watch = lambda done, total: None,
    on_forecast: Callable[[str], None] = lambda line: None,
) -> DrainResult:
    """Flush what host memory holds, for ``deadline_s`` seconds at most (None: until done).

    With a deadline, the most valuable copies come first, a copy that cannot arrive in time is not begun, and a tier
    that cannot be opened is tried again until then. Without one, a tier that refuses copies is tried for ``max_wait``.
    ``on_forecast`` is called with a sentence per forecast: at the start, and again once the rates of tiers are known.
    ``watch`` is called with bytes copied and bytes in total.

    Raises FencedError, and writes nothing, where a newer attempt of the run exists; LockError where a trainer is alive.
    """
    began = time.monotonic()
    until_s = None if deadline_s is None else began + deadline_s
    drained, silent = _drain_once(config, until_s, watch, on_forecast)
    done = drained.done
    while until_s and drained.memory_kept and silent & {owed.tier for owed in drained.left}:
        try:
            if not _wait_for_any(config, silent, until_s):
                break
            drained, silent = _drain_once(config, until_s, watch, on_forecast)
        except TierfallError as error:  # a trainer has begun, say
            drained = replace(drained, problems=(*drained.problems, str(error)))
            break
        done += drained.done
    return replace(drained, done=done, seconds=time.monotonic() - began)


def _wait_for_any(config: Config, silent: Set[str], until_s: float) -> bool:
    """Wait until one of the tiers ``silent`` can be opened; False once the monotonic clock reaches ``until_s``."""
    logger.warning("drain: tried again until the deadline: %s", ", ".join(sorted(silent)))
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(RETRY_S, left_s))
        stores, errors = open_stores(seen_by_one(config), find_read_only=True, offline=True)
        close_stores(stores, ANSWER_S)
        if not silent <= errors.keys():
            return True
    return False


def _drain_once(
    config: Config,
    until_s: float | None,
    watch: Watch,
    on_forecast: Callable[[str], None],
) -> tuple[DrainResult, Set[str]]:
    """Drain to the tiers that can be opened now. Return the result, without its seconds, and the other tiers."""
    tiers = OpenedTiers(config, offline=True, command="tierfall drain")
    kept = True
    try:
        for problem in tiers.memory.problems:  # it would be freed with the rest
            raise problem
        if not tiers.memory.images():  # the owner of a moment ago has flushed them
            result = DrainResult()
        else:
            result = _Drain(tiers, until_s, watch).run(on_forecast)
            kept = result.memory_kept
    finally:
        tiers.close(keep=kept)
    return result, set(tiers.errors)


class _StoppedError(TierfallError):
    """A copy is not finished: the deadline is over, or another tier was fenced."""


@dataclass(slots=True)
class _Waiting:
    """A copy that waits for its next try, not before a time of the monotonic clock; it failed first at ``since_s``."""

    not_before_s: float = 0.0
    since_s: float = 0.0
    failures: int = 0


@dataclass(slots=True)
class _TierPart:
    """One tier's part of a drain: the copies that wait, and why others ``failed``. ``sends_all``: this machine commits
    the images of all ranks there, else those of its own memory. ``sent`` are the files of images that wait for those of
    other machines. ``bytes`` have arrived in ``seconds``."""

    store: StoredTier
    sends_all: bool
    patience_s: float
    waiting: dict[CheckpointId, _Waiting]
    failed: dict[CheckpointId, TierfallError] = field(default_factory=dict)
    sent: dict[CheckpointId, tuple[NamedFile, ...]] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        return self.bytes / self.seconds if self.bytes and self.seconds else None


class _Drain:
    """One try to bring what is in memory to the tiers that can be opened. ``until_s`` is the deadline on the monotonic
    clock; None: there is none."""

    def __init__(self, tiers: OpenedTiers, until_s: float | None, watch: Watch) -> None:
        self._tiers = tiers
        self._config = tiers.config
        self._until_s = until_s
        self._images = tiers.memory.images()
        self._slots = len(image_files(tiers.memory.folder))
        """How many ranks have left memory on this machine."""
        _, newest = max(self._images, key=lambda held: (held[0].attempt, held[0].step))
        self._attempt = writer_of(newest, tiers)
        self._decided = decided_in(tiers.listings)
        self._known = {known.id: known for known in merge(tiers.listings)}
        self._problems: list[str] = []
        self._lacking = self._find_lacking()
        self._planned = tuple(
            owed
            for owed in find_owed(self._config, tiers.listings)
            if owed.checkpoint not in self._lacking
        )
        self._progress = Progress(watch, sum(owed.bytes for owed in self._planned))
        self._guard = threading.Lock()
        self._done: set[tuple[CheckpointId, str]] = set()
        self._good: set[tuple[CheckpointId, str]] = set()
        """Copies that this drain has written, or read whole: a rule may rely on them."""
        self._stop = threading.Event()
        self._error: BaseException | None = None

    def run(self, on_forecast: Callable[[str], None]) -> DrainResult:
        """Send and commit what is owed, until the deadline; return the result without its seconds."""
        parts = [*self._parts()]
        threads = [
            threading.Thread(target=self._bring_all, args=[part], daemon=True) for part in parts
        ]
        for thread in threads:
            thread.start()
        self._wait(threads, parts, on_forecast)
        if self._error is not None:
            raise self._error
        done = tuple(owed for owed in self._planned if (owed.checkpoint, owed.tier) in self._done)
        left = tuple(owed for owed in self._planned if owed not in done)
        silent = unread(self._tiers.listings)
        problems = [
            *self._problems,
            *(str(error) for part in parts for error in part.failed.values()),
            *self._damaged_beside_memory(),
            *(f"tier {name} could not be read: {error}" for name, error in silent.items()),
        ]
        kept = bool(left) or self._must_keep_memory()
        return DrainResult(done=done, left=left, problems=tuple(problems), memory_kept=kept)

    # Which copies ------------------------------------------------------------------------------------

    @property
    def _are_all_here(self) -> bool:
        """Whether every rank of the job has left memory on this machine."""
        world_size = max(image.commit.world_size for _, image in self._images)
        return self._slots >= world_size

    def _find_lacking(self) -> set[CheckpointId]:
        """Return what is in memory and no checkpoint: the image of some rank is nowhere. Of several machines another
        one may have it."""
        lacking = set()
        for id in {id for id, _ in self._images}:
            known = self._known[id]
            records = [copy.commit for copy in known.copies.values() if copy.commit is not None]
            at_hand = {shard for record in records for shard in shards_of(record)}
            if known.commit is None or (
                len(at_hand) < known.commit.world_size and self._are_all_here
            ):
                lacking.add(id)
                if self._has_unread:
                    self._problems.append(
                        f"{id}: some of its images are not in memory; what could not be read may have them"
                    )
        return lacking

    @property
    def _has_unread(self) -> bool:
        return any(listing.unread is not None for listing in self._tiers.listings)

    def _parts(self) -> Iterator[_TierPart]:
        """Yield the parts of the tiers that can be written to. One that may or may not be shared is a problem."""
        for tier in self._config.written:
            waiting = {o.checkpoint: _Waiting() for o in self._planned if o.tier == tier.name}
            store = self._tiers.stores.get(tier.name)
            if not waiting or store is None:
                continue
            try:
                sends_all = self._are_all_here or self._is_shared(tier)
            except IntegrityError as error:
                self._problems.append(str(error))
            else:
                patience_s = tier.max_wait_s or self._config.max_wait_s
                yield _TierPart(store, sends_all, patience_s, waiting)

    def _is_shared(self, tier: StoredTierConfig) -> bool:
        """Whether all machines see a tier: by the configuration, or by the records there.

        Raises IntegrityError, which names the key to set, where neither decides it.
        """
        if (setting := shared_setting(tier)) is not None:
            return setting
        listing = next(x for x in self._tiers.listings if x.tier == tier.name)
        for copy in listing.copies:
            if copy.commit is not None and copy.commit.world_size > self._slots:
                return len(shards_of(copy.commit)) == copy.commit.world_size
        raise IntegrityError(
            f"whether all nodes see {tier.name} is not known here: set it in the configuration (shared: true, or false)"
        )

    # On the thread of a tier -------------------------------------------------------------------------

    def _bring_all(self, part: _TierPart) -> None:
        """Bring the copies of one tier, one after the other. An error that ends the drain is left to the caller."""
        try:
            self._add_decided(part.store)
            while order := self._order(part):
                now_s = time.monotonic()
                due = [id for id in order if part.waiting[id].not_before_s <= now_s]
                if not due:
                    soonest_s = min(part.waiting[id].not_before_s for id in order)
                    self._stop.wait(soonest_s - now_s)
                    continue
                try:
                    self._bring(part, due[0])
                except (FencedError, _StoppedError):
                    raise
                except TierfallError as error:
                    self._put_off(part, due[0], error)
                else:
                    del part.waiting[due[0]]
        except _StoppedError as stopped:
            logger.debug("drain: %s: %s", part.store.name, stopped)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for this one
            self._error = error
            self._stop.set()

    def _put_off(self, part: _TierPart, id: CheckpointId, error: TierfallError) -> None:
        """Have a copy wait for its next try, while others are brought: after an error that is retryable, and with a
        deadline after any refusal, until then; without one, for ``max_wait``. Else it has failed."""
        waiting, now_s = part.waiting[id], time.monotonic()
        waiting.since_s = waiting.since_s or now_s
        waiting.failures += 1
        until_s = self._until_s or waiting.since_s + part.patience_s
        refused = self._until_s is not None and isinstance(error, BackendError)
        if now_s >= until_s or not (error.retryable or refused):
            part.failed[id] = error
            del part.waiting[id]
            return
        wait_s = retries.wait_s(waiting.failures, has_deadline=True)
        waiting.not_before_s = min(now_s + wait_s, until_s)
        logger.info("drain: %s to %s, again in %.1f s: %s", id, part.store.name, wait_s, error)

    def _add_decided(self, store: StoredTier) -> None:
        """Add to the list of a tier what the lists of the other tiers have, and it has not."""
        try:
            add_decided(store, self._decided)
        except TierfallError as error:
            self._problems.append(f"{store.name}: what is decided is not noted there: {error}")

    def _order(self, part: _TierPart) -> list[CheckpointId]:
        """Return the copies of a tier that may still arrive, in the order of their tries."""
        if self._stop.is_set():
            return []
        if self._until_s is None:
            order = [d.checkpoint for d in plan_flush(self._view(), part.store.name)]
        else:
            order = [d.checkpoint for d in self._plan([part]) if d.proceeds]
        return [id for id in order if id in part.waiting]

    def _plan(self, parts: Iterable[_TierPart]) -> tuple[DrainDecision, ...]:
        assert self._until_s is not None
        rates = {part.store.name: part.bytes_per_s for part in parts}
        left_s = self._until_s - time.monotonic()
        plan = plan_drain(self._view(), bytes_per_s=rates, left_s=left_s)
        return tuple(decision for decision in plan if decision.tier in rates)

    def _view(self) -> View:
        """Return what the policies decide on."""
        with self._guard:
            known, good = [*self._known.values()], set(self._good)
        view = view_of(self._config, known)
        checkpoints = []
        for checkpoint in view.checkpoints:
            id, copies = checkpoint.id, checkpoint.copies.items()
            owed = (o.tier for o in self._planned if o.checkpoint == id)
            checkpoints.append(
                replace(
                    checkpoint,
                    owed=frozenset(tier for tier in owed if (id, tier) not in self._done),
                    copies={t: replace(c, verified=(id, t) in good) for t, c in copies},
                )
            )
        return replace(view, checkpoints=tuple(checkpoints))

    def _bring(self, part: _TierPart, id: CheckpointId) -> None:
        """Send the images that this machine has of a checkpoint, and commit it: one try."""
        store, known, began_s = part.store, self._known[id], time.monotonic()
        store.check_begin(self._attempt)
        held = [x.tier for x in self._tiers.listings if x.tier in known.copies]
        source = open_source(known, held, self._tiers.opener())
        here = {image.region.shard for of, image in self._images if of == id}
        mine = [shard for shard in shards_of(source.commit) if part.sends_all or shard in here]
        if id not in part.sent:
            part.sent[id] = self._send(part, source, mine)
        files = (*part.sent[id], *(self._of_others(part, source, mine) if part.sends_all else ()))
        older = {*part.failed, *part.waiting}
        owed = tuple(sorted(other for other in older if other < id)[-OLDER_OWED_MAX:])
        commit = commit_copy(source.commit, store, files, attempt=self._attempt, owed=owed)
        part.bytes += commit.image_bytes
        part.seconds += time.monotonic() - began_s
        copy = FoundCopy(id=id, state=CopyState.COMMITTED, bytes=commit.stored_bytes, commit=commit)
        with self._guard:
            all_known, known = tuple(self._known.values()), self._known[id]
            self._known[id] = replace(known, copies={**known.copies, store.name: copy})
            self._done.add((id, store.name))
            self._good.add((id, store.name))
        self._problems += name_latest(store, known, all_known)

    def _send(
        self, part: _TierPart, source: Source, shards: Sequence[Shard]
    ) -> tuple[NamedFile, ...]:
        """Send images to a tier, for which older copies make room if need be. Raises CapacityError."""
        store, limits = part.store, lane_limits(part.store, self._config)
        sizes = sizes_on(store, source.commit.lineage.checkpoint)
        manifests = {shard: source.images.find(shard.rank)[1] for shard in shards}
        need = sum(
            manifest.image_bytes
            for shard, manifest in manifests.items()
            if not held_files(store, source.commit, shard, sizes, manifest)
        )
        self._make_room(part, need)
        send_them = partial(
            send, source, store, limits, shards, attempt=self._attempt, on_bytes=self._on_bytes
        )
        while True:
            try:
                if need:
                    store.check_room(need)
                return send_them()
            except StorageFullError:
                if not self._evict(part, need, free=0):
                    raise

    def _of_others(
        self, part: _TierPart, source: Source, mine: Sequence[Shard]
    ) -> tuple[NamedFile, ...]:
        """Return the files of the images that other machines have sent; UnreachableError while one is missing."""
        commit, store = source.commit, part.store
        sizes = sizes_on(store, commit.lineage.checkpoint)
        files: list[NamedFile] = []
        for shard in [Shard(rank, commit.world_size) for rank in range(commit.world_size)]:
            if shard not in mine:
                found = held_files(store, commit, shard, sizes)
                if found is None:
                    raise UnreachableError(
                        f"{commit.lineage.checkpoint} on {store.name}: this machine's images are there, other ranks' "
                        "are not yet: drain the other machines, the last one commits it"
                    )
                files += found
        return tuple(files)

    def _on_bytes(self, count: int) -> None:
        if self._stop.is_set():
            raise _StoppedError("the deadline is over")
        self._progress.add(count)

    # Room --------------------------------------------------------------------------------------------

    def _make_room(self, part: _TierPart, need_bytes: int) -> None:
        """Delete what was left unfinished, and evict older copies, if the capacity of a tier has no room for another.
        Raises CapacityError."""
        name = part.store.name
        capacity = next(t.capacity_bytes for t in self._config.stored if t.name == name)
        if capacity is not None and need_bytes:
            listing = part.store.list()
            if listing.error is not None:
                raise listing.error
            free = capacity - listing.used_bytes
            is_sure = (
                listing.unread is None and not listing.lags
            )  # else a commit record may be there
            # other machines may be sending them, if not all ranks left memory here
            if free < need_bytes and is_sure and self._are_all_here:
                for id in listing.unfinished.keys() - part.waiting.keys():
                    part.store.discard(id, attempt=self._attempt)
                    free += listing.unfinished[id]
            if free < need_bytes:
                self._evict(part, need_bytes, free=free)
            check_room(self._config, part.store.list(), need_bytes, doing="drain to")

    def _evict(self, part: _TierPart, need_bytes: int, *, free: int) -> bool:
        """Delete copies that newer good ones outlive; return whether any was deleted. If none may go, the newest copy
        on the tier is read whole first: then it counts as good."""
        name, deleted = part.store.name, False
        plan = plan_eviction(self._view(), name, need_bytes=need_bytes, free_bytes=free)
        if not plan.deletions and self._newest_is_good(part.store):
            plan = plan_eviction(self._view(), name, need_bytes=need_bytes, free_bytes=free)
        for decision in plan.deletions:
            id = decision.checkpoint
            logger.info("%s: %s is deleted: %s", name, id, decision.reason)
            if part.store.delete(id, attempt=self._attempt, known=self._decided) is None:
                deleted = True
                with self._guard:
                    self._known[id] = without_copy(self._known[id], name)
        return deleted

    def _newest_is_good(self, store: StoredTier) -> bool:
        """Read the newest copy of the live lineage on a tier; return whether it is good, and was not known to be."""
        with self._guard:
            there = good_on(store.name, self._known.values())
        if not there or (there[-1].id, store.name) in self._good:
            return False
        with CopyVerifier() as verifier:
            good = verifier.check_stored(store, there[-1].id).good
        if good:
            with self._guard:
                self._good.add((there[-1].id, store.name))
        return good

    # The end -----------------------------------------------------------------------------------------

    def _wait(
        self,
        threads: Sequence[threading.Thread],
        parts: Sequence[_TierPart],
        on_forecast: Callable[[str], None],
    ) -> None:
        """Wait until all tiers have what they can get, or for the deadline. The forecast is reported at first, and once
        every arrival in it is known."""
        is_known, is_first = self._until_s is None, True
        try:
            while any(thread.is_alive() for thread in threads):
                if not is_known:
                    plan = self._plan(parts)
                    is_known = all(each.outlook is not ArrivalOutlook.UNKNOWN for each in plan)
                    for line in describe_drain(plan) if is_first or is_known else ():
                        on_forecast(line)
                    is_first = False
                if self._until_s is not None and time.monotonic() >= self._until_s:
                    break
                for thread in threads:
                    thread.join(LOOK_S / len(threads))
        finally:  # after Ctrl-C, too: they read memory that is closed after this
            self._stop.set()
            ends_s = time.monotonic() + LAST_S
            for thread in threads:
                thread.join(max(0.0, ends_s - time.monotonic()))

    def _damaged_beside_memory(self) -> Iterator[str]:
        """Yield a problem for each damaged copy of an image in memory: no flush rewrites it, ``verify --repair``
        does."""
        for known in self._in_memory():
            for tier, copy in known.copies.items():
                if copy.repairable:
                    yield (
                        f"{known.id} is in host memory, and damaged on {tier}: {copy.damage}: to rewrite it: tierfall "
                        f"verify {known.id} --tier {tier} --repair"
                    )

    def _in_memory(self) -> list[KnownCheckpoint]:
        host = self._tiers.memory.name
        return [c for c in self._known.values() if host in c.copies and not c.deleted]

    def _must_keep_memory(self) -> bool:
        """Return whether memory has an image that must not be lost with it, and no stored tier has; or a part of a
        checkpoint whose other parts may be on a tier that could not be read."""
        if self._config.host.on_close is OnClose.KEEP or (self._lacking and self._has_unread):
            return True
        stored = {tier.name for tier in self._config.storage}
        return not all(
            any(tier in stored and copy.damage is None for tier, copy in known.copies.items())
            for known in self._needed()
        )

    def _needed(self) -> Iterator[KnownCheckpoint]:
        """Yield the newest that can be restored, the one that a restart takes because of NaN or Inf in newer ones, and
        what in memory is pinned, or has a damaged copy. What is only in part here, and not in memory, may be damaged on
        another machine: it does not count."""
        host = self._tiers.memory.name
        restorable = [
            c
            for c in reversed(self._known.values())
            if c.live and c.id not in self._lacking
            if any(
                is_whole(copy) or (tier == host and copy.damage is None)
                for tier, copy in c.copies.items()
            )
        ]
        yield from newest_and_first_good(restorable)
        for known in self._in_memory():
            damaged = any(copy.repairable for copy in known.copies.values())
            if known.id not in self._lacking and (known.pinned or (known.live and damaged)):
                yield known


def writer_of(newest: SealedImage, tiers: OpenedTiers) -> Attempt:
    """Return the attempt that left the newest image, or a later one that owned this memory after it: it saved nothing
    that memory does not hold, and it is dead, as this process has the locks of this memory.

    Raises FencedError where another later attempt exists, IntegrityError where the record of one is damaged.
    """
    listings, stores = tiers.listings, tiers.stores
    line = newest.commit.lineage
    number = line.checkpoint.attempt
    start = (
        "start the training here: its start looks at all tiers and at this memory, goes on from the newest checkpoint, "
        "and flushes what is still owed. To free this memory: 'tierfall drain --discard'"
    )
    try:
        later = newest_attempt(listings, stores, above=number)
    except IntegrityError as error:
        raise IntegrityError(
            f"drain: {error}: it may be of a newer start than the one that left {tiers.memory.host.place}, and nothing "
            f"is written beside a newer start. If no newer start of run {line.run!r} is alive, {start}"
        ) from error
    if later is None:
        attempt = attempt_of(line)
        # A person has asked for these images to be flushed: a damaged record counts as theirs, unless commit records
        # show that the number is another attempt's.
        for listing in listings:
            if listing.tier in stores and ids_by_commits(listing, number) <= {attempt.id}:
                stores[listing.tier].fence.trust(attempt)
        return attempt
    attempt, tier = later
    remembered = tiers.identities.remembered
    if remembered is None or remembered.attempt_id != attempt.id:
        raise FencedError(
            f"drain: attempt {number} of run {line.run!r} was followed by attempt {attempt.number} (process "
            f"{attempt.pid} on {attempt.node}) by tier {tier}, which did not begin with this memory: nothing of the "
            f"older one is written any more. Once that start has ended, {start}"
        )
    return attempt


def find_owed(config: Config, listings: Sequence[Listing]) -> tuple[OwedCopy, ...]:
    """Return every copy that is owed, oldest first; a tier that could not be read may have its own."""
    view = view_of(config, merge(listings))
    return tuple(
        OwedCopy(checkpoint=c.id, tier=tier, bytes=max(copy.bytes for copy in c.copies.values()))
        for c in view.checkpoints
        for tier in (t.name for t in config.stored if t.name in c.owed)
    )
