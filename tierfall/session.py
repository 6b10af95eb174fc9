"""A session: one run's tiers, opened for writing by one process, with everything that moves copies between them.

It owns the order of opening (lock, arena, backends, listings, attempt, ledger, threads) and of closing. Checkpointer
and the writing commands are built on it; nothing here knows a model or a state.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from tierfall.config import Config
from tierfall.core.bell import Bell
from tierfall.core.catalog import KnownCheckpoint, Listing, merge
from tierfall.core.errors import (
    BackendError,
    ConfigError,
    FlushError,
    IntegrityError,
    KeyExistsError,
    StorageFullError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.lock import RunLock
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.records import Attempt, read_manifest
from tierfall.core.restore.images import Image, RegionImage, StoredImage
from tierfall.core.restore.ring import Ring
from tierfall.core.scheduler.coordinator import Coordinator
from tierfall.core.scheduler.ledger import Ledger
from tierfall.core.scheduler.runner import TaskRunner
from tierfall.core.scheduler.tasks import Ask
from tierfall.core.scheduler.workers import Workers
from tierfall.core.snapshot import HostRegion, geometry
from tierfall.core.values import CheckpointId, Shard
from tierfall.policies import bundle
from tierfall.starting import held_by_all, is_owner, is_shared, start_together
from tierfall.stores import (
    lane_limits,
    lane_pools,
    list_all,
    open_stores,
    run_folder,
    tier_rules,
)
from tierfall.tiers.arena import lock_name
from tierfall.tiers.arena_folder import prepare_folder
from tierfall.tiers.host import HeldImage, HostTier, damaged
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")
T = TypeVar("T")


class Session:
    """See the module. ``attempt`` is this process's line of saving."""

    def __init__(
        self,
        config: Config,
        *,
        run: str,
        ranks: Ranks | None = None,
        accept_arena: bool = False,
    ) -> None:
        """Open everything but the attempt; ``start`` follows. Whatever fails leaves nothing open."""
        self.config = config
        self.run = run
        self.ranks = ranks or Ranks.alone()
        self.node = socket.gethostname()
        self.attempt: Attempt | None = None
        self._closed = False
        folder = prepare_folder(run_folder(config, run))
        self.ring = Ring(config.chunk_bytes)  # restores do not wait for flushes
        self._lock = RunLock.take(folder / lock_name(self.ranks.slot), run=run)
        self.stores: dict[str, StoredTier] = {}
        try:
            self.host = HostTier(
                name=config.host.name,
                run=run,
                folder=folder,
                slot=self.ranks.slot,
                shard=self.ranks.shard,
                capacity_bytes=config.host.capacity_bytes,
                progress=_say_progress(config.host.name),
            )
            try:
                self.host.attach()
            except IntegrityError as error:
                raise damaged(error, self.host.path) from error
            self.stores, self.errors = open_stores(config, run)
            for name, problem in self.errors.items():
                logger.warning(
                    "open: goes on without tier %s, for as long as this process runs: %s",
                    name,
                    problem,
                )
            self.listings = list_all(config, self.host, self.stores, self.errors)
            self._held = self.listings
            self._seen: frozenset[str] = frozenset()
            self._scattered: frozenset[CheckpointId] = frozenset()
            self._check_adoption(accept_arena)
        except BaseException:
            self._let_go(keep=True)
            raise
        self._say_unreadable()

    def _say_unreadable(self) -> None:
        for listing in self.listings:
            if listing.error is not None and listing.tier not in self.errors:
                logger.warning("open: tier %s could not be read: %s", listing.tier, listing.error)
            for damage in listing.damaged:
                logger.warning("open: tier %s holds something damaged: %s", listing.tier, damage)

    # Adoption ----------------------------------------------------------------------------------------

    def _check_adoption(self, accept: bool) -> None:
        """Refuse host memory that belongs to another life of this run's name."""
        held = self.host.images()
        answered = [x for x in self.listings if x.tier in self.stores and x.error is None]
        for image in held.values():
            line = image.commit.line
            known = [x.tier for x in answered if line.checkpoint.attempt in x.attempts]
            for tier in known:
                if self.stores[tier].read_attempt(line.checkpoint.attempt).id != line.attempt_id:
                    raise self._foreign(image, f"tier {tier} knows that attempt by another id")
            if (
                len(answered) == len(self.stores) > 0
                and not known
                and not accept
                and not self.errors
            ):
                raise self._foreign(
                    image, "no tier knows that attempt: they were emptied, or added"
                )

    def _foreign(self, image: HeldImage, why: str) -> ConfigError:
        return ConfigError(
            f"open: {self.host.path} holds step {image.commit.line.checkpoint} of another life of run "
            f"{self.run!r}: {why}. If it is not needed, remove that file; if it is, bring it to the tiers by "
            "'tierfall drain'; or choose another run name"
        )

    # Attempts ----------------------------------------------------------------------------------------

    def begin_line(self) -> bool:
        """Take an attempt, together with the other ranks; say whether nothing is known of any checkpoint."""
        if not self.ranks.many:
            self.take_number(self.next_number())
            return self.knows_of_nothing()
        start = start_together(self)
        self._held = held_by_all(self, start)
        self._seen = start.seen
        self._scattered = start.scattered
        return start.first

    def take_attempt(self) -> Attempt:
        """Take another attempt, as ``begin_line`` does, and return it."""
        self.begin_line()
        return self._writer()

    def knows_of_nothing(self) -> bool:
        """Say whether every tier answered and none holds a checkpoint of this run."""
        if any(listing.error is not None for listing in self.listings):
            return False
        return all(checkpoint.tombstoned for checkpoint in self.known())

    def next_number(self) -> int:
        """Say which attempt's number would be above any that is seen here."""
        return 1 + max(
            (
                *(n for listing in self.listings for n in listing.attempts),
                *(c.id.attempt for listing in self.listings for c in listing.copies),
                *(id.attempt for listing in self.listings for id in listing.unfinished),
                self.attempt.number if self.attempt else 0,
                0,
            )
        )

    def take_number(self, number: int) -> Attempt:
        """Take that attempt, or one above it, on the most shared tier first; two starts never get the same."""
        identity = secrets.token_hex(16)
        while True:
            attempt = Attempt(
                run=self.run,
                number=number,
                id=identity,
                node=self.node,
                pid=os.getpid(),
                wall_time_s=time.time(),
            )
            if self.adopt_attempt(attempt):
                return attempt
            number += 1

    def adopt_attempt(self, attempt: Attempt) -> bool:
        """Write as ``attempt`` from now on; False where a tier knows another one by its number."""
        answered = {x.tier for x in self.listings if x.error is None}
        reachable = [s for s in reversed(self.stores.values()) if s.name in answered]
        if not self._take(attempt, reachable):
            return False
        self.attempt = attempt
        return True

    def check_newest(self) -> None:
        """Raise FencedError where a tier knows a newer attempt than this process's: it must not come back above it."""
        assert self.attempt is not None
        for store in self.stores.values():
            try:
                store.check_fence(self.attempt)
            except (StorageFullError, UnreachableError) as error:
                logger.warning("tier %s was not asked for newer attempts: %s", store.name, error)

    def _take(self, attempt: Attempt, stores: Iterable[StoredTier]) -> bool:
        """Leave the attempt's record on each tier; False where another process has its number.

        A tier that is full or does not answer at present gets the record before its first commit.
        """
        for store in stores:
            try:
                store.take_attempt(attempt)
            except KeyExistsError:
                return False
            except (StorageFullError, UnreachableError) as error:
                logger.warning(
                    "open: tier %s did not take the attempt's record: %s", store.name, error
                )
        return True

    def continue_attempt(self, image: HeldImage) -> None:
        """Write on behalf of the attempt that left an image in memory, as ``tierfall drain`` does."""
        line = image.commit.line
        self.attempt = Attempt(
            run=self.run,
            number=line.checkpoint.attempt,
            id=line.attempt_id,
            node=self.node,
            pid=os.getpid(),
            wall_time_s=time.time(),
        )

    def _writer(self) -> Attempt:
        if self.attempt is None:
            raise ConfigError(f"run {self.run!r}: this process has no attempt and must not commit")
        return self.attempt

    # Threads -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Build the ledger from what was found, and start to finish what an earlier start began.

        Without an attempt nothing is committed, copied or collected: only orders are carried out. Another node may be
        at work on a shared tier then, and what looks unfinished there may be its own.
        """
        ledger = Ledger(tier_rules(self.config), self.config.host.name, shard=self.ranks.shard)
        ledger.load(merge(self._held), self._held)
        ledger.scattered = self._scattered
        ledger.note_partial(x for x in self.listings if x.tier in self._seen)
        self._adopt(ledger)
        lanes = {name: lane_limits(store, self.config) for name, store in self.stores.items()}
        self.workers = Workers(
            TaskRunner(self.stores, lane_pools(self.config, lanes), self._writer),
            {name: limits.parallel for name, limits in lanes.items()},
            name=self.run,
        )
        if self.attempt is not None:
            self._discard_leftovers()
        self.coordinator = Coordinator(
            ledger=ledger,
            lanes=lanes,
            host=self.host,
            policies=bundle,
            submit=self.workers.submit,
            max_wait_s=self.config.max_wait_s,
            when_full=self.config.host.when_full,
            unread=[x.tier for x in self.listings if x.error is not None],
            council=self.ranks.council if self.ranks.many else None,
            shared={tier.name: is_shared(tier) for tier in self.config.stored},
        )
        if self.attempt is None:
            self.coordinator.start_tending()
        else:
            self.coordinator.start()
        self.workers.start(self.coordinator)
        self.ranks.listen(self.coordinator.post)

    def _discard_leftovers(self) -> None:
        for tier in self.config.stored:
            store = self.stores.get(tier.name)
            if store is None or not is_owner(tier, self.ranks):
                continue
            try:
                store.discard_unfinished()
            except BackendError as error:
                logger.warning("open: tier %s: leftovers stay: %s", store.name, error)

    def _adopt(self, ledger: Ledger) -> None:
        """Take over what an earlier start sealed; what is damaged there is said above, and makes room."""
        self.host.release_damaged()
        for id, image in self.host.images().items():
            entry = ledger.entries.get(id)
            if entry is None or self.host.name not in entry.states:
                logger.info("open: %s in memory is let go: other ranks have no part of it", id)
                image.region.release()
                continue
            entry.region = image.region
            entry.adopted = True
            entry.manifest = read_manifest(
                image.region.manifest(), what=f"{self.host.name}: manifest of {id}"
            )
            entry.geometry = geometry(entry.manifest)
            logger.info("open: %s in memory is adopted", id)

    def ask(self, function: Callable[[], T]) -> T:
        """Run a function on the coordinator's thread and return its value; raises what it raised."""
        done = Bell()
        answer: list[Any] = []

        def tell(value: Any, error: BaseException | None) -> None:
            answer.extend((value, error))
            done.ring()

        self.coordinator.post(Ask(function=function, answer=tell))
        self.wait(done)
        value, error = answer
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def tell(self, function: Callable[[], object]) -> None:
        """Run a function on the coordinator's thread, and do not wait for it."""
        self.coordinator.post(Ask(function=function, answer=_ignore))

    def wait(self, done: Bell, timeout: float | None = None) -> bool:
        """Wait for the coordinator, which may have stopped."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not done.wait(
            0.5 if deadline is None else min(0.5, max(0.0, deadline - time.monotonic()))
        ):
            if self.workers.failure is not None:
                raise self._stopped() from self.workers.failure
            if deadline is not None and time.monotonic() >= deadline:
                return False
        return True

    def _stopped(self) -> TierfallError:
        return TierfallError(f"the coordinator stopped: {self.workers.failure!r}")

    def wait_idle(self, timeout: float | None) -> bool:
        """Wait until nothing is owed that can be had; False after ``timeout`` seconds."""
        idle = Bell()
        self.ask(lambda: self.coordinator.ring_when_idle(idle))
        try:
            return self.wait(idle, timeout)
        finally:
            self.tell(lambda: self.coordinator.forget(idle))

    # Reading -----------------------------------------------------------------------------------------

    def list_now(self) -> tuple[Listing, ...]:
        return list_all(self.config, self.host, self.stores, self.errors)

    def open_image(
        self, regions: Mapping[CheckpointId, HostRegion]
    ) -> Callable[[str, CheckpointId, Shard], Image]:
        def open_one(tier: str, id: CheckpointId, shard: Shard) -> Image:
            if tier != self.host.name:
                return StoredImage(self.stores[tier], id, shard)
            if id not in regions:
                raise IntegrityError(f"{tier}: {id} left memory while it was to be read")
            return RegionImage(tier, regions[id])

        return open_one

    def known(self) -> tuple[KnownCheckpoint, ...]:
        return merge(self.listings)

    # The end -----------------------------------------------------------------------------------------

    def close(self, *, keep_memory: bool, timeout_s: float | None = None) -> None:
        """Stop all threads, and let go of everything; half-done copies are taken back."""
        if self._closed:
            return
        keep = True
        try:
            stopped = self.workers.stop(
                lambda: self.tell(int),
                self.config.max_wait_s if timeout_s is None else timeout_s,
            )
            if stopped:
                self._abort_writers()
            self.coordinator.stop(
                FlushError(
                    "the run was closed before this was done; what is sealed lies in host memory, and the next start "
                    "or 'tierfall drain' finishes it"
                )
            )
            keep = keep_memory
        finally:
            self._let_go(keep=keep)

    def _abort_writers(self) -> None:
        for lane in self.coordinator.lanes.values():
            if lane.active is not None and lane.active.writer is not None:
                try:
                    lane.active.writer.abort()
                except BackendError as error:
                    logger.warning("close: tier %s: a leftover stays: %s", lane.tier, error)

    def abandon(self) -> None:
        """Undo an opening that failed on the way."""
        if hasattr(self, "workers") and self.workers.running:
            self.close(keep_memory=True, timeout_s=1.0)
        else:
            self._let_go(keep=True)

    def _let_go(self, *, keep: bool) -> None:
        self._closed = True
        try:
            for store in self.stores.values():
                store.close()
            if hasattr(self, "host"):
                self.host.close(keep=keep)
        finally:
            self._lock.release()
            self.ring.release()


def _ignore(value: object, error: BaseException | None) -> None:
    """Nobody waits for this answer."""


def _say_progress(tier: str) -> Callable[[int, int], None]:
    """Say how the allocation of host memory goes on, every few seconds."""
    last = time.monotonic()

    def say(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 2.0 and done < total:
            last = now
            logger.info("%s: allocating host memory: %d of %d MiB", tier, done >> 20, total >> 20)

    return say
