"""The policies that a run uses, under the names by which the coordinator asks for them."""

from __future__ import annotations

from tierfall.policies.capture_mode import Trial, choose_lazy
from tierfall.policies.eviction import plan_eviction
from tierfall.policies.flush import still_owed, tiers_owed
from tierfall.policies.retention import next_due_s, plan_retention
from tierfall.policies.superseding import plan_superseding

__all__ = [
    "Trial",
    "choose_lazy",
    "next_due_s",
    "plan_eviction",
    "plan_retention",
    "plan_superseding",
    "still_owed",
    "tiers_owed",
]
