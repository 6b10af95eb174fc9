"""``report.fallbacks`` holds what was skipped in favour of the restored step: nothing older, and nothing that was left
behind on purpose."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from tests.core.ranks.threads import network, on_all
from tests.open_ranks import close_all, kill_all, restore_all
from tests.steps import blank, state_of, step_in, wait_until
from tierfall.config import Config
from tierfall.core.ranks.ranks import Ranks
from tierfall.run.checkpointer import Checkpointer


def test_parts_of_older_steps_in_memory_are_no_fallback(ranks: list[Ranks], tmp_path: Path) -> None:
    """One node was replaced. The other has parts of older steps, which the rules have deleted from the disk."""

    def open_one(ranks: list[Ranks], rank: int) -> Checkpointer:
        memory = {"name": "host", "kind": "host", "folder": str(tmp_path / str(rank))}
        disk = {"name": "disk", "kind": "file", "path": str(tmp_path / "disk"), "shared": True}
        tiers = [memory, {**disk, "retain": {"last": 1}}]
        config = Config.model_validate({"run": "run", "max_wait": "20s", "tiers": tiers})
        return Checkpointer(config, run="run", ranks=ranks[rank])

    both = on_all([partial(open_one, ranks, rank) for rank in range(2)])
    for step in (1, 2, 3):
        handles = [ckpt.save(step, state_of(step)) for ckpt in both]
        on_all([partial(handle.wait, "disk") for handle in handles])
    disk = tmp_path / "disk" / "run"
    wait_until(lambda: len([*disk.glob("step-*")]) == 1, "the rules apply")
    kill_all(both)
    shutil.rmtree(tmp_path / "0")
    with network(["a", "b"]) as again:
        both = on_all([partial(open_one, again, rank) for rank in range(2)])
        states = [blank(), blank()]
        reports = restore_all(both, states)
        assert [(report.step, report.fallbacks) for report in reports] == [(3, ())] * 2
        assert [step_in(state) for state in states] == [3, 3]
        close_all(both)
