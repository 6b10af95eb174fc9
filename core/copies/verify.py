"""The check of one copy: every file of one checkpoint on one tier is compared with its digests.

It finds any flipped bit in commit record, manifest or image, and any file that is missing or has another length.
It changes nothing. Damage is part of its result, never an exception. ``CopyVerifier`` checks copies one after the
other: it has their threads and buffers, and distinguishes deletion from damage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from tierfall.core.capture.snapshot import HostRegion
from tierfall.core.compression.codec import frame_bytes_max
from tierfall.core.compression.frame_table import FrameTable
from tierfall.core.copies.chunk_reader import BUFFER_BYTES
from tierfall.core.copies.images import (
    READ_THREADS,
    ChunkDigestError,
    Image,
    PackedImage,
    ReadableStore,
    RegionImage,
    StoredImage,
    checked_manifest,
    checked_packed,
    read_chunk,
)
from tierfall.core.format.commit_files import image_file, wrong_files
from tierfall.core.format.documents import read_twice
from tierfall.core.format.records import Commit, Manifest, parse_commit
from tierfall.core.image.header import read_header
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.runtime.threads import run_in_threads
from tierfall.core.types import keys
from tierfall.core.types.backend import StoredObject
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    KeyNotFoundError,
    NotSupportedError,
    TierfallError,
)
from tierfall.core.types.values import CheckpointId, Codec, Shard

T = TypeVar("T")


class CheckableStore(ReadableStore, Protocol):
    """The methods of a stored tier that a check needs."""

    def read_commit(self, checkpoint: CheckpointId) -> Commit: ...

    def files(
        self, checkpoint: CheckpointId, commit: Commit | None = None
    ) -> tuple[StoredObject, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A defect in a file of a copy; ``chunk`` counts from 0, the header.

    ``newer``: the bytes are intact, but a newer tierfall wrote them, and this version cannot read them.
    """

    file: str
    problem: str
    chunk: int | None = None
    newer: bool = False


@dataclass(slots=True, kw_only=True)
class CheckedCopy:
    """The result of the check of one copy; the check fills it in.

    ``bytes`` and ``chunks`` are intact. ``error``: the rest could not be read. ``gone``: the copy was deleted during
    the check. ``foreign`` are files that the commit record does not name.
    """

    id: CheckpointId
    tier: str
    bytes: int = 0
    chunks: int = 0
    commit: Commit | None = None
    damage: tuple[Damage, ...] = ()
    error: TierfallError | None = None
    gone: bool = False
    foreign: tuple[str, ...] = ()

    @property
    def spoiled(self) -> bool:
        """Whether its bytes are damaged, and not only of a newer version."""
        return any(not damage.newer for damage in self.damage)

    @property
    def good(self) -> bool:
        return not self.damage and self.error is None and not self.gone


