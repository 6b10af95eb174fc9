"""What a stager passes to its writer: a capture that has begun, and the tensors in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from tierfall.core.capture.handle import SaveHandle
from tierfall.core.types.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Staged:
    """A capture that began before DCP planned: its handle, or the error instead of one, and dtype and shape of its
    tensors by name."""

    begun: SaveHandle | Exception
    tensors: Mapping[str, tuple[torch.dtype, torch.Size]]

    def handle(self, plan: SavePlan, planner: SavePlanner) -> SaveHandle:
        """Return the handle of what DCP plans to write. Raises the error of the capture if it did not begin, and
        CaptureError if a planner renamed or changed what was captured."""
        if isinstance(self.begun, Exception):
            raise self.begun
        for write in plan.items:
            if write.type is WriteItemType.BYTE_IO or write.tensor_data is None:
                continue
            planned = (write.tensor_data.properties.dtype, write.tensor_data.size)
            name = write.index.fqn
            if self.tensors.get(name) != planned or not self._is_hollow(name, planner):
                raise CaptureError(
                    f"dcp.async_save: {name} is planned as {planned[0]} {tuple(planned[1])}, and was captured "
                    "otherwise or not at all: a LazyStager captures the state that async_save receives, before a "
                    "planner changes it"
                )
        return self.begun

    def _is_hollow(self, name: str, planner: SavePlanner) -> bool:
        """Return whether the planned tensor is the staged one, which is on the meta device."""
        held = planner.state_dict.get(name) if isinstance(planner, DefaultSavePlanner) else None
        return isinstance(held, torch.Tensor) and held.is_meta
