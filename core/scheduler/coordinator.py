"""The coordinator: takes events, keeps the ledger, asks the policies, and says what is to be done.

It does no I/O and reads no clock: ``step(now)`` takes what has happened since and returns when it wants to be called
next. In production one thread calls it (``workers``); tests and simulations call it with a virtual clock.
"""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

from tierfall.core.capture.events import (
    CaptureAdvanced,
    CaptureBegun,
    CaptureFailed,
    CaptureSealed,
    SaveGivenUp,
)
from tierfall.core.capture.snapshot import HostMemory
from tierfall.core.format.commit_files import files_of
from tierfall.core.format.records import Commit, stops_drop
from tierfall.core.ranks.message_tree import MessageTree
from tierfall.core.ranks.ranks import DecisionAnnounced, MessagesGathered, RankMessage, RankReported
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.deletion.verifier import BackgroundVerifier
from tierfall.core.scheduler.flush.admission import Admissions
from tierfall.core.scheduler.flush.backlog import Backlog
from tierfall.core.scheduler.flush.deadline import DrainSchedule
from tierfall.core.scheduler.flush.flusher import Flusher
from tierfall.core.scheduler.flush.lane import FlushLane, LaneLimits
from tierfall.core.scheduler.flush.queue import FlushQueue
from tierfall.core.scheduler.flush.saves import CaptureEvents
from tierfall.core.scheduler.flush.superseding import Superseder
from tierfall.core.scheduler.flush.throttle import Throttle
from tierfall.core.scheduler.flush.throughput import TierThroughput
from tierfall.core.scheduler.group.commands import Commands
from tierfall.core.scheduler.group.commits import Commits
from tierfall.core.scheduler.group.damage import DamageReports
from tierfall.core.scheduler.group.external_commits import ExternalCommits
from tierfall.core.scheduler.group.group_commands import GroupCommands, NodeMarks
from tierfall.core.scheduler.ledger.attempt_starts import StartRecords
from tierfall.core.scheduler.ledger.ledger import Ledger, LedgerEntry
from tierfall.core.scheduler.ledger.notes import EventEmitter
from tierfall.core.scheduler.ledger.tasks import (
    AbortShard,
    AdmissionRequest,
    AssignmentRequest,
    ChangeMark,
    CheckChunk,
    Command,
    CommandKind,
    CommitCopy,
    CopyRun,
    DeleteCopy,
    Event,
    FinishCopy,
    LedgerQuery,
    OpenCheck,
    OpenShard,
    Outcome,
    ReadCommit,
    ReadMarks,
    RecordStart,
    Task,
    Uploaded,
)
from tierfall.core.scheduler.policies import Policies
from tierfall.core.types.drain_outlook import DrainDecision
from tierfall.core.types.errors import BackendError, FencedError, StepError
from tierfall.core.types.events import Notify, ignore
from tierfall.core.types.values import CheckpointId, SaveOutcome, WhenFull

logger = logging.getLogger("tierfall")


class LeftoverMemory(Protocol):
    """Memory that ranks of an earlier start left."""

    def committed(self, tier: str, newer: LedgerEntry) -> None: ...

    def make_room(self) -> bool: ...


