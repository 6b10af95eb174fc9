"""Room in host memory: saves that request a region, and the images that are evicted or superseded for them.

A save waits until its deadline at most, or not at all; the policies decide what may be evicted. No I/O.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Protocol

from tierfall.core.capture.snapshot import CaptureAdvanced, HostMemory, HostRegion
from tierfall.core.flush.component import Component
from tierfall.core.flush.facts import LedgerEntry
from tierfall.core.flush.tasks import AdmissionRequest, CopyRun, Event, Outcome
from tierfall.core.types import events
from tierfall.core.types.errors import CapacityError, FlushError
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, CopyState, SaveOutcome, WhenFull
from tierfall.core.types.view import Decision, Verdict, View
from tierfall.policies.backpressure import plan_superseding
from tierfall.policies.eviction import plan_eviction

if TYPE_CHECKING:
    from tierfall.core.flush.coordinator import Coordinator

logger = logging.getLogger("tierfall")


class LeftoverMemory(Protocol):
    """Memory that ranks of an earlier start left."""

    def on_committed(self, tier: str, newer: LedgerEntry) -> None: ...

    def evict_oldest(self) -> bool: ...

    def free_deleted(self, is_noted: Callable[[CheckpointId], bool]) -> None: ...


class Admissions(Component):
    """Saves that wait for a region, first come, first served."""

    def __init__(self, coordinator: Coordinator, *, host: HostMemory, when_full: WhenFull) -> None:
        super().__init__(coordinator)
        ledger = coordinator.ledger
        self._host = host
        self._kept: tuple[str, ...] = ()
        """Why no image was superseded for the last save."""
        self._when_full = when_full
        self._bounds_s = {r.name: r.max_wait_s for r in ledger.rules if r.max_wait_s is not None}
        self._may_supersede = when_full is WhenFull.SUPERSEDE or any(
            r.when_full in (WhenFull.SKIP, WhenFull.SUPERSEDE)
            for r in ledger.rules
            if r.name != ledger.host
        )
        self._asked: set[CheckpointId] = set()
        """The checkpoints whose copy in peer memory this rank has asked to give up."""
        self._waiting: deque[AdmissionRequest] = deque()
        self._refused: AdmissionRequest | None = None
        self._only_progress = False

    def enqueue(self, request: AdmissionRequest) -> None:
        self._waiting.append(request)

    def observe(self, handled: Collection[Event]) -> bool:
        """Note the events of this step; return whether anything but progress of copies has happened. While copies only
        make progress, nothing further may be deleted, and a plan for room, which is linear in the number of
        checkpoints, is not made again."""
        self._only_progress = bool(handled) and all(self._is_progress(event) for event in handled)
        return not self._only_progress

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

    def fail_all(self, error: BaseException) -> None:
        """Refuse all waiting saves."""
        while self._waiting:
            self._waiting.popleft().on_answer(None, error)

    def _deadline_s(self, request: AdmissionRequest) -> float:
        """Return when a save stops waiting: after the longest ``max_wait`` of the tiers whose copies occupy memory."""
        if not self._bounds_s:
            return request.deadline_s
        behind = {tier for e in self._ledger.open() if e.region is not None for tier in e.owed}
        bound_s = max(
            (self._bounds_s.get(tier, self._planner.max_wait_s) for tier in behind),
            default=self._planner.max_wait_s,
        )
        return request.deadline_s - self._planner.max_wait_s + bound_s

    def try_admit(self, now_s: float) -> None:
        """Answer each request that has room now or has waited long enough; refuse all if there is a newer attempt."""
        self._release_given_up()
        while self._waiting:
            request = self._waiting[0]
            if request.cancelled.is_set():
                self._waiting.popleft()
                continue
            region: HostRegion | None = None
            error: BaseException | None = self._ledger.fenced
            if error is None:
                waits = self._when_full is not WhenFull.SKIP and now_s < self._deadline_s(request)
                region = self._allocate(
                    request,
                    may_plan=not (waits and self._only_progress and request is self._refused),
                )
                self._ledger.memory_is_short = region is None
                if region is None and waits:
                    self._refused = request
                    for each in self._waiting:
                        self._wake_at(self._deadline_s(each))
                    return
                if region is None:
                    error = self._no_room(request)
                    skipped = SaveOutcome.SKIPPED
                    self._emit(events.SaveEnded, id=request.id, outcome=skipped, reason=error)
            self._waiting.popleft()
            if region is not None:
                host = self._ledger.host
                self._conditions.end(host, "tier %s has room again: saves are not skipped", host)
            request.on_answer(region, error)
            self._planner.backlog.on_save_admitted(now_s)

    def _allocate(self, request: AdmissionRequest, *, may_plan: bool) -> HostRegion | None:
        """Allocate a region; evict images one by one until it fits. Files may be of several sizes, so that the free
        bytes do not tell: each eviction is followed by an attempt."""
        while True:
            region = self._host.allocate(
                image_bytes=request.image_bytes, records_bytes=request.records_bytes
            )
            if region is not None or not may_plan or not self._make_room(request):
                return region

    def _make_room(self, request: AdmissionRequest) -> bool:
        """Evict or supersede one image; return False where none may be."""
        free, view = self._host.free_bytes, self._ledger.view()
        plan = plan_eviction(
            view,
            self._ledger.host,
            need_bytes=max(request.image_bytes + request.records_bytes, free + 1),
            free_bytes=free,
        )
        evictable = [d for d in plan.deletions if not self._relied_on(d)]
        # other ranks' images of an earlier start go before an image of this rank that is of use
        may_evict = bool(evictable) and not self._is_of_use(view, evictable[0])
        leftovers = self._planner.leftovers
        if not may_evict and leftovers is not None and leftovers.evict_oldest():
            return True
        if evictable:
            self._evict(evictable[0])
            return True
        if self._host.take_spare():
            return True
        for decision in plan.deletions:
            self._ask_to_give_up(decision)
        if not self._may_supersede:
            return False
        if not self._supersede(request):
            return False
        self._release_given_up()
        return True

    def _relied_on(self, decision: Decision) -> frozenset[str]:
        """Return the peer memory that may count on an image which is to be evicted: this rank has uploaded it, and it
        may be committed at any time."""
        entry = self._ledger.entries[decision.checkpoint]
        return self._ledger.peer_tiers & entry.uploaded_to & entry.owed

    def _ask_to_give_up(self, decision: Decision) -> None:
        """Ask all ranks, once, to give up the copies that are ``_relied_on``, so that the image may be evicted."""
        entry = self._ledger.entries[decision.checkpoint]
        for name in sorted(self._relied_on(decision)) if entry.id not in self._asked else ():
            error = FlushError(f"flush of {entry.id} to {name} is given up: {decision.reason}")
            self._messages.report_copy_failed(name, entry.id, error)
            self._asked.add(entry.id)

    def _is_of_use(self, view: View, decision: Decision) -> bool:
        """Return whether an image is the newest of the live ones in memory, or a tier is owed it."""
        newest = next((c.id for c in view.live if c.readable_on(self._ledger.host)), None)
        return decision.checkpoint == newest or bool(self._ledger.entries[decision.checkpoint].owed)

    def _supersede(self, request: AdmissionRequest) -> bool:
        """Give up one image that is not flushed yet for a newer save; return False if none may be, with the reasons in
        ``_kept``. The policy chooses it.

        A kill at any point is safe: first one atomic write of 8 bytes unseals the image, so that no later start uses
        it; then the handle reports it; the region is freed once no task reads it. An image that a lane is copying is
        never superseded, so no copy has to be aborted.
        """
        view = self._ledger.view(settling=self._planner.flusher.settling())
        host = self._ledger.host
        entries = self._ledger.entries
        decisions = plan_superseding(
            view,
            host,
            fits=lambda gone: self._host.would_fit(
                image_bytes=request.image_bytes,
                records_bytes=request.records_bytes,
                without=[r for id in gone if (r := entries[id].region)],
            ),
        )
        self._kept = tuple(f"{d.checkpoint}: {d.reason}" for d in decisions)
        for decision in decisions:
            if decision.verdict is Verdict.DROP:
                self._give_up(entries[decision.checkpoint], decision.reason, request.id)
                return True
        return False

    def _give_up(self, entry: LedgerEntry, reason: str, saved: CheckpointId) -> None:
        host = self._ledger.host
        assert entry.region is not None
        error = CapacityError(
            f"save of step {entry.id.step} is superseded by step {saved.step}: tier {host} had no room for both "
            f"(when_full), and of what lies there {reason}. It was still owed to "
            f"{', '.join(sorted(entry.owed))}, and is given up there. Raise the tier's capacity, save less often, or "
            "flush less"
        )
        superseded = SaveOutcome.SUPERSEDED
        self._emit(events.SaveEnded, id=entry.id, outcome=superseded, reason=error)
        if entry.region.sealed:
            entry.region.unseal()
        entry.owed = frozenset()
        entry.set_state(host, CopyState.LEAVING)
        if entry.handle is not None:
            entry.handle.on_given_up(superseded, error)
        logger.warning("%s", error)
        self._messages.report_save_failed(entry.id, error, superseded)

    def _no_room(self, request: AdmissionRequest) -> CapacityError:
        """Return the error of a skipped save, and log it; with ``skip``, once until a save finds room again."""
        waiting = sorted({name for e in self._ledger.open() for name in e.owed})
        behind = f"; copies are still owed to {', '.join(waiting)}" if waiting else ""
        kept = ""
        if self._when_full is WhenFull.SKIP:
            waited = "none is free (when_full: skip)"
        else:
            waited_s = self._deadline_s(request) - request.deadline_s + self._planner.max_wait_s
            waited = f"none became free within max_wait ({waited_s:g} s)"
        if self._may_supersede and self._kept:
            kept = f" (nothing was given up for it: {'; '.join(self._kept)})"
        error = CapacityError(
            f"save of step {request.id.step}: tier {self._ledger.host} has room for "
            f"{format_size(self._host.largest_free_bytes)}, of {format_size(self._host.capacity_bytes)}; "
            f"the image needs {format_size(request.image_bytes + request.records_bytes)}, and "
            f"{waited}{behind}{kept}: this save is skipped. "
            "Raise the tier's capacity, save less often, or flush less"
        )
        if self._when_full is WhenFull.SKIP:
            self._conditions.report(self._ledger.host, logging.WARNING, "%s", error)
        else:
            logger.warning("%s", error)
        return error

    def _evict(self, decision: Decision) -> None:
        entry = self._ledger.entries[decision.checkpoint]
        level, why = logging.INFO, ""
        if entry.id in self._ledger.scattered:
            level = logging.WARNING
            why = "; no rank flushes it, as no tier that all ranks reach has all its images"
        logger.log(level, "%s: %s is deleted: %s%s", decision.tier, entry.id, decision.reason, why)
        if not any(state is CopyState.COMMITTED for state in entry.states.values()):
            for name in sorted(entry.owed - entry.uploaded_to):  # an uploaded image needs no source
                error = FlushError(f"flush of {entry.id} to {name} is given up: {decision.reason}")
                self._planner.flusher.give_up_for_all(entry, name, error)
        self.free(entry, decision.reason)

    def free(self, entry: LedgerEntry, reason: str = "deleted by a person") -> None:
        """Free the region of a checkpoint's image."""
        self._asked.discard(entry.id)
        host = self._ledger.host
        size = entry.bytes.get(host, 0)
        self._emit(events.Evicted, id=entry.id, tier=host, bytes=size, reason=reason)
        entry.free()
        entry.final_chunks = 0
        entry.note_gone(host)
        self._ledger.forget_if_gone(entry)

    def _release_given_up(self) -> None:
        """Free the regions of failed and superseded images that no worker reads any more."""
        host = self._ledger.host
        for entry in self._ledger.open():
            if entry.states.get(host) is CopyState.LEAVING and not entry.leases.get(host):
                self.free(entry, "its save was given up")
