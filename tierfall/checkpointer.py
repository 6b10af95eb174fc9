"""The Checkpointer: what a training loop holds. It turns a state into a snapshot, and a checkpoint into a state.

It runs on the training thread and owns that thread's rules: one save after another, steps that rise, the barrier, the
line that is being saved. Bytes are moved by the session's workers and the capture thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from tierfall import telling
from tierfall.config import Config, FileTier
from tierfall.core.capture.capturer import Capturer
from tierfall.core.capture.filling import Filling
from tierfall.core.errors import (
    CapacityError,
    ConfigError,
    StepError,
    TierfallError,
)
from tierfall.core.handle import SaveHandle
from tierfall.core.image import Layout, StateView, describe, plan_fill, plan_layout
from tierfall.core.names import check_name
from tierfall.core.records import Line
from tierfall.core.restore.restore import Request, Restored, restore
from tierfall.core.scheduler.tasks import (
    Admission,
    CaptureAdvanced,
    CaptureBegun,
    Order,
    PersonsOrder,
)
from tierfall.core.snapshot import Geometry, HostRegion, Snapshot
from tierfall.core.units import format_size
from tierfall.core.values import CaptureMode, CheckpointId, OnError, SaveOutcome
from tierfall.core.view import Decision, Verdict
from tierfall.policies.bundle import plan_retention, tiers_owed
from tierfall.policies.cadence import should_save
from tierfall.reports import CheckpointInfo, DrainReport, RestoreReport, Statistics
from tierfall.session import SHARD, Session

logger = logging.getLogger("tierfall")


class Checkpointer:
    """Saves and restores one training run. Made by ``tierfall.open``; a context manager.

    One process has one Checkpointer per run. Its methods are called by the thread that trains; handles may be waited on
    by any.
    """

    def __init__(self, config: Config, *, run: str, fresh: bool = False) -> None:
        self._config = config
        self._run = run
        self._pid = os.getpid()
        self._closed = False
        self._session = Session(config, run=run)
        try:
            self._attempt = self._session.take_attempt()
            self._session.host.create_now()
            self._session.start()
        except BaseException:
            self._session.abandon()
            raise
        self._capturer = Capturer(
            post=self._session.coordinator.post, max_wait_s=config.max_wait_s, name=run
        )
        self._fresh = fresh
        self._layout: Layout | None = None
        self._started_from: CheckpointId | None = None
        self._begun = fresh or self._knows_of_nothing()
        self._saved_any = False
        self._last_step: int | None = None
        self._ordinal = 0
        self._counts = telling.SaveCounts()
        self._errors_seen = 0

    # Saving ------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        block: bool = False,
    ) -> SaveHandle:
        """Save ``state`` as ``step`` without asking the cadence; returns once nothing large is left to copy here.

        ``metrics`` are numbers or 0-dim tensors, read when captured; ``block`` waits until the last tier of this step
        has it. Raises CaptureError for a state that cannot be saved, StepError for a step that does not follow,
        CapacityError where a tier cannot hold one checkpoint, FencedError where a newer attempt of the run exists, and
        under ``on_error: raise`` what failed since the last call.
        """
        began = time.monotonic()
        self._check_usable()
        self._raise_failures()
        self._check_step(step)
        self._finish_capture()
        view = describe(state)
        layout, header = self._lay_out(view)
        handle, snapshot = self._admit(step, layout, header, view, metrics or {}, tuple(tags))
        if snapshot is not None:
            self._capture(snapshot, view, began)
        if block:
            handle.wait()
        return handle

    def maybe_save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        block: bool = False,
    ) -> SaveHandle | None:
        """Save if the cadence (``interval``) asks for this step, else return None; see ``save``."""
        interval = self._config.interval
        if interval is None or interval.every is None:
            raise ConfigError(
                "maybe_save: the configuration has no interval, and choosing one by itself is not supported yet: set "
                "interval: {every: STEPS}, or call save"
            )
        if not should_save(step, every_steps=interval.every):
            return None
        return self.save(step, state, metrics=metrics, tags=tags, block=block)

    def _check_step(self, step: int) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise StepError(f"save: step must be an integer of at least 0, not {step!r}")
        if not self._begun:
            raise StepError(
                f"save of step {step}: run {self._run!r} has checkpoints already (or a tier could not be asked), and "
                "this start restored none. Call restore() first to continue, choose another run name, or open with "
                "fresh=True to leave them behind"
            )
        if self._last_step is not None and step <= self._last_step:
            raise StepError(
                f"save of step {step}: this line is at step {self._last_step} already, and a committed step is never "
                "overwritten; to go back, restore(step=...) first"
            )

    def _lay_out(self, view: StateView) -> tuple[Layout, bytes]:
        """Find the layout of this structure, planned only when the structure changed."""
        if self._layout is None or not self._layout.matches(view):
            self._layout = plan_layout(view)
        header = self._layout.header(view)
        if header is None:  # a value outgrew the room that was left for it
            self._layout = plan_layout(view)
            header = self._layout.header(view)
            assert header is not None
        return self._layout, header

    def _admit(
        self,
        step: int,
        layout: Layout,
        header: bytes,
        view: StateView,
        metrics: Mapping[str, Any],
        tags: tuple[str, ...],
    ) -> tuple[SaveHandle, Snapshot | None]:
        """Take a region of host memory for the image, and describe the snapshot that is to fill it."""
        metrics = telling.checked_metrics(metrics)
        tags = tuple(check_name(tag, what="tag") for tag in tags)
        line = Line(
            run=self._run,
            checkpoint=CheckpointId(step, self._attempt.number),
            attempt_id=self._attempt.id,
            ordinal=self._ordinal + 1,
            started_from=self._started_from,
        )
        rules = self._session.coordinator.ledger.rules
        tiers = tuple(n for n in tiers_owed(rules, line.ordinal) if n in self._session.stores)
        handle = SaveHandle(line.checkpoint, tiers, in_memory=self._session.host.name)
        self._check_capacities(layout)
        chunk = self._config.chunk_bytes
        records = telling.records_bytes(layout, chunk, metrics, tags, line)
        self._session.host.ensure_capacity(image_bytes=layout.image_bytes, records_bytes=records)
        region, error = self._ask_for_region(line.checkpoint, layout.image_bytes, records)
        if region is None:
            assert error is not None
            self._skip(handle, error)
            return handle, None
        try:
            snapshot = self._snapshot(region, line, layout, header, view, handle)
        except BaseException:
            region.release()
            raise
        snapshot.metrics, snapshot.tags = metrics, tags
        self._session.coordinator.post(CaptureBegun(snapshot=snapshot, tiers=tiers))
        return handle, snapshot

    def _snapshot(
        self,
        region: HostRegion,
        line: Line,
        layout: Layout,
        header: bytes,
        view: StateView,
        handle: SaveHandle,
    ) -> Snapshot:
        """Begin to fill a region: what may change at any time is copied here."""
        post = self._session.coordinator.post
        id = line.checkpoint
        chunk = self._config.chunk_bytes
        filling = Filling(
            target=region.tensor(),
            memory=region.image,
            header=header,
            layout=layout,
            tensors=view.tensors,
            chunk_bytes=chunk,
            on_progress=lambda final: post(CaptureAdvanced(id=id, final_chunks=final)),
        )
        return Snapshot(
            line=line,
            shard=SHARD,
            geometry=Geometry(
                image_bytes=layout.image_bytes, data_start=layout.data_start, chunk_bytes=chunk
            ),
            structure=layout.structure,
            pieces=layout.pieces,
            region=region,
            handle=handle,
            filling=filling,
            wall_time_s=time.time(),
            node=self._session.node,
        )

    def _check_capacities(self, layout: Layout) -> None:
        for tier in self._config.tiers:
            capacity = tier.capacity_bytes if isinstance(tier, FileTier) else None
            if capacity is not None and layout.image_bytes > capacity:
                raise CapacityError(
                    f"save: one checkpoint takes {format_size(layout.image_bytes)} ({layout.image_bytes} bytes), "
                    f"tier {tier.name} has a capacity of {format_size(capacity)} "
                    f"({capacity} bytes): raise it, or take the tier out of the chain"
                )

    def _ask_for_region(
        self, id: CheckpointId, image_bytes: int, records_bytes: int
    ) -> tuple[HostRegion | None, BaseException | None]:
        done = threading.Event()
        answer: list[Any] = []

        def tell(region: HostRegion | None, error: BaseException | None) -> None:
            answer.extend((region, error))
            done.set()

        self._session.coordinator.post(
            Admission(
                id=id,
                image_bytes=image_bytes,
                records_bytes=records_bytes,
                deadline_s=time.monotonic() + self._config.max_wait_s,
                answer=tell,
            )
        )
        self._session.wait(done)
        return answer[0], answer[1]

    def _skip(self, handle: SaveHandle, error: BaseException) -> None:
        if not isinstance(error, CapacityError):
            raise error
        handle.tell_given_up(SaveOutcome.SKIPPED, error)
        self._counts.skipped += 1
        if self._config.on_error is OnError.RAISE:
            raise error
        logger.warning("%s", error)

    def _capture(self, snapshot: Snapshot, view: StateView, began: float) -> None:
        tensors = [source.tensor for source in view.tensors]
        on_host = all(tensor.device.type == "cpu" for tensor in tensors)
        reason = self._capturer.why_blocking(
            view.parameters, tensors, first=self._counts.begun == 0
        )
        lazy = reason is None and self._config.capture.mode is CaptureMode.LAZY
        if (
            reason is not None
            and self._counts.begun
            and self._config.capture.mode is CaptureMode.LAZY
        ):
            self._capturer.say_once(reason)
        self._saved_any = True
        self._last_step = snapshot.id.step
        self._ordinal = snapshot.line.ordinal
        self._counts.note(snapshot.handle, lazy=lazy)
        verify = self._config.capture.verify
        if verify and lazy:
            snapshot.handle.before_wait = self._finish_capture
        try:
            self._capturer.begin(snapshot, lazy=lazy, verify=verify, on_host=on_host)
        finally:
            snapshot.handle.tell_begun(
                bytes=snapshot.geometry.image_bytes,
                lazy=lazy,
                blocked_s=time.monotonic() - began,
            )

    # The barrier -------------------------------------------------------------------------------------

    def wait_captured(self, timeout: float | None = None) -> None:
        """Wait, helping, until everything of the last save is copied: after it the state may change.

        For loops whose updates no torch optimizer makes; a torch optimizer's step calls it by itself. After ``timeout``
        seconds (default: ``max_wait``) the snapshot is given up. Raises CaptureError where the capture failed.
        """
        self._check_usable()
        self._capturer.barrier.bracketed_by_hand()
        self._capturer.wait_copied(self._config.max_wait_s if timeout is None else timeout)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Bracket an update of the state: ``with ckpt.guard(): update()``; see ``wait_captured``."""
        self.wait_captured()
        yield

    def _finish_capture(self) -> None:
        """Let the capture that is under way end, so that the next may begin; its failure is the handle's to tell."""
        try:
            self._capturer.wait_copied(self._config.max_wait_s)
        except TierfallError:
            logger.debug("the previous capture failed", exc_info=True)

    # Restoring ---------------------------------------------------------------------------------------

    def restore(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        attempt: int | None = None,
        tier: str | None = None,
        only: Sequence[str] | None = None,
        strict: bool = True,
        unreachable: str = "raise",
    ) -> RestoreReport | None:
        """Fill ``state`` in place from the newest restorable checkpoint, each chunk from its fastest good copy.

        ``step`` (and ``attempt``) name an older one, ``tier`` the only tier to read; ``only`` dotted prefixes of names
        to restore, which begins no new line; ``strict`` compares names both ways. Returns None where every tier
        answered and none has a checkpoint. Raises RestoreError where the state does not fit, where nothing can be read
        whole, and where a tier could not be asked that may hold something newer (``unreachable="ignore"`` goes on).
        """
        began = time.monotonic()
        self._check_usable()
        request = self._request(step, attempt, tier, unreachable)
        self._finish_capture()
        self._wait_sealed()
        restored = self._restore(
            request, lambda header: plan_fill(state, header, only=only, strict=strict)
        )
        if restored is None:
            self._begun = True
            return None
        restored.plan.finish()  # type: ignore[attr-defined]
        if only is None:
            self._continue_from(restored)
        return telling.restore_report(restored, time.monotonic() - began)

    def _wait_sealed(self) -> None:
        """The newest save is hashed and sealed a moment after it was captured; a restore must see it."""
        for handle in self._counts.handles[-1:]:
            try:
                handle.captured(self._config.max_wait_s)
            except (TierfallError, TimeoutError):
                logger.debug("the last save was not captured", exc_info=True)

    def _request(
        self, step: int | None, attempt: int | None, tier: str | None, unreachable: str
    ) -> Request:
        if unreachable not in ("raise", "ignore"):
            raise ConfigError(
                f"restore: unreachable must be 'raise' or 'ignore', not {unreachable!r}"
            )
        known = [t.name for t in self._config.tiers]
        if tier is not None and tier not in known:
            raise ConfigError(f"restore: no tier is named {tier!r}; there are {', '.join(known)}")
        return Request(
            step=step, attempt=attempt, tier=tier, ignore_unreachable=unreachable == "ignore"
        )

    def _restore(self, request: Request, make_plan: Callable[[Any], Any]) -> Restored | None:
        session = self._session
        dropper = session.coordinator.dropper
        session.ask(lambda: setattr(dropper, "paused", True))
        try:
            regions = session.ask(
                lambda: {
                    e.id: e.region
                    for e in session.coordinator.ledger.entries.values()
                    if e.region is not None and e.region.sealed
                }
            )
            return restore(
                session.list_now(),
                request,
                open_image=session.open_image(regions),
                make_plan=make_plan,
                shard=SHARD,
            )
        finally:
            session.ask(lambda: setattr(dropper, "paused", False))

    def _continue_from(self, restored: Restored) -> None:
        """The line goes on from here; what this process saved before belongs to another one."""
        id = restored.checkpoint.id
        assert restored.checkpoint.commit is not None
        if self._saved_any:
            self._session.listings = self._session.list_now()
            self._attempt = self._session.take_attempt()
            self._saved_any = False
        self._started_from = id
        self._last_step = id.step
        self._ordinal = restored.checkpoint.commit.line.ordinal
        self._begun = True
        ledger = self._session.coordinator.ledger
        self._session.ask(lambda: setattr(ledger, "restored_from", id))

    def _knows_of_nothing(self) -> bool:
        """Say whether every tier answered and none holds a checkpoint of this run."""
        if any(listing.error is not None for listing in self._session.listings):
            return False
        return all(checkpoint.tombstoned for checkpoint in self._session.known())

    # Looking, and a person's orders ------------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return every known step and attempt, oldest first: on which tiers, in what state, and why it matters."""
        self._check_usable()
        session = self._session
        return session.ask(lambda: telling.infos(session.coordinator.ledger, time.time()))

    def pin(self, step: int, *, attempt: int | None = None) -> None:
        """Keep a checkpoint on every tier that holds it, whatever the rules say, until ``unpin``."""
        self._order(PersonsOrder.PIN, step, attempt)

    def unpin(self, step: int, *, attempt: int | None = None) -> None:
        """Take a pin away on every tier."""
        self._order(PersonsOrder.UNPIN, step, attempt)

    def delete(self, step: int, *, attempt: int | None = None) -> None:
        """Delete a checkpoint from every tier; a pinned one is refused."""
        self._order(PersonsOrder.DELETE, step, attempt)

    def _order(self, kind: PersonsOrder, step: int, attempt: int | None) -> None:
        self._check_usable()
        self._finish_capture()
        id = self._find(kind, step, attempt)
        done = threading.Event()
        failed: dict[str, BaseException] = {}

        def tell(failures: dict[str, BaseException]) -> None:
            failed.update(failures)
            done.set()

        self._session.coordinator.post(
            Order(kind=kind, id=id, wall_time_s=time.time(), answer=tell)
        )
        self._session.wait(done)
        for tier, error in failed.items():
            if isinstance(error, StepError):
                raise error
            raise TierfallError(f"{kind} of {id}: tier {tier} could not do it: {error}") from error

    def _find(self, kind: PersonsOrder, step: int, attempt: int | None) -> CheckpointId:
        known = self.checkpoints()
        fitting = [
            c
            for c in known
            if c.step == step and (not c.abandoned if attempt is None else c.attempt == attempt)
        ]
        if not fitting:
            which = f"step {step}" + ("" if attempt is None else f" of attempt {attempt}")
            there = ", ".join(f"{c.step}@{c.attempt}" for c in known[-8:]) or "none"
            raise StepError(f"{kind}: {which} is not known; the newest there are: {there}")
        return CheckpointId(fitting[-1].step, fitting[-1].attempt)

    def prune(self, *, dry_run: bool = False) -> list[Decision]:
        """Return what retention decides for every copy on every tier, and carry it out unless ``dry_run``."""
        self._check_usable()
        coordinator = self._session.coordinator

        def plan() -> list[Decision]:
            view = coordinator.ledger.view()
            return [d for tier in coordinator.lanes for d in plan_retention(view, tier)]

        decisions = self._session.ask(plan)
        if not dry_run and any(d.verdict is Verdict.DROP for d in decisions):
            self._session.ask(coordinator.dropper.survey_all)
            self._session.wait_idle(self._config.max_wait_s)
        return decisions

    def statistics(self) -> Statistics:
        """Return counters and times since open."""
        self._check_usable()
        return telling.statistics(self._session, self._counts)

    # The end -----------------------------------------------------------------------------------------

    def drain(self, deadline: float | None = None) -> DrainReport:
        """Wait until every owed copy is durable, for ``deadline`` seconds at most (None: as long as it goes on).

        A tier that does not take copies at present is not waited for; what is left stands in the report.
        """
        began = time.monotonic()
        self._check_usable()
        self._finish_capture()
        session = self._session
        owed = session.ask(session.coordinator.left_undone)
        session.wait_idle(deadline)
        left = set(session.ask(session.coordinator.left_undone))
        return DrainReport(
            done=tuple((id.step, id.attempt, tier) for id, tier in owed if (id, tier) not in left),
            left=tuple((id.step, id.attempt, tier) for id, tier in sorted(left)),
            seconds=time.monotonic() - began,
        )

    def close(self) -> None:
        """Finish what can be made durable within ``max_wait``, and let go of everything. May be called twice.

        What is still owed then stays in host memory: the next start, or ``tierfall drain``, finishes it. Raises, under
        ``on_error: raise``, what failed.
        """
        if self._closed:
            return
        self._check_process()
        keep = True
        try:
            self._finish_capture()
            self._capturer.close()
            report = self.drain(self._config.max_wait_s)
            keep = telling.must_keep_memory(self._session)
            self._say_left(report)
        finally:
            self._closed = True
            self._session.close(keep_memory=keep)
        if self._config.on_error is OnError.RAISE:
            self._raise_failures()

    def _say_left(self, report: DrainReport) -> None:
        if report.left:
            logger.warning(
                "close: %d copies are still owed (%s); they lie in %s, and the next start or 'tierfall drain' "
                "finishes them",
                len(report.left),
                ", ".join(f"{step}@{attempt} to {tier}" for step, attempt, tier in report.left[:4]),
                self._session.host.path,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except TierfallError as failure:
            if error is None:
                raise
            error.add_note(f"tierfall: closing failed too: {failure}")
            logger.exception("closing failed while another exception was on its way")

    def _check_usable(self) -> None:
        if self._closed:
            raise ConfigError("this Checkpointer is closed; open another one")
        self._check_process()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigError(
                "this Checkpointer belongs to the process that opened it; a forked child cannot use it"
            )

    def _raise_failures(self) -> None:
        coordinator = self._session.coordinator
        if self._session.workers.failure is not None:
            raise TierfallError("the coordinator stopped") from self._session.workers.failure
        if coordinator.fenced is not None and not self._closed:
            raise coordinator.fenced
        fresh = coordinator.errors[self._errors_seen :]
        self._errors_seen += len(fresh)
        if fresh and self._config.on_error is OnError.RAISE:
            raise fresh[0]
