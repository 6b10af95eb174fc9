"""A session: the planner of one run on its opened tiers, with the threads that carry out what it decides.

The ledger is built from what the tiers hold. ``Checkpointer`` is built on a session. Nothing here knows a model or a
state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from tierfall.config import Config
from tierfall.config.model import OnClose
from tierfall.core.capture.snapshot import HostRegion
from tierfall.core.copies.chunk_reader import BufferRing, ReadTally
from tierfall.core.flush.coordinator import Coordinator
from tierfall.core.flush.facts import Group, Ledger, LedgerEntry
from tierfall.core.flush.tasks import AdmissionRequest, Command, CommandKind, LedgerQuery
from tierfall.core.flush.worker import TaskRunner, Workers
from tierfall.core.format.catalog import KnownCheckpoint, Listing, decided_in, merge
from tierfall.core.format.records import Attempt
from tierfall.core.ranks.agreement import LeftError
from tierfall.core.ranks.message_tree import RankMessage
from tierfall.core.restore.candidates import RestoreRequest, is_first_unread
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.runtime.callbacks import CallbackThread
from tierfall.core.runtime.cores import hash_threads
from tierfall.core.runtime.holds import Holds
from tierfall.core.runtime.messages import wait_for_messages
from tierfall.core.runtime.public_calls import is_within_another
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.types.errors import BackendError, FlushError, TierfallError, UnreachableError
from tierfall.core.types.lineage import newest_and_first_good
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, CopyState, TierKind
from tierfall.run.status_writer import StatusWriter
from tierfall.setup.host_memory import Leftovers, adopt_images, note_overtaken
from tierfall.setup.opened_tiers import OpenedTiers
from tierfall.setup.start import Start, agree_on_rest, on_all_ranks, take_attempt
from tierfall.setup.tiers import is_shared, lane_limits, lane_pools, tier_rules
from tierfall.telemetry.journal import CLOSE_S, Journal
from tierfall.telemetry.status import MetricsServer
from tierfall.telemetry.step_timer import StepTimer

logger = logging.getLogger("tierfall")
T = TypeVar("T")
Listener = Callable[[RankMessage], None]
CHECK_S = 0.5
"""Seconds after which a wait for the coordinator checks whether it still runs."""
AFTER_S = 2.0
"""Commit records of old checkpoints are read so many seconds after the start, or when they are needed: the restore that
follows ``open`` has the processor and the network to itself until then."""
NESTED_S = 2.0
"""Seconds for which a call within another one of its thread waits for the coordinator."""
ABANDON_S = 1.0
_IN_MEMORY = (TierKind.DEVICE, TierKind.HOST, TierKind.PEER)


class Session:
    """See the module. It closes the tiers that it is made of. Nothing moves before ``start``.

    ``displaced``: memory of some rank has images of other ranks, which can only be restored from: the first save is
    made soon, and owed to every tier.
    """

    def __init__(self, tiers: OpenedTiers, start: Start, catalog: Sequence[Listing]) -> None:
        """Build the ledger of what ranks have agreed on at the ``start``, and all that works on it. ``catalog`` is what
        the tiers hold for all ranks.

        Raises ConfigError where the port for metrics is in use, or prometheus-client is missing.
        """
        self.tiers = tiers
        self.run, self.node, self.ranks = tiers.run, tiers.node, tiers.ranks
        self.memory, self.host, self.stores = tiers.memory, tiers.memory.host, tiers.stores
        self._start = start
        self._closed = False
        self.displaced = bool(start.displaced)
        self.journal = Journal(self.config, run=self.run, ranks=self.ranks, node=self.node)
        self.step_timer = StepTimer()
        self.callbacks = CallbackThread(f"tierfall-{self.run}-callbacks")
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
        ledger = Ledger(
            tier_rules(self.config),
            self.memory.name,
            group=Group(
                topology=self.ranks.topology,
                shared={tier.name: is_shared(tier) for tier in self.config.stored},
            ),
        )
        self.leftovers = Leftovers(ledger, tiers.memory.adopted)
        self.filled = InterruptibleEvent()
        self._awaited = InterruptibleEvent()
        """A thread waits for the coordinator."""
        self._gives_up = InterruptibleEvent()
        """This rank waits no longer for others that read old commit records."""
        if not start.partial:
            self._fill(ledger, catalog)
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
        self.holds = Holds()
        self.status = StatusWriter(self)
        self._metrics_server = self._serve_metrics()

    def _fill(self, ledger: Ledger, catalog: Sequence[Listing]) -> None:
        """Enter into the ledger what the tiers that are written to hold, by the ``catalog`` of all ranks, and what lies
        in the slots of this process."""
        start, tiers = self._start, self.tiers
        ledger.set_clock(now_s=time.monotonic(), wall_time_s=time.time())
        written = {self.host.name, *(tier.name for tier in self.config.written)}
        held = [listing for listing in catalog if listing.tier in written]
        ledger.load(
            merge(held),
            held,
            decided=decided_in(catalog),
            scattered=start.scattered,
            on_few_nodes=start.on_few_nodes,
        )
        for entry in ledger.entries.values():
            entry.image_bytes = start.image_bytes.get(entry.id, entry.image_bytes)
            entry.note_not_finite(start.not_finite.get(entry.id, entry.not_finite))
        seen = start.seen & written
        ledger.note_partial(x for x in tiers.listings if x.tier in seen and not x.lags)
        ledger.lags = start.lags or any(listing.lags for listing in tiers.listings)
        adopt_images(ledger, tiers.memory.images(), self.leftovers, start.displaced)
        note_overtaken(ledger, start.overtaken)
        self.filled.set()

    def _begin(self) -> None:
        """Have the coordinator plan by the content of the tiers. First it reads the commit records that the start left
        for later, and all ranks agree again."""
        if not self.filled.is_set:
            self._awaited.wait(AFTER_S)
            self.tiers.read_rest()
            try:
                self._start = agree_on_rest(self.tiers, self._start, self._gives_up)
            except LeftError:
                if not self.workers.stopping:
                    raise
            if self.workers.stopping:
                return
            self.displaced = bool(self._start.displaced)
            self._fill(self.coordinator.ledger, on_all_ranks(self.tiers, self._start))
        self.coordinator.start()

    def _serve_metrics(self) -> MetricsServer | None:
        """Serve metrics and health where ``metrics`` is set, on the first rank of each node."""
        wanted = self.config.metrics
        if wanted is None or not self.ranks.topology.is_leader:
            return None
        address, port = wanted.listens_on
        where = "open: metrics.prometheus"
        return MetricsServer(address, port, self.status.present, run=self.run, where=where)

    @property
    def config(self) -> Config:
        return self.tiers.config

    @property
    def attempt(self) -> Attempt:
        """The present attempt of this process."""
        assert self._start.attempt is not None
        return self._start.attempt

    # Threads -----------------------------------------------------------------------------------------

    def start(self, listeners: Mapping[str | int, Listener]) -> None:
        """Start all threads: what an earlier start left to be flushed is flushed.

        ``listeners`` receive the ranks' messages whose topic begins with their key; the coordinator receives the rest.
        """
        post = self.coordinator.post
        self.journal.start(self.attempt)
        if self.filled.is_set:
            self._begin()
            self.workers.start(self.coordinator)
        else:
            self.workers.start(self.coordinator, first=self._begin)
        self.ranks.set_listener(lambda news: listeners.get(news.topic[0], post)(news))
        self.status.start()

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the coordinator's thread and return its value; raises what it raised.

        Within another public call of this thread, as in a signal handler, the coordinator may wait for what this thread
        has locked: TierfallError then.
        """
        answer = Answer()
        self.coordinator.post(LedgerQuery(function=function, on_answer=answer))
        if not self.wait(answer, NESTED_S if is_within_another() else None):
            raise TierfallError(
                f"the coordinator gave no answer within {NESTED_S:g} s: this call was made within another one of this "
                "thread, as by a signal handler, which holds what the coordinator waits for. Make it after that one"
            )
        if answer.error is not None:
            raise answer.error
        return answer.value  # type: ignore[no-any-return]

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run a function on the coordinator's thread, and do not wait for it."""
        query = LedgerQuery(function=function, on_answer=lambda value, error: None)
        self.coordinator.post(query)

    def call_in_turn(self, function: Callable[[], object]) -> None:
        """Run a function on the coordinator's thread before what is posted later. It is waited for unless that thread
        still reads commit records: an error is logged then."""
        if self.filled.is_set:
            self.call(function)
        else:
            self.coordinator.post(LedgerQuery(function=function, on_answer=_log_error))

    def wait(self, done: InterruptibleEvent, timeout: float | None = None) -> bool:
        """Wait until the coordinator sets ``done``; False after ``timeout`` seconds.

        Raises TierfallError where the coordinator has stopped.
        """
        if not self._awaited.is_set:
            self._awaited.set()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not done.wait(
            CHECK_S if deadline is None else min(CHECK_S, max(0.0, deadline - time.monotonic()))
        ):
            self.check_running()
            if deadline is not None and time.monotonic() >= deadline:
                return False
        return True

    def wait_filled(self, doing: str, timeout_s: float | None = None) -> None:
        """Wait until all ranks have read the commit records that the start left for later. After ``timeout_s`` this
        rank waits for no other one, and its coordinator stops."""
        if self.filled.is_set:
            return
        why = "the commit records of earlier checkpoints are being read"
        with self.holds.hold(doing, lambda: why):
            if not self.wait(self.filled, timeout_s):
                self._gives_up.set()

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

    # Reading -----------------------------------------------------------------------------------------

    def list_now(self) -> tuple[Listing, ...]:
        """List every tier now. Copies that lack files are reported to the ledger, and what could not be listed."""
        return self._reported(self.tiers.list_now())

    def list_to_restore(self, request: RestoreRequest) -> tuple[Listing, ...]:
        """List every tier, as ``list_now`` does, for a restore; commit records that it does not need may be left
        out."""
        if request.without:  # what has just been tried and failed may have been deleted
            return self.list_now()
        found = self.tiers.list_now(newest=True)
        if not self.ranks.many and is_first_unread(found, request):  # several ranks agree on it
            return self.list_now()
        return self._reported(found)

    def _reported(self, found: tuple[Listing, ...]) -> tuple[Listing, ...]:
        self.call_soon(partial(self.coordinator.ledger.note_reach, found))
        for listing in found:
            for copy in listing.copies if listing.tier != self.host.name else ():
                if copy.repairable and copy.commit is not None:
                    self._report_damage(listing.tier, copy.id, str(copy.damage), repairable=True)
        return found

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
        found = self.tiers.look(id, {tier} & self.stores.keys())
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
        """Return the checkpoints that this rank found when the present attempt was taken."""
        return merge(self.tiers.listings)

    def begin_attempt(self) -> Attempt:
        """List all tiers and take another attempt, together with the other ranks."""
        self.wait_filled("restore")
        self.tiers.listings = self.list_now()
        self._start = take_attempt(self.tiers, self.attempt)
        return self.attempt

    # Requests ----------------------------------------------------------------------------------------

    def submit(
        self, kind: CommandKind, id: CheckpointId, tag: str = ""
    ) -> dict[str, BaseException]:
        """Send a command to the coordinator, wait for ``max_wait`` at most, and return the error of each tier that
        failed. After that, the command continues in the background."""
        failed = Answer()
        command = Command(kind=kind, id=id, tag=tag, on_answer=failed)
        self.coordinator.post(command)
        if self.wait(failed, self.config.max_wait_s):
            return dict(failed.value)
        waited = f"{self.config.max_wait_s:g} s (max_wait)"
        late = self.call(partial(self.coordinator.decisions.late_tiers, command))
        if failed.is_set:  # since the wait has ended
            return dict(failed.value)
        if not late:
            why = f"something is still being read, written or deleted after {waited}, and it goes on then"
            return {"tierfall": TierfallError(f"{kind}: {id} is noted; {why}")}
        return {tier: UnreachableError(f"no answer within {waited}; it goes on") for tier in late}

    def must_keep_memory(self) -> bool:
        """Return whether host memory has something that no stored tier has, or that one is still owed."""
        return self.call(self._needs_memory)

    def free_memory_at_end(self, timeout_s: float) -> None:
        """Delete the files of host memory, unless something in them is needed or a save is in progress: the process
        ends now."""
        done = InterruptibleEvent()

        def free() -> None:
            entries = self.coordinator.ledger.entries.values()
            try:
                if not (self._needs_memory() or any(e.snapshot is not None for e in entries)):
                    self.tiers.discard_memory()
            except TierfallError as error:
                logger.warning("host memory is not freed: %s", error)
            finally:
                done.set()

        self.call_soon(free)
        self.wait(done, timeout_s)

    def _needs_memory(self) -> bool:
        """See ``must_keep_memory``; on the coordinator's thread."""
        leftovers, ledger = self.leftovers, self.coordinator.ledger
        if self.config.host.on_close is OnClose.KEEP:
            return True
        if any(entry.owed for entry in ledger.entries.values()):
            return True
        stored = [rules.name for rules in ledger.rules if rules.kind not in _IN_MEMORY]
        needed = needed_beside_memory(self)
        durable = [(t, e) for e in needed for t in stored if e.state(t) is CopyState.COMMITTED]
        outdated = {id for tier, entry in durable for id in leftovers.outdated_by(tier, entry)}
        lost = {e.id for e in needed} - {e.id for _, e in durable}
        lost |= {id for id in leftovers.images if not leftovers.durable_on(id)} - outdated
        return bool(lost)

    # The end -----------------------------------------------------------------------------------------

    def close(self, *, keep_memory: bool, timeout_s: float | None = None) -> bool:
        """Stop all threads, abort half-written copies, and close the tiers. Together they have ``timeout_s``, each
        ABANDON_S at least: a call that a tier holds up is left to its thread, for which no program waits at its end.
        Return whether images in memory were kept: also if they are damaged, or may be another start's."""
        if self._closed:
            return True
        keep = True
        timeout_s = self.config.max_wait_s if timeout_s is None else timeout_s
        ends_s = time.monotonic() + timeout_s

        def left_s() -> float:
            return max(ABANDON_S, ends_s - time.monotonic())

        is_held = self.tiers.hold_memory()
        self.status.close()

        def wake() -> None:
            self._gives_up.set()
            self.call_soon(int)

        try:
            stopped = self.workers.stop(wake, timeout_s)
            if stopped:
                self._abort_writers(left_s())
            self.coordinator.stop(
                FlushError(f"the run was closed before this was done; {self._left()}")
            )
            damaged = self.host.holds_damaged()  # the next start reports it, too
            keep = keep_memory or damaged or not is_held  # the images may be another start's
        finally:
            self.journal.close()
            self.callbacks.close(CLOSE_S)
            self._closed = True
            if self._metrics_server is not None:
                self._metrics_server.close()
            try:
                self.tiers.close(keep=keep, timeout_s=left_s())
            finally:
                self.ring.release()
            wait_for_messages()
        return keep

    def _left(self) -> str:
        """Describe what happens to images that are sealed and not flushed."""
        if self.memory.loss:
            return (
                "what has no file in memory is lost unless another tier has it, and the next start or 'tierfall "
                f"drain' finishes the rest: {self.memory.loss}"
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


class Answer(InterruptibleEvent):
    """What the coordinator answers to a request, on its thread: a value, or an error."""

    value: Any = None
    error: BaseException | None = None

    def __call__(self, value: Any, error: BaseException | None = None) -> None:
        self.value, self.error = value, error
        self.set()


class RegionRequest(Answer):
    """A request for a region of host memory, and its answer. It is waited for, or cancelled."""

    def __init__(
        self, session: Session, id: CheckpointId, *, image_bytes: int, records_bytes: int
    ) -> None:
        super().__init__()
        self._session = session
        self._request = AdmissionRequest(
            id=id,
            image_bytes=image_bytes,
            records_bytes=records_bytes,
            deadline_s=time.monotonic() + session.config.max_wait_s,
            on_answer=self,
        )
        session.coordinator.post(self._request)

    def region(self) -> tuple[HostRegion | None, BaseException | None]:
        """Wait for the region, and return it, or None and the reason."""
        try:
            with self._session.holds.hold(f"save of step {self._request.id.step}", self._describe):
                self._session.wait(self)
        except BaseException:  # Ctrl-C, for example
            self.cancel()
            raise
        return self.value, self.error

    def _describe(self) -> str:
        host = self._session.host
        need, room = format_size(self._request.image_bytes), format_size(host.capacity_bytes)
        return (
            f"no room in {host.name} ({room}) for {need}; {self._session.status.describe_flushes()}"
        )

    def cancel(self) -> None:
        """Release the region, if the coordinator has answered; else it drops the request: no other image is evicted for
        it any more."""
        self._request.cancelled.set()
        self._session.call_soon(lambda: self.value and self.value.release())


def _log_error(value: object, error: BaseException | None) -> None:
    if error is not None:
        logger.error("what open or restore has left to the coordinator has failed: %s", error)


def needed_beside_memory(session: Session) -> list[LedgerEntry]:
    """Return the checkpoints that a stored tier must have before memory is freed; none if memory has nothing. These are
    the newest that can be restored, the one that a restart takes because of NaN or Inf in newer ones, and those in
    memory that are pinned, that were set aside, or whose copy on some tier is damaged. On the coordinator's thread."""
    ledger = session.coordinator.ledger
    held = [e for e in ledger.entries.values() if e.state(ledger.host) is CopyState.SEALED]
    if not (held or session.leftovers.images):
        return []
    taken, left = newest_and_first_good(ledger.view().restorable), ledger.abandoned()
    return [ledger.entries[c.id] for c in taken] + [
        e
        for e in held
        if not e.deleted and (e.pinned or (e.id not in left and (e.set_aside or e.damage)))
    ]
