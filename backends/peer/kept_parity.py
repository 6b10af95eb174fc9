"""What one node keeps of parity: the records of sets, and the images that they name.

A process that does not meet the other nodes lists these images. To read one, other nodes are needed.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Iterator

from tierfall.backends.parity.sets import (
    RECORD_SUFFIX,
    ParitySet,
    parse_parity_set,
    record_key,
)
from tierfall.backends.toolkit.base import describe
from tierfall.backends.toolkit.keys import check_key, check_prefix
from tierfall.backends.wrappers.base import Wrapper
from tierfall.core.types.backend import Backend, StoredObject
from tierfall.core.types.errors import (
    IntegrityError,
    KeyNotFoundError,
    NotSupportedError,
    UnreachableError,
)
from tierfall.core.types.keys import parse_shard, shard_name

logger = logging.getLogger("tierfall")


class KeptParity(Wrapper):
    """A read-only ``Backend`` over the ``documents`` and the parity in this node's memory. An image of which parity is
    kept is listed, not read. ``close`` closes both."""

    def __init__(self, documents: Backend, parity: Backend) -> None:
        super().__init__(documents)
        self._parity = parity

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        if self._is_coded(key):
            raise UnreachableError(
                f"{describe('read', key, self.place)}: it is rebuilt from the memory of other nodes, which only the "
                "ranks of a start read: start the training again"
            )
        self._inner.read_into(key, offset, view)

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        return not self._is_coded(key) and self._inner.read_cached(key, offset, end, views)

    def stat(self, key: str) -> StoredObject:
        return self._find(key) or self._inner.stat(key)

    def _is_coded(self, key: str) -> bool:
        """Return whether parity is kept of an object. Of an earlier start with ``copies`` there are whole images."""
        return self._find(key) is not None

    def _find(self, key: str) -> StoredObject | None:
        """Return an image of which parity is kept; None for any other object."""
        if not is_image(key):
            return None
        images = self._images(f"{check_key(key).rpartition('/')[0]}/")
        return next((image for image in images if image.key == key), None)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        images = sorted(self._images(check_prefix(prefix)), key=key_of)
        return heapq.merge(self._inner.scan(prefix), images, key=key_of)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._parity.close()

    def _images(self, prefix: str) -> Iterator[StoredObject]:
        for found in read_sets(self._parity, prefix):
            yield from images_known_by(found)


def images_known_by(found: ParitySet) -> Iterator[StoredObject]:
    """Yield the images of a set whose documents are on the node that keeps this record of it."""
    for member, image in enumerate(found.images):
        if 0 < (found.at - member) % len(found.images) <= found.geometry.losses:
            yield StoredObject(key=found.image_key(member), bytes=image.bytes)


def is_image(key: str) -> bool:
    name = key.rpartition("/")[2]
    shard = parse_shard(name)
    return shard is not None and name == shard_name(shard)


def read_sets(backend: Backend, prefix: str) -> Iterator[ParitySet]:
    """Yield the sets whose records are below a prefix. One that is damaged is logged, and left out."""
    for stored in backend.scan(prefix):
        key = stored.key.removesuffix(RECORD_SUFFIX)
        if key == stored.key:
            continue
        try:
            yield _read_set(backend, key)
        except KeyNotFoundError:
            continue  # it was deleted meanwhile
        except (IntegrityError, NotSupportedError) as error:
            logger.warning("peers: parity is not used: %s", error)


def _read_set(backend: Backend, key: str) -> ParitySet:
    data = bytearray(backend.stat(record_key(key)).bytes)
    backend.read_into(record_key(key), 0, memoryview(data))
    what = f"{backend.place}: {record_key(key)}"
    found = parse_parity_set(bytes(data), what=what)
    if found.key != key:
        raise IntegrityError(f"{what}: it is the record of {found.key}")
    return found


def key_of(stored: StoredObject) -> str:
    return stored.key
