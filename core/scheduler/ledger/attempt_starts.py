"""Records of where this attempt began, on tiers that hold abandoned checkpoints and none of this attempt yet.

A tier that receives few checkpoints may receive none of the new lineage before the tiers that have some are lost. The
abandoned checkpoints on it would then count as live again. Belongs to the coordinator's thread and does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tierfall.core.format.records import Commit
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import Outcome, RecordStart
from tierfall.core.types.values import CopyState


class StartRecords:
    """See the module. ``tiers`` are those that this process writes to."""

    def __init__(self, *, ledger: Ledger, tiers: Iterable[str], hooks: Hooks) -> None:
        self._ledger = ledger
        self._tiers = frozenset(tiers)
        self._hooks = hooks
        self._recorded: set[tuple[str, int]] = set()
        self._conditions = Conditions()

    def committed(self, tier: str, commit: Commit | None) -> None:
        """A checkpoint was committed on a tier: if it is of this attempt, record the attempt's start on the others."""
        attempt = self._ledger.attempt
        if commit is None or commit.lineage.checkpoint.attempt != attempt:
            return
        self._recorded.add((tier, attempt))
        if all((other, attempt) in self._recorded for other in self._tiers):
            return
        abandoned = self._ledger.abandoned()
        for other in self._tiers:
            if (other, attempt) in self._recorded:
                continue
            self._recorded.add((other, attempt))
            if any(
                entry.id in abandoned and entry.state(other) is CopyState.COMMITTED
                for entry in self._ledger.entries.values()
            ):
                self._hooks.dispatch(
                    RecordStart(tier=other, id=commit.lineage.checkpoint, commit=commit)
                )

    def on_outcome(self, outcome: Outcome) -> None:
        """Apply an outcome. After a failure the record is written with the next commit."""
        task = outcome.task
        assert isinstance(task, RecordStart)
        number = task.id.attempt
        if outcome.error is not None:
            self._conditions.report(
                (task.tier, number), logging.WARNING,
                "%s: the start of attempt %d is not recorded yet: %s",
                task.tier, number, outcome.error,
            )  # fmt: skip
            self._recorded.discard((task.tier, number))
        else:
            text = "%s: the start of attempt %d is recorded"
            self._conditions.end((task.tier, number), text, task.tier, number)
