"""tierfall: checkpointing for LLM training that never stops it.

with tierfall.open("tiers.yaml") as ckpt:
    report = ckpt.restore(state)
    for step in range(report.step + 1 if report else 0, steps):
        ...
        ckpt.maybe_save(step, state)
"""

from tierfall import errors
from tierfall.api import load, open
from tierfall.config import Config
from tierfall.core.capture.handle import SaveHandle, SaveStats
from tierfall.core.state.item import item
from tierfall.core.tensors.value_codec import register_codec
from tierfall.run.checkpointer import Checkpointer
from tierfall.telemetry.reports import (
    CadenceReport,
    CheckpointInfo,
    Compression,
    DrainForecast,
    DrainReport,
    Fallback,
    LossBound,
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
    "DrainForecast",
    "DrainReport",
    "Fallback",
    "LossBound",
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
