"""Images for reading: one shard of one checkpoint on one tier, raw or packed, by one interface."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from tierfall.core.capture.copier import chunk_digest
from tierfall.core.capture.snapshot import HostRegion
from tierfall.core.compression.codec import Unpacker, frame_bytes_max
from tierfall.core.compression.frame_table import FrameTable, read_frame_table
from tierfall.core.format.commit_files import image_file
from tierfall.core.format.documents import log_misread, read_twice, sha256
from tierfall.core.format.records import Commit, Manifest, NamedFile, parse_manifest
from tierfall.core.runtime.buffers import BufferPool, is_being_filled
from tierfall.core.types import keys
from tierfall.core.types.errors import BackendError, IntegrityError
from tierfall.core.types.values import CheckpointId, Codec, Shard

logger = logging.getLogger("tierfall")

READ_THREADS = 3
"""Chunks of a stored image that are read at once."""


class ChunkDigestError(IntegrityError):
    """The bytes of a chunk do not match their digest."""


class ReadableStore(Protocol):
    """The methods of a stored tier that reading needs."""

    @property
    def name(self) -> str: ...

    @property
    def cache_never_waits(self) -> bool: ...

    def read_manifest(
        self, checkpoint: CheckpointId, shard: Shard, *, length: int | None = None
    ) -> bytes:
        """Read a manifest; its ``length`` in bytes, if it is known, saves the request for it."""
        ...

    def read_stored(self, checkpoint: CheckpointId, shard: Shard) -> bytes: ...

    def read_into(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        offset: int,
        view: memoryview,
        *,
        codec: Codec = Codec.NONE,
    ) -> None: ...

    def read_cached(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        offset: int,
        end: int,
        views: Iterable[memoryview],
        *,
        codec: Codec = Codec.NONE,
    ) -> bool: ...


class Image(Protocol):
    """One copy of one image.

    ``read`` reads chunk ``index`` into ``buffer``, which is at least as long, or returns a view of existing memory. It
    does not verify digests. ``again``: the bytes of an earlier read were damaged, and no cache may be used.
    """

    @property
    def tier(self) -> str: ...

    @property
    def in_memory(self) -> bool: ...

    def manifest_bytes(self, length: int | None = None) -> bytes: ...

    def read(
        self, manifest: Manifest, index: int, buffer: memoryview, *, again: bool = False
    ) -> memoryview: ...

    def read_cached(self, manifest: Manifest, index: int, views: Iterable[memoryview]) -> bool:
        """Bring a chunk that is in memory of this machine as it is into one view after the other; False where it is
        not. However this ends, no view is filled any more."""
        ...


@dataclass(frozen=True, slots=True)
class StoredImage:
    """A raw image on a stored tier; ``unpacked`` returns a readable image of any form."""

    store: ReadableStore
    id: CheckpointId
    shard: Shard
    in_memory: ClassVar[bool] = False

    @property
    def tier(self) -> str:
        return self.store.name

    def manifest_bytes(self, length: int | None = None) -> bytes:
        return self.store.read_manifest(self.id, self.shard, length=length)

    def read(
        self, manifest: Manifest, index: int, buffer: memoryview, *, again: bool = False
    ) -> memoryview:
        start, end = manifest.chunk_range(index)
        view = buffer[: end - start]
        self.read_into(start, view, again=again)
        return view

    def read_into(
        self, offset: int, view: memoryview, *, codec: Codec = Codec.NONE, again: bool = False
    ) -> None:
        """Fill ``view`` from ``offset`` of the image's file."""
        if again or not self._read_cached(offset, view, codec):
            self.store.read_into(self.id, self.shard, offset, view, codec=codec)

    def _read_cached(self, offset: int, view: memoryview, codec: Codec) -> bool:
        end = offset + view.nbytes
        try:
            return self.store.read_cached(self.id, self.shard, offset, end, [view], codec=codec)
        except BackendError:  # the medium may give it all the same, or will say why not
            if is_being_filled(view):
                raise
            logger.debug("%s: a read of the page cache failed", self.tier, exc_info=True)
            return False

    def read_cached(self, manifest: Manifest, index: int, views: Iterable[memoryview]) -> bool:
        if not self.store.cache_never_waits:
            return False  # a read that is given up would fill its targets later
        start, end = manifest.chunk_range(index)
        return self.store.read_cached(self.id, self.shard, start, end, views)


class PackedImage:
    """A packed image on a stored tier. It is shared by threads; each read uses one more buffer of a chunk's length."""

    in_memory: ClassVar[bool] = False

    def __init__(self, raw: StoredImage, packed: FrameTable, *, chunk_bytes: int) -> None:
        self._raw = raw
        self._packed = packed
        self._scratch = BufferPool(bytes=frame_bytes_max(chunk_bytes), count=READ_THREADS)

    @property
    def tier(self) -> str:
        return self._raw.tier

    def manifest_bytes(self, length: int | None = None) -> bytes:
        return self._raw.manifest_bytes(length)

    def read(
        self, manifest: Manifest, index: int, buffer: memoryview, *, again: bool = False
    ) -> memoryview:
        start, end = self._packed.chunk_range(index)
        raw_start, raw_end = manifest.chunk_range(index)
        width, view = self._packed.widths[index], buffer[: raw_end - raw_start]
        if width == 1:
            with self._scratch.lend_view(end - start) as scratch:
                return self._unpack(index, scratch[: end - start], view, start, again=again)
        # The frame is read into the chunk's buffer, which is free again once the frame is unpacked into planes.
        fits = end - start <= len(buffer)
        frame = (buffer if fits else memoryview(bytearray(end - start)))[: end - start]
        return self._unpack(index, frame, view, start, again=again)

    def read_cached(self, manifest: Manifest, index: int, views: Iterable[memoryview]) -> bool:
        return False  # a target cannot hold a packed frame

    def _unpack(
        self, index: int, frame: memoryview, view: memoryview, start: int, *, again: bool
    ) -> memoryview:
        self._raw.read_into(start, frame, codec=self._packed.codec, again=again)
        what = f"{self.tier}: chunk {index} of {self._raw.id}"
        unpacker = Unpacker(self._packed.codec, scratch=self._scratch)
        unpacker.unpack(frame, view, width=self._packed.widths[index], what=what)
        return view


