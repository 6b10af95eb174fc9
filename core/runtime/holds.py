"""What holds the training thread at present, so that another thread logs why while it lasts.

The training thread enters a hold if it may wait: an append, then a removal. ``log_present`` is called about once a
second, by a thread that nothing holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tierfall.core.types.units import format_duration

logger = logging.getLogger("tierfall")

HELD_S = 1.0
"""A hold that lasts so long is logged."""
AGAIN_S = 5.0
"""The time from one line about a hold to the next."""
LONG_S = 10.0
"""From then on, the lines about any hold are warnings."""


@dataclass(slots=True, eq=False)
class _Hold:
    what: str
    describe: Callable[[], str]
    level: int
    began_s: float
    logged_s: float | None = None


class Holds:
    """The present holds of one process, the innermost last."""

    def __init__(self) -> None:
        self._present: list[_Hold] = []

    @contextmanager
    def hold(
        self, what: str, describe: Callable[[], str], *, level: int = logging.WARNING
    ) -> Iterator[None]:
        """Note that the calling thread waits in this block. ``describe`` returns what for; it is called by another
        thread. The innermost hold is the one that is logged, at ``level`` until LONG_S."""
        hold = _Hold(what, describe, level, time.monotonic())
        self._present.append(hold)
        try:
            yield
        finally:
            self._present.remove(hold)
            if hold.logged_s is not None:
                took_s = time.monotonic() - hold.began_s
                logger.log(hold.level, "%s: done after %s", what, format_duration(took_s))

    def log_present(self) -> None:
        """Log the innermost hold, where it has lasted HELD_S and was not logged for AGAIN_S."""
        for hold in self._present[-1:]:
            now_s = time.monotonic()
            if now_s < hold.began_s + HELD_S:
                continue
            if hold.logged_s is not None and now_s < hold.logged_s + AGAIN_S:
                continue
            hold.logged_s = now_s
            waited_s = now_s - hold.began_s
            if waited_s >= LONG_S:
                hold.level = max(hold.level, logging.WARNING)
            waited = format_duration(waited_s)
            logger.log(hold.level, "%s: waiting for %s: %s", hold.what, waited, hold.describe())
