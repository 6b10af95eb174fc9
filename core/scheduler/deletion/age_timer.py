"""Ageing: what retention comes to let go with no commit after which it would be asked: by time, or once it was read.

It remembers, per tier, when that may be next; the policies say when. It reads no clock.
"""

from __future__ import annotations

from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.policies import Policies
from tierfall.core.types.view import View

LOOK_AGAIN_S = 86400.0
"""The longest sleep: a wait of the system's is bounded."""
READ_S = 30.0
"""So long after a copy was kept because somebody reads it, it is looked at again."""
LATE_S = 0.001
"""How much later than due it is looked: a sum of clocks may round down."""


class AgeTimer:
    """See the module. ``due_s`` says at which wall time a tier's rules may let something go, None where at none."""

    def __init__(self, ledger: Ledger, policies: Policies) -> None:
        self._ledger = ledger
        self._policies = policies
        self._look_s: dict[str, float] = {}

    def note(self, view: View, tier: str) -> None:
        """Work out when to look at a tier next, from what is there now."""
        self._look_s.pop(tier, None)
        due = self._policies.next_due_s(view, tier)
        if due is not None and due > view.wall_time_s:
            left_s = min(due - view.wall_time_s + LATE_S, LOOK_AGAIN_S)
            self._look_s[tier] = self._ledger.now_s + left_s
        if self._ledger.is_read_on(tier):
            self.look_in(tier, READ_S)

    def look_in(self, tier: str, seconds: float) -> None:
        """Look at a tier so much later, at the latest."""
        at = self._ledger.now_s + seconds
        self._look_s[tier] = min(self._look_s.get(tier, at), at)

    def take_due(self) -> tuple[str, ...]:
        """Return the tiers to look at now, each once."""
        due = tuple(tier for tier, at in self._look_s.items() if self._ledger.now_s >= at)
        for tier in due:
            del self._look_s[tier]
        return due

    def next_s(self) -> float | None:
        return min(self._look_s.values(), default=None)
