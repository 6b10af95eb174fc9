"""Checking a copy: every file of one checkpoint on one tier, read back and held against its digests.

It finds any flipped bit in commit record, manifest, image or mark, and any file that is missing, too short or too long.
It changes nothing, and what it finds it reports: damage is a result here, never an exception. A copy that was dropped
while it was being read is told apart from one that is damaged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar

from tierfall.core import names
from tierfall.core.buffers import BufferPool
from tierfall.core.capture.filling import chunk_digest
from tierfall.core.contracts import Stored
from tierfall.core.errors import (
    BackendError,
    IntegrityError,
    KeyNotFoundError,
    NotSupportedError,
    TierfallError,
)
from tierfall.core.image import read_header
from tierfall.core.records import (
    Commit,
    Manifest,
    Mark,
    read_commit,
    read_manifest,
    read_mark,
)
from tierfall.core.restore.images import (
    Image,
    ReadableStore,
    RegionImage,
    StoredImage,
    checked_manifest,
)
from tierfall.core.restore.reader import BUFFER_BYTES, READ_THREADS
from tierfall.core.snapshot import HostRegion
from tierfall.core.values import CheckpointId, Shard

T = TypeVar("T")


class CheckableStore(ReadableStore, Protocol):
    """What checking needs of a stored tier."""

    def read_commit(self, checkpoint: CheckpointId) -> Commit: ...

    def read_mark(self, checkpoint: CheckpointId, name: str) -> Mark: ...

    def files(self, checkpoint: CheckpointId) -> tuple[Stored, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing that is wrong with a file of a copy; ``chunk`` counts from 0, the header."""

    file: str
    problem: str
    chunk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCopy:
    """What became of the check of one copy.

    ``bytes`` and ``chunks`` were read and are as they were written. ``error`` says why the rest could not be read;
    ``gone`` that the copy was dropped meanwhile. ``foreign`` are files that its commit record does not name.
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
    def good(self) -> bool:
        return not self.damage and self.error is None and not self.gone


class Verifier:
    """Checks copies one after another, by several threads, through buffers that are used again."""

    def __init__(self, on_bytes: Callable[[int], None] = lambda count: None) -> None:
        """``on_bytes`` is told from several threads how many bytes of images were read."""
        self._on_bytes = on_bytes
        self._pool = BufferPool(bytes=1, count=1)
        self._executor = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="tierfall-verify")

    def check_stored(self, store: CheckableStore, id: CheckpointId) -> CheckedCopy:
        """Check a copy on a stored tier."""
        check = _Check(self, store.name, id)
        error: BackendError | None = None
        try:
            check.stored(store)
        except BackendError as failure:
            error = failure
        if (check.damage or isinstance(error, KeyNotFoundError)) and _is_gone(store, id):
            return CheckedCopy(id=id, tier=store.name, gone=True)
        return check.result(error=error)

    def check_region(self, tier: str, id: CheckpointId, region: HostRegion) -> CheckedCopy:
        """Check a sealed image in host memory. Beside a living trainer a region that it reuses reads as damaged."""
        check = _Check(self, tier, id)
        check.region(region)
        return check.result(error=None)

    def pool_for(self, manifest: Manifest) -> BufferPool:
        """Return buffers that hold this image's chunks, as many as memory allows."""
        largest = max(manifest.data_start, manifest.chunk_bytes)
        if largest > self._pool.bytes:
            count = max(1, min(READ_THREADS, BUFFER_BYTES // largest))
            self._pool = BufferPool(bytes=largest, count=count)
        return self._pool

    def map(self, check: Callable[[int], None], indexes: Iterable[int]) -> None:
        """Run ``check`` for every chunk; raises the first failure once all have stopped."""
        futures = [self._executor.submit(check, index) for index in indexes]
        failures = [error for future in futures if (error := future.exception()) is not None]
        if failures:
            raise failures[0]

    def read(self, bytes: int) -> None:
        self._on_bytes(bytes)

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _is_gone(store: CheckableStore, id: CheckpointId) -> bool:
    """A drop removes the commit record first: without one there is no copy any more."""
    try:
        store.read_commit(id)
    except KeyNotFoundError:
        return True
    except TierfallError:
        return False
    return False


class _Check:
    """The check of one copy, while it goes on."""

    def __init__(self, verifier: Verifier, tier: str, id: CheckpointId) -> None:
        self._verifier = verifier
        self._tier = tier
        self._id = id
        self._lock = threading.Lock()
        self._commit: Commit | None = None
        self._bytes = 0
        self._chunks = 0
        self._foreign: tuple[str, ...] = ()
        self.damage: list[Damage] = []

    def result(self, *, error: TierfallError | None) -> CheckedCopy:
        found = sorted(self.damage, key=lambda d: (d.file, -1 if d.chunk is None else d.chunk))
        return CheckedCopy(
            id=self._id,
            tier=self._tier,
            bytes=self._bytes,
            chunks=self._chunks,
            commit=self._commit,
            damage=tuple(found),
            error=error,
            foreign=self._foreign,
        )

    # A copy on a stored tier -------------------------------------------------------------------------

    def stored(self, store: CheckableStore) -> None:
        sizes = {stored.key: stored.bytes for stored in store.files(self._id)}
        self._commit = self._try(names.COMMIT_NAME, lambda: store.read_commit(self._id))
        if self._commit is not None:
            self._check_names(self._commit, sizes)
            self._foreign = tuple(
                name
                for name in sizes
                if name != names.COMMIT_NAME
                and not name.startswith(f"{names.MARKS_FOLDER}/")
                and self._commit.file(name) is None
            )
        for shard in self._shards(sizes):
            image = StoredImage(store, self._id, shard)
            manifest = self._manifest(image, shard)
            if manifest is not None:
                self._check_image(image, manifest, sizes.get(names.shard_name(shard)))
        for name in sizes:
            if name.startswith(f"{names.MARKS_FOLDER}/"):
                self._check_mark(store, name)

    def _check_names(self, commit: Commit, sizes: dict[str, int]) -> None:
        """Hold the folder against the commit record: every rank named, every file there and as long as it says."""
        for rank in range(commit.world_size):
            shard = Shard(rank, commit.world_size)
            for name in (names.shard_name(shard), names.manifest_name(shard)):
                if commit.file(name) is None:
                    self._note(names.COMMIT_NAME, f"it does not name {name}")
        for file in commit.files:
            if file.name not in sizes:
                self._note(file.name, "it is missing")
            elif sizes[file.name] != file.bytes:
                self._note(
                    file.name,
                    f"it has {sizes[file.name]} bytes, the commit record says {file.bytes}",
                )

    def _shards(self, sizes: dict[str, int]) -> list[Shard]:
        """The shards that should be here; without a commit record, those that are."""
        named = sizes if self._commit is None else [file.name for file in self._commit.files]
        shards = {shard for name in named if (shard := names.parse_shard(name)) is not None}
        return sorted(shards, key=lambda shard: (shard.world_size, shard.rank))

    def _manifest(self, image: Image, shard: Shard) -> Manifest | None:
        name = names.manifest_name(shard)
        if self._commit is None:
            return self._try(name, lambda: self._lone_manifest(image, name))
        commit = self._commit
        if any(damage.file == name for damage in self.damage):
            return None
        return self._try(name, lambda: checked_manifest(image, commit, shard))

    def _lone_manifest(self, image: Image, name: str) -> Manifest:
        manifest = read_manifest(image.manifest_bytes(), what=f"{self._tier}: {name}")
        if manifest.line.checkpoint != self._id:
            raise IntegrityError(f"{self._tier}: {name} speaks of {manifest.line.checkpoint}")
        return manifest

    def _check_image(self, image: Image, manifest: Manifest, size: int | None) -> None:
        name = names.shard_name(manifest.shard)
        if size is None:
            if self._commit is None:
                self._note(name, "it is missing")
            return
        if size != manifest.image_bytes and self._commit is None:
            self._note(name, f"it has {size} bytes, its manifest says {manifest.image_bytes}")
        self._check_chunks(image, manifest, min(size, manifest.image_bytes))

    def _check_mark(self, store: CheckableStore, name: str) -> None:
        leaf = name.removeprefix(f"{names.MARKS_FOLDER}/")
        if not names.is_ours(name):
            self._foreign += (name,)
            return
        try:
            mark = store.read_mark(self._id, leaf)
        except KeyNotFoundError:
            return  # taken away meanwhile, as an unpin does
        except (IntegrityError, NotSupportedError) as error:
            self._note(name, self._said(name, error))
            return
        if (mark.name, mark.checkpoint) != (leaf, self._id):
            self._note(name, f"it is the mark {mark.name} of {mark.checkpoint}")

    # A copy in memory --------------------------------------------------------------------------------

    def region(self, region: HostRegion) -> None:
        self._commit = self._try(
            names.COMMIT_NAME, lambda: read_commit(region.commit(), what=names.COMMIT_NAME)
        )
        for number, data in enumerate(self._try(names.MARKS_FOLDER, region.marks) or ()):
            name = f"{names.MARKS_FOLDER}/{number}"
            self._try(name, partial(read_mark, data, what=name))
        for file in self._commit.files if self._commit else ():
            shard = names.parse_shard(file.name)
            if shard is None or file.digest is not None:
                continue
            image = RegionImage(self._tier, region)
            manifest = self._manifest(image, shard)
            if manifest is not None:
                self._check_chunks(image, manifest, len(region.image))

    # Chunks ------------------------------------------------------------------------------------------

    def _check_chunks(self, image: Image, manifest: Manifest, size: int) -> None:
        """Check every chunk that lies whole within ``size`` bytes; what is missing was noted before."""
        stop = threading.Event()
        pool = self._verifier.pool_for(manifest)

        def check(index: int) -> None:
            if stop.is_set():
                return
            start, end = manifest.chunk_range(index)
            try:
                with pool.take(end - start) as buffer:
                    self._check_chunk(manifest, index, image.read(start, end, buffer))
            except BaseException:
                stop.set()
                raise
            self._verifier.read(end - start)

        whole = [i for i in range(manifest.chunk_count) if manifest.chunk_range(i)[1] <= size]
        self._verifier.map(check, whole)

    def _check_chunk(self, manifest: Manifest, index: int, view: memoryview) -> None:
        name = names.shard_name(manifest.shard)
        if chunk_digest(view) != manifest.digests[index]:
            start, end = manifest.chunk_range(index)
            self._note(name, f"bytes {start} to {end} are not those that were written", index)
            return
        if index == 0:
            self._try(
                name, lambda: read_header(view, image_bytes=manifest.image_bytes, what=name), 0
            )
        with self._lock:
            self._chunks += 1
            self._bytes += len(view)

    # Noting ------------------------------------------------------------------------------------------

    def _try(self, file: str, read: Callable[[], T], chunk: int | None = None) -> T | None:
        try:
            return read()
        except KeyNotFoundError:
            self._note(file, "it is missing", chunk)
        except (IntegrityError, NotSupportedError) as error:
            self._note(file, self._said(file, error), chunk)
        return None

    def _said(self, file: str, error: TierfallError) -> str:
        """What an error says, without the name of the file that it is about."""
        text = str(error)
        for lead in (f"{file} of {self._id}: ", f"{file}: "):
            if lead in text:
                return text.partition(lead)[2]
        return text

    def _note(self, file: str, problem: str, chunk: int | None = None) -> None:
        with self._lock:
            self.damage.append(Damage(file=file, problem=problem, chunk=chunk))
