"""What persons, retention or a lack of room delete from a tier.

The policies decide; here their decisions are combined with what the ledger knows of damaged copies and of deletions by
persons. Nothing is deleted here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from itertools import islice

from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.core.types.view import Decision, Verdict, View
from tierfall.policies.protection import surviving
from tierfall.policies.retention import missing_metrics, next_due_s, plan_drops

logger = logging.getLogger("tierfall")

DELETED = "deleted by a person"
STAY = 2
"""So many of the newest copies that stay are looked at right before a deletion by rule."""
SAVES_WITHOUT_METRICS = 3
"""A rule names a metric that so many saves in a row lack: log it."""
WAIT_MAX_S = 86400.0
"""The longest wait in seconds: system calls bound it."""
LATE_S = 0.001
"""Seconds added to a due time, since sums of clocks may round down."""


class DeletionPlanner:
    """See the module. ``busy`` checkpoints, which are being deleted, are left out."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._warned_metrics: set[str] = set()

    def keeps_all(self, tier: str) -> bool:
        """Return whether the rules of a tier keep every checkpoint that the ledger has, whatever their number."""
        rules = self._ledger.rules_of(tier)
        return not rules.retain and self._ledger.all_live

    def plan(self, view: View, tier: str, busy: Collection[CheckpointId]) -> list[Decision]:
        """Return what retention deletes from a tier now, damaged copies included."""
        return [d for d in plan_drops(view, tier) if d.checkpoint not in busy]

    def _damaged_entries(self, tier: str) -> list[LedgerEntry]:
        """Return the damaged copies on a tier that nobody reads."""
        return [
            e
            for e in self._ledger.repairable()
            if tier in e.repairable and e.state(tier) is CopyState.ABSENT
            if e.leases.get(tier, 0) <= 0 and self._ledger.reading[e.id] <= 0
        ]

    def damaged_for_room(
        self, view: View, tier: str, busy: Collection[CheckpointId]
    ) -> tuple[list[Decision], list[CheckpointId]]:
        """Return the damaged copies to delete first where a tier needs room, in this order, and the others.

        Kept are: the checkpoint that this run was restored from, pinned ones, and those of which copies on several
        tiers are damaged, since these may together contain all good bytes. All are kept until a good copy is known
        that survives the same losses."""
        rules = view.tier(tier)
        good = view.restorable_on(surviving(view, rules.survives, rules))
        continued = any(c.started_from == view.restored_from for c in good)
        views = {checkpoint.id: checkpoint for checkpoint in view.checkpoints}
        deleted, kept = [], []
        for entry in self._damaged_entries(tier):
            began = entry.id == view.restored_from and not continued
            together = not entry.is_whole and len(entry.damage) > 1
            if not good or began or together or entry.pinned or entry.id in busy:
                kept.append(entry.id)
                continue
            reason = "room is needed, and it is damaged"
            size = entry.bytes.get(tier, 0)
            deleted.append(
                Decision(
                    checkpoint=entry.id, tier=tier, verdict=Verdict.DROP, reason=reason, bytes=size
                )
            )
        deleted.sort(key=lambda d: (views[d.checkpoint].live, d.checkpoint))
        return deleted, kept

    def warn_missing_metrics(self, view: View) -> None:
        """Log, once per metric, that a rule depends on a metric which recent saves lack, once one was evaluated."""
        step = self._ledger.evaluated_at
        evaluated = (c for c in view.checkpoints if c.id.step >= step)
        if not any(c.readable for c in evaluated):
            return
        missing = missing_metrics(view, saves_min=SAVES_WITHOUT_METRICS)
        for metric in missing.keys() - self._warned_metrics:
            self._warned_metrics.add(metric)
            logger.warning("%s", missing[metric])

    def deleted(self, tier: str, busy: Collection[CheckpointId]) -> list[Decision]:
        """Return the copies on a tier that a person has deleted and that nobody reads, damaged ones too, and those
        that could not be read."""
        return [
            Decision(
                checkpoint=entry.id,
                tier=tier,
                verdict=Verdict.DROP,
                reason=DELETED,
                bytes=entry.bytes.get(tier, 0),
            )
            for entry in self._ledger.deleted()
            if entry.has_record_on(tier) and entry.leases.get(tier, 0) <= 0 and entry.id not in busy
        ]

    def stay(self, tier: str, drops: Collection[CheckpointId]) -> tuple[CheckpointId, ...]:
        """Return the newest live copies on a tier beside ``drops`` that this node has a part of."""
        kept = (
            entry.id
            for entry in self._ledger.live_copies(tier)
            if entry.id not in drops and not self._ledger.has_no_part(tier, entry.id)
        )
        return tuple(islice(kept, STAY))


class AgeTimer:
    """When retention may next delete something by the age of a checkpoint alone."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._due_s: dict[str, float] = {}

    def schedule(self, view: View, tier: str) -> None:
        """Note when to plan retention on a tier next, by the checkpoints there now."""
        self._due_s.pop(tier, None)
        due = next_due_s(view, tier)
        if due is not None and due > view.wall_time_s:
            left_s = min(due - view.wall_time_s + LATE_S, WAIT_MAX_S)
            self._due_s[tier] = self._ledger.now_s + left_s

    def pop_due(self) -> tuple[str, ...]:
        """Return the tiers to plan now, each once."""
        due = tuple(tier for tier, at in self._due_s.items() if self._ledger.now_s >= at)
        for tier in due:
            del self._due_s[tier]
        return due

    def next_s(self) -> float | None:
        return min(self._due_s.values(), default=None)
