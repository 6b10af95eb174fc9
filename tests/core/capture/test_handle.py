"""What a save handle reports, to whom and when: states, waits from other threads, and causes of exceptions."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from tierfall.core.capture.handle import SaveHandle
from tierfall.core.types.errors import (
    ConfigError,
    FlushError,
)
from tierfall.core.types.values import CheckpointId, SaveOutcome

PATIENCE_S = 20.0


def handle_for(*tiers: str, clock: Callable[[], float] = lambda: 0.0) -> SaveHandle:
    return SaveHandle(CheckpointId(400, 7), tiers, in_memory="host", clock=clock)


# Waiting ---------------------------------------------------------------------------------------------


def test_what_is_done_is_done_though_another_tier_failed() -> None:
    handle = handle_for("nvme", "store")
    handle.on_captured()
    handle.on_committed("nvme")
    handle.on_tier_failed("store", FlushError("store is down"))
    handle.captured(timeout=0)
    handle.wait("nvme", timeout=0)
    with pytest.raises(FlushError, match="store is down"):
        handle.wait("store", timeout=0)


# Failing ---------------------------------------------------------------------------------------------


def test_a_tier_on_the_way_that_failed_is_reported_but_does_not_decide() -> None:
    handle = handle_for("nvme", "store")
    handle.on_captured()
    handle.on_tier_failed("nvme", FlushError("nvme is full"))
    assert handle.outcome is SaveOutcome.PENDING
    handle.on_committed("store")
    assert handle.outcome is SaveOutcome.SAVED
    assert "nvme is full" in str(handle.exception())
    handle.wait(timeout=0)


# Calling back ----------------------------------------------------------------------------------------


class Calls:
    """A callback that waits for its calls."""

    def __init__(self) -> None:
        self.made: queue.SimpleQueue[tuple[SaveHandle, str]] = queue.SimpleQueue()

    def __call__(self, handle: SaveHandle) -> None:
        self.made.put((handle, threading.current_thread().name))

    def next(self) -> SaveHandle:
        return self.made.get(timeout=PATIENCE_S)[0]

    def none_waits(self, handle: SaveHandle) -> bool:
        """Whether no call waits: one that is made now comes first."""
        handle.add_done_callback(last := Calls(), "host")
        last.next()
        return self.made.empty()


def test_a_callback_that_cannot_be_called_is_refused() -> None:
    handle = handle_for("nvme")
    with pytest.raises(ConfigError, match=r"add_done_callback: 3 is no function; expected one of"):
        handle.add_done_callback(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"its parameters are \(\); expected \(handle\)"):
        handle.add_done_callback(lambda: None)  # type: ignore[misc,arg-type]
    with pytest.raises(ConfigError, match="goes to no tier 'store'"):
        handle.add_done_callback(Calls(), "store")
