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
from dataclasses import replace
from typing import Any, TypeVar

from tierfall.config import Config
from tierfall.core import names
from tierfall.core.bell import Bell
from tierfall.core.catalog import KnownCheckpoint, Listing, merge
from tierfall.core.errors import (
    BackendError,
    ConfigError,
    FlushError,
    IntegrityError,
    KeyExistsError,
    NotSupportedError,
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
from tierfall.core.values import CheckpointId, CopyState, Shard
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
            self.listings = self.list_now()
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
        """Refuse host memory of another life of this run's name; one process refuses that of several ranks, too."""
        held = self.host.images()
        for id, image in held.items():
            if not self.ranks.many and image.commit.world_size > 1:
                raise self._of_others(id, image.commit.world_size)
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

    def _of_others(self, id: CheckpointId, saved_by: int) -> NotSupportedError:
        return NotSupportedError(
            f"open: {self.host.path} holds one rank's part of step {id}, which {saved_by} ranks saved, and this is one "
            f"process: it cannot go on from there. Start the job with {saved_by} ranks, which finish its flush; or, if "
            "it is not needed, remove that file"
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

    def leave_out(self, tiers: Mapping[str, str]) -> None:
        """Go on without tiers that other ranks of this start cannot reach; ``tiers`` says of each who, and why."""
        for name, why in tiers.items():
            if name in self.errors:
                continue
            self.stores.pop(name).close()
            error = UnreachableError(f"{name}: other ranks cannot reach it: {why}")
            self.errors[name] = error
            self.listings = tuple(
                Listing(tier=name, error=error) if x.tier == name else x for x in self.listings
            )
            logger.warning(
                "open: all ranks go on without tier %s, for as long as they run: %s", name, why
            )

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

    def build(self) -> None:
        """Build the ledger from what was found, and all that works on it; nothing moves before ``start``.

        What is left half done on a tier is collected here: where there are other ranks, before any of them is at work.
        Without an attempt nothing is: another node may be at work on a shared tier then, and what looks unfinished
        there may be its own.
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

    def start(self) -> None:
        """Start to finish what an earlier start began. Without an attempt nothing is committed, copied or collected:
        only orders are carried out."""
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
            if image.commit.world_size != self.ranks.shard.world_size:
                self._let_go_of_part(ledger, id, image)
                continue
            entry = ledger.entries.get(id)
            if entry is None or self.host.name not in entry.states:
                logger.warning(
                    "open: %s in memory is let go: it is another rank's part, or other ranks have none of it",
                    id,
                )
                image.region.release()
                continue
            entry.region = image.region
            entry.adopted = True
            entry.manifest = read_manifest(
                image.region.manifest(), what=f"{self.host.name}: manifest of {id}"
            )
            entry.geometry = geometry(entry.manifest)
            logger.info("open: %s in memory is adopted", id)

    def _let_go_of_part(self, ledger: Ledger, id: CheckpointId, image: HeldImage) -> None:
        """Another number of ranks goes on: what the old ones have in memory is not put together."""
        logger.warning(
            "open: one rank's part of %s in memory is let go: %d ranks saved it, and now there are %d; what lies on "
            "the other tiers is restored",
            id,
            image.commit.world_size,
            self.ranks.shard.world_size,
        )
        image.region.release()
        if (entry := ledger.entries.get(id)) is not None:
            entry.set_state(self.host.name, CopyState.ABSENT)
            ledger.forget_if_gone(entry)

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
        """Ask every tier what it holds. In memory only this rank's own part counts: a rank may have come to where
        another one was."""
        own = names.manifest_name(self.ranks.shard)
        return tuple(
            replace(x, copies=tuple(c for c in x.copies if c.commit and c.commit.file(own)))
            if x.tier == self.host.name
            else x
            for x in list_all(self.config, self.host, self.stores, self.errors)
        )

    def open_image(
        self, regions: Mapping[tuple[CheckpointId, Shard], HostRegion]
    ) -> Callable[[str, CheckpointId, Shard], Image]:
        def open_one(tier: str, id: CheckpointId, shard: Shard) -> Image:
            if tier != self.host.name:
                return StoredImage(self.stores[tier], id, shard)
            region = regions.get((id, shard))
            if region is None:
                raise IntegrityError(
                    f"{tier}: {id} left memory while it was to be read, or rank {shard.rank}'s part is not here"
                )
            return RegionImage(tier, region)

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
