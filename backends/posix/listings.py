"""The listings of many folders: one after the other on a disk that answers at once, several at a time elsewhere.

A thread costs more than a listing that the kernel answers from memory, and far less than a round trip to a file server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tierfall.backends.posix.folders import Entry
from tierfall.core.runtime.bounded_calls import side_by_side

LISTINGS_AT_ONCE = 64
GROUP = 128
"""Whoever waits for the next object waits until so many folders are listed."""
SLOW_S = 0.0005
SLOW_IN_A_ROW = 4
"""One answer that is slow may only say that the machine is busy."""


class Listings:
    """Lists folders for one walk; ``at_once`` says how many should be asked for next."""

    def __init__(self, entries: Callable[[str], list[Entry]]) -> None:
        self._entries = entries
        self._slow_in_a_row = 0

    @property
    def at_once(self) -> int:
        return GROUP if self._slow_in_a_row >= SLOW_IN_A_ROW else 1

    def list(self, folders: Sequence[str]) -> list[list[Entry]]:
        if self.at_once > 1:
            return side_by_side(self._entries, folders, parallel=LISTINGS_AT_ONCE)
        began_s = time.monotonic()
        found = [self._entries(folder) for folder in folders]
        is_slow = time.monotonic() - began_s > SLOW_S * len(folders)
        self._slow_in_a_row = self._slow_in_a_row + 1 if is_slow else 0
        return found
