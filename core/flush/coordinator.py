"""The coordinator: it receives events, records them in the ledger, asks the policies and dispatches tasks.

It does no I/O and reads no clock: ``step(now)`` handles the events that have arrived and returns when to call it again.
In production one thread calls it (``worker.Workers``); tests and simulations call it with a virtual clock.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

from tierfall.core.capture.snapshot import (
    CaptureAdvanced,
    CaptureBegun,
    CaptureFailed,
    CaptureSealed,
    HostMemory,
    SaveGivenUp,
)
from tierfall.core.flush.commits import GroupSeals, StartRecords, TierCommits
from tierfall.core.flush.decisions import Decisions
from tierfall.core.flush.deleter import Deleter
from tierfall.core.flush.drain import DrainSchedule
from tierfall.core.flush.external_commits import ExternalCommits
from tierfall.core.flush.facts import Ledger, LedgerEntry
from tierfall.core.flush.flusher import CaptureEvents, Flusher
from tierfall.core.flush.lane import FlushLane, LaneLimits
from tierfall.core.flush.memory import Admissions, LeftoverMemory
from tierfall.core.flush.messages import FoundDamage, Messages
from tierfall.core.flush.replicas import ReplicaAssigner
from tierfall.core.flush.tasks import (
    AbortShard,
    AddDecided,
    AdmissionRequest,
    AssignmentRequest,
    CheckChunk,
    Command,
    CommitCopy,
    CopyRun,
    DeleteCopy,
    Event,
    FinishCopy,
    LedgerQuery,
    OpenCheck,
    OpenShard,
    Outcome,
    ReadDecided,
    StoreCall,
    Task,
    Uploaded,
)
from tierfall.core.flush.throttle import Backlog, Throttle
from tierfall.core.flush.verifier import BackgroundVerifier
from tierfall.core.format.commit_files import files_of
from tierfall.core.format.decided import DecidedList
from tierfall.core.ranks.message_tree import (
    DecisionAnnounced,
    MessagesGathered,
    MessageTree,
    RankReported,
)
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.types import events
from tierfall.core.types.errors import FencedError
from tierfall.core.types.events import Notify, ignore
from tierfall.core.types.values import CheckpointId, SaveOutcome, WhenFull
from tierfall.policies.flush import still_owed

logger = logging.getLogger("tierfall")

LOOKS = (ReadDecided, OpenCheck, CheckChunk)
"""Tasks that change no tier. A wait until all tasks have ended leaves these out."""


class Inbox:
    """The queue of events. Any thread may post events; the coordinator's thread processes them in order. ``stopped`` is
    the error with which all further events are refused."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._received: deque[Event] = deque()
        self._caused: deque[Event] = deque()
        self._processing_thread: int | None = None
        self.stopped: BaseException | None = None

    def post(self, event: Event) -> None:
        """Add an event. An event that the coordinator's thread posts while it handles another one, such as a message to
        its own rank, precedes those that have arrived: a query then sees all effects of earlier events."""
        if self._processing_thread == threading.get_ident():
            self._caused.append(event)
        else:
            self._arrived.put(event)
        if self.stopped is not None:
            self._refuse_all(self.stopped)

    @property
    def is_empty(self) -> bool:
        return not (self._caused or self._received) and self._arrived.empty()

    def wait(self, timeout: float | None) -> None:
        """Block until an event has arrived."""
        try:
            self._received.append(self._arrived.get(timeout=timeout))
        except queue.Empty:
            return

    def take(self) -> Iterator[Event]:
        """Yield the events that have arrived. If the caller fails, ``stop`` refuses the remaining ones."""
        while not self._arrived.empty():
            self._received.append(self._arrived.get_nowait())
        self._processing_thread = threading.get_ident()
        try:
            while events := self._caused or self._received:
                yield events.popleft()
        finally:
            self._processing_thread = None

    def stop(self, error: BaseException) -> None:
        """Refuse all present and future events: callers that wait for an answer receive ``error``."""
        if self.stopped is None:
            self.stopped = error
        self._refuse_all(self.stopped)

    def _refuse_all(self, error: BaseException) -> None:
        # several threads may run this at once
        while True:
            try:
                event = (self._caused or self._received).popleft()
            except IndexError:
                try:
                    event = self._arrived.get_nowait()
                except queue.Empty:
                    return
            refuse = _REFUSALS.get(type(event))
            if refuse is not None:
                refuse(event, error)


