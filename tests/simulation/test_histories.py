"""Hundreds of lives of a run, drawn by seeds: whatever happens, what was promised is not lost, and all ends well."""

from __future__ import annotations

import pytest

from tests.simulation.history import run_history

HISTORIES_PER_BLOCK = 50
EVENTS = 90


@pytest.mark.parametrize("block", range(8))
def test_no_history_breaks_a_promise(block: int) -> None:
    for seed in range(block * HISTORIES_PER_BLOCK, (block + 1) * HISTORIES_PER_BLOCK):
        run_history(seed, EVENTS)
