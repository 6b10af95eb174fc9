"""Images made and read by hand, as capture and restore do it: chunk by chunk, at cuts that suit no tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tierfall.core.image.header import ImageHeader, read_header
from tierfall.core.image.layout import Layout, plan_layout
from tierfall.core.load.build import BlockTarget
from tierfall.core.load.choices import Choices
from tierfall.core.load.fill import plan_fill
from tierfall.core.load.load import plan_load
from tierfall.core.state.walk import walk_state
from tierfall.core.tensors.tensors import copy_whole

CUT = 1009  # bytes a piece: prime, so that cuts fall anywhere


def make_image(state: Any) -> tuple[bytes, Layout]:
    view = walk_state(state)
    layout = plan_layout(view)
    header = layout.header(view)
    assert header is not None
    assert len(header) == layout.data_start
    data = torch.zeros(layout.data_bytes, dtype=torch.uint8)
    for placement in layout.placements:
        copy_whole(data[placement.start : placement.end], view.sources[placement.index])
    image = header + bytes(data.tolist())
    assert len(image) == layout.image_bytes
    return image, layout


def header_of(image: bytes) -> ImageHeader:
    return read_header(image, image_bytes=len(image), what="the image")


def deliver(targets: Iterable[BlockTarget], image: bytes, header: ImageHeader) -> None:
    data = torch.frombuffer(bytearray(image), dtype=torch.uint8)[header.data_start :]
    for each in targets:
        stored, target = header.tensors[each.position], each.target
        assert target.dtype is torch.uint8
        assert target.shape == (stored.length,)
        assert each.offset is None
        for start in range(stored.start, stored.end, CUT):
            end = min(start + CUT, stored.end)
            target[start - stored.start : end - stored.start].copy_(data[start:end])


def load(image: bytes) -> dict[Any, Any]:
    header = header_of(image)
    plan = plan_load(header)
    deliver(plan.targets, image, header)
    plan.finish()
    return plan.loaded


def restore(state: Any, image: bytes, **options: Any) -> None:
    header = header_of(image)
    plan = plan_fill(state, header, Choices(**options))
    for memory in plan.shared:
        deliver(memory.targets, image, header)
        memory.check()
    deliver(plan.targets, image, header)
    plan.finish()


def saved_and_loaded(value: Any) -> Any:
    return load(make_image({"entry": value, "rng": None})[0])["entry"]


def bits(tensor: torch.Tensor) -> list[int]:
    """The bytes of a tensor, in the order in which its elements read."""
    flat = torch.zeros(max(tensor.numel() * tensor.element_size(), 0), dtype=torch.uint8)
    copy_whole(flat, tensor)
    return flat.tolist()
