"""What the scheduler asks of and reports to the other ranks, and the answers in a run of one rank.

With several ranks, rank 0 decides which copy a tier receives next, when a checkpoint is complete, what is given up and
what is deleted. ``group/commits.py:Commits`` then takes the place of ``OneRank``.
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
    """A run of one rank: it decides itself, and a copy of its image is a checkpoint.

    ``decides``: this rank plans copies and deletions. ``upload_only``: a copy of this rank is one of several images of
    a checkpoint, and is not committed by itself.
    """

    decides = True
    upload_only = False

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def ranks_on(self, tier: str) -> int:
        """Return how many ranks' images this rank sees on a tier."""
        return 1

    def admitted(self, tier: str) -> Sequence[CheckpointId] | None:
        """Return the copies that rank 0 has admitted to a tier, in their order; None on the rank that decides."""
        return None

    def give_up_by_rule(self, tier: str, id: CheckpointId, reason: str) -> bool:
        """A rule gives up a copy. Return True if a message will report that to all ranks, this one included."""
        return False

    def on_copy_begun(self, tier: str, entry: LedgerEntry) -> None:
        """A copy was admitted to a tier."""

    def on_save_begun(self, id: CheckpointId) -> None:
        """The capture of a save has begun, or failed to begin."""

    def on_deleted(self, task: DeleteCopy) -> None:
        """A committed copy is being deleted from a tier."""

    def sealed(self, entry: LedgerEntry) -> None:
        """This rank's image is sealed in memory."""
        entry.set_state(self._ledger.host, CopyState.SEALED)

    def on_uploaded(self, tier: str, entry: LedgerEntry, files: Collection[NamedFile]) -> None:
        """This rank has uploaded an image to a tier, as ``files``; there may be none."""

    def copy_failed(
        self, entry: LedgerEntry, tier: str, error: BaseException, *, for_good: bool
    ) -> bool:
        """A tier has not accepted a copy of this rank for long, or ``for_good``. Return True if all ranks give up."""
        return False

    def set_aside(self, entry: LedgerEntry, tier: str, error: BaseException) -> bool:
        """A tier accepts other copies of this rank, but not this one. Return True if a message will report that to all
        ranks, this one included."""
        return False

    def is_stuck(self, tier: str) -> bool:
        """Return whether a tier accepts no copy of some other rank at present."""
        return False

    def save_failed(self, id: CheckpointId, error: BaseException, outcome: SaveOutcome) -> None:
        """A save failed on this rank."""

    def why_save_failed(self, id: CheckpointId) -> tuple[BaseException, SaveOutcome] | None:
        """Return why the ranks have given up a checkpoint that this one only begins to save."""
        return None

    def why_copies_given_up(self, id: CheckpointId) -> Mapping[str, BaseException]:
        """Return the tiers, with errors, where the ranks have given up a checkpoint that this rank begins to save."""
        return {}

    def on_saved_in_vain(self, entry: LedgerEntry) -> None:
        """This rank has saved what others had given up: its lineage counts that save, theirs may not."""

    def on_fenced(self, error: FencedError) -> None:
        """A newer attempt exists: no rank may commit any more."""
