"""Documents: the small files that a stored tier keeps in its backend, each read whole and published whole.

This module knows neither their names nor their contents.
"""

from __future__ import annotations

from typing import cast

from tierfall.core.format.documents import MAX_DOCUMENT_BYTES, open_sealed, read_twice
from tierfall.core.types.backend import Backend, Publish, SyncedBackend, put_object
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    KeyExistsError,
    KeyNotFoundError,
    UnreachableError,
)


class Documents:
    """The documents of one run on one tier; errors name the ``tier``. May be used by several threads."""

    def __init__(self, tier: str, run: str, backend: Backend) -> None:
        self.tier = tier
        self.run = run
        self.backend = backend
        self._maybe_unsynced: set[str] = set()
        """Keys that this process may have made visible without making them durable."""

    def what(self, key: str) -> str:
        """Name a document for error messages."""
        return f"{self.tier}: {key}"

    def exists(self, key: str) -> bool:
        try:
            self.backend.stat(key)
        except KeyNotFoundError:
            return False
        return True

    def read(self, key: str, *, bytes_known: int | None = None) -> bytes:
        """Read a document; raises IntegrityError where it is longer than MAX_DOCUMENT_BYTES. ``bytes_known``: its
        length by a listing, which saves the request for it."""
        length = self.backend.stat(key).bytes if bytes_known is None else bytes_known
        if length > MAX_DOCUMENT_BYTES:
            raise IntegrityError(f"{self.what(key)}: {length} bytes are too many")
        data = bytearray(length)
        if data or bytes_known is not None:
            self.backend.read_into(key, 0, memoryview(data))
        return bytes(data)

    def create(self, key: str, data: bytes) -> None:
        """Create a document; raises KeyExistsError where the key is taken.

        On a backend without conditional create, a stat comes first: it finds an earlier document, but not one that
        another process writes at the same moment.
        """
        if self.backend.traits.conditional_create:
            try:
                self._write(key, data, Publish.IF_ABSENT)
            except KeyExistsError:
                raise
            except BackendError as error:
                if isinstance(error.__cause__, UnreachableError):
                    # Retryable again: a caller that gets KeyExistsError compares the document with its own.
                    raise UnreachableError(f"{self.what(key)}: {error.__cause__}") from error
                raise
            return
        if self.exists(key):
            raise KeyExistsError(f"{self.what(key)}: it is there already")
        self.replace(key, data)

    def replace(self, key: str, data: bytes) -> None:
        """Write a document, in place of an existing one of that key."""
        self._write(key, data, Publish.REPLACE)

    def sync(self, key: str) -> None:
        """Make an existing document durable: its writer may have failed, or died, before the last fsync. Does nothing
        on a backend where every visible object is durable.

        Raises KeyNotFoundError where the document was deleted, and another BackendError where it may not survive a
        power cut. After a failed fsync a later one may report success wrongly, so the document is rewritten then; it
        raises IntegrityError, and rewrites nothing, if the document reads as damaged twice.
        """
        if not self.backend.traits.needs_sync:
            return
        if key in self._maybe_unsynced:
            self.replace(key, read_twice(lambda: self._read_intact(key)))
            return
        try:
            cast(SyncedBackend, self.backend).sync(key.rpartition("/")[0])
        except KeyNotFoundError:
            raise
        except BackendError:
            self._maybe_unsynced.add(key)
            raise

    def _read_intact(self, key: str) -> bytes:
        data = self.read(key)
        open_sealed(data, what=self.what(key))
        return data

    def _write(self, key: str, data: bytes, publish: Publish) -> None:
        try:
            put_object(self.backend, key, data, publish)
        except KeyExistsError:
            raise
        except BackendError:
            if self.backend.traits.needs_sync:
                self._maybe_unsynced.add(key)
            raise
        self._maybe_unsynced.discard(key)
