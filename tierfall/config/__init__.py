"""The configuration: one YAML file, or a dict of the same shape, validated into a frozen model.

``model``, ``tiers``, ``sections``, ``interval`` and ``retention`` define the keys; ``fields`` parses values; ``chain``
checks the tiers together; ``source`` reads a file; ``loading`` combines them and describes the errors; ``plugins``
finds policies.
Nothing here opens a tier, or depends on the machine except for the working directory and the environment.
"""

from tierfall.config.interval import IntervalSection, Mtbf
from tierfall.config.loading import load_config
from tierfall.config.model import Config
from tierfall.config.retention import BestSection, EvictSection, RetainSection
from tierfall.config.sections import (
    CaptureSection,
    CompressSection,
    DrainSection,
    FlushSection,
)
from tierfall.config.tiers import (
    DeviceTierConfig,
    FileTierConfig,
    HostTierConfig,
    ObjectTierConfig,
    PeerTierConfig,
    StoredTierConfig,
    Tier,
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
    "PeerTierConfig",
    "RetainSection",
    "StoredTierConfig",
    "Tier",
    "load_config",
]
