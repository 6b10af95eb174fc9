"""Subscribers and callbacks of an open run: every event once, in order, and no slow one holds anything up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import tierfall
from tests.steps import in_a_child, state_of, wait_until
from tierfall.telemetry import journal

MakeConfig = Callable[..., dict[str, Any]]
Events = list[dict[str, Any]]
PATIENCE_S = 20.0


def test_events_that_a_slow_subscriber_loses_are_counted_logged_and_told(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = journal.Subscriber
    monkeypatch.setattr(journal, "Subscriber", lambda *a, **k: real(*a, **k, waiting_max=3))
    release, seen = threading.Event(), Events()

    def slow(event: dict[str, Any]) -> None:
        release.wait(PATIENCE_S)
        seen.append(event)

    with tierfall.open(make_config()) as ckpt:
        ckpt.subscribe(slow)
        for step in range(1, 6):
            ckpt.save(step, state_of(step), block=True)
        lost = ckpt.metrics_dict()["tierfall/unread_events"]
        assert lost >= 5
        release.set()
        wait_until(lambda: any(e["kind"] == "events_lost" for e in seen), "the count")
        (report,) = [event for event in seen if event["kind"] == "events_lost"]
        assert report["count"] == lost
        ckpt.save(6, state_of(6), block=True)
    assert [e["step"] for e in seen if e["kind"] == "save_begun"] == [1, 6]
    assert len([r for r in caplog.records if "is slow: 3 events wait for it" in r.message]) == 1


def test_a_forked_child_gets_no_events_and_may_end_as_it_likes(make_config: MakeConfig) -> None:
    seen = Events()
    with tierfall.open(make_config()) as ckpt:
        unsubscribe = ckpt.subscribe(seen.append)
        handle = ckpt.save(1, state_of(1), block=True)
        for call in (
            lambda: ckpt.subscribe(print),
            ckpt.metrics_dict,
            lambda: handle.add_done_callback(print),
        ):
            assert in_a_child(call).startswith("ConfigError: "), "each names the process"
        assert in_a_child(unsubscribe) == ""
        ckpt.save(2, state_of(2), block=True)
    assert [e["step"] for e in seen if e["kind"] == "committed"] == [1, 2]
