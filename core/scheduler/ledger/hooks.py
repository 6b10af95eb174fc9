"""The calls between components of the coordinator that would otherwise close a circle of constructors.

A component receives the hooks by its constructor and calls them only after all components are built.
``core/scheduler/components.py:Components`` implements them; a method there calls exactly one component.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.one_rank import OneRank
from tierfall.core.scheduler.ledger.tasks import DeleteCopy, ReadMarks, Task
from tierfall.core.types.values import CheckpointId


class Hooks(Protocol):
    """See the module."""

    group: OneRank
    """What this rank decides itself and what it asks rank 0: ``Commits`` where the run has several ranks."""

    def dispatch(self, task: Task) -> None:
        """Queue a task for the workers. Its outcome arrives at the coordinator."""

    def may_write(self) -> bool:
        """Return False once a newer attempt exists, and in a process that only carries out commands."""

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

    def is_draining(self) -> bool:
        """Return whether lanes copy in the order of a drain's plan."""

    def is_urgent(self) -> bool:
        """Return whether flushes must run unthrottled: a save needs memory, or there is a deadline."""

    # Verification

    def verify(self, tier: str, *, hurry: bool = False) -> bool:
        """Start reading the newest unverified copy that a deletion on ``tier`` may rely on; return False where there
        is none. ``hurry``: room on the tier depends on the result."""

    def verify_elsewhere(self, tier: str, ids: Sequence[CheckpointId]) -> bool:
        """Start reading the copies on other tiers of what is to be deleted from ``tier``; return whether the deletion
        has to wait for the result."""

    # Commands

    def finish_deletion(self, id: CheckpointId) -> None:
        """Delete the remaining copies of a checkpoint that bears a tombstone."""

    def was_deleted(self, id: CheckpointId) -> bool:
        """Return whether this process carried out a person's deletion of a checkpoint."""

    def is_unpinning(self, id: CheckpointId) -> bool:
        """Return whether an unpin command of a checkpoint is in progress."""

    # Marks on tiers of which each node has its own

    def is_split(self, tier: str) -> bool:
        """Return whether other nodes store parts of the copies on a tier."""

    def read_marks(self, task: ReadMarks) -> None:
        """Read marks on this node or, where the tier is split, on all nodes."""

    def read_marks_first(self, task: DeleteCopy) -> bool:
        """Where the tier is split, read the marks of a copy on all nodes before it is deleted; else return False."""
