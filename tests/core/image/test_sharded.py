"""Sharded tensors: what an image holds of them, and into what they are restored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from image_help import make_image, restore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    Shard,
    zeros,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from tierfall.core.state.walk import walk_state
from tierfall.core.types.errors import CaptureError, RestoreError


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_a_tensor_that_other_ranks_hold_is_refused_by_name_saving_and_restoring() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        elsewhere = zeros(4, 2, device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Shard(0)])
        with pytest.raises(CaptureError, match=r'state\["w"\].*not in its mesh'):
            walk_state({"w": elsewhere})
        image, _ = make_image({"w": torch.ones(4, 2), "rng": None})
        with pytest.raises(RestoreError, match=r"w: cannot be restored into.*not in its mesh"):
            restore({"w": elsewhere, "rng": None}, image)
    finally:
        dist.destroy_process_group()
