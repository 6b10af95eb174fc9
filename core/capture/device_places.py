"""The devices of a state's tensors, and the streams that copy from them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from tierfall.core.capture.device_copies import Slab
from tierfall.core.image.segments import HOST
from tierfall.core.runtime.streams import CopyStream, Streams

_IS_CPU = attrgetter("is_cpu")


class CaptureDevices:
    """The devices of one process, numbered in the order in which they are found.

    After ``places_of``, ``without_stream`` names the types of devices without a copy stream: their tensors are read
    like host memory, by the thread that works on them.
    """

    def __init__(self, streams: Streams, slab: Slab | None = None) -> None:
        self._makes = streams
        self._has_devices = torch.accelerator.is_available()
        self._slab = slab
        self._numbers: dict[torch.device, int] = {}
        self.streams: dict[int, CopyStream] = {}
        self.without_stream: set[str] = set()

    def places_of(self, sources: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The place of each tensor; empty if all are in host memory."""
        self.without_stream.clear()
        if not self._has_devices or all(map(_IS_CPU, sources)):
            return ()
        return tuple([HOST if source.is_cpu else self._number(source.device) for source in sources])

    def present_value(self, value: torch.Tensor, places: Sequence[int]) -> torch.Tensor | float:
        """The present value of a number. If the state has tensors on the number's device (``places``), a clone, as
        their capture is ordered after it; otherwise the host waits for the value."""
        if value.is_cpu:
            return value
        return value.clone() if self._numbers.get(value.device) in places else float(value)

    @property
    def slab(self) -> tuple[int, Slab] | None:
        """Spare device memory and its place; None if no tensor of the state is on that device."""
        if self._slab is None or self._slab.device not in self._numbers:
            return None
        return self._numbers[self._slab.device], self._slab

    def _number(self, device: torch.device) -> int:
        found = self._numbers.get(device)
        if found is not None:
            return found
        stream = self._makes.of(device)
        if stream is None:
            self.without_stream.add(device.type)
            return HOST
        number = self._numbers[device] = len(self._numbers)
        self.streams[number] = stream
        return number
