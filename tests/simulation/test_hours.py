"""Hundreds of hours of training, each drawn by a seed: nothing that was promised is broken. There is more of it in
``make simulate``.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.hour import run_hour
from tierfall.core.values import LossClass

BLOCKS = 16
HOURS = 800


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_hour_of_one_rank_breaks_a_promise(block: int) -> None:
    lost: Counter[LossClass] = Counter()
    for seed in range(block, HOURS, BLOCKS):
        lost.update(run_hour(seed).lost)
    assert lost[LossClass.PROCESS] > HOURS // BLOCKS / 2, "too few processes die for a test of it"
    assert lost[LossClass.NODE] > HOURS // BLOCKS / 4, "too few nodes are lost for a test of it"
