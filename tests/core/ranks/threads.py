"""All ranks of a job as threads of one process, each with a message_tree over queues."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tierfall.core.ranks.ranks import Ranks
from tierfall.core.ranks.topology import Topology

PATIENCE_S = 20.0


class Post:
    """Carries messages to one rank: a queue, and a thread that hands out what comes."""

    def __init__(self, rank: int, posts: dict[int, Post]) -> None:
        self._rank = rank
        self._posts = posts
        self._inbox: queue.SimpleQueue[tuple[bytes, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.closed = False

    def send(self, rank: int, data: bytes) -> None:
        self._posts[rank]._inbox.put((data, self._rank))

    def start(
        self, take: Callable[[bytes, int], None], lost: Callable[[BaseException], None]
    ) -> None:
        def receive() -> None:
            while (packet := self._inbox.get()) is not None:
                take(*packet)

        self._thread = threading.Thread(target=receive, daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """This rank has left; what was sent to it is still handed out, as by a store that others still use."""
        self.closed = True

    def stop(self) -> None:
        self._inbox.put(None)
        assert self._thread is not None
        self._thread.join(PATIENCE_S)


@contextmanager
def network(
    nodes: Sequence[object], *, timeout_s: float = PATIENCE_S, fan_out: int = 64
) -> Iterator[list[Ranks]]:
    """All ranks, by what tells their nodes apart."""
    posts: dict[int, Post] = {}
    for rank in range(len(nodes)):
        posts[rank] = Post(rank, posts)
    try:
        yield [
            Ranks(Topology.of(rank, nodes, fan_out=fan_out), post, timeout_s=timeout_s)  # type: ignore[arg-type]
            for rank, post in posts.items()
        ]
    finally:
        for post in posts.values():
            post.stop()


def on_all(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Make one call per rank at the same time; return what each returned or raised."""
    calls = list(calls)
    outcomes: list[Any] = [None] * len(calls)

    def run(number: int, call: Callable[[], Any]) -> None:
        try:
            outcomes[number] = call()
        except BaseException as error:  # noqa: BLE001 - an outcome like another
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes
