"""Columns of integers as bytes, delta-encoded, in the narrowest width that the largest value allows.

Differences are modulo the width, so that they need no more bytes than values, and are decoded in place. The blocks of
one tensor differ from rank to rank by constant steps, which zstd compresses to almost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[Any]
ALIGNMENT_BYTES = 8
WIDTHS = (1, 2, 4, 8)


def encode_column(values: Iterable[int]) -> Column:
    """Encode values (0 to 2**64 - 1) as differences, little-endian."""
    wide = np.asarray(values, dtype=np.uint64)
    largest = int(wide.max()) if len(wide) else 0
    width = next(width for width in WIDTHS if largest < 1 << 8 * width)
    column: Column = wide.astype(_dtype(width))
    column[1:] -= column[:-1].copy()
    return column


def decode_column(data: bytearray, offset: int, count: int, width: int) -> Column:
    """Decode the column at ``offset`` of ``data`` in place."""
    column: Column = np.frombuffer(data, _dtype(width), count, offset)
    np.add.accumulate(column, dtype=column.dtype, out=column)
    return column


def aligned(bytes: int) -> int:
    return -(-bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _dtype(width: int) -> np.dtype[Any]:
    return np.dtype(f"<u{width}")
