"""How much memory of its own a process takes for something: files, mapped or cached, are not counted.

Whoever measures does so in a process where nothing else runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path


def rise_bytes(act: Callable[[], object]) -> int:
    """Return how far this process's anonymous memory rises while ``act`` runs, its result included."""
    before, seen, stop = _anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            seen.append(_anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = act()
        seen.append(_anonymous_bytes())
        del result
    finally:
        stop.set()
        watcher.join()
    return max(seen) - before


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("this system does not say what is anonymous")
