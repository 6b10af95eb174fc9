"""The configuration: one YAML file, or a dict of the same shape, validated into a frozen model.

``model`` defines the keys; ``fields`` parses values; ``loading`` reads a file and describes the errors; ``plugins``
finds policies.
Nothing here opens a tier, or depends on the machine except for the working directory and the environment.
"""

from tierfall.config.loading import load_config
from tierfall.config.model import (
    BestSection,
    Config,
    FileTierConfig,
    HostTierConfig,
    IntervalSection,
    ObjectTierConfig,
    PeerTierConfig,
    RetainSection,
    StoredTierConfig,
    Tier,
)

__all__ = [
    "BestSection",
    "Config",
    "FileTierConfig",
    "HostTierConfig",
    "IntervalSection",
    "ObjectTierConfig",
    "PeerTierConfig",
    "RetainSection",
    "StoredTierConfig",
    "Tier",
    "load_config",
]
