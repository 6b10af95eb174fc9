"""Two ranks are killed or stopped at each event of three saves, and started twice: whatever was promised is there.

``make test`` takes one event in many, ``make torture`` each; ``python -m tests.simulation.exhaustive`` says how many
lives that are.
"""

from __future__ import annotations

import pytest

from tests.simulation.exhaustive import Blow, Order, live_through, search

APART = 211


@pytest.mark.parametrize("order", Order)
def test_a_kill_or_a_stop_at_some_events_breaks_no_promise(order: Order) -> None:
    assert search([order], every=APART, first=7) >= 2 * len(Blow)


@pytest.mark.torture
@pytest.mark.parametrize("order", Order)
def test_a_kill_or_a_stop_at_any_event_breaks_no_promise(order: Order) -> None:
    assert search([order]) == live_through(order) * len(Blow)
