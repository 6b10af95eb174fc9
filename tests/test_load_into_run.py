"""``Checkpointer.load`` returns a checkpoint as a dict, and the run goes on from it; ``begin`` begins without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.core.ranks.threads import network, on_all
from tests.open_ranks import Opener, close_all
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types.errors import StepError

# Several ranks -------------------------------------------------------------------------------------------


def ranks_save(both: list[Any]) -> None:
    for rank, ckpt in enumerate(both):
        ckpt.save(1, {"w": torch.full((4,), float(rank)), "rank": rank, "all": "same"})
    on_all([c.drain for c in both])


# begin ---------------------------------------------------------------------------------------------------


def test_all_ranks_begin_or_none(ranks: list[Ranks], tmp_path: Path) -> None:
    opener = Opener(tmp_path, ranks)
    close_all(opener.all_open())
    with network(["a", "b"]) as again:
        both = Opener(tmp_path, again).all_open()
        assert on_all([c.begin for c in both]) == [None, None]
        ranks_save(both)
        close_all(both)
    with network(["a", "b"]) as again:
        both = Opener(tmp_path, again).all_open()
        errors = on_all([c.begin for c in both])
        assert all(isinstance(error, StepError) for error in errors), errors
        close_all(both)
