"""Saving: from a state to a snapshot under capture, on the training thread.

It finds the layout, asks the coordinator for room, decides whether the capture may be lazy, and begins it. What becomes
of the snapshot afterwards is the capture thread's and the coordinator's business.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tierfall.config import Config, StoredTierConfig
from tierfall.core.capture.capturer import Capturer, as_capture_error
from tierfall.core.capture.copier import ImageCopier
from tierfall.core.capture.device_copies import Slab
from tierfall.core.capture.device_places import CaptureDevices
from tierfall.core.capture.events import CaptureAdvanced, CaptureBegun, SaveGivenUp
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.capture.snapshot import HostRegion, Share, Snapshot
from tierfall.core.format.records import Geometry, Lineage
from tierfall.core.image.layout import Layout, plan_layout
from tierfall.core.image.raw_files import ENTRY as FILES_ENTRY
from tierfall.core.image.segments import Segmentation
from tierfall.core.image.sources import TensorSources
from tierfall.core.image.targets import TargetCache
from tierfall.core.runtime.gc_pause import gc_paused
from tierfall.core.runtime.pinned import cuda_available
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.runtime.streams import Streams
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.sampling.image_check import CheckPlan, ImageCheck
from tierfall.core.scheduler.ledger.tasks import AdmissionRequest
from tierfall.core.state.view import StateView
from tierfall.core.state.walk import walk_state as describe_state
from tierfall.core.state.walk_cache import WalkCache
from tierfall.core.types.errors import CapacityError
from tierfall.core.types.units import format_size
from tierfall.core.types.values import (
    CaptureMode,
    Changes,
    CheckpointId,
    OnError,
    SaveOutcome,
    Verify,
)
from tierfall.policies.defaults import LazyTrial, choose_lazy, tiers_owed
from tierfall.run.layouts import Layouts
from tierfall.session import statistics
from tierfall.session.session import Session
from tierfall.setup.lineage import SavingLineage
from tierfall.tiers.device import DeviceSlab

logger = logging.getLogger("tierfall")

TRIALS_REMEMBERED = 300
CUTTINGS_REMEMBERED = 4
DIGEST_SHARE = 0.01
"""Of a training step, the share that digests of whole ranges of the state may take at a save."""
DIGEST_UNKNOWN_S = 2e-4
"""What they may take while it is not known how long a step takes."""


class Saver:
    """Makes one snapshot after another."""

    def __init__(
        self,
        config: Config,
        session: Session,
        capturer: Capturer,
        step_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """``step_s`` says how long a training step takes."""
        self._config = config
        self._session = session
        self._capturer = capturer
        self._layouts = Layouts(session, max_wait_s=config.max_wait_s, step_s=step_s)
        self._recall = WalkCache()
        self._step_s = step_s
        self._cuttings: deque[tuple[Segmentation, CheckPlan]] = deque(maxlen=CUTTINGS_REMEMBERED)
        self._targets = TargetCache()
        self._streams = Streams()
        self._places = CaptureDevices(self._streams, _open_slab(config))
        self._pace = RateLimiter(rate) if (rate := config.capture.bandwidth_bytes_per_s) else None
        self._mode = _LazyMode(config.capture.mode)
        self.counts = statistics.SaveCounts(steps=session.step_timer)
        self.lock = threading.RLock()
        """Held by whoever saves: one save after another, whichever threads they come from."""

    def save(
        self,
        line: SavingLineage,
        step: int,
        describe: Callable[[WalkCache], StateView],
        metrics: Mapping[str, Any],
        tags: Sequence[str],
        began: float,
        *,
        may_be_lazy: bool = True,
        at_end: bool = False,
    ) -> SaveHandle:
        """Begin the capture of the state that ``describe`` walks as the next checkpoint of ``line``; see
        ``Checkpointer.save``. Without ``may_be_lazy`` all of it is copied when this returns; ``at_end``: every tier is
        to get it."""
        metrics = statistics.checked_metrics(metrics)
        tags = statistics.checked_tags(tags)
        with gc_paused():
            view = describe(self._recall)
            id = CheckpointId(step, line.attempt.number)
            layout, header, share = self._layouts.of(view, id)
        self._capturer.barrier.gradients.saving(step, view.parameters)
        return self._begin(
            line,
            step,
            view,
            layout,
            header,
            metrics,
            tags,
            began,
            share=share,
            may_be_lazy=may_be_lazy,
            at_end=at_end,
        )

    def save_files(
        self, line: SavingLineage, step: int, files: Mapping[str, torch.Tensor], began: float
    ) -> SaveHandle:
        """Begin the capture of files, as tensors of bytes by their names, that nothing changes any more.

        What is known of the training's own state stays as it is; no barrier waits for this capture.
        """
        view = describe_state({FILES_ENTRY: dict(files)}, with_random=False)
        layout = plan_layout(view)
        header = layout.header(view)
        assert header is not None, "a layout without room for the values that it was made for"
        return self._begin(line, step, view, layout, header, {}, (), began, settled=True)

    def _begin(
        self,
        line: SavingLineage,
        step: int,
        view: StateView,
        layout: Layout,
        header: bytes,
        metrics: Mapping[str, Any],
        tags: tuple[str, ...],
        began: float,
        *,
        share: Share | None = None,
        settled: bool = False,
        may_be_lazy: bool = True,
        at_end: bool = False,
    ) -> SaveHandle:
        place = replace(self._place(line, step), at_end=at_end)
        rules = self._session.coordinator.ledger.rules
        owed = tiers_owed(rules, place.ordinal, at_end=at_end)
        tiers = tuple(name for name in owed if name in self._session.stores)
        handle = SaveHandle(place.checkpoint, tiers, in_memory=self._session.host.name)
        room = self._request_region(place, layout, metrics, tags)
        try:  # while the coordinator makes room
            with gc_paused():
                if share is not None:  # before any copy, which follows on the device
                    share.read(view, place.ordinal, self._streams)
                decide = None
                if not settled:
                    decide = partial(self._choose_lazy, view, step, began, may_be_lazy=may_be_lazy)
                plan = self._plan(view, layout, decide)
        except BaseException as error:  # noqa: BLE001 - raised again below
            room.cancel()
            failure = as_capture_error(place.checkpoint, error)
            raise failure from failure.__cause__
        region, no_room = room.wait()
        if region is None:
            assert no_room is not None
            self._mode.skipped()
            self._skip(line, handle, no_room)
            return handle
        if not settled:
            self._capturer.evidence.forget()
        try:
            with gc_paused():
                snapshot = self._snapshot(region, place, layout, header, handle, metrics, plan)
                snapshot.share = share
        except BaseException as error:  # noqa: BLE001 - raised again below
            region.release()
            failure = as_capture_error(place.checkpoint, error)
            raise failure from failure.__cause__
        snapshot.tags = tags
        line.advance(place)
        try:
            self._session.coordinator.post(CaptureBegun(snapshot=snapshot, tiers=tiers))
            if settled:
                self._capture_settled(snapshot, began)
            else:
                self._capture(snapshot, began, lazy=plan.lazy)
        except BaseException as error:
            self._capturer.give_up(snapshot, error)
            raise
        return handle

    def tell_others(self, line: SavingLineage, step: int, error: BaseException) -> None:
        """A save ended by an exception: no other rank is to wait for it, and all lines stay at the same place."""
        if not self._session.ranks.many or line.is_at(step):
            return
        place = self._place(line, step)
        if not line.has_passed(step):
            line.advance(place)
        outcome = SaveOutcome.SKIPPED if isinstance(error, CapacityError) else SaveOutcome.FAILED
        self._session.coordinator.post(
            SaveGivenUp(id=place.checkpoint, error=error, outcome=outcome)
        )

    def _place(self, line: SavingLineage, step: int) -> Lineage:
        """The next place in the line; other ranks may have counted further."""
        return line.next(step, above=self._session.coordinator.ledger.least_ordinal)

    def close(self) -> None:
        """Let go of host memory, and of the device's."""
        self._targets.clear()
        self._places = CaptureDevices(Streams())

    def _request_region(
        self, place: Lineage, layout: Layout, metrics: Mapping[str, Any], tags: tuple[str, ...]
    ) -> _RegionRequest:
        """Ask for a region of host memory. Raises CapacityError where an image has no place on some tier at all."""
        self._check_capacities(layout)
        records = statistics.records_bytes(layout, self._config.chunk_bytes, metrics, tags, place)
        self._session.host.ensure_capacity(image_bytes=layout.image_bytes, records_bytes=records)
        return _RegionRequest(
            self._session,
            place.checkpoint,
            image_bytes=layout.image_bytes,
            records_bytes=records,
            max_wait_s=self._config.max_wait_s,
        )

    def _plan(
        self,
        view: StateView,
        layout: Layout,
        choose_lazy: Callable[[], tuple[bool, ...] | None] | None,
    ) -> _CapturePlan:
        """Decide how a state is captured, and read what its image is compared with."""
        places = self._places.of(view.sources)
        lazy = None if choose_lazy is None else choose_lazy()
        cutting, check = self._cut(layout, view, places, lazy)
        sources = TensorSources(view, cutting.lazy)
        if lazy is None or check is None:
            return _CapturePlan(places, cutting, sources, None, lazy=lazy is not None)
        streams = self._places.streams if places else {}
        begun = check.begin(sources, streams, self._check_s())
        return _CapturePlan(places, cutting, sources, begun, lazy=True)

    def _snapshot(
        self,
        region: HostRegion,
        line: Lineage,
        layout: Layout,
        header: bytes,
        handle: SaveHandle,
        metrics: Mapping[str, Any],
        plan: _CapturePlan,
    ) -> Snapshot:
        """Begin to fill a region: what is not captured lazily is copied here."""
        post = self._session.coordinator.post
        id = line.checkpoint
        chunk = self._config.chunk_bytes
        fixed = {
            name: self._places.fixed(value, plan.places)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in metrics.items()
        }
        filling = ImageCopier(
            targets=self._targets.of(region.tensor(), layout),
            memory=region.image,
            header=header,
            cutting=plan.cutting,
            sources=plan.sources,
            streams=self._places.streams if plan.places else None,
            slab=self._places.slab if plan.places else None,
            pace=self._pace,
            check=plan.check,
            on_progress=lambda final: post(CaptureAdvanced(id=id, final_chunks=final)),
        )
        return Snapshot(
            line=line,
            shard=self._session.ranks.shard,
            geometry=Geometry(
                image_bytes=layout.image_bytes, data_start=layout.data_start, chunk_bytes=chunk
            ),
            structure=layout.structure,
            pieces=layout.pieces,
            region=region,
            handle=handle,
            filling=filling,
            wall_time_s=time.time(),
            metrics=fixed,
            node=self._session.node,
        )

    def _cut(
        self,
        layout: Layout,
        view: StateView,
        places: Sequence[int],
        lazy: Sequence[bool] | None,
    ) -> tuple[Segmentation, CheckPlan | None]:
        """Return the segments of a layout, and how an image of it is checked; both are kept for the next saves."""
        if lazy is None:  # all is copied before save returns, by two threads at once
            lazy = tuple(changes is Changes.ON_STEP for changes in view.changes)
        known = (both for both in self._cuttings if both[0].serves(layout, view, places, lazy))
        found = next(known, None)
        if found is None:
            cutting = Segmentation(layout, view, self._config.chunk_bytes, places, lazy)
            found = cutting, CheckPlan(cutting, view)
            self._cuttings.appendleft(found)
        return found[0], None if self._config.capture.verify is Verify.OFF else found[1]

    def _check_s(self) -> float | None:
        """How long digests of the state may take at this save; None where all is to be digested."""
        if self._config.capture.verify is Verify.FULL:
            return None
        step_s = self._step_s()
        return DIGEST_UNKNOWN_S if step_s is None else DIGEST_SHARE * step_s

    def _check_capacities(self, layout: Layout) -> None:
        for tier in self._config.chain:
            capacity = tier.capacity_bytes if isinstance(tier, StoredTierConfig) else None
            if capacity is not None and layout.image_bytes > capacity:
                raise CapacityError(
                    f"save: one checkpoint takes {format_size(layout.image_bytes)} ({layout.image_bytes} bytes), "
                    f"tier {tier.name} has a capacity of {format_size(capacity)} "
                    f"({capacity} bytes): raise it, or take the tier out of the chain"
                )

    def _skip(self, line: SavingLineage, handle: SaveHandle, error: BaseException) -> None:
        if not isinstance(error, CapacityError):
            raise error
        handle.tell_given_up(SaveOutcome.SKIPPED, error)
        self.counts.skipped += 1
        self.tell_others(line, handle.step, error)
        if self._config.on_error is OnError.RAISE:
            raise error

    def _capture_settled(self, snapshot: Snapshot, began: float) -> None:
        """Begin the capture of what nothing changes any more."""
        self.counts.note(snapshot.handle, lazy=False)
        self.counts.settled += 1
        self._capturer.begin_settled(snapshot)
        snapshot.handle.tell_begun(
            bytes=snapshot.geometry.image_bytes, lazy=False, blocked_s=time.monotonic() - began
        )

    def _choose_lazy(
        self, view: StateView, step: int, began: float, *, may_be_lazy: bool
    ) -> tuple[bool, ...] | None:
        """Say which tensors are captured lazily; None where none is."""
        evidence = self._capturer.evidence
        first = self.counts.begun == self.counts.settled
        reason = evidence.why_blocking(elsewhere=self._places.elsewhere, first=first)
        chosen = evidence.choose(view) if reason is None else ()
        if reason is None and not any(chosen):
            reason = "no tensor of it is known to change only inside an optimizer's step"
        lazy = self._mode.is_lazy(step, began, may_be=may_be_lazy and reason is None)
        self.counts.capture = self._mode.reason
        if may_be_lazy and reason is not None and not first and self._mode.wants_lazy:
            evidence.say_once(f"this save captures blocking: {reason}")
        return chosen if lazy else None

    def _capture(self, snapshot: Snapshot, began: float, *, lazy: bool) -> None:
        self.counts.note(snapshot.handle, lazy=lazy)
        if lazy:
            id, saver = snapshot.id, threading.get_ident()

            def help_capture(timeout: float | None) -> None:
                if threading.get_ident() == saver:
                    self._capturer.help_capture(id, timeout)

            snapshot.handle.before_wait = help_capture
        try:
            self._capturer.begin(snapshot, lazy=lazy, here=bool(self._places.elsewhere))
        finally:
            snapshot.handle.tell_begun(
                bytes=snapshot.geometry.image_bytes,
                lazy=lazy,
                blocked_s=time.monotonic() - began,
            )


