"""Many lives of a run of several ranks, drawn by seeds: whatever happens to one of them, they agree, and all ends well.

``TIERFALL_MANY_HISTORIES`` says how many (default 24), ``TIERFALL_MANY_FIRST`` from which seed on.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.simulation.many_history import run_many

BLOCKS = 1
HISTORIES = int(os.environ.get("TIERFALL_MANY_HISTORIES", "24"))
FIRST = int(os.environ.get("TIERFALL_MANY_FIRST", "0"))
EVENTS = 250


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_history_of_several_ranks_breaks_a_promise(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(FIRST + block, FIRST + HISTORIES, BLOCKS):
        seen.update(run_many(seed, EVENTS).counts)
    common = (
        "whole",
        "committed",
        "given_up",
        "save_given_up",
        "delete_copy",
        "crash",
        "alike",
        "unlike",
        "pin",
        "unpin",
        "delete",
        "beside",
    )
    rare = {what for what in common if not seen[what]}
    assert not rare, f"{rare} never came about: too little happens for a test of it"


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1106, id="one rank has heard that no tier gets the only image in memory"),
        pytest.param(730285, id="a pin on one node stops a deletion there, and goes"),
        pytest.param(555231, id="ranks seem late as a commit record of all of them is written"),
    ],
)
def test_a_history_that_broke_a_promise_once(seed: int) -> None:
    run_many(seed, EVENTS)
