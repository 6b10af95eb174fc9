"""What is at a path at which Lightning expects a checkpoint: a pointer, a link to one, or Lightning's own format; and
what makes the plugin that saves there a callback."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from lightning.pytorch import Callback

import tierfall
from tierfall.errors import ConfigError
from tierfall.integrations import frameworks

POINTER_NAME, OWN_NAME = "tierfall.json", "meta.pt"
"""The files that folders have: of a pointer, and of Lightning's own format."""

PLUGINS: WeakSet[Any] = WeakSet()
"""Each TierfallIO of this process."""


def is_own(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a checkpoint of Lightning's own format."""
    return os.path.isfile(path) or os.path.exists(os.path.join(path, OWN_NAME))


def is_of_tuner(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the temporary one of a search for a learning rate or a batch size."""
    return os.path.basename(path).startswith((".lr_find_", ".scale_batch_size_"))


def is_pointer(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a folder with a pointer."""
    return os.path.isfile(os.path.join(path, POINTER_NAME))


def is_last(path: str | os.PathLike[str]) -> bool:
    """Return whether a path means the newest checkpoint, whatever is there, or nothing."""
    return os.path.basename(path).startswith("last")


def checkpoint_at(
    path: str | os.PathLike[str], ckpt: tierfall.Checkpointer
) -> tuple[int | None, int | None]:
    """Return step and attempt of the checkpoint that a path leads to.

    They are None for a name that begins with ``last``: the newest of the run, whatever is there, or nothing. Raises
    ConfigError for a pointer to a checkpoint of another run.
    """
    if is_last(path):
        return None, None
    pointer, run = tierfall.read_pointer(path), frameworks.run_of(ckpt)
    if pointer.run != run:
        raise ConfigError(
            f"TierfallIO: {path} is of run {pointer.run!r}, not of {run!r}: name a dirpath for each run; to begin with "
            "these weights, pass tierfall.load(path)['lightning']['state_dict'] to the module's load_state_dict"
        )
    return pointer.step, pointer.attempt


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


class FromPlugin(Callback):  # type: ignore[misc]
    """Makes the plugin of its Trainer a callback, where it is one too. Lightning gets it by an entry point."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Add the plugin to the callbacks, before the next one is set up."""
        plugin = trainer.strategy.checkpoint_io
        if isinstance(plugin, Callback) and plugin not in trainer.callbacks:
            trainer.callbacks.append(plugin)
