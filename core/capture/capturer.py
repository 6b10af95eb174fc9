"""The capturer: one thread that turns the state into images, and the waits that keep the state from changing meanwhile.

It owns the order of a capture's ends: copied (the training may change the state), hashed, compared with what was read
at save, past the barrier, sealed. It tells the coordinator by events and the handle; it knows no tiers.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from tierfall.core.capture.barrier import Barrier, ignore_step
from tierfall.core.capture.events import CaptureFailed, CaptureSealed
from tierfall.core.capture.lazy_evidence import LazyEvidence
from tierfall.core.capture.snapshot import Snapshot
from tierfall.core.capture.storage_watch import StorageWatch
from tierfall.core.format.commit_files import raw_files
from tierfall.core.format.records import Commit, Manifest
from tierfall.core.types.errors import CaptureError, StateChangedError
from tierfall.core.types.values import CheckpointId

logger = logging.getLogger("tierfall")

SETTLED_S = 1.0
"""So long after an image is complete no write to the state that began before can be under way: a kernel on the CPU is
over by then. An image for which no barrier has come is sealed then."""


class Capturer:
    """Captures one snapshot after another. ``begin`` and the waits are called by the training thread only,
    ``begin_settled`` by any. ``checked`` says whether images are compared with the state at save."""

    def __init__(
        self,
        *,
        post: Callable[[CaptureFailed | CaptureSealed], None],
        max_wait_s: float,
        name: str,
        checked: bool = True,
        on_step: Callable[[torch.optim.Optimizer], None] = ignore_step,
    ) -> None:
        """``on_step``: see ``Barrier``."""
        self._post = post
        self._max_wait_s = max_wait_s
        self._queue: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._current: Snapshot | None = None
        self._seal_lock = threading.Lock()
        self._waiting = threading.RLock()
        self._unsettled: tuple[Snapshot, float] | None = None
        self.barrier = Barrier(self._at_barrier, recorded=self._at_recording, on_step=on_step)
        self.evidence = LazyEvidence(self.barrier, checked=checked)
        self._storages = StorageWatch(self._at_freeing)
        self._thread = threading.Thread(
            target=self._run, name=f"tierfall-{name}-capture", daemon=True
        )
        self._thread.start()

    # The training thread ---------------------------------------------------------------------------

    def begin(self, snapshot: Snapshot, *, lazy: bool, here: bool) -> None:
        """Start filling a snapshot; without ``lazy`` every source has been read when this returns.

        ``here``: sources are read on the calling thread, since another would not see its work on them. Raises
        CaptureError for what cannot be captured; the snapshot is given up then.
        """
        snapshot.lazy = lazy
        if lazy:
            self.evidence.begun(snapshot.id)
        snapshot.past_barrier = False
        self._current = snapshot
        try:
            if here:
                while snapshot.filling.copy_next():
                    continue
        except BaseException as error:  # noqa: BLE001 - raised again below
            self._current = None
            traceback.clear_frames(error.__traceback__)
            failure = as_capture_error(snapshot.id, error)
            raise failure from failure.__cause__
        finally:
            self._queue.put(snapshot)
        if not lazy:
            self.wait_copied(self._max_wait_s)

    def begin_settled(self, snapshot: Snapshot) -> None:
        """Start filling a snapshot whose sources never change, all of them in host memory: no barrier waits for it."""
        self._queue.put(snapshot)

    def give_up(self, snapshot: Snapshot, error: BaseException) -> None:
        """A save ended in an error after its snapshot was announced: unless it is whole by now, it never will be."""
        failure = as_capture_error(snapshot.id, error)
        if failure is error:
            failure = _interrupted(snapshot, error)
        snapshot.filling.fail(failure, even_if_hashed=not snapshot.past_barrier)
        if self._current is snapshot:
            self._current = None
        self._queue.put(snapshot)

    def help_capture(self, id: CheckpointId, timeout: float | None) -> None:
        """What the thread that saved does when it waits on the handle: that is a barrier, since it writes to nothing
        meanwhile. One that runs out of time gives nothing up, and what failed is the handle's to tell."""
        if not self._is_at(id):
            return
        bound = self._max_wait_s if timeout is None else timeout
        deadline = time.monotonic() + bound
        if not self._waiting.acquire(timeout=max(0.0, bound)):
            return
        try:
            snapshot = self._current
            if snapshot is not None and snapshot.id == id:
                self._wait_copied(snapshot, None, deadline, held=False)
        except CaptureError:
            logger.debug("the capture failed while its handle was waited on", exc_info=True)
        finally:
            self._waiting.release()

    def _is_at(self, id: CheckpointId) -> bool:
        snapshot = self._current
        return snapshot is not None and snapshot.id == id

    def wait_copied(self, timeout: float | None, *, in_order: bool = False) -> None:
        """The barrier: help copying until every source is read; after ``timeout`` seconds the snapshot is given up.

        ``in_order``: what lies on a device need not be read yet, if only what the caller enqueues there next comes
        after. Raises what kept the snapshot from being captured.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        # A thread that waits on the handle may be here too, comparing what an update must not change meanwhile. The
        # lock's owner may take it twice: an interrupt just after it was taken leaves it taken.
        alone = self._waiting.acquire(timeout=-1 if timeout is None else timeout)
        snapshot = self._current
        try:
            if snapshot is not None and not alone:
                assert timeout is not None
                snapshot.filling.fail(
                    _waited_too_long(snapshot, timeout), even_if_hashed=not snapshot.past_barrier
                )
            elif snapshot is not None:
                self._wait_copied(snapshot, timeout, deadline, in_order=in_order)
        finally:
            if alone:
                self._waiting.release()

    def _wait_copied(
        self,
        snapshot: Snapshot,
        give_up_after: float | None,
        deadline: float | None,
        *,
        in_order: bool = False,
        held: bool = True,
    ) -> None:
        """Help copying until ``deadline``; a snapshot that is not copied by then is given up, with ``give_up_after``
        said as the reason, unless that is None. ``held``: an update waits for it, so that hashing does."""
        filling = snapshot.filling
        try:
            # Before the first byte: what was freed meanwhile must not be read.
            if snapshot.lazy and not snapshot.past_barrier and filling.failure is None:
                filling.check_state()
            passed = filling.pass_barrier if in_order else partial(filling.finish, alone=held)
            idle = passed(deadline)
            if idle and not snapshot.lazy and filling.failure is None:
                filling.check_state()
        except BaseException as error:  # noqa: BLE001 - raised again below
            # Ctrl-C, say: whatever comes next may change the state, so that this image must never be sealed
            failed = isinstance(error, Exception)
            filling.fail(
                as_capture_error(snapshot.id, error) if failed else _interrupted(snapshot, error),
                even_if_hashed=not snapshot.past_barrier,
            )
            self._release(snapshot)
            if snapshot.lazy:
                self.evidence.failed(snapshot.id, error)
            self._queue.put(snapshot)
            traceback.clear_frames(error.__traceback__)  # they hold tensors
            failure = as_capture_error(snapshot.id, error)
            raise failure from failure.__cause__
        if not idle and give_up_after is None and filling.failure is None:
            return
        if not idle and give_up_after is not None:
            filling.fail(
                _waited_too_long(snapshot, give_up_after), even_if_hashed=not snapshot.past_barrier
            )
        if filling.failure is None and not snapshot.past_barrier:
            self._pass_barrier(snapshot)
        self._release(snapshot)
        if idle:
            filling.release_sources()
        if filling.failure is not None:
            failure = as_capture_error(snapshot.id, filling.failure)
            raise failure from failure.__cause__

    def _pass_barrier(self, snapshot: Snapshot) -> None:
        """Take a snapshot past its barrier; if its image is complete, it is sealed now."""
        with self._seal_lock:
            snapshot.past_barrier = True
            ready = snapshot.hashed
        if ready:
            self._queue.put(snapshot)

    def _release(self, snapshot: Snapshot) -> None:
        """Hold nobody at the barrier any more, unless the state is still read: who passes next, on another stream say,
        is held too then."""
        filling = snapshot.filling
        if self._current is snapshot and (filling.is_read or filling.failure is not None):
            self._current = None

    def wait_barrier(self, timeout: float | None, *, in_order: bool = False) -> None:
        """As ``wait_copied``, outside of a save: the handle counts the time as blocked."""
        snapshot = self._current
        if snapshot is None:
            return
        began = time.monotonic()
        try:
            self.wait_copied(timeout, in_order=in_order)
        finally:
            snapshot.handle.tell_waited(time.monotonic() - began)

    def _at_barrier(self) -> None:
        """What the step hook does; it never raises, since the capture thread reports what failed."""
        try:
            self.wait_barrier(self._max_wait_s, in_order=True)
        except Exception:  # said by the handle, the log and the next save
            logger.debug("the capture failed at the barrier", exc_info=True)

    def _at_freeing(self, address: int, length: int) -> None:
        """Memory is about to be freed: where it is being captured, that is a barrier."""
        snapshot = self._current
        if snapshot is not None and snapshot.filling.reads(address, length):
            self._at_barrier()

    def _at_recording(self) -> None:
        """An optimizer step is recorded into a CUDA graph, whose replays would change what is being captured."""
        snapshot = self._current
        if snapshot is not None:
            snapshot.filling.fail(
                CaptureError(
                    f"save of step {snapshot.id.step}: an optimizer step was recorded into a CUDA graph while the "
                    "state was being captured; nothing of this step is kept. Call wait_captured() before recording one"
                )
            )

    def close(self, timeout: float) -> None:
        """End the thread, once what was begun is captured; after ``timeout`` seconds it is left behind."""
        self.let_go()
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("close: the capture thread did not end within %g s", timeout)

    def let_go(self) -> None:
        """Hold nobody at the barrier any more, and let the thread end; may be called twice."""
        self.barrier.close()
        self._storages.close()
        self._queue.put(None)

    # The capture thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                snapshot = self._queue.get(timeout=self._until_settled_s())
            except queue.Empty:
                self._settle()
                continue
            if snapshot is None:
                return
            try:
                self._capture(snapshot)
            except BaseException as error:  # noqa: BLE001 - every failure is the coordinator's to weigh
                snapshot.failed = True
                snapshot.filling.fail(_as_raisable(snapshot, error), even_if_hashed=True)
                snapshot.filling.abandon()
                snapshot.filling.release_sources()
                traceback.clear_frames(error.__traceback__)
                failure = snapshot.filling.failure or error
                if snapshot.lazy:
                    self.evidence.failed(snapshot.id, failure)
                self._post(CaptureFailed(id=snapshot.id, error=failure, region=snapshot.region))
                del error, failure
            del snapshot  # let go of the memory while this thread sleeps

    def _capture(self, snapshot: Snapshot) -> None:
        """Bring one snapshot as far as it can come. It may come here again: after its barrier, or given up."""
        filling = snapshot.filling
        if snapshot.commit is not None or snapshot.failed:
            return
        if not snapshot.hashed:
            filling.run()
            if filling.failure is None and filling.hashed:
                filling.check_image()
        if filling.failure is not None:
            raise filling.failure
        if not filling.hashed:
            raise CaptureError(f"save of step {snapshot.id.step}: its image is not complete")
        with self._seal_lock:
            snapshot.hashed = True
            if not snapshot.past_barrier:
                self._unsettled = (snapshot, time.monotonic() + SETTLED_S)
                return  # the barrier sends it back here
        self._unsettled = None
        filling.release_sources()
        if snapshot.share is not None:
            snapshot.share.finish()
        manifest, commit = make_records(snapshot)
        if snapshot.share is None or snapshot.share.digests is None:  # else once it is compared
            snapshot.region.seal(manifest=manifest, commit=commit)
            snapshot.handle.tell_captured()
        if snapshot.lazy:
            self.evidence.held()
        self._post(CaptureSealed(id=snapshot.id))
        filling.draw_samples_anew()

    def _until_settled_s(self) -> float | None:
        return None if self._unsettled is None else max(0.0, self._unsettled[1] - time.monotonic())

    def _settle(self) -> None:
        """Take an image past its barrier that none has come for: nothing that was under way goes on by now."""
        assert self._unsettled is not None
        snapshot, _ = self._unsettled
        if not self._waiting.acquire(blocking=False):  # somebody is at the barrier
            self._unsettled = (snapshot, time.monotonic() + SETTLED_S)
            return
        try:
            self._unsettled = None
            if self._current is snapshot and not snapshot.past_barrier:
                self._wait_copied(snapshot, None, None, held=False)
        except CaptureError:
            logger.debug("the state was changed before its image was sealed", exc_info=True)
        finally:
            self._waiting.release()


def _waited_too_long(snapshot: Snapshot, timeout: float) -> CaptureError:
    return CaptureError(
        f"save of step {snapshot.id.step}: the barrier waited {timeout:g} s (max_wait) for the capture to end; the "
        "snapshot is given up and training goes on"
    )


def _interrupted(snapshot: Snapshot, error: BaseException) -> CaptureError:
    return CaptureError(f"save of step {snapshot.id.step}: interrupted: {error!r}")


def _as_raisable(snapshot: Snapshot, error: BaseException) -> Exception:
    """What ended the capture thread as it may be raised in another: SystemExit, say, was not meant for that one."""
    if isinstance(error, Exception):
        return error
    failure = _interrupted(snapshot, error)
    failure.__cause__ = error
    return failure


def as_capture_error(id: CheckpointId, error: BaseException) -> BaseException:
    """Say what failed as a save's own error, caused by it, but for what stops the whole program."""
    if not isinstance(error, Exception):
        return error
    said = (
        str(error)
        if isinstance(error, CaptureError)
        else f"save of step {id.step}: the capture failed: {error!r}"
    )
    changed = error.tensors if isinstance(error, StateChangedError) else None
    failure = CaptureError(said) if changed is None else StateChangedError(said, changed)
    failure.__cause__ = error
    return failure


