"""Writing one checkpoint to one stored tier from good copies on other tiers, for ``copy`` and ``verify --repair``.

The run's lock is held, so that no trainer of this machine runs. It writes on behalf of the newest attempt that any tier
knows: a newer one elsewhere fences it, as it fences a flush. It takes no attempt, so it fences nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tierfall.config import Config
from tierfall.core.compression.frames import frame_bytes_max
from tierfall.core.copies.chunk_reader import ChunkReader, ReadTally
from tierfall.core.copies.image_writes import begun_image, publish_image
from tierfall.core.copies.shard_reader import OpenImage, find_images
from tierfall.core.format.catalog import KnownCheckpoint, Listing
from tierfall.core.format.commit_files import plain
from tierfall.core.format.records import Attempt, Commit, Lineage, Manifest, Mark, geometry
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.runtime.threads import run_in_threads
from tierfall.core.scheduler.flush.lane import LaneLimits
from tierfall.core.types import keys
from tierfall.core.types.backend import put_object
from tierfall.core.types.errors import ConfigError, IntegrityError, TierfallError
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.ops.commands import check_folders, owned_folder
from tierfall.ops.reader import RunReader
from tierfall.setup.attempts import attempt_of, newest_attempt
from tierfall.setup.tiers import ANSWER_S, close_stores, open_stores
from tierfall.tiers.stored import StoredTier

OnBytes = Callable[[int], None]
_NOT_COPIED = frozenset({keys.TOMBSTONE_MARK, keys.ON_PEERS_MARK})


@contextmanager
def owned_reader(config: Config, command: str) -> Iterator[RunReader]:
    """Hold the run's lock, with its tiers open for reading. Raises LockError where a trainer of this machine is
    alive."""
    with owned_folder(config, command), RunReader(config) as reader:
        yield reader


@contextmanager
def open_writable(config: Config, tier: str) -> Iterator[StoredTier]:
    """Open one stored tier for writing, each call with a bound.

    Raises UnreachableError, before anything is created, where its folder is missing, and where it does not answer;
    ConfigError where it is read-only.
    """
    only = config.model_copy(update={"tiers": [t for t in config.tiers if t.name == tier]})
    if not only.written:
        raise ConfigError(f"tier {tier} is read_only: nothing is changed there")
    check_folders(only)
    stores, errors = open_stores(only, config.run, is_bounded=True)
    if tier in errors:
        raise errors[tier]
    try:
        yield stores[tier]
    finally:
        close_stores(stores, ANSWER_S)


def writing_attempt(
    reader: RunReader, listings: Sequence[Listing], line: Lineage, *, tier: str
) -> Attempt:
    """Return the attempt to write on behalf of: the newest that any tier knows, else the one that saved the checkpoint.

    The record on ``tier`` is read first. Raises the error of reading it where no tier's record can be read.
    """
    its_own_first = sorted(listings, key=lambda listing: listing.tier != tier)
    newest = newest_attempt(its_own_first, reader.stores)
    if newest is not None:
        return newest[0]
    return attempt_of(line)


def marks_of(reader: RunReader, checkpoint: KnownCheckpoint) -> tuple[Mark, ...]:
    """Return the marks that are copied with a checkpoint: those on any tier, but for a tombstone, and what concerns
    an image in memory alone."""
    return tuple(
        mark_of(reader, checkpoint, name) for name in sorted(checkpoint.marks - _NOT_COPIED)
    )


def mark_of(reader: RunReader, checkpoint: KnownCheckpoint, name: str) -> Mark:
    """Read a mark from a tier where it is good, or make a new one: only its existence counts."""
    for tier, copy in checkpoint.copies.items():
        if name not in copy.marks or tier not in reader.stores:
            continue
        try:
            mark = reader.stores[tier].read_mark(checkpoint.id, name)
        except TierfallError:
            continue
        if (mark.name, mark.checkpoint) == (name, checkpoint.id):
            return mark
    return Mark(name=name, checkpoint=checkpoint.id, wall_time_s=time.time(), reason="rewritten")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """Where a checkpoint is read: per shard its manifest and a reader of its copies; ``commit`` is the plain record."""

    commit: Commit
    shards: tuple[tuple[Manifest, ChunkReader], ...]
    tally: ReadTally

    @property
    def id(self) -> CheckpointId:
        return self.commit.lineage.checkpoint


def open_source(
    checkpoint: KnownCheckpoint, tiers: Sequence[str], open_image: OpenImage
) -> CheckpointSource:
    """Open the images of all shards of a checkpoint for reading from ``tiers``, fastest first.

    Raises IntegrityError where no tier has a good commit record, and as ``find_images`` does.
    """
    records = {t: c for t in tiers if (c := checkpoint.copies[t].commit) is not None}
    if not records:
        raise IntegrityError(f"no other tier holds a good commit record of {checkpoint.id}")
    commit = _united([plain(record) for record in records.values()])
    tally, opened = ReadTally(), []
    for rank in range(commit.world_size):
        shard = Shard(rank, commit.world_size)
        images, manifest = find_images(checkpoint, tiers, open_image, shard, tally)
        opened.append((manifest, ChunkReader(images, manifest, tally)))
    return CheckpointSource(commit=commit, shards=tuple(opened), tally=tally)


def _united(records: Sequence[Commit]) -> Commit:
    """Return a record with the files of all ranks: one that has them, or all records merged. That of a rank's memory,
    or of a node's own disk, names only its own files."""
    most = max(records, key=lambda record: len(record.files))
    if len(most.files) >= 2 * most.world_size:  # an image and a manifest each
        return most
    files = {file.name: file for record in records for file in record.files}
    return replace(most, files=tuple(files[name] for name in sorted(files)))


