"""Images as a restore reads them: one shard of one checkpoint on one tier, behind one small contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from tierfall.core import names
from tierfall.core.documents import sha256
from tierfall.core.errors import IntegrityError
from tierfall.core.records import Commit, Manifest, read_manifest
from tierfall.core.snapshot import HostRegion
from tierfall.core.values import CheckpointId, Shard


class ReadableStore(Protocol):
    """What reading needs of a stored tier."""

    @property
    def name(self) -> str: ...

    def read_manifest(self, checkpoint: CheckpointId, shard: Shard) -> bytes: ...

    def read_into(
        self, checkpoint: CheckpointId, shard: Shard, offset: int, view: memoryview
    ) -> None: ...


class Image(Protocol):
    """One copy of one image. ``read`` may use ``buffer``, or hand out a view of memory that it has already."""

    @property
    def tier(self) -> str: ...

    @property
    def in_memory(self) -> bool: ...

    def manifest_bytes(self) -> bytes: ...

    def read(self, start: int, end: int, buffer: memoryview) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image on a stored tier."""

    store: ReadableStore
    id: CheckpointId
    shard: Shard

    @property
    def tier(self) -> str:
        return self.store.name

    @property
    def in_memory(self) -> bool:
        return False

    def manifest_bytes(self) -> bytes:
        return self.store.read_manifest(self.id, self.shard)

    def read(self, start: int, end: int, buffer: memoryview) -> memoryview:
        view = buffer[: end - start]
        self.store.read_into(self.id, self.shard, start, view)
        return view


@dataclass(frozen=True, slots=True)
class RegionImage:
    """An image in host memory: nothing is copied to read it."""

    tier: str
    region: HostRegion

    @property
    def in_memory(self) -> bool:
        return True

    def manifest_bytes(self) -> bytes:
        with self._still_there():
            return self.region.manifest()

    def read(self, start: int, end: int, buffer: memoryview) -> memoryview:
        with self._still_there():
            return self.region.image[start:end]

    @contextmanager
    def _still_there(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:  # it was released: another copy, if there is one, is to be read
            raise IntegrityError(f"{self.tier}: the image left memory: {error}") from error


def checked_manifest(image: Image, commit: Commit, shard: Shard) -> Manifest:
    """Read an image's manifest and hold it against the commit record that vouches for it."""
    name = names.manifest_name(shard)
    what = f"{image.tier}: {name} of {commit.line.checkpoint}"
    named, stored = commit.file(name), commit.file(names.shard_name(shard))
    if named is None or stored is None:
        raise IntegrityError(f"{what}: its commit record does not name this shard")
    data = image.manifest_bytes()
    if len(data) != named.bytes or sha256(data) != named.digest:
        raise IntegrityError(f"{what}: it is not the manifest that the commit record names")
    manifest = read_manifest(data, what=what)
    if (
        manifest.line != commit.line
        or manifest.shard != shard
        or manifest.image_bytes != stored.bytes
    ):
        raise IntegrityError(f"{what}: it contradicts its commit record")
    return manifest
