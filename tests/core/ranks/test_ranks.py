"""A listener receives every message once, in order, without a lock that could block its answer."""

from __future__ import annotations

import threading

import pytest

from tierfall.core.ranks.message_tree import (
    DecisionAnnounced,
    MessagesGathered,
    RankMessage,
    RankReported,
)
from tierfall.core.ranks.ranks import Ranks

PATIENCE_S = 20.0


def test_what_was_reported_before_anybody_listened_is_received_first() -> None:
    ranks = Ranks.alone()
    heard: list[RankMessage] = []
    ranks.message_tree.contribute(("save", 1), "a")
    ranks.message_tree.report(("room",), 5)
    ranks.set_listener(heard.append)
    ranks.message_tree.announce(("save", 1), "go")
    assert heard == [
        MessagesGathered(topic=("save", 1), bodies={0: "a"}),
        RankReported(topic=("room",), body=5, rank=0),
        DecisionAnnounced(topic=("save", 1), body="go"),
    ]


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


def test_news_after_a_listener_that_failed_are_received() -> None:
    ranks = Ranks.alone()
    heard: list[RankMessage] = []

    def listen(news: RankMessage) -> None:
        heard.append(news)
        if len(heard) == 1:
            raise ZeroDivisionError

    ranks.set_listener(listen)
    with pytest.raises(ZeroDivisionError):
        ranks.message_tree.report(("a",), 1)
    ranks.message_tree.report(("b",), 2)
    assert [news.topic for news in heard] == [("a",), ("b",)]
