"""The merged index of a checkpoint of several ranks, written to a tier before its commit record.

It is derived from the manifests on the tier, and rebuilt only when a rank's table of tensors has changed. Where it
cannot be built, the checkpoint is committed without one: readers then use the manifests.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from tierfall.core.format.commit_files import with_index
from tierfall.core.format.records import Commit
from tierfall.core.tensor_index.store import IndexStore, build_index
from tierfall.core.types.errors import TierfallError
from tierfall.core.types.values import CheckpointId

logger = logging.getLogger("tierfall")


class IndexedStore(IndexStore, Protocol):
    """A stored tier that an index can be written to."""

    def write_index(self, checkpoint: CheckpointId, data: bytes) -> None: ...


class IndexWriter:
    """Writes indexes and caches the last one. Several threads may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: tuple[str, ...] = ()
        self._data = b""

    def write(self, store: IndexedStore, commit: Commit, tables: tuple[str, ...]) -> Commit:
        """Write the index of the images that ``commit`` names; return the record with the index added, or ``commit``
        itself if no index can be built. ``tables`` are the digests of all ranks' tensor tables, empty if unknown.

        Raises the tier's error if it is retryable: the caller then retries the commit.
        """
        try:
            data = self._index_of(store, commit, tables)
            store.write_index(commit.lineage.checkpoint, data)
        except TierfallError as error:
            if error.retryable:
                raise
            logger.warning(
                "%s: %s is committed without a merged index: %s",
                store.name,
                commit.lineage.checkpoint,
                error,
            )
            return commit
        return with_index(commit, data)

    def _index_of(self, store: IndexedStore, commit: Commit, tables: tuple[str, ...]) -> bytes:
        with self._lock:
            if tables == self._tables and "" not in tables:
                return self._data
        data = build_index(store, commit)
        with self._lock:
            self._tables, self._data = tables, data
        return data
