"""The memory of a region seen as the tensors of a layout: each view is made once, and serves again.

A region's place in the arena comes back every few saves, so that the views of its small tensors, of which there may be
thousands, need not be made on every save.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from tierfall.core.image import Layout

REGIONS_MAX = 8


class Targets:
    """One region's image: ``flat`` bytes, and a typed view per tensor."""

    def __init__(self, memory: torch.Tensor, layout: Layout) -> None:
        """``memory`` is the image_bytes of a region, flat uint8."""
        self._memory = memory
        self._layout = layout
        self._views: list[torch.Tensor | None] = [None] * len(layout.slots)

    def flat(self, start: int, end: int) -> torch.Tensor:
        """Bytes ``start`` to ``end`` of the data."""
        data = self._layout.data_start
        return self._memory[data + start : data + end]

    def like(self, slot: int, source: torch.Tensor) -> torch.Tensor:
        """The place of a plain tensor, in its dtype and shape."""
        view = self._views[slot]
        if view is None:
            place = self._layout.slots[slot]
            view = self.flat(place.start, place.end).view(source.dtype).view(source.shape)
            self._views[slot] = view
        return view


class TargetCache:
    """The targets of the regions that were filled last, for one layout."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._by_address: OrderedDict[int, Targets] = OrderedDict()

    def of(self, memory: torch.Tensor, layout: Layout) -> Targets:
        """Return the targets of a region, whose bytes ``memory`` are."""
        if layout is not self._layout:
            self.clear()
            self._layout = layout
        address = memory.data_ptr()
        found = self._by_address.pop(address, None) or Targets(memory, layout)
        self._by_address[address] = found
        while len(self._by_address) > REGIONS_MAX:
            self._by_address.popitem(last=False)
        return found

    def clear(self) -> None:
        """Let go of the memory."""
        self._by_address.clear()
        self._layout = None
