"""The coordinator: it receives events, records them in the ledger, asks the policies and dispatches tasks.

It does no I/O and reads no clock: ``step(now)`` handles the events that have arrived and returns when to call it again.
In production one thread calls it (``workers``); tests and simulations call it with a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from tierfall.core.capture.snapshot import (
    CaptureAdvanced,
    CaptureBegun,
    CaptureFailed,
    CaptureSealed,
    SaveGivenUp,
)
from tierfall.core.format.commit_files import files_of
from tierfall.core.format.records import Commit
from tierfall.core.ranks.message_tree import (
    DecisionAnnounced,
    MessagesGathered,
    RankMessage,
    RankReported,
)
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.scheduler.components import LOOKS, Components
from tierfall.core.scheduler.flush.lane import FlushLane
from tierfall.core.scheduler.group.messages import kind_of
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.tasks import (
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
    NoteDamage,
    OpenCheck,
    OpenShard,
    Outcome,
    ReadCommit,
    ReadDecided,
    RecordStart,
    Uploaded,
)
from tierfall.core.types.values import CheckpointId
from tierfall.core.types.view import DrainDecision


class Coordinator(Components):
    """See the module. Any thread may call ``post``; one thread calls everything else."""

    # Starting and stopping -------------------------------------------------------------------------

    def start(self) -> None:
        """Determine, from what was found at open, which copies are owed and what is to be deleted."""
        self._note_owed()
        self._decisions.start()

    def late_tiers(self, command: Command) -> tuple[str, ...]:
        """Return the tiers whose answer a command waits for; none if something is still being read or written."""
        return self._decisions.late_tiers(command)

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
            entry.owed.clear()
        self.commits.replicas.stop()
        self._decisions.fail_all(error)
        self._admissions.fail_all(error)

    # One step --------------------------------------------------------------------------------------

    def step(self, now_s: float) -> float | None:
        """Handle all events, dispatch all tasks that can begin, and return when to call again at the latest."""
        self.ledger.now_s = self.emitter.now_s = now_s
        self.ledger.refresh()
        self.steps += 1
        handled: list[Event] = []
        while (
            not self.inbox.is_empty
        ):  # what rank 0 decides by an event is a message to itself, too
            for event in self.inbox.take():
                handled.append(event)
                _EVENT_HANDLERS[type(event)](self, event)
        has_news = self._admissions.observe(handled)
        self.drain_schedule.tick(now_s)
        for _ in range(2):  # a change by one of them may be what another waits for
            self._decisions.advance(now_s)
            for lane in self.lanes.values():
                self._flusher.drive(lane, now_s, begin=True, has_news=has_news)
            self._admissions.try_admit(now_s, self.fenced)
        for lane in self.lanes.values():  # abort in this step what an admission gave up
            self._flusher.drive(lane, now_s, begin=False)
        self.backlog.tick(now_s)
        self.throttle.adjust(now_s)
        self.commits.tick(now_s)
        if self.fenced is None:
            self.deleter.retry(now_s)
            self._collect_unfinished()
            self.verifier.tick(now_s, has_news=has_news)
            if has_news:
                self.deleter.plan_changed()
            self.deleter.dispatch_planned()
        for bell, copies_only in list(self._idle_events.items()):
            if not (self._owes_copies() if copies_only else self.busy()):
                del self._idle_events[bell]
                bell.set()
        return self._next_s(now_s)

    def _next_s(self, now_s: float) -> float | None:
        times = self._admissions.deadlines_s()
        times += [lane.not_before_s for lane in self.lanes.values() if lane.not_before_s > now_s]
        retries = [self.deleter.next_s(), self._decisions.next_s(), self.backlog.next_s(now_s)]
        retries += [
            self.throttle.next_s(now_s),
            self.drain_schedule.next_s(),
            self.verifier.next_s(now_s),
            self.commits.next_s(now_s),
        ]
        return min([*times, *(when for when in retries if when is not None)], default=None)

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
        self._admissions.enqueue(request)

    def _on_assignment_request(self, request: AssignmentRequest) -> None:
        self.commits.replicas.request(request)

    def _on_command(self, command: Command) -> None:
        self._decisions.submit(command)

    def _on_message(self, news: RankMessage) -> None:
        """Pass a message of another rank to the component that it is for."""
        self._listeners.get(kind_of(news), self.commits.on_message)(news)

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
        self._flusher.on_task_error(outcome.error)
        _OUTCOME_HANDLERS[type(outcome.task)](self, outcome)

    # Outcomes --------------------------------------------------------------------------------------

    def _on_deleted(self, outcome: Outcome) -> None:
        task, now_s = outcome.task, self.ledger.now_s
        assert isinstance(task, DeleteCopy)
        if self.deleter.on_deleted(task, outcome, now_s):
            self._flusher.on_room_made(self.lanes[task.tier], now_s)
        self._decisions.on_deleted(task, outcome)

    def _on_commit_outcome(self, outcome: Outcome) -> None:
        self.commits.on_outcome(outcome)

    def _on_copy_outcome(self, outcome: Outcome) -> None:
        task = outcome.task
        assert isinstance(task, OpenShard | CopyRun | FinishCopy | AbortShard)
        lane = self.lanes[task.tier]
        active = lane.active
        done = lane.on_outcome(outcome)
        if done is not None and active is not None:
            self._on_copied(lane, active.entry, done)
        elif lane.stalled is not None:
            self._flusher.stalled(lane, lane.stalled, self.ledger.now_s)
        elif isinstance(task, CopyRun) and outcome.error is None and lane.has_resumed():
            self._flusher.on_recovered(lane.tier)

    def _on_copied(self, lane: FlushLane, entry: LedgerEntry, done: Commit | Uploaded) -> None:
        """This rank's image is on a tier."""
        self.emitter.flush_done(lane.tier, entry, lane.edge_bytes)
        files = done.files if isinstance(done, Uploaded) else files_of(done, entry.shard)
        self.commits.on_uploaded(lane.tier, entry, files)

    # Requests on the coordinator's thread, by ``LedgerQuery`` ----------------------------------------

    def begin_drain(self, asker: object, until_s: float) -> tuple[DrainDecision, ...]:
        """Work towards a deadline on the clock of ``step``, until ``asker`` ends it; return the outlook."""
        return self.drain_schedule.begin(asker, until_s, self.ledger.now_s)

    def share_deadline(self, left_s: float) -> None:
        """Let all ranks work towards a deadline that only this rank knows."""
        self.commits.share_deadline(left_s)

    def owe_to_all_tiers(self, id: CheckpointId) -> None:
        """Owe every tier a copy of a checkpoint that this process saved, whatever ``flush.every`` says."""
        entry = self.ledger.entries.get(id)
        if entry is None or entry.failed or entry.deleted or self.fenced is not None:
            return
        is_here = entry.awaiting_ranks or entry.readable_on(self.ledger.host)
        if entry.snapshot is None and not is_here:
            return
        has_copy = entry.states.keys() | entry.damage.keys() | entry.set_aside.keys()
        entry.owed.update(
            tier
            for tier in self.lanes
            if tier not in has_copy and not self.commits.has_given_up(tier, id)
        )

    def set_when_idle(self, bell: InterruptibleEvent, *, copies_only: bool = False) -> None:
        """Set an event once no work is in progress and every copy that can be made is made; ``copies_only``: whatever
        else is in progress, such as a deletion."""
        self._idle_events[bell] = copies_only

    def forget_idle_event(self, bell: InterruptibleEvent) -> None:
        self._idle_events.pop(bell, None)

    def busy(self) -> bool:
        """Return whether work is in progress, or a copy is owed to a tier that accepts copies and may begin."""
        if self._tasks_out or self._decisions.busy() or self.deleter.busy():
            return True
        return self._owes_copies()

    def _owes_copies(self) -> bool:
        if self._admissions.busy() or not self.inbox.is_empty:
            return True
        return any(e.snapshot is not None or self._may_be_copied(e) for e in self.ledger.open())

    def _may_be_copied(self, entry: LedgerEntry) -> bool:
        """Return whether some tier may receive a copy now; before a deadline, also one that accepts none at present."""
        owed: Set[str] = entry.owed
        if not self.drain_schedule.has_deadline:
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


