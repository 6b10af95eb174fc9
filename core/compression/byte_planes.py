"""Planes: the bytes of a chunk sorted by their place in an item, which lets zstd see the exponents apart.

First all first bytes, then all second bytes and so on, then the remainder that makes no whole item, unsplit. NumPy's
copies run in the calling thread alone and release the interpreter lock; torch's would start threads of their own beside
the training loop's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WIDTHS = (1, 2, 4, 8, 16)

_Bytes = NDArray[np.uint8]


def split(chunk: memoryview, target: memoryview, width: int) -> None:
    """Sort ``chunk`` into planes; ``target`` has the same length, and shares no memory with it."""
    items, rest = _halves(chunk, width)
    planes, rest_target = _halves(target, width)
    for place, plane in enumerate(planes.reshape(width, -1)):
        np.copyto(plane, items[place::width])
    np.copyto(rest_target, rest)


def join(planes: memoryview, target: memoryview, width: int) -> None:
    """Undo ``split``."""
    sorted_items, rest = _halves(planes, width)
    items, rest_target = _halves(target, width)
    for place, plane in enumerate(sorted_items.reshape(width, -1)):
        np.copyto(items[place::width], plane)
    np.copyto(rest_target, rest)


def _halves(view: memoryview, width: int) -> tuple[_Bytes, _Bytes]:
    """Return the whole items, and the remainder."""
    flat = np.frombuffer(view, dtype=np.uint8)
    whole = len(flat) - len(flat) % width
    return flat[:whole], flat[whole:]
