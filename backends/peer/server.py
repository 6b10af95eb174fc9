"""The server of this node's memory: it keeps the objects that processes of other nodes send.

One thread for each connection carries out its requests on the storage of the sender. Only a process that proves in the
handshake that it knows the run's secret is served. The objects outlive the server; what a sender had not published is
removed with the last connection of its process.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from tierfall.backends.peer.kept import MappedWriter
from tierfall.core.ranks.serving import Server
from tierfall.core.ranks.wire import (
    BUFFER_BYTES,
    Connection,
    DamagedPayloadError,
    Head,
    WireError,
)
from tierfall.core.types.backend import Backend, Publish, Writer
from tierfall.core.types.errors import BackendError, LostWriteError, UnreachableError

logger = logging.getLogger("tierfall")

SCAN_PAGE = 1000
"""Objects in one answer to a scan."""
READ_BYTES_MAX = 4 << 20
CLOSE_S = 5.0


@dataclass(slots=True)
class _Session:
    """One process of a sender: its open connections, and its unpublished writers by the numbers that it has given."""

    storage: Backend
    connections: int = 0
    writers: dict[int, Writer] = field(default_factory=dict)


class PeerServer:
    """Serves from its construction until ``close``, at the address of the socket ``listener``, which it owns.

    ``storage`` returns the backend that keeps the objects of a sender, by its name; it is called once for each sender,
    and ``close`` closes it. ``folders`` returns the names of the senders of which anything is kept; ``adopt`` gives a
    sender the image that a request names, if another sender's is the same. ``idle_s``: a connection that is silent for
    longer within a payload or an answer is closed.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        run: str,
        storage: Callable[[str], Backend],
        listener: socket.socket,
        folders: Callable[[], Sequence[str]] = tuple,
        adopt: Callable[[str, Head], bool] = lambda sender, head: False,
        idle_s: float = 60.0,
    ) -> None:
        self._storage = storage
        self.folders, self.adopt, self.idle_s = folders, adopt, idle_s
        self.lock = threading.Lock()
        self._stores: dict[str, Backend] = {}
        self._sessions: dict[tuple[str, str], _Session] = {}
        self._server = Server(
            listener, secret=secret, run=run, serve=self._serve_sender, name="peers"
        )
        self.port = self._server.port

    def close(self) -> None:
        """Stop listening, and close every connection. Unpublished objects are removed, within CLOSE_S seconds of each
        call that the storage is in."""
        self._server.close(CLOSE_S)
        for store in self._stores.values():
            store.close()

    def _serve_sender(self, connection: Connection, sender: str, session: str) -> None:
        try:
            own = self._join(sender, session)
        except BackendError as error:
            logger.warning("peers: the memory for %s could not be opened: %s", sender, error)
            _, length = connection.receive()
            if not length:
                connection.send({"error": _kind(error), "text": str(error)})
            return
        try:
            _RequestHandler(self, connection, own, sender).run()
        finally:
            self._leave(sender, session)

    def _join(self, sender: str, session: str) -> _Session:
        with self.lock:
            if sender not in self._stores:
                self._stores[sender] = self._storage(sender)
            own = self._sessions.setdefault((sender, session), _Session(self._stores[sender]))
            own.connections += 1
            return own

    def _leave(self, sender: str, session: str) -> None:
        with self.lock:
            own = self._sessions[sender, session]
            own.connections -= 1
            if own.connections:
                return
            del self._sessions[sender, session]
        for writer in own.writers.values():
            with suppress(BackendError):  # the next start collects it
                writer.abort()


