"""Workers: a few threads per stored tier, which make every blocking call that moves, deletes or checks a copy.

A worker decides nothing. Each task has exactly one outcome: an exception that a task raises is returned as its outcome.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tierfall.core.capture.copier import chunk_digest
from tierfall.core.compression.codec import frame_bytes_max
from tierfall.core.copies.image_writes import ImageUpload, publish_image
from tierfall.core.copies.images import (
    Image,
    StoredImage,
    check_digest,
    checked_manifest,
    read_chunk,
    unpacked,
)
from tierfall.core.flush.coordinator import Coordinator
from tierfall.core.flush.tasks import (
    AbortShard,
    AddDecided,
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
    ReadDecided,
    Side,
    StoreCall,
    Task,
    TaskStore,
    Uploaded,
)
from tierfall.core.format.commit_files import files_of, image_file, shards_of
from tierfall.core.format.decided import FENCE_VALID_S, DecidedList
from tierfall.core.format.documents import read_twice
from tierfall.core.format.records import (
    Attempt,
    Commit,
    Manifest,
    parse_manifest,
)
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.runtime.rate_limit import waited_s
from tierfall.core.types import events
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    KeyNotFoundError,
    TierfallError,
    release_frames,
)
from tierfall.core.types.values import CheckpointId, Shard

logger = logging.getLogger("tierfall")


class _SourceError(Exception):
    """Reading the source failed; ``__cause__`` is the error to report."""


class TaskRunner:
    """Carries out the tasks of all workers.

    Chunks that are read from a stored tier pass through a buffer of the target tier's pool, in ``pools``. They stay
    there until they are written, so that a slow tier blocks no other.

    ``attempt`` returns the attempt of this process: a task that writes, deletes or decides raises FencedError where its
    tier has a record of a newer one.
    """

    def __init__(
        self,
        stores: Mapping[str, TaskStore],
        pools: Mapping[str, BufferPool],
        attempt: Callable[[], Attempt],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stores = stores
        self._clock = clock
        self._pools = pools
        self._attempt = attempt
        self._images: dict[tuple[str, str, CheckpointId], Image] = {}
        self._images_lock = threading.Lock()
        self._conditions = Conditions()

    def run(self, task: Task) -> Outcome:
        """Carry out a task and return its result or its exception."""
        began, paced = self._clock(), waited_s()
        try:
            value = _HANDLERS[type(task)](self, task, self._stores[task.tier])
        except _SourceError as error:
            release_frames(error)
            return Outcome(task=task, error=error.__cause__, side=Side.SOURCE)
        except BaseException as error:  # noqa: BLE001 - the coordinator decides what follows
            release_frames(error)
            return Outcome(task=task, error=error)
        return Outcome(
            task=task,
            value=None if isinstance(task, CopyRun) else value,
            seconds=self._clock() - began,
            throttled_s=waited_s() - paced,
            read_s=value if isinstance(task, CopyRun) else 0.0,
        )

    def _drop(self, task: DeleteCopy, store: TaskStore) -> Any:
        if not task.unfinished:
            if task.stay:
                store.decided.read()  # another process may just have found a copy damaged that is to stay
            _check_whole(task, store)
            return store.delete(
                task.id,
                attempt=self._attempt(),
                known=task.known,
                next_latest=task.next_latest,
            )
        commit = _committed_with(store, task.id, task.shard)
        if commit is not None:  # the commit succeeded, its response was lost
            store.sync_commit(task.id)
            return commit
        own = None if task.shard is None else _own_shard_only(task.shard)
        return store.discard(task.id, own, attempt=self._attempt())

    def _add_decided(self, task: AddDecided, store: TaskStore) -> DecidedList:
        """Add an entry, and read the list: another process may have given a higher number."""
        doing = f"entry {task.entry.word} of {task.entry.checkpoint}"
        store.check_newest(self._attempt(), doing=doing)
        store.decided.add(task.entry)
        return store.decided.read(max_age_s=FENCE_VALID_S)

    def _read_decided(self, task: ReadDecided, store: TaskStore) -> DecidedList:
        return store.decided.read()

    def _open(
        self, task: OpenShard, store: TaskStore
    ) -> Commit | tuple[ImageUpload, Manifest | None]:
        """Create a writer; or return the commit record of a copy whose commit succeeded, but whose response was lost.

        The fence is checked first: files of that name may be another process's, which must not change.
        """
        attempt = self._attempt()
        store.check_begin(attempt)
        if (commit := _committed_before(task, store)) is not None:
            store.sync_commit(task.id)
            return commit
        manifest = None
        cut, pieces = task.geometry, task.pieces
        if task.source is not None:
            manifest = self._read_manifest(task, task.source)
            cut, pieces = manifest.geometry(), manifest.pieces
        assert cut is not None
        assert pieces is not None
        if task.leftover and not store.is_committed(task.id):
            store.discard(task.id, _own_shard_only(task.shard), attempt=attempt)
        if task.room_bytes:
            store.check_room(task.room_bytes, task.id)
        earlier = task.attempt_id if task.attempt_id != attempt.id else None
        writer = store.create_shard(task.id, task.shard, cut, pieces, attempt_id=earlier)
        return writer, manifest

    def _read_manifest(self, task: OpenShard, source: CopySource) -> Manifest:
        what = f"manifest of {task.id} on {source.tier}"

        def read() -> Manifest:
            if source.region is not None:
                data = source.region.manifest()
            else:
                data = self._stores[source.tier].read_manifest(task.id, task.shard)
            return parse_manifest(data, what=what)

        try:
            return read_twice(read)
        except TierfallError as error:
            raise _SourceError from error

    def _copy(self, task: CopyRun, store: TaskStore) -> float:
        """Copy a chunk range; return the seconds of reading it from a stored tier, rate-limit waits excluded."""
        if task.writer.has_chunk(task.first):  # a failed attempt wrote that far
            task.writer.flush()
            return 0.0
        if task.source.region is not None:
            view = task.source.region.image[task.start : task.end]
            if task.manifest is not None:
                _check_in_memory(task, task.manifest, view)
            task.writer.write_chunks(task.first, task.start, view)
            return 0.0
        began, paced = self._clock(), waited_s()
        length = task.end - task.start
        with self._pools[task.tier].lend_view(frame_bytes_max(length)) as buffer:
            self._read(task, buffer)
            read_s = self._clock() - began - (waited_s() - paced)
            task.writer.write_chunks(task.first, task.start, buffer[:length])
        return read_s

    def _read(self, task: CopyRun, buffer: memoryview) -> None:
        assert task.manifest is not None
        try:
            image = self._image(task, task.manifest)
            for index in range(task.first, task.stop):
                start = task.manifest.chunk_range(index)[0]
                # again=True bypasses caches: a bad cache entry must not make a good copy count as damaged
                read_chunk(image, task.manifest, index, buffer[start - task.start :], again=True)
        except KeyNotFoundError as error:
            raise _SourceError from self._missing(task, error)
        except TierfallError as error:
            raise _SourceError from error

    def _missing(self, task: CopyRun, error: KeyNotFoundError) -> TierfallError:
        """Return the error for a missing file of a source: it is damage if the commit record is there."""
        try:
            is_committed = self._stores[task.source.tier].is_committed(task.id)
        except TierfallError as failure:
            return failure
        if is_committed:
            return IntegrityError(f"{error}, and its commit record is there")
        return error

    def _image(self, task: CopyRun, manifest: Manifest) -> Image:
        """Return the source image; its seek table is read once per copy."""
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

    def _abort(self, task: AbortShard, store: TaskStore) -> None:
        self._forget(task.tier)
        task.writer.abort()

    def _open_check(self, task: OpenCheck, store: TaskStore) -> tuple[tuple[Image, Manifest], ...]:
        commit = store.read_commit(task.id)
        opened = []
        for shard in shards_of(commit)[task.turn :: task.of]:
            image = StoredImage(store, task.id, shard)
            manifest = checked_manifest(image, commit, shard)
            opened.append((unpacked(image, commit, manifest), manifest))
        return tuple(opened)

    def _check_chunk(self, task: CheckChunk, store: TaskStore) -> None:
        start, end = task.manifest.chunk_range(task.index)
        with self._pools[task.tier].lend_view(frame_bytes_max(end - start)) as buffer:
            read_chunk(task.image, task.manifest, task.index, buffer, again=True)

    def _finish(self, task: FinishCopy, store: TaskStore) -> Uploaded:
        # publishing replaces files of that name, perhaps some that a newer attempt has committed
        store.check_newest(self._attempt(), doing=f"flush of {task.id}")
        try:
            commit = publish_image(
                store, task.writer, task.manifest, task.commit, id=task.id, shard=task.shard
            )
        except BaseException as error:
            # after a retryable error the next attempt continues from what is there
            if not getattr(error, "retryable", False):
                self._retract(task, store)
            raise
        self._forget(task.tier)
        return Uploaded(files=files_of(commit, task.shard))

    def _commit(self, task: CommitCopy, store: TaskStore) -> Commit:
        commit = task.commit
        store.commit(commit, attempt=self._attempt())
        try:
            if task.name_latest:
                store.write_latest(task.id)
                self._conditions.end(task.tier, "%s: 'latest' is written again", task.tier)
        except BackendError as error:  # the checkpoint is committed all the same
            text = "%s: could not write 'latest': %s"
            self._conditions.report(task.tier, logging.WARNING, text, task.tier, error)
        return commit

    def _retract(self, task: FinishCopy, store: TaskStore) -> None:
        """Delete the published files of an image whose manifest could not be written, to free their room."""
        try:
            if not store.is_committed(task.id):
                store.discard(task.id, _own_shard_only(task.shard), attempt=self._attempt())
        except TierfallError as error:
            logger.warning(
                "%s: files of the uncommitted copy of %s remain for now: %s",
                task.tier,
                task.id,
                error,
            )


def _committed_before(task: OpenShard, store: TaskStore) -> Commit | None:
    """Return the commit record of a copy that has this rank's image already. Raises IntegrityError for another
    checkpoint of that name."""
    commit = _committed_with(store, task.id, None) if store.is_committed(task.id) else None
    if commit is not None and commit.lineage.attempt_id != task.attempt_id:
        raise IntegrityError(
            f"flush of {task.id} to {task.tier}: another checkpoint of that name is committed there; it is not changed"
        )
    return commit if commit is not None and image_file(commit, task.shard) else None


def _committed_with(store: TaskStore, id: CheckpointId, shard: Shard | None) -> Commit | None:
    """Return the commit record of a checkpoint, if it has one that names the image of ``shard`` (None: any). None only
    while the tier's id can be read."""
    try:
        commit = store.written_commit(id)
    except KeyNotFoundError:
        return None
    return commit if shard is None or image_file(commit, shard) else None


