"""A lane: the copies on their way to one stored tier, one at a time and in order, chunk by chunk.

It is a state machine that the coordinator drives; it does no I/O, reads no clock, and says what is to be done as tasks.
A chunk is dispatched as soon as its bytes are final somewhere (the watermark, or a whole copy), from the fastest place
that has them; each chunk holds a lease on its source for just as long as it is read, so that a copy may change its
source between two chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tierfall.core.contracts import Writer
from tierfall.core.errors import FlushError
from tierfall.core.records import Mark
from tierfall.core.scheduler.ledger import Entry
from tierfall.core.scheduler.tasks import (
    AbortShard,
    CopyChunk,
    FinishCopy,
    OpenShard,
    Outcome,
    Side,
    Source,
    Task,
)
from tierfall.core.snapshot import geometry
from tierfall.core.values import CheckpointId, CopyState

FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 60.0


class Phase(StrEnum):
    OPENING = "opening"
    COPYING = "copying"
    FINISHING = "finishing"
    ABORTING = "aborting"


@dataclass(slots=True, kw_only=True)
class Transfer:
    """One copy on its way. ``published`` says that something of it may be visible on the tier, not committed."""

    entry: Entry
    phase: Phase = Phase.OPENING
    writer: Writer | None = None
    next_chunk: int = 0
    redo: list[int] = field(default_factory=list)
    in_flight: int = 0
    in_flight_bytes: int = 0
    done: int = 0
    error: BaseException | None = None
    published: bool = False


class Lane:
    """What is under way to one stored tier. With ``spare_memory``, host memory is read only where nothing else is."""

    def __init__(
        self,
        tier: str,
        *,
        parallel: int,
        budget_bytes: int,
        order: Sequence[str],
        host: str,
        submit: Callable[[Task], None],
    ) -> None:
        """``order`` are all tiers, fastest first; ``budget_bytes`` bounds the buffers of reads from stored tiers."""
        self.tier = tier
        self._parallel = parallel
        self._budget_bytes = budget_bytes
        self._order = order
        self._host = host
        self._submit = submit
        self.active: Transfer | None = None
        self.tries = 0
        self.failing_since_s: float | None = None
        self.not_before_s = 0.0
        self.full = False
        self.spare_memory = False
        self.edge_bytes: dict[str, int] = {}
        self._bad_sources: dict[CheckpointId, set[str]] = {}

    # Driving ---------------------------------------------------------------------------------------

    def begin(self, entry: Entry) -> None:
        """Start the copy of ``entry``; the caller has made room for it."""
        self.active = Transfer(entry=entry)
        entry.set_state(self.tier, CopyState.ARRIVING)
        source = self._source(self.active)
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
                source=source if needs_reading else None,
            )
        )

    def advance(self, marks: Sequence[Mark], *, name_latest: bool) -> None:
        """Dispatch what can be done now."""
        transfer = self.active
        if transfer is None:
            return
        if transfer.phase is Phase.COPYING:
            self._dispatch_chunks(transfer)
        if transfer.phase is Phase.COPYING and self._all_copied(transfer):
            self._finish(transfer, marks, name_latest)
        if transfer.error is not None and transfer.phase is not Phase.ABORTING:
            self._stop(transfer)

    def is_at(self, id: CheckpointId) -> bool:
        return self.active is not None and self.active.entry.id == id

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

    def take(self, outcome: Outcome) -> bool:
        """Take a worker's outcome; True when the copy has just been committed."""
        transfer = self.active
        if transfer is None or transfer.entry.id != outcome.task.id:  # type: ignore[union-attr]
            raise AssertionError(f"lane {self.tier}: an outcome of a copy that is not active")
        transfer.in_flight -= 1
        match outcome.task:
            case OpenShard():
                if outcome.error is None and outcome.value[0] is None:
                    self.active = None
                    return True
                self._opened(transfer, outcome.task, outcome)
            case CopyChunk():
                self._copied(transfer, outcome.task, outcome)
            case FinishCopy():
                transfer.writer = None
                if outcome.error is None:
                    self.active = None
                    return True
                transfer.error = outcome.error
                transfer.published = True
            case AbortShard():
                if outcome.error is not None and transfer.error is None:
                    transfer.error = outcome.error
        if transfer.error is not None:
            transfer.phase = Phase.ABORTING
        return False

    def _opened(self, transfer: Transfer, task: OpenShard, outcome: Outcome) -> None:
        if outcome.error is not None:
            transfer.error = outcome.error
            if outcome.side is Side.SOURCE:
                self._blame(transfer, task.source, outcome.error)
            return
        transfer.writer, manifest = outcome.value
        entry = transfer.entry
        if manifest is not None:
            entry.manifest = manifest
            entry.geometry = geometry(manifest)
        if transfer.error is None:
            transfer.phase = Phase.COPYING

    def _copied(self, transfer: Transfer, task: CopyChunk, outcome: Outcome) -> None:
        transfer.entry.lease(task.source.tier, -1)
        if task.source.region is None:
            transfer.in_flight_bytes -= task.end - task.start
        if outcome.error is None:
            transfer.done += 1
            source = task.source.tier
            self.edge_bytes[source] = self.edge_bytes.get(source, 0) + task.end - task.start
        elif outcome.side is Side.SOURCE and self._blame(transfer, task.source, outcome.error):
            transfer.redo.append(task.index)
        else:
            transfer.error = outcome.error

    def _blame(self, transfer: Transfer, source: Source | None, error: BaseException) -> bool:
        """Strike a source whose bytes are wrong, not one that only does not answer; say whether another is left."""
        if source is None or getattr(error, "retryable", False):
            return False
        self._bad_sources.setdefault(transfer.entry.id, set()).add(source.tier)
        return self._source(transfer) is not None

    # Dispatching -----------------------------------------------------------------------------------

    def _dispatch(self, task: Task) -> None:
        assert self.active is not None
        self.active.in_flight += 1
        self._submit(task)

    def _dispatch_chunks(self, transfer: Transfer) -> None:
        entry = transfer.entry
        assert entry.geometry is not None
        assert transfer.writer is not None
        while transfer.in_flight < self._parallel and transfer.error is None:
            index = transfer.redo[0] if transfer.redo else transfer.next_chunk
            if index >= entry.geometry.chunk_count:
                return
            source = self._source(transfer, chunk=index)
            if source is None:
                if entry.snapshot is None:
                    transfer.error = FlushError(
                        f"flush of {entry.id} to {self.tier}: no tier holds chunk {index} any more"
                    )
                return
            start, end = entry.geometry.chunk_range(index)
            if source.region is None:
                over = transfer.in_flight_bytes + end - start > self._budget_bytes
                if over and transfer.in_flight:
                    return
                transfer.in_flight_bytes += end - start
            if transfer.redo:
                transfer.redo.pop(0)
            else:
                transfer.next_chunk += 1
            entry.lease(source.tier, +1)
            self._dispatch(
                CopyChunk(
                    tier=self.tier,
                    id=entry.id,
                    shard=entry.shard,
                    index=index,
                    start=start,
                    end=end,
                    source=source,
                    digest=self._digest(entry, source, index),
                    writer=transfer.writer,
                )
            )

    def _digest(self, entry: Entry, source: Source, index: int) -> str | None:
        """What to check the chunk against: all but what this process has just captured and hashed itself."""
        if source.region is not None and not entry.adopted:
            return None
        assert entry.manifest is not None
        return entry.manifest.digests[index]

    def _source(self, transfer: Transfer, chunk: int | None = None) -> Source | None:
        """The fastest place that has the chunk (or, without one, the whole image)."""
        entry = transfer.entry
        bad = self._bad_sources.get(entry.id, ())
        for tier in self._order:
            if tier == self.tier or tier in bad:
                continue
            if tier == self._host:
                if self.spare_memory and self._stored_elsewhere(entry, bad):
                    continue
                final = chunk is not None and chunk < entry.final_chunks
                if entry.region is not None and (final or entry.readable_on(tier)):
                    return Source(tier=tier, region=entry.region)
            elif entry.state(tier) is CopyState.COMMITTED:
                return Source(tier=tier)
        return None

    def _stored_elsewhere(self, entry: Entry, bad: Collection[str]) -> bool:
        return any(
            entry.state(tier) is CopyState.COMMITTED and tier not in bad and tier != self.tier
            for tier in self._order
        )

    def _all_copied(self, transfer: Transfer) -> bool:
        entry = transfer.entry
        assert entry.geometry is not None
        return (
            transfer.error is None
            and transfer.in_flight == 0
            and transfer.done == entry.geometry.chunk_count
            and entry.manifest is not None
            and entry.commit is not None
        )

    def _finish(self, transfer: Transfer, marks: Sequence[Mark], name_latest: bool) -> None:
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
                marks=tuple(marks),
                name_latest=name_latest,
            )
        )

    def _stop(self, transfer: Transfer) -> None:
        if transfer.phase is not Phase.FINISHING:
            transfer.phase = Phase.ABORTING

    # Failing ---------------------------------------------------------------------------------------

    def back_off(self, now_s: float) -> None:
        """Wait longer after each failure in a row."""
        self.tries += 1
        wait = min(FIRST_RETRY_S * 2 ** (self.tries - 1), LONGEST_RETRY_S)
        self.not_before_s = now_s + wait
        if self.failing_since_s is None:
            self.failing_since_s = now_s

    def failing_for_s(self, now_s: float) -> float:
        return 0.0 if self.failing_since_s is None else now_s - self.failing_since_s

    def hopeless(self, entry: Entry) -> bool:
        """Say whether no place is left that the copy could be read from."""
        return entry.snapshot is None and self._source(Transfer(entry=entry)) is None

    def succeeded(self, entry: Entry) -> None:
        self._bad_sources.pop(entry.id, None)
        self.tries = 0
        self.failing_since_s = None
        self.not_before_s = 0.0
        self.full = False
