"""The capturer: the thread that captures states, and the waits that delay changes to the state meanwhile.

A capture passes these stages in order: copied (training may change the state), hashed, compared with what was read at
save, past the barrier, sealed. The capturer reports to the coordinator by events, and to the handle; it knows no tiers.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from tierfall.core.capture.barrier import Barrier, StorageWatch, ignore_step
from tierfall.core.capture.copier import as_exception
from tierfall.core.capture.lazy_evidence import LazyEvidence
from tierfall.core.capture.snapshot import CaptureFailed, CaptureSealed, Snapshot
from tierfall.core.format.commit_files import raw_files
from tierfall.core.format.records import Commit, named_not_finite
from tierfall.core.runtime.holds import Holds
from tierfall.core.runtime.public_calls import public_call
from tierfall.core.sampling.finite import losses_not_finite
from tierfall.core.types.errors import CaptureError, StateChangedError, release_frames
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId

logger = logging.getLogger("tierfall")

SETTLED_S = 1.0
"""Time after which no write that began before the image was complete can still be in progress: a CPU kernel ends
sooner. An image that no barrier has passed is sealed then."""


class Capturer:
    """Captures one snapshot after another. Only the training thread calls ``begin`` and the waits. ``checked``: images
    are compared with the state at save."""

    def __init__(
        self,
        *,
        post: Callable[[CaptureFailed | CaptureSealed], None],
        max_wait_s: float,
        name: str,
        holds: Holds | None = None,
        checked: bool = True,
        on_step: Callable[[torch.optim.Optimizer], None] = ignore_step,
        threads: int = 1,
    ) -> None:
        """``holds`` records what training waits for; ``on_step``: see ``Barrier``. ``threads`` hash the chunks of an
        image from a device."""
        self._post = post
        self._max_wait_s = max_wait_s
        self._holds = holds or Holds()
        self._queue: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._current: Snapshot | None = None
        self._seal_lock = threading.Lock()
        self._waiting = threading.RLock()
        self._unsettled: tuple[Snapshot, float] | None = None
        self.barrier = Barrier(self._at_barrier, recorded=self._at_recording, on_step=on_step)
        self.evidence = LazyEvidence(self.barrier, checked=checked)
        self._storages = StorageWatch(self._at_freeing)
        self.helpers = threads - 1
        self._thread = threading.Thread(
            target=self._run, name=f"tierfall-{name}-capture", daemon=True
        )
        self._thread.start()

    # The training thread ---------------------------------------------------------------------------

    def begin(self, snapshot: Snapshot, *, lazy: bool, here: bool) -> None:
        """Start the capture of a snapshot; without ``lazy``, all sources have been read when this returns.

        ``here``: read the sources on the calling thread, because another would not be ordered after its device work.
        CaptureError if the capture fails; the snapshot is given up then.
        """
        snapshot.lazy = lazy
        if lazy:
            self.evidence.on_begun(snapshot.id)
        snapshot.past_barrier = False
        self._current = snapshot
        try:
            if here:
                while snapshot.copier.copy_next():
                    continue
        except BaseException as error:  # noqa: BLE001 - raised again below
            self._current = None
            release_frames(error)
            raise as_capture_error(snapshot.id, error)  # noqa: B904 - its cause is set
        finally:
            self._queue.put(snapshot)
        if not lazy:
            self.wait_copied(self._max_wait_s)

    def give_up(self, snapshot: Snapshot, error: BaseException) -> None:
        """Give up a snapshot whose save failed after it was announced, unless it is already complete."""
        failure = as_capture_error(snapshot.id, error)
        if failure is error:
            failure = _interrupted(snapshot, error)
        snapshot.copier.fail(failure, even_if_hashed=not snapshot.past_barrier)
        if self._current is snapshot:
            self._current = None
        self._queue.put(snapshot)

    def help_capture(self, id: CheckpointId, timeout: float | None) -> None:
        """Help with a capture while the saving thread waits on its handle: this counts as a barrier, since that thread
        writes to nothing meanwhile. A timeout does not end the save; the handle reports failures."""
        if not self._is_capturing(id):
            return
        bound = self._max_wait_s if timeout is None else timeout
        deadline = time.monotonic() + bound
        if not self._waiting.acquire(timeout=max(0.0, bound)):
            return
        try:
            snapshot = self._current
            if snapshot is not None and snapshot.id == id:
                self._wait_copied(snapshot, None, deadline, blocks_update=False)
        except CaptureError:
            logger.debug("the capture failed during a wait on its handle", exc_info=True)
        finally:
            self._waiting.release()

    def _is_capturing(self, id: CheckpointId) -> bool:
        snapshot = self._current
        return snapshot is not None and snapshot.id == id

    def wait_copied(self, timeout: float | None, *, in_order: bool = False) -> None:
        """The barrier: help copying until every source is read; after ``timeout`` seconds the snapshot is given up.

        ``in_order``: on devices it suffices that the work which the caller enqueues next runs after the reads. Raises
        the error of a failed capture.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        # A thread that waits on the handle may be in here, comparing what an update must not change meanwhile. The
        # lock is reentrant because an interrupt right after its acquisition leaves it locked.
        is_locked = self._waiting.acquire(timeout=-1 if timeout is None else timeout)
        snapshot = self._current
        try:
            if snapshot is not None and not is_locked:
                assert timeout is not None
                snapshot.copier.fail(
                    _waited_too_long(snapshot, timeout), even_if_hashed=not snapshot.past_barrier
                )
            elif snapshot is not None:
                what = f"the capture of step {snapshot.id.step}"
                with self._holds.hold(what, partial(_describe_progress, snapshot)):
                    self._wait_copied(snapshot, timeout, deadline, in_order=in_order)
        finally:
            if is_locked:
                self._waiting.release()

    def _wait_copied(
        self,
        snapshot: Snapshot,
        give_up_after: float | None,
        deadline: float | None,
        *,
        in_order: bool = False,
        blocks_update: bool = True,
    ) -> None:
        """Help copying until ``deadline``. A snapshot that is not copied by then is given up with ``give_up_after``
        seconds in the message (None: not given up). ``blocks_update``: an update waits for this, so hashing pauses."""
        filling = snapshot.copier
        try:
            # Before the first byte is read: freed memory must not be read.
            if snapshot.lazy and not snapshot.past_barrier and filling.failure is None:
                filling.check_state()
            copy = (
                filling.pass_barrier if in_order else partial(filling.finish, alone=blocks_update)
            )
            idle = copy(deadline)
            if idle and not snapshot.lazy and filling.failure is None:
                filling.check_state()
        except BaseException as error:  # noqa: BLE001 - raised again below
            # E.g. Ctrl-C: whatever runs next may change the state, so this image must never be sealed.
            failed = isinstance(error, Exception)
            filling.fail(
                as_capture_error(snapshot.id, error) if failed else _interrupted(snapshot, error),
                even_if_hashed=not snapshot.past_barrier,
            )
            self._release(snapshot)
            if snapshot.lazy:
                self.evidence.on_failed(snapshot.id, error)
            self._queue.put(snapshot)
            release_frames(error)
            raise as_capture_error(snapshot.id, error)  # noqa: B904 - its cause is set
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
            raise as_capture_error(snapshot.id, filling.failure)

    def _pass_barrier(self, snapshot: Snapshot) -> None:
        """Mark a snapshot as past its barrier; a complete image is sealed now."""
        snapshot.copier.on_barrier()
        with self._seal_lock:
            snapshot.past_barrier = True
            ready = snapshot.hashed
        if ready:
            self._queue.put(snapshot)

    def _release(self, snapshot: Snapshot) -> None:
        """Stop delaying updates, unless the state is still being read: then the next one, perhaps on another stream,
        waits too."""
        filling = snapshot.copier
        if self._current is snapshot and (filling.is_read or filling.failure is not None):
            self._current = None

    def wait_barrier(self, timeout: float | None, *, in_order: bool = False) -> None:
        """Like ``wait_copied``, outside of a save: the handle counts the time as blocked."""
        snapshot = self._current
        if snapshot is None:
            return
        handle, began = snapshot.handle, time.monotonic()
        # An error that a caller keeps holds this frame, which must hold nothing of the image.
        del snapshot
        try:
            self.wait_copied(timeout, in_order=in_order)
        except CaptureError as error:
            raise error.with_traceback(None)  # noqa: B904 - its cause is set
        finally:
            handle.add_blocked(time.monotonic() - began)

    @public_call
    def _at_barrier(self, in_order: bool = True) -> None:
        """The step hook; never raises, since the capture thread reports failures."""
        try:
            self.wait_barrier(self._max_wait_s, in_order=in_order)
        except Exception:  # reported by the handle, the log and the next save
            logger.debug("the capture failed at the barrier", exc_info=True)

    def _at_freeing(self, address: int, length: int) -> None:
        """Memory is about to be freed: if it is being captured, this is a barrier. The host waits for the reads of a
        device: freed memory may be taken by a stream that waits for none of them, or be unmapped."""
        snapshot = self._current
        if snapshot is not None and snapshot.copier.reads(address, length):
            self._at_barrier(in_order=False)

    def _at_recording(self) -> None:
        """An optimizer step is being recorded into a CUDA graph, whose replays would change what is being captured."""
        snapshot = self._current
        if snapshot is not None:
            snapshot.copier.fail(
                CaptureError(
                    f"save of step {snapshot.id.step}: an optimizer step was recorded into a CUDA graph while the "
                    "state was being captured; nothing of this step is kept. Call wait_captured() before recording one"
                )
            )

    def close(self, timeout: float) -> None:
        """End the thread after the captures in progress; after ``timeout`` seconds return regardless."""
        self.stop_waiting()
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("close: the capture thread did not end within %g s", timeout)

    def stop_waiting(self) -> None:
        """Stop delaying updates, and let the thread end; may be called twice."""
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
            except BaseException as error:  # noqa: BLE001 - reported to the coordinator
                snapshot.failed = True
                doing = f"save of step {snapshot.id.step}"
                snapshot.copier.fail(as_exception(error, doing), even_if_hashed=True)
                snapshot.copier.wait_unused()
                snapshot.copier.release_sources()
                release_frames(error)
                failure = snapshot.copier.failure or error
                if snapshot.lazy:
                    self.evidence.on_failed(snapshot.id, failure)
                self._post(CaptureFailed(id=snapshot.id, error=failure, region=snapshot.region))
                del error, failure
            del snapshot  # so that this thread keeps no memory alive while it waits

    def _capture(self, snapshot: Snapshot) -> None:
        """Advance one snapshot as far as possible. It comes here again after its barrier, or if given up."""
        filling = snapshot.copier
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
                return  # the barrier puts it into the queue again
        self._unsettled = None
        filling.release_sources()
        if snapshot.share is not None:
            snapshot.share.finish()
        manifest, commit = make_records(snapshot)
        if snapshot.share is None or snapshot.share.digests is None:  # else after the comparison
            snapshot.region.seal(manifest=manifest, commit=commit)
            snapshot.handle.on_captured()
        if snapshot.lazy:
            self.evidence.on_complete()
        self._post(CaptureSealed(id=snapshot.id))
        filling.count_check()

    def _until_settled_s(self) -> float | None:
        return None if self._unsettled is None else max(0.0, self._unsettled[1] - time.monotonic())

    def _settle(self) -> None:
        """Mark an image as past the barrier although none was reached: writes that were in progress have ended."""
        assert self._unsettled is not None
        snapshot, _ = self._unsettled
        if not self._waiting.acquire(blocking=False):  # a thread is at the barrier
            self._unsettled = (snapshot, time.monotonic() + SETTLED_S)
            return
        try:
            self._unsettled = None
            if self._current is snapshot and not snapshot.past_barrier:
                self._wait_copied(snapshot, None, None, blocks_update=False)
        except CaptureError:
            logger.debug("the state changed before its image was sealed", exc_info=True)
        finally:
            self._waiting.release()


