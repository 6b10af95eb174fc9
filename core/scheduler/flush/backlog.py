"""How far each tier's copies are behind the saves, how far they will be, and whether ``flush.within`` is missed.

Belongs to the coordinator's thread, reads no clock and does no I/O. With several ranks each rank measures its own
copies, and rank 0 logs.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Mapping

from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.types.units import format_duration
from tierfall.core.types.values import CheckpointId, TierKind
from tierfall.core.types.view import TierRules
from tierfall.policies.flush import lateness
from tierfall.policies.forecast import forecast

logger = logging.getLogger("tierfall")
FIRST_SAVES = 4
"""The intervals between the first saves of a run do not predict later ones."""
GAPS_REMEMBERED = 16
DUE_REMEMBERED = 4096


class Backlog:
    """See the module. ``behind`` is the forecast per tier, in checkpoints (None: not known); ``late`` counts per tier
    how often it fell further behind than ``flush.within``."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        hooks: Hooks,
    ) -> None:
        self._ledger = ledger
        self._hooks = hooks
        self._stored: Mapping[str, TierRules] = {
            rules.name: rules
            for rules in ledger.rules
            if rules.kind not in (TierKind.DEVICE, TierKind.HOST)
        }
        self.behind: dict[str, float | None] = dict.fromkeys(self._stored)
        self.late: dict[str, int] = {}
        self._saves = 0
        self._trained_since_s: float | None = None
        self._first_s: list[float] = []
        self._gaps_s: deque[float] = deque(maxlen=GAPS_REMEMBERED)
        self._bytes = 0
        self._warned: set[str] = set()
        self._due: dict[str, dict[CheckpointId, float]] = {tier: {} for tier in self._stored}
        self._is_late: set[str] = set()

    @property
    def save_every_s(self) -> float | None:
        """Seconds of training between two saves; None while unknown. The larger of
        mean (pauses let a tier catch up) and median (a few saves in quick succession are not the usual interval)."""
        if not self._gaps_s:
            return None
        return max(statistics.fmean(self._gaps_s), statistics.median(self._gaps_s))

    @property
    def estimated_every_s(self) -> float | None:
        """``save_every_s`` or, while that is unknown, an estimate from the first saves; None before the second save."""
        if self._gaps_s or not self._first_s:
            return self.save_every_s
        return statistics.fmean(self._first_s)

    @property
    def image_bytes(self) -> int:
        """Bytes of the last saved image."""
        return self._bytes

    def behind_s(self, tier: str, now_s: float) -> float:
        """Return the age in seconds of the oldest checkpoint that is newer than every copy on a tier."""
        self._forget_abandoned(tier)
        return self._behind_s(tier, now_s)

    def _behind_s(self, tier: str, now_s: float) -> float:
        return max(0.0, now_s - min(self._due[tier].values(), default=now_s))

    # Saves and commits -----------------------------------------------------------------------------

    def on_save_requested(self, image_bytes: int, now_s: float) -> None:
        """A save requests memory. Its wait for memory does not count as training time."""
        self._saves += 1
        self._bytes = image_bytes
        if self._trained_since_s is not None:
            gaps = self._gaps_s if self._saves > FIRST_SAVES else self._first_s
            gaps.append(max(0.0, now_s - self._trained_since_s))
        self._trained_since_s = now_s
        for tier in self._stored:
            self._update_outlook(tier)

    def on_save_admitted(self, now_s: float) -> None:
        """The save has memory, or is skipped: training continues."""
        self._trained_since_s = now_s

    def on_owed(self, id: CheckpointId, tiers: tuple[str, ...]) -> None:
        """These tiers are owed a copy of a checkpoint; one of an earlier start counts as saved now."""
        for tier in tiers:
            due = self._due.get(tier)
            if due is None:
                continue
            due[id] = self._ledger.now_s
            if len(due) > DUE_REMEMBERED:
                del due[list(due)[1]]  # the age of the oldest is reported: keep it

    def on_committed(self, tier: str, id: CheckpointId) -> None:
        """A checkpoint was committed: only newer ones are still due on the tier."""
        self._due[tier] = {other: at_s for other, at_s in self._due[tier].items() if other > id}

    def forget(self, id: CheckpointId) -> None:
        """A checkpoint was deleted or given up: no tier is owed it."""
        for due in self._due.values():
            due.pop(id, None)

    # Reports ---------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Log each tier that is too far behind, once until it has caught up."""
        for tier, rules in self._stored.items():
            if rules.within_s is None:
                continue
            behind_s = self._behind_s(tier, now_s)
            reason = lateness(rules, behind_s)
            if reason is not None and tier not in self._is_late:
                behind_s = self.behind_s(tier, now_s)
                reason = lateness(rules, behind_s)
            if reason is None and tier in self._is_late:
                self._is_late.discard(tier)
                behind = format_duration(behind_s)
                if self._hooks.group.decides:
                    logger.warning("%s has caught up: it is %s behind", tier, behind)
            elif reason is not None and tier not in self._is_late:
                self._is_late.add(tier)
                self.late[tier] = self.late.get(tier, 0) + 1
                if self._hooks.group.decides:
                    logger.warning("%s", reason)

    def next_s(self, now_s: float) -> float | None:
        """Return when the next tier will be too far behind, if nothing is committed there until then."""
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
        abandoned = self._ledger.abandoned()
        for id in list(self._due[tier]):
            entry = self._ledger.entries.get(id)
            if id in abandoned or (entry is not None and entry.deleted):
                self.forget(id)

    def _update_outlook(self, tier: str) -> None:
        rules = self._stored[tier]
        outlook = forecast(
            rules,
            saves=self._saves,
            every_s=self.save_every_s or 0.0,
            bytes=self._bytes,
            bytes_per_s=self._ledger.rates.delivered_bytes_per_s(tier),
            stretches=self._ledger.rates.stretches(tier),
            waiting=sum(tier in entry.owed for entry in self._ledger.open()),
        )
        self.behind[tier] = outlook.behind
        if outlook.warning is not None and tier not in self._warned and self._hooks.group.decides:
            self._warned.add(tier)
            logger.warning("%s", outlook.warning)
