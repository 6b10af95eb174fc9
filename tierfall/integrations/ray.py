"""Ray Train: what a training reports to Ray is a pointer to a checkpoint, once a stored tier has that checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from ray import train

from tierfall import Checkpointer, SaveHandle
from tierfall.errors import TierfallError
from tierfall.integrations import frameworks

logger = logging.getLogger("tierfall")

_Reported = list[tuple[SaveHandle, train.Checkpoint]]
_reported: WeakKeyDictionary[Checkpointer, _Reported] = WeakKeyDictionary()
"""What was reported: the newest that a tier was seen to have, and all after it."""


def report(ckpt: Checkpointer, handle: SaveHandle | None, metrics: Mapping[str, Any]) -> None:
    """Report ``metrics`` to Ray, with a pointer to what ``handle`` saved as their checkpoint; returns at once.

    All workers call it at the same steps, as ``ray.train.report``; a None handle reports metrics alone, as does that of
    a save that was skipped for want of memory. Ray registers the checkpoint once the last tier of this step has it. If
    no tier gets it, Ray gets the pointer to the newest checkpoint before it that a tier has, if there is one, and a
    warning is logged: the training continues. ``metrics`` hold no tensors. Raises as ``ray.train.report`` does.
    """
    checkpoint: dict[str, Any] = {}
    is_first = train.get_context().get_world_rank() == 0
    if is_first and handle is not None and handle.outcome != "skipped":
        before = _reported.setdefault(ckpt, [])
        while len(before) > 1 and any(_is_stored(later) for later, _ in before[1:]):
            del before[0]
        checkpoint["checkpoint"] = pointer = _in_memory(ckpt, handle)
        checkpoint["checkpoint_upload_fn"] = partial(_upload, handle, before[::-1])
        before.append((handle, pointer))
    mode = train.CheckpointUploadMode.ASYNC
    train.report(
        dict(metrics),
        checkpoint_upload_mode=mode,
        delete_local_checkpoint_after_upload=False,
        **checkpoint,
    )


def _in_memory(ckpt: Checkpointer, handle: SaveHandle) -> train.Checkpoint:
    """Return a folder with a pointer, in memory: a worker that is killed leaves none on its disk."""
    from pyarrow.fs import FSSpecHandler, PyFileSystem  # type: ignore[import-not-found] # it comes with ray

    files = MemoryFileSystem(skip_instance_cache=True)
    files.store, files.pseudo_dirs = {}, [""]  # its own, not those of the process
    name, content = frameworks.pointer_file(ckpt, handle)
    files.pipe_file(f"/pointer/{name}", content)
    return train.Checkpoint("/pointer", filesystem=PyFileSystem(FSSpecHandler(files)))


def _is_stored(handle: SaveHandle) -> bool:
    return any(handle.done(tier) for tier in handle.tiers)


def _upload(
    handle: SaveHandle, before: _Reported, pointer: train.Checkpoint, name: str
) -> train.Checkpoint:
    """Copy a pointer to Ray's storage once it names a stored checkpoint; on Ray's thread for uploads."""
    try:
        handle.wait()
    except TierfallError as error:
        if not _is_stored(handle):
            logger.warning(
                "step %d is on no tier, so Ray gets the checkpoint before it: %s",
                handle.step,
                error,
            )
            of_this_start = (found for earlier, found in before if _is_stored(earlier))
            pointer = next(of_this_start, None) or train.get_checkpoint() or pointer
    return train.get_context().get_storage().persist_current_checkpoint(pointer, name)
