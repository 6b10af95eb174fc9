"""The memory of a region seen as the tensors of a layout: each view is made once, and serves again.

A region's place in the arena comes back every few saves, so that the views of its small tensors, of which there may be
thousands, need not be made on every save.
"""

from __future__ import annotations

import torch

from tierfall.core.image.layout import Layout

VIEWS_MAX = 100_000
"""So many views are kept, of about 500 bytes each."""


class RegionTargets:
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
    """The targets of the regions that are filled for one layout, of as many as VIEWS_MAX allows.

    Regions are filled in turn, so that the one whose views would make room comes before the one they make room for:
    none gives way to another.
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._by_address: dict[int, RegionTargets] = {}

    def of(self, memory: torch.Tensor, layout: Layout) -> RegionTargets:
        """Return the targets of a region, whose bytes ``memory`` are."""
        if layout is not self._layout:
            self.clear()
            self._layout = layout
        address = memory.data_ptr()
        found = self._by_address.get(address) or RegionTargets(memory, layout)
        if (len(self._by_address) + 1) * len(layout.slots) <= VIEWS_MAX:
            self._by_address[address] = found
        return found

    def clear(self) -> None:
        """Let go of the memory."""
        self._by_address.clear()
        self._layout = None
