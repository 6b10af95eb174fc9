"""A lane: the copies on their way to one stored tier, one at a time and in order, chunk by chunk.

It is a state machine that the coordinator drives; it does no I/O, reads no clock, and says what is to be done as tasks.
A chunk is dispatched as soon as its bytes are final somewhere (the watermark, or a whole copy), from where ``sources``
says; each chunk holds a lease on its source for just as long as it is read, so that a copy may change its source
between two chunks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tierfall.core.format.records import Commit, Geometry, Manifest, Mark, geometry
from tierfall.core.scheduler.flush.copy_progress import Phase, Transfer
from tierfall.core.scheduler.flush.sources import CopySources
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.tasks import (
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
from tierfall.core.types.backend import part_bytes
from tierfall.core.types.errors import FlushError, IntegrityError
from tierfall.core.types.values import CheckpointId, CopyState

FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimits:
    """What may be on its way to one tier at once.

    ``parallel`` runs of chunks; ``budget_bytes`` in buffers of reads from stored tiers. ``window``: runs go in order,
    and one may be that far ahead of the oldest that is not done (0: in any order). ``run_bytes_min``: how long a run is
    at least, where it becomes a part of an object (0: a chunk each).
    """

    parallel: int
    budget_bytes: int
    window: int = 0
    run_bytes_min: int = 0

    def runs(self, cut: Geometry) -> tuple[tuple[int, int], ...]:
        """Put the chunks of an image together: first chunk of each run, and the one after its last."""
        least = self.run_bytes_min
        return cut.runs(part_bytes(cut.image_bytes, least) if least else 0)


class FlushLane:
    """What is under way to one stored tier. With ``spare_memory``, host memory is read only where nothing else is;
    with ``land_only``, copies end before their commit, which is somebody else's to do. ``arrivals`` counts the copies
    that the tier took; ``failed`` names those that could not be brought since the last of them."""

    def __init__(
        self,
        tier: str,
        *,
        limits: LaneLimits,
        order: Sequence[str],
        host: str,
        hooks: Hooks,
    ) -> None:
        """``order`` are all tiers, fastest first."""
        self.tier = tier
        self._limits = limits
        self._sources = CopySources(tier, order=order, host=host)
        self._hooks = hooks
        self.active: Transfer | None = None
        self.tries = 0
        self.failing_since_s: float | None = None
        self.not_before_s = 0.0
        self.full = False
        self.spare_memory = False
        self.stalled: BaseException | None = None
        self.edge_bytes: dict[str, int] = {}
        self.arrivals = 0
        self.failed: set[CheckpointId] = set()

    # Driving ---------------------------------------------------------------------------------------

    def begin(self, entry: LedgerEntry, *, leftover: bool) -> None:
        """Start the copy of ``entry``; the caller has made room for it. ``leftover``: an earlier try left something."""
        self.active = Transfer(entry=entry)
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
                source=source if needs_reading else None,
                repairs=self.tier in entry.damage,
            )
        )

    def advance(
        self,
        now_s: float,
        marks: Sequence[Mark],
        *,
        name_latest: Callable[[], bool],
        older_owed: Callable[[], tuple[CheckpointId, ...]],
        beside: Sequence[CopyRun],
    ) -> None:
        """Dispatch what can be done now; ``beside`` is what other lanes are reading, ``older_owed`` what the commit
        record is to say of older ones."""
        transfer = self.active
        if transfer is None:
            return
        ready = now_s >= self.not_before_s
        if transfer.phase is Phase.COPYING and ready:
            self._dispatch_runs(transfer, beside)
        if transfer.phase is Phase.COPYING and ready and self._all_copied(transfer):
            self._finish(transfer, marks, name_latest(), older_owed())
        if transfer.error is not None and transfer.phase is not Phase.ABORTING:
            self._stop(transfer)

    def reading(self) -> Sequence[CopyRun]:
        """What is just brought from a stored tier, the latest first."""
        return () if self.active is None else tuple(reversed(self.active.reading.values()))

    def is_at(self, id: CheckpointId) -> bool:
        return self.active is not None and self.active.entry.id == id

    def is_ending(self, id: CheckpointId) -> bool:
        """Say whether the end of this checkpoint's copy was begun: it may be committed already, whatever comes now."""
        active = self.active
        if active is None or active.entry.id != id:
            return False
        return active.phase is Phase.FINISHING or active.published

    def give_up(self, error: BaseException) -> None:
        """Abort the active copy once its workers are back."""
        if self.active is not None and self.active.error is None:
            self.active.error = error

    def aborted(self) -> Transfer | None:
        """Return the active transfer if it has ended in an error and no worker is on it, and let go of it."""
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

    def take(self, outcome: Outcome) -> Commit | Uploaded | None:
        """Take a worker's outcome; returns the tier's commit record when the copy has just been committed, or what has
        landed when that is all."""
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
                    done: Commit | Uploaded = outcome.value
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
            transfer.phase = Phase.COPYING  # all is copied: it is finished again
            self.stalled = error
        else:
            transfer.error = error

    def _on_opened(self, transfer: Transfer, task: OpenShard, outcome: Outcome) -> None:
        if outcome.error is not None:
            transfer.error = outcome.error
            transfer.source_is_silent = _is_silent_source(outcome)
            if outcome.side is Side.SOURCE:
                self._blame(transfer, task.source, outcome.error)
            return
        transfer.writer, manifest = outcome.value
        entry = transfer.entry
        entry.in_doubt.discard(self.tier)  # the worker looked: it is not committed there
        if manifest is not None:
            entry.manifest = manifest
            entry.geometry = geometry(manifest)
        assert entry.geometry is not None
        transfer.runs = self._limits.runs(entry.geometry)
        transfer.waiting = list(range(len(transfer.runs)))
        if transfer.error is None:
            transfer.phase = Phase.COPYING

    def _on_copied(self, transfer: Transfer, task: CopyRun, outcome: Outcome) -> None:
        transfer.entry.lease(task.source.tier, -1)
        if task.source.region is None:
            transfer.in_flight_bytes -= task.end - task.start
            del transfer.reading[task.number]
        if outcome.error is None:
            transfer.done += 1
            transfer.done_bytes += task.end - task.start
            transfer.outstanding.discard(task.number)
            source = task.source.tier
            self.edge_bytes[source] = self.edge_bytes.get(source, 0) + task.end - task.start
        elif outcome.side is Side.SOURCE and self._blame(transfer, task.source, outcome.error):
            insort(transfer.waiting, task.number)
        elif outcome.side is not Side.SOURCE and getattr(outcome.error, "retryable", False):
            # what has arrived stays, and it goes on from there
            insort(transfer.waiting, task.number)
            self.stalled = outcome.error
        else:
            transfer.error = outcome.error
            transfer.source_is_silent = _is_silent_source(outcome)

    def _blame(self, transfer: Transfer, source: CopySource | None, error: BaseException) -> bool:
        """Strike a source whose bytes are wrong, not one that only does not answer; say whether another is left."""
        if source is None or getattr(error, "retryable", False):
            return False
        self._sources.strike(transfer.entry.id, source.tier)
        if isinstance(error, IntegrityError) and source.region is None:
            self._hooks.found_damage(source.tier, transfer.entry.id, str(error))
        return self._source(transfer.entry) is not None

    # Dispatching -----------------------------------------------------------------------------------

    def _dispatch(self, task: Task) -> None:
        assert self.active is not None
        self.active.in_flight += 1
        self._hooks.dispatch(task)

    def _dispatch_runs(self, transfer: Transfer, beside: Sequence[CopyRun]) -> None:
        while transfer.in_flight < self._limits.parallel and transfer.error is None:
            number = self._next_run(transfer, beside)
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

    def _next_run(self, transfer: Transfer, beside: Sequence[CopyRun]) -> int | None:
        """Choose what another lane is just reading from the same place, so that it is read once; else the first."""
        if not self._limits.window:
            source = self._source(transfer.entry)
            for run in beside:
                if (run.id, run.source) == (transfer.entry.id, source):
                    number = transfer.waiting_within(run)
                    if number is not None:
                        return number
        return transfer.waiting[0] if transfer.waiting else None

    def _is_far_ahead(self, transfer: Transfer, number: int) -> bool:
        window, oldest = self._limits.window, min(transfer.outstanding, default=number)
        return bool(window) and number - oldest >= window

    def _dispatch_run(self, transfer: Transfer, number: int, source: CopySource) -> bool:
        """Hand a run to a worker; False where its bytes are too many for now."""
        entry, (first, stop) = transfer.entry, transfer.runs[number]
        assert entry.geometry is not None
        assert transfer.writer is not None
        start, end = entry.geometry.chunk_range(first)[0], entry.geometry.chunk_range(stop - 1)[1]
        if source.region is None:
            over = transfer.in_flight_bytes + end - start > self._limits.budget_bytes
            if over and transfer.in_flight:
                return False
            transfer.in_flight_bytes += end - start
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
        if source.region is None:
            transfer.reading[number] = run
        transfer.waiting.remove(number)
        transfer.outstanding.add(number)
        entry.lease(source.tier, +1)
        self._dispatch(run)
        return True

    def _manifest(self, entry: LedgerEntry, source: CopySource) -> Manifest | None:
        """What to read and check a run by: not needed for what this process has just captured and hashed itself."""
        if source.region is not None and not entry.adopted:
            return None
        assert entry.manifest is not None
        return entry.manifest

    def _source(self, entry: LedgerEntry, chunk: int | None = None) -> CopySource | None:
        return self._sources.find(entry, chunk, spare_memory=self.spare_memory)

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

    def _finish(
        self,
        transfer: Transfer,
        marks: Sequence[Mark],
        name_latest: bool,
        older_owed: tuple[CheckpointId, ...],
    ) -> None:
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
                commit=replace(entry.commit, owed=older_owed),
                marks=tuple(marks),
                name_latest=name_latest,
                land_only=self._hooks.group.land_only,
                repairs=self.tier in entry.damage,
            )
        )

    def _stop(self, transfer: Transfer) -> None:
        if transfer.phase is not Phase.FINISHING:
            transfer.phase = Phase.ABORTING

    # Failing ---------------------------------------------------------------------------------------

    def stall(self, now_s: float) -> bool:
        """Wait, longer after each failure in a row, before the copy goes on; False where it waits already."""
        assert self.active is not None
        self.stalled = None
        if now_s < self.not_before_s:
            return False
        self.active.stalls += 1
        self.not_before_s = now_s + _wait_s(self.active.stalls)
        if self.failing_since_s is None:
            self.failing_since_s = now_s
        return True

    def goes_on(self) -> bool:
        """Say, once, that copies advance again after one had stalled, and the tier has no other trouble."""
        if self.active is None or self.failing_since_s is None:
            return False
        self.active.stalls = 0
        if self.tries:  # copies that are begun again and again do fail, however far each comes
            return False
        self.failing_since_s = None
        return True

    def forget_stall(self) -> None:
        """The copy that stalled is deleted by a person: the next one need not wait."""
        if not self.tries:
            self.failing_since_s = None
            self.not_before_s = 0.0

    def back_off(self, entry: LedgerEntry, now_s: float) -> None:
        """Wait longer after each failure in a row."""
        self.tries += 1
        self.failed.add(entry.id)
        self.not_before_s = now_s + _wait_s(self.tries)
        if self.failing_since_s is None:
            self.failing_since_s = now_s

    def failing_for_s(self, now_s: float) -> float:
        return 0.0 if self.failing_since_s is None else now_s - self.failing_since_s

    def hopeless(self, entry: LedgerEntry) -> bool:
        """Say whether no place is left that the copy could be read from."""
        return entry.snapshot is None and self._source(entry) is None

    def succeeded(self, entry: LedgerEntry) -> None:
        self._sources.forget(entry.id)
        self.arrivals += 1
        self.failed.clear()
        self.tries = 0
        self.failing_since_s = None
        self.not_before_s = 0.0
        self.full = False


def _wait_s(failures: int) -> float:
    """How long to wait after so many failures in a row."""
    return min(FIRST_RETRY_S * 2.0 ** min(failures - 1, 30), LONGEST_RETRY_S)


def _is_silent_source(outcome: Outcome) -> bool:
    return outcome.side is Side.SOURCE and bool(getattr(outcome.error, "retryable", False))
