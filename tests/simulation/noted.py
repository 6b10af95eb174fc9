"""What a planner has told in one life of a run, and whether that fits together, and with what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.simulation.door import Counts, Door
from tierfall.core.types import events
from tierfall.core.types.events import Event
from tierfall.core.types.values import CheckpointId, SaveOutcome


def check_life(door: Door) -> None:
    """Raise AssertionError where two events of a start contradict each other, or a counter counts otherwise."""
    _check_times(door.events)
    _check_saves(door.events)
    _check_flushes(door.events)
    _check_counts(door.events, door.counts)


def _check_times(told: Sequence[Event]) -> None:
    times = [event.at_s for event in told]
    assert times == sorted(times), "events go back in time"


def _check_saves(told: Sequence[Event]) -> None:
    begun: set[CheckpointId] = set()
    captured: set[CheckpointId] = set()
    for event in told:
        match event:
            case events.SaveBegun():
                assert event.id not in begun, f"{event.id} began twice"
                begun.add(event.id)
            case events.Captured():
                assert event.id in begun - captured, f"{event.id} was captured out of turn"
                captured.add(event.id)
    ended = Counter(event.id for event in told if isinstance(event, events.SaveEnded))
    assert max(ended.values(), default=1) == 1, f"a save ended twice: {ended}"


def _check_flushes(told: Sequence[Event]) -> None:
    copying: dict[str, CheckpointId] = {}
    for event in told:
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


def _check_counts(told: Sequence[Event], counts: Counts) -> None:
    found = Counter(type(event) for event in told)
    assert Counter(e.tier for e in told if isinstance(e, events.Committed)) == counts.commits
    dropped = [e for e in told if isinstance(e, events.Dropped) and not e.unfinished]
    assert len(dropped) == counts.deleted
    assert all(drop.reason for drop in dropped)
    assert found[events.FlushGivenUp] >= counts.given_up
    assert found[events.SetAside] == counts.set_aside
    ended = [e.outcome for e in told if isinstance(e, events.SaveEnded)]
    assert ended.count(SaveOutcome.SUPERSEDED) >= counts.superseded
