"""Carrying out tasks: every blocking call that moves a copy, on whatever thread asks.

It decides nothing. Whatever a task raises comes back as its outcome.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from tierfall.core.capture.copier import chunk_digest
from tierfall.core.compression.frames import frame_bytes_max
from tierfall.core.copies.image_writes import ImageUpload, WritableStore, publish_image
from tierfall.core.copies.images import (
    Image,
    ReadableStore,
    StoredImage,
    checked_manifest,
    unpacked,
)
from tierfall.core.format.catalog import FoundCopy, Listing
from tierfall.core.format.commit_files import files_of, shards_of
from tierfall.core.format.records import (
    Attempt,
    Commit,
    Manifest,
    Mark,
    geometry,
    read_manifest,
)
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.runtime.rate_limit import waited_s
from tierfall.core.scheduler.index_writer import IndexWriter
from tierfall.core.scheduler.ledger.tasks import (
    AbortShard,
    ChangeMark,
    CheckChunk,
    CommitCopy,
    CopyRun,
    CopySource,
    DeleteCopy,
    FinishCopy,
    NotWholeError,
    OpenCheck,
    OpenShard,
    Outcome,
    ReadCommit,
    ReadMarks,
    RecordStart,
    Side,
    Task,
    Uploaded,
)
from tierfall.core.scheduler.shared_reads import SharedReads
from tierfall.core.types.errors import (
    BackendError,
    ConfigError,
    IntegrityError,
    KeyNotFoundError,
    TierfallError,
)
from tierfall.core.types.values import CheckpointId, Shard

logger = logging.getLogger("tierfall")


class TaskStore(ReadableStore, WritableStore, Protocol):
    """A stored tier, as workers use it. All methods block."""

    def list(self) -> Listing: ...

    def read_commit(self, checkpoint: CheckpointId) -> Commit: ...

    def holds(self, checkpoint: CheckpointId) -> bool: ...

    def look(self, checkpoint: CheckpointId) -> FoundCopy | None: ...

    def settle(self, checkpoint: CheckpointId) -> None: ...

    def record_start(self, commit: Commit, writer: Attempt | None = None) -> None: ...

    def check_begin(self, attempt: Attempt) -> None: ...

    def check_publish(
        self, checkpoint: CheckpointId, shard: Shard, *, attempt: Attempt
    ) -> None: ...

    def check_newest(self, attempt: Attempt | None, *, doing: str = ...) -> None: ...

    def read_index(self, checkpoint: CheckpointId) -> bytes: ...

    def write_index(self, checkpoint: CheckpointId, data: bytes) -> None: ...

    def commit(
        self,
        commit: Commit,
        *,
        attempt: Attempt,
        marks: tuple[Mark, ...] = (),
        repairs: bool = False,
    ) -> None: ...

    def name_latest(self, checkpoint: CheckpointId) -> None: ...

    def add_mark(self, mark: Mark) -> None: ...

    def remove_mark(self, checkpoint: CheckpointId, name: str) -> None: ...

    def read_marks(
        self, checkpoints: Iterable[CheckpointId]
    ) -> dict[CheckpointId, frozenset[str]]: ...

    def drop(
        self,
        checkpoint: CheckpointId,
        *,
        attempt: Attempt | None,
        tombstoned: bool = False,
        next_latest: CheckpointId | None = None,
        void: bool = False,
    ) -> frozenset[str]: ...

    def discard(
        self, checkpoint: CheckpointId, shard: Shard | None = None, *, attempt: Attempt | None
    ) -> None: ...


class _SourceError(Exception):
    """The failure came from where the bytes were read; the cause is what counts."""


class TaskRunner:
    """Carries out one task at a time, on the calling thread.

    What a tier reads from another one goes through a buffer of its own pool, in ``pools``, or through that of a tier
    which reads the same (``shared_reads``), and stays there while it is written: a slow tier holds up nobody else.

    ``attempt`` says on whose behalf: a task that writes, deletes or marks ends in FencedError where its tier knows a
    newer one. None: it is a person's order that is carried out, by a process that must not commit. ``complete``
    adds to the record of several ranks what other machines have uploaded to a tier; it may raise.
    """

    def __init__(
        self,
        stores: Mapping[str, TaskStore],
        pools: Mapping[str, BufferPool],
        attempt: Callable[[], Attempt | None],
        *,
        complete: Callable[[Commit, str], Commit] = lambda commit, tier: commit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stores = stores
        self._complete = complete
        self._clock = clock
        self._pools = pools
        self._shared = SharedReads(pools)
        self._attempt = attempt
        self._images: dict[tuple[str, str, CheckpointId], Image] = {}
        self._images_lock = threading.Lock()
        self._indexer = IndexWriter()

    def run(self, task: Task) -> Outcome:
        """Return what became of a task; never raises what the task raised."""
        began, paced = self._clock(), waited_s()
        try:
            value = self._perform(task)
        except _SourceError as error:
            return Outcome(task=task, error=error.__cause__, side=Side.SOURCE)
        except BaseException as error:  # noqa: BLE001 - every failure is the coordinator's to weigh
            return Outcome(task=task, error=error)
        return Outcome(
            task=task,
            value=None if isinstance(task, CopyRun) else value,
            seconds=self._clock() - began,
            paced_s=waited_s() - paced,
            read_s=value if isinstance(task, CopyRun) else 0.0,
        )

    def _perform(self, task: Task) -> Any:
        store = self._stores[task.tier]
        match task:
            case OpenShard():
                return self._open(task, store)
            case CopyRun():
                return self._copy(task)
            case FinishCopy():
                return self._finish(task, store)
            case CommitCopy():
                return self._commit(task, store)
            case AbortShard():
                self._forget(task.tier)
                return task.writer.abort()
            case DeleteCopy():
                return self._drop(task, store)
            case ChangeMark():
                return self._change_mark(task, store)
            case RecordStart():
                store.check_newest(self._writer(), doing=f"record of attempt {task.id.attempt}")
                return store.record_start(task.commit, self._writer())
            case _:
                return self._look(task, store)

    def _look(self, task: ReadMarks | ReadCommit | OpenCheck | CheckChunk, store: TaskStore) -> Any:
        match task:
            case ReadMarks():
                _check_whole(task, store)
                return store.read_marks(task.ids)
            case ReadCommit():
                commit = store.read_commit(task.id)
                store.settle(task.id)
                return commit
            case OpenCheck():
                return _open_check(task, store)
            case CheckChunk():
                return self._check_chunk(task)

    def _writer(self) -> Attempt:
        attempt = self._attempt()
        if attempt is None:
            raise ConfigError("this process has no attempt and must not commit")
        return attempt

    def _drop(self, task: DeleteCopy, store: TaskStore) -> Any:
        if not task.unfinished:
            _check_whole(task, store)
            return store.drop(
                task.id,
                attempt=self._attempt(),
                tombstoned=task.tombstoned,
                next_latest=task.next_latest,
                void=task.void,
            )
        if store.holds(task.id):
            commit = store.read_commit(task.id)  # the answer to its commit was lost
            store.settle(task.id)
            return commit
        return store.discard(task.id, task.shard, attempt=self._attempt())

    def _change_mark(self, task: ChangeMark, store: TaskStore) -> None:
        store.check_newest(
            self._attempt(), doing=f"mark {task.mark.name!r} of {task.mark.checkpoint}"
        )
        if task.remove:
            store.remove_mark(task.mark.checkpoint, task.mark.name)
        else:
            store.add_mark(task.mark)

    def _open(
        self, task: OpenShard, store: TaskStore
    ) -> Commit | tuple[ImageUpload, Manifest | None]:
        """Begin an image; or return the commit record of a copy whose commit succeeded, though its answer was lost.

        The fence comes first: what another process writes into a folder of that name must not be touched.
        """
        store.check_begin(self._writer())
        if task.repairs:
            _check_same(task, store)
        elif store.holds(task.id):
            commit = store.read_commit(task.id)
            if commit.line.attempt_id != task.attempt_id:
                raise IntegrityError(
                    f"flush of {task.id} to {task.tier}: another checkpoint of that name is committed there; it is "
                    "left as it is"
                )
            store.settle(task.id)
            return commit
        manifest = None
        cut, pieces = task.geometry, task.pieces
        if task.source is not None:
            manifest = self._read_manifest(task, task.source)
            cut, pieces = geometry(manifest), manifest.pieces
        assert cut is not None
        assert pieces is not None
        if task.leftover:
            store.discard(task.id, _own_shard_only(task.shard), attempt=self._writer())
        return store.create_shard(task.id, task.shard, cut, pieces), manifest

    def _read_manifest(self, task: OpenShard, source: CopySource) -> Manifest:
        what = f"manifest of {task.id} on {source.tier}"
        try:
            if source.region is not None:
                data = source.region.manifest()
            else:
                data = self._stores[source.tier].read_manifest(task.id, task.shard)
            return read_manifest(data, what=what)
        except TierfallError as error:
            raise _SourceError from error

    def _copy(self, task: CopyRun) -> float:
        """Bring a run; return the seconds that reading it from a stored tier took, without waits for a pace."""
        if task.writer.took(task.first):  # a try that failed came that far
            task.writer.send()
            return 0.0
        if task.source.region is not None:
            view = task.source.region.image[task.start : task.end]
            if task.manifest is not None:
                for index in range(task.first, task.stop):
                    start, end = task.manifest.chunk_range(index)
                    self._check(task, index, view[start - task.start : end - task.start])
            task.writer.put(task.first, task.start, view)
            return 0.0
        began, paced = self._clock(), waited_s()
        with self._shared.lend(task, lambda buffer: self._read(task, buffer)) as view:
            read_s = self._clock() - began - (waited_s() - paced)
            task.writer.put(task.first, task.start, view)
        return read_s

    def _read(self, task: CopyRun, buffer: memoryview) -> None:
        assert task.manifest is not None
        try:
            image = self._image(task, task.manifest)
            for index in range(task.first, task.stop):
                start = task.manifest.chunk_range(index)[0]
                # from the medium itself: what a cache says of a copy must not count against it
                view = image.read(task.manifest, index, buffer[start - task.start :], again=True)
                self._check(task, index, view)
        except KeyNotFoundError as error:
            raise _SourceError from self._missing(task, error)
        except TierfallError as error:
            raise _SourceError from error

    def _missing(self, task: CopyRun, error: KeyNotFoundError) -> TierfallError:
        """Return what it means that a file of a source is not there: damage where its commit record still is."""
        try:
            there = self._stores[task.source.tier].holds(task.id)
        except TierfallError as failure:
            return failure
        return IntegrityError(f"{error}, and its commit record is there") if there else error

    def _image(self, task: CopyRun, manifest: Manifest) -> Image:
        """Return the image to read from: how it is packed is read once for a copy."""
        key = (task.tier, task.source.tier, task.id)
        with self._images_lock:
            known = self._images.get(key)
        if known is not None:
            return known
        store = self._stores[task.source.tier]
        image = StoredImage(store, task.id, task.shard)
        found = unpacked(image, store.read_commit(task.id), manifest)
        with self._images_lock:
            return self._images.setdefault(key, found)

    def _forget(self, tier: str) -> None:
        with self._images_lock:
            for key in [key for key in self._images if key[0] == tier]:
                del self._images[key]

    def _check(self, task: CopyRun, index: int, view: memoryview) -> None:
        assert task.manifest is not None
        if chunk_digest(view) != task.manifest.digests[index]:
            raise _SourceError from IntegrityError(
                f"flush of {task.id} to {task.tier}: chunk {index} read from {task.source.tier} does not match "
                "its digest"
            )

    def _check_chunk(self, task: CheckChunk) -> None:
        start, end = task.manifest.chunk_range(task.index)
        with self._pools[task.tier].take(frame_bytes_max(end - start)) as buffer:
            for _ in range(2):  # a bit that flips on its way is no damage of the copy
                view = task.image.read(task.manifest, task.index, buffer, again=True)
                if chunk_digest(view) == task.manifest.digests[task.index]:
                    return
        raise IntegrityError(
            f"{task.tier}: chunk {task.index} of {task.id} does not match its digest"
        )

    def _finish(self, task: FinishCopy, store: TaskStore) -> Commit | Uploaded:
        # what is published replaces files of that name, perhaps of what a newer attempt has committed
        store.check_publish(task.id, task.shard, attempt=self._writer())
        try:
            commit = publish_image(
                store, task.writer, task.manifest, task.commit, id=task.id, shard=task.shard
            )
            if not task.land_only:
                self._write_commit(commit, task, store)
        except BaseException as error:
            if not (task.repairs or getattr(error, "retryable", False)):
                self._retract(task, store)
            raise  # else all that is there serves the next try
        self._forget(task.tier)
        if task.land_only:
            return Uploaded(files=files_of(commit, task.shard))
        self._name_latest(task, store)
        return commit

    def _commit(self, task: CommitCopy, store: TaskStore) -> Commit:
        commit = self._complete(task.commit, task.tier)
        if task.tables and (task.repairs or not store.holds(task.id)):
            # an index that is named stays as it is
            commit = self._indexer.leave(store, commit, task.tables)
        self._write_commit(commit, task, store)
        self._name_latest(task, store)
        return commit

    def _write_commit(
        self, commit: Commit, task: FinishCopy | CommitCopy, store: TaskStore
    ) -> None:
        store.commit(commit, attempt=self._writer(), marks=task.marks, repairs=task.repairs)

    def _name_latest(self, task: FinishCopy | CommitCopy, store: TaskStore) -> None:
        if not task.name_latest:
            return
        try:
            store.name_latest(task.id)
        except BackendError as error:  # a hint for people; the checkpoint is committed without it
            logger.warning("%s: could not write 'latest': %s", task.tier, error)

    def _retract(self, task: FinishCopy, store: TaskStore) -> None:
        """Remove what was published of a copy that could not be committed, so that it takes no room."""
        try:
            if not store.holds(task.id):
                store.discard(task.id, _own_shard_only(task.shard), attempt=self._writer())
        except TierfallError as error:
            logger.warning("%s: leftovers of %s stay for now: %s", task.tier, task.id, error)


def _own_shard_only(shard: Shard) -> Shard | None:
    """Whose files may go from a folder: all, where no other rank writes there."""
    return shard if shard.world_size > 1 else None


def _check_whole(task: DeleteCopy | ReadMarks, store: TaskStore) -> None:
    """Raise NotWholeError where a copy that a deletion relies on lacks files by now, as a person or a purge removed
    them, or could not be looked at."""
    damaged = {}
    for id in task.relies_on:
        try:
            found = store.look(id)
        except TierfallError as error:
            raise NotWholeError(
                {}, f"what that relies on could not be looked at: {error}"
            ) from error
        if found is None:
            damaged[id] = (
                f"{store.name}: {id} is not there any more: its commit record has gone",
                False,
            )
        elif found.damage is not None:
            damaged[id] = (str(found.damage), True)
    if damaged:
        raise NotWholeError(damaged)


def _open_check(task: OpenCheck, store: TaskStore) -> tuple[tuple[Image, Manifest], ...]:
    commit = store.read_commit(task.id)
    opened = []
    for shard in shards_of(commit)[task.turn :: task.of]:
        image = StoredImage(store, task.id, shard)
        manifest = checked_manifest(image, commit, shard)
        opened.append((unpacked(image, commit, manifest), manifest))
    return tuple(opened)


def _check_same(task: OpenShard, store: TaskStore) -> None:
    """Raise IntegrityError where what is committed there is another checkpoint: by its commit record, or, where that
    cannot be read, by a manifest that can."""
    refused = IntegrityError(
        f"repair of {task.id} on {task.tier}: another checkpoint of that name lies there; it is left as it is"
    )
    try:
        if store.read_commit(task.id).line.attempt_id != task.attempt_id:
            raise refused
        return
    except (IntegrityError, KeyNotFoundError) as error:
        if error is refused:
            raise
    try:
        data = store.read_manifest(task.id, task.shard)
        line = read_manifest(data, what=f"manifest of {task.id} on {task.tier}").line
    except (IntegrityError, KeyNotFoundError):
        return
    if line.attempt_id != task.attempt_id or line.checkpoint != task.id:
        raise refused
