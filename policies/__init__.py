"""Policies: pure functions from (view, rules, now) to orders and decisions, each with its reason.

A plug-in's policy imports all that it needs from here: ``register``, and the types of its arguments
(docs/write-a-policy.md).
"""

from tierfall.core.types.policy import Policy, PolicyKind
from tierfall.core.types.values import CheckpointId, CopyState, LossClass, TierKind
from tierfall.core.types.view import CheckpointView, CopyView, TierRules, TierView, View
from tierfall.policies import eviction, flush, retention
from tierfall.policies.cadence import Measured
from tierfall.policies.registry import register

__all__ = [
    "CheckpointId",
    "CheckpointView",
    "CopyState",
    "CopyView",
    "LossClass",
    "Measured",
    "Policy",
    "PolicyKind",
    "TierKind",
    "TierRules",
    "TierView",
    "View",
    "eviction",
    "flush",
    "register",
    "retention",
]
