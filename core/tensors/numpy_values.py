"""NumPy scalars and arrays as a dtype string and bytes."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import torch

# Booleans, integers, floats, complex, datetimes, timedeltas, fixed-size str and bytes: fully described by the string.
_DTYPE = re.compile(r"[<>|=]?([biufcmMSUV])\d+(\[\d*[A-Za-z]+\])?\Z")
_KINDS = frozenset("biufcmMSUV")


def is_array(value: object) -> bool:
    return type(value) is np.ndarray


def encode_scalar(value: object) -> tuple[str, str] | None:
    """Dtype string and hexadecimal bytes of a NumPy scalar; None for other values and unsupported dtypes."""
    if not isinstance(value, np.generic):
        return None
    if type(value) is not value.dtype.type or not _is_plain(value.dtype):
        return None
    return value.dtype.str, value.tobytes().hex()


def decode_scalar(dtype: str, data: bytes) -> Any:
    kind = _dtype_of(dtype)
    if kind.itemsize != len(data):
        raise ValueError(f"a NumPy scalar of {dtype} is not {len(data)} bytes")
    return np.frombuffer(data, dtype=kind)[0] if data else np.zeros((), dtype=kind)[()]


def refusal(array: Any) -> str | None:
    """The reason why an array cannot be saved, or None."""
    return None if _is_plain(array.dtype) else f"NumPy arrays of dtype {array.dtype} have no codec"


def to_tensor(array: Any) -> torch.Tensor:
    """A tensor with the array's elements, sharing its memory if possible: typed if torch has the dtype, else flat
    bytes."""
    if not array.flags.c_contiguous or not array.flags.writeable or not array.flags.aligned:
        # torch warns about read-only memory and has no negative strides.
        array = array.copy(order="C")
    if not _is_torch_dtype(array.dtype):
        if array.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        array = array.reshape(-1).view(np.uint8)
    tensor: torch.Tensor = torch.from_numpy(array)
    return tensor


def from_bytes(flat: torch.Tensor, dtype: str, shape: list[int]) -> Any:
    """An array over the bytes of a CPU tensor, sharing its memory."""
    kind = _dtype_of(dtype)
    if flat.numel() == 0:
        return np.empty(tuple(shape), dtype=kind)
    return flat.numpy().view(kind).reshape(tuple(shape))


def check_bytes(dtype: str, shape: list[int], length: int) -> None:
    """Raise ValueError unless an array of that dtype and shape has ``length`` bytes."""
    kind = _dtype_of(dtype)
    if math.prod(shape) * kind.itemsize != length:
        raise ValueError(f"an array of {dtype} and shape {shape} is not {length} bytes")


def refill(target: Any, source: Any) -> bool:
    """Copy ``source`` into the array ``target`` if dtype and shape match; return whether they do."""
    if not is_array(target) or not is_array(source):
        return False
    if target.dtype != source.dtype or target.shape != source.shape or not target.flags.writeable:
        return False
    target[...] = source
    return True


def memory_of(array: Any) -> torch.Tensor | None:
    """Return a tensor of the memory that ``refill`` writes; None if it writes nothing, or torch has no such tensor."""
    if not array.nbytes or not array.flags.writeable or not array.flags.aligned:
        return None
    if not _is_torch_dtype(array.dtype):
        if not array.flags.c_contiguous:
            return None
        array = array.reshape(-1).view(np.uint8)
    try:
        tensor: torch.Tensor = torch.from_numpy(array)
    except ValueError:  # a negative stride
        return None
    return tensor


def _dtype_of(dtype: str) -> Any:
    if not _DTYPE.match(dtype):
        raise ValueError(f"{dtype[:40]!r} is not a NumPy dtype that tierfall reads")
    try:
        return np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"this NumPy has no dtype {dtype[:40]!r}") from error


def _is_plain(dtype: Any) -> bool:
    return (
        dtype.kind in _KINDS
        and dtype.fields is None
        and dtype.subdtype is None
        and not dtype.hasobject
        and _DTYPE.match(dtype.str) is not None
    )


def _is_torch_dtype(dtype: Any) -> bool:
    if not dtype.isnative:
        return False
    if dtype.kind in "iu":
        return dtype.itemsize in (1, 2, 4, 8)
    return dtype.str[1:] in ("b1", "f2", "f4", "f8", "c8", "c16")
