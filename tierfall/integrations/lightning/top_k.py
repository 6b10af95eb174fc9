"""Warnings for a ``save_top_k`` of ModelCheckpoint that no ``retain`` fits."""

from __future__ import annotations

import logging
import math
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from tierfall import Checkpointer
from tierfall.integrations import keeping

logger = logging.getLogger("tierfall")


def check(trainer: Any, ckpt: Checkpointer) -> None:
    """Log, on rank 0, what ``retain`` lacks to keep what ``save_top_k`` selects. The newest is kept in any case.

    No metric of ``retain`` is missed before the first evaluation.
    """
    if trainer.enable_validation:
        keeping.note_evaluation(ckpt, math.inf)
    if not trainer.is_global_zero:
        return
    wanted: list[keeping.Best] = []
    for saves in trainer.checkpoint_callbacks:
        if not isinstance(saves, ModelCheckpoint) or saves.save_top_k == 0:
            continue
        if saves.save_top_k == -1:
            if not keeping.keeps_all(ckpt):
                logger.warning(
                    "save_top_k=-1 leaves a path for each checkpoint, and no tier keeps all: remove `retain` of a tier"
                )
        elif saves.monitor is not None:
            wanted.append(keeping.Best.by(saves.monitor, saves.mode, saves.save_top_k))
    several = len({(best.metric, best.mode) for best in wanted if not best.is_newest()}) > 1
    for best in wanted:
        if missing := keeping.missing_for(ckpt, best):
            logger.warning(
                "save_top_k=%d leaves paths to the best checkpoints by %s, and no tier keeps these: write %s%s",
                best.count,
                best.metric,
                missing,
                ". `retain` has one `best`: each monitor needs a tier of its own" * several,
            )
