"""What is at a path at which Lightning expects a checkpoint: a pointer, a link to one, or Lightning's own format."""

from __future__ import annotations

import os
import shutil

import tierfall


def is_own(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a checkpoint of Lightning's own format."""
    return os.path.isfile(path) or os.path.exists(os.path.join(path, "meta.pt"))


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a pointer, a link, or what is of Lightning's own format. No effect where nothing is: a start that was
    killed may have removed it after the state of the callback that removes it again was saved.

    Raises ConfigError for another folder.
    """
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.exists(path) and (is_own(path) or tierfall.read_pointer(path)):
        shutil.rmtree(path)
