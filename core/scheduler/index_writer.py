"""The merged index of a checkpoint of several ranks, written to a tier before its commit record.

It is derived from the manifests that lie there, and made anew only when a rank's table of tensors is another than it
was. A checkpoint does without it where it cannot be made: readers go by the manifests then.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from tierfall.core.format.commit_files import with_index
from tierfall.core.format.records import Commit
from tierfall.core.tensor_index.store import IndexStore, make_index
from tierfall.core.types.errors import TierfallError
from tierfall.core.types.values import CheckpointId

logger = logging.getLogger("tierfall")


class IndexedStore(IndexStore, Protocol):
    """A stored tier that takes an index."""

    def write_index(self, checkpoint: CheckpointId, data: bytes) -> None: ...


class IndexWriter:
    """Writes indexes, and keeps the last one made. May be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: tuple[str, ...] = ()
        self._data = b""

    def leave(self, store: IndexedStore, commit: Commit, tables: tuple[str, ...]) -> Commit:
        """Write the index of what ``commit`` names, and return the record that names it too; as it is where there can
        be none. ``tables`` are the digests of the tables of all ranks, an empty one where a rank does not know its own.

        Raises the retryable error where the tier could not be asked: the commit is tried again.
        """
        try:
            data = self._made(store, commit, tables)
            store.write_index(commit.line.checkpoint, data)
        except TierfallError as error:
            if error.retryable:
                raise
            logger.warning(
                "%s: %s is committed without a merged index: %s",
                store.name,
                commit.line.checkpoint,
                error,
            )
            return commit
        return with_index(commit, data)

    def _made(self, store: IndexedStore, commit: Commit, tables: tuple[str, ...]) -> bytes:
        with self._lock:
            if tables == self._tables and "" not in tables:
                return self._data
        data = make_index(store, commit)
        with self._lock:
            self._tables, self._data = tables, data
        return data
