"""Reading by path: the files of a checkpoint that was saved by path, verified chunk by chunk from its fastest copies.

Each file is in the image of one rank, which the headers name. A file in storage that this process cannot access, such
as memory of another rank, is an error, never absence.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tierfall.config import load_config
from tierfall.core.copies.chunk_reader import ChunkReader, ReadTally
from tierfall.core.copies.images import Image
from tierfall.core.copies.shard_reader import OpenImage, find_images
from tierfall.core.format.catalog import KnownCheckpoint, Listing, merge
from tierfall.core.format.records import Manifest
from tierfall.core.image.header import ImageHeader, read_header
from tierfall.core.image.merge import merge_headers
from tierfall.core.image.raw_files import are_files, file_positions
from tierfall.core.types import keys
from tierfall.core.types.errors import IntegrityError, KeyNotFoundError, UnreachableError
from tierfall.core.types.values import CheckpointId, CopyState, Shard
from tierfall.integrations.path.names import TierPath
from tierfall.ops.reader import RunReader
from tierfall.run.by_path import PathSaves

_WRITER = re.compile(r"__([0-9]{1,9})_")
_BUFFER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadableTiers:
    """The tiers of one run for reading, fastest first: their listings, how to open their images, and what was read."""

    run: str
    listings: tuple[Listing, ...]
    open_image: OpenImage
    tally: ReadTally = field(default_factory=ReadTally)

    def checkpoints(self) -> dict[CheckpointId, KnownCheckpoint]:
        return {known.id: known for known in merge(self.listings) if not known.tombstoned}

    def find(self, where: TierPath) -> KnownCheckpoint:
        """Return the checkpoint that a path names. Raises KeyNotFoundError if all tiers were listed and none has it,
        else the error of a tier that was not listed."""
        known = self.checkpoints()
        fitting = [
            one
            for one in known.values()
            if one.id.step == where.step
            and (not one.abandoned if where.attempt is None else one.id.attempt == where.attempt)
        ]
        if fitting:
            return fitting[-1]
        self.check_read(where, "may hold it")
        there = ", ".join(str(id) for id in list(known)[-6:]) or "none"
        raise KeyNotFoundError(
            f"{where}: run {self.run!r} has no such checkpoint; there are: {there}"
        )

    def check_read(self, where: TierPath, doubt: str) -> None:
        """Raise the error of a tier that could not be read, with what is unknown because of it."""
        for listing in self.listings:
            if listing.error is not None:
                raise type(listing.error)(
                    f"{where}: tier {listing.tier} could not be read and {doubt}: {listing.error}"
                ) from listing.error


@contextmanager
def tiers_of(where: TierPath, saves: PathSaves | None, config: str) -> Iterator[ReadableTiers]:
    """Open the tiers of a path's run for reading: those of the open run, else those that a configuration names."""
    if saves is not None:
        yield _tiers_of_session(saves)
        return
    with RunReader(load_config(config, run=where.run)) as reader:
        open_image = reader.opener()
        yield ReadableTiers(run=where.run, listings=reader.list(), open_image=open_image)


def _tiers_of_session(saves: PathSaves) -> ReadableTiers:
    """The tiers of the run that this process saves. Of host memory, images count that are sealed on all ranks."""
    session = saves.session
    host = session.host.name
    regions = session.call(
        lambda: {
            (e.id, e.shard): e.region
            for e in session.coordinator.ledger.entries.values()
            if e.region is not None and e.region.sealed and e.state(host) is CopyState.SEALED
        }
    )
    whole = {id for id, _ in regions}
    listings = tuple(
        replace(x, copies=tuple(c for c in x.copies if c.id in whole)) if x.tier == host else x
        for x in session.list_now()
    )
    open_one = session.tiers.opener(regions)

    def open_image(tier: str, id: CheckpointId, shard: Shard) -> Image:
        image = open_one(tier, id, shard)
        return _SettledImage(image) if image.in_memory else image

    tally = session.new_tally()
    return ReadableTiers(run=session.run, listings=listings, open_image=open_image, tally=tally)


class _SettledImage:
    """An image in memory whose region may be reused: a copy of its bytes is verified and used."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self.tier = image.tier
        self.in_memory = image.in_memory
        self.manifest_bytes = image.manifest_bytes
        self.read_cached = image.read_cached

    def read(
        self, manifest: Manifest, index: int, buffer: memoryview, *, again: bool = False
    ) -> memoryview:
        view = self._image.read(manifest, index, buffer, again=again)
        settled = buffer[: view.nbytes]
        _copy(settled, view)
        return settled


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a checkpoint: bytes ``start`` to ``end`` of one rank's image."""

    shard: Shard
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.start


