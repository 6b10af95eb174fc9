"""A session: one run's tiers, opened for writing, with everything that moves copies between them.

It builds the ledger from what the tiers hold, starts the threads, and ends them. ``Checkpointer`` is built on it.
Nothing here knows a model or a state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from tierfall.config import Config
from tierfall.core.copies.chunk_reader import BufferRing, ReadTally
from tierfall.core.flush.coordinator import Coordinator
from tierfall.core.flush.facts import Group, Ledger
from tierfall.core.flush.tasks import LedgerQuery
from tierfall.core.flush.worker import TaskRunner, Workers
from tierfall.core.format.catalog import KnownCheckpoint, Listing, decided_in, merge
from tierfall.core.format.records import Attempt
from tierfall.core.ranks.message_tree import RankMessage
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.runtime.callbacks import CallbackThread
from tierfall.core.runtime.cores import hash_threads
from tierfall.core.runtime.holds import Holds
from tierfall.core.runtime.messages import wait_for_messages
from tierfall.core.runtime.public_calls import is_within_another
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.types.errors import BackendError, FlushError, TierfallError
from tierfall.core.types.values import CheckpointId, LossClass
from tierfall.core.types.view import LossBound, PeerSurvival
from tierfall.policies.forecast import loss_bounds, peer_survival
from tierfall.session.leftovers import Leftovers, adopt_images, images_in, note_overtaken
from tierfall.session.memory_files import MemoryFiles
from tierfall.session.opened_tiers import OpenedTiers
from tierfall.session.start import Start, begin_attempt, on_all_ranks
from tierfall.session.status_writer import StatusWriter
from tierfall.setup.tiers import bounds_s, is_shared, lane_limits, lane_pools, tier_rules
from tierfall.telemetry.journal import CLOSE_S, Journal
from tierfall.telemetry.prometheus import MetricsServer
from tierfall.telemetry.step_timer import StepTimer

logger = logging.getLogger("tierfall")
T = TypeVar("T")
Listener = Callable[[RankMessage], None]
CHECK_S = 0.5
"""Seconds after which a wait for the coordinator checks whether it still runs."""
NESTED_S = 2.0
"""Seconds for which a call within another one of its thread waits for the coordinator."""
ABANDON_S = 1.0


class Session:
    """See the module. Made of opened tiers and what they hold; it closes these tiers.

    Nothing moves before ``start``.
    """

    def __init__(
        self,
        tiers: OpenedTiers,
        start: Start,
    ) -> None:
        """Build the ledger, and all that works on it."""
        self.tiers = tiers
        self.run, self.node, self.ranks = tiers.run, tiers.node, tiers.ranks
        self.host, self.stores, self.errors = tiers.host, tiers.stores, tiers.errors
        self._held = on_all_ranks(tiers, start)
        self.displaced = bool(start.displaced)
        """Memory of some rank has images of other ranks, which can only be restored from: the first save is made soon,
        and owed to every tier."""
        self._closed = False
        self.listeners: dict[str | int, Listener] = {}
        self.journal = Journal(self.config, run=self.run, ranks=self.ranks, node=self.node)
        self.step_timer = StepTimer()
        self.callbacks = CallbackThread(f"tierfall-{self.run}-callbacks")
        self._metrics_server: MetricsServer | None = None
        sharers = self.ranks.topology.core_sharers
        self.hash_threads = self.config.capture.threads or hash_threads(sharers)
        # of restores: they do not wait for flushes
        self.ring = BufferRing(self.config.chunk_bytes, threads=self.hash_threads)
        written = {self.host.name, *(tier.name for tier in self.config.written)}
        lanes = {
            name: lane_limits(store, self.config)
            for name, store in self.stores.items()
            if name in written
        }
        ledger, self.leftovers = _load_ledger(tiers, start, self._held, written)
        self.workers = Workers(
            TaskRunner(self.stores, lane_pools(self.config, lanes), lambda: self.attempt),
            {name: limits.parallel for name, limits in lanes.items()},
            name=self.run,
        )
        self.coordinator = Coordinator(
            ledger=ledger,
            lanes=lanes,
            host=self.host,
            submit=self.workers.submit,
            max_wait_s=self.config.max_wait_s,
            when_full=self.config.host.when_full,
            unread=[x.tier for x in tiers.listings if x.error is not None],
            decided={x.tier: x.decided for x in tiers.listings if x.error is None},
            message_tree=self.ranks.message_tree,
            set_pace=lambda tier, bytes_per_s: self.stores[tier].limit_rate(bytes_per_s),
            verify_bytes_per_s=self.config.verify_bytes_per_s,
            notify=self.journal.notify,
            leftovers=self.leftovers,
        )
        self.memory = MemoryFiles(tiers)
        self.holds = Holds()
        self.status = StatusWriter(self)

    @property
    def config(self) -> Config:
        return self.tiers.config

    @property
    def attempt(self) -> Attempt:
        assert self.tiers.attempt is not None
        return self.tiers.attempt

    @property
    def listings(self) -> tuple[Listing, ...]:
        """What the tiers held when the present attempt was taken."""
        return self.tiers.listings

    # Threads -----------------------------------------------------------------------------------------

    def serve_metrics(self) -> None:
        """Serve metrics and health where ``metrics`` is set, on the first rank of each node. Raises ConfigError where
        the port is in use, or prometheus-client is missing."""
        wanted = self.config.metrics
        if wanted is None or not self.ranks.topology.is_leader:
            return
        address, port = wanted.listens_on
        self._metrics_server = MetricsServer(
            address, port, self.status.present, run=self.run, where="open: metrics.prometheus"
        )

    def start(self, listeners: Mapping[str | int, Listener] | None = None) -> None:
        """Start all threads: what an earlier start left to be flushed is flushed.

        ``listeners`` receive the ranks' messages whose topic begins with their key; the coordinator receives the rest.
        """
        self.listeners.update(listeners or {})
        self.journal.start(self.attempt)
        self.coordinator.start()
        self.workers.start(self.coordinator)
        self.ranks.set_listener(self._on_message)
        self.status.start()

    def _on_message(self, news: RankMessage) -> None:
        self.listeners.get(news.topic[0], self.coordinator.post)(news)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the coordinator's thread and return its value; raises what it raised.

        Within another public call of this thread, as in a signal handler, the coordinator may wait for what this thread
        has locked: TierfallError then.
        """
        done = InterruptibleEvent()
        answer: list[Any] = []

        def on_answer(value: Any, error: BaseException | None) -> None:
            answer.extend((value, error))
            done.set()

        self.coordinator.post(LedgerQuery(function=function, on_answer=on_answer))
        if not self.wait(done, NESTED_S if is_within_another() else None):
            raise TierfallError(
                f"the coordinator gave no answer within {NESTED_S:g} s: this call was made within another one of this "
                "thread, as by a signal handler, which holds what the coordinator waits for. Make it after that one"
            )
        value, error = answer
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run a function on the coordinator's thread, and do not wait for it."""
        self.coordinator.post(LedgerQuery(function=function, on_answer=_ignore_answer))

    def wait(self, done: InterruptibleEvent, timeout: float | None = None) -> bool:
        """Wait until the coordinator rings ``done``; False after ``timeout`` seconds.

        Raises TierfallError where the coordinator has stopped.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not done.wait(
            CHECK_S if deadline is None else min(CHECK_S, max(0.0, deadline - time.monotonic()))
        ):
            self.check_running()
            if deadline is not None and time.monotonic() >= deadline:
                return False
        return True

    def check_running(self) -> None:
        """Raise TierfallError where the coordinator has stopped."""
        if (failure := self.workers.failure) is not None:
            raise TierfallError(f"the coordinator stopped: {failure!r}") from failure

    def waiting_for_copies(self, doing: str) -> AbstractContextManager[None]:
        """Return a hold in which the training thread waits for copies: while it lasts, what they do is logged."""
        return self.holds.hold(doing, self.status.describe_flushes, level=logging.INFO)

    def wait_idle(self, timeout: float | None, *, copies_only: bool = False) -> bool:
        """Wait until no copy is owed that can be written at present, and, unless ``copies_only``, no other work is in
        progress; False after ``timeout`` seconds."""
        idle = InterruptibleEvent()
        self.call(lambda: self.coordinator.set_when_idle(idle, copies_only=copies_only))
        try:
            return self.wait(idle, timeout)
        finally:
            self.call_soon(lambda: self.coordinator.forget_idle_event(idle))

    def find_external_commits(self, timeout_s: float | None = None, *, last: bool = False) -> None:
        """Look for checkpoints that another process has committed for this start; ``last``: for the last time."""
        done = InterruptibleEvent()
        self.call(lambda: self.coordinator.external_commits.search(done, last=last))
        self.wait(done, self.config.max_wait_s if timeout_s is None else timeout_s)

    def loss_bounds(self) -> dict[LossClass, LossBound]:
        """Return what each loss would cost now; on the coordinator's thread."""
        timer = self.step_timer
        return loss_bounds(self.coordinator.ledger.view(), step=timer.last, step_s=timer.step_s)

    def peer_survival(self) -> PeerSurvival | None:
        """Return which losses of nodes peer memory survives; on the coordinator's thread."""
        attempt = self.attempt
        if attempt.node_losses is None:
            return None
        coordinator, names = self.coordinator, self.coordinator.ledger.peer_tiers
        copied = {id for id, tier in coordinator.durable if tier in names}
        return peer_survival(
            coordinator.ledger.view(), attempt.number, attempt.node_losses, copied=copied
        )

    # Reading -----------------------------------------------------------------------------------------

    def list_now(self) -> tuple[Listing, ...]:
        """List every tier now. Copies that lack files are reported to the ledger, and a listing that lags."""
        found = self.tiers.list_now()
        if any(listing.lags for listing in found):
            self.call_soon(self._note_lag)
        for listing in found:
            for copy in listing.copies if listing.tier != self.host.name else ():
                if copy.repairable and copy.commit is not None:
                    self._report_damage(listing.tier, copy.id, str(copy.damage), repairable=True)
        return found

    def _note_lag(self) -> None:
        self.coordinator.ledger.lags = True

    def look_at(
        self, id: CheckpointId, tiers: Iterable[str], timeout_s: float
    ) -> dict[str, bool | TierfallError]:
        """Return, by tier, whether a stored tier still has all files of a checkpoint, or the error of one that did not
        answer. Copies that lack files are reported to the ledger."""
        found: dict[str, bool | TierfallError] = {}
        for name, answer in self.tiers.look(id, tiers, timeout_s).items():
            if isinstance(answer.error, TierfallError):
                logger.warning("%s: %s was not looked at: %s", name, id, answer.error)
                found[name] = answer.error
                continue
            copy = answer.get()
            if copy is None:
                why = f"{name}: {id} is not there any more: its commit record has gone"
                self._report_damage(name, id, why, repairable=False)
            elif copy.repairable:
                self._report_damage(name, id, str(copy.damage), repairable=True)
            unread = None if copy is None else copy.unread
            found[name] = unread or (copy is not None and copy.damage is None)
        return found

    def new_tally(self) -> ReadTally:
        """Return a tally for reads in this process, which reports to the ledger what is damaged or not read."""
        return ReadTally(found_damage=self.report_damaged, found_unread=self.keep_unread)

    def report_damaged(self, tier: str, id: CheckpointId, error: TierfallError) -> None:
        """Report to the ledger that a copy was found damaged; for any thread."""
        store = self.stores.get(tier)
        look = {} if store is None else {tier: partial(store.find_copy, id)}
        found = BoundedCalls().call_all(look, bounds_s(self.config), doing="look")
        try:
            there = all(answer.get() is not None for answer in found.values())
        except TierfallError as failure:
            logger.warning("%s: %s may be damaged (%s): %s", tier, id, error, failure)
            return
        why = str(error) if there else f"{error}; its commit record has gone, too"
        self._report_damage(tier, id, why, repairable=there)

    def keep_unread(self, id: CheckpointId) -> None:
        """Keep what could not be read: for the rest of this start only a command deletes it. For any thread."""
        self.call_soon(lambda: self.coordinator.ledger.reading.update([id]))

    def _report_damage(self, tier: str, id: CheckpointId, why: str, *, repairable: bool) -> None:
        found = self.coordinator.found_damage
        self.call_soon(lambda: found(tier, id, why, repairable=repairable))

    def known(self) -> tuple[KnownCheckpoint, ...]:
        """Return the checkpoints that this rank found."""
        return merge(self.listings)

    def known_by_all(self) -> tuple[KnownCheckpoint, ...]:
        """Return the checkpoints that this start found, without those of which other ranks lack their images."""
        return merge(self._held)

    def begin_attempt(self) -> Attempt:
        """List all tiers and take another attempt, together with the other ranks."""
        self.tiers.listings = self.list_now()
        begin_attempt(self.tiers)
        return self.attempt

    # The end -----------------------------------------------------------------------------------------

    def close(self, *, keep_memory: bool, timeout_s: float | None = None) -> None:
        """Stop all threads, abort half-written copies, and close the tiers. Each of these takes ABANDON_S at least, and
        ends by ``timeout_s`` else: what a tier holds up is left to its thread, which no end of a program waits for."""
        if self._closed:
            return
        keep = True
        timeout_s = self.config.max_wait_s if timeout_s is None else timeout_s
        ends_s = time.monotonic() + timeout_s

        def left_s() -> float:
            return max(ABANDON_S, ends_s - time.monotonic())

        if keep_memory:
            try:
                self.memory.hold_place()
            except TierfallError as error:
                logger.warning("%s: its place cannot be held: %s", self.host.name, error)
        self.status.close()
        try:
            stopped = self.workers.stop(lambda: self.call_soon(int), timeout_s)
            if stopped:
                self._abort_writers(left_s())
            self.coordinator.stop(
                FlushError(f"the run was closed before this was done; {self._left()}")
            )
            damaged = self.tiers.host.holds_damaged()  # the next start reports it, too
            keep = keep_memory or damaged or not self.memory.are_intact()
        finally:
            self.journal.close()
            self.callbacks.close(CLOSE_S)
            self._release(keep=keep, timeout_s=left_s())
            wait_for_messages()

    def _left(self) -> str:
        """Describe what happens to images that are sealed and not flushed."""
        if self.memory.problem:
            return (
                "what has no file in memory is lost unless another tier has it, and the next start or 'tierfall "
                f"drain' finishes the rest: {self.memory.problem}"
            )
        return (
            "what is sealed is in host memory, and the next start or 'tierfall drain' finishes it"
        )

    def _abort_writers(self, timeout_s: float) -> None:
        aborts = {
            lane.tier: lane.active.writer.abort
            for lane in self.coordinator.lanes.values()
            if lane.active is not None and lane.active.writer is not None
        }
        bounds = dict.fromkeys(aborts, timeout_s)
        for tier, answer in BoundedCalls().call_all(aborts, bounds, doing="abort").items():
            match answer.error:
                case BackendError() as error:
                    logger.warning("close: tier %s: a leftover stays: %s", tier, error)
                case _:
                    answer.get()

    def abandon(self) -> None:
        """Undo an opening that failed before its end."""
        if self.workers.running:
            self.close(keep_memory=True, timeout_s=ABANDON_S)
        else:
            self._release(keep=True, timeout_s=ABANDON_S)

    def _release(self, *, keep: bool, timeout_s: float) -> None:
        self._closed = True
        if self._metrics_server is not None:
            self._metrics_server.close()
        try:
            self.tiers.close(keep=keep, timeout_s=timeout_s)
        finally:
            self.ring.release()


