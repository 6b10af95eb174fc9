"""What a handle counts as blocked: the time in save, and the time at the barrier."""

from __future__ import annotations

from tierfall.core.handle import SaveHandle
from tierfall.core.values import CheckpointId


def test_blocked_time_is_that_in_save_and_that_at_the_barrier() -> None:
    handle = SaveHandle(CheckpointId(1, 1), ("disk",), in_memory="host")
    handle.tell_waited(0.25)
    handle.tell_begun(bytes=1, lazy=True, blocked_s=1.0)
    handle.tell_waited(0.5)
    assert handle.stats.blocked_s == 1.75
