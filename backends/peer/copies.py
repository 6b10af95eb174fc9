"""Writing one object to several backends: to the memory of each node that keeps a copy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from tierfall.backends.toolkit.base import AbortOnExit
from tierfall.core.types.backend import Backend, Publish, Writer, put_object
from tierfall.core.types.errors import BackendError, KeyExistsError, KeyNotFoundError


class CopiesWriter(AbortOnExit):
    """Writes each piece of an object to every side. The failure of any side is the failure of the call.

    Of several writers under ``Publish.IF_ABSENT`` the first side chooses the one that succeeds: it publishes to the
    others then, and a writer that failed there gives them what the first side has, if they lack it. So whoever finds
    the key taken finds it on all sides.
    """

    def __init__(
        self,
        sides: Sequence[Backend],
        key: str,
        *,
        length: int | None,
        length_max: int | None,
        publish: Publish,
    ) -> None:
        self._sides = tuple(sides)
        self._key = key
        self._writers: list[Writer] = []
        self._published = 0
        try:
            for side in sides:
                self._writers.append(
                    side.create(key, length=length, length_max=length_max, publish=publish)
                )
        except BaseException:
            self.abort()
            raise

    def write(self, offset: int, view: memoryview) -> None:
        for writer in self._writers:
            try:
                writer.write(offset, view)
            except BackendError as error:
                if not error.retryable:
                    self.abort()
                raise

    def publish(self) -> None:
        if self._published == len(self._writers):
            self._writers[0].publish()  # which refuses it
        while self._published < len(self._writers):
            try:
                self._publish_next()
            except BackendError as error:
                if not error.retryable:
                    self.abort()
                raise
            self._published += 1

    def _publish_next(self) -> None:
        side = self._sides[self._published]
        try:
            self._writers[self._published].publish()
        except KeyExistsError:
            if self._published == 0:
                self._complete()
                raise
            if read_object(side, self._key) != read_object(self._sides[0], self._key):
                raise

    def _complete(self) -> None:
        """Give the other sides what the first one has, where they lack it."""
        for side in self._sides[1:]:
            with suppress(KeyExistsError, KeyNotFoundError):
                data = read_object(self._sides[0], self._key)
                put_object(side, self._key, data, Publish.IF_ABSENT)

    def abort(self) -> None:
        for writer in self._writers:
            writer.abort()


def read_object(side: Backend, key: str) -> bytes:
    data = bytearray(side.stat(key).bytes)
    if data:
        side.read_into(key, 0, memoryview(data))
    return bytes(data)
