"""Saving: from a state to a snapshot under capture, on the training thread.

It finds the layout, requests a region from the coordinator, decides whether the capture is lazy, and begins it. From
then on the snapshot belongs to the capture thread and the coordinator.

A layout is planned once per structure. With several ranks, replicas are assigned to one of them: the first save of a
structure waits until all ranks have reported what they save (``core/flush/replicas.py``), and digests the replicas.
Later saves reuse the layout without a message, and read a part of the replicas at each save, to be compared
(``sampling.replicas``).
"""

from __future__ import annotations

import gc
import logging
import math
import operator
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any

import torch

from tierfall.config import StoredTierConfig
from tierfall.core.capture.capturer import Capturer, as_capture_error
from tierfall.core.capture.copier import ImageCopier
from tierfall.core.capture.device_copies import CaptureDevices
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.capture.snapshot import (
    CaptureAdvanced,
    CaptureBegun,
    HostRegion,
    ReplicaShare,
    SaveGivenUp,
    Snapshot,
)
from tierfall.core.capture.spill import DeviceSlab
from tierfall.core.flush.replicas import ReplicaAssigner
from tierfall.core.flush.tasks import AssignmentRequest
from tierfall.core.format.records import Attempt, Commit, Lineage, Progress, records_bytes_max
from tierfall.core.image.dedup import ReplicaAssignment, ReplicaDigests, ReplicatedTensors
from tierfall.core.image.layout import Layout, plan_layout
from tierfall.core.image.segments import Segmentation
from tierfall.core.image.sources import TensorSources
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.runtime.streams import Streams
from tierfall.core.sampling.finite import FiniteSample
from tierfall.core.sampling.image_check import CheckPlan, ImageCheck
from tierfall.core.sampling.ranges import DIGEST_BYTES
from tierfall.core.sampling.replicas import ReplicaPlan
from tierfall.core.state.item import OnResize
from tierfall.core.state.view import StateView
from tierfall.core.state.walk_cache import WalkCache
from tierfall.core.types.errors import CapacityError, CaptureError, ConfigError, StepError
from tierfall.core.types.keys import STEP_MAX, check_name
from tierfall.core.types.text import list_fault, with_article
from tierfall.core.types.units import format_size
from tierfall.core.types.values import (
    CaptureMode,
    Changes,
    CheckpointId,
    OnError,
    SaveOutcome,
    Verify,
)
from tierfall.policies.flush import tiers_owed
from tierfall.run.session import Answer, RegionRequest, Session

logger = logging.getLogger("tierfall")

LAYOUTS_KEPT = 4
ANSWER_S = 5.0
"""Seconds beyond ``max_wait`` that a save waits for rank 0's answer that there is no assignment."""
SEGMENTATIONS_KEPT = 4


@dataclass(slots=True, kw_only=True)
class SaveCall:
    """One call of ``save``, which began at ``began_s`` on the monotonic clock.

    Without ``may_be_lazy``, all of the state is copied before the call returns; ``at_end``: every tier is to get it.
    """

    step: int
    began_s: float
    metrics: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()
    may_be_lazy: bool = True
    at_end: bool = False
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedImage:
    """A state, and where its bytes are in the image."""

    view: StateView
    layout: Layout
    header: bytes
    share: ReplicaShare | None


