"""What both writers to object stores share: their states, and publishing what is small by a single put.

A writer is open until it is asked to publish. After a retryable failure of that it may be asked again (it is waiting
then), after any other failure it is dead. An object that is created conditionally is never asked for twice: the second
request could lose to the first.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from tierfall.backends.object.client import ObjectClient
from tierfall.backends.toolkit.views import copy_bytes
from tierfall.backends.toolkit.writers import AbortOnExit, Extent
from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import BackendError

# Up to here one request is better than three; above, an object that is created conditionally is refused, because
# only a single put was probed.
SINGLE_BYTES_MAX = 8 * 1024 * 1024
CONDITIONAL_BYTES_MAX = 64 * 1024 * 1024


class State(StrEnum):
    OPEN = "open"
    PUBLISHING = "publishing"
    WAITING = "waiting to be published again"
    PUBLISHED = "published"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shop:
    """What the writers of one backend share: its client, and the ids of what they have begun."""

    client: ObjectClient
    living: set[str]


class ObjectFrame(AbortOnExit):
    """One new object; a subclass takes the bytes."""

    def __init__(self, shop: Shop, key: str, *, extent: Extent, publish: Publish) -> None:
        self._client = shop.client
        self._living = shop.living
        self._key = key
        self._extent = extent
        self._publish_mode = publish
        self._lock = threading.Lock()
        self._state = State.OPEN
        self._kept: dict[int, bytearray] = {}
        self._unfinished = ""

    def publish(self) -> None:
        with self._lock:
            if self._state not in (State.OPEN, State.WAITING):
                self._refuse("publish")
            self._state = State.PUBLISHING
        try:
            self._publish(self._what("publish"))
        except BackendError as error:
            if error.retryable and self._publish_mode is Publish.REPLACE:
                self._state = State.WAITING
            else:
                self._die()
            raise
        except BaseException:
            self._die()
            raise
        self._state = State.PUBLISHED
        self._kept.clear()
        self._living.discard(self._unfinished)

    def abort(self) -> None:
        with self._lock:
            if self._state not in (State.OPEN, State.WAITING):
                return
            self._state = State.DEAD
        self._die()

    @abstractmethod
    def _publish(self, what: str) -> None: ...

    def _remove(self) -> None:
        """Remove what was begun at the store."""
        if self._unfinished:
            self._client.abort(self._full_key, self._unfinished, self._what("abort"))

    def _die(self) -> None:
        """Leave nothing; where the store cannot be asked, it is left to ``discard_unfinished``."""
        self._state = State.DEAD
        self._kept.clear()
        with suppress(BackendError):
            self._remove()
        self._living.discard(self._unfinished)

    def _keep(self, offset: int, data: memoryview) -> None:
        kept = bytearray(data.nbytes)
        with memoryview(kept) as target:
            copy_bytes(target, data)
        self._kept[offset] = kept

    def _joined(self) -> bytes | bytearray:
        kept = [piece for _, piece in sorted(self._kept.items())]
        return kept[0] if len(kept) == 1 else b"".join(kept)

    def _put_whole(self, what: str) -> None:
        self._client.put(self._full_key, memoryview(self._joined()), self._publish_mode, what)

    def _check_open(self, operation: str) -> None:
        if self._state is not State.OPEN:
            self._refuse(operation)

    def _refuse(self, operation: str) -> None:
        raise BackendError(
            f"{self._what(operation)}: this writer is {self._state}; create a new one"
        )

    @property
    def _full_key(self) -> str:
        return self._client.prefix + self._key

    def _what(self, operation: str) -> str:
        return f"{operation} {self._key!r} in {self._client.place}"
