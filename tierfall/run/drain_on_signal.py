"""A drain on a signal that announces the end of the process: on a thread of its own, beside the training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from signal import Signals

from tierfall.config import Config
from tierfall.config.fields import signals_named
from tierfall.core.types.errors import TierfallError
from tierfall.core.types.text import format_some
from tierfall.core.types.units import format_duration
from tierfall.run import group_commands
from tierfall.run.closing import confirm_copies, log_newest
from tierfall.session.requests import free_memory_at_end, must_keep_memory
from tierfall.session.session import Session
from tierfall.setup import signal_hub
from tierfall.telemetry.reports import DrainReport

logger = logging.getLogger("tierfall")
WHAT = "drain.on_signal"
POLL_S = 0.05
FREE_S = 2.0
"""Seconds for which the end of the process waits until memory is freed."""


class DrainOnSignal:
    """Listens for the signal until ``stop``. Made on the main thread.

    The signal has its previous effect once the drain has ended: every copy that can be durable is, or the deadline has
    passed. If it ends the process then, host memory is freed, unless something in it is needed. Where the same signal
    requests a save (``interval.on_signal``), the drain also waits until that save is durable, or until the run is
    closed.
    """

    def __init__(self, config: Config, session: Session, saves: Callable[[], int]) -> None:
        """``saves`` returns how many saves have begun, or were skipped."""
        assert config.drain is not None
        self._deadline_s = config.drain.deadline_s
        self._saving = frozenset(config.interval.on_signal)
        self._session = session
        self._saves = saves
        self._saves_before: dict[Signals, int] = {}
        self._closed = threading.Event()
        self._frees = False
        self._listener = signal_hub.add_listener(
            signals_named(config.drain.on_signal),
            what=WHAT,
            flag=self._on_signal,
            work=self._drain,
            before_end=self._free_memory,
        )

    def stop(self) -> None:
        """Stop listening: the run is closed."""
        self._closed.set()
        signal_hub.stop(self._listener)

    def _on_signal(self, number: Signals) -> None:
        """Count the saves on the thread that saves: the requested one may end before the drain begins."""
        self._saves_before.setdefault(number, self._saves())

    def _drain(self, number: Signals) -> None:
        ends_s = time.monotonic() + self._deadline_s
        name, session = number.name, self._session
        logger.warning(
            "%s: draining for %s at most; then the signal has its previous effect",
            name,
            format_duration(self._deadline_s),
        )
        try:
            session.call_soon(lambda: session.coordinator.share_deadline(self._deadline_s))
            looked_at = confirm_copies(session, self._deadline_s / 2)
            saves = name in self._saving
            report = self._until(ends_s, name, continues=not saves)
            if saves and self._wait_for_save(number, ends_s):
                report = self._until(ends_s, name, continues=True)
            left = format_some(
                [f"{step}@{attempt} to {tier}" for step, attempt, tier in report.left]
            )
            logger.warning("%s: drained%s", name, f"; still owed: {left}" if left else "")
            kept = not looked_at.allows_release or must_keep_memory(session)
        except TierfallError as error:
            # The run was closed, which drains too, or the coordinator has stopped.
            logger.warning("%s: nothing more is drained: %s", name, error)
            return
        event = f"{name}: run {session.run} may end now"
        log_newest(session, event, looked_at, memory_kept=kept, early=True)
        self._frees = not kept

    def _free_memory(self) -> None:
        if self._frees:
            free_memory_at_end(self._session, FREE_S)

    def _until(self, ends_s: float, name: str, *, continues: bool) -> DrainReport:
        left_s = max(0.0, ends_s - time.monotonic())
        # A deletion may need another rank, which this signal has ended already.
        return group_commands.drain_here(
            self._session, left_s, doing=name, continues=continues, copies_only=True
        )

    def _wait_for_save(self, number: Signals, ends_s: float) -> bool:
        """Wait for the save that the signal requests; False where it has not begun in time, or the run was closed."""
        # None: the main thread has not handled the signal yet
        while (before := self._saves_before.get(number)) is None or self._saves() <= before:
            if time.monotonic() >= ends_s or self._closed.wait(POLL_S):
                return False
        return True