class Saver:
    """Makes one snapshot after another."""

    def __init__(self, session: Session, capturer: Capturer) -> None:
        self._config = config = session.config
        self._session = session
        self._capturer = capturer
        self._layouts = Layouts(session)
        self._walk_cache = WalkCache()
        kept: deque[tuple[Segmentation, CheckPlan, FiniteSample]] = deque(maxlen=SEGMENTATIONS_KEPT)
        self._segmentations = kept
        self._streams = Streams()
        self._places = CaptureDevices(self._streams, self._open_slab)
        self._pace = RateLimiter(rate) if (rate := config.capture.bandwidth_bytes_per_s) else None
        self._conditions = Conditions()
        self.tried = 0
        """Saves that began, or found no room."""
        self.last: SaveHandle | None = None
        """The last save that began."""
        self.lock = threading.RLock()
        """Held during a save: saves of several threads follow one another."""

    def save(
        self, lineage: SavingLineage, call: SaveCall, walk: Callable[[WalkCache], StateView]
    ) -> SaveHandle:
        """Begin the capture of the state that ``walk`` returns a view of, as the next checkpoint of ``lineage``."""
        call.metrics, call.tags = checked_metrics(call.metrics), checked_tags(call.tags)
        self._capturer.barrier.streams.join()
        with gc_paused():
            view = self._capturer.evidence.follow_optimizers(walk(self._walk_cache))
            id = CheckpointId(call.step, lineage.attempt.number)
            layout, header, share = self._layouts.of(view, id)
        self._capturer.barrier.gradients.on_save(call.step, view.parameters)
        image = _PlannedImage(view=view, layout=layout, header=header, share=share)
        return self._begin(lineage, call, image)

    def _begin(self, lineage: SavingLineage, call: SaveCall, image: _PlannedImage) -> SaveHandle:
        place = replace(self._place(lineage, call.step), at_end=call.at_end)
        id = place.checkpoint
        rules = self._session.coordinator.ledger.rules
        owed = tiers_owed(rules, place.ordinal, at_end=call.at_end)
        tiers = tuple(name for name in owed if name in self._session.stores)
        handle = SaveHandle(
            id,
            tiers,
            in_memory=self._session.host.name,
            before_wait=partial(self._help_capture, id, threading.get_ident()),
            callbacks=self._session.callbacks,
            clock=time.monotonic,
            began_s=call.began_s,
        )
        try:
            room = self._request_region(place, image.layout, call)
        except CapacityError as error:
            if self.last is None:  # a configuration that can never work
                raise
            self._conditions.report(
                "skips", logging.WARNING, "save of step %d is skipped: %s", call.step, error
            )
            self._skip(lineage, handle, error)
            return handle
        with _as_capture_errors(id, room.cancel), gc_paused():  # while the coordinator makes room
            if image.share is not None:  # before any copy, which follows on the device
                image.share.read(image.view, place.ordinal, self._streams)
            plan = self._plan(image, call)
            self._session.host.prepare(self._places.first)
        region, no_room = room.region()
        if region is None:
            assert no_room is not None
            self._skip(lineage, handle, no_room)
            return handle
        text = "step %d fits into host memory again: saves are not skipped"
        self._conditions.end("skips", text, call.step)
        self._capturer.evidence.reset()
        with _as_capture_errors(id, region.release), gc_paused():
            snapshot = self._snapshot(region, place, image, handle, call, plan)
        lineage.advance(place)
        try:
            self._session.coordinator.post(CaptureBegun(snapshot=snapshot, tiers=tiers))
            self._capture(snapshot, call.began_s, lazy=plan.lazy)
        except BaseException as error:
            self._capturer.give_up(snapshot, error)
            raise
        return handle

    def report_failed(self, lineage: SavingLineage, step: int, error: BaseException) -> None:
        """Report to the other ranks that this rank's save has failed: none waits for it, and all count its ordinal."""
        if not self._session.ranks.many or step == lineage.last_step:
            return
        place = self._place(lineage, step)
        if lineage.last_step is None or step > lineage.last_step:
            lineage.advance(place)
        outcome = SaveOutcome.SKIPPED if isinstance(error, CapacityError) else SaveOutcome.FAILED
        self._session.coordinator.post(
            SaveGivenUp(id=place.checkpoint, error=error, outcome=outcome)
        )

    def _place(self, lineage: SavingLineage, step: int) -> Lineage:
        """Return the next place in the lineage; other ranks may have counted further."""
        return lineage.next(step, above=self._session.coordinator.ledger.least_ordinal)

    def close(self) -> None:
        """Release the device's memory."""
        self._places = CaptureDevices(Streams())

    def _request_region(self, place: Lineage, layout: Layout, call: SaveCall) -> RegionRequest:
        """Request a region of host memory. Raises CapacityError if memory can never hold such an image; at the first
        save, if some tier cannot. Later, the coordinator leaves out a tier that the image has outgrown."""
        if self.last is None:
            self._check_capacities(layout)
            self._session.host.release_damaged()  # not before: a restore reports it
        records = records_bytes_max(
            pieces_bytes=len(layout.pieces),
            chunks=layout.image_plan(self._config.chunk_bytes).chunk_count,
            metrics=call.metrics,
            tags=call.tags,
            run=place.run,
        )
        self._session.tiers.hold_memory()
        self._session.host.ensure_capacity(image_bytes=layout.image_bytes, records_bytes=records)
        return RegionRequest(
            self._session,
            place.checkpoint,
            image_bytes=layout.image_bytes,
            records_bytes=records,
        )

    def _open_slab(self, device: torch.device) -> DeviceSlab | None:
        """Allocate the device tier's memory; None, with a log line, if that fails."""
        tier = self._config.device
        if tier is None:
            return None
        return DeviceSlab.allocate(tier.capacity_bytes, device, name=tier.name)

    def _plan(self, image: _PlannedImage, call: SaveCall) -> _CapturePlan:
        """Decide how a state is captured, and read what its image is compared with."""
        view = image.view
        places = self._places.places_of(view.sources)
        if self._config.device is not None and not places:
            self._capturer.evidence.warn_once(
                f"save: goes on without tier {self._config.device.name}: the state is not on a CUDA device"
            )
        lazy = self._choose_lazy(view, call)
        segments, check, finite = self._cut(image.layout, view, places, lazy)
        sources = TensorSources(view, segments)
        if lazy is None or check is None:
            return _CapturePlan(places, segments, sources, None, finite, lazy=lazy is not None)
        streams = self._places.streams if places else {}
        is_full = self._config.capture.verify is Verify.FULL
        begun = check.begin(sources, streams, None if is_full else DIGEST_BYTES)
        return _CapturePlan(places, segments, sources, begun, finite, lazy=True)

    def _snapshot(
        self,
        region: HostRegion,
        place: Lineage,
        image: _PlannedImage,
        handle: SaveHandle,
        call: SaveCall,
        plan: _CapturePlan,
    ) -> Snapshot:
        """Begin to fill a region: what is not captured lazily is copied here."""
        post = self._session.coordinator.post
        id, layout = place.checkpoint, image.layout
        fixed = {
            name: self._places.present_value(value, plan.places)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in call.metrics.items()
        }
        filling = ImageCopier(
            memory=region.image,
            header=image.header,
            cutting=plan.segments,
            sources=plan.sources,
            streams=self._places.streams if plan.places else None,
            slab=self._places.slab if plan.places else None,
            pace=self._pace,
            check=plan.check,
            helpers=self._capturer.helpers,
            on_progress=lambda final: post(CaptureAdvanced(id=id, final_chunks=final)),
        )
        return Snapshot(
            lineage=place,
            shard=self._session.ranks.shard,
            image_plan=layout.image_plan(self._config.chunk_bytes),
            region=region,
            handle=handle,
            copier=filling,
            wall_time_s=time.time(),
            metrics=fixed,
            tags=tuple(call.tags),
            progress=call.progress,
            node=self._session.node,
            share=image.share,
            lazy_bytes=plan.segments.lazy_bytes if plan.lazy else 0,
            finite=plan.finite,
        )

    def _cut(
        self,
        layout: Layout,
        view: StateView,
        places: Sequence[int],
        lazy: Sequence[bool] | None,
    ) -> tuple[Segmentation, CheckPlan | None, FiniteSample]:
        """Return the segments of a layout, how an image of it is checked, and how NaN is found in it; all are cached
        for the next saves."""
        if lazy is None:  # all is copied before save returns, by two threads
            lazy = tuple(changes is Changes.ON_STEP for changes in view.changes)
        known = (
            kept for kept in self._segmentations if kept[0].matches(layout, view, places, lazy)
        )
        found = next(known, None)
        if found is None:
            segments = Segmentation(layout, view, self._config.chunk_bytes, places, lazy)
            found = segments, CheckPlan(segments, view), FiniteSample(layout, view)
            self._segmentations.appendleft(found)
        segments, check, finite = found
        return segments, None if self._config.capture.verify is Verify.OFF else check, finite

    def _check_capacities(self, layout: Layout) -> None:
        for tier in self._config.chain:
            capacity = tier.capacity_bytes if isinstance(tier, StoredTierConfig) else None
            if capacity is not None and layout.image_bytes > capacity:
                raise CapacityError(
                    f"save: one checkpoint takes {format_size(layout.image_bytes)} ({layout.image_bytes} bytes), "
                    f"tier {tier.name} has a capacity of {format_size(capacity)} "
                    f"({capacity} bytes): raise it, or take the tier out of the chain"
                )

    def _skip(self, lineage: SavingLineage, handle: SaveHandle, error: BaseException) -> None:
        if not isinstance(error, CapacityError):
            raise error
        handle.on_given_up(SaveOutcome.SKIPPED, error)
        self.tried += 1
        id = CheckpointId(handle.step, handle.attempt)
        self._session.journal.save_ended(id, SaveOutcome.SKIPPED, error)
        self.report_failed(lineage, handle.step, error)
        if self._config.on_error is OnError.RAISE:
            raise error

    def _choose_lazy(self, view: StateView, call: SaveCall) -> tuple[bool, ...] | None:
        """Return which tensors are captured lazily; None where none is."""
        if not call.may_be_lazy or self._config.capture.mode is CaptureMode.BLOCKING:
            return None
        evidence, first = self._capturer.evidence, self.last is None
        reason = evidence.reason_to_block(elsewhere=self._places.without_stream, first=first)
        chosen = evidence.choose(view) if reason is None else ()
        if reason is None and not any(map(torch.Tensor.numel, compress(view.sources, chosen))):
            reason = "no tensor of it is known to change only inside an optimizer's step"
        if reason is None:
            return chosen
        if not first:
            evidence.warn_once(f"this save captures blocking: {reason}")
        return None

    def _capture(self, snapshot: Snapshot, began_s: float, *, lazy: bool) -> None:
        self.tried += 1
        self.last = snapshot.handle
        try:
            self._capturer.begin(snapshot, lazy=lazy, here=bool(self._places.without_stream))
        finally:
            snapshot.handle.on_begun(
                bytes=snapshot.image_plan.image_bytes,
                lazy=lazy,
                blocked_s=time.monotonic() - began_s,
                lazy_bytes=snapshot.lazy_bytes,
            )

    def _help_capture(self, id: CheckpointId, saver: int, timeout: float | None) -> None:
        """Help the capture to end where the thread that saved waits on its handle: this is a barrier, since that thread
        changes nothing meanwhile."""
        if threading.get_ident() == saver:
            self._capturer.help_capture(id, timeout)


