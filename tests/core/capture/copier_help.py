"""Fillings over plain memory, and the image that each of them must come to, worked out in the plainest way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from tierfall.core.capture.copier import ImageCopier
from tierfall.core.image.layout import Layout, plan_layout
from tierfall.core.image.segments import Segmentation
from tierfall.core.image.sources import TensorSources
from tierfall.core.sampling.image_check import CheckPlan
from tierfall.core.state.view import StateView
from tierfall.core.state.walk import walk_state

KIB = 1 << 10
JUNK = 0xA5


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements, in order."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return bytes(whole.reshape(-1).view(torch.uint8).tolist())


def wanted(layout: Layout, view: StateView) -> bytes:
    header = layout.header(view)
    assert header is not None
    return header + b"".join(raw(view.sources[placement.index]) for placement in layout.placements)


@dataclass
class Made:
    """A filling, the memory that it fills, and every watermark that it told, with what lay below it then."""

    filling: ImageCopier
    layout: Layout
    view: StateView
    memory: bytearray
    chunk_bytes: int
    told: list[tuple[int, bytes]] = field(default_factory=list)

    def chunk(self, index: int) -> tuple[int, int]:
        if index == 0:
            return 0, self.layout.data_start
        start = self.layout.data_start + (index - 1) * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.layout.image_bytes)


def make(
    state: Mapping[str, Any], chunk_bytes: int = 4 * KIB, *, digest_bytes: int | None = 0
) -> Made:
    """``digest_bytes`` of long ranges of the state are digested, to compare the image with; None: all of them."""
    view = walk_state(state)
    layout = plan_layout(view)
    cutting = Segmentation(layout, view, chunk_bytes)
    header = layout.header(view)
    assert header is not None
    memory = bytearray([JUNK]) * layout.image_bytes
    made: list[Made] = []

    def progress(final: int) -> None:
        end = made[0].chunk(final - 1)[1]
        made[0].told.append((final, bytes(memory[:end])))

    sources = TensorSources(view, cutting)
    filling = ImageCopier(
        memory=memoryview(memory),
        header=header,
        cutting=cutting,
        sources=sources,
        on_progress=progress,
        check=CheckPlan(cutting, view).begin(sources, {}, digest_bytes),
    )
    made.append(Made(filling, layout, view, memory, chunk_bytes))
    return made[0]


def check(made: Made, image: bytes) -> None:
    """The image is whole and right, each digest is its chunk's, and no watermark ever ran ahead or back."""
    filling = made.filling
    assert filling.failure is None
    assert filling.copied
    assert filling.hashed
    assert bytes(made.memory) == image
    count = 1 + -(-(len(image) - made.layout.data_start) // made.chunk_bytes)
    assert filling.chunk_count == count == filling.final_chunks
    for index in range(count):
        start, end = made.chunk(index)
        assert filling.digests[index] == "xxh3-128:" + xxhash.xxh3_128_hexdigest(image[start:end])
    marks = [final for final, _ in made.told]
    assert marks == sorted(set(marks))
    assert marks[-1] == count
    for _, below in made.told:
        assert below == image[: len(below)], "the watermark stood above bytes that were not final"
