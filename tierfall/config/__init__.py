"""The configuration: one YAML file, or a dict of the same shape, read into a frozen model or refused with the place.

``model`` says which keys there are and what their values mean; ``source`` reads a file and keeps its line numbers;
``environment`` fills in ``${env:NAME}``; ``loading`` puts them together and words the errors. Nothing here opens a
tier or looks at the machine, except for the working directory and the environment.
"""

from tierfall.config.interval import IntervalSection, Mtbf
from tierfall.config.loading import load_config
from tierfall.config.model import (
    Config,
    DeviceTierConfig,
    FileTierConfig,
    HostTierConfig,
    ObjectTierConfig,
    StoredTierConfig,
    Tier,
)
from tierfall.config.retaining import BestSection, EvictSection, RetainSection
from tierfall.config.sections import (
    CaptureSection,
    CompressSection,
    DrainSection,
    FlushSection,
)

__all__ = [
    "BestSection",
    "CaptureSection",
    "CompressSection",
    "Config",
    "DeviceTierConfig",
    "DrainSection",
    "EvictSection",
    "FileTierConfig",
    "FlushSection",
    "HostTierConfig",
    "IntervalSection",
    "Mtbf",
    "ObjectTierConfig",
    "RetainSection",
    "StoredTierConfig",
    "Tier",
    "load_config",
]
