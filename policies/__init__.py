"""Policies: pure functions from (view, rules, now) to orders and decisions, each with its reason.

``register`` adds one of a user's own (docs/write-a-policy.md).
"""

from tierfall.core.types.policy import Policy, PolicyKind
from tierfall.core.types.view import CheckpointView, TierRules, TierView, View
from tierfall.policies import eviction, flush, retention
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
    "eviction",
    "flush",
    "register",
    "retention",
]