class Coordinator:
    """See the module. Any thread may call ``post``; one thread calls everything else."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        lanes: Mapping[str, LaneLimits],
        host: HostMemory,
        submit: Callable[[Task], None],
        max_wait_s: float,
        when_full: WhenFull = WhenFull.WAIT,
        unread: Collection[str] = (),
        decided: Mapping[str, DecidedList] | None = None,
        message_tree: MessageTree | None = None,
        set_pace: Callable[[str, float | None], None] = lambda tier, bytes_per_s: None,
        verify_bytes_per_s: float | None = None,
        notify: Notify = ignore,
        leftovers: LeftoverMemory | None = None,
    ) -> None:
        """``lanes`` are the stored tiers that this process writes to. ``unread`` names the tiers that could not be
        listed when the run was opened, ``decided`` has what the list of each tier had then. ``message_tree`` sends the
        messages of the ranks of ``ledger.group`` (None: this is the only one). ``set_pace`` limits a tier's write rate
        (None: no limit); ``verify_bytes_per_s`` limits background verification per tier (None: no limit)."""
        self.inbox = Inbox()
        self.steps = 0
        self.ledger = ledger
        self.rates = ledger.rates
        self.max_wait_s = max_wait_s
        self.leftovers = leftovers
        self._submit = submit
        self._tasks_out = 0
        self._due_s: float | None = None
        self._idle_events: dict[InterruptibleEvent, bool] = {}
        """By event, whether it waits for copies only, not for other work."""
        self._notify = notify
        self.messages = Messages(message_tree or self._message_tree_of_one())
        self.lanes = {
            tier: FlushLane(tier, limits=limits, coordinator=self) for tier, limits in lanes.items()
        }
        self.deleter = Deleter(self)
        self.verifier = BackgroundVerifier(self, bytes_per_s=verify_bytes_per_s)
        self.backlog = Backlog(self)
        self.throttle = Throttle(self, set_pace=set_pace)
        self.drain_schedule = DrainSchedule(self)
        self.flusher = Flusher(self)
        self.errors = self.flusher.errors
        self.durable = self.flusher.durable
        self.admissions = Admissions(self, host=host, when_full=when_full)
        self.captures = CaptureEvents(self)
        self.copies = TierCommits(self)
        self.seals = GroupSeals(self)
        self.replicas: ReplicaAssigner = self.seals.replicas
        self.decisions: Decisions = Decisions(self, decided=decided or {}, unread=unread)
        self._start_records = StartRecords(self)
        self.external_commits = ExternalCommits(self)

    def _message_tree_of_one(self) -> MessageTree:
        ranks = Ranks.alone()
        ranks.set_listener(self.inbox.post)
        return ranks.message_tree

    # Starting and stopping -------------------------------------------------------------------------

    def start(self) -> None:
        """Determine, from what was found at open, which copies are owed and what is to be deleted."""
        self._note_owed()
        self.decisions.start()

    def begin_anew(self) -> None:
        """This start continues no checkpoint: the rules of the tiers may be applied."""
        self.ledger.has_begun = True

    def post(self, event: Event) -> None:
        self.inbox.post(event)

    def wait_for_event(self, timeout: float | None) -> None:
        """Block until an event has arrived; for the thread that calls ``step`` in production."""
        self.inbox.wait(timeout)

    def stop(self, error: BaseException) -> None:
        """Handle no further event: whoever waits for a result receives ``error``."""
        self.inbox.stop(error)
        error = self.inbox.stopped or error
        for entry in self.ledger.entries.values():
            if entry.handle is not None and (entry.owed or entry.snapshot is not None):
                entry.handle.on_stopped(error)
            entry.owed = frozenset()
        self.replicas.stop()
        self.decisions.fail_all(error)
        self.admissions.fail_all(error)

    def _note_owed(self, only: LedgerEntry | None = None) -> None:
        """Determine which tiers are owed a copy of the checkpoints that were found, or of one of them."""
        view = self.ledger.view()
        # No rank flushes what is scattered; a rank that holds its shard in memory would count it as owed.
        flushed = tuple(c for c in view.checkpoints if c.id not in self.ledger.scattered)
        view = replace(view, checkpoints=flushed)
        for checkpoint in flushed:
            entry = self.ledger.entries[checkpoint.id]
            if only not in (None, entry):
                continue
            commit, own = entry.commit, self.ledger.shard
            if commit and (entry.shard, commit.world_size) == (own, own.world_size):
                owed = still_owed(view, checkpoint)
                entry.owed |= (self.lanes.keys() & owed) - entry.damage.keys()
                self.backlog.on_owed(entry.id, tuple(entry.owed))

    # One step --------------------------------------------------------------------------------------

    def step(self, now_s: float) -> float | None:
        """Handle all events, dispatch all tasks that can begin, and return when to call again at the latest."""
        self.ledger.now_s = now_s
        self._due_s = None
        self.steps += 1
        handled: list[Event] = []
        while not self.inbox.is_empty:  # rank 0 announces its decisions on an event to itself, too
            for event in self.inbox.take():
                handled.append(event)
                _EVENT_HANDLERS[type(event)](self, event)
        has_news = self.admissions.observe(handled)
        self.drain_schedule.tick(now_s)
        for _ in range(2):  # a change by one of them may be what another waits for
            self.decisions.advance(now_s)
            for lane in self.lanes.values():
                self.flusher.drive(lane, now_s, begin=True, has_news=has_news)
            self.admissions.try_admit(now_s)
        for lane in self.lanes.values():  # abort in this step what an admission gave up
            self.flusher.drive(lane, now_s, begin=False)
        self.backlog.tick(now_s)
        self.throttle.adjust(now_s)
        self.copies.tick(now_s)
        self.seals.tick(now_s)
        if self.fenced is None:
            self.deleter.retry(now_s)
            self._collect_unfinished()
            self.verifier.tick(now_s, has_news=has_news)
            if has_news:
                self.deleter.schedule_changed()
            self.deleter.dispatch_planned()
        for bell, copies_only in list(self._idle_events.items()):
            if not (self._owes_copies() if copies_only else self.busy()):
                del self._idle_events[bell]
                bell.set()
        return self._due_s

    def dispatch(self, task: Task) -> None:
        if not isinstance(task, LOOKS):
            self._tasks_out += 1
        self.rates.on_begun(task, self.ledger.now_s)
        self._submit(task)

    def emit(
        self, kind: Callable[..., events.Event], *, reason: object = None, **facts: object
    ) -> None:
        """Emit an event of this step; ``reason`` is a text or an error. Its receiver returns at once."""
        if reason is not None:
            facts["reason"] = str(reason) or repr(reason)
        self._notify(kind(at_s=self.ledger.now_s, **facts))

    def wake_at(self, when_s: float) -> None:
        """Have ``step`` called at that time at the latest. Each step asks anew for what it still waits for."""
        if when_s > self.ledger.now_s and (self._due_s is None or when_s < self._due_s):
            self._due_s = when_s

    def _collect_unfinished(self) -> None:
        """Delete what failed attempts left of copies that are not owed any more."""
        for tier, id in list(self.ledger.unfinished):
            entry = self.ledger.entries.get(id)
            is_owed = entry is not None and tier in entry.owed
            if tier in self.lanes and not is_owed and not self.lanes[tier].is_copying(id):
                self.deleter.collect_unfinished(tier, id, "it was left unfinished")

    # Events ----------------------------------------------------------------------------------------

    def _on_admission_request(self, request: AdmissionRequest) -> None:
        self.backlog.on_save_requested(request.image_bytes, self.ledger.now_s)
        self.admissions.enqueue(request)

    def _on_capture_begun(self, event: CaptureBegun) -> None:
        self.replicas.save_begun(event.snapshot.id)
        self.captures.on_begun(event)

    def _on_capture_sealed(self, event: CaptureSealed) -> None:
        if (entry := self.captures.on_sealed(event)) is not None:
            self.seals.contribute(entry)

    def _on_save_given_up(self, event: SaveGivenUp) -> None:
        """A save ended before its capture began."""
        self.replicas.save_begun(event.id)
        self.messages.report_save_failed(event.id, event.error, event.outcome)

    def _on_query(self, query: LedgerQuery) -> None:
        try:
            value = query.function()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for the answer
            query.on_answer(None, error)
        else:
            query.on_answer(value, None)

    def _on_outcome(self, outcome: Outcome) -> None:
        if not isinstance(outcome.task, LOOKS):
            self._tasks_out -= 1
        self.rates.on_ended(outcome, self.ledger.now_s)
        self.flusher.on_task_error(outcome.error)
        _OUTCOME_HANDLERS[type(outcome.task)](self, outcome)

    def _on_called(self, outcome: Outcome) -> None:
        assert isinstance(outcome.task, StoreCall)
        outcome.task.then(outcome)

    def _on_deleted(self, outcome: Outcome) -> None:
        task, now_s = outcome.task, self.ledger.now_s
        assert isinstance(task, DeleteCopy)
        if self.deleter.on_deleted(task, outcome, now_s):
            self.flusher.on_room_made(self.lanes[task.tier], now_s)
        if isinstance(outcome.value, DecidedList):
            self.decisions.on_found(task.tier, outcome.value)
        self.decisions.on_deleted(task, outcome)

    def _on_copy_outcome(self, outcome: Outcome) -> None:
        task = outcome.task
        assert isinstance(task, OpenShard | CopyRun | FinishCopy | AbortShard)
        lane = self.lanes[task.tier]
        active = lane.active
        done = lane.on_outcome(outcome)
        if done is not None and active is not None:  # this rank's image is on the tier
            entry = active.entry
            self.emit(
                events.FlushDone,
                id=entry.id,
                tier=lane.tier,
                bytes=entry.own_bytes,
                seconds=self.ledger.now_s - lane.began_s,
                sources=dict(lane.sources),
            )
            if isinstance(done, Uploaded):
                self.copies.contribute(lane.tier, entry, done.files)
            else:  # nobody else can have written a save of this start
                files, found = files_of(done, entry.shard), entry.handle is None
                self.copies.contribute(lane.tier, entry, files, found=found)
        elif lane.stalled is not None:
            self.flusher.stalled(lane, lane.stalled, self.ledger.now_s)
        elif isinstance(task, CopyRun) and outcome.error is None and lane.has_resumed():
            self.flusher.on_recovered(lane.tier)

    def on_committed(self, tier: str, entry: LedgerEntry) -> None:
        """A checkpoint was committed on a tier."""
        is_good = tier in entry.verified
        if is_good:
            self.verifier.on_committed(tier)
        self.decisions.on_committed(tier)
        if self.ledger.group.decides and self.fenced is None:
            self._start_records.committed(tier, entry.commit)
        if self.leftovers is not None and is_good and not self.ledger.restoring:
            self.leftovers.on_committed(tier, entry)

    def on_external_commit(self, tier: str, entry: LedgerEntry) -> None:
        """A checkpoint that another process committed on a tier was added to the ledger."""
        if self.fenced is None:
            self._note_owed(entry)
        self.deleter.schedule_plan(tier)
        self.on_committed(tier, entry)

    # Requests on the coordinator's thread, by ``LedgerQuery`` ----------------------------------------

    @property
    def fenced(self) -> FencedError | None:
        """The error that reports a newer attempt: this process writes nothing more."""
        return self.ledger.fenced

    def found_damage(
        self, tier: str, id: CheckpointId, why: str, *, repairable: bool = True
    ) -> None:
        """A reader of this rank found that a copy differs from its digests or lacks files. Not ``repairable``: its
        commit record is gone, too."""
        if tier == self.ledger.host:
            self.captures.on_damage_found(id, why)
        else:
            self.messages.report(FoundDamage(text=why, repairable=repairable), id, tier)

    def try_again(self) -> None:
        """Try at once whatever waits for its next try: a tier may work again."""
        for lane in self.lanes.values():
            lane.not_before_s = min(lane.not_before_s, self.ledger.now_s)
        self.copies.try_now()
        self.deleter.try_now()

    def owe_to_all_tiers(self, id: CheckpointId) -> None:
        """Owe a checkpoint that this process saved to every tier that has no copy of it and has not set it aside or
        given it up, whatever ``flush.every`` says."""
        entry = self.ledger.entries.get(id)
        if entry is None or entry.failed or entry.deleted or self.fenced is not None:
            return
        is_here = entry.awaiting_ranks or entry.readable_on(self.ledger.host)
        if entry.snapshot is None and not is_here:
            return
        has_copy = entry.states.keys() | entry.damage.keys() | entry.set_aside.keys()
        given_up = {tier for tier in self.lanes if self.copies.has_given_up(tier, id)}
        entry.owed |= self.lanes.keys() - has_copy - given_up

    def set_when_idle(self, bell: InterruptibleEvent, *, copies_only: bool = False) -> None:
        """Set an event once no work is in progress and every copy that can be made is made; ``copies_only``: other
        work, such as a deletion, does not count."""
        self._idle_events[bell] = copies_only

    def forget_idle_event(self, bell: InterruptibleEvent) -> None:
        self._idle_events.pop(bell, None)

    def busy(self) -> bool:
        """Return whether work is in progress, or a copy is owed to a tier that accepts copies and may begin."""
        if self._tasks_out or self.decisions.busy() or self.deleter.busy():
            return True
        return self._owes_copies()

    def _owes_copies(self) -> bool:
        if self.admissions.busy() or not self.inbox.is_empty:
            return True
        return any(e.snapshot is not None or self._may_be_copied(e) for e in self.ledger.open())

    def _may_be_copied(self, entry: LedgerEntry) -> bool:
        """Return whether some tier may receive a copy now; before a deadline, also one that accepts none at present."""
        owed: Set[str] = entry.owed
        if not self.ledger.deadlines:
            owed = owed - self.ledger.failing.keys()
        return any(not self.drain_schedule.is_held_back(entry.id, tier) for tier in owed)

    def owed_copies(self) -> tuple[tuple[CheckpointId, str], ...]:
        """Return the copies that are owed, in the order of their saves."""
        entries = sorted(self.ledger.open(), key=lambda e: e.age_order)
        return tuple((e.id, tier) for e in entries for tier in sorted(e.owed))

    def set_aside_copies(self) -> tuple[tuple[CheckpointId, str], ...]:
        """Return the copies that only the next start tries again."""
        entries = sorted(self.ledger.open(), key=lambda e: e.age_order)
        return tuple((e.id, tier) for e in entries for tier in sorted(e.set_aside))


def _refuse_save(event: CaptureBegun, error: BaseException) -> None:
    event.snapshot.handle.on_given_up(SaveOutcome.FAILED, error)


_REFUSALS: dict[type[Any], Callable[[Any, BaseException], None]] = {
    CaptureBegun: _refuse_save,
    AdmissionRequest: lambda request, error: request.on_answer(None, error),
    LedgerQuery: lambda query, error: query.on_answer(None, error),
    Command: lambda command, error: command.on_answer({"tierfall": error}),
    AssignmentRequest: lambda request, error: request.on_answer(None),
}
"""How an event of each type is refused. For other types no caller waits, and they are discarded: what a copy has left
on a tier, the next start collects."""

_EVENT_HANDLERS: dict[type[Any], Callable[[Coordinator, Any], None]] = {
    AdmissionRequest: Coordinator._on_admission_request,
    AssignmentRequest: lambda coordinator, event: coordinator.replicas.request(event),
    CaptureBegun: Coordinator._on_capture_begun,
    CaptureAdvanced: lambda coordinator, event: coordinator.captures.on_advanced(event),
    CaptureSealed: Coordinator._on_capture_sealed,
    CaptureFailed: lambda coordinator, event: coordinator.captures.on_failed(event),
    SaveGivenUp: Coordinator._on_save_given_up,
    Command: lambda coordinator, event: coordinator.decisions.submit(event),
    LedgerQuery: Coordinator._on_query,
    Outcome: Coordinator._on_outcome,
    MessagesGathered: lambda coordinator, news: coordinator.messages.on_message(news),
    DecisionAnnounced: lambda coordinator, news: coordinator.messages.on_message(news),
    RankReported: lambda coordinator, news: coordinator.messages.on_message(news),
}

_OUTCOME_HANDLERS: dict[type[Any], Callable[[Coordinator, Outcome], None]] = {
    OpenShard: Coordinator._on_copy_outcome,
    CopyRun: Coordinator._on_copy_outcome,
    FinishCopy: Coordinator._on_copy_outcome,
    AbortShard: Coordinator._on_copy_outcome,
    CommitCopy: lambda coordinator, outcome: coordinator.copies.on_outcome(outcome),
    DeleteCopy: Coordinator._on_deleted,
    AddDecided: lambda coordinator, outcome: coordinator.decisions.on_added(outcome),
    StoreCall: Coordinator._on_called,
    ReadDecided: lambda coordinator, outcome: coordinator.decisions.on_read(outcome),
    OpenCheck: lambda coordinator, outcome: coordinator.verifier.on_outcome(outcome),
    CheckChunk: lambda coordinator, outcome: coordinator.verifier.on_outcome(outcome),
}
"""What handles an event, and the outcome of a task, of a type."""