def _check_in_memory(task: CopyRun, manifest: Manifest, view: memoryview) -> None:
    for index in range(task.first, task.stop):
        start, end = manifest.chunk_range(index)
        digest = chunk_digest(view[start - task.start : end - task.start])
        try:
            check_digest(task.source.tier, manifest, index, digest)
        except IntegrityError as error:
            raise _SourceError from error


def _own_shard_only(shard: Shard) -> Shard | None:
    """Return whose files may be deleted from a checkpoint's folder; None: all, as no other rank writes there."""
    return shard if shard.world_size > 1 else None


def _check_whole(task: DeleteCopy, store: TaskStore) -> None:
    """Raise NotWholeError if a copy that is to stay lacks files (a person or a purge removed them) or cannot be
    looked at."""
    damaged = {}
    for id in task.stay:
        try:
            found = store.find_copy(id)
            if found is not None and found.unread is not None:
                raise found.unread
        except TierfallError as error:
            raise NotWholeError(
                {}, f"a copy that is to stay could not be looked at: {error}"
            ) from error
        if found is None:
            damaged[id] = (f"{store.name}: {id} is gone: it has no commit record any more", False)
        elif found.damage is not None:
            damaged[id] = (str(found.damage), True)
    if damaged:
        raise NotWholeError(damaged)


