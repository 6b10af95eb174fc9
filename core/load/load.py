"""Loading a whole image as a nested dict, without a training loop: what each ``state_dict()`` returned at the save."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tierfall.core.image.header import ImageHeader
from tierfall.core.image.raw_files import refuse_files
from tierfall.core.load.build import CPU, BlockTarget, Builder, Fill
from tierfall.core.tensors.written_memory import LiveMemory


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The reads of a load; ``result`` may be called once all of them are done."""

    fills: tuple[Fill, ...]
    targets: tuple[BlockTarget, ...]
    _builder: Builder
    _device: torch.device

    def written(self, targets: Iterable[torch.Tensor]) -> list[LiveMemory]:
        """Return no tensors: the memory of a failed load is nobody's."""
        return []

    def unfilled(self, written: Iterable[LiveMemory]) -> list[str]:
        """Return no names, for the same reason."""
        return []

    def result(self) -> dict[Any, Any]:
        """Return the state as a nested dict: tensors on the chosen device, values as they were saved."""
        built: dict[Any, Any] = self._builder.build(self._builder.header.tree, self._device)
        return built


def plan_load(header: ImageHeader, *, map_location: str | torch.device | None = None) -> LoadPlan:
    """Plan to load a whole image onto ``map_location`` (None: the CPU).

    Allocates every tensor. Raises RestoreError where the image holds values of a codec that is not registered.
    """
    refuse_files(header, doing="load")
    device = CPU if map_location is None else torch.device(map_location)
    builder = Builder(header)
    builder.prepare(header.tree, device)
    return LoadPlan(builder.fills(), builder.targets(), builder, device)
