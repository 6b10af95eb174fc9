"""Transport: messages between ranks, through queues in stores of ``torch.distributed`` that belong to tierfall.

Each rank has an inbox in every store that it belongs to: that of its node, and, for leaders of nodes, that of the job.
A send does not wait; one thread per store receives. A store closes the connection on a value larger than 8 MiB, so a
larger message is sent in several packets.
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

Deliver = Callable[[bytes, int], None]
Lost = Callable[[BaseException], None]
PACKET_BYTES_MAX = 4 << 20
_FOREVER = timedelta(days=365)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.25
GOODBYE_S = 2.0
"""Seconds beyond its wait for other ranks in which a close may announce that this rank leaves."""
_HEADER = struct.Struct("!cI")  # the kind of packet, and the rank that sent it
_MORE, _LAST, _LOST, _STOP = b"M", b"L", b"X", b"S"


@dataclass(frozen=True, slots=True)
class Mailbox:
    """One rank's access to a store: one connection to send, one to receive. ``prefix`` is unique to this start.

    ``server`` is the rank whose process serves the store; ``clients`` is the number of other ranks that this process
    serves it to, 0 where another process does.
    """

    sending: TCPStore
    receiving: TCPStore
    prefix: str
    ranks: frozenset[int]
    server: int
    clients: int = 0

    def inbox(self, rank: int) -> str:
        return f"{self.prefix}/inbox/{rank}"


class StoreTransport:
    """Sends and receives the messages of one rank."""

    def __init__(self, rank: int, mailboxes: tuple[Mailbox, ...]) -> None:
        self.rank = rank
        self._mailboxes = mailboxes
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()  # keeps the packets of a message together
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._is_lost = False

    def send(self, rank: int, data: bytes) -> None:
        """Send a message, without waiting for its receiver. It is dropped after ``close``, or once the store is
        gone."""
        for mailbox in self._mailboxes:
            if rank in mailbox.ranks:
                self._send(mailbox, rank, data)
                return
        if not self._closing:
            raise ValueError(f"rank {self.rank} has no way to send to rank {rank}")

    def start(self, deliver: Deliver, lost: Lost) -> None:
        """Call ``deliver`` with each message and its sender, and ``lost`` once when no message can arrive any more."""
        for mailbox in self._mailboxes:
            thread = threading.Thread(
                target=self._receive,
                args=(mailbox, deliver, lost),
                name=f"tierfall-transport-{self.rank}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop receiving; stop serving once all guests have left, or after ``timeout_s``."""
        self._closing = True
        deadline = time.monotonic() + timeout_s
        goodbye = threading.Thread(
            target=self._announce_leaving,
            args=(deadline,),
            name=f"tierfall-transport-{self.rank}-close",
            daemon=True,
        )
        goodbye.start()  # torch waits without bound for a store that hangs
        goodbye.join(timeout_s + GOODBYE_S)
        if goodbye.is_alive():
            logger.warning(
                "rank %d: a store of the job does not answer; close does not wait for it", self.rank
            )
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()))
        self._threads.clear()
        self._mailboxes = ()

    def _announce_leaving(self, deadline: float) -> None:
        for mailbox in self._mailboxes:
            try:
                if mailbox.clients:
                    wait_for_clients(mailbox.sending, mailbox.prefix, mailbox.clients, deadline)
                mailbox.sending.queue_push(mailbox.inbox(self.rank), _HEADER.pack(_STOP, self.rank))
                if not mailbox.clients:
                    sign_off(mailbox.sending, mailbox.prefix)
            except RuntimeError as error:
                logger.debug("rank %d: the store is already gone: %s", self.rank, error)

    def _send(self, mailbox: Mailbox, rank: int, data: bytes) -> None:
        try:
            with self._send_lock:
                for kind, packet in _packets(data):
                    mailbox.sending.queue_push(
                        mailbox.inbox(rank), _HEADER.pack(kind, self.rank) + packet
                    )
        except RuntimeError as error:
            if not self._closing:
                logger.warning("rank %d: a message to rank %d is lost: %s", self.rank, rank, error)

    def _receive(self, mailbox: Mailbox, deliver: Deliver, lost: Lost) -> None:
        mailbox.receiving.set_timeout(_FOREVER)
        inbox = mailbox.inbox(self.rank)
        incomplete: dict[int, bytearray] = {}
        while True:
            try:
                data = mailbox.receiving.queue_pop(inbox)
            except RuntimeError as error:
                gone = ConnectionError(f"rank {mailbox.server} hung up: {error}")
                gone.__cause__ = error
                self._lose(mailbox, gone, lost)
                return
            kind, sender = _HEADER.unpack_from(data)
            if kind == _STOP:
                return
            if kind == _LOST:
                self._lose(mailbox, ConnectionError(data[_HEADER.size :].decode()), lost)
                continue
            incomplete.setdefault(sender, bytearray()).extend(data[_HEADER.size :])
            if kind == _LAST:
                try:
                    deliver(bytes(incomplete.pop(sender)), sender)
                except Exception:
                    logger.exception("rank %d: a message of rank %d failed", self.rank, sender)

    def _lose(self, mailbox: Mailbox, error: Exception, lost: Lost) -> None:
        """Report the loss once: here, and to the ranks that reach rank 0 through this one only."""
        with self._lock:
            if self._closing or self._is_lost:
                return
            self._is_lost = True
        for other in self._mailboxes:
            if other is not mailbox and other.clients:
                for rank in other.ranks - {self.rank}:
                    reason = f"rank {self.rank} cannot reach rank 0 any more: {error}".encode()
                    other.sending.queue_push(
                        other.inbox(rank), _HEADER.pack(_LOST, self.rank) + reason
                    )
        lost(error)


def _packets(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    last = max(0, (len(data) - 1) // PACKET_BYTES_MAX)
    for number in range(last + 1):
        start = number * PACKET_BYTES_MAX
        yield (_LAST if number == last else _MORE), data[start : start + PACKET_BYTES_MAX]


def sign_off(store: Store, prefix: str) -> None:
    """Tell the process that serves a store that one of its guests does not need it any more."""
    store.add(f"{prefix}/left", 1)


def wait_for_clients(store: Store, prefix: str, guests: int, deadline: float) -> None:
    """Wait until that many guests have left, or until ``deadline`` on the monotonic clock."""
    pause = _FIRST_PAUSE_S
    while (left := store.add(f"{prefix}/left", 0)) < guests:
        if time.monotonic() >= deadline:
            logger.debug("%d of %d guests have not left", guests - left, guests)
            return
        pause = sleep_longer(pause)


def sleep_longer(pause: float) -> float:
    """Sleep ``pause`` seconds; return the next pause."""
    time.sleep(pause)
    return min(2 * pause, _LONGEST_PAUSE_S)
