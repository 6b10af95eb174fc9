"""Dropping: how copies leave stored tiers, by retention, by room that is needed, and by a person's order.

Whoever plans a deletion reads the marks afresh: a survey of a tier's marks comes first, the plan of the policy second,
the deletions third. Nothing here does I/O; it says what is to be done as tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from tierfall.core import names
from tierfall.core.scheduler.ledger import Entry, Ledger
from tierfall.core.scheduler.tasks import DropCopy, Outcome, ReadMarks, Task
from tierfall.core.values import CheckpointId, CopyState
from tierfall.core.view import Decision, Verdict, View

logger = logging.getLogger("tierfall")

PlanRetention = Callable[[View, str], tuple[Decision, ...]]


class Dropper:
    """What is leaving, and which tiers' marks are to be read before more may leave."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        tiers: Iterable[str],
        plan_retention: PlanRetention,
        dispatch: Callable[[Task], None],
    ) -> None:
        self._ledger = ledger
        self._plan_retention = plan_retention
        self._dispatch = dispatch
        self._leaving: dict[str, set[CheckpointId]] = {tier: set() for tier in tiers}
        self._due: set[str] = set()
        self._surveying: set[str] = set()
        self.dropped = 0
        self.paused = False

    def survey(self, tier: str) -> None:
        """Ask for the marks of a tier to be read, and for its retention to be worked out after that."""
        self._due.add(tier)

    def survey_all(self) -> None:
        self._due.update(self._leaving)

    def busy(self, tier: str | None = None) -> bool:
        if tier is not None:
            return bool(self._leaving[tier])
        return bool(self._due or self._surveying or any(self._leaving.values()))

    def leaving(self, id: CheckpointId) -> bool:
        return any(id in ids for ids in self._leaving.values())

    def dispatch_surveys(self) -> None:
        """Read the marks that are due, unless a restore is reading the tiers."""
        if self.paused:
            return
        for tier in sorted(self._due - self._surveying):
            self._due.discard(tier)
            ids = tuple(
                e.id for e in self._ledger.ordered() if e.state(tier) is CopyState.COMMITTED
            )
            if ids:
                self._surveying.add(tier)
                self._dispatch(ReadMarks(tier=tier, ids=ids))

    def cancel(self) -> None:
        """Nothing more may be dropped by this process."""
        self._due.clear()

    def take_marks(self, task: ReadMarks, outcome: Outcome) -> None:
        """Learn a tier's marks, then carry out its retention."""
        self._surveying.discard(task.tier)
        if outcome.error is not None:
            logger.warning(
                "%s: nothing is dropped there, its marks could not be read: %s",
                task.tier,
                outcome.error,
            )
            return
        for id, marks in outcome.value.items():
            entry = self._ledger.entries.get(id)
            if entry is not None and entry.state(task.tier) is CopyState.COMMITTED:
                entry.marks[task.tier] = marks
                if entry.tombstoned:
                    entry.owed.clear()
        if self.paused:
            self._due.add(task.tier)
            return
        for decision in self._plan(task.tier):
            self.drop(task.tier, decision.checkpoint, decision.reason)
        for other in self._leaving:
            if other != task.tier and self._plan(other):
                self._due.add(other)

    def _plan(self, tier: str) -> list[Decision]:
        return [
            decision
            for decision in self._plan_retention(self._ledger.view(), tier)
            if decision.verdict is Verdict.DROP and decision.checkpoint not in self._leaving[tier]
        ]

    def drop(self, tier: str, id: CheckpointId, reason: str, *, by_person: bool = False) -> None:
        """Let a committed copy go."""
        entry = self._ledger.entries[id]
        entry.set_state(tier, CopyState.LEAVING)
        self._leave(
            DropCopy(
                tier=tier,
                id=id,
                reason=reason,
                by_person=by_person,
                next_latest=self._newest_left(tier, without=id),
            )
        )

    def collect(self, tier: str, id: CheckpointId, reason: str) -> None:
        """Remove what is left of a copy that was never committed."""
        self._leave(DropCopy(tier=tier, id=id, reason=reason, unfinished=True))

    def _leave(self, task: DropCopy) -> None:
        if task.id in self._leaving[task.tier]:
            return
        self._leaving[task.tier].add(task.id)
        logger.info("%s: %s is dropped: %s", task.tier, task.id, task.reason)
        self._dispatch(task)

    def take_dropped(self, task: DropCopy, outcome: Outcome) -> bool:
        """Take what became of a deletion; True when there is more room now."""
        self._leaving[task.tier].discard(task.id)
        entry = self._ledger.entries.get(task.id)
        if outcome.error is not None:
            logger.warning("%s: could not drop %s: %s", task.tier, task.id, outcome.error)
            if entry is not None and not task.unfinished:
                # what is left of it is for the next survey, or for the next start
                entry.set_state(task.tier, CopyState.COMMITTED)
            return False
        if task.unfinished:
            self._ledger.unfinished.pop((task.tier, task.id), None)
            return True
        return entry is not None and self._gone(entry, task, outcome)

    def _gone(self, entry: Entry, task: DropCopy, outcome: Outcome) -> bool:
        if names.PIN_MARK in outcome.value and not task.by_person:
            logger.info("%s: %s stays after all: it was pinned", task.tier, entry.id)
            entry.set_state(task.tier, CopyState.COMMITTED)
            entry.marks[task.tier] = outcome.value
            return False
        entry.set_state(task.tier, CopyState.ABSENT)
        entry.damage.pop(task.tier, None)
        self.dropped += 1
        self._ledger.forget_if_gone(entry)
        return True

    def _newest_left(self, tier: str, *, without: CheckpointId) -> CheckpointId | None:
        left = self._ledger.abandoned()
        return max(
            (
                e.id
                for e in self._ledger.entries.values()
                if e.state(tier) is CopyState.COMMITTED
                and e.id not in left
                and e.id != without
                and not e.tombstoned
            ),
            default=None,
        )
