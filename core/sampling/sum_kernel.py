"""One kernel that adds up many ranges of a CUDA device's memory: torch would launch a kernel for each.

A launch takes the host some 15 microseconds, with the views that it needs: for a thousand tensors, ten milliseconds of
every save.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tierfall.core.runtime.memory_copies import (
    ROWS_MAX,
    THREADS,
    Addresses,
    compile_kernel,
    send_table,
)

BLOCK_BYTES = 1 << 20
"""Bytes that one block of threads adds up."""
# An item smaller than a word is shifted to its place in the word, which begins with the range: a range may begin at any
# address. The shift is the same for all items of a thread, since ``blockDim.x`` is a multiple of 8.
_SOURCE = r"""
extern "C" __global__ void add_up(
    const unsigned long long* addresses, const long long* sizes, unsigned long long* sums)
{
    const long long first = (long long)blockIdx.x * BLOCK_BYTES;
    const long long size = sizes[blockIdx.y];
    if (first >= size) return;
    const long long length = min(size - first, BLOCK_BYTES);
    const char* of = (const char*)addresses[blockIdx.y] + first;
    unsigned long long sum = 0;
    long long done = 0;
    #define ADD_AS(item) \
        _Pragma("unroll 4") \
        for (long long i = threadIdx.x; i < length / (long long)sizeof(item); i += blockDim.x) \
            sum += (unsigned long long)((const item*)of)[i] << (i * sizeof(item) % 8 * 8); \
        done = length / (long long)sizeof(item) * (long long)sizeof(item);
    if ((unsigned long long)of % 8 == 0) { ADD_AS(unsigned long long) }
    else if ((unsigned long long)of % 4 == 0) { ADD_AS(unsigned int) }
    else if ((unsigned long long)of % 2 == 0) { ADD_AS(unsigned short) }
    for (long long i = done + threadIdx.x; i < length; i += blockDim.x)
        sum += (unsigned long long)(unsigned char)of[i] << (i % 8 * 8);
    for (int step = 16; step; step >>= 1) sum += __shfl_down_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) atomicAdd(sums + blockIdx.y, sum);
}
""".replace("BLOCK_BYTES", f"{BLOCK_BYTES}ll")


def add_up(
    addresses: Addresses, sizes: NDArray[np.int64], device: torch.device
) -> torch.Tensor | None:
    """Enqueue the sums of ranges of device memory on the current stream of the device, and return them (int64); None if
    there are none, or the device has no such kernel.

    ``sizes`` are in bytes. A sum is that of the range's 64-bit words, little-endian, modulo 2**64; the words begin with
    the range, and zeros complete the last one.
    """
    kernel = _kernel(device) if len(sizes) else None
    if kernel is None:
        return None
    sums = torch.zeros(len(sizes), dtype=torch.int64, device=device)
    rows = np.stack([addresses.view(np.int64), sizes])
    for start in range(0, len(sizes), ROWS_MAX):
        some = np.ascontiguousarray(rows[:, start : start + ROWS_MAX])
        table = send_table(some, device)
        blocks = -(-int(some[1].max()) // BLOCK_BYTES)
        kernel((blocks, some.shape[1], 1), (THREADS, 1, 1), [*table, sums[start:]])
    return sums


def prepare(device: torch.device) -> None:
    """Compile the kernel, which takes a fraction of a second."""
    _kernel(device)


@cache
def _kernel(device: torch.device) -> Any:
    return compile_kernel(_SOURCE, "add_up", device)