class _RequestHandler:
    """The requests of one connection."""

    def __init__(
        self, server: PeerServer, connection: Connection, session: _Session, sender: str
    ) -> None:
        self._connection = connection
        self._session = session
        self._lock = server.lock
        self._idle_s = server.idle_s
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        storage = session.storage
        self._operations: dict[str, Callable[[Head], Any]] = {
            "create": self._create,
            "publish": self._publish,
            "abort": self._abort,
            "stat": self._stat,
            "scan": self._scan,
            "delete_some": lambda head: list(storage.delete_some(head["keys"])),
            "discard": lambda head: storage.discard_unfinished(head["prefix"]),
            "folders": lambda head: list(server.folders()),
            "adopt": partial(server.adopt, sender),
        }

    def run(self) -> None:
        while True:
            self._connection.set_timeout(None)  # a sender may have no request for hours
            head, length = self._connection.receive()
            self._connection.set_timeout(self._idle_s)
            try:
                answer, payload = self._answer(head, length)
            except WireError:
                raise
            except (BackendError, ValueError, KeyError, TypeError) as error:
                answer, payload = {"error": _kind(error), "text": str(error)}, None
            self._connection.send(answer, payload)

    def _answer(self, head: Head, length: int) -> tuple[Head, memoryview | None]:
        operation = head.get("do")
        if operation == "write":
            return self._write(head, length), None
        if length:
            raise WireError(f"{operation!r} comes with bytes")
        if operation == "read":
            return self._read(head)
        known = self._operations.get(str(operation))
        if known is None:
            raise BackendError(f"{operation!r} is no request")
        return {"value": known(head)}, None

    def _create(self, head: Head) -> None:
        number = int(head["writer"])
        writer = self._session.storage.create(
            head["key"],
            length=head["length"],
            length_max=head["length_max"],
            publish=Publish(head["publish"]),
        )
        with self._lock:
            kept = self._session.writers.setdefault(number, writer)
        # The answer to an earlier request was lost, or this one is the earlier and was slow: the other may have bytes.
        if kept is not writer:
            writer.abort()

    def _writer(self, head: Head) -> Writer:
        with self._lock:
            writer = self._session.writers.get(int(head["writer"]))
        if writer is None:
            raise LostWriteError(
                "it was published already, or the connection was lost, and what was written before that is gone; "
                "write the object anew"
            )
        return writer

    def _write(self, head: Head, length: int) -> Head:
        offset = int(head["offset"])

        def use(start: int, part: memoryview) -> None:
            self._writer(head).write(offset + start, part)

        with ExitStack() as stack:
            memory = None
            with suppress(BackendError):  # ``use`` raises it again, once the payload is received
                writer = self._writer(head)
                if isinstance(writer, MappedWriter):
                    memory = stack.enter_context(writer.receiving(offset, length))
            if memory is not None:
                self._connection.fill(memory)
                return {"value": None}
        failure = self._connection.take(length, self._buffer, use)
        if failure is not None:
            raise failure
        return {"value": None}

    def _publish(self, head: Head) -> None:
        self._writer(head).publish()
        with self._lock:
            self._session.writers.pop(int(head["writer"]), None)

    def _abort(self, head: Head) -> None:
        with self._lock:
            writer = self._session.writers.pop(int(head["writer"]), None)
        if writer is not None:
            writer.abort()

    def _read(self, head: Head) -> tuple[Head, memoryview]:
        length = int(head["length"])
        if not 0 <= length <= READ_BYTES_MAX:
            raise BackendError(f"a read of {length} bytes; expected {READ_BYTES_MAX} at most")
        if length > self._buffer.nbytes:
            self._buffer = memoryview(bytearray(length))
        view = self._buffer[:length]
        self._session.storage.read_into(head["key"], int(head["offset"]), view)
        return {"value": None}, view

    def _stat(self, head: Head) -> list[Any]:
        found = self._session.storage.stat(head["key"])
        return [found.bytes, found.version]

    def _scan(self, head: Head) -> dict[str, Any]:
        """List a page, of the keys after the last one of the page before."""
        found = self._session.storage.scan(head["prefix"])
        page = list(islice((each for each in found if each.key > head["after"]), SCAN_PAGE))
        last = page[-1].key if len(page) == SCAN_PAGE else None
        return {"rows": [[each.key, each.bytes, each.version] for each in page], "last": last}


def _kind(error: BaseException) -> str:
    if isinstance(error, DamagedPayloadError):
        return UnreachableError.__name__
    return type(error).__name__ if isinstance(error, BackendError) else BackendError.__name__
