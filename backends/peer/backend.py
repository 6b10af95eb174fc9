"""The backend whose objects a process of another node keeps in its memory."""

from __future__ import annotations

import itertools
import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from tierfall.backends.peer.server import READ_BYTES_MAX
from tierfall.backends.toolkit.base import BackendBase, Extent, WriterBase, WriterState
from tierfall.backends.toolkit.keys import check_key, check_prefix
from tierfall.backends.toolkit.views import flat
from tierfall.core.ranks.wire import (
    LEAST_TIMEOUT_S,
    Connection,
    DamagedPayloadError,
    Head,
    WireError,
    connect_as,
)
from tierfall.core.types.backend import Publish, StoredObject, Traits
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    UnreachableError,
    error_class,
)
from tierfall.core.types.values import CheckpointId, Shard

MAX_PARALLEL = 4
KEYS_MAX = 1000
"""Keys in one request to delete."""

_backends: weakref.WeakSet[PeerBackend] = weakref.WeakSet()


class PeerBackend(BackendBase):
    """Objects in another node's memory, by its ``PeerServer``. They survive the loss of this node, and of the processes
    there, and not that of the other node.

    ``address`` is host and port; ``sender`` names this node, whose objects are apart from other senders'. Raises
    AccessDeniedError where the handshake fails, and UnreachableError where the server does not answer for
    ``timeout_s``, or has not answered at ``until_s`` on the monotonic clock.
    """

    _traits = Traits(
        durable=False, atomic_replace=True, conditional_create=True, max_parallel=MAX_PARALLEL
    )

    def __init__(
        self,
        address: tuple[str, int],
        *,
        secret: bytes,
        run: str,
        sender: str,
        timeout_s: float = 30.0,
        until_s: float = math.inf,
    ) -> None:
        super().__init__(f"the memory of {address[0]}:{address[1]}", read_only=False)
        self._address = address
        self._secret = secret
        self._run = run
        self._sender = sender
        self._timeout_s = timeout_s
        self._until_s = until_s
        self._session = secrets.token_hex(16)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False
        _backends.add(self)

    # Objects ---------------------------------------------------------------------------------------

    def _create(self, key: str, extent: Extent, publish: Publish) -> PeerWriter:
        return PeerWriter(self, next(self._numbers), key, extent=extent, publish=publish)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        target, what = flat(view, writable=True), self._what("read", check_key(key))
        for start in range(0, max(target.nbytes, 1), READ_BYTES_MAX):
            part = target[start : start + READ_BYTES_MAX]
            head = {"do": "read", "key": key, "offset": offset + start, "length": part.nbytes}
            self.request(what, head, into=part)

    def stat(self, key: str) -> StoredObject:
        size, version = self.request(self._what("stat", check_key(key)), {"do": "stat", "key": key})
        return StoredObject(key=key, bytes=size, version=version)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        return self._scan(check_prefix(prefix))

    def _scan(self, prefix: str) -> Iterator[StoredObject]:
        what = self._what("list", prefix)
        after: str | None = ""
        while after is not None:
            page = self.request(what, {"do": "scan", "prefix": prefix, "after": after})
            for key, size, version in page["rows"]:
                yield StoredObject(key=key, bytes=size, version=version)
            after = page["last"]

    def delete(self, key: str) -> None:
        self.delete_some([key])

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        checked = [check_key(key) for key in keys]
        now, later = checked[:KEYS_MAX], checked[KEYS_MAX:]
        what = self._what("delete", checked[0])
        return [*self.request(what, {"do": "delete_some", "keys": now}), *later]

    def discard_unfinished(self, prefix: str) -> int:
        what = self._what("clean up", check_prefix(prefix))
        count: int = self.request(what, {"do": "discard", "prefix": prefix})
        return count

    def folders(self) -> list[str]:
        """Return the names of the senders, of earlier starts too, of which the other node keeps anything."""
        return list(self.request(self._what("list", ""), {"do": "folders"}))

    def adopt(self, checkpoint: CheckpointId, shard: Shard, attempt_id: str) -> bool:
        """Have the other node take an image from what it keeps of another start; return whether it has it."""
        head = {
            "do": "adopt",
            "checkpoint": [checkpoint.step, checkpoint.attempt],
            "shard": [shard.rank, shard.world_size],
            "attempt_id": attempt_id,
        }
        return bool(self.request(self._what("adopt", str(checkpoint)), head))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # Requests --------------------------------------------------------------------------------------

    def request(
        self,
        what: str,
        head: Head,
        payload: memoryview | None = None,
        *,
        into: memoryview | None = None,
        repeatable: bool = True,
    ) -> Any:
        """Send one request and return the value of its answer; its bytes fill ``into``. A connection that was idle may
        have been closed meanwhile: then a ``repeatable`` request is sent once more, on a new one, in the time that is
        left."""
        deadline_s = min(time.monotonic() + self._timeout_s, self._until_s)
        if time.monotonic() >= self._until_s:
            raise UnreachableError(f"{what}: it is too late")
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        answer = None
        if connection is not None:
            answer = self._try(connection, deadline_s, head, payload, into)
        is_late = time.monotonic() >= deadline_s
        if answer is None or (repeatable and not isinstance(answer, dict) and not is_late):
            answer = self._try(self._connect(what, deadline_s), deadline_s, head, payload, into)
        if isinstance(answer, BaseException):
            raise UnreachableError(f"{what}: {str(answer) or type(answer).__name__}") from answer
        if "error" in answer:
            make = error_class(str(answer["error"]), BackendError)
            raise make(f"{what}: {answer.get('text')}")
        return answer.get("value")

    def _try(
        self,
        connection: Connection,
        deadline_s: float,
        head: Head,
        payload: memoryview | None,
        into: memoryview | None,
    ) -> Head | OSError | UnreachableError:
        """Return the answer, or the error that has ended the connection. The other side may be silent until the
        deadline."""
        try:
            connection.set_timeout(_left_s(deadline_s))
            connection.send(head, payload)
            answer, length = connection.receive()
            if "error" not in answer and length != (0 if into is None else into.nbytes):
                raise WireError(f"an answer with {length} bytes")
            if length and into is not None:
                connection.fill(into)
        except (OSError, WireError, DamagedPayloadError) as error:
            connection.close()
            return error
        except BaseException:
            connection.close()
            raise
        self._put_idle(connection)
        return answer

    def _put_idle(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, what: str, deadline_s: float) -> Connection:
        if self._closed:
            raise BackendError(f"{what}: the backend is closed")
        try:
            return connect_as(
                self._sender,
                self._address,
                self._secret,
                run=self._run,
                session=self._session,
                timeout_s=_left_s(deadline_s),
            )
        except AccessDeniedError as error:
            raise AccessDeniedError(f"{what}: {error}") from error
        except (OSError, WireError) as error:
            raise UnreachableError(f"{what}: {str(error) or type(error).__name__}") from error

    def close_inherited(self) -> None:
        """In a forked child: begin a session of its own, since the server tells writers apart by session and number.
        Its copies of the parent's connections are closed already."""
        self._lock, self._idle, self._session = threading.Lock(), [], secrets.token_hex(16)


