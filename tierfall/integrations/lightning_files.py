"""What is at a path at which Lightning expects a checkpoint: a pointer, a link to one, or Lightning's own format."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress

from tierfall.errors import ConfigError

POINTER_NAME, OWN_NAME = "tierfall.json", "meta.pt"
"""The files that folders have: of a pointer, and of Lightning's own format."""


def is_own(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a checkpoint of Lightning's own format."""
    return os.path.isfile(path) or os.path.exists(os.path.join(path, OWN_NAME))


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a pointer, a link, or a checkpoint of Lightning's own format. A path where nothing is has no effect.

    An earlier start may have removed it before it was killed. Raises ConfigError for another folder.
    """
    # The first rank of each node removes it, and all nodes may see the same folder.
    with suppress(FileNotFoundError):
        if os.path.islink(path) or os.path.isfile(path):
            os.unlink(path)
            return
        names = os.listdir(path)
        if names and not {POINTER_NAME, OWN_NAME}.intersection(names):
            raise ConfigError(
                f"TierfallIO: {path} is to be removed, and is no checkpoint: it has no {POINTER_NAME}, and no "
                f"{OWN_NAME} of Lightning's; name another dirpath"
            )
        shutil.rmtree(path)