def _waited_too_long(snapshot: Snapshot, timeout: float) -> CaptureError:
    return CaptureError(
        f"save of step {snapshot.id.step}: the barrier waited {timeout:g} s (max_wait) for the capture to end; the "
        "snapshot is given up and training continues"
    )


def _interrupted(snapshot: Snapshot, error: BaseException) -> CaptureError:
    return CaptureError(f"save of step {snapshot.id.step}: interrupted: {error!r}")


def _describe_progress(snapshot: Snapshot) -> str:
    left, total = snapshot.copier.left_bytes, snapshot.image_plan.image_bytes
    return f"the state must not change until it is copied; {format_size(left)} of {format_size(total)} are left"


def as_capture_error(id: CheckpointId, error: BaseException) -> BaseException:
    """Wrap an error in a CaptureError of this save; one that ends the program, such as Ctrl-C, is returned as it is."""
    if not isinstance(error, Exception):
        return error
    text = (
        str(error)
        if isinstance(error, CaptureError)
        else f"save of step {id.step}: the capture failed: {error!r}"
    )
    changed = error.tensors if isinstance(error, StateChangedError) else None
    failure = CaptureError(text) if changed is None else StateChangedError(text, changed)
    failure.__cause__ = error
    return failure


def make_records(snapshot: Snapshot) -> tuple[bytes, bytes]:
    """Create manifest and commit record of a complete image, set them in the snapshot, and return both encoded."""
    digests = snapshot.copier.digests
    manifest = snapshot.image_plan.manifest(snapshot.lineage, snapshot.shard, digests)
    data = manifest.encode()
    metrics, not_finite = read_metrics(snapshot.metrics), list[str]()
    if snapshot.finite is not None:
        not_finite = snapshot.finite.not_finite_in(snapshot.region.image[manifest.data_start :])
    commit = Commit(
        lineage=snapshot.lineage,
        world_size=snapshot.shard.world_size,
        files=raw_files(snapshot.shard, image_bytes=manifest.image_bytes, manifest=data),
        nodes=(snapshot.node,),
        wall_time_s=snapshot.wall_time_s,
        metrics=metrics,
        tags=snapshot.tags,
        not_finite=named_not_finite([*losses_not_finite(metrics), *not_finite]),
        progress=snapshot.progress,
    )
    snapshot.manifest = manifest
    snapshot.commit = commit
    return data, commit.encode()


def read_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Convert metrics, including 0-dim tensors, to floats."""
    values = {}
    for name, value in metrics.items():
        try:
            values[name] = float(value)
        except (TypeError, ValueError) as error:
            raise CaptureError(
                f"save: metrics[{name!r}] is not a number but {type(value).__name__}: {error}"
            ) from error
    return values
