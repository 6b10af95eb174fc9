"""Many lives of a run of several ranks, drawn by seeds: whatever happens to one of them, they agree, and all ends well.

``TIERFALL_MANY_HISTORIES`` says how many ``make torture`` lives through (default 24), ``TIERFALL_MANY_FIRST`` from
which seed on; ``make test`` lives through the first four.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.simulation.many_history import run_many

HISTORIES = int(os.environ.get("TIERFALL_MANY_HISTORIES", "24"))
FIRST = int(os.environ.get("TIERFALL_MANY_FIRST", "0"))
EVENTS = 250


@pytest.mark.parametrize("seed", range(4))
def test_no_history_of_several_ranks_breaks_a_promise(seed: int) -> None:
    run_many(seed, EVENTS)


@pytest.mark.torture
def test_no_history_breaks_a_promise_and_all_that_may_happen_comes_about() -> None:
    seen: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + HISTORIES):
        seen.update(run_many(seed, EVENTS).counts)
    common = (
        "WholeCheckpoint",
        "CommittedCopy",
        "GivenUpCopy",
        "SaveFailure",
        "DeletedCopy",
        "crash",
        "ImagesAlike",
        "ImagesUnlike",
        "pin",
        "unpin",
        "delete",
        "beside",
    )
    rare = {what for what in common if not seen[what]}
    assert not rare, f"{rare} never came about: too little happens for a test of it"
