"""What a life of a run has said of itself, and whether that fits together, and with what is counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tierfall.core.scheduler.coordinator import Coordinator
from tierfall.core.types import events
from tierfall.core.types.events import Event
from tierfall.core.types.values import CheckpointId, SaveOutcome


@dataclass(slots=True)
class Life:
    """The events of one start, in their order."""

    events: list[Event] = field(default_factory=list)
    coordinator: Coordinator | None = None

    def check(self) -> None:
        """Raise AssertionError where two events contradict each other, or a counter counts otherwise."""
        self._check_times()
        self._check_saves()
        self._check_flushes()
        self._check_counters()

    def _check_times(self) -> None:
        times = [event.at_s for event in self.events]
        assert times == sorted(times), "events go back in time"

    def _check_saves(self) -> None:
        begun: set[CheckpointId] = set()
        captured: set[CheckpointId] = set()
        for event in self.events:
            match event:
                case events.SaveBegun():
                    assert event.id not in begun, f"{event.id} began twice"
                    begun.add(event.id)
                case events.Captured():
                    assert event.id in begun - captured, f"{event.id} was captured out of turn"
                    captured.add(event.id)
        ended = Counter(event.id for event in self.events if isinstance(event, events.SaveEnded))
        assert max(ended.values(), default=1) == 1, f"a save ended twice: {ended}"

    def _check_flushes(self) -> None:
        copying: dict[str, CheckpointId] = {}
        for event in self.events:
            match event:
                case events.FlushBegun():
                    assert event.tier not in copying, f"two copies to {event.tier} at once"
                    copying[event.tier] = event.id
                    assert event.bytes > 0 or event.tries >= 0
                case events.FlushDone() | events.FlushFailed():
                    assert copying.pop(event.tier, None) == event.id, f"{event} has not begun"
                    assert event.seconds >= 0
                case events.FlushStalled():
                    assert copying.get(event.tier) == event.id, f"{event} is not under way"

    def _check_counters(self) -> None:
        coordinator = self.coordinator
        assert coordinator is not None
        found = Counter(type(event) for event in self.events)
        commits = Counter(e.tier for e in self.events if isinstance(e, events.Committed))
        assert commits == coordinator.counters.commits
        dropped = [e for e in self.events if isinstance(e, events.Dropped) and not e.unfinished]
        assert len(dropped) == coordinator.counters.deleted_copies
        assert all(drop.reason for drop in dropped)
        given_up = coordinator.counters.given_up_copies
        assert found[events.FlushGivenUp] >= given_up
        assert found[events.SetAside] == coordinator.counters.set_aside_copies
        superseded = [
            e
            for e in self.events
            if isinstance(e, events.SaveEnded) and e.outcome is SaveOutcome.SUPERSEDED
        ]
        assert len(superseded) >= coordinator.counters.superseded_saves
