"""Hours of training of several ranks, each drawn by a seed: nothing that was promised is broken."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.many_hour import run_many_hour

BLOCKS = 8
HOURS = 200


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_hour_of_several_ranks_breaks_a_promise(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(block, HOURS, BLOCKS):
        seen.update(run_many_hour(seed).counts)
    rare = {
        what for what in ("whole", "there", "given_up", "gone", "drop", "crash") if not seen[what]
    }
    assert not rare, f"{rare} never came about: too little happens for a test of it"
