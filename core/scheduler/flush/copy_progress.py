"""A transfer: one copy on its way to a tier, and which of its chunks are still to come. Values only."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import StrEnum

from tierfall.core.copies.image_writes import ImageUpload
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.tasks import CopyRun


class Phase(StrEnum):
    OPENING = "opening"
    COPYING = "copying"
    FINISHING = "finishing"
    ABORTING = "aborting"


@dataclass(slots=True, kw_only=True)
class Transfer:
    """One copy on its way.

    ``runs`` of chunks are brought, each as a whole; ``waiting`` are the numbers of those to be begun, in rising order,
    ``outstanding`` those that were begun and are not done, and ``reading`` the runs that workers are just bringing from
    a stored tier. ``stalls`` counts the failures in a row after which it goes on where it was. ``published`` says that
    something of it may be visible on the tier, not committed; ``source_is_silent`` that it failed as a source did not
    answer.
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
    source_is_silent: bool = False

    def waiting_within(self, run: CopyRun) -> int | None:
        """Return the first run to be begun whose chunks are all among those of another copy's ``run``."""
        at = bisect_left(self.waiting, bisect_left(self.runs, (run.first, 0)))
        if at < len(self.waiting) and self.runs[self.waiting[at]][1] <= run.stop:
            return self.waiting[at]
        return None
