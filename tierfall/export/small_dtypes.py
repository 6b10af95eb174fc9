"""The dtypes that safetensors has beyond those of an image, such as MX formats: the installed one is asked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache

import torch

from tierfall.core.tensors import dtypes


@cache
def small_dtypes() -> Mapping[torch.dtype, tuple[str, int]]:
    """Return the dtypes that the installed safetensors writes and reads: of each its code, and how many elements of
    that an element of torch is."""
    candidates = {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
        and dtype.is_floating_point
        and dtype.itemsize == 1
        and dtypes.code_of(dtype) is None
    }
    found = {dtype: _ask(dtype) for dtype in candidates}
    return {dtype: answer for dtype, answer in found.items() if answer is not None}


def _ask(dtype: torch.dtype) -> tuple[str, int] | None:
    """Write a tensor, and read it; None if safetensors is not installed, or has not this dtype."""
    try:
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import save
    except ImportError:
        return None
    tensor = torch.zeros(1, dtype=torch.uint8).view(dtype)
    file = os.memfd_create("safetensors")
    try:
        data = save({"x": tensor})
        os.write(file, data)
        with safe_open(f"/proc/self/fd/{file}", "pt") as opened:
            read = opened.get_tensor("x")
    except (SafetensorError, AttributeError, LookupError, OSError, TypeError, ValueError):
        return None
    finally:
        os.close(file)
    entry = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["x"]
    same = (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
    return (entry["dtype"], entry["shape"][0]) if same else None
