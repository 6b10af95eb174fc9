"""A lane: the copies to one stored tier, one at a time and in order, chunk by chunk.

It is a state machine that the coordinator drives. It does no I/O and reads no clock: it dispatches tasks. A chunk is
dispatched as soon as its bytes are final in some source (below the watermark, or in a whole copy). A task holds a lease
on its source only while it reads, so that a copy may change its source between two chunks.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from tierfall.core.copies.image_writes import ImageUpload
from tierfall.core.flush.facts import LedgerEntry
from tierfall.core.flush.messages import FoundDamage
from tierfall.core.flush.tasks import (
    AbortShard,
    CopyRun,
    CopySource,
    FinishCopy,
    OpenShard,
    Outcome,
    Side,
    Task,
    Uploaded,
)
from tierfall.core.format.records import Commit, Geometry, Manifest
from tierfall.core.types.backend import part_bytes
from tierfall.core.types.errors import FlushError, KeyNotFoundError, StorageFullError, is_damage
from tierfall.core.types.values import CheckpointId, CopyState

if TYPE_CHECKING:
    from tierfall.core.flush.coordinator import Coordinator


class Phase(StrEnum):
    OPENING = "opening"
    COPYING = "copying"
    FINISHING = "finishing"
    ABORTING = "aborting"


@dataclass(slots=True, kw_only=True)
class Transfer:
    """A copy in progress.

    ``runs`` are chunk ranges (first chunk, chunk after the last), each copied by one task. ``waiting`` are the numbers
    of those to begin, or begin again, ascending; ``outstanding`` those begun and not finished. ``stalls`` counts
    consecutive failures after which the copy continues where it stopped.
    ``published``: files of it may be visible on the tier, without a commit. ``source_is_unread``: it failed because a
    source could not be read. ``deletions`` is the count of the lane at its beginning: if it then finds no room, what
    was deleted since may be enough.
    """

    entry: LedgerEntry
    phase: Phase = Phase.OPENING
    writer: ImageUpload | None = None
    runs: tuple[tuple[int, int], ...] = ()
    waiting: list[int] = field(default_factory=list)
    outstanding: set[int] = field(default_factory=set)
    in_flight: int = 0
    in_flight_bytes: int = 0
    done: int = 0
    done_bytes: int = 0
    stalls: int = 0
    error: BaseException | None = None
    published: bool = False
    source_is_unread: bool = False
    deletions: int = 0


TRIES_BEFORE_REPORT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimits:
    """What may be in progress to one tier at once.

    ``parallel`` chunk ranges; ``budget_bytes`` of buffers for reads from stored tiers. ``window``: ranges are copied in
    order, at most so many ahead of the oldest unfinished one (0: in any order). ``run_bytes_min``: the least length of
    a range where each becomes a part of a multipart upload (0: one chunk each).
    """

    parallel: int
    budget_bytes: int
    window: int = 0
    run_bytes_min: int = 0

    def runs(self, cut: Geometry) -> tuple[tuple[int, int], ...]:
        """Divide the chunks of an image into ranges: first chunk, and chunk after the last."""
        least = self.run_bytes_min
        return cut.chunk_ranges(part_bytes(cut.image_bytes, least) if least else 0)


class FlushLane:
    """The state of copies to one stored tier. If memory is short, a tier that has the bytes is read instead.
    ``arrivals`` counts the copies that the tier has received; ``edge_bytes`` counts bytes by source, ``sources`` those
    of the last copy, which began at ``began_s``; ``stalled`` is the error of the last outcome, if the copy can
    continue, ``last_error`` that of the last copy that stalled or failed. ``disk_full``: the last write found no space;
    ``lacks_room``: no room can be made for the next copy until something changes; on a rank other than 0: it was asked
    for. ``room_tries`` is 1 once rank 0 has deleted a copy there, and grows by each try; else it is 0. With several
    ranks, ``deletions`` counts what rank 0 has deleted there, as far as this rank knows."""

    def __init__(self, tier: str, *, limits: LaneLimits, coordinator: Coordinator) -> None:
        self.tier = tier
        self._limits = limits
        self._ledger = coordinator.ledger
        self._order = [rules.name for rules in coordinator.ledger.rules]
        self._bad: dict[CheckpointId, set[str]] = {}
        """Where a checkpoint's bytes are wrong, or may not be read."""
        self._messages = coordinator.messages
        self._submit = coordinator.dispatch
        self.active: Transfer | None = None
        self.tries = 0
        self.failing_since_s: float | None = None
        self.not_before_s = 0.0
        self.disk_full = False
        self.lacks_room = False
        self.room_tries = 0
        self.deletions = 0
        self.stalled: BaseException | None = None
        self.last_error: BaseException | None = None
        self.edge_bytes: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.began_s = 0.0
        self.arrivals = 0

    # Driving ---------------------------------------------------------------------------------------

    def begin(self, entry: LedgerEntry, *, leftover: bool, room_bytes: int) -> None:
        """Start a copy, for which there is room. ``leftover`` and ``room_bytes`` are as in ``OpenShard``."""
        self.active = Transfer(entry=entry, deletions=self.deletions)
        self.began_s = self._ledger.now_s
        self.sources.clear()
        entry.set_state(self.tier, CopyState.ARRIVING)
        source = self._source(entry)
        needs_reading = entry.manifest is None and entry.snapshot is None
        if needs_reading and source is None:
            self.active.error = FlushError(
                f"flush of {entry.id} to {self.tier}: no tier holds it whole any more"
            )
            self.active.phase = Phase.ABORTING
            return
        self._dispatch(
            OpenShard(
                tier=self.tier,
                id=entry.id,
                attempt_id=entry.attempt_id,
                shard=entry.shard,
                geometry=entry.geometry,
                pieces=entry.pieces,
                leftover=leftover,
                room_bytes=room_bytes,
                source=source if needs_reading else None,
            )
        )

    def advance(self, now_s: float) -> None:
        """Dispatch what can begin now."""
        transfer = self.active
        if transfer is None:
            return
        ready = now_s >= self.not_before_s
        if transfer.phase is Phase.COPYING and ready:
            self._dispatch_runs(transfer)
        if transfer.phase is Phase.COPYING and ready and self._all_copied(transfer):
            self._finish(transfer)
        if transfer.error is not None and transfer.phase is not Phase.ABORTING:
            self._stop(transfer)

    def is_copying(self, id: CheckpointId) -> bool:
        return self.active is not None and self.active.entry.id == id

    def is_publishing(self, id: CheckpointId) -> bool:
        """Return whether publishing this checkpoint's copy was begun: it may be committed already."""
        active = self.active
        if active is None or active.entry.id != id:
            return False
        return active.phase is Phase.FINISHING or active.published

    def give_up(self, error: BaseException) -> None:
        """Abort the active copy once its workers are back."""
        if self.active is not None and self.active.error is None:
            self.active.error = error

    def aborted(self) -> Transfer | None:
        """Return the active transfer once it has failed and no task of it is in progress; the lane is then free."""
        transfer = self.active
        if transfer is None or transfer.phase is not Phase.ABORTING or transfer.in_flight:
            return None
        if transfer.writer is not None:
            writer, transfer.writer = transfer.writer, None
            self._dispatch(AbortShard(tier=self.tier, id=transfer.entry.id, writer=writer))
            return None
        self.active = None
        return transfer

    # Outcomes --------------------------------------------------------------------------------------

    def on_outcome(self, outcome: Outcome) -> Commit | Uploaded | None:
        """Apply a task's outcome. Returns the files once they are uploaded, or the commit record of a copy that is
        committed already; else None."""
        transfer = self.active
        if transfer is None or transfer.entry.id != outcome.task.id:  # type: ignore[union-attr]
            raise AssertionError(f"lane {self.tier}: an outcome of a copy that is not active")
        transfer.in_flight -= 1
        match outcome.task:
            case OpenShard():
                if isinstance(outcome.value, Commit):
                    self.active = None
                    return outcome.value
                self._on_opened(transfer, outcome.task, outcome)
            case CopyRun():
                self._on_copied(transfer, outcome.task, outcome)
            case FinishCopy():
                if outcome.error is None:
                    self.active = None
                    done: Uploaded = outcome.value
                    return done
                self._not_finished(transfer, outcome.error)
            case AbortShard():
                if outcome.error is not None and transfer.error is None:
                    transfer.error = outcome.error
        if transfer.error is not None:
            transfer.phase = Phase.ABORTING
        return None

    def _not_finished(self, transfer: Transfer, error: BaseException) -> None:
        transfer.published = True
        if getattr(error, "retryable", False):
            transfer.phase = Phase.COPYING  # all chunks are there: only publishing is retried
            self.stalled = error
        else:
            transfer.error = error

    def _on_opened(self, transfer: Transfer, task: OpenShard, outcome: Outcome) -> None:
        if outcome.error is not None:
            transfer.error = outcome.error
            transfer.source_is_unread = _is_unread_source(outcome)
            if outcome.side is Side.SOURCE:
                self._exclude_source(transfer, task.source, outcome.error)
            return
        transfer.writer, manifest = outcome.value
        entry = transfer.entry
        if manifest is not None:
            entry.manifest = manifest
            entry.geometry = manifest.geometry()
        assert entry.geometry is not None
        transfer.runs = self._limits.runs(entry.geometry)
        transfer.waiting = list(range(len(transfer.runs)))
        if transfer.error is None:
            transfer.phase = Phase.COPYING

    def _on_copied(self, transfer: Transfer, task: CopyRun, outcome: Outcome) -> None:
        transfer.entry.lease(task.source.tier, -1)
        if task.source.region is None:
            transfer.in_flight_bytes -= task.end - task.start
        if outcome.error is None:
            transfer.done += 1
            transfer.done_bytes += task.end - task.start
            transfer.outstanding.discard(task.number)
            for counted in (self.edge_bytes, self.sources):
                counted[task.source.tier] += task.end - task.start
        elif outcome.side is Side.SOURCE and self._exclude_source(
            transfer, task.source, outcome.error
        ):
            insort(transfer.waiting, task.number)
        elif outcome.side is not Side.SOURCE and getattr(outcome.error, "retryable", False):
            # written chunks are kept, and the copy continues from there
            insort(transfer.waiting, task.number)
            self.stalled = outcome.error
        elif not isinstance(transfer.error, StorageFullError):  # else the writer is dead by that
            transfer.error = outcome.error
            transfer.source_is_unread = _is_unread_source(outcome)

    def _exclude_source(
        self, transfer: Transfer, source: CopySource | None, error: BaseException
    ) -> bool:
        """Exclude a source that returned wrong bytes, or may not be read while there is another, and not one that did
        not respond; return whether another is left."""
        if source is None or getattr(error, "retryable", False):
            return False
        id, damages = transfer.entry.id, is_damage(error)
        bad = self._bad.setdefault(id, set())
        bad.add(source.tier)
        is_gone = isinstance(error, KeyNotFoundError)
        if damages and not is_gone and source.region is None:
            self._messages.report(FoundDamage(text=str(error)), id, source.tier)
        if self._source(transfer.entry) is not None:
            return True
        if not damages:
            bad.discard(source.tier)
        return False

    # Dispatching -----------------------------------------------------------------------------------

    def _dispatch(self, task: Task) -> None:
        assert self.active is not None
        self.active.in_flight += 1
        self._submit(task)

    def _dispatch_runs(self, transfer: Transfer) -> None:
        while transfer.in_flight < self._limits.parallel and transfer.error is None:
            number = transfer.waiting[0] if transfer.waiting else None
            if number is None or self._is_far_ahead(transfer, number):
                return
            source = self._source(transfer.entry, chunk=transfer.runs[number][1] - 1)
            if source is None:
                if transfer.entry.snapshot is None:
                    transfer.error = FlushError(
                        f"flush of {transfer.entry.id} to {self.tier}: no tier holds chunk "
                        f"{transfer.runs[number][0]} any more"
                    )
                return
            if not self._dispatch_run(transfer, number, source):
                return

    def _is_far_ahead(self, transfer: Transfer, number: int) -> bool:
        window, oldest = self._limits.window, min(transfer.outstanding, default=number)
        return bool(window) and number - oldest >= window

    def _dispatch_run(self, transfer: Transfer, number: int, source: CopySource) -> bool:
        """Dispatch a range; return False where that would exceed the buffer budget."""
        entry, (first, stop) = transfer.entry, transfer.runs[number]
        assert entry.geometry is not None
        assert transfer.writer is not None
        start, end = entry.geometry.chunk_range(first)[0], entry.geometry.chunk_range(stop - 1)[1]
        if source.region is None:
            over = transfer.in_flight_bytes + end - start > self._limits.budget_bytes
            if over and transfer.in_flight:
                return False
            transfer.in_flight_bytes += end - start
        transfer.waiting.remove(number)
        transfer.outstanding.add(number)
        entry.lease(source.tier, +1)
        run = CopyRun(
            tier=self.tier,
            id=entry.id,
            shard=entry.shard,
            number=number,
            first=first,
            stop=stop,
            start=start,
            end=end,
            source=source,
            manifest=self._manifest(entry, source),
            writer=transfer.writer,
        )
        self._dispatch(run)
        return True

    def _manifest(self, entry: LedgerEntry, source: CopySource) -> Manifest | None:
        """Return the manifest to check a range by; None for an image that this process captured and hashed."""
        if source.region is not None and not entry.adopted:
            return None
        assert entry.manifest is not None
        return entry.manifest

    def _source(self, entry: LedgerEntry, chunk: int | None = None) -> CopySource | None:
        """Return the source of a chunk or, without ``chunk``, of the whole image: the fastest tier that has it and has
        not returned wrong bytes; those that are only read come last. If memory is short, host memory is
        left out once a tier that is written to has the checkpoint."""
        bad, host = self._bad.get(entry.id, ()), self._ledger.host

        def is_stored(tier: str) -> bool:
            is_other = tier not in (self.tier, host, *bad)
            return is_other and entry.state(tier) is CopyState.COMMITTED

        spares = self._ledger.memory_is_short and any(map(is_stored, self._order))
        final = chunk is not None and chunk < entry.final_chunks
        whole = entry.readable_on(host) or entry.awaiting_ranks
        is_in_memory = (final or whole) and host not in bad and not spares
        for tier in (*self._order, *(tier for tier in entry.states if tier not in self._order)):
            if tier == host and is_in_memory and entry.region is not None:
                return CopySource(tier=tier, region=entry.region)
            if is_stored(tier):
                return CopySource(tier=tier)
        return None

    def _all_copied(self, transfer: Transfer) -> bool:
        entry = transfer.entry
        assert entry.geometry is not None
        return (
            transfer.error is None
            and transfer.in_flight == 0
            and transfer.done == len(transfer.runs)
            and entry.manifest is not None
            and entry.commit is not None
        )

    def _finish(self, transfer: Transfer) -> None:
        entry = transfer.entry
        assert transfer.writer is not None
        assert entry.manifest is not None
        assert entry.commit is not None
        transfer.phase = Phase.FINISHING
        self._dispatch(
            FinishCopy(
                tier=self.tier,
                id=entry.id,
                shard=entry.shard,
                writer=transfer.writer,
                manifest=entry.manifest,
                commit=entry.commit,
            )
        )

    def _stop(self, transfer: Transfer) -> None:
        if transfer.phase is not Phase.FINISHING:
            transfer.phase = Phase.ABORTING

    # Failing ---------------------------------------------------------------------------------------

    def stall(self, now_s: float) -> bool:
        """Delay the copy, longer after each consecutive failure; return False where it is delayed already."""
        assert self.active is not None
        self.last_error, self.stalled = self.stalled, None
        if now_s < self.not_before_s:
            return False
        self.active.stalls += 1
        self.not_before_s = now_s + self._wait_s(self.active.stalls)
        if self.failing_since_s is None:
            self.failing_since_s = now_s
        return True

    def has_resumed(self) -> bool:
        """Return True, once, if copies advance after a stall and the tier has no other failure."""
        if self.active is None or self.failing_since_s is None:
            return False
        self.active.stalls = 0
        if self.tries:  # a copy that restarts again and again is failing, however far it gets
            return False
        self.failing_since_s = None
        return True

    def forget_stall(self) -> None:
        """The stalled copy was deleted by command: the next one need not wait."""
        if not self.tries:
            self.failing_since_s = None
            self.not_before_s = 0.0

    def back_off(self, entry: LedgerEntry, error: BaseException, now_s: float) -> None:
        """Delay the next copy after ``error``, longer after each consecutive failure."""
        self.last_error = error
        self.tries += 1
        self.not_before_s = now_s + self._wait_s(self.tries)
        if self.failing_since_s is None:
            self.failing_since_s = now_s

    def _wait_s(self, failures: int) -> float:
        return self._ledger.wait_s(failures)

    def rounds_failed(self, entry: LedgerEntry) -> int:
        """Return how many rounds of tries of a copy have failed: copies with fewer come first. 0 once another copy was
        committed on the tier."""
        if not self.has_failed(entry):
            return 0
        return entry.failures[self.tier].count // TRIES_BEFORE_REPORT

    def has_failed(self, entry: LedgerEntry) -> bool:
        """Return whether a copy has failed since the tier has received one."""
        failures = entry.failures.get(self.tier)
        return failures is not None and failures.count > 0 and failures.arrivals == self.arrivals

    def failing_for_s(self, now_s: float) -> float:
        return 0.0 if self.failing_since_s is None else now_s - self.failing_since_s

    def has_no_source(self, entry: LedgerEntry) -> bool:
        """Return whether no source is left that the copy could be read from."""
        return entry.snapshot is None and self._source(entry) is None

    def succeeded(self, entry: LedgerEntry) -> None:
        self._bad.pop(entry.id, None)
        self.arrivals += 1
        self.tries = 0
        self.last_error = None
        self.failing_since_s = None
        self.not_before_s = 0.0
        self.disk_full = self.lacks_room = False
        self.room_tries = 0


def _is_unread_source(outcome: Outcome) -> bool:
    return outcome.side is Side.SOURCE and not is_damage(outcome.error)
