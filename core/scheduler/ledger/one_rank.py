"""What the scheduler asks and tells the other ranks of a run; and the answers where there are none.

Rank 0 decides for all: which copy a tier takes next, when all that belongs to a checkpoint is there, whether it is
given up, what leaves a tier. ``commits`` is the part of a rank that has others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tierfall.core.format.records import NamedFile
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import DeleteCopy
from tierfall.core.types.errors import FencedError
from tierfall.core.types.values import CheckpointId, CopyState, SaveOutcome


class OneRank:
    """The one rank of a run: it decides by itself, and a copy of its image is the checkpoint.

    ``decides``: what a tier takes and what leaves it is planned here. ``land_only``: a copy here is a part of a
    checkpoint, and is not committed by itself.
    """

    decides = True
    land_only = False

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def ranks_on(self, tier: str) -> int:
        """How many ranks bring images to what this rank sees of a tier."""
        return 1

    def admitted(self, tier: str) -> Sequence[CheckpointId] | None:
        """Name the copies that rank 0 has begun to bring to a tier, in that order; None where that is decided here."""
        return None

    def gives_up(self, tier: str, id: CheckpointId, reason: str) -> bool:
        """A rule gives a copy up; True where all ranks, this one among them, hear of it as a message."""
        return False

    def has_begun(self, tier: str, entry: LedgerEntry) -> None:
        """A copy has been admitted to a tier."""

    def has_begun_save(self, id: CheckpointId) -> None:
        """A save has begun, or failed to."""

    def has_dropped(self, task: DeleteCopy) -> None:
        """A committed copy is to leave a tier."""

    def sealed(self, entry: LedgerEntry) -> None:
        """This rank's image is whole in memory, and outlives the process."""
        entry.set_state(self._ledger.host, CopyState.SEALED)

    def landed(self, tier: str, entry: LedgerEntry, files: Collection[NamedFile]) -> None:
        """An image that this rank brings lies on a tier: ``files`` are it and what belongs to it. There may be none."""

    def cannot(
        self, entry: LedgerEntry, tier: str, error: BaseException, *, for_good: bool
    ) -> bool:
        """A tier does not take a copy from this rank, and has not for long; True where that ends it for all ranks, as
        what lasts ``for_good`` does."""
        return False

    def sets_aside(self, entry: LedgerEntry, tier: str, error: BaseException) -> bool:
        """This rank cannot bring one copy to a tier that takes others; True where all ranks, this one among them, hear
        of it as a message."""
        return False

    def is_stuck(self, tier: str) -> bool:
        """Say whether a tier does not take a copy from some other rank at present."""
        return False

    def lost(self, id: CheckpointId, error: BaseException, outcome: SaveOutcome) -> None:
        """A save will never be whole on this rank."""

    def was_lost(self, id: CheckpointId) -> tuple[BaseException, SaveOutcome] | None:
        """Say why other ranks have given up a checkpoint that this one only begins to save."""
        return None

    def was_given_up(self, id: CheckpointId) -> Mapping[str, BaseException]:
        """Name the tiers where other ranks have given up a checkpoint that this one only begins to save, and why."""
        return {}

    def saved_in_vain(self, entry: LedgerEntry) -> None:
        """This rank has saved what others had given up; its line counts that, theirs may not."""

    def is_fenced(self, error: FencedError) -> None:
        """This process must not commit any more."""
