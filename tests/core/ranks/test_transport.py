"""Messages arrive complete and in order, and a store is served as long as other ranks need it."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.core.ranks.processes import PATIENCE_S, serve
from tierfall.core.ranks import transport as post_module
from tierfall.core.ranks.rendezvous import RankPlacement, join
from tierfall.core.ranks.transport import StoreTransport


class Inbox:
    """What came to one rank, and how it lost the others."""

    def __init__(self, post: StoreTransport) -> None:
        self.post = post
        self.messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.fails_at: bytes | None = None
        post.start(self._take, self.lost.put)

    def _take(self, message: bytes, sender: int) -> None:
        if message == self.fails_at:
            raise ZeroDivisionError
        self.messages.put(message)

    def next(self) -> bytes:
        return self.messages.get(timeout=PATIENCE_S)


@pytest.fixture
def both() -> Iterator[tuple[Inbox, Inbox]]:
    """Ranks 0 and 1, on two nodes."""
    bootstrap = serve()

    def meet(rank: int) -> StoreTransport:
        place = RankPlacement(
            rank=rank, world_size=2, node=str(rank), address="127.0.0.1", settings={}
        )
        return join(place, bootstrap, run="run", timeout_s=PATIENCE_S)[1]

    with ThreadPoolExecutor(2) as threads:
        inboxes = [Inbox(post) for post in threads.map(meet, range(2))]
    yield inboxes[0], inboxes[1]
    inboxes[1].post.close(1.0)
    inboxes[0].post.close(1.0)


def test_a_large_message_of_several_threads_is_not_torn(
    both: tuple[Inbox, Inbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(post_module, "PACKET_BYTES_MAX", 10)
    messages = [bytes([number]) * 200 for number in range(20)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda message: both[1].post.send(0, message), messages))
    assert sorted(both[0].next() for _ in messages) == messages


def test_a_guest_that_never_leaves_is_not_waited_for_longer_than_asked(
    both: tuple[Inbox, Inbox],
) -> None:
    root, guest = both
    began = time.monotonic()
    root.post.close(0.3)
    assert 0.3 <= time.monotonic() - began < PATIENCE_S / 2
    assert "rank 0 hung up: " in str(guest.lost.get(timeout=PATIENCE_S))
    guest.post.send(0, b"x")  # nobody is there; that is no error of the sender's
    assert guest.lost.empty()  # said once


def test_a_message_that_cannot_be_taken_is_reported_of_and_the_next_one_is_taken(
    both: tuple[Inbox, Inbox],
    caplog: pytest.LogCaptureFixture,
) -> None:
    root, guest = both
    root.fails_at = b"bad"
    for message in (b"bad", b"good"):
        guest.post.send(0, message)
    assert root.next() == b"good"
    assert "rank 0: a message of rank 1 failed" in caplog.text
