"""What a planner has told in one life of a run, and whether that fits together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tierfall.core.types import events
from tierfall.core.types.events import Event
from tierfall.core.types.values import CheckpointId


def check_life(told: Sequence[Event]) -> None:
    """Raise AssertionError where two events of a start contradict each other."""
    _check_times(told)
    _check_saves(told)
    _check_flushes(told)
    _check_deletions(told)


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
    uploaded: set[tuple[str, CheckpointId]] = set()
    for event in told:
        match event:
            case events.FlushBegun():
                assert event.tier not in copying, f"two copies to {event.tier} at once"
                copying[event.tier] = event.id
                assert event.bytes > 0 or event.tries >= 0
            case events.FlushDone():
                assert copying.pop(event.tier, None) == event.id, f"{event} has not begun"
                assert event.seconds >= 0
                uploaded.add((event.tier, event.id))
            case events.FlushFailed():
                if copying.get(event.tier) == event.id:
                    del copying[event.tier]
                else:  # its commit record
                    assert (event.tier, event.id) in uploaded, f"{event} has not begun"
                assert event.seconds >= 0
            case events.FlushStalled():
                is_copying = copying.get(event.tier) == event.id
                assert is_copying or (event.tier, event.id) in uploaded, f"{event} has not begun"


def _check_deletions(told: Sequence[Event]) -> None:
    assert all(event.reason for event in told if isinstance(event, events.Dropped))
