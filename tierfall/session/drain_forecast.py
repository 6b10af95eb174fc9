"""What is to be expected of a drain, asked of the coordinator, said in words, and as records for programs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tierfall.core.types.drain_outlook import ArrivalOutlook, DrainDecision
from tierfall.core.types.units import format_duration
from tierfall.policies.drain import drain_in_words
from tierfall.session.session import Session
from tierfall.telemetry.reports import DrainForecast

logger = logging.getLogger("tierfall")
_ARRIVES = {
    ArrivalOutlook.ARRIVES: True,
    ArrivalOutlook.TOO_LATE: False,
    ArrivalOutlook.UNKNOWN: None,
}


def start_drain(
    session: Session, asker: object, until_s: float, *, doing: str, left_s: float
) -> tuple[DrainForecast, ...]:
    """Let the coordinator work towards a deadline, and log what will be lost; return what is to be expected."""
    decisions = session.ask(lambda: session.coordinator.begin_drain(asker, until_s))
    lost = any(decision.prospect is ArrivalOutlook.TOO_LATE for decision in decisions)
    for line in drain_in_words(decisions):
        level = logging.WARNING if lost else logging.INFO
        logger.log(level, "%s: in %s %s", doing, format_duration(max(0.0, left_s)), line)
    return forecast_of(decisions)


def end_drain(session: Session, asker: object) -> None:
    """Let lanes go on as before."""
    session.tell(lambda: session.coordinator.draining.end(asker))


def forecast_of(decisions: Sequence[DrainDecision]) -> tuple[DrainForecast, ...]:
    """Make records of what was decided, in the order in which copies go."""
    return tuple(
        DrainForecast(
            step=decision.checkpoint.step,
            attempt=decision.checkpoint.attempt,
            tier=decision.tier,
            arrives=_ARRIVES[decision.prospect],
            left_bytes=decision.left_bytes,
            reason=decision.reason,
        )
        for decision in decisions
    )


class ForecastLog:
    """Tells what is to be expected: at first, and once more when nothing is unknown any more, where it was at first."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._is_open = True

    def say(self, decisions: Sequence[DrainDecision], *, first: bool = False) -> None:
        """Hear of a plan."""
        is_open = any(decision.prospect is ArrivalOutlook.UNKNOWN for decision in decisions)
        if first or (self._is_open and decisions and not is_open):
            for line in drain_in_words(decisions):
                self._tell(line)
            self._is_open = is_open
