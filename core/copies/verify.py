"""Verifying copies one after the other: threads and buffers for the checks, and telling deletion from damage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self

from tierfall.core.capture.snapshot import HostRegion
from tierfall.core.compression.frames import frame_bytes_max
from tierfall.core.copies.check import CheckableStore, CheckedCopy, CopyCheck, Damage
from tierfall.core.copies.chunk_reader import BUFFER_BYTES
from tierfall.core.copies.images import READ_THREADS
from tierfall.core.format.records import Manifest
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.runtime.threads import run_in_threads
from tierfall.core.types.errors import BackendError, KeyNotFoundError, TierfallError
from tierfall.core.types.values import CheckpointId

__all__ = ["CheckableStore", "CheckedCopy", "CopyVerifier", "Damage"]


class CopyVerifier:
    """Verifies copies one after the other, with several threads and reused buffers."""

    def __init__(self, on_bytes: Callable[[int], None] = lambda count: None) -> None:
        """``on_bytes`` is called, by several threads, with the number of image bytes that were read."""
        self._on_bytes = on_bytes
        self._pool = BufferPool(bytes=1, count=1)

    def check_stored(self, store: CheckableStore, id: CheckpointId) -> CheckedCopy:
        """Verify a copy on a stored tier."""
        check = CopyCheck(self, store.name, id)
        error: BackendError | None = None
        try:
            check.stored(store)
        except BackendError as failure:
            error = failure
        if (check.damage or isinstance(error, KeyNotFoundError)) and _is_gone(store, id):
            return CheckedCopy(id=id, tier=store.name, gone=True)
        return check.result(error=error)

    def check_regions(
        self, tier: str, id: CheckpointId, regions: Iterable[HostRegion]
    ) -> CheckedCopy:
        """Verify the sealed images of a checkpoint in host memory. If a running trainer reuses a region meanwhile, it
        is reported as damaged."""
        check = CopyCheck(self, tier, id)
        for region in regions:
            check.region(region)
        return check.result(error=None)

    def pool_for(self, manifest: Manifest) -> BufferPool:
        """Return buffers for this image's chunks, as many as BUFFER_BYTES allows."""
        largest = frame_bytes_max(max(manifest.data_start, manifest.chunk_bytes))
        if largest > self._pool.bytes:
            count = max(1, min(READ_THREADS, BUFFER_BYTES // largest))
            self._pool = BufferPool(bytes=largest, count=count)
        return self._pool

    def map(self, check: Callable[[int], None], indexes: Iterable[int]) -> None:
        """Run ``check`` for every chunk; raises the first failure once all have stopped."""
        run_in_threads(READ_THREADS, check, indexes)

    def read(self, bytes: int) -> None:
        self._on_bytes(bytes)

    def close(self) -> None:
        self._pool.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()


def _is_gone(store: CheckableStore, id: CheckpointId) -> bool:
    """Return whether a copy was deleted: a deletion removes the commit record first."""
    try:
        store.read_commit(id)
    except KeyNotFoundError:
        return True
    except TierfallError:
        return False
    return False
