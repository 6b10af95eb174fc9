"""Policies: pure functions from (view, rules, now) to orders and decisions, each with its reason.

``register`` adds one of a user's own (docs/write-a-policy.md).
"""

from tierfall.core.policy import Policy, PolicyKind
from tierfall.core.view import CheckpointView, TierRules, TierView, View
from tierfall.policies import evict_orders, flush_orders, retain_rules
from tierfall.policies.cadence import Measured
from tierfall.policies.registry import register

__all__ = [
    "CheckpointView",
    "Measured",
    "Policy",
    "PolicyKind",
    "TierRules",
    "TierView",
    "View",
    "evict_orders",
    "flush_orders",
    "register",
    "retain_rules",
]
