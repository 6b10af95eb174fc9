"""Many copies between memory addresses by one call: torch has no such function.

A copy that torch enqueues takes the host 5 to 7 microseconds, and some ten more to make its views. A state of a
thousand tensors would hold the optimizer's step up for milliseconds. To page-locked host memory, the CUDA driver takes
all of them in one call since 12.8; an older driver, and memory that is not locked yet, take a call for each, without
views. On a device, one kernel makes them: the driver's call takes twice as long there.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tierfall.core.runtime.driver import driver_call
from tierfall.core.runtime.pinned import locked_bounds

logger = logging.getLogger("tierfall")

Addresses = NDArray[np.uint64]

THREADS = 256
"""Of one block of a kernel."""
ROWS_MAX = 65535
"""Rows of a table that one kernel takes: a grid has no more in its second dimension."""
_IN_STREAM_ORDER = 1
_BLOCK_BYTES = 1 << 20
# Tensors in an image are at multiples of their items only: most parts of a tensor are at no multiple of 16 bytes.
_COPY_ALL = r"""
extern "C" __global__ void copy_all(
    const unsigned long long* targets, const unsigned long long* sources, const unsigned long long* sizes)
{
    const unsigned long long first = (unsigned long long)blockIdx.x * BLOCK_BYTES;
    const unsigned long long size = sizes[blockIdx.y];
    if (first >= size) return;
    const unsigned long long length = min(size - first, BLOCK_BYTES);
    char* to = (char*)targets[blockIdx.y] + first;
    const char* of = (const char*)sources[blockIdx.y] + first;
    const unsigned long long bits = (unsigned long long)to | (unsigned long long)of;
    unsigned long long at = 0;
    #define COPY_AS(word) \
        _Pragma("unroll 4") \
        for (unsigned long long i = threadIdx.x; i < length / sizeof(word); i += blockDim.x) \
            ((word*)to)[i] = ((const word*)of)[i]; \
        at = length / sizeof(word) * sizeof(word);
    if (bits % 16 == 0) { COPY_AS(uint4) }
    else if (bits % 8 == 0) { COPY_AS(uint2) }
    else if (bits % 4 == 0) { COPY_AS(unsigned) }
    for (unsigned long long i = at + threadIdx.x; i < length; i += blockDim.x) to[i] = of[i];
}
""".replace("BLOCK_BYTES", f"{_BLOCK_BYTES}ull")


class MemoryCopies(NamedTuple):
    """Copies from ``sources`` to ``targets`` of ``sizes`` bytes: three arrays of the same length. The
    targets are in host memory, or ``on_device``."""

    targets: Addresses
    sources: Addresses
    sizes: Addresses
    on_device: bool = False


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """The driver's attributes of copies; the locations are hints for managed memory."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


_memmove = ctypes.PyDLL(None).memmove
"""Without releasing Python's lock: to take it again may take longer than a small copy."""
_memmove.argtypes, _memmove.restype = (ctypes.c_size_t,) * 3, None


def copy_on_host(copies: MemoryCopies) -> None:
    """Make small copies from host memory to host memory on this thread."""
    for target, source, size in zip(*(column.tolist() for column in copies[:3]), strict=True):
        _memmove(target, source, size)


def can_copy(device: torch.device, *, on_device: bool) -> bool:
    """Whether ``enqueue_copies`` works."""
    found = _copy_kernel(device) if on_device else driver_call("cuMemcpyDtoHAsync_v2")
    return found is not None


def enqueue_copies(copies: MemoryCopies, device: torch.device, stream: int) -> None:
    """Enqueue copies on the current stream, whose address is given; copies to host memory not on the default stream.
    A copy to memory that is not page-locked is complete on return. The calling thread has the device's context. Raises
    RuntimeError with the driver's error."""
    if copies.on_device:
        _copy_on_device(copies, device)
    else:
        _copy_to_host(copies, stream)


def _copy_on_device(copies: MemoryCopies, device: torch.device) -> None:
    rows = np.stack(copies[:3]).view(np.int64)
    for first in range(0, rows.shape[1], ROWS_MAX):
        some = np.ascontiguousarray(rows[:, first : first + ROWS_MAX])
        table = send_table(some, device)
        blocks = -(-int(some[2].max()) // _BLOCK_BYTES)
        _copy_kernel(device)((blocks, some.shape[1], 1), (THREADS, 1, 1), [*table])


def send_table(rows: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Copy a table to a device, in the order of the current stream. The host does not wait."""
    return torch.from_numpy(rows).pin_memory().to(device, non_blocking=True)


@cache
def _copy_kernel(device: torch.device) -> Any:
    return compile_kernel(_COPY_ALL, "copy_all", device)


def compile_kernel(source: str, name: str, device: torch.device) -> Any:
    """Compile a kernel, which includes no headers, with the compiler that torch brings; None where that is not
    possible."""
    try:
        with torch.cuda.device(device), _without_headers():
            torch.cuda.current_stream(device).query()  # gives this thread the device's context
            return torch.cuda._compile_kernel(source, name)
    except Exception as error:  # noqa: BLE001 - a private function of torch: without it, copies take longer
        logger.info(
            "save: copies on %s take longer, without the kernel %s: %s", device, name, error
        )
        return None


@contextmanager
def _without_headers() -> Iterator[None]:
    """torch does not compile a kernel without the folder of CUDA's headers, which it finds on few machines that have
    only the driver. ``/usr`` stands for one: torch passes nothing to the compiler for it."""
    from torch.utils import cpp_extension

    found = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = found or "/usr"
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = found


def _copy_to_host(copies: MemoryCopies, stream: int) -> None:
    columns, locked = _cut_at_locks(copies)
    batch = driver_call("cuMemcpyBatchAsync")
    if batch is not None and locked.any():
        _copy_batch(batch, columns[:, locked], stream)
        columns = columns[:, ~locked]
    one = driver_call("cuMemcpyDtoHAsync_v2")
    assert one is not None, "the caller asks can_copy first"
    for target, source, size in columns.T.tolist():
        if code := one(target, source, size, stream):
            raise RuntimeError(f"CUDA error {code} for a copy of {size} bytes to host memory")


def _cut_at_locks(copies: MemoryCopies) -> tuple[Addresses, NDArray[np.bool_]]:
    """Return copies as rows of targets, sources and sizes, each to memory that is page-locked by one call or not locked
    at all, and which of them are to locked memory. The driver refuses a copy to memory that is locked in part."""
    columns = np.stack(copies[:3])
    bounds = locked_bounds()
    while True:
        targets, sources, sizes = columns
        following = np.searchsorted(bounds, targets, side="right")
        limits = np.append(bounds, np.uint64(2**64 - 1))[following]
        rests = np.maximum(targets + sizes, limits) - limits
        if not rests.any():
            return columns, following % 2 == 1
        columns = np.concatenate(
            [
                [targets, sources, sizes - rests],
                np.stack([limits, sources + (sizes - rests), rests])[:, rests > 0],
            ],
            axis=1,
        )


def _copy_batch(call: Callable[..., int], columns: Addresses, stream: int) -> None:
    attributes = _CopyAttributes(source_order=_IN_STREAM_ORDER)
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    rows = [np.ascontiguousarray(column) for column in columns]
    code = call(
        *(row.ctypes.data for row in rows),
        columns.shape[1],
        ctypes.byref(attributes),
        ctypes.byref(first),
        1,
        ctypes.byref(failed),
        stream,
    )
    if code:
        raise RuntimeError(f"CUDA error {code} for {columns.shape[1]} copies (cuMemcpyBatchAsync)")
