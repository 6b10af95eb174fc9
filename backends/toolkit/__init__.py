"""Everything that a backend plug-in imports: the contract, its errors, the backend over a key-value store, and helpers.

A store with get, put, delete and list is described by a ``KeyValueStore``; a ``KeyValueBackend`` makes a backend of it.
Any other medium needs a ``Backend`` and a ``Writer`` of its own. docs/write-a-backend.md shows both. The conformance
suite is ``tierfall.backends.conformance``.
"""

from tierfall.backends.toolkit.base import AbortOnExit, Coverage, Extent
from tierfall.backends.toolkit.key_value import KeyValueBackend
from tierfall.backends.toolkit.keys import check_key, check_prefix, is_key
from tierfall.backends.toolkit.registry import register
from tierfall.backends.toolkit.store import KeyValueStore
from tierfall.backends.toolkit.views import aligned_block, copy_bytes, flat
from tierfall.core.types.backend import (
    Backend,
    Publish,
    StoredObject,
    SyncedBackend,
    Traits,
    Writer,
)
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    ConfigError,
    KeyExistsError,
    KeyInvalidError,
    KeyNotFoundError,
    LostWriteError,
    StorageFullError,
    TruncatedError,
    UnreachableError,
)

__all__ = [
    "AbortOnExit",
    "AccessDeniedError",
    "Backend",
    "BackendError",
    "ConfigError",
    "Coverage",
    "Extent",
    "KeyExistsError",
    "KeyInvalidError",
    "KeyNotFoundError",
    "KeyValueBackend",
    "KeyValueStore",
    "LostWriteError",
    "Publish",
    "StorageFullError",
    "StoredObject",
    "SyncedBackend",
    "Traits",
    "TruncatedError",
    "UnreachableError",
    "Writer",
    "aligned_block",
    "check_key",
    "check_prefix",
    "copy_bytes",
    "flat",
    "is_key",
    "register",
]
