"""Where Lightning's loops are at a save: at some moments they resume a checkpoint wrongly."""

from __future__ import annotations

import logging
from typing import Any

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
