"""The configuration: one YAML file, or a dict of the same shape, read into a frozen model or refused with the place.

``model`` says which keys there are and what their values mean; ``source`` reads a file and keeps its line numbers;
``environment`` fills in ``${env:NAME}``; ``loading`` puts them together and words the errors. Nothing here opens a
tier or looks at the machine, except for the working directory and the environment.
"""

from tierfall.config.interval import Interval, Mtbf
from tierfall.config.loading import load_config
from tierfall.config.model import (
    Config,
    DeviceTier,
    FileTier,
    HostTier,
    ObjectTier,
    StoredTier,
    Tier,
)
from tierfall.config.retaining import Best, Evict, Retain
from tierfall.config.sections import (
    Capture,
    Compress,
    Drain,
    Flush,
)

__all__ = [
    "Best",
    "Capture",
    "Compress",
    "Config",
    "DeviceTier",
    "Drain",
    "Evict",
    "FileTier",
    "Flush",
    "HostTier",
    "Interval",
    "Mtbf",
    "ObjectTier",
    "Retain",
    "StoredTier",
    "Tier",
    "load_config",
]
