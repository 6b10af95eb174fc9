"""Backends: where a tier stores bytes; and the wrappers around them. The contract is ``core.types.backend``.

A backend of your own imports ``tierfall.backends.toolkit`` (docs/write-a-backend.md). ``open_backend`` opens an address
of any kind.
"""

from tierfall.backends.open import open_backend
from tierfall.backends.toolkit.registry import register

__all__ = ["open_backend", "register"]
