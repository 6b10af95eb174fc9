"""Peer memory without a network: the client and the requests of the product, and between them connections that a seed
breaks. A machine may be lost, or be cut off from another one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

from tierfall.core.ranks.wire import Connection, Head, WireError
from tierfall.core.types.errors import BackendError
from tierfall.tiers.kept_images import KeptImages
from tierfall.tiers.peer_requests import PeerClient, PeerServer, Requests

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


class Wire:
    """One connection, both of its sides: a request is carried out as it is sent."""

    def __init__(self, wires: Wires, source: int, target: int, images: KeptImages) -> None:
        self._wires, self._source, self._target = wires, source, target
        self._check_reach()
        side = cast(Connection, SimpleNamespace(
            set_timeout=lambda seconds: None, receive=self._next_request, send=self._keep_answer,
            fill=self._fill, take=self._take,
        ))  # fmt: skip
        server = SimpleNamespace(images=images, senders={""}, idle_s=1.0)
        self._handler = Requests(cast(PeerServer, server), side, "")
        self._requests: list[tuple[Head, memoryview | None]] = []
        self._payload = memoryview(b"")
        self._answer: tuple[Head, memoryview | None] | None = None
        self._trouble = ""

    # The sender's side ---------------------------------------------------------------------------

    def set_timeout(self, seconds: float | None) -> None:
        """A request takes no time here."""

    def send(self, head: Head, payload: memoryview | None = None) -> None:
        self._wires.on_request(self._source, self._target)
        self._check_reach()
        self._trouble = self._wires.trouble(self._source, self._target)
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
        """A server keeps what it was sent, however its connections end."""

    def _check_reach(self) -> None:
        if not self._wires.reaches(self._source, self._target):
            raise TimeoutError("timed out, on purpose")

    # The server's side ---------------------------------------------------------------------------

    def _next_request(self) -> tuple[Head, int]:
        if not self._requests:
            raise WireError("no further request")
        head, payload = self._requests.pop()
        self._payload, self._answer = payload or memoryview(b""), None
        return head, self._payload.nbytes

    def _fill(self, target: memoryview) -> None:
        arrives = target.nbytes
        if self._trouble == "halfway":
            arrives = self._wires.draw.randrange(arrives)
        target[:arrives] = self._payload[:arrives]
        if arrives < target.nbytes:
            raise WireError("the connection broke in the middle, on purpose")

    def _take(
        self, length: int, buffer: memoryview, use: Callable[[int, memoryview], None]
    ) -> BaseException | None:
        try:
            use(0, self._payload)
        except BackendError as error:
            return error
        return None

    def _keep_answer(self, head: Head, payload: memoryview | None = None) -> None:
        self._answer = head, payload


class WiredPeer(PeerClient):
    """The memory of another machine, over ``Wire`` in place of TCP. ``process`` returns the images of its process
    there."""

    def __init__(
        self, wires: Wires, source: int, target: int, process: Callable[[], KeptImages]
    ) -> None:
        super().__init__(("", 0), secret=b"", run=RUN, sender="")
        self.place = f"the memory of machine {target}"
        self._wires, self._source, self._target, self._process = wires, source, target, process

    def _connect(self, what: str, deadline_s: float) -> Any:
        return Wire(self._wires, self._source, self._target, self._process())
