"""Conditions that a person is told of once: when they begin and, at the same level, when they end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable

logger = logging.getLogger("tierfall")


class Conditions:
    """Log lines about what lasts, such as a store that refuses writes. Thread-safe.

    A condition has a key. It is logged when it begins, again if it becomes worse, and when it ends; while it lasts,
    further reports of it are logged at level DEBUG.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._present: dict[Hashable, tuple[int, int]] = {}
        """By key: the level, and how often the condition was reported."""

    def report(self, key: Hashable, level: int, text: str, *words: object) -> int:
        """Log that a condition has begun or lasts; return how often it was reported since it began."""
        with self._lock:
            known, times = self._present.get(key, (logging.NOTSET, 0))
            self._present[key] = (max(known, level), times + 1)
        logger.log(level if level > known else logging.DEBUG, text, *words)
        return times + 1

    def end(self, key: Hashable, text: str, *words: object) -> None:
        """Log that a condition has ended, at the level at which it was reported; nothing if it had not begun."""
        with self._lock:
            level, _ = self._present.pop(key, (logging.NOTSET, 0))
        if level:
            logger.log(level, text, *words)
