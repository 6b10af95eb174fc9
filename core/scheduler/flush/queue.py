"""The order in which a tier receives the copies that it is owed, and which of them a rule gives up.

Rank 0 orders copies by the policy; the other ranks follow what it has admitted. A copy that has begun is finished
whatever is saved meanwhile: a tier that is slower than the saves would otherwise never receive a whole one. No I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from tierfall.core.scheduler.flush.drain_schedule import DrainSchedule
from tierfall.core.scheduler.ledger.emitter import EventEmitter
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.types.values import CheckpointId
from tierfall.core.types.view import Eviction, Verdict
from tierfall.policies.flush import plan_flush

logger = logging.getLogger("tierfall")


class FlushQueue:
    """See the module. ``given_up`` counts per tier the copies that a rule gave up."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        drain_schedule: DrainSchedule,
        hooks: Hooks,
        emitter: EventEmitter,
    ) -> None:
        self._ledger = ledger
        self._drain_schedule = drain_schedule
        self._hooks = hooks
        self._emitter = emitter
        self._in_order = {rules.name for rules in ledger.rules if rules.in_order}
        self.given_up: dict[str, int] = {}
        self._announced: set[tuple[str, CheckpointId]] = set()

    def waiting(self, tier: str) -> Iterator[LedgerEntry]:
        """Yield the copies that a tier is owed and that this rank may begin, in their order."""
        owing = (e for e in self._ledger.open() if tier in e.owed and tier not in e.uploaded_to)
        waiting = sorted(owing, key=lambda entry: entry.age_order)
        admitted = self._hooks.group.admitted(tier)
        if admitted is not None:
            yield from sorted(
                (entry for entry in waiting if entry.id in admitted),
                key=lambda entry: admitted.index(entry.id),
            )
        elif self._drain_schedule.active:
            yield from self._drain_schedule.in_order(tier, waiting)
        elif tier in self._in_order or not waiting:
            yield from waiting
        else:
            yield from self._planned(tier, {entry.id: entry for entry in waiting})

    def _planned(self, tier: str, waiting: dict[object, LedgerEntry]) -> Iterator[LedgerEntry]:
        planned = []
        for decision in plan_flush(self._ledger.view(), tier):
            entry = waiting.pop(decision.checkpoint, None)
            if entry is None:
                continue
            if decision.verdict is Verdict.DROP:
                self.give_up(entry, tier, decision.reason)
            else:
                planned.append(entry)
        # files of a failed attempt occupy room, and the next attempt overwrites them
        begun = [entry for entry in planned if (tier, entry.id) in self._ledger.unfinished]
        yield from begun
        yield from (entry for entry in planned if entry not in begun)
        yield from waiting.values()  # abandoned ones

    def displaces_newer(self, tier: str, entry: LedgerEntry, plan: Eviction, *, fits: bool) -> bool:
        """Return whether the tier has newer copies, and this one fits only if one of them is evicted, or not at all.
        Copies that a person has deleted count as free room. False for a pinned one, and where copies are made in
        order."""
        draining = self._drain_schedule.active
        is_in_order = tier in self._in_order and not draining and tier not in entry.overtaken
        if entry.pinned or is_in_order:
            return False
        abandoned = self._ledger.abandoned()
        is_late = any(
            e.id > entry.id and e.id not in abandoned and not e.deleted
            for e in self._ledger.entries.values()
            if e.readable_on(tier)
        )
        evicts_newer = any(
            d.checkpoint > entry.id and d.checkpoint not in abandoned
            for d in plan.deletions
            if self._ledger.entries.peek(d.checkpoint).readable_on(tier)
        )
        missing = plan.missing_bytes - self._deleted_bytes(tier)
        return is_late and (evicts_newer or (missing > 0 and not fits))

    def _deleted_bytes(self, tier: str) -> int:
        """Return the bytes of copies on a tier that a person has deleted."""
        doomed = (e for e in self._ledger.entries.values() if e.deleted)
        return sum(e.bytes.get(tier, 0) for e in doomed if e.readable_on(tier))

    def give_up(
        self, entry: LedgerEntry, tier: str, reason: str, *, level: int = logging.INFO
    ) -> None:
        """Give up a copy by a configured rule, on all ranks. The save's handle reports it; it is no failure."""
        if (tier, entry.id) in self._announced:
            return
        logger.log(level, "flush of %s to %s is given up: %s", entry.id, tier, reason)
        self._announced.add((tier, entry.id))
        self._hooks.group.give_up_by_rule(tier, entry.id, reason)

    def give_up_on_this_rank(self, entry: LedgerEntry, tier: str, reason: str) -> None:
        """Give up a copy on this rank, as rank 0 announced."""
        self._announced.discard((tier, entry.id))
        if tier not in entry.owed:
            return
        self.given_up[tier] = self.given_up.get(tier, 0) + 1
        error = entry.given_up(f"{tier}: {reason}")
        self._emitter.flush_given_up(tier, entry.id, error)
        entry.give_up([tier], error)
        self._ledger.forget_if_gone(entry)
