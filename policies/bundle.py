"""The policies that a run uses, under the names by which the coordinator asks for them."""

from __future__ import annotations

from tierfall.policies.capture_mode import Trial, choose_lazy
from tierfall.policies.drain import plan_drain
from tierfall.policies.eviction import plan_eviction
from tierfall.policies.flush import plan_flush, still_owed, tiers_owed
from tierfall.policies.retention import plan_retention
from tierfall.policies.superseding import plan_superseding

__all__ = [
    "Trial",
    "choose_lazy",
    "plan_drain",
    "plan_eviction",
    "plan_flush",
    "plan_retention",
    "plan_superseding",
    "still_owed",
    "tiers_owed",
]
