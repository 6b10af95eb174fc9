"""The policies that the coordinator's components ask: pure functions, passed in. The built-in ones are
``policies/defaults.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tierfall.core.types.values import CheckpointId
from tierfall.core.types.view import (
    CheckpointView,
    Decision,
    DrainDecision,
    Eviction,
    TierRules,
    View,
)


class BacklogOutlook(Protocol):
    """How many checkpoints a tier will be behind in an hour (None: not known), and the warning to log, if any."""

    @property
    def behind(self) -> float | None: ...

    @property
    def warning(self) -> str | None: ...


class ShareDecision(Protocol):
    """The share of a tier's write rate that a flush may use, and why."""

    @property
    def share(self) -> float: ...

    @property
    def reason(self) -> str: ...


class Policies(Protocol):
    """See the module; each function is documented where it is defined."""

    def still_owed(self, view: View, checkpoint: CheckpointView) -> tuple[str, ...]: ...

    def needs_repair(self, view: View, checkpoint: CheckpointView, tier_name: str) -> bool: ...

    def plan_flush(self, view: View, tier_name: str) -> tuple[Decision, ...]: ...

    def plan_drain(
        self, view: View, *, bytes_per_s: Mapping[str, float | None], left_s: float
    ) -> tuple[DrainDecision, ...]: ...

    def forecast(
        self,
        tier: TierRules,
        *,
        saves: int,
        every_s: float,
        bytes: int,
        bytes_per_s: float | None,
        stretches: int,
        waiting: int,
    ) -> BacklogOutlook: ...

    def lateness(self, tier: TierRules, behind_s: float) -> str | None: ...

    def plan_yield(
        self, *, idle_s: Sequence[float], busy_s: Sequence[float], share: float, least: float
    ) -> ShareDecision: ...

    def least_share(
        self, *, image_bytes: int, every_s: float, within_s: float | None, bytes_per_s: float
    ) -> float: ...

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
