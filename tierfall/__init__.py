"""tierfall: checkpointing for LLM training that never stops it.

with tierfall.open("tiers.yaml") as ckpt:
    report = ckpt.restore(state)
    for step in range(report.step + 1 if report else 0, steps):
        ...
        ckpt.maybe_save(step, state)
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tierfall import errors
from tierfall.errors import *  # noqa: F403 - `except tierfall.RestoreError`, as a traceback names it

if TYPE_CHECKING:
    from tierfall.api import close_all, load, open, open_tensors
    from tierfall.config import Config
    from tierfall.core.capture.handle import SaveHandle, SaveStats
    from tierfall.core.copies.chunk_reader import Fallback
    from tierfall.core.state.item import block, item, register_codec
    from tierfall.core.tensors.builtin_codecs import UnknownValue
    from tierfall.core.types.view import LossBound, PeerSurvival, SurvivalChance
    from tierfall.ops.tensors import Tensors
    from tierfall.policies.cadence import TierCadence
    from tierfall.run.checkpointer import Checkpointer
    from tierfall.setup.pointer import Pointer, read_pointer
    from tierfall.telemetry.figures import Statistics
    from tierfall.telemetry.reports import (
        CadenceReport,
        CheckpointInfo,
        CopyInfo,
        DrainForecast,
        DrainReport,
        RestoreReport,
        ShardSource,
    )
    from tierfall.tiers.image_writer import Compression

__version__ = "0.2.0"

__all__ = [
    "CadenceReport",
    "CheckpointInfo",
    "Checkpointer",
    "Compression",
    "Config",
    "CopyInfo",
    "DrainForecast",
    "DrainReport",
    "Fallback",
    "LossBound",
    "PeerSurvival",
    "Pointer",
    "RestoreReport",
    "SaveHandle",
    "SaveStats",
    "ShardSource",
    "Statistics",
    "SurvivalChance",
    "Tensors",
    "TierCadence",
    "UnknownValue",
    "block",
    "close_all",
    "errors",
    "item",
    "load",
    "open",
    "open_tensors",
    "read_pointer",
    "register_codec",
]
__all__ += errors.__all__

_MODULES = {
    "Compression": "tierfall.tiers.image_writer",
    "Checkpointer": "tierfall.run.checkpointer",
    "Config": "tierfall.config",
    "Pointer": "tierfall.setup.pointer",
    "SaveHandle": "tierfall.core.capture.handle",
    "SaveStats": "tierfall.core.capture.handle",
    "Statistics": "tierfall.telemetry.figures",
    "Tensors": "tierfall.ops.tensors",
    "UnknownValue": "tierfall.core.tensors.builtin_codecs",
    "block": "tierfall.core.state.item",
    "close_all": "tierfall.api",
    "item": "tierfall.core.state.item",
    "load": "tierfall.api",
    "open": "tierfall.api",
    "open_tensors": "tierfall.api",
    "read_pointer": "tierfall.setup.pointer",
    "register_codec": "tierfall.core.state.item",
}
"""Where the public names are, except for those of ``tierfall.telemetry.reports``."""
_SUBMODULES = ("backends", "policies")


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that ``tierfall --help`` does not import torch."""
    if name in _SUBMODULES:
        return import_module(f"tierfall.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'tierfall' has no attribute {name!r}")
    module = import_module(_MODULES.get(name, "tierfall.telemetry.reports"))
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES, "__version__"})
