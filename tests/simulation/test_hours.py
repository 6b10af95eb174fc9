"""Hundreds of hours of training, each drawn by a seed: nothing that was promised is broken. There is more of it in
``make simulate``.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.simulation.hour import run_hour
from tierfall.core.values import LossClass

HOURS = 800
BLOCKS = 80


@cache
def lost_in(seed: int) -> Counter[LossClass]:
    return Counter(run_hour(seed).lost)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_hour_of_one_rank_breaks_a_promise(block: int) -> None:
    for seed in range(block, HOURS, BLOCKS):
        lost_in(seed)


def test_processes_and_nodes_are_lost_often_enough_for_a_test_of_it() -> None:
    lost = sum((lost_in(seed) for seed in range(50)), Counter())
    assert lost[LossClass.PROCESS] > 25
    assert lost[LossClass.NODE] > 12
