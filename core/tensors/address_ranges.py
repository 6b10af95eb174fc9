"""Address ranges of a state's tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple, Self

import torch

from tierfall.core.tensors.tensors import span


class AddressRange(NamedTuple):
    """Addresses ``start`` to ``end`` on a device."""

    device: torch.device
    start: int
    end: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """The range from the first to the last element of a non-empty tensor."""
        return cls(tensor.device, *span(tensor))


class AddressRanges:
    """A set of addresses, as disjoint ranges by device."""

    def __init__(self, ranges: Iterable[AddressRange]) -> None:
        self._starts: dict[torch.device, list[int]] = {}
        self._ends: dict[torch.device, list[int]] = {}
        for device, start, end in sorted(ranges, key=lambda r: (str(r.device), r.start)):
            starts, ends = self._starts.setdefault(device, []), self._ends.setdefault(device, [])
            if ends and start <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                starts.append(start)
                ends.append(end)

    def overlaps(self, range: AddressRange) -> bool:
        """Whether any address of a range is in the set."""
        ends = self._ends.get(range.device, [])
        at = bisect_right(ends, range.start)
        return at < len(ends) and self._starts[range.device][at] < range.end

    def contains(self, range: AddressRange) -> bool:
        """Whether all addresses of a range are in the set."""
        starts = self._starts.get(range.device, [])
        at = bisect_right(starts, range.start) - 1
        return at >= 0 and range.end <= self._ends[range.device][at]