def write_files(
    store: StoredTier, limits: LaneLimits, source: CheckpointSource, on_bytes: OnBytes
) -> Commit:
    """Write images and records of all ranks, each complete before it is visible; return the commit record that names
    them.

    A file of the same name is replaced once the whole image was read and verified. Raises the error of the source or of
    the tier.
    """
    commit = source.commit
    for manifest, reader in source.shards:
        shard = manifest.shard
        with begun_image(store, source.id, shard, geometry(manifest), manifest.pieces) as writer:
            # The frames of a packed image are written in order.
            in_order = replace(limits, parallel=1) if store.is_packed else limits
            _write_chunks(manifest, reader, in_order, writer.write_chunks, on_bytes)
            commit = publish_image(store, writer, manifest, commit, id=source.id, shard=shard)
    return commit


def _write_chunks(
    manifest: Manifest,
    reader: ChunkReader,
    limits: LaneLimits,
    put: Callable[[int, int, memoryview], None],
    on_bytes: OnBytes,
) -> None:
    """Copy ranges of chunks, each as long as a part of the tier's objects."""
    runs = limits.runs(geometry(manifest))
    longest = max(_run_range(manifest, run)[1] - _run_range(manifest, run)[0] for run in runs)
    threads = max(1, min(limits.parallel, limits.budget_bytes // longest))
    pool = BufferPool(bytes=frame_bytes_max(longest), count=threads)

    def copy_range(number: int) -> None:
        start, end = _run_range(manifest, runs[number])
        with pool.lend_view(end - start) as buffer:
            put(runs[number][0], start, _read_run(manifest, reader, runs[number], buffer))
        on_bytes(end - start)

    run_in_threads(threads, copy_range, range(len(runs)))


def _run_range(manifest: Manifest, run: tuple[int, int]) -> tuple[int, int]:
    return manifest.chunk_range(run[0])[0], manifest.chunk_range(run[1] - 1)[1]


def _read_run(
    manifest: Manifest, reader: ChunkReader, run: tuple[int, int], buffer: memoryview
) -> memoryview:
    if run[1] - run[0] == 1:
        return reader.read(run[0], buffer)
    first_byte, end = _run_range(manifest, run)
    for index in range(*run):
        view = reader.read(index, buffer[manifest.chunk_range(index)[0] - first_byte :])
        assert view.obj is buffer.obj, "tiers that are open for reading only copy what they read"
    return buffer[: end - first_byte]


def discard_unfinished(store: StoredTier, run: str, id: CheckpointId) -> None:
    """Remove unfinished files that a killed process left in the folder of a step; the caller holds the run's lock."""
    store.backend.discard_unfinished(keys.step_prefix(run, id))


def replace_document(store: StoredTier, run: str, id: CheckpointId, name: str, data: bytes) -> None:
    """Replace a document in the folder of a step atomically."""
    put_object(store.backend, keys.step_prefix(run, id) + name, data)
