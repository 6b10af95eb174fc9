"""Integrations: tierfall as the storage of other checkpoint libraries. Adapters of training frameworks are named as the
framework."""

import sys
from typing import Any


def lightning_callbacks() -> list[Any]:
    """Return what Lightning adds to the callbacks of each Trainer, and logs: nothing in a program without a
    ``TierfallIO``. It is an entry point."""
    module = sys.modules.get("tierfall.integrations.lightning")
    return [module.FromPlugin()] if module is not None and module.PLUGINS else []
