"""What the coordinator asks of policies: pure functions, handed in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from tierfall.core.scheduler.flush.backlog import PredictBacklog
from tierfall.core.scheduler.flush.throttle import LeastShare, PlanYield
from tierfall.core.types.values import CheckpointId
from tierfall.core.types.view import (
    CheckpointView,
    Decision,
    DrainDecision,
    Eviction,
    TierRules,
    View,
)


class Policies(Protocol):
    """The decisions that it asks for."""

    @property
    def plan_yield(self) -> PlanYield: ...

    @property
    def least_share(self) -> LeastShare: ...

    def tiers_owed(self, tiers: tuple[TierRules, ...], ordinal: int) -> tuple[str, ...]: ...

    def still_owed(self, view: View, checkpoint: CheckpointView) -> tuple[str, ...]: ...

    def needs_repair(self, view: View, checkpoint: CheckpointView, tier_name: str) -> bool: ...

    def plan_flush(self, view: View, tier_name: str) -> tuple[Decision, ...]: ...

    def plan_drain(
        self, view: View, *, bytes_per_s: Mapping[str, float | None], left_s: float
    ) -> tuple[DrainDecision, ...]: ...

    @property
    def forecast(self) -> PredictBacklog: ...

    def lateness(self, tier: TierRules, behind_s: float) -> str | None: ...

    def keeps_all_live(self, tier: TierRules) -> bool: ...

    def plan_drops(self, view: View, tier_name: str) -> tuple[Decision, ...]: ...

    def missing_metrics(self, view: View, *, saves_min: int) -> Mapping[str, str]: ...

    def next_due_s(self, view: View, tier_name: str) -> float | None: ...

    def plan_eviction(
        self, view: View, tier_name: str, *, need_bytes: int, free_bytes: int
    ) -> Eviction: ...

    def plan_relief(
        self, view: View, tier_name: str, *, missing_bytes: int
    ) -> tuple[Decision, ...]: ...

    def plan_superseding(
        self, view: View, tier_name: str, *, fits: Callable[[frozenset[CheckpointId]], bool]
    ) -> tuple[Decision, ...]: ...
