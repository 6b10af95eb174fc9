"""tierfall: checkpointing for LLM training that never stops it.

with tierfall.open("tiers.yaml") as ckpt:
    report = ckpt.restore(state)
    for step in range(report.step + 1 if report else 0, steps):
        ...
        ckpt.maybe_save(step, state)
"""

from tierfall import errors
from tierfall.api import load, open
from tierfall.checkpointer import Checkpointer
from tierfall.config import Config
from tierfall.core.handle import SaveHandle, SaveStats
from tierfall.core.image import item, register_codec
from tierfall.reports import (
    CadenceReport,
    CheckpointInfo,
    Compression,
    DrainReport,
    Fallback,
    RestoreReport,
    ShardSource,
    Statistics,
    TierCadence,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "CadenceReport",
    "CheckpointInfo",
    "Checkpointer",
    "Compression",
    "Config",
    "DrainReport",
    "Fallback",
    "RestoreReport",
    "SaveHandle",
    "SaveStats",
    "ShardSource",
    "Statistics",
    "TierCadence",
    "errors",
    "item",
    "load",
    "open",
    "register_codec",
]