def _load_ledger(
    tiers: OpenedTiers, start: Start, listings: Sequence[Listing], written: set[str]
) -> tuple[Ledger, Leftovers]:
    """Build the ledger of the ``written`` tiers, and adopt what lies in the slots of this process."""
    ledger = Ledger(
        tier_rules(tiers.config),
        tiers.host.name,
        group=Group(
            topology=tiers.ranks.topology,
            shared={tier.name: is_shared(tier) for tier in tiers.config.stored},
        ),
        scattered=start.scattered,
        on_few_nodes=start.on_few_nodes,
        decided=decided_in(listings),
    )
    ledger.set_clock(now_s=time.monotonic(), wall_time_s=time.time())
    held = [listing for listing in listings if listing.tier in written]
    ledger.load(merge(held), held)
    for entry in ledger.entries.values():
        entry.image_bytes = start.image_bytes.get(entry.id, entry.image_bytes)
    seen = start.seen & written
    ledger.note_partial(x for x in tiers.listings if x.tier in seen and not x.lags)
    ledger.lags = start.lags or any(listing.lags for listing in tiers.listings)
    images = images_in(tiers.hosts())
    leftovers = adopt_images(ledger, images, tiers.adopted, start.displaced)
    note_overtaken(ledger, start.overtaken)
    return ledger, leftovers


def _ignore_answer(value: object, error: BaseException | None) -> None:
    """The answer of a call that nobody waits for."""