class PeerWriter(WriterBase):
    """Writes one object. The server keeps unpublished bytes until this process's last connection ends."""

    def __init__(
        self, backend: PeerBackend, number: int, key: str, *, extent: Extent, publish: Publish
    ) -> None:
        super().__init__(key, backend.place, extent=extent, publish=publish)
        self._backend = backend
        self._number = number
        head = {
            "do": "create",
            "writer": number,
            "key": key,
            "length": extent.length,
            "length_max": extent.length_max,
            "publish": publish.value,
        }
        backend.request(self._what("create"), head)

    def write(self, offset: int, view: memoryview) -> None:
        self._check_open("write")
        data, what = flat(view), self._what("write")
        self._extent.check_range(what, offset, data.nbytes)
        head = {"do": "write", "writer": self._number, "offset": offset}
        try:
            self._backend.request(what, head, data)
        except BackendError as error:
            if not error.retryable:
                self.abort()
            raise

    def _finish(self, what: str) -> None:
        # Not repeated: if the answer to the first was lost, the second would fail, and hide that the object is visible.
        head = {"do": "publish", "writer": self._number}
        self._backend.request(what, head, repeatable=False)

    def _on_published(self) -> None:
        """Nothing to free: the server forgets what it has published."""

    def _die(self) -> None:
        self._state = WriterState.DEAD
        with suppress(BackendError):  # the server removes it with the last connection
            self._backend.request(self._what("abort"), {"do": "abort", "writer": self._number})


def _left_s(deadline_s: float) -> float:
    return max(deadline_s - time.monotonic(), LEAST_TIMEOUT_S)


def _close_inherited() -> None:
    for backend in list(_backends):
        backend.close_inherited()


os.register_at_fork(after_in_child=_close_inherited)
