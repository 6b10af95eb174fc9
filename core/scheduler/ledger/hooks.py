"""The calls between components of the coordinator that would otherwise close a circle of constructors.

A component receives the hooks by its constructor and calls them only after all components are built.
``core/scheduler/components.py:Components`` implements them; a method there calls exactly one component.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from tierfall.core.format.decided import DecidedList
from tierfall.core.format.records import NamedFile
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.tasks import DeleteCopy, Task
from tierfall.core.types.errors import FencedError
from tierfall.core.types.values import CheckpointId, SaveOutcome


class Group(Protocol):
    """What this rank asks of and reports to the ranks of the run, itself included; see ``group/commits.py:Commits``.

    Rank 0 decides which copy a tier receives next, when a checkpoint is complete, what is given up and what is deleted.
    ``decides``: this is rank 0.
    """

    decides: bool

    def ranks_on(self, tier: str) -> int:
        """Return how many ranks' images this rank sees on a tier."""

    def admitted(self, tier: str) -> Sequence[CheckpointId] | None:
        """Return the copies that rank 0 has admitted to a tier, in their order; None on the rank that decides."""

    def give_up_by_rule(self, tier: str, id: CheckpointId, reason: str) -> None:
        """A rule gives up a copy: all ranks do."""

    def on_copy_begun(self, tier: str, entry: LedgerEntry) -> None:
        """A copy was admitted to a tier."""

    def is_committing_on(self, tier: str) -> bool:
        """Return, at rank 0, whether all ranks have uploaded a copy that is not committed yet."""

    def on_save_begun(self, id: CheckpointId) -> None:
        """The capture of a save has begun, or failed to begin."""

    def on_deleted(self, task: DeleteCopy) -> None:
        """A committed copy is being deleted from a tier."""

    def sealed(self, entry: LedgerEntry) -> None:
        """This rank's image is complete."""

    def on_uploaded(self, tier: str, entry: LedgerEntry, files: Collection[NamedFile]) -> None:
        """This rank has uploaded an image to a tier, as ``files``; there may be none."""

    def give_up_copy(self, entry: LedgerEntry, tier: str, error: BaseException) -> None:
        """This rank can never write a copy: all ranks give it up."""

    def tier_failing(self, entry: LedgerEntry, tier: str, error: BaseException) -> None:
        """A tier has not accepted a copy of this rank for long."""

    def set_aside(self, entry: LedgerEntry, tier: str, error: BaseException) -> None:
        """A tier accepts other copies of this rank, but not this one: no rank tries it any more in this start."""

    def is_stuck(self, tier: str) -> bool:
        """Return whether a tier accepts no copy of some other rank at present."""

    def save_failed(self, id: CheckpointId, error: BaseException, outcome: SaveOutcome) -> None:
        """A save failed on this rank."""

    def why_save_failed(self, id: CheckpointId) -> tuple[BaseException, SaveOutcome] | None:
        """Return why the ranks have given up a checkpoint that this one only begins to save."""

    def why_copies_given_up(self, id: CheckpointId) -> Mapping[str, BaseException]:
        """Return the tiers, with errors, where the ranks have given up a checkpoint that this rank begins to save."""

    def on_saved_in_vain(self, entry: LedgerEntry) -> None:
        """This rank has saved what others had given up: its lineage counts that save, theirs may not."""

    def on_fenced(self, error: FencedError) -> None:
        """A newer attempt exists: no rank may commit any more."""


class Hooks(Protocol):
    """See the module."""

    group: Group

    def dispatch(self, task: Task) -> None:
        """Queue a task for the workers. Its outcome arrives at the coordinator."""

    @property
    def fenced(self) -> FencedError | None:
        """The error that reports a newer attempt: this process writes nothing more."""

    # Copies on stored tiers

    def on_committed(self, tier: str, entry: LedgerEntry) -> None:
        """A checkpoint was committed on a tier."""

    def on_external_commit(self, tier: str, entry: LedgerEntry) -> None:
        """A checkpoint that another process committed on a tier was added to the ledger."""

    def found_damage(
        self, tier: str, id: CheckpointId, why: str, *, repairable: bool = True
    ) -> None:
        """A copy differs from its digests or lacks files. Not ``repairable``: its commit record is gone, too."""

    # Memory and deadlines

    def evict_leftovers(self) -> bool:
        """Free memory that an earlier start left; return False where there is none."""

    def memory_is_short(self) -> bool:
        """Return whether the last save that requested a region found no room."""

    def has_deadline(self) -> bool:
        """Return whether a drain works towards a deadline, on any rank."""

    def try_again(self) -> None:
        """Try at once whatever waits for its next try: a tier may work again."""

    def is_urgent(self) -> bool:
        """Return whether flushes must run unthrottled: a save needs memory, or there is a deadline."""

    def is_verifying(self, tier: str) -> bool:
        """Return, on rank 0, whether a copy on a tier is being read, so that more may be deleted there soon."""

    # What is decided

    def decided(self, tier: str, found: DecidedList) -> None:
        """The list of a tier was read."""

    def is_noted(self, id: CheckpointId, tier: str) -> bool:
        """Return whether a person's deletion is noted, so that the copy on a tier may go."""

    def is_split(self, tier: str) -> bool:
        """Return whether other nodes store parts of the copies on a tier."""