@dataclass(frozen=True, slots=True)
class _CapturePlan:
    """How one state is captured: the ``places`` of its tensors, and of these what is cut into which segments; what its
    image is compared with; and whether anything of it is captured lazily."""

    places: Sequence[int]
    cutting: Segmentation
    sources: TensorSources
    check: ImageCheck | None
    lazy: bool


class _RegionRequest:
    """A region of host memory that the coordinator was asked for. It is waited for, or cancelled."""

    def __init__(
        self,
        session: Session,
        id: CheckpointId,
        *,
        image_bytes: int,
        records_bytes: int,
        max_wait_s: float,
    ) -> None:
        self._session = session
        self._done = InterruptibleEvent()
        self._lock = threading.Lock()
        self._answer: list[Any] = []
        self._request = AdmissionRequest(
            id=id,
            image_bytes=image_bytes,
            records_bytes=records_bytes,
            deadline_s=time.monotonic() + max_wait_s,
            answer=self._on_answer,
        )
        session.coordinator.post(self._request)

    def _on_answer(self, region: HostRegion | None, error: BaseException | None) -> None:
        with self._lock:
            self._answer.extend((region, error))
            if self._request.cancelled.is_set() and region is not None:
                region.release()
        self._done.ring()

    def wait(self) -> tuple[HostRegion | None, BaseException | None]:
        """Return the region, or None and the reason."""
        try:
            self._session.wait(self._done)
        except BaseException:  # Ctrl-C, say
            self.cancel()
            raise
        return self._answer[0], self._answer[1]

    def cancel(self) -> None:
        """Nobody will take the region, nor may another image go for it."""
        with self._lock:
            self._request.cancelled.set()
            if self._answer and self._answer[0] is not None:
                self._answer[0].release()