class CopyCheck:
    """The check of one copy, in progress."""

    def __init__(self, resources: CopyVerifier, tier: str, id: CheckpointId) -> None:
        self._resources = resources
        self._lock = threading.Lock()
        self.found = CheckedCopy(id=id, tier=tier)

    def result(self, *, error: TierfallError | None) -> CheckedCopy:
        self.found.error = error
        order = sorted(
            self.found.damage, key=lambda d: (d.file, -1 if d.chunk is None else d.chunk)
        )
        self.found.damage = tuple(order)
        return self.found

    # A copy on a stored tier -------------------------------------------------------------------------

    def stored(self, store: CheckableStore) -> None:
        """Check a copy. Without a commit record that can be read, nothing says what else has to be there."""
        id = self.found.id
        commit = self.found.commit = self._try(keys.COMMIT_NAME, lambda: store.read_commit(id))
        sizes = {stored.key: stored.bytes for stored in store.files(id, commit)}
        if commit is not None:
            self._check_files(store, commit, sizes)

    def _check_files(self, store: CheckableStore, commit: Commit, sizes: Mapping[str, int]) -> None:
        self._check_names(commit, sizes)
        self.found.foreign = tuple(
            name for name in sizes if name != keys.COMMIT_NAME and commit.file(name) is None
        )
        named = {shard for file in commit.files if (shard := keys.parse_shard(file.name))}
        for shard in sorted(named, key=lambda shard: (shard.world_size, shard.rank)):
            image = StoredImage(store, self.found.id, shard)
            manifest = self._manifest(image, commit, shard)
            if manifest is not None:
                self._check_image(image, commit, manifest, sizes)

    def _check_names(self, commit: Commit, sizes: Mapping[str, int]) -> None:
        """Compare the folder with the commit record: every rank is named, and every file exists with its length.

        The record of a tier that only one node sees names the image and manifest of that node's ranks.
        """
        shards = {keys.parse_shard(file.name) for file in commit.files}
        here = {shard for shard in shards if shard and shard.world_size == commit.world_size}
        for rank in range(commit.world_size):
            shard = Shard(rank, commit.world_size)
            if here and shard not in here:
                continue
            for name, file in (
                (keys.shard_name(shard), image_file(commit, shard)),
                (keys.manifest_name(shard), commit.file(keys.manifest_name(shard))),
            ):
                if file is None:
                    self._record(keys.COMMIT_NAME, f"it does not name {name}")
        for name, problem in wrong_files(commit, sizes):
            self._record(name, problem)

    def _manifest(self, image: Image, commit: Commit, shard: Shard) -> Manifest | None:
        name = keys.manifest_name(shard)
        if self._is_damaged(name):
            return None
        return self._try(name, lambda: checked_manifest(image, commit, shard))

    def _check_image(
        self, image: StoredImage, commit: Commit, manifest: Manifest, sizes: Mapping[str, int]
    ) -> None:
        named = image_file(commit, manifest.shard)
        size = None if named is None else sizes.get(named.file.name)
        if named is None or size is None:
            return  # recorded by its name
        if named.codec is Codec.NONE:
            self._check_chunks(image, manifest, manifest.chunk_range, size, named.file.name)
        else:
            self._check_packed(image, commit, manifest, named.file.name, size)

    def _check_packed(
        self, image: StoredImage, commit: Commit, manifest: Manifest, name: str, size: int
    ) -> None:
        """Check every frame that is whole in the file, and the seek table behind them."""
        stored = keys.stored_name(manifest.shard)
        if self._is_damaged(stored):
            return
        packed = self._try(stored, lambda: checked_packed(image, commit, manifest))
        if packed is None:
            return
        reader = PackedImage(image, packed, chunk_bytes=manifest.chunk_bytes)
        self._check_chunks(reader, manifest, packed.chunk_range, size, name)
        if size < packed.stored_bytes:
            return
        self._try(name, lambda: read_twice(lambda: self._check_seek_table(image, manifest, packed)))

    def _check_seek_table(self, image: StoredImage, manifest: Manifest, packed: FrameTable) -> None:
        tail = bytearray(packed.stored_bytes - packed.frames_bytes)
        if tail:
            image.read_into(packed.frames_bytes, memoryview(tail), codec=packed.codec, again=True)
        if tail != packed.seek_table(manifest):
            raise IntegrityError("its seek table differs from the one that was written")

    # A copy in memory --------------------------------------------------------------------------------

    def region(self, region: HostRegion) -> None:
        commit = self.found.commit = self._try(
            keys.COMMIT_NAME, lambda: parse_commit(region.commit(), what=keys.COMMIT_NAME)
        )
        for file in commit.files if commit else ():
            shard = keys.parse_shard(file.name)
            if commit is None or shard is None or file.digest is not None:
                continue
            image = RegionImage(self.found.tier, region)
            manifest = self._manifest(image, commit, shard)
            if manifest is not None:
                size = len(region.image)
                self._check_chunks(image, manifest, manifest.chunk_range, size, file.name)

    # Chunks ------------------------------------------------------------------------------------------

    def _check_chunks(
        self,
        image: Image,
        manifest: Manifest,
        range_of: Callable[[int], tuple[int, int]],
        size: int,
        name: str,
    ) -> None:
        """Check the chunks that are whole in the file ``name`` of ``size`` bytes, where each is at ``range_of``."""
        pool = self._resources.pool_for(manifest)

        def check(index: int) -> None:
            start, end = manifest.chunk_range(index)
            with pool.lend_view(end - start) as buffer:
                self._check_chunk(image, manifest, index, buffer, name)
            self._resources.on_bytes(end - start)

        whole = [index for index in range(manifest.chunk_count) if range_of(index)[1] <= size]
        run_in_threads(READ_THREADS, check, whole)

    def _check_chunk(
        self, image: Image, manifest: Manifest, index: int, buffer: memoryview, name: str
    ) -> None:
        try:
            view = read_chunk(image, manifest, index, buffer)
        except ChunkDigestError:
            start, end = manifest.chunk_range(index)
            self._record(name, f"bytes {start} to {end} do not match their digest", index)
            return
        except TierfallError as error:
            self._record_error(name, error, index)
            return
        if index == 0:
            self._try(
                name, lambda: read_header(view, image_bytes=manifest.image_bytes, what=name), 0
            )
        with self._lock:
            self.found.chunks += 1
            self.found.bytes += len(view)

    # Recording ---------------------------------------------------------------------------------------

    def _is_damaged(self, file: str) -> bool:
        return any(damage.file == file for damage in self.found.damage)

    def _try(self, file: str, read: Callable[[], T], chunk: int | None = None) -> T | None:
        try:
            return read()
        except KeyNotFoundError:
            self._record(file, "it is missing", chunk)
        except TierfallError as error:
            self._record_error(file, error, chunk)
        return None

    def _describe_error(self, file: str, error: TierfallError) -> str:
        """Return the message of an error without the name of the file."""
        text = str(error)
        for lead in (f"{file} of {self.found.id}: ", f"{file}: "):
            if lead in text:
                return text.partition(lead)[2]
        return text

    def _record_error(self, file: str, error: TierfallError, chunk: int | None = None) -> None:
        """Record damage, and what a newer version wrote; raise any other error: the rest was not read."""
        newer = isinstance(error, NotSupportedError)
        if not (newer or error.is_damage):
            raise error
        self._record(file, self._describe_error(file, error), chunk, newer=newer)

    def _record(
        self, file: str, problem: str, chunk: int | None = None, *, newer: bool = False
    ) -> None:
        with self._lock:
            self.found.damage += (Damage(file=file, problem=problem, chunk=chunk, newer=newer),)


class CopyVerifier:
    """Verifies copies one after the other, with several threads and reused buffers."""

    def __init__(self, on_bytes: Callable[[int], None] = lambda count: None) -> None:
        """``on_bytes`` is called, by several threads, with the number of image bytes that were read."""
        self.on_bytes = on_bytes
        self._pool = BufferPool(bytes=1, count=1)

    def check_stored(self, store: CheckableStore, id: CheckpointId) -> CheckedCopy:
        """Verify a copy on a stored tier."""
        check = CopyCheck(self, store.name, id)
        error: BackendError | None = None
        try:
            check.stored(store)
        except BackendError as failure:
            error = failure
        if (check.found.damage or isinstance(error, KeyNotFoundError)) and _is_gone(store, id):
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self._pool.release()


def _is_gone(store: CheckableStore, id: CheckpointId) -> bool:
    """Return whether a copy was deleted: a deletion removes the commit record first."""
    try:
        store.read_commit(id)
    except KeyNotFoundError:
        return True
    except TierfallError:
        return False
    return False
