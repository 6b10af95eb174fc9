"""When a medium last answered: whoever waits for it with a bound tells by that a long listing from silence."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tierfall.backends.wrappers.base import Wrapper
from tierfall.core.types.backend import Backend, Stored


class Heard(Wrapper):
    """Passes every call on to ``inner``; ``heard_s`` is when a read, an fsync or a row of a listing last came, in
    seconds of the monotonic clock."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.heard_s = time.monotonic()

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        self._inner.read_into(key, offset, view)
        self.heard_s = time.monotonic()

    def stat(self, key: str) -> Stored:
        found = self._inner.stat(key)
        self.heard_s = time.monotonic()
        return found

    def sync(self, folder: str) -> None:
        super().sync(folder)
        self.heard_s = time.monotonic()

    def scan(self, prefix: str) -> Iterator[Stored]:
        for stored in self._inner.scan(prefix):
            self.heard_s = time.monotonic()
            yield stored
