"""A whole image as a nested dict, with no training loop: what each ``state_dict()`` returned when it was saved."""

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
    """What is to be read, and where it goes; ``result`` is ready once every fill is."""

    fills: tuple[Fill, ...]
    targets: tuple[BlockTarget, ...]
    _builder: Builder
    _device: torch.device

    def written(self, targets: Iterable[torch.Tensor]) -> list[LiveMemory]:
        """Nothing that is filled is the caller's yet."""
        return []

    def unfilled(self, written: Iterable[LiveMemory]) -> list[str]:
        """Nothing was the caller's before."""
        return []

    def result(self) -> dict[Any, Any]:
        """Return the state as a nested dict: tensors on the chosen device, values as they were."""
        built: dict[Any, Any] = self._builder.build(self._builder.header.tree, self._device)
        return built


def plan_load(header: ImageHeader, *, map_location: str | torch.device | None = None) -> LoadPlan:
    """Plan to load all of an image onto ``map_location`` (the CPU where it is None).

    Allocates every tensor. Raises RestoreError where the image holds a registered type that is not registered here.
    """
    refuse_files(header, doing="load")
    device = CPU if map_location is None else torch.device(map_location)
    builder = Builder(header)
    builder.prepare(header.tree, device)
    return LoadPlan(builder.fills(), builder.targets(), builder, device)