@dataclass(frozen=True, slots=True)
class RegionImage:
    """An image in host memory. ``read`` makes no copy, unless another process may reuse the region."""

    tier: str
    region: HostRegion
    in_memory: ClassVar[bool] = True

    def manifest_bytes(self, length: int | None = None) -> bytes:
        with self._checking_region():
            return self.region.manifest()

    def read(
        self, manifest: Manifest, index: int, buffer: memoryview, *, again: bool = False
    ) -> memoryview:
        start, end = manifest.chunk_range(index)
        with self._checking_region():
            view = self.region.image[start:end]
            if not view.readonly:
                return view
            # A running trainer may reuse the region at any time: the verified bytes must be those that are used.
            copy = buffer[: end - start]
            np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(view, np.uint8))
            return copy

    def read_cached(self, manifest: Manifest, index: int, views: Iterable[memoryview]) -> bool:
        start, _ = manifest.chunk_range(index)
        with self._checking_region():
            for view in views:
                self.region.read_into(start, view)
                start += len(view)
        return True

    @contextmanager
    def _checking_region(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:  # the region was released
            raise IntegrityError(f"{self.tier}: the image left memory: {error}") from error


def read_chunk(
    image: Image,
    manifest: Manifest,
    index: int,
    buffer: memoryview,
    *,
    again: bool = False,
    on_misread: Callable[[IntegrityError], None] = log_misread,
) -> memoryview:
    """Return the verified bytes of chunk ``index``; the arguments are those of ``Image.read``.

    A chunk in storage is read twice before it counts as damaged, since a cache or the transfer may have altered it.
    ``on_misread`` receives the error of the first read if the second is good.
    """
    try:
        return _checked(image, manifest, index, image.read(manifest, index, buffer, again=again))
    except IntegrityError as error:
        if image.in_memory:
            raise
        misread = error
    view = _checked(image, manifest, index, image.read(manifest, index, buffer, again=True))
    on_misread(misread)
    return view


def _checked(image: Image, manifest: Manifest, index: int, view: memoryview) -> memoryview:
    check_digest(image.tier, manifest, index, chunk_digest(view))
    return view


def check_digest(tier: str, manifest: Manifest, index: int, digest: str) -> None:
    """Raise ChunkDigestError if ``digest``, of a chunk that was read from a tier, is not the one in its manifest."""
    if digest != manifest.digests[index]:
        raise ChunkDigestError(
            f"{tier}: chunk {index} of {manifest.lineage.checkpoint} does not match its digest"
        )


def checked_manifest(image: Image, commit: Commit, shard: Shard) -> Manifest:
    """Read an image's manifest and verify it by the commit record."""
    name = keys.manifest_name(shard)
    what = f"{image.tier}: {name} of {commit.lineage.checkpoint}"
    named, stored = commit.file(name), image_file(commit, shard)
    if named is None or stored is None:
        raise IntegrityError(f"{what}: its commit record does not name this shard")
    data = read_twice(lambda: _as_named(image.manifest_bytes(named.bytes), named, what, "manifest"))
    manifest = parse_manifest(data, what=what)
    raw_bytes = stored.file.bytes if stored.codec is Codec.NONE else stored.file.raw_bytes
    if (
        manifest.lineage != commit.lineage
        or manifest.shard != shard
        or manifest.image_bytes != raw_bytes
    ):
        raise IntegrityError(f"{what}: it contradicts its commit record")
    return manifest


def _as_named(data: bytes, named: NamedFile, what: str, kind: str) -> bytes:
    if len(data) != named.bytes or sha256(data) != named.digest:
        raise IntegrityError(f"{what}: it is not the {kind} that the commit record names")
    return data


def checked_packed(image: StoredImage, commit: Commit, manifest: Manifest) -> FrameTable | None:
    """Read the record of a packed image's frames and verify it by the commit record; None for a raw image."""
    shard = manifest.shard
    name = keys.stored_name(shard)
    what = f"{image.tier}: {name} of {commit.lineage.checkpoint}"
    named, stored = commit.file(name), image_file(commit, shard)
    if stored is None or stored.codec is Codec.NONE:
        return None
    if named is None:
        raise IntegrityError(f"{what}: its commit record does not name it")
    read = image.store.read_stored
    data = read_twice(lambda: _as_named(read(image.id, shard), named, what, "record"))
    packed = read_frame_table(data, manifest, what=what)
    if packed.codec is not stored.codec or packed.stored_bytes != stored.file.bytes:
        raise IntegrityError(f"{what}: it contradicts its commit record")
    return packed


def unpacked(image: Image, commit: Commit, manifest: Manifest) -> Image:
    """Return the image in a readable form: a PackedImage if its commit record names a packed file."""
    if not isinstance(image, StoredImage):
        return image
    packed = checked_packed(image, commit, manifest)
    if packed is None:
        return image
    return PackedImage(image, packed, chunk_bytes=manifest.chunk_bytes)
