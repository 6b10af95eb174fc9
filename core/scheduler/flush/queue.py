"""Turns: in which order a tier takes the copies that it is owed, and which of them are given up by a rule.

Rank 0 works the order out by the policy, and all others go by what it has admitted. A copy that was begun is finished,
whatever comes meanwhile: a tier that is slower than the saves would else never get one whole. No I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from tierfall.core.scheduler.flush.deadline import DrainSchedule
from tierfall.core.scheduler.ledger.emitter import EventEmitter
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.policies import Policies
from tierfall.core.types.values import CheckpointId
from tierfall.core.types.view import Eviction, Verdict

logger = logging.getLogger("tierfall")


class FlushQueue:
    """See the module. ``given_up`` counts, by tier, copies that a rule gave up; ``others`` are the other ranks; by
    ``draining`` the order goes towards a deadline."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        policies: Policies,
        drain_schedule: DrainSchedule,
        hooks: Hooks,
        emitter: EventEmitter,
    ) -> None:
        self._ledger = ledger
        self._policies = policies
        self._drain_schedule = drain_schedule
        self._hooks = hooks
        self._emitter = emitter
        self._in_order = {rules.name for rules in ledger.rules if rules.in_order}
        self.given_up: dict[str, int] = {}
        self._announced: set[tuple[str, CheckpointId]] = set()

    def waiting(self, tier: str) -> Iterator[LedgerEntry]:
        """Give what a tier is owed and this rank may begin to bring, one after the other, whose turn it is first."""
        owing = (e for e in self._ledger.open() if tier in e.owed and tier not in e.landed)
        waiting = sorted(owing, key=lambda entry: entry.order)
        admitted = self._hooks.group.admitted(tier)
        if admitted is not None:
            yield from sorted(
                (entry for entry in waiting if entry.id in admitted),
                key=lambda entry: admitted.index(entry.id),
            )
        elif self._drain_schedule.active:
            yield from self._drain_schedule.turns(tier, waiting)
        elif tier in self._in_order or not waiting:  # what is not there yet comes before repairs
            yield from sorted(waiting, key=lambda entry: tier in entry.damage)
        else:
            yield from self._planned(tier, {entry.id: entry for entry in waiting})

    def _planned(self, tier: str, waiting: dict[object, LedgerEntry]) -> Iterator[LedgerEntry]:
        planned = []
        for decision in self._policies.plan_flush(self._ledger.view(), tier):
            entry = waiting.pop(decision.checkpoint, None)
            if entry is None:
                continue
            if decision.verdict is Verdict.DROP:
                self.give_up(entry, tier, decision.reason)
            else:
                planned.append(entry)
        # what a try that failed has left takes room, and is written over by the next one
        begun = [entry for entry in planned if (tier, entry.id) in self._ledger.unfinished]
        yield from begun
        yield from (entry for entry in planned if entry not in begun)
        yield from waiting.values()  # of lines that were left behind

    def leaves_room(self, tier: str, entry: LedgerEntry, plan: Eviction, *, fits: bool) -> bool:
        """Give a copy up, and say so, that came after newer ones and would have room only in place of these; or, where
        it does not fit as it is, of what may not go at all. What a person has deleted makes room in a moment."""
        draining = self._drain_schedule.active
        in_turn = tier in self._in_order and not draining and tier not in entry.overtaken
        if entry.pinned or in_turn:
            return False
        left = self._ledger.abandoned()
        after = any(
            e.id > entry.id and e.id not in left and not e.tombstoned
            for e in self._ledger.entries.values()
            if e.readable_on(tier)
        )
        newer = any(
            d.checkpoint > entry.id and d.checkpoint not in left
            for d in plan.drops
            if self._ledger.entries.peek(d.checkpoint).readable_on(tier)
        )
        missing = plan.missing_bytes - self._deleted_bytes(tier)
        if not after or not (newer or (missing > 0 and not fits)):
            return False
        self.give_up(entry, tier, "newer ones came first, and there is no room beside them")
        return True

    def _deleted_bytes(self, tier: str) -> int:
        """Return the bytes of copies on a tier that go once their tombstones are on every tier."""
        held = (e for e in self._ledger.entries.values() if e.tombstoned and not e.pinned)
        return sum(e.bytes.get(tier, 0) for e in held if e.readable_on(tier))

    def give_up(
        self, entry: LedgerEntry, tier: str, reason: str, *, level: int = logging.INFO
    ) -> None:
        """Give a copy up by a rule that a person has set: all ranks do, whoever waits is told, and it is no error."""
        if (tier, entry.id) in self._announced:
            return
        logger.log(level, "flush of %s to %s is given up: %s", entry.id, tier, reason)
        if self._hooks.group.gives_up(tier, entry.id, reason):
            self._announced.add((tier, entry.id))
        else:
            self.give_up_here(entry, tier, reason)

    def give_up_here(self, entry: LedgerEntry, tier: str, reason: str) -> None:
        """Do so on this rank; what it gave up itself it has said already."""
        self._announced.discard((tier, entry.id))
        if tier not in entry.owed:
            return
        self.given_up[tier] = self.given_up.get(tier, 0) + 1
        error = entry.given_up(f"{tier}: {reason}")
        self._emitter.flush_given_up(tier, entry.id, error)
        entry.give_up([tier], error)
        self._ledger.forget_if_gone(entry)
