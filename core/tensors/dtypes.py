"""Mapping of torch dtypes to safetensors dtypes, and their sizes in bytes.

safetensors' torch loader must be able to read an image: a dtype that it does not know is stored as U8, with the real
dtype and shape in ``__metadata__``. Names are torch's own (``float8_e4m3fn``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# The dtypes that safetensors' torch loader supports; the format defines more.
_STORED_AS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
_BY_CODE = {code: dtype for dtype, code in _STORED_AS.items()}
_BY_NAME = {str(v)[len("torch.") :]: v for v in vars(torch).values() if isinstance(v, torch.dtype)}
# These pack several elements into a byte, along the last dimension.
_ELEMENTS_PER_BYTE = {"quint4x2": 2, "quint2x4": 4}

NDIM_MAX = 1024
_NUMEL_MAX = 1 << 62

RAW_CODE = "U8"


def code_of(dtype: torch.dtype) -> str | None:
    """The safetensors code of ``dtype``; None if it must be stored as U8."""
    return _STORED_AS.get(dtype)


def from_code(code: object) -> torch.dtype | None:
    return _BY_CODE.get(code) if isinstance(code, str) else None


def name_of(dtype: torch.dtype) -> str:
    return str(dtype)[len("torch.") :]


def from_name(name: object) -> torch.dtype | None:
    """The dtype that this version of torch calls ``name``, or None."""
    return _BY_NAME.get(name) if isinstance(name, str) else None


def is_packed(dtype: torch.dtype) -> bool:
    """Whether several elements share a byte."""
    return name_of(dtype) in _ELEMENTS_PER_BYTE


def byte_count(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Size in bytes of a contiguous tensor's elements."""
    packed = _ELEMENTS_PER_BYTE.get(name_of(dtype))
    if packed is None or not shape:
        return math.prod(shape) * dtype.itemsize
    return math.prod(shape[:-1]) * -(-shape[-1] // packed)


def is_shape(value: object) -> bool:
    """Whether ``value``, from untrusted JSON, is a shape that torch supports."""
    if not isinstance(value, list) or len(value) > NDIM_MAX:
        return False
    extent = 1
    for length in value:
        if type(length) is not int or length < 0:
            return False
        extent *= max(length, 1)
        if extent > _NUMEL_MAX:
            return False
    return True
