"""The small documents that a stored tier keeps in its backend: each read whole, and written whole or not at all.

It knows neither their names nor what they say.
"""

from __future__ import annotations

from typing import cast

from tierfall.core.format.documents import MAX_DOCUMENT_BYTES
from tierfall.core.types.backend import Backend, Publish, SyncedBackend
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    KeyExistsError,
    KeyNotFoundError,
    UnreachableError,
)


class Documents:
    """Documents in a backend; errors name the ``tier``."""

    def __init__(self, tier: str, backend: Backend) -> None:
        self._tier = tier
        self._backend = backend
        self._doubtful: set[str] = set()
        """Keys that a try of this process may have made visible, and not durable."""

    def what(self, key: str) -> str:
        """Name a document, as errors do."""
        return f"{self._tier}: {key}"

    def read(self, key: str, *, bytes_known: int | None = None) -> bytes:
        """Read a document; IntegrityError where it is larger than any is. With ``bytes_known``, as a listing has just
        said, nobody asks for its length."""
        length = self._backend.stat(key).bytes if bytes_known is None else bytes_known
        if length > MAX_DOCUMENT_BYTES:
            raise IntegrityError(f"{self.what(key)}: {length} bytes are too many")
        data = bytearray(length)
        if data or bytes_known is not None:
            self._backend.read_into(key, 0, memoryview(data))
        return bytes(data)

    def create(self, key: str, data: bytes) -> None:
        """Create what must not be there yet, or raise KeyExistsError.

        On a backend without a conditional create a look comes first: it stops a second try, but not another writer at
        the same moment.
        """
        if self._backend.traits.conditional_create:
            try:
                self._write(key, data, Publish.IF_ABSENT)
            except KeyExistsError:
                raise
            except BackendError as error:
                if isinstance(error.__cause__, UnreachableError):
                    # Creating it again settles whether it was created: whoever does compares what is there.
                    raise UnreachableError(f"{self.what(key)}: {error.__cause__}") from error
                raise
            return
        try:
            self._backend.stat(key)
        except KeyNotFoundError:
            self.replace(key, data)
        else:
            raise KeyExistsError(f"{self.what(key)}: it is there already")

    def replace(self, key: str, data: bytes) -> None:
        """Write a document, in the place of one of that name."""
        self._write(key, data, Publish.REPLACE)

    def settle(self, key: str) -> None:
        """Make a document durable that was found to be there: whoever wrote it may have failed, or died, before its
        last fsync. Nothing is done where whatever is visible is durable.

        Raises KeyNotFoundError where it is not there any more, and another BackendError where it may not survive a
        power cut. After a failed fsync another one may say wrongly that all is well, so it is written anew then.
        """
        if not self._backend.traits.needs_sync:
            return
        if key in self._doubtful:
            self.replace(key, self.read(key))
            return
        try:
            cast(SyncedBackend, self._backend).sync(key.rpartition("/")[0])
        except KeyNotFoundError:
            raise
        except BackendError:
            self._doubtful.add(key)
            raise

    def _write(self, key: str, data: bytes, publish: Publish) -> None:
        try:
            with self._backend.create(key, length=len(data), publish=publish) as writer:
                writer.write(0, memoryview(data))
                writer.publish()
        except KeyExistsError:
            raise
        except BackendError:
            if self._backend.traits.needs_sync:
                self._doubtful.add(key)
            raise
        self._doubtful.discard(key)