_HANDLERS: dict[type[Any], Callable[[TaskRunner, Any, TaskStore], Any]] = {
    OpenShard: TaskRunner._open,
    CopyRun: TaskRunner._copy,
    FinishCopy: TaskRunner._finish,
    CommitCopy: TaskRunner._commit,
    AbortShard: TaskRunner._abort,
    DeleteCopy: TaskRunner._drop,
    AddDecided: TaskRunner._add_decided,
    StoreCall: lambda runner, task, store: task.call(store, runner._attempt()),
    ReadDecided: TaskRunner._read_decided,
    OpenCheck: TaskRunner._open_check,
    CheckChunk: TaskRunner._check_chunk,
}
"""The method that carries out a type of task; its last argument is the store of the task's tier."""


class Workers:
    """The threads of the workers, and the coordinator's thread. Each tier has a queue of tasks."""

    def __init__(self, runner: TaskRunner, threads: Mapping[str, int], *, name: str) -> None:
        self._runner = runner
        self._queues: dict[str, queue.SimpleQueue[Task | None]] = {
            tier: queue.SimpleQueue() for tier in threads
        }
        self._threads = threads
        self._name = name
        self._running: list[threading.Thread] = []
        self._coordinator: Coordinator | None = None
        self._first: Callable[[], object] = bool
        self._stopping = threading.Event()
        self.failure: BaseException | None = None

    @property
    def stopping(self) -> bool:
        """Return whether the threads were told to end."""
        return self._stopping.is_set()

    @property
    def running(self) -> bool:
        """Return whether threads were started."""
        return bool(self._running)

    def submit(self, task: Task) -> None:
        self._queues[task.tier].put(task)

    def start(self, coordinator: Coordinator, *, first: Callable[[], object] = bool) -> None:
        """Start all threads. The coordinator's thread calls ``first`` before it does anything else."""
        self._coordinator, self._first = coordinator, first
        for tier, count in self._threads.items():
            for number in range(count):
                self._spawn(self._work, f"{tier}-{number}", tier)
        self._spawn(self._coordinate, "coordinator")

    def _spawn(self, target: Callable[..., None], name: str, *args: object) -> None:
        # daemon: an exit without close must not hang; sealed images are in memory that outlives the process
        thread = threading.Thread(
            target=target, args=args, name=f"tierfall-{self._name}-{name}", daemon=True
        )
        thread.start()
        self._running.append(thread)

    def _work(self, tier: str) -> None:
        assert self._coordinator is not None
        while (task := self._queues[tier].get()) is not None:
            self._coordinator.post(self._runner.run(task))
            del task  # its views of memory must not outlive the mapping while this thread sleeps

    def _coordinate(self) -> None:
        assert self._coordinator is not None
        try:
            self._first()
            while not self._stopping.is_set():
                next_s = self._coordinator.step(time.monotonic())
                if self._stopping.is_set():
                    return
                self._coordinator.wait_for_event(
                    None if next_s is None else max(0.0, next_s - time.monotonic())
                )
        except BaseException as error:
            self.failure = error
            self._coordinator.emit(events.OperationFailed, doing="coordinate", reason=error)
            logger.exception("the coordinator stopped: nothing is flushed any more")
            stopped = TierfallError(
                f"the coordinator stopped, nothing is flushed any more: {error!r}"
            )
            stopped.__cause__ = error
            self._coordinator.stop(stopped)

    def stop(self, wake: Callable[[], None], timeout_s: float) -> bool:
        """End all threads once their present tasks are done; ``wake`` posts any event, to wake the coordinator.

        Returns False if a thread still waits for an unresponsive tier after ``timeout_s``; it is abandoned.
        """
        self._stopping.set()
        wake()
        for tier, count in self._threads.items():
            for _ in range(count):
                self._queues[tier].put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._running:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = [thread.name for thread in self._running if thread.is_alive()]
        if hanging:
            logger.warning(
                "close: these threads still wait for a tier and are abandoned: %s",
                ", ".join(hanging),
            )
        return not hanging
