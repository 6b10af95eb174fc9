"""Pausing Python's garbage collector while a save creates many small objects.

They count towards the next collection although nearly all are short-lived. Without a pause they may trigger a full
collection, which takes 250 ms in a process that has imported torch, while training waits.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable collection in all threads, and restore the previous setting. Not for blocks that may wait."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
