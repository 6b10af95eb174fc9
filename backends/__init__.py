"""Backends: the storage of a tier, and wrappers around it. The contract is ``core.types.backend``.

A backend plug-in imports ``tierfall.backends.toolkit`` (docs/write-a-backend.md). ``open_backend`` opens an address of
any kind.
"""

from tierfall.backends.open import open_backend
from tierfall.backends.toolkit.object_store import register

__all__ = ["open_backend", "register"]
