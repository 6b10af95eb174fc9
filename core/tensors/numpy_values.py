"""NumPy scalars and arrays, where NumPy is loaded: as a dtype string and bytes.

tierfall does not need NumPy: a state can only hold NumPy values where the training script imported it, so it is looked
up, never imported, when writing; reading such values back needs it.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from typing import Any

import torch

# Booleans, integers, floats, complex, dates, spans, fixed strings and bytes: dtypes that their string describes whole.
_DTYPE = re.compile(r"[<>|=]?([biufcmMSUV])\d+(\[\d*[A-Za-z]+\])?\Z")
_KINDS = frozenset("biufcmMSUV")


def numpy() -> Any | None:
    """Return the NumPy module where it is loaded already, else None."""
    return sys.modules.get("numpy")


def is_array(value: object) -> bool:
    np = numpy()
    return np is not None and type(value) is np.ndarray


def encode_scalar(value: object) -> tuple[str, str] | None:
    """Return dtype string and bytes in hexadecimal of a NumPy scalar; None where it is none, or none of those."""
    np = numpy()
    if np is None or not isinstance(value, np.generic):
        return None
    if type(value) is not value.dtype.type or not _is_plain(value.dtype):
        return None
    return value.dtype.str, value.tobytes().hex()


def decode_scalar(dtype: str, data: bytes) -> Any:
    np, kind = _numpy_for(dtype)
    if kind.itemsize != len(data):
        raise ValueError(f"a NumPy scalar of {dtype} is not {len(data)} bytes")
    return np.frombuffer(data, dtype=kind)[0] if data else np.zeros((), dtype=kind)[()]


def why_not(array: Any) -> str | None:
    """Say why an array cannot be saved, or None."""
    return None if _is_plain(array.dtype) else f"NumPy arrays of dtype {array.dtype} have no codec"


def to_tensor(array: Any) -> torch.Tensor:
    """Return a tensor with the array's elements, sharing its memory where it can: typed where torch has the dtype,
    else the flat bytes. The array's own dtype string and shape describe it fully."""
    np = numpy()
    assert np is not None, "an array without NumPy"
    if not array.flags.c_contiguous or not array.flags.writeable or not array.flags.aligned:
        # torch warns of read-only memory and knows no negative strides.
        array = array.copy(order="C")
    if not _is_torch_dtype(array.dtype):
        if array.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        array = array.reshape(-1).view(np.uint8)
    tensor: torch.Tensor = torch.from_numpy(array)
    return tensor


def from_bytes(flat: torch.Tensor, dtype: str, shape: list[int]) -> Any:
    """Return an array over the bytes of a CPU tensor, sharing its memory."""
    np, kind = _numpy_for(dtype)
    if flat.numel() == 0:
        return np.empty(tuple(shape), dtype=kind)
    return flat.numpy().view(kind).reshape(tuple(shape))


def check_bytes(dtype: str, shape: list[int], length: int) -> None:
    """Raise ValueError unless an array of that dtype and shape takes ``length`` bytes."""
    _, kind = _numpy_for(dtype)
    if math.prod(shape) * kind.itemsize != length:
        raise ValueError(f"an array of {dtype} and shape {shape} is not {length} bytes")


def refill(target: Any, source: Any) -> bool:
    """Copy ``source`` into the array ``target`` where dtype and shape allow; say whether they did."""
    if not is_array(target) or not is_array(source):
        return False
    if target.dtype != source.dtype or target.shape != source.shape or not target.flags.writeable:
        return False
    target[...] = source
    return True


def _numpy_for(dtype: str) -> tuple[Any, Any]:
    if not _DTYPE.match(dtype):
        raise ValueError(f"{dtype[:40]!r} is not a NumPy dtype that tierfall reads")
    try:
        np = importlib.import_module("numpy")
        return np, np.dtype(dtype)
    except ImportError as error:
        raise ValueError("the checkpoint holds NumPy values: install numpy to read them") from error
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