class CheckpointFiles:
    """The files of one checkpoint."""

    def __init__(self, checkpoint: KnownCheckpoint, tiers: ReadableTiers) -> None:
        """Raises IntegrityError if every commit record of it is damaged, else the error of one that could not be
        read."""
        if checkpoint.commit is None:
            raise checkpoint.unread or IntegrityError(
                f"every commit record of {checkpoint.id} is damaged"
            )
        self._checkpoint = checkpoint
        self._tiers = tiers
        self._tally = tiers.tally
        self._world_size = checkpoint.commit.world_size
        self._headers: dict[int, ImageHeader] = {}
        self._images: dict[int, tuple[ChunkReader, Manifest]] = {}

    def is_by_path(self) -> bool:
        """Return whether files were saved, not a state; the header of any rank shows it."""
        seen = (rank for rank in range(self._world_size) if self._is_seen(rank))
        return are_files(self._header(next(seen, 0)))

    def all(self) -> dict[str, StoredFile]:
        """Return the files of all ranks; none for a checkpoint that was not saved by path."""
        if not self.is_by_path():
            return {}
        return self._among(range(self._world_size))

    def find(self, name: str) -> StoredFile | None:
        """Return one file: first tries the rank in its name, or rank 0, then all."""
        if not self.is_by_path():
            return None
        writer = _WRITER.match(name)
        first = int(writer[1]) if writer else 0
        if first < self._world_size and (found := self._among([first]).get(name)) is not None:
            return found
        return self._among(range(self._world_size)).get(name)

    def open(self, file: StoredFile) -> io.RawIOBase:
        reader, manifest = self._image(file.shard.rank)
        return _PathStream(reader, manifest, file)

    def _among(self, ranks: Iterable[int]) -> dict[str, StoredFile]:
        # A rank that wrote no file has no entries to merge.
        headers = {rank: x for rank in ranks if (x := self._header(rank)).tensors}
        if not headers:
            return {}
        merged = merge_headers(headers, what=str(self._checkpoint.id), own=None)
        found = {}
        for name, position in file_positions(merged).items():
            for block in merged.blocks[position]:
                start = headers[block.rank].data_start
                shard = Shard(block.rank, self._world_size)
                found[name] = StoredFile(shard, start + block.start, start + block.end)
        return found

    def _image(self, rank: int) -> tuple[ChunkReader, Manifest]:
        shard = Shard(rank, self._world_size)
        if rank not in self._images:
            self._check_seen(rank)
            tiers = [x.tier for x in self._tiers.listings if x.tier in self._checkpoint.copies]
            images, manifest = find_images(
                self._checkpoint,
                tiers,
                self._tiers.open_image,
                shard,
                self._tally,
            )
            self._images[rank] = ChunkReader(images, manifest, self._tally), manifest
        return self._images[rank]

    def _check_seen(self, rank: int) -> None:
        """Raise UnreachableError if no tier that was listed has a rank's shard."""
        if not self._is_seen(rank):
            raise UnreachableError(
                f"rank {rank}'s part of {self._checkpoint.id} is on no tier that this process sees: it is in the "
                "memory of that rank, or on the disk of its node. Flush it to a tier that all nodes see"
            )

    def _is_seen(self, rank: int) -> bool:
        """Return whether the record of some copy names a rank's shard, or is damaged."""
        name = keys.manifest_name(Shard(rank, self._world_size))
        commits = [copy.commit for copy in self._checkpoint.copies.values()]
        return any(commit is None or commit.file(name) is not None for commit in commits)

    def _header(self, rank: int) -> ImageHeader:
        if rank not in self._headers:
            reader, manifest = self._image(rank)
            buffer = memoryview(bytearray(max(manifest.data_start, manifest.chunk_bytes)))
            self._headers[rank] = read_header(
                reader.read(0, buffer),
                image_bytes=manifest.image_bytes,
                what=f"checkpoint {manifest.lineage.checkpoint}",
            )
        return self._headers[rank]


class _PathStream(io.RawIOBase):
    """A file for reading, which caches the last chunk that was read."""

    def __init__(self, reader: ChunkReader, manifest: Manifest, file: StoredFile) -> None:
        self._reader = reader
        self._manifest = manifest
        self._file = file
        self._at = 0
        self._lock = threading.Lock()
        self._index = -1
        self._chunk = memoryview(b"")
        self._buffer: memoryview | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"negative seek position {base + offset}")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any, /) -> int:
        view = memoryview(target).cast("B")
        with self._lock:
            start = self._file.start + self._at
            end = min(start + view.nbytes, self._file.end)
            if end <= start:
                return 0
            at = start
            while at < end:
                index = self._index_of(at)
                low, high = self._manifest.chunk_range(index)
                part = self._read(index)[at - low : min(end, high) - low]
                _copy(view[at - start : at - start + part.nbytes], part)
                at += part.nbytes
            self._at += end - start
            return end - start

    def _index_of(self, at: int) -> int:
        return 1 + (at - self._manifest.data_start) // self._manifest.chunk_bytes

    def _read(self, index: int) -> memoryview:
        if index != self._index:
            if self._buffer is None:
                self._buffer = memoryview(bytearray(self._manifest.chunk_bytes))
            self._index = -1
            self._chunk = self._reader.read(index, self._buffer)
            self._index = index
        return self._chunk


class PathFile(io.BufferedReader):
    """An open file; ``size`` is in bytes, as in fsspec's files."""

    def __init__(self, stream: io.RawIOBase, size: int, close: Callable[[], None]) -> None:
        super().__init__(stream, _BUFFER_BYTES)
        self.size = size
        self._close = close

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._close()


def _copy(target: memoryview, source: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
