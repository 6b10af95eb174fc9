"""The forecast of a drain: requested from the coordinator, logged as text, and returned as records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tierfall.core.types.units import format_duration
from tierfall.core.types.view import ArrivalOutlook, DrainDecision
from tierfall.policies.drain import describe_drain
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
    """Have the coordinator work towards the deadline ``until_s``, log its forecast, and return it.

    ``asker`` identifies the drain for ``end_drain``; ``left_s`` is the time until the deadline.
    """
    decisions = session.call(lambda: session.coordinator.begin_drain(asker, until_s))
    lost = any(decision.outlook is ArrivalOutlook.TOO_LATE for decision in decisions)
    for line in describe_drain(decisions):
        level = logging.WARNING if lost else logging.INFO
        logger.log(level, "%s: in at most %s %s", doing, format_duration(max(0.0, left_s)), line)
    return forecast_of(decisions)


def end_drain(session: Session, asker: object) -> None:
    """End the drain of ``asker``: lanes work without its deadline again."""
    session.call_soon(lambda: session.coordinator.drain_schedule.end(asker))


def forecast_of(decisions: Sequence[DrainDecision]) -> tuple[DrainForecast, ...]:
    """Return the decisions as records, in the order in which copies are written."""
    return tuple(
        DrainForecast(
            step=decision.checkpoint.step,
            attempt=decision.checkpoint.attempt,
            tier=decision.tier,
            arrives=_ARRIVES[decision.outlook],
            left_bytes=decision.left_bytes,
            reason=decision.reason,
        )
        for decision in decisions
    )


class ForecastLog:
    """Reports a forecast twice: at first, and again once every arrival in it is known."""

    def __init__(self, report_line: Callable[[str], None]) -> None:
        """``report_line`` reports one line of text."""
        self._report = report_line
        self._has_unknown = True

    def report(self, decisions: Sequence[DrainDecision], *, first: bool = False) -> None:
        """Report a plan, where it is the first one or the first without an unknown arrival."""
        has_unknown = any(decision.outlook is ArrivalOutlook.UNKNOWN for decision in decisions)
        if first or (self._has_unknown and decisions and not has_unknown):
            for line in describe_drain(decisions):
                self._report(line)
            self._has_unknown = has_unknown