@contextmanager
def _as_capture_errors(id: CheckpointId, undo: Callable[[], object]) -> Iterator[None]:
    """Undo what was begun for a save that ends in an error, and raise that as a CaptureError."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - raised again below
        undo()
        raise as_capture_error(id, error)  # noqa: B904 - its cause is set


@dataclass(frozen=True, slots=True)
class _CapturePlan:
    """How one state is captured: the ``places`` of its tensors, their segments, what the image is compared with
    (``check``), how NaN is found in it, and whether any of it is captured lazily."""

    places: Sequence[int]
    segments: Segmentation
    sources: TensorSources
    check: ImageCheck | None
    finite: FiniteSample
    lazy: bool


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as floats; raise CaptureError for what is not a number.

    A tensor on a device is returned detached: the capture reads it in the order of the device's work.
    """
    if not isinstance(metrics, Mapping):
        raise CaptureError(
            f"save: metrics is {with_article(type(metrics).__name__)}, expected a mapping of names to numbers"
        )
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise CaptureError(f"save: metrics: a name is {name!r}, expected a string")
        dims = getattr(value, "ndim", 0)
        if dims or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            kind = f"{with_article(type(value).__name__)}{f' of {dims} dimensions' if dims else ''}"
            raise CaptureError(
                f"save: metrics[{name!r}] is {kind}, expected a number or a 0-dim tensor"
            )
    return {name: _read_metric(name, value) for name, value in metrics.items()}


