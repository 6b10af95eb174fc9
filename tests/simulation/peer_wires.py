"""Peer memory without a network: the backend and the server of the product, and between them connections that a seed
breaks. A machine may be lost, or be cut off from another one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

from tierfall.backends.peer.backend import PeerBackend
from tierfall.backends.peer.server import PeerServer, _RequestHandler, _Session
from tierfall.core.ranks.wire import Connection, Head, WireError
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import BackendError, UnreachableError

RUN = "run"
BREAKS = ("before", "halfway", "after")
"""A connection breaks before a request arrives, with a part of its bytes, or before the answer arrives."""


class Wires:
    """What lies between machines. ``breaks`` is how often a request between two of them breaks its connection."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(f"wires {seed}")
        self.lost: set[int] = set()
        self.parted: set[frozenset[int]] = set()
        self.breaks: dict[frozenset[int], float] = {}
        self.on_request: Callable[[int, int], None] = lambda one, other: None
        """Called before a request from one machine to another one is sent."""

    def reaches(self, one: int, other: int) -> bool:
        return not self.lost & {one, other} and frozenset((one, other)) not in self.parted

    def trouble(self, one: int, other: int) -> str:
        """Draw how a request breaks its connection; empty where it does not."""
        chance = self.breaks.get(frozenset((one, other)), 0.0)
        return self.draw.choice(BREAKS) if chance and self.draw.random() < chance else ""

    def heal(self) -> None:
        self.parted.clear()
        self.breaks.clear()


class Server:
    """What a process of a machine keeps for those of another: in place of a ``PeerServer``."""

    def __init__(
        self,
        machine: int,
        storage: Backend,
        folders: Callable[[], list[str]],
        adopt: Callable[[Head], bool],
    ) -> None:
        self.machine = machine
        self.lock = threading.Lock()
        self.idle_s = 1.0
        self.folders = folders
        self._adopt = adopt
        self._storage = storage
        self._sessions: dict[str, _Session] = {}

    def adopt(self, sender: str, head: Head) -> bool:
        return self._adopt(head)

    def join(self, name: str) -> _Session:
        session = self._sessions.setdefault(name, _Session(self._storage))
        session.connections += 1
        return session

    def leave(self, name: str) -> None:
        session = self._sessions[name]
        session.connections -= 1
        if not session.connections:
            del self._sessions[name]
            for writer in session.writers.values():
                with suppress(BackendError):
                    writer.abort()


class Wire:
    """One connection, both of its sides: a request is carried out as it is sent."""

    def __init__(self, wires: Wires, source: int, server: Server, session: str) -> None:
        self._wires, self._source, self._server, self._name = wires, source, server, session
        self._check_reach()
        side = cast(Connection, SimpleNamespace(
            set_timeout=lambda seconds: None, receive=self._next_request, take=self._take, send=self._keep_answer,
        ))  # fmt: skip
        self._handler = _RequestHandler(cast(PeerServer, server), side, server.join(session), "")
        self._requests: list[tuple[Head, memoryview | None]] = []
        self._payload = memoryview(b"")
        self._answer: tuple[Head, memoryview | None] | None = None
        self._trouble = ""
        self._is_open = True

    # The sender's side ---------------------------------------------------------------------------

    def set_timeout(self, seconds: float | None) -> None:
        """A request takes no time here."""

    def send(self, head: Head, payload: memoryview | None = None) -> None:
        self._wires.on_request(self._source, self._server.machine)
        self._check_reach()
        self._trouble = self._wires.trouble(self._source, self._server.machine)
        if self._trouble == "before" or (self._trouble == "halfway" and payload is None):
            raise ConnectionResetError("the connection broke, on purpose")
        self._requests.append((head, payload))
        with suppress(WireError):  # there is one request at a time
            self._handler.run()

    def receive(self) -> tuple[Head, int]:
        if self._trouble or self._answer is None:
            raise TimeoutError("no answer, on purpose")
        head, payload = self._answer
        return head, 0 if payload is None else payload.nbytes

    def fill(self, target: memoryview) -> None:
        assert self._answer is not None
        _, payload = self._answer
        assert payload is not None
        target[:] = payload

    def close(self) -> None:
        """Close it. A server that cannot be reached may not notice, and keep what it was sent."""
        reached = self._wires.reaches(self._source, self._server.machine)
        if self._is_open and (reached or self._wires.draw.random() < 0.5):
            self._server.leave(self._name)
        self._is_open = False

    def _check_reach(self) -> None:
        if not self._wires.reaches(self._source, self._server.machine):
            raise TimeoutError("timed out, on purpose")

    # The server's side ---------------------------------------------------------------------------

    def _next_request(self) -> tuple[Head, int]:
        if not self._requests:
            raise WireError("no further request")
        head, payload = self._requests.pop()
        self._payload, self._answer = payload or memoryview(b""), None
        return head, self._payload.nbytes

    def _take(
        self, length: int, buffer: memoryview, use: Callable[[int, memoryview], None]
    ) -> BaseException | None:
        arrives = length
        if self._trouble == "halfway":
            arrives = self._wires.draw.randrange(length)
        try:
            use(0, self._payload[:arrives])
        except BackendError as error:
            return error
        if arrives < length:
            raise WireError("the connection broke in the middle, on purpose")
        return None

    def _keep_answer(self, head: Head, payload: memoryview | None = None) -> None:
        self._answer = head, payload


class WiredPeer(PeerBackend):
    """The memory of another machine, over ``Wire`` in place of TCP."""

    def __init__(self, wires: Wires, source: int, server: Server) -> None:
        super().__init__(("", 0), secret=b"", run=RUN, sender=f"machine-{source}")
        self._wires, self._source, self._server = wires, source, server

    @property
    def place(self) -> str:
        return f"the memory of machine {self._server.machine}"

    def _connect(self, what: str, deadline_s: float) -> Any:
        try:
            return Wire(self._wires, self._source, self._server, self._session)
        except OSError as error:
            raise UnreachableError(f"{what}: {error}") from error
