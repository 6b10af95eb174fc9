"""Checkpoints that another process was asked to write."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.world import World, file_rules
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.types.backend import put_object
from tierfall.core.types.values import CheckpointId


def test_one_search_collects_an_earlier_save_that_failed_if_a_later_one_came() -> None:
    world = World([file_rules("nvme")], memory_images=3)
    world.save_all(1)
    one = world.stores["nvme"].read_commit(CheckpointId(1, 1))
    failed, came = CheckpointId(2, 1), CheckpointId(3, 1)
    commit = replace(one, lineage=replace(one.lineage, checkpoint=came, ordinal=3))
    disk = world.disks["nvme"]
    put_object(disk, "run/step-00000002-a0001/rank-00000-of-00001.safetensors", b"half of it")
    put_object(disk, "run/step-00000003-a0001/commit.json", commit.encode())
    commits, done = world.coordinator.external_commits, InterruptibleEvent()
    for id in (failed, came):
        commits.expect(id, "nvme")
    commits.search(done, last=True)
    world.settle()
    assert done.is_set
    assert not [stored.key for stored in disk.scan("run/step-00000002-a0001/")]
