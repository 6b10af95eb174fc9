"""The policies that a run uses, under the names by which the coordinator asks for them."""

from __future__ import annotations

from tierfall.policies.backpressure import plan_relief, plan_superseding
from tierfall.policies.drain import plan_drain
from tierfall.policies.eviction import plan_eviction
from tierfall.policies.flush import lateness, needs_repair, plan_flush, still_owed, tiers_owed
from tierfall.policies.forecast import forecast
from tierfall.policies.retention import (
    keeps_all_live,
    missing_metrics,
    next_due_s,
    plan_drops,
    plan_retention,
)
from tierfall.policies.throttle import least_share, plan_yield

__all__ = [
    "forecast",
    "keeps_all_live",
    "lateness",
    "least_share",
    "missing_metrics",
    "needs_repair",
    "next_due_s",
    "plan_drain",
    "plan_drops",
    "plan_eviction",
    "plan_flush",
    "plan_relief",
    "plan_retention",
    "plan_superseding",
    "plan_yield",
    "still_owed",
    "tiers_owed",
]
