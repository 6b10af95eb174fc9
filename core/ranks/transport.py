"""The post: messages between ranks, through queues in stores of ``torch.distributed`` that belong to tierfall.

Each rank has an inbox in every store that it belongs to: that of its node, and, for leaders of nodes, that of the job.
A push is not waited for; one thread per store waits for what comes in. A store refuses what is larger than 8 MiB, and
hangs up: a larger message goes in parts.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

logger = logging.getLogger("tierfall")

Deliver = Callable[[bytes], None]
Lost = Callable[[BaseException], None]
PART_BYTES_MAX = 4 << 20
_FOREVER = timedelta(days=365)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.25
GOODBYE_S = 2.0
"""So much longer than it waits for the others may a close take to say that this rank leaves."""
_HEAD = struct.Struct("!cI")  # what it is, and the rank that it comes from
_MORE, _LAST, _LOST, _STOP = b"M", b"L", b"X", b"S"


@dataclass(frozen=True, slots=True)
class Mailbox:
    """A store, as one rank reaches it: one connection to send by, one to receive by; ``prefix`` is of this start.

    ``server`` is the rank whose process serves it, and ``guests`` says to how many other ranks this process does: none,
    where another one does.
    """

    sending: TCPStore
    receiving: TCPStore
    prefix: str
    ranks: frozenset[int]
    server: int
    guests: int = 0

    def inbox(self, rank: int) -> str:
        return f"{self.prefix}/inbox/{rank}"


class StoreTransport:
    """Sends to and receives for one rank."""

    def __init__(self, rank: int, offices: tuple[Mailbox, ...]) -> None:
        self.rank = rank
        self._offices = offices
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # the parts of a message stay together
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._is_lost = False

    def send(self, rank: int, data: bytes) -> None:
        """Hand a message over; it is on its way when this returns, and nobody is waited for.

        After ``close``, or once the store is gone, it goes nowhere.
        """
        for office in self._offices:
            if rank in office.ranks:
                self._send(office, rank, data)
                return
        if not self._closing:
            raise ValueError(f"rank {self.rank} has no way to send to rank {rank}")

    def start(self, deliver: Deliver, lost: Lost) -> None:
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

    def close(self, timeout_s: float) -> None:
        """Receive no more, and serve no more, once those whom this process serves have left: within ``timeout_s``."""
        self._closing = True
        deadline = time.monotonic() + timeout_s
        goodbye = threading.Thread(
            target=self._announce_leave,
            args=(deadline,),
            name=f"tierfall-post-{self.rank}-close",
            daemon=True,
        )
        goodbye.start()  # a store that stands still answers nothing, and torch waits for ever
        goodbye.join(timeout_s + GOODBYE_S)
        if goodbye.is_alive():
            logger.warning("rank %d: a store of the job does not answer: not waited for", self.rank)
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()))
        self._threads.clear()
        self._offices = ()

    def _announce_leave(self, deadline: float) -> None:
        for office in self._offices:
            try:
                if office.guests:
                    wait_for_guests(office.sending, office.prefix, office.guests, deadline)
                office.sending.queue_push(office.inbox(self.rank), _HEAD.pack(_STOP, self.rank))
                if not office.guests:
                    leave(office.sending, office.prefix)
            except RuntimeError as error:
                logger.debug("rank %d: the store is gone already: %s", self.rank, error)

    def _send(self, office: Mailbox, rank: int, data: bytes) -> None:
        try:
            with self._sending:
                for kind, part in _parts(data):
                    office.sending.queue_push(
                        office.inbox(rank), _HEAD.pack(kind, self.rank) + part
                    )
        except RuntimeError as error:
            if not self._closing:
                logger.warning("rank %d: a message to rank %d is lost: %s", self.rank, rank, error)

    def _receive(self, office: Mailbox, deliver: Deliver, lost: Lost) -> None:
        office.receiving.set_timeout(_FOREVER)
        inbox = office.inbox(self.rank)
        begun: dict[int, bytearray] = {}
        while True:
            try:
                data = office.receiving.queue_pop(inbox)
            except RuntimeError as error:
                gone = ConnectionError(f"rank {office.server} hung up: {error}")
                gone.__cause__ = error
                self._lose(office, gone, lost)
                return
            kind, sender = _HEAD.unpack_from(data)
            if kind == _STOP:
                return
            if kind == _LOST:
                self._lose(office, ConnectionError(data[_HEAD.size :].decode()), lost)
                continue
            begun.setdefault(sender, bytearray()).extend(data[_HEAD.size :])
            if kind == _LAST:
                try:
                    deliver(bytes(begun.pop(sender)))
                except Exception:
                    logger.exception("rank %d: a message could not be taken", self.rank)

    def _lose(self, office: Mailbox, error: Exception, lost: Lost) -> None:
        """Say so once, here and to those who reach the others through this rank alone."""
        with self._lock:
            if self._closing or self._is_lost:
                return
            self._is_lost = True
        for other in self._offices:
            if other is not office and other.guests:
                for rank in other.ranks - {self.rank}:
                    reason = f"rank {self.rank} reaches rank 0 no more: {error}".encode()
                    other.sending.queue_push(
                        other.inbox(rank), _HEAD.pack(_LOST, self.rank) + reason
                    )
        lost(error)


def _parts(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    last = max(0, (len(data) - 1) // PART_BYTES_MAX)
    for number in range(last + 1):
        start = number * PART_BYTES_MAX
        yield (_LAST if number == last else _MORE), data[start : start + PART_BYTES_MAX]


def leave(store: Store, prefix: str) -> None:
    """Tell the process that serves this store that one of its guests needs it no more."""
    store.add(f"{prefix}/left", 1)


def wait_for_guests(store: Store, prefix: str, guests: int, deadline: float) -> None:
    """Wait until that many guests have left, or till ``deadline`` on the monotonic clock."""
    pause = _FIRST_PAUSE_S
    while (left := store.add(f"{prefix}/left", 0)) < guests:
        if time.monotonic() >= deadline:
            logger.debug("%d of %d guests have not left", guests - left, guests)
            return
        pause = sleep_longer(pause)


def sleep_longer(pause: float) -> float:
    """Sleep so long; say how long next time."""
    time.sleep(pause)
    return min(2 * pause, _LONGEST_PAUSE_S)
