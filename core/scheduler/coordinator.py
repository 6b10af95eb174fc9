"""The coordinator: takes events, keeps the ledger, asks the policies, and says what is to be done.

It does no I/O and reads no clock: ``step(now)`` takes what has happened since and returns when it wants to be called
next. In production one thread calls it (``runner``); tests and simulations call it with a virtual clock.
"""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tierfall.core import names
from tierfall.core.bell import Bell
from tierfall.core.errors import (
    BackendError,
    CapacityError,
    FencedError,
    FlushError,
    StepError,
    StorageFullError,
)
from tierfall.core.records import Commit, Mark, stops_drop
from tierfall.core.scheduler.admission import Admissions
from tierfall.core.scheduler.dropping import Dropper
from tierfall.core.scheduler.lane import LONGEST_RETRY_S, Lane, LaneLimits, Transfer
from tierfall.core.scheduler.ledger import Entry, Ledger
from tierfall.core.scheduler.orders import Orders
from tierfall.core.scheduler.tasks import (
    Admission,
    Ask,
    CaptureAdvanced,
    CaptureBegun,
    CaptureFailed,
    CaptureSealed,
    ChangeMark,
    CopyRun,
    DropCopy,
    Event,
    OpenShard,
    Order,
    Outcome,
    ReadMarks,
    Task,
)
from tierfall.core.snapshot import HostMemory
from tierfall.core.units import format_size
from tierfall.core.values import CheckpointId, CopyState, SaveOutcome
from tierfall.core.view import CheckpointView, Decision, Eviction, TierRules, View

logger = logging.getLogger("tierfall")
TRIES_BEFORE_REPORT = 3


class Policies(Protocol):
    """The decisions that the coordinator asks for: pure functions, handed in."""

    def tiers_owed(self, tiers: tuple[TierRules, ...], ordinal: int) -> tuple[str, ...]: ...

    def still_owed(self, view: View, checkpoint: CheckpointView) -> tuple[str, ...]: ...

    def plan_retention(self, view: View, tier_name: str) -> tuple[Decision, ...]: ...

    def plan_eviction(
        self, view: View, tier_name: str, *, need_bytes: int, free_bytes: int
    ) -> Eviction: ...


