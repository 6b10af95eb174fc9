"""How this process's attempt began, recorded on tiers that hold what it leaves behind before it commits anything there.

A tier that gets few checkpoints may get none of the new line before those that have some are lost. What it holds of the
old line would be of the present one again. It belongs to the coordinator's thread and does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tierfall.core.format.records import Commit
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import Outcome, RecordStart
from tierfall.core.types.values import CopyState

logger = logging.getLogger("tierfall")


class StartRecords:
    """See the module. ``tiers`` are those that this process writes to."""

    def __init__(self, *, ledger: Ledger, tiers: Iterable[str], hooks: Hooks) -> None:
        self._ledger = ledger
        self._tiers = frozenset(tiers)
        self._hooks = hooks
        self._recorded: set[tuple[str, int]] = set()

    def committed(self, tier: str, commit: Commit | None) -> None:
        """A checkpoint is on a tier: where it is of this attempt, what that leaves behind on others stays so."""
        attempt = self._ledger.attempt
        if commit is None or commit.line.checkpoint.attempt != attempt:
            return
        self._recorded.add((tier, attempt))
        if all((other, attempt) in self._recorded for other in self._tiers):
            return
        left = self._ledger.abandoned()
        for other in self._tiers:
            if (other, attempt) in self._recorded:
                continue
            self._recorded.add((other, attempt))
            if any(
                entry.id in left and entry.state(other) is CopyState.COMMITTED
                for entry in self._ledger.entries.values()
            ):
                self._hooks.dispatch(
                    RecordStart(tier=other, id=commit.line.checkpoint, commit=commit)
                )

    def took(self, outcome: Outcome) -> None:
        """Take what became of it: after a failure it is tried again with the next commit."""
        task = outcome.task
        assert isinstance(task, RecordStart)
        if outcome.error is not None:
            logger.warning(
                "%s: how attempt %d began is not recorded yet: %s",
                task.tier,
                task.id.attempt,
                outcome.error,
            )
            self._recorded.discard((task.tier, task.id.attempt))
