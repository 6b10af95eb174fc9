"""Where Lightning's loops, and the other ranks, are at a save: loops resume a checkpoint of some moments wrongly."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tierfall import Checkpointer
from tierfall.errors import ConfigError
from tierfall.integrations import frameworks
from tierfall.integrations.lightning.state import TUNE

logger = logging.getLogger("tierfall")


def is_within_batch(loop: Any) -> bool:
    """Return whether a batch is being trained, which Lightning would leave out of a run that resumes from now."""
    progress = loop.epoch_loop.batch_progress.current
    if progress.processed >= progress.ready:
        return False
    logger.warning("TierfallIO: a save within a batch names the checkpoint before it, if any")
    return True


def is_before_end_of_epoch(loop: Any) -> bool:
    """Return whether the last batch of an epoch is trained, and the epoch has not ended."""
    progress, batches = loop.epoch_progress.total, loop.epoch_loop.batch_progress
    return bool(batches.is_last_batch and progress.processed < progress.started)


def meet(ckpt: Checkpointer | None, trainer: Any) -> bool:
    """Wait for all ranks. Return False after an error that came before the run was opened, or after its end."""
    if ckpt is None:
        if trainer.interrupted:  # by OnExceptionCheckpoint
            return False
        raise ConfigError(
            "TierfallIO: a save outside of the training: the run is closed. Save in on_train_end, or by "
            f"ModelCheckpoint; {TUNE}"
        )
    frameworks.meet_all_ranks(ckpt, "save_checkpoint", failed=trainer.interrupted)
    return True


def metrics(trainer: Any, step: int) -> dict[str, Any]:
    """Return the metrics of a checkpoint: what was logged, and ModelCheckpoint's own names for ``monitor``."""
    logged = {
        name: value for name, value in trainer.callback_metrics.items() if torch.numel(value) == 1
    }
    return {"epoch": trainer.current_epoch, "step": step, **logged}
