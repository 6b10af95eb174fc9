"""The check of a lazily captured image: reads part of the state at save, and compares the image with it before sealing.

A lazy capture copies the state while training continues. Only bytes read at save can show whether the image has the
state of that moment, since a write before the copy is both in the image and in the live tensor. save() reads:

* in host memory, each short range whole, and sampled lines of the others (``lines``);
* in host memory, a digest of each range of medium length, and digests of long ones, in rotation (``ranges``);
* on a device, a sum over each part of a tensor that is in one chunk, which the device computes while the host goes on
  (``device_sums``).

A range that is copied in one call while all of it is being written to has some of the write at its beginning or end:
the first and the last line show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import torch

from tierfall.core.image.segments import HOST, Segmentation
from tierfall.core.runtime.streams import CopyStream
from tierfall.core.sampling.device_sums import DeviceRanges, DeviceSums, Tensors
from tierfall.core.sampling.lines import SamplePlan, Samples, lines_max
from tierfall.core.sampling.ranges import (
    LINE_BYTES,
    WHOLE_BYTES,
    WHOLE_LINES,
    MemoryOrder,
    RangeDigests,
    SampledRange,
)
from tierfall.core.state.view import StateView

RANGE_BYTES = 1 << 20
"""Maximum size of a range that is digested in rotation."""


class CheckPlan:
    """What the check of one segmentation's images reads."""

    def __init__(self, segmentation: Segmentation, view: StateView) -> None:
        pieces = [piece for segment in segmentation.segments for piece in segment]
        on_host = [
            SampledRange(p.index, p.source_start, p.start, p.end - p.start, _order(view, p.index))
            for p in pieces
            if p.place == HOST and is_sampled(view, p.index)
        ]
        self.samples = SamplePlan(on_host, lines_max(on_host))
        digested = [each for each in on_host if each.bytes > WHOLE_LINES * LINE_BYTES]
        long = [each.split(RANGE_BYTES) for each in digested if each.bytes > WHOLE_BYTES]
        self.ranges = RangeDigests(
            [each for each in digested if each.bytes <= WHOLE_BYTES], [*chain.from_iterable(long)]
        )
        places = {piece.place for piece in pieces} - {HOST}
        self._on_devices = {
            place: DeviceRanges([p for p in pieces if p.place == place], view) for place in places
        }

    def begin(
        self,
        sources: Tensors,
        streams: Mapping[int, CopyStream],
        most_bytes: int | None,
    ) -> ImageCheck:
        """Read the state, on the thread that saves; digest ``most_bytes`` of long ranges (None: all of them)."""
        pointers = sources.pointers
        return ImageCheck(
            plan=self,
            samples=self.samples.read(pointers),
            digests=self.ranges.digest(pointers, most_bytes),
            sums=tuple(
                ranges.begin(streams[place], sources, "the image with the state")
                for place, ranges in self._on_devices.items()
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCheck:
    """What was read of one state at save, to compare its image with."""

    plan: CheckPlan
    samples: Samples | None
    digests: Mapping[int, int]
    sums: tuple[DeviceSums, ...]

    def changed_in_chunk(self, data: memoryview, offset: int) -> set[int]:
        """The numbers of the tensors on devices that differ from a chunk, which is at ``offset`` of the image's data:
        compared while it is in the processor's cache."""
        return {index for sums in self.sums for index in sums.changed_in_chunk(data, offset)}

    def changed_in(self, data: memoryview) -> set[int]:
        """The numbers of the tensors that differ from the image's ``data``, beside what ``changed_in_chunk`` finds."""
        found = self.plan.ranges.changed_in(data, self.digests)
        if self.samples is not None:
            with torch.inference_mode(False):
                found.update(self.samples.changed_in(torch.frombuffer(data, dtype=torch.uint8)))
        for sums in self.sums:
            found.update(sums.changed_in(data))
        return found

    def changed_now(self) -> list[int]:
        """The numbers of the tensors whose live memory differs, in a few lines of each."""
        return [] if self.samples is None else self.samples.changed_now()


def is_sampled(view: StateView, index: int) -> bool:
    """Whether samples of a tensor in host memory can be located in its image."""
    return view.plain[index] or view.strides[index] is not None


def _order(view: StateView, index: int) -> MemoryOrder | None:
    strides = view.strides[index]
    if strides is None:
        return None
    return tuple(view.shapes[index]), strides, view.dtypes[index].itemsize
