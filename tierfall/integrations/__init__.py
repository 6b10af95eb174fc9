"""Integrations: tierfall as the storage of other checkpoint libraries.

``path`` provides ``tiers://`` to any library that accepts an fsspec path. Importing this package registers it; fsspec
also finds it as an entry point of the installed package. Adapters of training frameworks are named as the framework.
"""

import sys
from typing import Any

from fsspec import register_implementation  # type: ignore[import-untyped]

register_implementation("tiers", "tierfall.integrations.path.TierFileSystem", clobber=True)


def lightning_callbacks() -> list[Any]:
    """Return what Lightning adds to the callbacks of each Trainer, and logs: nothing in a program without a
    ``TierfallIO``. It is an entry point."""
    module = sys.modules.get("tierfall.integrations.lightning.files")
    return [module.FromPlugin()] if module is not None and module.PLUGINS else []
