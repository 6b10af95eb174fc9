"""Views of a region's memory as the tensors of a layout, created once and reused.

The same files of host memory are used again every few saves, so that the views of thousands of small tensors need not
be created for every save.
"""

from __future__ import annotations

import torch

from tierfall.core.image.layout import Layout

VIEWS_MAX = 100_000
"""Maximum of cached views, of about 500 bytes each."""


class RegionTargets:
    """One region's image: ``flat`` bytes, and a typed view per tensor."""

    def __init__(self, memory: torch.Tensor, layout: Layout) -> None:
        """``memory`` is the image_bytes of a region, flat uint8."""
        self._memory = memory
        self._layout = layout
        self._views: list[torch.Tensor | None] = [None] * len(layout.placements)

    @property
    def data(self) -> torch.Tensor:
        """All bytes of the data."""
        return self._memory[self._layout.data_start :]

    def flat(self, start: int, end: int) -> torch.Tensor:
        """Bytes ``start`` to ``end`` of the data."""
        data = self._layout.data_start
        return self._memory[data + start : data + end]

    def typed_view(self, position: int, source: torch.Tensor) -> torch.Tensor:
        """The view of a plain tensor's position, with its dtype and shape."""
        view = self._views[position]
        if view is None:
            placement = self._layout.placements[position]
            view = self.flat(placement.start, placement.end).view(source.dtype).view(source.shape)
            self._views[position] = view
        return view


class TargetCache:
    """The targets of the regions of one layout, up to VIEWS_MAX views in total.

    There is no eviction: regions are filled in turn, so evicting the least recently used one would evict the region
    that is filled next.
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._by_address: dict[int, RegionTargets] = {}

    def use(self, layout: Layout) -> None:
        """Drop the views of another layout: they keep memory mapped, which its files may need."""
        if layout is not self._layout:
            self.clear()
            self._layout = layout

    def of(self, memory: torch.Tensor, layout: Layout) -> RegionTargets:
        """The targets of the region with these bytes."""
        self.use(layout)
        address = memory.data_ptr()
        found = self._by_address.get(address) or RegionTargets(memory, layout)
        if (len(self._by_address) + 1) * len(layout.placements) <= VIEWS_MAX:
            self._by_address[address] = found
        return found

    def clear(self) -> None:
        """Drop all references to the memory."""
        self._by_address.clear()
        self._layout = None