def _read_metric(name: str, value: Any) -> Any:
    """Return a metric's present value: the loop may change it after save."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if not (value.is_cpu or value.is_meta or value.is_complex()):
            return value
    try:
        read = float(value)
        if math.isinf(read) and value != read:  # float() of a large Decimal raises nothing
            raise OverflowError(f"it is larger than {sys.float_info.max:.2g}")
        return read
    except OverflowError as error:
        raise CaptureError(
            f"save: metrics[{name!r}] is too large for a 64-bit float, as metrics are stored ({error}): give it in a "
            "larger unit, or put it into the state. Nothing of this step was saved: save it again without that metric"
        ) from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise CaptureError(
            f"save: metrics[{name!r}] cannot be read as a number: {error}"
        ) from error


def checked_tags(tags: Sequence[str]) -> tuple[str, ...]:
    """Return tags as a tuple; raise ConfigError unless they are a list of valid names."""
    if fault := list_fault(tags):
        raise ConfigError(f"save: tags {fault}")
    return tuple(check_name(tag, what="save: tags") for tag in tags)


# The lineage ------------------------------------------------------------------------------------


def as_step(step: Any, *, doing: str = "save", what: str = "step") -> int:
    """Return a step as a plain integer. Accepts any integer (NumPy's too); raises StepError for a bool."""
    if not isinstance(step, bool):
        with suppress(TypeError, RuntimeError):  # a tensor of several elements, or without any
            return operator.index(step)
    swapped = isinstance(step, Mapping) and doing == "save"
    shown = "the state: the step comes first, save(step, state)" if swapped else f"{step!r}"[:80]
    newest = "; leave it out for the newest" if doing in ("load", "restore") else ""
    raise StepError(f"{doing}: {what} must be an integer of at least 0, not {shown}{newest}")


class SavingLineage:
    """One run's lineage in this process. ``begun``: it may save, after a restore, by ``fresh``, or in a new run.

    ``started_from`` is the checkpoint that it continues from, ``last_step`` the last that was saved or restored,
    ``ordinal`` that of its checkpoint. ``half_filled``
    are the parts of the state (``only``; None: all of it) that failed restores have left half filled.
    """

    def __init__(self, run: str, attempt: Attempt, *, begun: bool) -> None:
        self._run = run
        self.attempt = attempt
        self.begun = begun
        self.saved_any = False
        self.started_from: CheckpointId | None = None
        self.half_filled: set[tuple[str, ...] | None] = set()
        self.ordinal = 0
        self.last_step: int | None = None

    def check(self, step: int) -> None:
        """Raise StepError unless ``step``, a plain integer (``as_step``), may be saved now."""
        if step < 0:
            raise StepError(f"save: step must be an integer of at least 0, not {step}")
        if step > STEP_MAX:
            raise StepError(f"save: step must be at most {STEP_MAX}, the largest that has a name")
        self.check_begun(step)
        if self.last_step is not None and step <= self.last_step:
            raise StepError(
                f"save of step {step}: this lineage is at step {self.last_step} already, and a committed step is "
                "never overwritten. After restore() a loop goes on at report.step + 1; to go back to an older step, "
                "call restore(step=...) first"
            )

    def check_begun(self, step: int) -> None:
        """Raise StepError unless this start may save at all."""
        if self.half_filled:
            raise StepError(
                f"save of step {step}: the last restore() left the state half filled, of no step. Restore a checkpoint "
                "first, the newest or another step"
            )
        if not self.begun:
            raise StepError(
                f"save of step {step}: run {self._run!r} has checkpoints already (or a tier could not be asked), and "
                "this start restored none. Call restore() first to continue (restore(only=...) fills a part, and "
                "continues none), choose another run name, or open with fresh=True to leave them behind"
            )

    def next(self, step: int, *, above: int = 0) -> Lineage:
        """Return the next checkpoint's place in the lineage; its ordinal is above ``above``, which other ranks
        count."""
        return Lineage(
            run=self._run,
            checkpoint=CheckpointId(step, self.attempt.number),
            attempt_id=self.attempt.id,
            ordinal=max(self.ordinal, above) + 1,
            started_from=self.started_from,
        )

    def has_saved(self, step: int) -> bool:
        """Return whether ``step`` is the last step that was saved since the last restore."""
        return self.saved_any and step == self.last_step

    def advance(self, line: Lineage) -> None:
        """Note that the capture of a checkpoint has begun."""
        self.saved_any = True
        self.last_step = line.checkpoint.step
        self.ordinal = line.ordinal

    def continue_from(self, commit: Commit, attempt: Attempt) -> None:
        """Continue from a restored checkpoint, as ``attempt``."""
        self.attempt = attempt
        self.saved_any = False
        self.half_filled.clear()
        self.started_from = commit.lineage.checkpoint
        self.last_step = commit.lineage.checkpoint.step
        self.ordinal = commit.lineage.ordinal
        self.begun = True


# Layouts ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedLayout:
    """A cached layout, and the replica assignment (``division``) it was planned with.

    Both depend on ``structure``, ``changes`` and ``rules`` of the state. ``replicas`` is what is compared with other
    ranks. ``divided``: there are no replicas.
    """

    layout: Layout
    structure: str
    changes: tuple[Changes, ...]
    rules: Mapping[str, OnResize]
    division: ReplicaAssignment | None = None
    replicas: ReplicaPlan | None = None
    divided: bool = False

    def serves(self, view: StateView) -> bool:
        same = self.changes == view.changes and self.rules == view.rules
        return same and self.layout.matches(view)

    def share(self, digests: ReplicaDigests | None) -> ReplicaShare:
        name = None if self.division is None else self.division.id
        return ReplicaShare(
            structure=self.structure, assignment=name, replicas=self.replicas, digests=digests
        )


class Layouts:
    """The layouts of the last few structures. Used by the thread that saves."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._planned: list[_PlannedLayout] = []
        self._reported: str | None = None
        """The structure reported last to the other ranks, if it has no replicas; else None."""

    def of(
        self,
        view: StateView,
        id: CheckpointId,
    ) -> tuple[Layout, bytes, ReplicaShare | None]:
        """Return layout and header of a view, and how its replicas were assigned, for the other ranks."""
        # what assigns replicas to ranks; None if one rank writes all
        divider = self._session.coordinator.replicas if self._session.ranks.many else None
        found = next((p for p in self._planned if p.serves(view)), None)
        digests = None
        if found is None or (divider is not None and not self._is_current(found, divider)):
            found, digests = self._plan(view, id, divider)
        header = found.layout.header(view)
        if header is None:  # a value outgrew the space reserved for it
            left_out = dict(found.layout.written_by_others)
            found = self._keep(replace(found, layout=plan_layout(view, left_out)))
            header = found.layout.header(view)
            assert header is not None
        return found.layout, header, None if divider is None else found.share(digests)

    def _is_current(self, planned: _PlannedLayout, divider: ReplicaAssigner) -> bool:
        """Return whether the ranks still use the assignment that a layout was planned with."""
        if planned.divided:
            return self._reported == planned.structure
        division = divider.assignments.get(planned.structure)
        return division is not None and division is planned.division

    def _plan(
        self,
        view: StateView,
        id: CheckpointId,
        divider: ReplicaAssigner | None,
    ) -> tuple[_PlannedLayout, ReplicaDigests | None]:
        """Plan a layout, and return the digests of the replicas if they are to be compared now."""
        whole = plan_layout(view)
        planned = _PlannedLayout(
            layout=whole, structure=whole.structure, changes=view.changes, rules=view.rules
        )
        if divider is None:
            return self._keep(planned), None
        shareable = ReplicatedTensors(view, whole.structure, self._session.config.chunk_bytes)
        structure = shareable.table.structure
        self._reported = None if shareable.numbers else structure
        if not shareable.numbers:
            self._session.coordinator.post(
                AssignmentRequest(id=id, shareable=shareable, on_answer=lambda division: None)
            )
            return self._keep(replace(planned, structure=structure, divided=True)), None
        division = divider.assignments.get(structure)
        digests = None
        if division is None:
            division = self._request_assignment(id, shareable)
            if division is not None and len(division.keys):
                digests = shareable.digests(division)
        layout, replicas = whole, None
        if division is not None:
            rank = self._session.ranks.shard.rank
            if left_out := shareable.written_by_others(division, rank):
                layout = plan_layout(view, left_out)
            if len(division.keys):
                replicas = ReplicaPlan(shareable, division)
        planned = replace(
            planned, layout=layout, structure=structure, division=division, replicas=replicas
        )
        return self._keep(planned), digests

    def _request_assignment(
        self, id: CheckpointId, shareable: ReplicatedTensors
    ) -> ReplicaAssignment | None:
        """Have the replicas assigned to ranks; None where not all ranks report what they save."""
        answer = Answer()
        self._session.coordinator.post(
            AssignmentRequest(id=id, shareable=shareable, on_answer=answer)
        )
        if not self._session.wait(answer, self._session.config.max_wait_s + ANSWER_S):
            logger.warning(
                "save: rank 0 did not say within max_wait how to divide step %d", id.step
            )
            return None
        if answer.value is None:
            logger.info("save of step %d: each rank writes all that it holds", id.step)
        return answer.value  # type: ignore[no-any-return]

    def _keep(self, planned: _PlannedLayout) -> _PlannedLayout:
        others = [kept for kept in self._planned if kept.structure != planned.structure]
        self._planned = [planned, *others[: LAYOUTS_KEPT - 1]]
        return planned


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable Python's garbage collection in all threads, and restore the previous setting. Not for blocks that may
    wait.

    A save creates many small objects, nearly all short-lived, which count towards the next collection. A full one takes
    250 ms in a process that has imported torch, while training waits.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
