"""A listener receives every message once, in order, without a lock that could block its answer."""

from __future__ import annotations

import threading

from tierfall.core.ranks.message_tree import (
    MessagesGathered,
    RankMessage,
)
from tierfall.core.ranks.ranks import Ranks

PATIENCE_S = 20.0


def test_a_listener_that_answers_does_not_block_another_thread_for_ever() -> None:
    """One thread hands on what was gathered while another announces; the listener announces, too."""
    ranks = Ranks.alone()
    heard: list[RankMessage] = []
    listening, announced = threading.Event(), threading.Event()

    def listen(news: RankMessage) -> None:
        heard.append(news)
        if isinstance(news, MessagesGathered):
            listening.set()
            assert announced.wait(PATIENCE_S)
            ranks.message_tree.announce(("b",), 2)

    def announce() -> None:
        assert listening.wait(PATIENCE_S)
        ranks.message_tree.announce(("a",), 1)  # returns, though the listener is busy
        announced.set()

    ranks.set_listener(listen)
    threads = [
        threading.Thread(target=announce, daemon=True),
        threading.Thread(
            target=ranks.message_tree.contribute, args=(("save", 1), "a"), daemon=True
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert [news.topic for news in heard] == [("save", 1), ("a",), ("b",)]
