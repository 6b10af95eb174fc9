"""What the coordinator's components share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierfall.core.runtime.conditions import Conditions

if TYPE_CHECKING:
    from tierfall.core.flush.coordinator import Coordinator


class Component:
    """A component of the coordinator. It reaches the other ones by ``_planner``, once all are built."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._planner = coordinator
        self._lanes = coordinator.lanes
        self._ledger = coordinator.ledger
        self._group = coordinator.ledger.group
        self._messages = coordinator.messages
        self._emit = coordinator.emit
        self._dispatch = coordinator.dispatch
        self._wake_at = coordinator.wake_at
        self._conditions = Conditions()