_EVENT_HANDLERS: dict[type[Any], Callable[[Coordinator, Any], None]] = {
    AdmissionRequest: Coordinator._on_admission_request,
    AssignmentRequest: Coordinator._on_assignment_request,
    CaptureBegun: lambda coordinator, event: coordinator._capture_events.on_begun(event),
    CaptureAdvanced: lambda coordinator, event: coordinator._capture_events.on_advanced(event),
    CaptureSealed: lambda coordinator, event: coordinator._capture_events.on_sealed(event),
    CaptureFailed: lambda coordinator, event: coordinator._capture_events.on_failed(event),
    SaveGivenUp: lambda coordinator, event: coordinator._capture_events.on_not_begun(event),
    Command: Coordinator._on_command,
    LedgerQuery: Coordinator._on_query,
    Outcome: Coordinator._on_outcome,
    MessagesGathered: Coordinator._on_message,
    DecisionAnnounced: Coordinator._on_message,
    RankReported: Coordinator._on_message,
}

_OUTCOME_HANDLERS: dict[type[Any], Callable[[Coordinator, Outcome], None]] = {
    OpenShard: Coordinator._on_copy_outcome,
    CopyRun: Coordinator._on_copy_outcome,
    FinishCopy: Coordinator._on_copy_outcome,
    AbortShard: Coordinator._on_copy_outcome,
    CommitCopy: Coordinator._on_commit_outcome,
    DeleteCopy: Coordinator._on_deleted,
    AddDecided: lambda coordinator, outcome: coordinator._decisions.on_added(outcome),
    NoteDamage: lambda coordinator, outcome: coordinator.damage_reports.on_noted(outcome),
    ReadDecided: lambda coordinator, outcome: coordinator._decisions.on_read(outcome),
    ReadCommit: lambda coordinator, outcome: coordinator.external_commits.on_outcome(outcome),
    RecordStart: lambda coordinator, outcome: coordinator.start_records.on_outcome(outcome),
    OpenCheck: lambda coordinator, outcome: coordinator.verifier.on_outcome(outcome),
    CheckChunk: lambda coordinator, outcome: coordinator.verifier.on_outcome(outcome),
}
