"""Python's garbage collector, kept from running where a save makes many small objects at once.

Each of them counts towards the next collection, though nearly all are gone by the end: a full one may come of it, which
takes a quarter of a second in a process that has imported torch, while training waits.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect nothing inside, in no thread; afterwards as before. Not for anything that may wait."""
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()
