"""Backends: where a tier stores bytes; and the wrappers around them. The contract is ``core.contracts``.

``register`` adds one of a user's own (docs/write-a-backend.md).
"""

from tierfall.backends.registry import register

__all__ = ["register"]