@dataclass(slots=True, kw_only=True)
class Counters:
    """What happened so far, in numbers."""

    flush_failures: int = 0
    given_up_copies: int = 0
    commits: dict[str, int] = field(default_factory=dict)


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
        unread: Collection[str] = (),
    ) -> None:
        """``unread`` names the tiers that could not be looked at when the run was opened."""
        self.ledger = ledger
        self._policies = policies
        self._submit = submit
        self._max_wait_s = max_wait_s
        self._arrived: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._events: deque[Event] = deque()
        self._tasks_out = 0
        self._idle_bells: list[Bell] = []
        self._tending = False
        order = tuple(rules.name for rules in ledger.rules)
        self.lanes = {
            tier: Lane(
                tier,
                limits=limits,
                order=order,
                host=ledger.host,
                submit=self._dispatch,
            )
            for tier, limits in lanes.items()
        }
        self.dropper = Dropper(
            ledger=ledger,
            tiers=self.lanes,
            plan_retention=policies.plan_retention,
            dispatch=self._dispatch,
        )
        self._admissions = Admissions(
            ledger=ledger,
            host=host,
            plan_eviction=policies.plan_eviction,
            give_up_copy=self._give_up_copy,
            max_wait_s=max_wait_s,
        )
        self._orders = Orders(
            ledger=ledger,
            lanes=self.lanes.values(),
            dropper=self.dropper,
            free_region=self._admissions.free,
            dispatch=self._dispatch,
            unread=unread,
        )
        self.dropper.delete = self._orders.finish_deletion
        self.fenced: FencedError | None = None
        self.stopped: BaseException | None = None
        self.errors: list[BaseException] = []
        self.counters = Counters()

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
                case Admission() | Ask():
                    event.answer(None, self.stopped)
                case Order():
                    event.answer({"tierfall": self.stopped})
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
        for entry in self.ledger.ordered():
            if entry.tombstoned and not entry.pinned:
                self._orders.finish_deletion(entry.id)

    def _collect_unfinished(self) -> None:
        """Remove what is left of copies that were never committed and are not owed any more."""
        for tier, id in list(self.ledger.unfinished) if not self._tending else ():
            found = self.ledger.entries.get(id)
            wanted = found is not None and tier in found.owed
            if tier in self.lanes and not wanted and not self.lanes[tier].is_at(id):
                self.dropper.collect(tier, id, "it was left unfinished")

    def _note_owed(self) -> None:
        view = self.ledger.view()
        for checkpoint in view.checkpoints:
            entry = self.ledger.entries[checkpoint.id]
            if entry.commit is not None:
                owed = self._policies.still_owed(view, checkpoint)
                entry.owed.update(
                    name for name in owed if name in self.lanes and name not in entry.damage
                )

    def step(self, now_s: float) -> float | None:
        """Take all events, dispatch all that can be done, and return when to be called again at the latest."""
        while not self._arrived.empty():
            self._events.append(self._arrived.get_nowait())
        while self._events:
            self._take(self._events.popleft(), now_s)
        for _ in range(2):  # what one of them changes may be what another has waited for
            self._orders.carry_out(now_s)
            for lane in self.lanes.values():
                self._drive(lane, now_s)
            self._admissions.admit(now_s, self.fenced)
        if self.fenced is None:
            self.dropper.retry(now_s)
            self._collect_unfinished()
            self.dropper.dispatch_surveys()
        if self._idle_bells and not self.busy():
            while self._idle_bells:
                self._idle_bells.pop().ring()
        return self._next_s(now_s)

    def ring_when_idle(self, bell: Bell) -> None:
        """Ring once nothing is under way, and nothing is owed that can be had."""
        self._idle_bells.append(bell)

    def forget(self, bell: Bell) -> None:
        if bell in self._idle_bells:
            self._idle_bells.remove(bell)

    # Events ----------------------------------------------------------------------------------------

    def _take(self, event: Event, now_s: float) -> None:
        match event:
            case Admission():
                self._admissions.ask(event)
            case CaptureBegun():
                self._begun(event)
            case CaptureAdvanced():
                if entry := self.ledger.entries.get(event.id):
                    entry.final_chunks = event.final_chunks
            case CaptureSealed():
                self._sealed(event.id)
            case CaptureFailed():
                self._capture_failed(event)
            case Order():
                self._orders.give(event)
            case Ask():
                self._answer(event)
            case Outcome():
                self._tasks_out -= 1
                self._took(event, now_s)

    def _begun(self, event: CaptureBegun) -> None:
        snapshot = event.snapshot
        entry = Entry(
            id=snapshot.id,
            ordinal=snapshot.line.ordinal,
            started_from=snapshot.line.started_from,
            shard=snapshot.shard,
            attempt_id=snapshot.line.attempt_id,
            geometry=snapshot.geometry,
            region=snapshot.region,
            snapshot=snapshot,
            handle=snapshot.handle,
        )
        entry.owed.update(name for name in event.tiers if name in self.lanes)
        entry.set_state(self.ledger.host, CopyState.ARRIVING, snapshot.geometry.image_bytes)
        self.ledger.entries[entry.id] = entry
        if self.fenced is not None:
            entry.give_up(tuple(entry.owed), self.fenced)
        for tier in entry.owed & self.ledger.failing.keys():
            self._tell_failing(entry, tier)

    def _sealed(self, id: CheckpointId) -> None:
        entry = self.ledger.entries[id]
        assert entry.snapshot is not None
        entry.manifest = entry.snapshot.manifest
        entry.commit = entry.snapshot.commit
        entry.snapshot = None
        entry.set_state(self.ledger.host, CopyState.SEALED)

    def _capture_failed(self, event: CaptureFailed) -> None:
        id, error = event.id, event.error
        entry = self.ledger.entries.get(id)
        if entry is None:  # it was interrupted before it was announced, or reported before
            event.region.release()
            return
        if entry.snapshot is None:
            return
        self.errors.append(error)
        logger.error("save: step %d is given up: %s", id.step, error)
        if entry.handle is not None:
            entry.handle.tell_given_up(SaveOutcome.FAILED, error)
        entry.owed.clear()
        entry.snapshot = None
        entry.set_state(self.ledger.host, CopyState.LEAVING)
        self._stop_lanes(entry, error)

    def _stop_lanes(self, entry: Entry, error: BaseException) -> None:
        for lane in self.lanes.values():
            if lane.active is not None and lane.active.entry is entry:
                lane.give_up(error)

    def _answer(self, event: Ask) -> None:
        try:
            value = event.function()
        except BaseException as error:  # noqa: BLE001 - handed to the asking thread as it is
            event.answer(None, error)
        else:
            event.answer(value, None)

    def _took(self, outcome: Outcome, now_s: float) -> None:
        match outcome.task:
            case DropCopy() as task:
                if self.dropper.take_dropped(task, outcome, now_s):
                    self._room_was_made(self.lanes[task.tier], now_s)
                self._orders.done(task.tier, task.id, _why_it_stays(task, outcome))
            case ReadMarks() as task:
                self.dropper.take_marks(task, outcome)
            case ChangeMark() as task:
                self._orders.take_mark(task, outcome)
            case task:
                lane = self.lanes[task.tier]
                commit = lane.take(outcome)
                if commit is not None:
                    self._committed(lane, task.id, commit)
                elif lane.stalled is not None:
                    self._stalled(lane, task.id, lane.stalled, now_s)
                elif isinstance(task, CopyRun) and outcome.error is None and lane.goes_on():
                    logger.info("flush of %s to %s goes on where it was", task.id, lane.tier)
                    self.ledger.failing.pop(lane.tier, None)

    def _give_up_copy(self, entry: Entry, tier: str, error: BaseException) -> None:
        entry.owed.discard(tier)
        self.counters.given_up_copies += 1
        self._report(entry, tier, error)
        lane = self.lanes[tier]
        if lane.active is not None and lane.active.entry is entry:
            lane.give_up(error)

    # Copies on their way ---------------------------------------------------------------------------

    def _drive(self, lane: Lane, now_s: float) -> None:
        while True:
            if lane.active is None and self.fenced is None and now_s >= lane.not_before_s:
                self._begin_next(lane, now_s)
            if lane.active is None:
                return
            entry = lane.active.entry
            # a save waits for room: read from storage what lies there too, so that memory becomes free
            lane.spare_memory = self._admissions.busy()
            lane.advance(
                now_s, self._marks_of(entry), name_latest=self._is_newest(lane.tier, entry)
            )
            transfer = lane.aborted()
            if transfer is None:
                return
            self._copy_failed(lane, transfer, now_s)

    def _begin_next(self, lane: Lane, now_s: float) -> None:
        if self._tending:
            return
        left = self.ledger.abandoned()
        for entry in self.ledger.ordered():
            if lane.tier not in entry.owed:
                continue
            if entry.id in left:
                entry.give_up([lane.tier], entry.given_up("its line was left behind"))
            elif lane.hopeless(entry):
                error = FlushError(
                    f"flush of {entry.id} to {lane.tier}: no tier holds a good copy of it any more"
                )
                self._give_up_copy(entry, lane.tier, error)
            else:
                if self._make_room(lane, entry, now_s):
                    lane.begin(entry)
                return

    def _make_room(self, lane: Lane, entry: Entry, now_s: float) -> bool:
        """Admit a copy to a tier before it begins: drop what may go, and wait while it goes."""
        if self.dropper.paused or self.dropper.busy(lane.tier):
            return False
        capacity = next(r.capacity_bytes for r in self.ledger.rules if r.name == lane.tier)
        need = _image_bytes(entry)
        free = need if capacity is None else capacity - self.ledger.used_bytes(lane.tier)
        free += self.ledger.unfinished.get((lane.tier, entry.id), 0)  # it is written over
        if lane.full:
            free = min(free, 0)
        if free >= need:
            return True
        held = self.dropper.reserved | self.dropper.awaited  # a person's orders see to those
        plan = self._policies.plan_eviction(
            self.ledger.view(held), lane.tier, need_bytes=need, free_bytes=free
        )
        if plan.drops and (lane.full or plan.missing_bytes == 0):
            lane.full = False
            for decision in plan.drops:
                self.dropper.drop(lane.tier, decision.checkpoint, decision.reason)
            return False
        self._room_is_missing(lane, entry, need, max(free, 0), now_s)
        return False

    def _room_is_missing(
        self, lane: Lane, entry: Entry, need: int, free: int, now_s: float
    ) -> None:
        found = "the disk is full" if lane.full else f"there is room for {format_size(free)}"
        lane.full = False
        lane.not_before_s = now_s + LONGEST_RETRY_S  # others share the disk, and leave marks there
        self.dropper.survey(lane.tier)
        self._is_failing(
            lane,
            CapacityError(
                f"flush of {entry.id} to {lane.tier}: it needs {format_size(need)}, {found}, and nothing more may be "
                f"dropped there; it is tried again when room is made, and every {LONGEST_RETRY_S:g} s. "
                "Raise the capacity, keep fewer checkpoints (retain), unpin some, or free the disk"
            ),
        )

    def _is_failing(self, lane: Lane, error: BaseException) -> None:
        """A tier does not take copies at present: whoever waits for one, now or later, is told why."""
        if lane.tier in self.ledger.failing:
            return
        self.ledger.failing[lane.tier] = error
        self.errors.append(error)
        logger.error("%s", error)
        for entry in self.ledger.entries.values():
            if lane.tier in entry.owed:
                self._tell_failing(entry, lane.tier)

    def _tell_failing(self, entry: Entry, tier: str) -> None:
        if entry.handle is not None:
            entry.handle.tell_tier_failed(tier, self.ledger.failing[tier])

    def _room_was_made(self, lane: Lane, now_s: float) -> None:
        lane.full = False
        lane.not_before_s = min(lane.not_before_s, now_s)
        self.ledger.failing.pop(lane.tier, None)

    def _committed(self, lane: Lane, id: CheckpointId, commit: Commit) -> None:
        """``commit`` is the record as it stands on the tier."""
        entry = self.ledger.entries[id]
        entry.set_state(lane.tier, CopyState.COMMITTED, commit.stored_bytes)
        entry.marks[lane.tier] = frozenset(mark.name for mark in self._marks_of(entry))
        entry.owed.discard(lane.tier)
        self.ledger.unfinished.pop((lane.tier, id), None)
        lane.succeeded(entry)
        self.ledger.failing.pop(lane.tier, None)
        self.counters.commits[lane.tier] = self.counters.commits.get(lane.tier, 0) + 1
        self.dropper.survey(lane.tier)
        if entry.handle is not None:
            entry.handle.tell_committed(lane.tier)

    def _copy_failed(self, lane: Lane, transfer: Transfer, now_s: float) -> None:
        """A copy ended in an error; it stays owed unless that is hopeless. What may be left of it is noted."""
        entry, error = transfer.entry, transfer.error
        assert error is not None
        entry.set_state(lane.tier, CopyState.ABSENT)
        if transfer.published:
            self.ledger.unfinished[lane.tier, entry.id] = _image_bytes(entry)
        if isinstance(error, FencedError):
            self._fence(error)
        if lane.tier not in entry.owed:
            self.ledger.forget_if_gone(entry)
            return
        if isinstance(error, StorageFullError):
            lane.full = True
            logger.warning("flush of %s to %s: no space: %s", entry.id, lane.tier, error)
            return
        lane.back_off(now_s)
        self.counters.flush_failures += 1
        logger.log(
            logging.WARNING if lane.tries == 1 else logging.DEBUG,
            "flush of %s to %s failed (try %d), again in %.1f s: %s",
            entry.id, lane.tier, lane.tries, lane.not_before_s - now_s, error,
        )  # fmt: skip
        lasting = not getattr(error, "retryable", False) and lane.tries >= TRIES_BEFORE_REPORT
        if lasting or lane.failing_for_s(now_s) >= self._max_wait_s:
            self._is_failing(lane, _flush_error(entry, lane.tier, error))

    def _stalled(self, lane: Lane, id: CheckpointId, error: BaseException, now_s: float) -> None:
        """A copy could not go on, and keeps what has arrived: it is tried again from there."""
        if not lane.stall(now_s):
            return
        assert lane.active is not None
        self.counters.flush_failures += 1
        logger.log(
            logging.WARNING if lane.active.stalls == 1 else logging.DEBUG,
            "flush of %s to %s stalls, and goes on in %.1f s: %s",
            id, lane.tier, lane.not_before_s - now_s, error,
        )  # fmt: skip
        if lane.failing_for_s(now_s) >= self._max_wait_s:
            self._is_failing(lane, _flush_error(lane.active.entry, lane.tier, error))

    def _report(self, entry: Entry, tier: str, error: BaseException) -> None:
        if entry.handle is not None:
            entry.handle.tell_tier_failed(tier, error)
        self.errors.append(error)
        logger.error("%s", error)

    def _fence(self, error: FencedError) -> None:
        """A newer attempt exists: nothing more is written by this process."""
        if self.fenced is None:
            self.fenced = error
            self.errors.append(error)
            logger.error("%s", error)
        for entry in self.ledger.entries.values():
            entry.give_up(tuple(entry.owed), error)
        for lane in self.lanes.values():
            lane.give_up(error)
        self.dropper.cancel()

    def _marks_of(self, entry: Entry) -> tuple[Mark, ...]:
        """The marks that go along with a copy."""
        if not entry.pinned or entry.commit is None or self._orders.is_unpinning(entry.id):
            return ()
        wall_time_s = entry.commit.wall_time_s
        return (Mark(name=names.PIN_MARK, checkpoint=entry.id, wall_time_s=wall_time_s),)

    def _is_newest(self, tier: str, entry: Entry) -> bool:
        """Say whether ``latest`` of a tier may come to name this one: it never goes back."""
        left = self.ledger.abandoned()
        return not any(
            e.id > entry.id and e.id not in left and e.state(tier) is CopyState.COMMITTED
            for e in self.ledger.entries.values()
        )

    # Asking ----------------------------------------------------------------------------------------

    def busy(self) -> bool:
        """Say whether something is under way, or owed to a tier that takes copies."""
        if self._tasks_out or self._orders.busy() or self._admissions.busy() or self.dropper.busy():
            return True
        return not self._tending and any(
            e.snapshot is not None or (e.owed - self.ledger.failing.keys())
            for e in self.ledger.entries.values()
        )

    def left_undone(self) -> tuple[tuple[CheckpointId, str], ...]:
        return tuple((e.id, tier) for e in self.ledger.ordered() for tier in sorted(e.owed))

    def _dispatch(self, task: Task) -> None:
        """Every task that goes out comes back as one outcome."""
        self._tasks_out += 1
        self._submit(task)

    def _next_s(self, now_s: float) -> float | None:
        waits = self._admissions.deadlines_s()
        waits += [lane.not_before_s for lane in self.lanes.values() if lane.not_before_s > now_s]
        retries = (self.dropper.next_s(), self._orders.next_s())
        return min([*waits, *(when for when in retries if when is not None)], default=None)


def _why_it_stays(task: DropCopy, outcome: Outcome) -> BaseException | None:
    """Say why a copy that was to go is still there."""
    if outcome.error is not None or task.unfinished:
        return outcome.error
    if stops_drop(outcome.value, tombstoned=True):
        return StepError(f"delete: {task.id} is pinned on {task.tier}; unpin it first")
    return None


def _image_bytes(entry: Entry) -> int:
    if entry.geometry is not None:
        return entry.geometry.image_bytes
    assert entry.commit is not None
    return entry.commit.image_bytes


def _flush_error(entry: Entry, tier: str, cause: BaseException) -> FlushError:
    error = FlushError(f"flush of {entry.id} to {tier} failed and is still being tried: {cause}")
    error.__cause__ = cause
    return error
