"""Where the tensors of a state lie, and what copies them from there."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from tierfall.core.capture.device_copies import Slab
from tierfall.core.image.segments import HOST
from tierfall.core.runtime.streams import CopyStream, Streams

_IS_CPU = attrgetter("is_cpu")


class CaptureDevices:
    """The devices of one process, numbered as they are met.

    After ``of``, ``elsewhere`` names the kinds of devices met that no stream serves: what lies there is read as if it
    lay in host memory, by the thread that works on it.
    """

    def __init__(self, streams: Streams, slab: Slab | None = None) -> None:
        self._makes = streams
        self._has_devices = torch.accelerator.is_available()
        self._slab = slab
        self._numbers: dict[torch.device, int] = {}
        self.streams: dict[int, CopyStream] = {}
        self.elsewhere: set[str] = set()

    def of(self, sources: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Return the place of each tensor; nothing where all lie in host memory."""
        self.elsewhere.clear()
        if not self._has_devices or all(map(_IS_CPU, sources)):
            return ()
        return tuple([HOST if source.is_cpu else self._number(source.device) for source in sources])

    def fixed(self, value: torch.Tensor, places: Sequence[int]) -> torch.Tensor | float:
        """Take a number as it is now. The host waits for it only where nothing of the state, whose tensors are at
        ``places``, is captured from the device that it is on: what is captured there comes after it."""
        if value.is_cpu:
            return value
        return value.clone() if self._numbers.get(value.device) in places else float(value)

    @property
    def slab(self) -> tuple[int, Slab] | None:
        """Spare memory, and the place that it is at; None where nothing of the state was met there."""
        if self._slab is None or self._slab.device not in self._numbers:
            return None
        return self._numbers[self._slab.device], self._slab

    def _number(self, device: torch.device) -> int:
        found = self._numbers.get(device)
        if found is not None:
            return found
        stream = self._makes.of(device)
        if stream is None:
            self.elsewhere.add(device.type)
            return HOST
        number = self._numbers[device] = len(self._numbers)
        self.streams[number] = stream
        return number
