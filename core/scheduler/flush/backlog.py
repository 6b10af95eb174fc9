"""Pressure: what comes to each tier against what it takes, how far behind that leaves it, and whether it was promised.

It belongs to the coordinator's thread, reads no clock and does no I/O. With several ranks each counts for itself, and
rank 0 says it.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Mapping

from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.policies import Policies
from tierfall.core.types.units import format_duration
from tierfall.core.types.values import CheckpointId, TierKind
from tierfall.core.types.view import TierRules

logger = logging.getLogger("tierfall")
FIRST_SAVES = 4
"""How far the first ones of a run are apart says nothing of those to come."""
GAPS_REMEMBERED = 16
DUE_REMEMBERED = 4096


class Backlog:
    """See the module. ``behind`` is the forecast of each tier, in checkpoints; ``late`` counts, by tier, how often it
    came to be further behind than ``flush.within``."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        policies: Policies,
        hooks: Hooks,
    ) -> None:
        self._ledger = ledger
        self._policies = policies
        self._hooks = hooks
        self._stored: Mapping[str, TierRules] = {
            rules.name: rules
            for rules in ledger.rules
            if rules.kind not in (TierKind.DEVICE, TierKind.HOST)
        }
        self.behind: dict[str, float] = {}
        self.late: dict[str, int] = {}
        self._saves = 0
        self._trained_since_s: float | None = None
        self._first_s: list[float] = []
        self._gaps_s: deque[float] = deque(maxlen=GAPS_REMEMBERED)
        self._bytes = 0
        self._warned: set[str] = set()
        self._due: dict[str, dict[CheckpointId, float]] = {tier: {} for tier in self._stored}
        self._is_late: set[str] = set()
        self._found: list[tuple[CheckpointId, tuple[str, ...]]] = []

    @property
    def save_every_s(self) -> float | None:
        """Seconds of training between two saves; None before it can be told. The mean, since pauses let a tier catch
        up, or what is usual where that is more, since a few saves in a hurry are no cadence."""
        if not self._gaps_s:
            return None
        return max(statistics.fmean(self._gaps_s), statistics.median(self._gaps_s))

    @property
    def likely_every_s(self) -> float | None:
        """The same, or, before that can be told, what the first few saves let expect; None before the second."""
        if self._gaps_s or not self._first_s:
            return self.save_every_s
        return statistics.fmean(self._first_s)

    @property
    def image_bytes(self) -> int:
        """Bytes of the last image."""
        return self._bytes

    def behind_s(self, tier: str, now_s: float) -> float:
        """Return how many seconds ago the oldest checkpoint was saved that is newer than all that a tier has."""
        self._forget_abandoned(tier)
        return self._behind_s(tier, now_s)

    def _behind_s(self, tier: str, now_s: float) -> float:
        return max(0.0, now_s - min(self._due[tier].values(), default=now_s))

    # Being told ------------------------------------------------------------------------------------

    def asked(self, image_bytes: int, now_s: float) -> None:
        """A save asks for room: what it waits for that is not training's time."""
        self._saves += 1
        self._bytes = image_bytes
        if self._trained_since_s is not None:
            gaps = self._gaps_s if self._saves > FIRST_SAVES else self._first_s
            gaps.append(max(0.0, now_s - self._trained_since_s))
        self._trained_since_s = now_s
        for tier in self._stored:
            self._update_outlook(tier)

    def answered(self, now_s: float) -> None:
        """It has room, or is skipped: the training goes on."""
        self._trained_since_s = now_s

    def saved(self, id: CheckpointId, tiers: tuple[str, ...], now_s: float) -> None:
        """A checkpoint is to come to these tiers."""
        for tier in tiers:
            due = self._due.get(tier)
            if due is None:
                continue
            due[id] = now_s
            if len(due) > DUE_REMEMBERED:
                del due[list(due)[1]]  # the oldest is what counts

    def found(self, id: CheckpointId, tiers: tuple[str, ...]) -> None:
        """An earlier start left a checkpoint that is still to come to these tiers: it counts as saved now."""
        self._found.append((id, tiers))

    def arrived(self, tier: str, id: CheckpointId) -> None:
        """A checkpoint was committed: the tier is behind by newer ones only."""
        self._due[tier] = {other: at for other, at in self._due[tier].items() if other > id}

    def gone(self, id: CheckpointId) -> None:
        """There is no such checkpoint any more, nor was it to be: nobody misses it."""
        for due in self._due.values():
            due.pop(id, None)

    # Looking ---------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Say which tiers are too far behind, once for as long as that lasts."""
        while self._found:
            self.saved(*self._found.pop(0), now_s)
        for tier, rules in self._stored.items():
            if rules.within_s is None:
                continue
            behind_s = self._behind_s(tier, now_s)
            reason = self._policies.lateness(rules, behind_s)
            if reason is not None and tier not in self._is_late:
                behind_s = self.behind_s(tier, now_s)
                reason = self._policies.lateness(rules, behind_s)
            if reason is None and tier in self._is_late:
                self._is_late.discard(tier)
                logger.info("%s has caught up: it is %s behind", tier, format_duration(behind_s))
            elif reason is not None and tier not in self._is_late:
                self._is_late.add(tier)
                self.late[tier] = self.late.get(tier, 0) + 1
                if self._hooks.group.decides:
                    logger.warning("%s", reason)

    def next_s(self, now_s: float) -> float | None:
        """Say when a tier comes to be too far behind, if it gets nothing until then."""
        return min(
            (
                when
                for tier, rules in self._stored.items()
                if rules.within_s is not None and self._due[tier] and tier not in self._is_late
                if (when := min(self._due[tier].values()) + rules.within_s + 0.001) > now_s
            ),
            default=None,
        )

    def _forget_abandoned(self, tier: str) -> None:
        if not self._due[tier]:
            return
        left = self._ledger.abandoned()
        for id in list(self._due[tier]):
            entry = self._ledger.entries.get(id)
            if id in left or (entry is not None and entry.tombstoned):
                self.gone(id)

    def _update_outlook(self, tier: str) -> None:
        rules = self._stored[tier]
        seen = self._policies.forecast(
            rules,
            saves=self._saves,
            every_s=self.save_every_s or 0.0,
            bytes=self._bytes,
            bytes_per_s=self._ledger.rates.delivered_bytes_per_s(tier),
            stretches=self._ledger.rates.stretches(tier),
            waiting=sum(tier in entry.owed for entry in self._ledger.open()),
        )
        self.behind[tier] = seen.behind
        if seen.warning is not None and tier not in self._warned and self._hooks.group.decides:
            self._warned.add(tier)
            logger.warning("%s", seen.warning)
