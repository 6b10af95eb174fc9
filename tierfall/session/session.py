"""A session: one run's tiers, opened for writing by one process, with everything that moves copies between them.

It owns the order of opening (lock, arena, backends, listings, attempt, ledger, threads) and of closing. Checkpointer
and the writing commands are built on it; nothing here knows a model or a state.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from tierfall.config import Config
from tierfall.core.copies.buffer_ring import BufferRing
from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.copies.shard_reader import OpenImage, Regions, image_opener
from tierfall.core.format.catalog import KnownCheckpoint, Listing, merge, starts_in
from tierfall.core.format.records import Attempt, Commit
from tierfall.core.ranks.ranks import RankMessage, Ranks
from tierfall.core.runtime.bounded_calls import BoundedCalls, CallResult
from tierfall.core.runtime.run_lock import RunLock
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.scheduler.coordinator import Coordinator
from tierfall.core.scheduler.executor import TaskRunner
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import LedgerQuery
from tierfall.core.scheduler.workers import Workers
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    FencedError,
    FlushError,
    IntegrityError,
    KeyExistsError,
    StorageFullError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.lineage import Key
from tierfall.core.types.values import CheckpointId
from tierfall.policies import defaults
from tierfall.session.adopt import check_life, note_overtaken, take_over
from tierfall.session.leftovers import (
    AdoptedSlot,
    adopt_slots,
    images_in,
    list_slots,
    opened_slots_of_others,
    regions_in,
)
from tierfall.session.memory_files import MemoryFiles
from tierfall.session.start import agree_on_start, held_by_all, is_owner, is_shared
from tierfall.session.status_writer import StatusWriter
from tierfall.setup.attempts import next_number, warn_of_two_lives
from tierfall.setup.tier_identity import TierIdentities
from tierfall.setup.tiers import (
    bounded,
    bounds_s,
    check_written,
    holds_something,
    lane_limits,
    lane_pools,
    list_all,
    open_stores,
    run_folder,
    settle,
    tier_rules,
    unsettled,
)
from tierfall.telemetry.journal import Journal
from tierfall.telemetry.step_timer import StepTimer
from tierfall.tiers.arena.arena import lock_name
from tierfall.tiers.arena.folder import prepare_folder
from tierfall.tiers.host import HostTier, damaged
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")
T = TypeVar("T")


class Session:
    """See the module. ``attempt`` is this process's line of saving; ``probed``: ``config`` says what all nodes see."""

    def __init__(
        self,
        config: Config,
        *,
        run: str,
        ranks: Ranks | None = None,
        accept_arena: bool = False,
        adopts: bool = False,
        tending: bool = False,
    ) -> None:
        """Open everything but the attempt; ``start`` follows. Whatever fails leaves nothing open. ``adopts``: go on
        from the memory of other ranks than those of now. ``tending``: only carry out orders, also in what any ranks
        have left in memory."""
        self.config = config
        self.run = run
        self.ranks = ranks or Ranks.alone()
        check_written(config)
        self.node = socket.gethostname()
        self.attempt: Attempt | None = None
        self.probed = False
        self._tending = tending
        self._closed = False
        self._told_of: set[Key] = set()
        self.listeners: dict[str | int, Callable[[RankMessage], None]] = {}
        """Who hears, instead of the coordinator, what the ranks say of topics that begin so; set before ``start``."""
        self.step_timer = StepTimer()
        self.journal = Journal(config, run=run, ranks=self.ranks, node=self.node)
        folder = prepare_folder(run_folder(config, run))
        self.ring = BufferRing(config.chunk_bytes)  # restores do not wait for flushes
        self._lock = RunLock.take(folder / lock_name(self.ranks.slot), run=run)
        self.stores: dict[str, StoredTier] = {}
        self.found_read_only: dict[str, str] = {}
        """The tiers that are not called read-only, and may not be written to, with why."""
        self._calls = BoundedCalls()
        self.adopted: list[AdoptedSlot] = []
        self._folder = folder
        try:
            self.host = HostTier(
                name=config.host.name,
                run=run,
                folder=folder,
                slot=self.ranks.slot,
                shard=self.ranks.shard,
                capacity_bytes=config.host.capacity_bytes,
                progress=_log_progress(config.host.name),
            )
            try:
                self.host.attach()
            except IntegrityError as error:
                raise damaged(error, self.host.path) from error
            if tending or (adopts and self.ranks.topology.is_leader):
                first = len(self.ranks.topology.local_ranks)
                self.adopted = adopt_slots(folder, first=first, name=self.host.name, run=run)
            self.stores, self.errors = open_stores(config, run, find_read_only=True)
            self.go_on_reading(
                {name: s.read_only for name, s in self.stores.items() if s.read_only}
            )
            for name, problem in self.errors.items():
                logger.warning(
                    "open: goes on without tier %s, for as long as this process runs: %s",
                    name,
                    problem,
                )
            self.listings = self.list_now()
            self._identify_tiers()
            self._held = self.listings
            self._seen: frozenset[str] = frozenset()
            self._scattered: frozenset[CheckpointId] = frozenset()
            self._overtaken: Mapping[CheckpointId, frozenset[str]] | None = None
            self._inherited: tuple[Commit, ...] = ()
            self._deleted: frozenset[CheckpointId] = frozenset()
            self._marks: Mapping[str, Mapping[CheckpointId, frozenset[str]]] = {}
            self.puts_together = adopts and (self.ranks.many or self._has_images_of_others())
            check_life(
                self.hosts(),
                self.stores,
                self.listings,
                run=run,
                may_be_unknown=accept_arena
                or bool(self.errors)
                or self.identities.are_as_remembered(self.listings),
            )
        except BaseException:
            self._release(keep=True)
            raise
        self._log_unreadable()

    def _identify_tiers(self) -> None:
        """Refuse two tiers that are one, and go on without those that are not mounted."""
        self.identities = TierIdentities(self.config, self.stores, self._folder, self.listings)
        self.go_on_reading(self.identities.refuse_aliases())
        for name, error in self.identities.missing(self.listings).items():
            self._leave_out(name, error)
            logger.warning(
                "open: goes on without tier %s, for as long as this process runs: %s", name, error
            )
        self.identities.refuse_swapped()

    def _leave_out(self, name: str, error: TierfallError) -> None:
        self.stores.pop(name).close()
        self.errors[name] = error
        self.listings = tuple(
            Listing(tier=name, error=error) if x.tier == name else x for x in self.listings
        )

    def _log_unreadable(self) -> None:
        for listing in self.listings:
            if listing.error is not None and listing.tier not in self.errors:
                logger.warning("open: tier %s could not be read: %s", listing.tier, listing.error)
            for damage in listing.damaged:
                logger.warning("open: tier %s holds something damaged: %s", listing.tier, damage)

    def _warn_of_two_lives(self) -> None:
        if self.ranks.topology.is_root:
            warn_of_two_lives(self.run, starts_in(self._held), self.known_by_all(), self._told_of)

    def hosts(self) -> list[HostTier]:
        """The slots of this process: its own, and those that it has adopted."""
        return [self.host, *(slot.host for slot in self.adopted)]

    def slots(self) -> list[tuple[RunLock, HostTier]]:
        """Those slots, each with its lock."""
        return [(self._lock, self.host), *((slot.lock, slot.host) for slot in self.adopted)]

    def _has_images_of_others(self) -> bool:
        return any(shard != self.ranks.shard for _, shard in regions_in(self.hosts()))

    # Attempts ----------------------------------------------------------------------------------------

    def begin_line(self) -> bool:
        """Take an attempt, together with the other ranks; say whether nothing is known of any checkpoint."""
        if not self.puts_together:
            self.settle()
            self.take_number(self.next_number())
            self._warn_of_two_lives()
            return self.knows_of_nothing()
        start = agree_on_start(self)
        self._held = held_by_all(self, start)
        self._seen = start.seen
        self._scattered, self._overtaken = start.scattered, start.overtaken
        self._inherited, self._deleted = start.inherited, start.deleted
        self._marks = start.marks
        self._warn_of_two_lives()
        return start.first

    def settle(self) -> None:
        """Have what was found on the tiers of this rank's own made durable, before anything relies on it."""
        own = {tier.name for tier in self.config.stored if is_owner(tier, self.ranks)}
        found = {x.tier: x for x in self.listings if x.tier in own & self.stores.keys()}
        stores = [self.stores[name] for name, x in found.items() if x.copies]
        for name, answer in self._ask(stores, lambda s: settle(s, found[s.name])).items():
            match answer.error:
                case UnreachableError() as error:
                    found[name] = unsettled(name, found[name], error)
                case _:
                    found[name] = answer.get()
        self.listings = tuple(found.get(x.tier, x) for x in self.listings)
        self._held = self.listings

    def take_attempt(self) -> Attempt:
        """Take another attempt, as ``begin_line`` does, and return it."""
        self.begin_line()
        assert self.attempt is not None
        return self.attempt

    def knows_of_nothing(self) -> bool:
        """Say whether every tier answered and none holds a checkpoint of this run."""
        if any(listing.error is not None for listing in self.listings):
            return False
        return all(checkpoint.tombstoned for checkpoint in self.known())

    def next_number(self) -> int:
        """Say which attempt's number would be above all others, also on tiers that could not be asked."""
        return next_number(self.listings, self.stores, run=self.run, own=self.attempt)

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
            self._leave_out(name, UnreachableError(f"{name}: other ranks cannot reach it: {why}"))
            logger.warning(
                "open: all ranks go on without tier %s, for as long as they run: %s", name, why
            )

    def go_on_reading(self, tiers: Mapping[str, str]) -> None:
        """Only read tiers that are not called read-only and may not be written to; ``tiers`` says of each why. Raises
        ConfigError where no tier is left that can be."""
        new = [t.name for t in self.config.written if t.name in tiers]
        self.config = self.config.reading_only(new)
        check_written(self.config, "".join(f"; {tiers[name]}" for name in new))
        for name in new:
            self.found_read_only[name] = tiers[name]
            logger.warning(
                "open: tier %s is read-only, for as long as this process runs: it is restored from, nothing is flushed "
                "to it or dropped there (%s). If that is meant, say read_only: true",
                name,
                tiers[name],
            )

    def adopt_attempt(self, attempt: Attempt) -> bool:
        """Write as ``attempt`` from now on; False where a tier knows another one by its number."""
        answered = {x.tier for x in self.listings if x.error is None}
        written = [self.stores[t.name] for t in self.config.written if t.name in self.stores]
        reachable = [store for store in reversed(written) if store.name in answered]
        if not self._take(attempt, reachable):
            return False
        if self.attempt is None:
            self.identities.leave(
                attempt,
                self.config,
                owned=frozenset(t.name for t in self.config.written if is_owner(t, self.ranks)),
                leads=self.ranks.topology.is_leader,
            )
        self.attempt = attempt
        return True

    def check_newest(self) -> None:
        """Raise FencedError where a tier knows a newer attempt than this process's: it must not come back above it."""
        assert self.attempt is not None
        attempt = self.attempt
        written = [tier.name for tier in self.config.written]
        asked = [store for name, store in self.stores.items() if name in written]
        answers = self._ask(asked, lambda store: store.check_fence(attempt))
        for name, answer in answers.items():
            try:
                answer.get()
            except (StorageFullError, UnreachableError) as error:
                logger.warning("tier %s was not asked for newer attempts: %s", name, error)

    def _ask(
        self,
        stores: Iterable[StoredTier],
        question: Callable[[StoredTier], T],
        *,
        bound_s: float | None = None,
    ) -> dict[str, CallResult[T]]:
        """Ask these tiers something, side by side; one that does not answer in time, within ``bound_s`` seconds where
        that is given, is unreachable."""
        asked = list(stores)
        bounds = bounds_s(self.config)
        return self._calls.make(
            {store.name: partial(question, store) for store in asked},
            {s.name: bounds[s.name] if bound_s is None else bound_s for s in asked},
            doing="ask",
            heard_s=lambda name: self.stores[name].heard_s(),
        )

    def _take(self, attempt: Attempt, stores: Iterable[StoredTier]) -> bool:
        """Leave the attempt's record on each tier; False where another process has its number.

        A tier that is full or does not answer at present gets the record before its first commit.
        """
        for store in stores:
            try:
                self._ask([store], lambda store: store.take_attempt(attempt))[store.name].get()
            except KeyExistsError:
                return False
            except (StorageFullError, UnreachableError) as error:
                logger.warning(
                    "open: tier %s did not take the attempt's record: %s", store.name, error
                )
            except AccessDeniedError as error:
                if not holds_something(next(x for x in self.listings if x.tier == store.name)):
                    raise
                self.go_on_reading({store.name: str(error)})
        return True

    # Threads -----------------------------------------------------------------------------------------

    def build(self) -> None:
        """Build the ledger from what was found, and all that works on it; nothing moves before ``start``.

        What is left half done on a tier is collected here: where there are other ranks, before any of them is at work.
        Without an attempt nothing is: another node may be at work on a shared tier then, and what looks unfinished
        there may be its own.
        """
        if self.attempt is None:
            self.settle()
        ledger = Ledger(tier_rules(self.config), self.config.host.name, shard=self.ranks.shard)
        ledger.set_clock(now_s=time.monotonic(), wall_time_s=time.time())
        written = {self.host.name, *(tier.name for tier in self.config.written)}
        held = [listing for listing in self._held if listing.tier in written]
        ledger.load(merge(held), held)
        ledger.scattered, ledger.deleted = self._scattered, self._deleted
        ledger.note_partial(x for x in self.listings if x.tier in self._seen & written)
        self.host.release_damaged()  # it was said, and makes room
        images = images_in(self.hosts())
        self.inheritance = take_over(ledger, images, self.adopted, self._saved_by_others())
        ledger.note_marks(self._marks)
        note_overtaken(ledger, self._overtaken)
        lanes = {
            name: lane_limits(store, self.config)
            for name, store in self.stores.items()
            if name in written
        }
        self.workers = Workers(
            TaskRunner(self.stores, lane_pools(self.config, lanes), lambda: self.attempt),
            {name: limits.parallel for name, limits in lanes.items()},
            name=self.run,
        )
        if self.attempt is not None:
            self._discard_leftovers()
        self.coordinator = Coordinator(
            ledger=ledger,
            lanes=lanes,
            host=self.host,
            policies=defaults,
            submit=self.workers.submit,
            max_wait_s=self.config.max_wait_s,
            when_full=self.config.host.when_full,
            unread=[x.tier for x in self.listings if x.error is not None],
            council=self.ranks.council if self.puts_together else None,
            shared={tier.name: is_shared(tier) for tier in self.config.stored},
            set_pace=lambda tier, bytes_per_s: self.stores[tier].keep_to(bytes_per_s),
            verify_bytes_per_s=self.config.verify_bytes_per_s,
            notify=self.journal.notify,
        )
        self.coordinator.mind(self.inheritance)
        self._status = StatusWriter(self, self._folder)
        self.memory = MemoryFiles(self, self._folder)

    def start(self) -> None:
        """Start to finish what an earlier start began. Without an attempt nothing is committed, copied or collected:
        only orders are carried out."""
        self.journal.start(self.attempt)
        if self.attempt is None:
            self.coordinator.start_tending()
        else:
            self.coordinator.start()
        self.workers.start(self.coordinator)
        self.ranks.listen(self._on_message)
        self.memory.start()
        if self.attempt is not None:
            self._status.start()

    def _on_message(self, news: RankMessage) -> None:
        self.listeners.get(news.topic[0], self.coordinator.post)(news)

    def _discard_leftovers(self) -> None:
        """A tier that does not end this in time may go on with it: its own writers are left alone by that, but not
        those of other ranks, so with these it is waited for."""
        attempt = self.attempt
        assert attempt is not None
        own = [t.name for t in self.config.written if is_owner(t, self.ranks)]
        stores = [self.stores[name] for name in own if name in self.stores]
        bound_s = math.inf if self.ranks.many else None
        answers = self._ask(
            stores, lambda store: store.discard_unfinished(attempt=attempt), bound_s=bound_s
        )
        for name, answer in answers.items():
            try:
                answer.get()
            except (BackendError, FencedError) as error:
                logger.warning("open: tier %s: leftovers stay: %s", name, error)

    def _saved_by_others(self) -> tuple[Commit, ...]:
        """Say which checkpoints in memory other ranks saved, whose parts are one here: all of them, for who tends."""
        if not self._tending:
            return self._inherited
        memory = next(x for x in self.listings if x.tier == self.host.name)
        return tuple(c.commit for c in memory.copies if c.commit and c.commit.world_size > 1)

    def ask(self, function: Callable[[], T]) -> T:
        """Run a function on the coordinator's thread and return its value; raises what it raised."""
        done = InterruptibleEvent()
        answer: list[Any] = []

        def tell(value: Any, error: BaseException | None) -> None:
            answer.extend((value, error))
            done.ring()

        self.coordinator.post(LedgerQuery(function=function, answer=tell))
        self.wait(done)
        value, error = answer
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def tell(self, function: Callable[[], object]) -> None:
        """Run a function on the coordinator's thread, and do not wait for it."""
        self.coordinator.post(LedgerQuery(function=function, answer=_ignore_answer))

    def wait(self, done: InterruptibleEvent, timeout: float | None = None) -> bool:
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
        idle = InterruptibleEvent()
        self.ask(lambda: self.coordinator.ring_when_idle(idle))
        try:
            return self.wait(idle, timeout)
        finally:
            self.tell(lambda: self.coordinator.forget(idle))

    def look(self, timeout_s: float | None = None, *, last: bool = False) -> None:
        """Learn what another process has committed for this start since; ``last``: nobody will look again."""
        done = InterruptibleEvent()
        self.ask(lambda: self.coordinator.finder.look(done, last=last))
        self.wait(done, self.config.max_wait_s if timeout_s is None else timeout_s)

    # Reading -----------------------------------------------------------------------------------------

    def list_now(self) -> tuple[Listing, ...]:
        """Ask every tier what it holds; in memory, what lies in the slots of this process. Copies that lack files reach
        the ledger, once there is one."""
        found = list_all(self.config, self.host, self.stores, self.errors, self._calls)
        for listing in found if hasattr(self, "coordinator") else ():
            for copy in listing.copies:
                if copy.damage is not None and copy.commit is not None:
                    self._report_damage(listing.tier, copy.id, str(copy.damage), repairable=True)
        return self.with_memory(found, self.hosts())

    def is_whole(self, id: CheckpointId, tiers: Iterable[str], timeout_s: float) -> bool | None:
        """Look whether a stored tier still has all files of a checkpoint; None where none has, and one did not answer.
        Copies that lack files reach the ledger."""
        answers = self._calls.make(
            {name: partial(self.stores[name].look, id) for name in tiers},
            {name: min(bound_s, timeout_s) for name, bound_s in bounds_s(self.config).items()},
            doing="look",
            heard_s=lambda name: self.stores[name].heard_s(),
        )
        whole, unknown = False, False
        for name, answer in answers.items():
            if isinstance(answer.error, TierfallError):
                logger.warning("%s: %s was not looked at: %s", name, id, answer.error)
                unknown = True
            elif (copy := answer.get()) is None:
                why = f"{name}: {id} is not there any more: its commit record has gone"
                self._report_damage(name, id, why, repairable=False)
            elif copy.damage is not None:
                self._report_damage(name, id, str(copy.damage), repairable=True)
            else:
                whole = True
        return whole or (None if unknown else False)

    def with_memory(
        self, listings: Iterable[Listing], hosts: Sequence[HostTier]
    ) -> tuple[Listing, ...]:
        """Put what lies in those slots in the place of what ``listings`` say of memory."""
        memory = list_slots(hosts)
        return tuple(memory if x.tier == self.host.name else x for x in listings)

    def looking_at_node(self) -> AbstractContextManager[list[HostTier]]:
        """All slots of this node, for as long as they are read."""
        return opened_slots_of_others(
            self._folder, mine=self.hosts(), name=self.host.name, run=self.run
        )

    def opener(self, regions: Regions) -> OpenImage:
        stores = {name: bounded(store, self.config) for name, store in self.stores.items()}
        return image_opener(stores, self.host.name, regions)

    def tally(self) -> ReadTally:
        """Begin to read, in this process: what turns out to be damaged reaches the ledger."""
        return ReadTally(found_damage=self.note_damaged)

    def note_damaged(self, tier: str, id: CheckpointId, error: TierfallError) -> None:
        """Let the ledger know of a copy that was found damaged; for any thread."""
        store = self.stores.get(tier)
        try:
            there = store is None or store.holds(id)
        except TierfallError as failure:
            logger.warning("%s: %s may be damaged (%s): %s", tier, id, error, failure)
            return
        why = str(error) if there else f"{error}; its commit record has gone, too"
        self._report_damage(tier, id, why, repairable=there)

    def _report_damage(self, tier: str, id: CheckpointId, why: str, *, repairable: bool) -> None:
        found = self.coordinator.found_damage
        self.tell(lambda: found(tier, id, why, repairable=repairable))

    def known(self) -> tuple[KnownCheckpoint, ...]:
        return merge(self.listings)

    def known_by_all(self) -> tuple[KnownCheckpoint, ...]:
        """What this start found, without what other ranks do not have their parts of."""
        return merge(self._held)

    # The end -----------------------------------------------------------------------------------------

    def close(self, *, keep_memory: bool, timeout_s: float | None = None) -> None:
        """Stop all threads, and let go of everything; half-done copies are taken back."""
        if self._closed:
            return
        keep = True
        timeout_s = self.config.max_wait_s if timeout_s is None else timeout_s
        if keep_memory:
            self.memory.repair(timeout_s)
        self.memory.close()
        self._status.close()
        try:
            stopped = self.workers.stop(lambda: self.tell(int), timeout_s)
            if stopped:
                self._abort_writers()
            self.coordinator.stop(
                FlushError(f"the run was closed before this was done; {self._left()}")
            )
            keep = keep_memory or not self.memory.are_ours()
        finally:
            self.journal.close()
            self._release(keep=keep)

    def _left(self) -> str:
        """Say what becomes of what is sealed and not flushed."""
        if self.memory.problem is not None:
            return f"it is lost unless another tier has it: {self.memory}"
        return (
            "what is sealed lies in host memory, and the next start or 'tierfall drain' finishes it"
        )

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
            self._release(keep=True)

    def _release(self, *, keep: bool) -> None:
        self._closed = True
        try:
            for store in self.stores.values():
                store.close()
            if hasattr(self, "host"):
                self.host.close(keep=keep)
            for slot in self.adopted:
                slot.close(keep=keep)
        finally:
            self._lock.release()
            self.ring.release()


def _ignore_answer(value: object, error: BaseException | None) -> None:
    """Nobody waits for this answer."""


def _log_progress(tier: str) -> Callable[[int, int], None]:
    """Say how the allocation of host memory goes on, every few seconds."""
    last = time.monotonic()

    def say(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 2.0 and done < total:
            last = now
            logger.info("%s: allocating host memory: %d of %d MiB", tier, done >> 20, total >> 20)

    return say
