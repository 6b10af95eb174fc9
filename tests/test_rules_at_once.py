"""What kept a rule from deleting has ended: the rule is applied then, and not with the next commit or after a pause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tierfall
from tests.memory_store import MemoryStore
from tests.steps import state_of, steps_on, wait_until

MakeConfig = Callable[..., dict[str, Any]]
AT_ONCE_S = 20.0
"""Less than the minute after which a tier without room is tried again anyway."""


def is_full(handle: tierfall.SaveHandle) -> bool:
    return isinstance(handle.exception(), tierfall.errors.CapacityError)


def test_a_full_disk_takes_a_copy_as_soon_as_a_slower_tier_has_an_older_one(
    make_config: MakeConfig, store: MemoryStore, tmp_path: Path
) -> None:
    config = make_config(disk={"capacity": "400KiB"}, host={"capacity": "400KiB"})
    config["tiers"].append(store.tier(retain={"last": 9}))
    with tierfall.open(config) as ckpt:
        store.refuse_all()
        for step in (1, 2):
            ckpt.save(step, state_of(step)).wait("disk")
        third = ckpt.save(3, state_of(3))  # memory has no room for step 1 beside it
        wait_until(lambda: is_full(third), "the disk has what the store is owed")
        store.heal()
        wait_until(lambda: third.done("disk"), "step 1 gives way", AT_ONCE_S)
        assert store.steps()[0] == 1
        assert steps_on(tmp_path / "disk") == [2, 3]
