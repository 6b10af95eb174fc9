"""Hundreds of lives of a run, drawn by seeds: whatever happens, what was promised is not lost, and all ends well."""

from __future__ import annotations

import pytest

from tests.simulation.history import run_history
from tierfall.core.types.values import WhenFull

HISTORIES_PER_BLOCK = 20
EVENTS = 90


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(block, marks=pytest.mark.torture) for block in range(1, 5))]
)
def test_no_history_breaks_a_promise(block: int) -> None:
    lived = [
        run_history(seed, EVENTS)
        for seed in range(block * HISTORIES_PER_BLOCK, (block + 1) * HISTORIES_PER_BLOCK)
    ]
    assert {history.when_full for history in lived} == set(WhenFull)
    assert sum(len(history.superseded) for history in lived) > HISTORIES_PER_BLOCK // 10, (
        "too little is superseded for a test of it"
    )
    assert sum(len(history.seen_drops) for history in lived) > HISTORIES_PER_BLOCK // 5, (
        "too little is dropped by rule for a test of it"
    )