def make_records(snapshot: Snapshot) -> tuple[bytes, bytes]:
    """Make manifest and commit record of a complete image, and return both as they are written."""
    cut = snapshot.geometry
    manifest = Manifest(
        line=snapshot.line,
        shard=snapshot.shard,
        image_bytes=cut.image_bytes,
        data_start=cut.data_start,
        chunk_bytes=cut.chunk_bytes,
        digests=tuple(snapshot.filling.digests),
        structure=snapshot.structure,
        pieces=snapshot.pieces,
    )
    data = manifest.encode()
    commit = Commit(
        line=snapshot.line,
        world_size=snapshot.shard.world_size,
        files=raw_files(snapshot.shard, image_bytes=cut.image_bytes, manifest=data),
        nodes=(snapshot.node,),
        wall_time_s=snapshot.wall_time_s,
        metrics=read_metrics(snapshot.metrics),
        tags=snapshot.tags,
    )
    snapshot.manifest = manifest
    snapshot.commit = commit
    return data, commit.encode()


def read_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Read metrics, 0-dim tensors too, as floats."""
    values = {}
    for name, value in metrics.items():
        try:
            values[name] = float(value)
        except (TypeError, ValueError) as error:
            raise CaptureError(
                f"save: metrics[{name!r}] is not a number but {type(value).__name__}: {error}"
            ) from error
    return values
