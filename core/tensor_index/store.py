"""Reading the merged index of a checkpoint from a tier, or building it from the manifests there, and writing it.

Several threads read manifests in groups, so that those of a thousand ranks are not in memory at once. An index is
written before the commit record, and rebuilt only when a rank's table of tensors has changed. Where it cannot be built,
the checkpoint is committed without one: readers then use the manifests.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from tierfall.core.format import documents
from tierfall.core.format.commit_files import with_index
from tierfall.core.format.documents import JsonFields, sha256
from tierfall.core.format.records import Commit
from tierfall.core.runtime.threads import run_in_parallel
from tierfall.core.tensor_index.builder import IndexBuilder
from tierfall.core.tensor_index.index import Index, read_index
from tierfall.core.types import keys
from tierfall.core.types.errors import (
    IntegrityError,
    TierfallError,
)
from tierfall.core.types.values import CheckpointId, Shard

logger = logging.getLogger("tierfall")

READ_THREADS = 8
_GROUP = 4 * READ_THREADS


class IndexStore(Protocol):
    """What the index needs of a stored tier."""

    @property
    def name(self) -> str: ...

    def read_manifest(self, checkpoint: CheckpointId, shard: Shard) -> bytes: ...

    def read_index(self, checkpoint: CheckpointId) -> bytes: ...


class IndexedStore(IndexStore, Protocol):
    """A stored tier that an index can be written to."""

    def write_index(self, checkpoint: CheckpointId, data: bytes) -> None: ...


def read_named_index(store: IndexStore, commit: Commit) -> Index:
    """The index that a commit record names. IntegrityError if there is none or it is damaged; BackendError if it cannot
    be read."""
    return read_index(read_index_bytes(store, commit), what=_what(store, commit))


def read_index_bytes(store: IndexStore, commit: Commit) -> bytes:
    """The bytes of the index that a commit record names, verified against it; raises as ``read_named_index``."""
    what = _what(store, commit)
    named = commit.file(keys.INDEX_NAME)
    if named is None:
        raise IntegrityError(f"{what}: its commit record does not name it")
    data = store.read_index(commit.lineage.checkpoint)
    if len(data) != named.bytes or sha256(data) != named.digest:
        raise IntegrityError(f"{what}: it is not the index that the commit record names")
    return data


def _what(store: IndexStore, commit: Commit) -> str:
    return f"{store.name}: {keys.INDEX_NAME} of {commit.lineage.checkpoint}"


def build_index(store: IndexStore, commit: Commit) -> bytes:
    """Build the index from the manifests of all ranks, which the commit record must name.

    IntegrityError for a damaged manifest, CapacityError for too many blocks, BackendError if the tier cannot be read.
    """
    builder = IndexBuilder(commit.world_size)
    for shard, data in _manifests(store, commit):
        what = f"{store.name}: {keys.manifest_name(shard)} of {commit.lineage.checkpoint}"
        pieces: list[Any] = JsonFields(documents.open_sealed(data, what=what), what).get(
            "pieces", list
        )
        builder.add(shard.rank, pieces, what=what)
    return builder.encode()


def _manifests(store: IndexStore, commit: Commit) -> Iterator[tuple[Shard, bytes]]:
    shards = [Shard(rank, commit.world_size) for rank in range(commit.world_size)]
    digests = {file.name: file.digest for file in commit.files}

    def read(shard: Shard) -> bytes:
        data = store.read_manifest(commit.lineage.checkpoint, shard)
        if sha256(data) != digests.get(keys.manifest_name(shard)):
            raise IntegrityError(
                f"{store.name}: {keys.manifest_name(shard)} of {commit.lineage.checkpoint}: it is not the manifest "
                "that the commit record names"
            )
        return data

    for first in range(0, len(shards), _GROUP):
        group: Sequence[Shard] = shards[first : first + _GROUP]
        yield from zip(group, run_in_parallel(read, group, parallel=READ_THREADS), strict=True)


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
