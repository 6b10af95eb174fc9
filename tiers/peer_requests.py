"""What processes of a run ask of the memory of another node: the server there, and the client.

One thread for each connection carries out its requests on the images that the server's process keeps. Only a process
that proves in the handshake that it knows the run's secret is served. All requests may be repeated. What a sender had
not sealed when the server ends is gone.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from tierfall.backends.toolkit.views import flat
from tierfall.core.format.records import Commit, parse_commit
from tierfall.core.ranks.serving import Server
from tierfall.core.ranks.wire import (
    BUFFER_BYTES,
    LEAST_TIMEOUT_S,
    Connection,
    DamagedPayloadError,
    Head,
    WireError,
    connect_as,
)
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    LockError,
    TierfallError,
    UnreachableError,
    error_class,
)
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.tiers.image_file import Region
from tierfall.tiers.kept_images import KeptImages, opened_image

logger = logging.getLogger("tierfall")

READ_BYTES_MAX = 4 << 20
RECORDS_BYTES_MAX = 512 << 20
TRIES = 2
"""How often a request is sent before its copy counts as stalled: a silent node rarely answers the next moment."""


# The server -------------------------------------------------------------------------------------------


class PeerServer(Server):
    """Serves ``images``. ``senders`` are the names of the nodes whose images are kept here. ``idle_s``: a connection
    that is silent for longer within a payload or an answer is closed."""

    def __init__(
        self,
        images: KeptImages,
        *,
        secret: bytes,
        run: str,
        senders: Collection[str],
        listener: socket.socket,
        idle_s: float = 60.0,
    ) -> None:
        self.images = images
        self.senders = frozenset(senders)
        self.idle_s = idle_s

        def serve(connection: Connection, sender: str) -> None:
            Requests(self, connection, sender).run()

        super().__init__(listener, secret=secret, run=run, serve=serve, name="peers")


class Requests:
    """The requests of one connection."""

    def __init__(self, server: PeerServer, connection: Connection, sender: str) -> None:
        self._images = server.images
        self._connection = connection
        self._may_send = sender in server.senders
        self._idle_s = server.idle_s
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    def run(self) -> None:
        while True:
            self._connection.set_timeout(None)  # a sender may have no request for hours
            head, length = self._connection.receive()
            self._connection.set_timeout(self._idle_s)
            try:
                answer, payload = self._answer(head, length)
            except WireError:
                raise
            except (TierfallError, ValueError, KeyError, TypeError) as error:
                answer, payload = {"error": _kind(error), "text": str(error)}, None
            self._connection.send(answer, payload)

    def _answer(self, head: Head, length: int) -> tuple[Head, memoryview | None]:
        do, images = head.get("do"), self._images
        if do == "write":
            self._write(head, length)
            return {}, None
        if do == "seal":
            self._seal(head, length)
            return {}, None
        if length:
            raise WireError(f"{do!r} comes with bytes")
        match do:
            case "begin":
                return {"value": self._begin(head)}, None
            case "discard":
                images.discard(*_key(head), int(head["upload"]))
                return {}, None
            case "images":
                return {}, memoryview(self._list())
            case "manifest":
                with self._opened(head) as region:
                    return {}, memoryview(region.manifest())
            case "read":
                return {}, self._read_range(head)
        raise BackendError(f"{do!r} is no request")

    # Receiving

    def _begin(self, head: Head) -> bool:
        if not self._may_send:
            raise BackendError("no image of this node is kept here")
        return self._images.begin(
            *_key(head),
            upload=int(head["upload"]),
            image_bytes=int(head["image_bytes"]),
            records_bytes=int(head["records_bytes"]),
            attempt_id=head["attempt_id"],
            waiting=[CheckpointId(*id) for id in head["waiting"]],
        )

    def _write(self, head: Head, length: int) -> None:
        upload, offset = int(head["upload"]), int(head["offset"])
        with ExitStack() as stack:
            lent = self._images.receiving(*_key(head), upload, offset, length)
            try:
                memory = stack.enter_context(lent)
            except BackendError:
                self._connection.skip(length, self._buffer)
                raise
            self._connection.fill(memory)

    def _seal(self, head: Head, length: int) -> None:
        if length > RECORDS_BYTES_MAX:
            raise WireError(f"records of {length} bytes")
        records = bytearray(length)
        self._connection.fill(memoryview(records))
        end = int(head["manifest_bytes"])
        manifest, commit = bytes(records[:end]), bytes(records[end:])
        self._images.seal(*_key(head), int(head["upload"]), manifest=manifest, commit=commit)

    # Reading

    def _list(self) -> bytes:
        images, problems = self._images.kept.images()
        rows = [
            [
                *(i.path.name, i.seal.commit.digest, i.shard.rank, i.shard.world_size),
                i.commit.encode().decode(),
            ]
            for i in images
        ]
        return json.dumps([rows, [[_kind(each), str(each)] for each in problems]]).encode()

    def _read_range(self, head: Head) -> memoryview:
        offset, length = int(head["offset"]), int(head["length"])
        if not 0 <= length <= READ_BYTES_MAX:
            raise BackendError(f"a read of {length} bytes; expected {READ_BYTES_MAX} at most")
        if length > self._buffer.nbytes:
            self._buffer = memoryview(bytearray(length))
        view = self._buffer[:length]
        with self._opened(head) as region:
            region.read_into(offset, view)
        return view

    def _opened(self, head: Head) -> AbstractContextManager[Region]:
        kept = self._images.kept
        path = kept.folder / os.path.basename(str(head["name"]))
        return opened_image(path, kept.run, str(head["commit_digest"]))


def _key(head: Head) -> tuple[CheckpointId, Shard]:
    return CheckpointId(*head["checkpoint"]), Shard(*head["shard"])


def _kind(error: BaseException) -> str:
    if isinstance(error, DamagedPayloadError | LockError):  # it may be better in a while
        return UnreachableError.__name__
    return type(error).__name__ if isinstance(error, TierfallError) else BackendError.__name__


# The client -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImageThere:
    """An image that another node keeps, in the file ``name``; ``commit_digest`` is that of its commit record there."""

    client: PeerClient
    name: str
    commit_digest: str
    commit: Commit
    shard: Shard

    @property
    def place(self) -> str:
        return f"{self.name} in {self.client.place}"

    def manifest(self) -> bytes:
        return bytes(self.client.request("manifest", self._head))

    def read(self, offset: int, views: Iterable[memoryview]) -> None:
        for view in views:
            target = flat(view, writable=True)
            for start in range(0, target.nbytes, READ_BYTES_MAX):
                part = target[start : start + READ_BYTES_MAX]
                head = {**self._head, "offset": offset + start, "length": part.nbytes}
                self.client.request("read", head, into=part)
            offset += target.nbytes

    @property
    def _head(self) -> Head:
        return {"name": self.name, "commit_digest": self.commit_digest}


class PeerClient:
    """The memory of another node, by its ``PeerServer``.

    ``address`` is host and port; ``sender`` names this node. Writes wait for ``pace``. Requests raise AccessDeniedError
    if the handshake fails, and UnreachableError if the server does not answer for ``timeout_s``, or has not answered at
    ``until_s`` on the monotonic clock. ``last_answer_s`` is when it last did.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        secret: bytes,
        run: str,
        sender: str,
        pace: RateLimiter | None = None,
        timeout_s: float = 30.0,
        until_s: float = math.inf,
    ) -> None:
        self.place = f"the memory of {address[0]}:{address[1]}"
        self.last_answer_s = -math.inf
        self._address = address
        self._secret = secret
        self._run = run
        self._sender = sender
        self._pace = pace
        self._timeout_s = timeout_s
        self._until_s = until_s
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False

    # Sending -------------------------------------------------------------------------------------

    def begin(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        *,
        upload: int,
        image_bytes: int,
        records_bytes: int,
        attempt_id: str | None,
        waiting: Collection[CheckpointId],
    ) -> bool:
        """Begin to send an image; see ``KeptImages.begin``."""
        head = {
            **_head(checkpoint, shard, upload),
            "image_bytes": image_bytes,
            "records_bytes": records_bytes,
            "attempt_id": attempt_id,
            "waiting": [[id.step, id.attempt] for id in waiting],
        }
        return bool(self.request("begin", head))

    def write(
        self, checkpoint: CheckpointId, shard: Shard, upload: int, offset: int, view: memoryview
    ) -> None:
        data = flat(view)
        slices = [(0, data)] if self._pace is None else self._pace.slices(data)
        for start, part in slices:
            head = {**_head(checkpoint, shard, upload), "offset": offset + start}
            self.request("write", head, part)

    def seal(
        self, checkpoint: CheckpointId, shard: Shard, upload: int, *, manifest: bytes, commit: bytes
    ) -> None:
        head = {**_head(checkpoint, shard, upload), "manifest_bytes": len(manifest)}
        self.request("seal", head, memoryview(manifest + commit))

    def discard(self, checkpoint: CheckpointId, shard: Shard, upload: int) -> None:
        """Drop an image that this start has sent."""
        self.request("discard", _head(checkpoint, shard, upload))

    # Reading -------------------------------------------------------------------------------------

    def images(self) -> tuple[list[ImageThere], list[TierfallError]]:
        """Return all images that the other node keeps, of earlier starts too, and why others cannot be read."""
        rows, problems = json.loads(bytes(self.request("images", {})))
        found = [
            ImageThere(
                self,
                name,
                digest,
                parse_commit(text.encode(), what=f"commit record of {name} in {self.place}"),
                Shard(rank, world_size),
            )
            for name, digest, rank, world_size, text in rows
        ]
        return found, [error_class(kind, BackendError)(text) for kind, text in problems]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # Requests ------------------------------------------------------------------------------------

    def request(
        self,
        do: str,
        head: Head,
        payload: memoryview | None = None,
        *,
        into: memoryview | None = None,
    ) -> Any:
        """Send a request; return the value of its answer, or its bytes, which fill ``into`` if that is given. If the
        connection breaks, it is sent once more, on a new one, in the time that is left: idle ones may have been closed
        together."""
        what = f"peers: {do} in {self.place}"
        deadline_s = min(time.monotonic() + self._timeout_s, self._until_s)
        failure: Exception | None = None
        for number in range(TRIES):
            if time.monotonic() >= deadline_s:
                break
            with self._lock:
                connection = self._idle.pop() if self._idle and number == 0 else None
            try:
                if connection is None:
                    connection = self._connect(what, deadline_s)
                answer, value = self._exchange(
                    connection, deadline_s, {"do": do, **head}, payload, into
                )
            except AccessDeniedError as error:
                raise AccessDeniedError(f"{what}: {error}") from error
            except (OSError, WireError, DamagedPayloadError) as error:
                failure = error
                continue
            self.last_answer_s = time.monotonic()
            if "error" in answer:
                make = error_class(str(answer["error"]), BackendError)
                raise make(f"{what}: {answer.get('text')}")
            return value
        why = "it is too late" if failure is None else str(failure) or type(failure).__name__
        raise UnreachableError(f"{what}: {why}") from failure

    def _exchange(
        self,
        connection: Connection,
        deadline_s: float,
        head: Head,
        payload: memoryview | None,
        into: memoryview | None,
    ) -> tuple[Head, Any]:
        """Return the answer and its value; close the connection after any error. The other side may be silent until the
        deadline."""
        try:
            connection.set_timeout(_left_s(deadline_s))
            connection.send(head, payload)
            answer, length = connection.receive()
            value = answer.get("value")
            if length and into is None and length <= RECORDS_BYTES_MAX:
                value = into = memoryview(bytearray(length))
            if "error" not in answer and length != (0 if into is None else into.nbytes):
                raise WireError(f"an answer with {length} bytes")
            if length and into is not None:
                connection.fill(into)
        except BaseException:
            connection.close()
            raise
        self._put_idle(connection)
        return answer, value

    def _put_idle(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, what: str, deadline_s: float) -> Connection:
        if self._closed:
            raise BackendError(f"{what}: it is closed")
        timeout_s = _left_s(deadline_s)
        return connect_as(
            self._sender, self._address, self._secret, run=self._run, timeout_s=timeout_s
        )


def _head(checkpoint: CheckpointId, shard: Shard, upload: int) -> Head:
    return {
        "checkpoint": [checkpoint.step, checkpoint.attempt],
        "shard": [shard.rank, shard.world_size],
        "upload": upload,
    }


def _left_s(deadline_s: float) -> float:
    return max(deadline_s - time.monotonic(), LEAST_TIMEOUT_S)
