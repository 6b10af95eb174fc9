"""Every error that tierfall raises; see the tree in ``tierfall.core.types.errors``. All are names of ``tierfall``."""

from tierfall.core.types.errors import *  # noqa: F403
from tierfall.core.types.errors import __all__ as __all__