class Coordinator:
    """See the module. ``post`` may be called from any thread, everything else from one."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        lanes: Mapping[str, LaneLimits],
        host: HostMemory,
        policies: Policies,
        submit: Callable[[Task], None],
        max_wait_s: float,
        when_full: WhenFull = WhenFull.WAIT,
        unread: Collection[str] = (),
        council: MessageTree | None = None,
        shared: Mapping[str, bool] | None = None,
        set_pace: Callable[[str, float | None], None] = lambda tier, bytes_per_s: None,
        verify_bytes_per_s: float | None = None,
        notify: Notify = ignore,
    ) -> None:
        """``unread`` names the tiers that could not be looked at when the run was opened. With other ranks, they are
        reached by ``council``, and ``shared`` says of each tier whether all of them see it. ``set_pace`` has
        a tier be written at so many bytes per second from now on (None: at any); ``verify_bytes_per_s`` is how much of
        a tier is read, in the background, to verify what lies there; ``notify`` is told of each event."""
        self.ledger = ledger
        self._policies = policies
        self._submit = submit
        self._max_wait_s = max_wait_s
        self._arrived: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._events: deque[Event] = deque()
        self._tasks_out = 0
        self.rates = TierThroughput()
        ledger.read_rates = self.rates.read_rates
        self.steps = 0
        self._idle_bells: list[InterruptibleEvent] = []
        self._tending = False
        order = tuple(rules.name for rules in ledger.rules)
        self.lanes = {
            tier: FlushLane(
                tier,
                limits=limits,
                order=order,
                host=ledger.host,
                submit=self._dispatch,
            )
            for tier, limits in lanes.items()
        }
        self.dropper = Deleter(
            ledger=ledger,
            tiers=self.lanes,
            plan_drops=policies.plan_drops,
            keeps_all_live=policies.keeps_all_live,
            next_due_s=policies.next_due_s,
            missing_metrics=policies.missing_metrics,
            dispatch=self._dispatch,
        )
        self.turns = FlushQueue(ledger=ledger, plan_flush=policies.plan_flush)
        self.draining = DrainSchedule(
            ledger=ledger, lanes=self.lanes, rates=self.rates, plan_drain=policies.plan_drain
        )
        self.turns.draining = self.draining
        self._flusher = Flusher(
            ledger=ledger,
            lanes=self.lanes,
            dropper=self.dropper,
            turns=self.turns,
            plan_eviction=policies.plan_eviction,
            plan_relief=policies.plan_relief,
            max_wait_s=max_wait_s,
        )
        self.superseder = Superseder(
            ledger=ledger,
            lanes=self.lanes,
            dropper=self.dropper,
            plan_superseding=policies.plan_superseding,
        )
        self.pressure = Backlog(
            ledger=ledger, rates=self.rates, foresee=policies.forecast, lateness=policies.lateness
        )
        self.pacing = Throttle(
            rules=ledger.rules,
            rates=self.rates,
            pressure=self.pressure,
            plan_yield=policies.plan_yield,
            least_share=policies.least_share,
            set_pace=set_pace,
        )
        self._admissions = Admissions(
            ledger=ledger,
            host=host,
            plan_eviction=policies.plan_eviction,
            give_up_copy=self._flusher.give_up_for_all,
            superseder=self.superseder,
            when_full=when_full,
            max_wait_s=max_wait_s,
        )
        self._saves = CaptureEvents(
            ledger=ledger, lanes=self.lanes, flusher=self._flusher, pressure=self.pressure
        )
        self.commits: Commits | None = None
        self._marks: NodeMarks | None = None
        if council is not None:
            self._join(council, shared or {})
        self._orders = self._make_orders(council, unread)
        self.verifier = BackgroundVerifier(
            ledger=ledger,
            council=council,
            is_split=self.dropper.is_split,
            dispatch=self._dispatch,
            bytes_per_s=verify_bytes_per_s,
            waits=lambda: self.dropper.paused or self.draining.active,
            changed=lambda tier: self.dropper.survey_all(),
            is_damaged=lambda tier, id, why: self.damages.found(tier, id, why),
        )
        self.dropper.verifies = self.verifier.verify
        self.dropper.verifies_elsewhere = self.verifier.verify_elsewhere
        self.starts = StartRecords(ledger=ledger, tiers=self.lanes, dispatch=self._dispatch)
        self.finder = ExternalCommits(
            ledger=ledger, council=council, found=self._has_found, dispatch=self._dispatch
        )
        self.damages = DamageReports(
            ledger=ledger,
            tiers=self.lanes,
            needs_repair=policies.needs_repair,
            has_lost=self.dropper.survey,
            may_write=lambda: self.fenced is None and not self._tending,
            dispatch=self._dispatch,
            council=council,
            commits=self.commits,
        )
        self.dropper.found_damage = self.damages.found
        for lane in self.lanes.values():
            lane.found_damage = self.damages.found
        self._flusher.has_committed = self._has_committed
        self.dropper.delete = self._orders.finish_deletion
        self.dropper.was_deleted = self._orders.was_deleted
        self.pacing.hurries = lambda: self._admissions.is_short() or self.draining.hurries
        self.draining.share_of = lambda tier: self.pacing.shares.get(tier, 1.0)
        self._admissions.answered = self.pressure.answered
        self._flusher.has_arrived = self.pressure.arrived
        self._flusher.memory_is_short = self._admissions.is_short
        self._flusher.is_unpinning = self._orders.is_unpinning
        self.notes = EventEmitter(notify)
        taking_notes = (self.dropper, self._flusher, self.turns, self.superseder)
        for part in (*taking_notes, self._admissions, self._saves):
            part.notes = self.notes
        self.errors = self._flusher.errors
        self.counters = self._flusher.counters
        self.durable = self._flusher.durable
        self.stopped: BaseException | None = None

    def mind(self, inheritance: LeftoverMemory) -> None:
        """Let what earlier ranks left in memory go once it is not needed: it hears of every commit, unless a restore is
        reading, and gives room where a save finds none."""

        def committed(tier: str, entry: LedgerEntry) -> None:
            self._has_committed(tier, entry)
            if not self.dropper.paused:
                inheritance.committed(tier, entry)

        self._flusher.has_committed = committed
        self._admissions.last_resort = inheritance.make_room

    def _has_committed(self, tier: str, entry: LedgerEntry) -> None:
        """A copy is there, from which a damaged one on another tier may be written anew."""
        if self._flusher.others.decides and self.fenced is None and not self._tending:
            self.starts.committed(tier, entry.commit)
        if entry.repairable:
            self.damages.plan_repairs(entry)

    def _join(self, council: MessageTree, shared: Mapping[str, bool]) -> None:
        """Decide together with the other ranks from now on: each part that decided alone asks them."""
        self.commits = Commits(
            council=council,
            ledger=self.ledger,
            shared=shared,
            flusher=self._flusher,
            dropper=self.dropper,
            give_up_save=self._saves.give_up,
            dispatch=self._dispatch,
            max_wait_s=self._max_wait_s,
        )
        parts = (self._flusher, self.turns, self._saves, self.superseder)
        for part in (*parts, self.pressure, self.draining):
            part.others = self.commits
        self.commits.wants_drain = self._on_drain_of_rank
        self.commits.drains = self._on_drain_of_rank_0
        for lane in self.lanes.values():
            lane.land_only = True
        self._marks = NodeMarks(
            council=council, shared=shared, dropper=self.dropper, dispatch=self._dispatch
        )
        self.dropper.plans = self.commits.decides
        self.dropper.has_dropped = self.commits.has_dropped
        self.dropper.read_marks = self._marks.read
        self.dropper.asks_first = self._marks.asks_first
        self.dropper.is_split = self._marks.is_split
        self.dropper.alone = False

    def _make_orders(self, council: MessageTree | None, unread: Collection[str]) -> Commands:
        alone: dict[str, Any] = {
            "ledger": self.ledger,
            "lanes": self.lanes.values(),
            "dropper": self.dropper,
            "free_region": self._admissions.free,
            "dispatch": self._dispatch,
            "unread": unread,
        }
        if council is None or self.commits is None:
            return Commands(**alone)
        return GroupCommands(council=council, commits=self.commits, **alone)

    @property
    def fenced(self) -> FencedError | None:
        """What says that a newer attempt exists: nothing more is written by this process."""
        return self._flusher.fenced

    # Being told ------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        self._arrived.put(event)
        if self.stopped is not None:
            self._refuse_arrived()

    def stop(self, error: BaseException) -> None:
        """No event is taken any more: whoever waits for something is told ``error``."""
        if self.stopped is None:
            self.stopped = error
        for entry in self.ledger.entries.values():
            if entry.handle is not None and (entry.owed or entry.snapshot is not None):
                entry.handle.tell_stopped(self.stopped)
            entry.owed.clear()
        if self.commits is not None:
            self.commits.divider.stop()
        self._orders.answer_all(self.stopped)
        self._admissions.answer_all(self.stopped)
        self._refuse_arrived()

    def _refuse_arrived(self) -> None:
        """Answer what nobody will carry out; a writer that was opened meanwhile is closed."""
        assert self.stopped is not None
        while True:
            try:
                event = self._events.popleft()
            except IndexError:
                try:
                    event = self._arrived.get_nowait()
                except queue.Empty:
                    return
            match event:
                case CaptureBegun():
                    event.snapshot.handle.tell_given_up(SaveOutcome.FAILED, self.stopped)
                case AdmissionRequest() | LedgerQuery():
                    event.answer(None, self.stopped)
                case Command():
                    event.answer({"tierfall": self.stopped})
                case AssignmentRequest():
                    event.answer(None)
                case Outcome(task=OpenShard(), error=None, value=(writer, _)) if writer is not None:
                    try:
                        writer.abort()
                    except BackendError as error:
                        logger.warning("%s: a leftover stays: %s", event.task.tier, error)

    def wait_for_event(self, timeout: float | None) -> None:
        """Block until an event is there; for the thread that calls ``step`` in production."""
        try:
            self._events.append(self._arrived.get(timeout=timeout))
        except queue.Empty:
            return

    def start(self) -> None:
        """Work out, from what was found at open, which copies are owed and what is to be collected."""
        self._note_owed()
        self.damages.plan_repairs()
        self._finish_deletions()
        self.dropper.survey_all()

    def start_tending(self) -> None:
        """Begin as a process without an attempt: carry out orders, but copy nothing and collect nothing.

        What is owed is known nevertheless: a copy that another tier still waits for must not be dropped.
        """
        self._tending = True
        self._note_owed()
        self._finish_deletions()

    def _finish_deletions(self) -> None:
        """What a person deleted while nobody lived to carry it out goes now."""
        if self.commits is not None and not self.commits.decides:
            return  # rank 0 knows of all tombstones
        found = {e.id for e in self.ledger.entries.values() if e.tombstoned and not e.pinned}
        for id in sorted(found | self.ledger.deleted):
            self._orders.finish_deletion(id)

    def _collect_unfinished(self) -> None:
        """Remove what is left of copies that were never committed and are not owed any more."""
        for tier, id in list(self.ledger.unfinished) if not self._tending else ():
            found = self.ledger.entries.get(id)
            wanted = found is not None and tier in found.owed
            if tier in self.lanes and not wanted and not self.lanes[tier].is_at(id):
                self._flusher.collect(tier, id, "it was left unfinished")

    def _note_owed(self, only: LedgerEntry | None = None) -> None:
        """Work out what is owed of checkpoints that were found, or of one of them."""
        # nobody flushes what is scattered, and a rank that has its part in memory would take it for one to come
        view, left_out = self.ledger.view(), self.ledger.scattered
        view = replace(view, checkpoints=tuple(c for c in view.checkpoints if c.id not in left_out))
        for checkpoint in view.checkpoints:
            entry = self.ledger.entries[checkpoint.id]
            ours = entry.shard == self.ledger.shard or entry.parts is not None
            if only in (None, entry) and entry.commit is not None and (ours or self._tending):
                pinned = checkpoint.pinned or checkpoint.id in self.ledger.found_pinned
                owed = self._policies.still_owed(view, replace(checkpoint, pinned=pinned))
                entry.owed.update(
                    name for name in owed if name in self.lanes and name not in entry.damage
                )
                self.pressure.found(entry.id, tuple(entry.owed))

    def _has_found(self, entry: LedgerEntry, tier: str) -> None:
        """A checkpoint is there that another process wrote."""
        if self.fenced is None:
            self._note_owed(entry)
        self.dropper.survey_found(tier, entry.id)
        self._flusher.has_committed(tier, entry)

    def step(self, now_s: float) -> float | None:
        """Take all events, dispatch all that can be done, and return when to be called again at the latest."""
        self.ledger.now_s = self.notes.now_s = now_s
        self.ledger.settle()
        self.steps += 1
        while not self._arrived.empty():
            self._events.append(self._arrived.get_nowait())
        took: list[Event] = []
        while self._events:
            took.append(self._events.popleft())
            self._on_event(took[-1], now_s)
        self._admissions.note(took)
        self.draining.tick(now_s)
        for _ in range(2):  # what one of them changes may be what another has waited for
            self._orders.carry_out(now_s)
            for lane in self.lanes.values():
                self._flusher.drive(lane, now_s, begin=not self._tending)
            self._admissions.admit(now_s, self.fenced)
        for lane in self.lanes.values():  # what was given up for a save just now is aborted now
            self._flusher.drive(lane, now_s, begin=False)
        self.pressure.tick(now_s)
        self.pacing.adjust(now_s)
        if self.commits is not None:
            self.commits.tick(now_s)
        if self.fenced is None:
            self.dropper.retry(now_s)
            self._collect_unfinished()
            self.verifier.tick(now_s)
            self.dropper.dispatch_surveys()
        if self._idle_bells and not self.busy():
            while self._idle_bells:
                self._idle_bells.pop().ring()
        return self._next_s(now_s)

    def ring_when_idle(self, bell: InterruptibleEvent) -> None:
        """Ring once nothing is under way, and nothing is owed that can be had."""
        self._idle_bells.append(bell)

    def forget(self, bell: InterruptibleEvent) -> None:
        if bell in self._idle_bells:
            self._idle_bells.remove(bell)

    # Events ----------------------------------------------------------------------------------------

    def _on_event(self, event: Event, now_s: float) -> None:
        match event:
            case AdmissionRequest():
                self.pressure.asked(event.image_bytes, now_s)
                self._admissions.ask(event)
            case (
                CaptureBegun()
                | CaptureAdvanced()
                | CaptureSealed()
                | CaptureFailed()
                | SaveGivenUp()
            ):
                self._saves.take(event)
            case Command():
                if event.kind is CommandKind.DELETE:
                    self.pressure.gone(event.id)
                self._orders.give(event)
            case MessagesGathered() | DecisionAnnounced() | RankReported():
                self._on_message(event)
            case AssignmentRequest():
                assert self.commits is not None
                self.commits.divider.ask(event)
            case LedgerQuery():
                self._answer_query(event)
            case Outcome():
                self._tasks_out -= 1
                self.rates.ended(event, now_s)
                self._flusher.note_fence(event.error)
                self._on_outcome(event, now_s)

    def _on_message(self, news: RankMessage) -> None:
        """Other ranks have said something."""
        if isinstance(self._orders, GroupCommands) and self._orders.is_about(news):
            self._orders.hear(news)
        elif self.verifier.is_about(news):
            self.verifier.hear(news)
        elif self.damages.is_about(news):
            self.damages.hear(news)
        elif self.finder.is_about(news):
            self.finder.hear(news)
        elif self._marks is not None and self._marks.is_about(news):
            self._marks.hear(news)
        elif self.commits is not None:
            self.commits.hear(news)

    def _answer_query(self, event: LedgerQuery) -> None:
        try:
            value = event.function()
        except BaseException as error:  # noqa: BLE001 - handed to the asking thread as it is
            event.answer(None, error)
        else:
            event.answer(value, None)

    def _on_outcome(self, outcome: Outcome, now_s: float) -> None:
        match outcome.task:
            case DeleteCopy() as task:
                if self.dropper.take_dropped(task, outcome, now_s):
                    self._flusher.room_was_made(self.lanes[task.tier], now_s)
                self._orders.done(task.tier, task.id, _why_not_deleted(task, outcome))
            case ReadMarks() as task:
                take = self.dropper.take_marks if self._marks is None else self._marks.took
                take(task, outcome)
            case ChangeMark() as task:
                taker = self.damages if self.damages.is_marking(task) else self._orders
                taker.take_mark(task, outcome)
            case ReadCommit():
                self.finder.took(outcome, now_s)
            case RecordStart():
                self.starts.took(outcome)
            case OpenCheck() | CheckChunk():
                self.verifier.took(outcome, now_s)
            case CommitCopy():
                assert self.commits is not None
                self.commits.took(outcome, now_s)
            case task:
                self._on_copy_outcome(task, outcome, now_s)

    def _on_copy_outcome(
        self, task: OpenShard | CopyRun | FinishCopy | AbortShard, outcome: Outcome, now_s: float
    ) -> None:
        lane = self.lanes[task.tier]
        active = lane.active
        done = lane.take(outcome)
        if done is not None and active is not None:
            if isinstance(task, OpenShard):
                self._mark_what_was_there(lane.tier, active.entry)
            self._on_copied(lane, active.entry, done)
        elif lane.stalled is not None:
            self._flusher.stalled(lane, task.id, lane.stalled, now_s)
        elif isinstance(task, CopyRun) and outcome.error is None and lane.goes_on():
            logger.info("flush of %s to %s goes on where it was", task.id, lane.tier)
            self._flusher.recovered(lane.tier)

    def _mark_what_was_there(self, tier: str, entry: LedgerEntry) -> None:
        """A copy turns out to be committed already: what a person has marked it with since goes there now."""
        for mark in self._flusher.marks_of(entry) if self._flusher.others.decides else ():
            self._dispatch(ChangeMark(tier=tier, mark=mark))

    def _on_copied(self, lane: FlushLane, entry: LedgerEntry, done: Commit | Uploaded) -> None:
        """All of a copy has arrived; alone, it is committed with that."""
        self.notes.flush_done(lane, entry)
        if self.commits is None:
            assert isinstance(done, Commit)
            self._flusher.committed(lane.tier, entry.id, done.stored_bytes)
            return
        lane.succeeded(entry)
        files = done.files if isinstance(done, Uploaded) else files_of(done, entry.shard)
        self.commits.landed(lane.tier, entry, files)

    # Draining --------------------------------------------------------------------------------------

    def begin_drain(self, asker: object, until_s: float) -> tuple[DrainDecision, ...]:
        """Work, until ``asker`` ends it, towards what can be durable at ``until_s`` of the clock that ``step`` is told;
        return what is to be expected. For whoever runs on this thread (``LedgerQuery``)."""
        return self.draining.begin(asker, until_s, self.ledger.now_s)

    def ask_rank_0_to_drain(self, left_s: float) -> None:
        """Let all ranks work towards a deadline that only this one knows of."""
        if self.commits is None:
            return
        if self.commits.decides:
            self.commits.announce_drain(left_s)
        else:
            self.commits.ask_for_drain(left_s)

    def _on_drain_of_rank(self, rank: int, left_s: float) -> None:
        assert self.commits is not None
        self.draining.begin(f"rank {rank}", self.ledger.now_s + left_s, self.ledger.now_s)
        self.commits.announce_drain(left_s)

    def _on_drain_of_rank_0(self, left_s: float) -> None:
        """Rank 0 plans towards a deadline: until then this rank's flushes yield to nobody either."""
        self.draining.hurry("rank 0", self.ledger.now_s + left_s)

    # Memory ----------------------------------------------------------------------------------------

    def memory_outlives_process(self, error: BaseException | None) -> None:
        """Note whether what lies in memory outlives this process: ``error`` says why not."""
        host, failing = self.ledger.host, self.ledger.failing
        if error is None:
            if failing.pop(host, None) is not None:
                self.notes.tier_recovered(host)
        elif host not in failing:
            failing[host] = error
            self.notes.tier_failing(host, error)

    # Asking ----------------------------------------------------------------------------------------

    def busy(self) -> bool:
        """Say whether something is under way, or owed to a tier that takes copies, and may begin."""
        if self._tasks_out or self._orders.busy() or self._admissions.busy() or self.dropper.busy():
            return True
        return not self._tending and any(
            e.snapshot is not None or self._is_readable(e) for e in self.ledger.open()
        )

    def owe_to_all(self, id: CheckpointId) -> None:
        """Let every tier have a checkpoint that this process saved, whatever it is usually given."""
        entry = self.ledger.entries.get(id)
        if entry is None or entry.lost or self.fenced is not None:
            return
        if entry.snapshot is None and not entry.readable_on(self.ledger.host):
            return
        there = entry.states.keys() | entry.damage.keys() | entry.set_aside.keys()
        entry.owed.update(tier for tier in self.lanes if tier not in there)

    def _is_readable(self, entry: LedgerEntry) -> bool:
        owed = entry.owed - self.ledger.failing.keys()
        return any(not self.draining.is_held_back(entry.id, tier) for tier in owed)

    def found_damage(self, tier: str, id: CheckpointId, why: str, *, repairable: bool) -> None:
        """A reader of this process has found that a copy is not what was written."""
        if tier == self.ledger.host:
            self._saves.found_damaged(id, why)
        else:
            self.damages.found(tier, id, why, repairable=repairable)

    def left_undone(self) -> tuple[tuple[CheckpointId, str], ...]:
        owing = sorted(self.ledger.open(), key=lambda e: e.order)
        return tuple((e.id, tier) for e in owing for tier in sorted(e.owed))

    def set_aside(self) -> tuple[tuple[CheckpointId, str], ...]:
        """Name the copies that are for the next start to try."""
        entries = sorted(self.ledger.open(), key=lambda e: e.order)
        return tuple((e.id, tier) for e in entries for tier in sorted(e.set_aside))

    def _dispatch(self, task: Task) -> None:
        """Every task that goes out comes back as one outcome."""
        if self.damages.holds_back(task):
            return
        self._tasks_out += 1
        self.rates.began(task, self.ledger.now_s)
        self._submit(task)

    def _next_s(self, now_s: float) -> float | None:
        waits = self._admissions.deadlines_s()
        waits += [lane.not_before_s for lane in self.lanes.values() if lane.not_before_s > now_s]
        retries = [self.dropper.next_s(), self._orders.next_s(), self.pressure.next_s(now_s)]
        retries += [self.pacing.next_s(now_s), self.draining.next_s()]
        retries.append(self.verifier.next_s(now_s))
        if self.commits is not None:
            retries.append(self.commits.next_s(now_s))
        return min([*waits, *(when for when in retries if when is not None)], default=None)


def _why_not_deleted(task: DeleteCopy, outcome: Outcome) -> BaseException | None:
    """Say why a copy that was to go is still there."""
    if outcome.error is not None or task.unfinished:
        return outcome.error
    if stops_drop(outcome.value, tombstoned=True):
        return StepError(f"delete: {task.id} is pinned on {task.tier}; unpin it first")
    return None
