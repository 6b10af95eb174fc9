"""Everything that a backend plug-in imports: the contract of a store of objects, its errors, and ``register``.

A plug-in derives one class from ``ObjectStore``, or from ``MultipartStore`` if the store takes objects in parts, and
registers it for the protocol of its addresses: docs/write-a-backend.md. The conformance suite is
``tierfall.backends.conformance``.
"""

from tierfall.backends.toolkit.object_store import MultipartStore, ObjectStore, register
from tierfall.core.types.backend import StoredObject
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    ConfigError,
    LostWriteError,
    StorageFullError,
    UnreachableError,
)

__all__ = [
    "AccessDeniedError",
    "BackendError",
    "ConfigError",
    "LostWriteError",
    "MultipartStore",
    "ObjectStore",
    "StorageFullError",
    "StoredObject",
    "UnreachableError",
    "register",
]
