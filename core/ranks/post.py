"""The post: messages between ranks, through queues in stores of ``torch.distributed`` that belong to tierfall.

Each rank has an inbox in every store that it belongs to: that of its node, and, for leaders of nodes, that of the job.
A push is not waited for; one thread per store waits for what comes in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

logger = logging.getLogger("tierfall")

_STOP = b""
_FOREVER = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Office:
    """A store, as one rank reaches it: one connection to send by, one to receive by; ``prefix`` is of this start."""

    sending: TCPStore
    receiving: TCPStore
    prefix: str
    ranks: frozenset[int]

    def inbox(self, rank: int) -> str:
        return f"{self.prefix}/inbox/{rank}"


class StorePost:
    """Sends to and receives for one rank. ``servers`` are the stores that this process serves to others."""

    def __init__(
        self, rank: int, offices: tuple[Office, ...], servers: tuple[TCPStore, ...]
    ) -> None:
        self.rank = rank
        self._offices = offices
        self._servers = servers
        self._threads: list[threading.Thread] = []
        self._closing = False

    def send(self, rank: int, data: bytes) -> None:
        """Hand a message over; it is on its way when this returns, and nobody is waited for."""
        office = next(office for office in self._offices if rank in office.ranks)
        try:
            office.sending.queue_push(office.inbox(rank), data)
        except RuntimeError as error:
            if not self._closing:
                logger.warning("rank %d: a message to rank %d is lost: %s", self.rank, rank, error)

    def start(
        self, deliver: Callable[[bytes], None], lost: Callable[[BaseException], None]
    ) -> None:
        """Call ``deliver`` for each message that comes, and ``lost`` once when none can come any more."""
        for office in self._offices:
            thread = threading.Thread(
                target=self._receive,
                args=(office, deliver, lost),
                name=f"tierfall-post-{self.rank}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def _receive(
        self,
        office: Office,
        deliver: Callable[[bytes], None],
        lost: Callable[[BaseException], None],
    ) -> None:
        office.receiving.set_timeout(_FOREVER)
        inbox = office.inbox(self.rank)
        while True:
            try:
                data = office.receiving.queue_pop(inbox)
            except RuntimeError as error:
                if not self._closing:
                    lost(error)
                return
            if data == _STOP:
                return
            try:
                deliver(data)
            except Exception:
                logger.exception("rank %d: a message could not be taken", self.rank)

    def close(self, timeout_s: float) -> None:
        """Receive no more, and serve no more: to be called when the others need nothing from here."""
        self._closing = True
        for office in self._offices:
            try:
                office.sending.queue_push(office.inbox(self.rank), _STOP)
            except RuntimeError as error:
                logger.debug("the store is gone already: %s", error)
        for thread in self._threads:
            thread.join(timeout_s)
        self._servers = ()
