"""One copy in progress to a stored tier: which of its chunks are missing, and where they can be read. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tierfall.core.copies.image_writes import ImageUpload
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.tasks import CopyRun, CopySource
from tierfall.core.types.values import CheckpointId, CopyState


class Phase(StrEnum):
    OPENING = "opening"
    COPYING = "copying"
    FINISHING = "finishing"
    ABORTING = "aborting"


@dataclass(slots=True, kw_only=True)
class Transfer:
    """A copy in progress.

    ``runs`` are chunk ranges (first chunk, chunk after the last), each copied by one task. ``waiting`` are the numbers
    of those that were not begun, ascending; ``outstanding`` those begun and not finished; ``reading`` the tasks that
    read from a stored tier now. ``stalls`` counts consecutive failures after which the copy continues where it stopped.
    ``published``: files of it may be visible on the tier, without a commit. ``source_is_unread``: it failed because a
    source could not be read.
    """

    entry: LedgerEntry
    phase: Phase = Phase.OPENING
    writer: ImageUpload | None = None
    runs: tuple[tuple[int, int], ...] = ()
    waiting: list[int] = field(default_factory=list)
    outstanding: set[int] = field(default_factory=set)
    reading: dict[int, CopyRun] = field(default_factory=dict)
    in_flight: int = 0
    in_flight_bytes: int = 0
    done: int = 0
    done_bytes: int = 0
    stalls: int = 0
    error: BaseException | None = None
    published: bool = False
    source_is_unread: bool = False

    def first_waiting_within(self, run: CopyRun) -> int | None:
        """Return the first waiting range that is contained in ``run``, a read for another tier."""
        at = bisect_left(self.waiting, bisect_left(self.runs, (run.first, 0)))
        if at < len(self.waiting) and self.runs[self.waiting[at]][1] <= run.stop:
            return self.waiting[at]
        return None


class CopySources:
    """The sources of copies to ``tier``: the fastest that has the bytes and has not returned wrong ones. ``order`` are
    the tiers that are written to, fastest first; those that are only read come after them."""

    def __init__(self, tier: str, *, order: Sequence[str], host: str) -> None:
        self._tier = tier
        self._order = order
        self._host = host
        self._bad: dict[CheckpointId, set[str]] = {}

    def find(
        self, entry: LedgerEntry, chunk: int | None = None, *, spare_memory: bool = False
    ) -> CopySource | None:
        """Return the fastest source of a chunk or, without ``chunk``, of the whole image. With ``spare_memory``, use
        host memory only if no stored tier has it."""
        bad = self._bad.get(entry.id, ())
        only_read = (tier for tier in entry.states if tier not in self._order)
        for tier in (*self._order, *only_read):
            if tier == self._tier or tier in bad:
                continue
            if tier == self._host:
                if spare_memory and self._is_stored_elsewhere(entry, bad):
                    continue
                final = chunk is not None and chunk < entry.final_chunks
                whole = entry.readable_on(tier) or entry.awaiting_ranks
                if entry.region is not None and (final or whole):
                    return CopySource(tier=tier, region=entry.region)
            elif entry.state(tier) is CopyState.COMMITTED:
                return CopySource(tier=tier)
        return None

    def _is_stored_elsewhere(self, entry: LedgerEntry, bad: Collection[str]) -> bool:
        return any(
            entry.state(tier) is CopyState.COMMITTED and tier not in bad and tier != self._tier
            for tier in self._order
        )

    def exclude(self, id: CheckpointId, tier: str) -> None:
        """Read this checkpoint no more from a tier: its bytes there are wrong, or may not be read."""
        self._bad.setdefault(id, set()).add(tier)

    def readmit(self, id: CheckpointId, tier: str) -> None:
        """Read this checkpoint from a tier again."""
        self._bad[id].discard(tier)

    def forget(self, id: CheckpointId) -> None:
        self._bad.pop(id, None)
