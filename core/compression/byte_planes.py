"""Byte planes: the bytes of a chunk grouped by their position in an item, so that zstd compresses exponents separately.

First all first bytes, then all second bytes and so on, then the remainder that is no whole item, unchanged. NumPy
copies on the calling thread and releases the GIL; torch would start threads of its own beside the training loop's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WIDTHS = (1, 2, 4, 8, 16)

_Bytes = NDArray[np.uint8]


def split(chunk: memoryview, target: memoryview, width: int) -> None:
    """Write the planes of ``chunk`` to ``target``, of the same length and without shared memory."""
    items, rest = _halves(chunk, width)
    planes, rest_target = _halves(target, width)
    for place, plane in enumerate(planes.reshape(width, -1)):
        np.copyto(plane, items[place::width])
    np.copyto(rest_target, rest)


def join(planes: memoryview, target: memoryview, width: int) -> None:
    """The inverse of ``split``."""
    sorted_items, rest = _halves(planes, width)
    items, rest_target = _halves(target, width)
    for place, plane in enumerate(sorted_items.reshape(width, -1)):
        np.copyto(items[place::width], plane)
    np.copyto(rest_target, rest)


def _halves(view: memoryview, width: int) -> tuple[_Bytes, _Bytes]:
    """The whole items, and the remainder."""
    flat = np.frombuffer(view, dtype=np.uint8)
    whole = len(flat) - len(flat) % width
    return flat[:whole], flat[whole:]
