"""Room in host memory: saves that ask for a region, images that leave so that one can be had.

A save waits until its deadline, no longer, or not at all; what may leave is the policies' to say. No I/O: a region is
handed out, or there is none.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection
from functools import partial

from tierfall.core.capture.events import CaptureAdvanced
from tierfall.core.capture.snapshot import HostMemory, HostRegion
from tierfall.core.scheduler.flush.backlog import Backlog
from tierfall.core.scheduler.flush.flusher import Flusher
from tierfall.core.scheduler.flush.superseding import Superseder
from tierfall.core.scheduler.ledger.emitter import EventEmitter
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.policies import Policies
from tierfall.core.scheduler.ledger.tasks import AdmissionRequest, CopyRun, Event, Outcome
from tierfall.core.types.errors import CapacityError, FlushError
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CopyState, SaveOutcome, WhenFull
from tierfall.core.types.view import Decision

logger = logging.getLogger("tierfall")


class Admissions:
    """Saves that wait for a region, first come, first served. ``last_resort`` lets go of memory that no policy knows
    of, and says whether there was any; ``answered`` hears when a save goes on."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        host: HostMemory,
        policies: Policies,
        flusher: Flusher,
        superseder: Superseder,
        backlog: Backlog,
        hooks: Hooks,
        emitter: EventEmitter,
        when_full: WhenFull,
        max_wait_s: float,
    ) -> None:
        self._ledger = ledger
        self._host = host
        self._policies = policies
        self._flusher = flusher
        self._superseder = superseder
        self._backlog = backlog
        self._hooks = hooks
        self._emitter = emitter
        self._when_full = when_full
        self._max_wait_s = max_wait_s
        self._bounds_s = {r.name: r.max_wait_s for r in ledger.rules if r.max_wait_s is not None}
        self._gives_up = when_full is WhenFull.SUPERSEDE or any(
            r.when_full in (WhenFull.SKIP, WhenFull.SUPERSEDE)
            for r in ledger.rules
            if r.name != ledger.host
        )
        self._waiting: deque[AdmissionRequest] = deque()
        self._found_no_room = False
        self._refused: AdmissionRequest | None = None
        self._copies_go_on = False
        self._said: set[str] = set()

    def ask(self, request: AdmissionRequest) -> None:
        self._waiting.append(request)

    def note(self, took: Collection[Event]) -> None:
        """Know what this step has heard. Where copies only go on, nothing may leave memory that could not before, and
        the plans for a save that waits, which look at every checkpoint, are not worked out again."""
        self._copies_go_on = bool(took) and all(self._is_progress(event) for event in took)

    def _is_progress(self, event: Event) -> bool:
        match event:
            case CaptureAdvanced():
                return True
            case Outcome(task=CopyRun() as run, error=None):
                entry, host = self._ledger.entries.get(run.id), self._ledger.host
                return run.source.tier != host or bool(entry and entry.leases.get(host))
        return False

    def busy(self) -> bool:
        return bool(self._waiting)

    def is_short(self) -> bool:
        """Say whether the last save that was tried found no room: it waits, or the next one will want it too."""
        return self._found_no_room

    def answer_all(self, error: BaseException) -> None:
        """No region is handed out any more."""
        while self._waiting:
            self._waiting.popleft().answer(None, error)

    def deadlines_s(self) -> list[float]:
        return [self._deadline_s(request) for request in self._waiting]

    def _deadline_s(self, request: AdmissionRequest) -> float:
        """How long a save waits: for as long as any tier that memory is held for may be waited for."""
        if not self._bounds_s:
            return request.deadline_s
        behind = {tier for e in self._ledger.open() if e.region is not None for tier in e.owed}
        bound_s = max(
            (self._bounds_s.get(tier, self._max_wait_s) for tier in behind),
            default=self._max_wait_s,
        )
        return request.deadline_s - self._max_wait_s + bound_s

    def admit(self, now_s: float, refusal: BaseException | None) -> None:
        """Answer every request that has room now, or has waited long enough; ``refusal`` answers them all."""
        self._release_given_up()
        while self._waiting:
            request = self._waiting[0]
            if request.cancelled.is_set():
                self._waiting.popleft()
                continue
            region: HostRegion | None = None
            error = refusal
            if error is None:
                waits = self._when_full is not WhenFull.SKIP and now_s < self._deadline_s(request)
                region = self._allocate(
                    request,
                    may_plan=not (waits and self._copies_go_on and request is self._refused),
                )
                self._found_no_room = region is None
                if region is None and waits:
                    self._refused = request
                    return
                if region is None:
                    error = self._no_room(request)
                    self._emitter.save_ended(request.id, SaveOutcome.SKIPPED, error)
            self._waiting.popleft()
            request.answer(region, error)
            self._backlog.answered(now_s)

    def _allocate(self, request: AdmissionRequest, *, may_plan: bool) -> HostRegion | None:
        """Take a region, making room image by image: free bytes may lie in pieces, so it is the try that tells."""
        while True:
            region = self._host.allocate(
                image_bytes=request.image_bytes, records_bytes=request.records_bytes
            )
            if region is not None or not may_plan or not self._make_room(request):
                return region

    def _make_room(self, request: AdmissionRequest) -> bool:
        """Let one image leave memory, or begin to; False where none may."""
        free = self._host.free_bytes
        plan = self._policies.plan_eviction(
            self._ledger.view(),
            self._ledger.host,
            need_bytes=max(request.image_bytes + request.records_bytes, free + 1),
            free_bytes=free,
        )
        if plan.drops:
            self._evict(plan.drops[0])
            return True
        if self._hooks.evict_leftovers():
            return True
        if not self._gives_up:
            return False
        would_fit = partial(
            self._would_fit, image_bytes=request.image_bytes, records_bytes=request.records_bytes
        )
        if not self._superseder.make_room(request.id, would_fit):
            return False
        self._release_given_up()
        return True

    def _would_fit(
        self, gone: Collection[HostRegion], *, image_bytes: int, records_bytes: int
    ) -> bool:
        return self._host.would_fit(
            image_bytes=image_bytes, records_bytes=records_bytes, without=gone
        )

    def _no_room(self, request: AdmissionRequest) -> CapacityError:
        """Say that a save is skipped, and why: always to whoever saves, and in the log, but for ``skip``, where each
        cause is said once."""
        waiting = sorted({name for e in self._ledger.open() for name in e.owed})
        behind = f"; copies are still owed to {', '.join(waiting)}" if waiting else ""
        kept = ""
        if self._when_full is WhenFull.SKIP:
            waited = "none is free (when_full: skip)"
        else:
            waited_s = self._deadline_s(request) - request.deadline_s + self._max_wait_s
            waited = f"none became free within max_wait ({waited_s:g} s)"
        if self._gives_up and self._superseder.kept:
            kept = f" (nothing was given up for it: {'; '.join(self._superseder.kept)})"
        error = CapacityError(
            f"save of step {request.id.step}: tier {self._ledger.host} has room for "
            f"{format_size(self._host.free_bytes)} of {format_size(self._host.capacity_bytes)}, the image needs "
            f"{format_size(request.image_bytes)}, and {waited}{behind}{kept}: this save is skipped. "
            "Raise the tier's capacity, save less often, or flush less"
        )
        said_before = self._when_full is WhenFull.SKIP and behind in self._said
        self._said.add(behind)
        logger.log(logging.DEBUG if said_before else logging.WARNING, "%s", error)
        return error

    def _evict(self, decision: Decision) -> None:
        entry = self._ledger.entries[decision.checkpoint]
        logger.info("%s: %s is dropped: %s", decision.tier, entry.id, decision.reason)
        if not any(state is CopyState.COMMITTED for state in entry.states.values()):
            for name in tuple(entry.owed):
                error = FlushError(f"flush of {entry.id} to {name} is given up: {decision.reason}")
                self._flusher.give_up_for_all(entry, name, error)
        self.free(entry, decision.reason)

    def free(self, entry: LedgerEntry, reason: str = "deleted by a person") -> None:
        """Give an image's region back."""
        self._emitter.evicted(self._ledger.host, entry, reason)
        entry.free()
        entry.final_chunks = 0
        entry.note_gone(self._ledger.host)
        self._ledger.forget_if_gone(entry)

    def _release_given_up(self) -> None:
        """Free the regions of images that failed or were superseded, once no worker reads them."""
        host = self._ledger.host
        for entry in self._ledger.open():
            if entry.state(host) is CopyState.LEAVING and not entry.leases.get(host):
                self.free(entry, "its save was given up")
