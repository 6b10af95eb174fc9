"""Ray Train: what a training reports to Ray is a pointer to a checkpoint, once a stored tier has that checkpoint."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from functools import partial
from typing import Any

from ray import train

from tierfall import Checkpointer, SaveHandle
from tierfall.errors import TierfallError

logger = logging.getLogger("tierfall")


def report(ckpt: Checkpointer, handle: SaveHandle | None, metrics: Mapping[str, Any]) -> None:
    """Report ``metrics`` to Ray, with a pointer to what ``handle`` saved as their checkpoint; returns at once.

    All workers call it at the same steps, as ``ray.train.report``; a None handle reports metrics alone, as does that of
    a save that was skipped for want of memory. Ray registers the checkpoint once the last tier of this step has it. If
    no tier gets it, Ray gets the pointer to the checkpoint before it, if there is one, and a warning is logged: the
    training continues. ``metrics`` hold no tensors. Raises as ``write_pointer`` and ``ray.train.report`` do.
    """
    checkpoint: dict[str, Any] = {}
    is_first = train.get_context().get_world_rank() == 0
    if is_first and handle is not None and handle.outcome != "skipped":
        folder = tempfile.mkdtemp(prefix="tierfall-ray-")  # Ray deletes it after the upload
        ckpt.write_pointer(folder, handle.step)
        checkpoint["checkpoint"] = train.Checkpoint.from_directory(folder)
        checkpoint["checkpoint_upload_fn"] = partial(_upload, handle)
    mode = train.CheckpointUploadMode.ASYNC
    train.report(dict(metrics), checkpoint_upload_mode=mode, **checkpoint)


def _upload(handle: SaveHandle, pointer: train.Checkpoint, name: str) -> train.Checkpoint:
    """Copy a pointer to Ray's storage once it names a stored checkpoint; on Ray's thread for uploads."""
    try:
        handle.wait()
    except TierfallError as error:
        if not any(handle.done(tier) for tier in handle.tiers):
            logger.warning(
                "step %d is on no tier, so Ray gets the checkpoint before it: %s",
                handle.step,
                error,
            )
            pointer = train.get_checkpoint() or pointer
    return train.get_context().get_storage().persist_current_checkpoint(pointer, name)
