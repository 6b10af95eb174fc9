"""The devices of a state's tensors, and asynchronous copies from them: launched and completed in order, with a bound on
the bytes in flight."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, SupportsFloat

import torch
from torch import nn
from torch.optim import Optimizer

from tierfall.core.capture.spill import DeviceSlab, SpillBuffer
from tierfall.core.image.segments import HOST, Segment
from tierfall.core.runtime.driver import driver_call
from tierfall.core.runtime.memory_copies import can_copy
from tierfall.core.runtime.streams import CopyStream, StreamEvent, Streams
from tierfall.core.sampling import sum_kernel
from tierfall.core.state.item import unwrap

logger = logging.getLogger("tierfall")
_IS_CPU = attrgetter("is_cpu")
_DEVICE = attrgetter("device")
FLYING_BYTES_MAX = 256 << 20
"""Bytes in flight for the capture thread: enough to keep the bus busy while it hashes a chunk."""


@dataclass(slots=True, eq=False)
class CopyInFlight:
    """One segment being copied, or several as one; ``spill_buffer`` is the buffer that is read (None: the state
    itself)."""

    segment: Segment
    event: StreamEvent
    spill_buffer: SpillBuffer | None


class CopiesInFlight:
    """The copies in flight. Callers of methods that change it hold the copier's lock, unless stated otherwise."""

    def __init__(self, streams: Mapping[int, CopyStream]) -> None:
        self.streams = streams
        self._in_flight: deque[CopyInFlight] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._in_flight)

    @property
    def is_full(self) -> bool:
        return self._bytes >= FLYING_BYTES_MAX

    @property
    def first(self) -> CopyInFlight | None:
        """The copy that was launched first; needs no lock."""
        try:
            return self._in_flight[0]
        except IndexError:
            return None

    @property
    def segments(self) -> list[Segment]:
        """The segments that are being read from the state itself."""
        return [copy.segment for copy in self._in_flight if copy.spill_buffer is None]

    def launch(
        self,
        segment: Segment,
        work: Callable[[], None],
        *,
        spill: SpillBuffer | None,
        lock: threading.Lock,
    ) -> None:
        """Enqueue the copies of a segment on the stream of its device; acquires the lock itself.

        If that fails or is interrupted, no copy of the segment is in flight when it raises.
        """
        stream = self.streams[segment.place]
        try:
            copy = CopyInFlight(segment, stream.enqueue(work), spill)
            with lock:
                self._in_flight.append(copy)
                self._bytes += copy.segment.size_bytes
        except BaseException:
            stream.finish()  # some copies may be enqueued, and nothing else would wait for them
            if spill is not None:
                spill.release(segment)
            raise

    def has(self, copy: CopyInFlight) -> bool:
        return copy in self._in_flight

    def remove(self, copy: CopyInFlight) -> None:
        """Remove a completed copy."""
        self._in_flight.remove(copy)
        self._bytes -= copy.segment.size_bytes
        if copy.spill_buffer is not None:
            copy.spill_buffer.release(copy.segment)

    def wait_for_callers(self) -> None:
        """Run everything that is launched from now on after the caller's work on its device; needs no lock."""
        for stream in self.streams.values():
            stream.wait_for_caller()

    def make_callers_wait(self) -> None:
        """Run the caller's further work on each device after everything that was launched; needs no lock."""
        for stream in self.streams.values():
            stream.make_caller_wait()


class NumberOnDevice:
    """The value that a 0-dim tensor has now; ``float`` waits for the copies before it, and not for what training has
    enqueued since."""

    def __init__(self, value: torch.Tensor, stream: CopyStream) -> None:
        self._stream = stream
        self._value = value
        stream.run_on_caller_stream(self._clone)

    def _clone(self) -> None:
        self._value = self._value.detach().clone()

    def __float__(self) -> float:
        found: list[float] = []
        self._stream.enqueue(lambda: found.append(float(self._value))).wait()
        return found[0]


def device_of(state: Mapping[Any, object]) -> torch.device | None:
    """The CUDA device of the first tensor on one: an entry, or of a module or an optimizer; None if there is none."""
    for value in map(unwrap, state.values()):
        tensors: Iterable[object] = (value,)
        if isinstance(value, nn.Module):
            tensors = value.parameters()
        elif isinstance(value, Optimizer):
            tensors = chain.from_iterable(group["params"] for group in value.param_groups)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                return tensor.device
    return None


class CaptureDevices:
    """The devices of one process, numbered in the order in which they are found.

    After ``places_of``, ``without_stream`` names the types of devices without a copy stream: their tensors are read
    like host memory, by the thread that works on them.
    """

    def __init__(
        self, streams: Streams, open_slab: Callable[[torch.device], DeviceSlab | None] | None = None
    ) -> None:
        """``open_slab`` allocates spare memory of a device (None if it has none); it is called with the first one."""
        self._makes = streams
        self._has_devices = torch.accelerator.is_available()
        self._open_slab = open_slab
        self._slab: DeviceSlab | None = None
        self._numbers: dict[torch.device, int] = {}
        self.streams: dict[int, CopyStream] = {}
        self.without_stream: set[str] = set()

    def places_of(self, sources: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The place of each tensor; empty if all are in host memory."""
        self.without_stream.clear()
        if not self._has_devices or all(map(_IS_CPU, sources)):
            return ()
        devices = [*map(_DEVICE, sources)]
        places = {device: self._place(device) for device in dict.fromkeys(devices)}
        return tuple(map(places.__getitem__, devices))

    def present_value(self, value: torch.Tensor, places: Sequence[int]) -> SupportsFloat:
        """The present value of a number. If the state has tensors on the number's device (``places``), it is read
        later, as their capture is ordered after it; otherwise the host waits for the value."""
        if value.is_cpu:
            return value
        place = self._numbers.get(value.device)
        if place is None or place not in places:
            return float(value)
        return NumberOnDevice(value, self.streams[place])

    @property
    def slab(self) -> tuple[int, DeviceSlab] | None:
        """Spare memory of the first device, and its place; None if there is none."""
        return None if self._slab is None else (0, self._slab)

    @property
    def first(self) -> torch.device | None:
        """The device that was found first; None if none was."""
        return next(iter(self._numbers), None)

    def _place(self, device: torch.device) -> int:
        if device.type == "cpu":
            return HOST
        found = self._numbers.get(device)
        if found is not None:
            return found
        stream = self._makes.of(device)
        if stream is None:
            self.without_stream.add(device.type)
            return HOST
        number = self._numbers[device] = len(self._numbers)
        self.streams[number] = stream
        if number == 0 and self._open_slab is not None:
            self._slab = self._open_slab(device)
        # In the first save of a run, which blocks.
        sum_kernel.prepare(device)
        can_copy(device, on_device=True)
        if number == 0 and driver_call("cuMemcpyBatchAsync") is None:
            logger.info(
                "save: this CUDA driver is older than 12.8: each copy takes a call of its own, so that save() and the "
                "step's hook take longer"
            )
        return number