class _LazyMode:
    """Decides for each save whether it is to be lazy; in mode auto by what the saves before have cost."""

    def __init__(self, mode: CaptureMode) -> None:
        self._mode = mode
        self._trials: list[LazyTrial] = []
        self._last: tuple[bool, int, float] | None = None
        self.reason = ""

    @property
    def wants_lazy(self) -> bool:
        return self._mode is not CaptureMode.BLOCKING

    def is_lazy(self, step: int, began_s: float, *, may_be: bool) -> bool:
        """``may_be`` says that this save can be captured lazily; else it tells nothing about what a choice costs."""
        if self._mode is not CaptureMode.AUTO:
            return may_be and self.wants_lazy
        if self._last is not None and step > self._last[1]:
            lazy, last_step, last_s = self._last
            self._trials.append(LazyTrial(lazy, step - last_step, began_s - last_s))
            del self._trials[:-TRIALS_REMEMBERED]
        self._last = None
        if not may_be:
            return False
        lazy, self.reason = choose_lazy(self._trials)
        self._last = (lazy, step, began_s)
        return lazy

    def skipped(self) -> None:
        """The save that was decided on did not begin: what follows tells nothing about its cost."""
        self._last = None


def _open_slab(config: Config) -> Slab | None:
    """Take the device tier's memory on the GPU that is current here; None, once said, where it cannot be had."""
    if config.device is None:
        return None
    if not cuda_available():
        logger.warning("open: goes on without tier %s: no CUDA device here", config.device.name)
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return DeviceSlab.allocate(config.device.capacity_bytes, device, name=config.device.name)
