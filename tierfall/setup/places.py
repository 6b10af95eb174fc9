"""Whether two places of tiers are one."""

from __future__ import annotations

import os


def same_place(one: str, other: str) -> bool:
    """Return whether two places are equal, after ``..`` and symbolic links of paths are resolved."""
    if one == other:
        return True
    if not (os.path.isabs(one) and os.path.isabs(other)):
        return False
    return os.path.realpath(one) == os.path.realpath(other)


def is_same_folder(one: str, other: str) -> bool:
    """Return whether two places are the same folder of this machine, by device and inode."""
    try:
        return os.path.isabs(one) and os.path.isabs(other) and os.path.samefile(one, other)
    except OSError:
        return False
