"""The Checkpointer: what a training loop holds. It turns a state into a snapshot, and a checkpoint into a state.

It runs on the training thread and owns that thread's rules: one save after another, steps that rise, the barrier, the
line that is being saved. Bytes are moved by the session's workers and the capture thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from tierfall.config import Config
from tierfall.core.capture.capturer import Capturer
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.copies.chunk_reader import FoundDamage
from tierfall.core.image.header import ImageHeader
from tierfall.core.image.raw_files import check_no_files
from tierfall.core.load.choices import Choices
from tierfall.core.load.fill import FillPlan, plan_fill
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.restore.agreement import finish_on_all_ranks
from tierfall.core.restore.exchange.gloo import Connect
from tierfall.core.restore.reshard import ResizeRules
from tierfall.core.sampling.fingerprint import Fingerprint
from tierfall.core.scheduler.ledger.tasks import CommandKind
from tierfall.core.state.item import resize_rules
from tierfall.core.state.omissions import omissions
from tierfall.core.state.view import StateView
from tierfall.core.state.walk import walk_state
from tierfall.core.state.walk_cache import WalkCache
from tierfall.core.types.errors import ConfigError, StepError, TierfallError
from tierfall.core.types.units import as_seconds
from tierfall.core.types.values import CheckpointId, OnError, Verify
from tierfall.core.types.view import Decision
from tierfall.run import drain_on_signal, group_commands
from tierfall.run.by_path import PathSaves
from tierfall.run.cadence import cadence_of
from tierfall.run.closing import (
    ClosingPlan,
    LastStep,
    agree_on_end,
    confirm_copies,
    log_left,
    log_lost,
)
from tierfall.run.drain_on_signal import DrainOnSignal
from tierfall.run.restorer import Restorer, log_abandoned
from tierfall.run.saver import Saver
from tierfall.session import statistics as telling
from tierfall.session.requests import must_keep_memory, submit
from tierfall.session.session import Session
from tierfall.session.start import opened_by_each, ready_on_all_ranks
from tierfall.setup import signal_hub
from tierfall.setup.lineage import SavingLineage, as_step
from tierfall.setup.signal_hub import SignalWatch
from tierfall.telemetry.journal import failures_noted
from tierfall.telemetry.reports import CheckpointInfo, DrainReport, RestoreReport, Statistics
from tierfall.telemetry.step_timer import StepClock

logger = logging.getLogger("tierfall")
_open: set[Checkpointer] = set()


class Checkpointer:
    """Saves and restores one training run. Made by ``tierfall.open``; a context manager.

    One process has one Checkpointer per run. Its methods are called by the thread that trains; handles may be waited on
    by any.
    """

    def __init__(
        self,
        config: Config,
        *,
        run: str,
        fresh: bool = False,
        ranks: Ranks | None = None,
        connect: Connect | None = None,
    ) -> None:
        self._config = config
        self._run = run
        self._pid = os.getpid()
        self._closed = False
        self._last: LastStep | None = None
        self._looked = False
        ranks = ranks or Ranks.alone()
        with ExitStack() as undo:
            undo.callback(ranks.leave)
            with opened_by_each(ranks):
                _check_first(config, run)
                if config.drain is not None:
                    signal_hub.check_thread(drain_on_signal.WHAT)
                self._session = Session(config, run=run, ranks=ranks, adopts=True)
            self._journal = self._session.journal
            undo.callback(self._session.abandon)
            first = self._session.begin_line()
            assert self._session.attempt is not None
            self._config = config = self._session.config
            self._line = SavingLineage(run, self._session.attempt, begun=fresh or first)
            self._restorer = Restorer(config, self._session, self._line, connect=connect)
            with ready_on_all_ranks(ranks, timeout_s=self._restorer.slower_s):
                self._session.host.create_now()
                self._session.build()
                self._capturer = Capturer(
                    post=self._session.coordinator.post,
                    max_wait_s=config.max_wait_s,
                    name=run,
                    checked=config.capture.verify is not Verify.OFF,
                )
                undo.callback(self._capturer.close, 1.0)
                self._steps = StepClock(self._session.coordinator.pacing)
                self._capturer.barrier.on_step = self._steps.stepped
                self._saver = Saver(
                    config, self._session, self._capturer, lambda: self._steps.step_s
                )
                self._by_path = PathSaves(
                    config,
                    self._session,
                    self._saver,
                    self._line,
                    check=self._check_saving,
                )
                self._cadence = cadence_of(config, self._session, self._leave_out)
                self._restorer.has_gone_on = self._continued_step
                self._saves_on = SignalWatch(config.interval.on_signal, self._cadence.ask)
                undo.callback(self._saves_on.close)
            if fresh:
                log_abandoned(run, self._session.known(), None)
                self._session.coordinator.ledger.knows_what_is_good()
            self._session.start()
            self._on_signal = None
            if config.drain is not None:
                counts = self._saver.counts
                self._on_signal = DrainOnSignal(config, self._session, lambda: counts.tried)
            undo.pop_all()
        _open.add(self)

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

        ``metrics`` are numbers or 0-dim tensors, as they are at this call; ``block`` waits until the last tier of this
        step has it, and raises what keeps it from it, as the handle's ``wait`` does. Raises CaptureError for a state
        that cannot be saved, StepError for a step that does not follow, CapacityError where a tier cannot hold one
        checkpoint, FencedError where a newer attempt of the run exists, and under ``on_error: raise`` what failed since
        the last call.
        """
        handle = self._save_state(step, state, metrics, tags)
        if block:
            handle.wait()
        return handle

    def _save_state(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None,
        tags: Sequence[str],
        *,
        at_end: bool = False,
    ) -> SaveHandle:
        check_no_files(state)
        handle = self._save(
            step,
            lambda recall: walk_state(state, recall),
            metrics=metrics or {},
            tags=tags,
            at_end=at_end,
        )
        self._cadence.saved(handle)
        if not self._looked:
            self._looked = True
            for text in omissions(state):
                logger.warning("%s", text)
        return handle

    def _save(
        self,
        step: int,
        described: Callable[[WalkCache], StateView],
        *,
        metrics: Mapping[str, Any],
        tags: Sequence[str],
        may_be_lazy: bool = True,
        at_end: bool = False,
    ) -> SaveHandle:
        """Save what ``described`` walks, as ``save`` does. One thread after the other: torch.distributed.checkpoint
        saves on threads of its own."""
        began = time.monotonic()
        self._steps.saving()
        self._check_usable()
        self._check_alive()
        many = self._session.ranks.many
        if not many:
            self._raise_failures()
        step = as_step(step)
        with self._saver.lock:
            self._line.check(step)
            self._saver.counts.steps.come_to(step, began)
            try:
                self._finish_capture(in_order=True)
                handle = self._saver.save(
                    self._line,
                    step,
                    described,
                    metrics,
                    tags,
                    began,
                    may_be_lazy=may_be_lazy,
                    at_end=at_end,
                )
            except BaseException as error:
                if not self._line.is_at(step):  # its capture did not begin
                    self._journal.save_failed(CheckpointId(step, self._line.attempt.number), error)
                self._saver.tell_others(self._line, step, error)
                raise
        if many:  # the others save this step whatever has failed here before
            self._raise_failures()
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
        """Save if the cadence (``interval``) asks for this step, else return None; see ``save``.

        It is called at the end of every step: the time from call to call is what the cadence goes by. A step that
        ``save`` was called for is not saved again.
        """
        self._check_usable()
        self._line.check_begun(step)
        step = as_step(step)
        self._saver.counts.steps.come_to(step, time.monotonic())
        wanted = self._cadence.wants(step)
        if self._config.interval.at_end:
            self._note_last(step, state, metrics, tags, anew=wanted)
        if not wanted or self._has_saved(step):
            return None
        return self.save(step, state, metrics=metrics, tags=tags, block=block)

    def _note_last(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None,
        tags: Sequence[str],
        *,
        anew: bool,
    ) -> None:
        """Remember what close has to save if no other step comes, and how the state is now. Its tensors are looked for
        where they were at the step before, unless ``anew``."""
        kept = None if self._last is None or anew else self._last.fingerprint
        if kept is None or not kept.take(state):
            kept = Fingerprint(state, self._steps.step_s)
        metrics = {
            name: value if isinstance(value, float) else value.clone()
            for name, value in telling.checked_metrics(metrics or {}).items()
        }
        self._last = LastStep(step, state, metrics, tags, self._capturer.barrier.updates, kept)

    def _has_saved(self, step: int) -> bool:
        return self._line.saved_any and self._line.is_at(step)

    def _leave_out(self, step: int, error: TierfallError) -> None:
        """Other ranks save a step that this one has passed."""
        logger.warning("%s", error)
        with self._saver.lock:
            self._saver.tell_others(self._line, step, error)

    def _continued_step(self, step: int) -> None:
        self._last = None
        self._cadence.go_on_from(step)

    # The barrier -------------------------------------------------------------------------------------

    def wait_captured(self, timeout: float | None = None) -> None:
        """Wait, helping, until everything of the last save is copied: after it the state may change.

        For loops whose updates no torch optimizer makes; a torch optimizer's step calls it by itself. After ``timeout``
        seconds (default: ``max_wait``) the snapshot is given up. Raises CaptureError where the capture failed.
        """
        timeout = as_seconds(timeout, what="wait_captured: timeout")
        self._check_usable()
        self._capturer.barrier.bracketed_by_hand()
        self._capturer.wait_barrier(self._config.max_wait_s if timeout is None else timeout)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Bracket an update of the state: ``with ckpt.guard(): update()``; see ``wait_captured``."""
        self.wait_captured()
        yield

    def _finish_capture(self, timeout_s: float | None = None, *, in_order: bool = False) -> None:
        """Let the capture that is under way end, so that the next may begin; its failure is the handle's to tell.

        ``in_order``: what lies on a device need not be read yet, if only the caller's next work there comes after.
        """
        bound = self._config.max_wait_s if timeout_s is None else timeout_s
        try:
            self._capturer.wait_copied(bound, in_order=in_order)
        except TierfallError:
            logger.debug("the previous capture failed", exc_info=True)

    # Restoring ---------------------------------------------------------------------------------------

    @failures_noted("restore")
    def restore(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        attempt: int | None = None,
        tier: str | None = None,
        only: Sequence[str] | None = None,
        skip: Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
        retype: Sequence[str] = (),
        strict: bool = True,
        unreachable: str = "raise",
    ) -> RestoreReport | None:
        """Fill ``state`` in place from the newest restorable checkpoint, each chunk from its fastest good copy.

        ``step`` (and ``attempt``) name an older one, ``tier`` the only tier to read; ``only`` dotted prefixes of names
        to restore, which begins no new line. ``strict`` compares the names of tensors, objects and plain values both
        ways. By name it may be otherwise: what ``skip`` names stays as it is in the state (``*`` stands for one
        component: ``"optimizer.param_groups.*.lr"``), ``rename`` maps names in the checkpoint to those in the state,
        and ``retype`` names optimizers and objects whose class is another one now. Gradients of restored parameters are
        set to None.

        Returns None where every tier answered and none has a checkpoint. Raises RestoreError where the state does not
        fit, where nothing can be read whole, and where a tier could not be asked that may hold something newer
        (``unreachable="ignore"`` goes on).
        """
        began = time.monotonic()
        self._check_usable()
        request = self._restorer.request(step, attempt, tier, unreachable)
        choices = Choices.of(
            only=only,
            skip=skip,
            rename=rename,
            retype=retype,
            strict=strict,
            goes_back=self._line.saved_any or self._line.started_from is not None,
        )
        if only is None and (fenced := self._session.coordinator.fenced) is not None:
            raise fenced
        if only is None and self._line.saved_any:
            self._session.check_newest()
        self._finish_capture()
        self._wait_sealed()
        self._last = None  # the state is not that step's any more
        with (
            self._restorer.nothing_dropped(),
            self._restorer.half_filled_noted(choices.only) as begins,
        ):

            def plan(header: ImageHeader) -> FillPlan:
                planned = plan_fill(state, header, choices)
                begins()
                return planned

            restored = self._restorer.fill(
                request,
                plan,
                ResizeRules(rules=resize_rules(state)),
            )
            if restored is None:
                self._line.begun = True
                self._session.ask(self._session.coordinator.ledger.knows_what_is_good)
                return None
            any_saved = finish_on_all_ranks(
                self._session.ranks,
                restored.plan.finish,  # type: ignore[attr-defined]
                restored.checkpoint.id,
                goes_on=only is None,
                saved=self._line.saved_any,
                timeout_s=self._restorer.slower_s,
            )
            self._line.half_filled.discard(choices.only)
            if only is None:
                self._restorer.continue_from(
                    restored.checkpoint,
                    any_saved,
                    verified=restored.verified(self._session.ranks.shard),
                )
                self._saver.counts.steps.go_on_from(restored.checkpoint.id.step)
        report = telling.restore_report(restored, time.monotonic() - began)
        self._session.tell(partial(telling.note_reads, self._session.coordinator.rates, report))
        return self._journal.restored(report)

    def _wait_sealed(self) -> None:
        """The newest save is hashed and sealed a moment after it was captured; a restore must see it."""
        for handle in self._saver.counts.handles[-1:]:
            try:
                handle.captured(self._config.max_wait_s)
            except (TierfallError, TimeoutError):
                logger.debug("the last save was not captured", exc_info=True)

    # Looking, and a person's orders ------------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return every known step and attempt, oldest first: on which tiers, in what state, and why it matters."""
        self._check_usable()
        session = self._session
        session.look()
        return session.ask(lambda: telling.infos(session.coordinator.ledger, time.time()))

    def pin(self, step: int, *, attempt: int | None = None) -> None:
        """Keep a checkpoint on every tier that holds it, whatever the rules say, until ``unpin``."""
        self._command(CommandKind.PIN, step, attempt)

    def unpin(self, step: int, *, attempt: int | None = None) -> None:
        """Take a pin away on every tier."""
        self._command(CommandKind.UNPIN, step, attempt)

    def delete(self, step: int, *, attempt: int | None = None) -> None:
        """Delete a checkpoint from every tier; a pinned one is refused."""
        self._command(CommandKind.DELETE, step, attempt)

    def _command(self, kind: CommandKind, step: int, attempt: int | None) -> None:
        self._check_usable()
        step = as_step(step, doing=kind)
        attempt = None if attempt is None else as_step(attempt, doing=kind, what="attempt")
        self._finish_capture()
        if self._session.ranks.many:
            named = {"step": step, "attempt": attempt}
            group_commands.run_command(
                self._session, kind, named, lambda: self._find(kind, step, attempt)
            )
            return
        id = self._find(kind, step, attempt)
        group_commands.check(kind, id, submit(self._session, kind, id))

    def _find(self, kind: CommandKind, step: int, attempt: int | None) -> CheckpointId:
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
        """Return what retention decides for every copy on every tier, and carry it out unless ``dry_run``.

        It goes by the commit records: copies that nobody has verified count as good, as for ``tierfall prune``.
        """
        self._check_usable()
        session = self._session
        session.look()
        if session.ranks.many:
            return group_commands.prune(session, dry_run=dry_run)
        decisions = group_commands.plan(session)
        # marks that were left from outside are read first, so that more may go, or less
        if not dry_run:
            session.ask(session.coordinator.dropper.trust)
            session.wait_idle(self._config.max_wait_s)
        return decisions

    def statistics(self) -> Statistics:
        """Return counters and times since open."""
        self._check_usable()
        self._session.memory.look()
        cadence, ettr = self._cadence.report(), self._cadence.ettr()
        return replace(
            telling.statistics(self._session, self._saver.counts), cadence=cadence, ettr=ettr
        )

    # The end -----------------------------------------------------------------------------------------

    def drain(self, deadline: float | None = None) -> DrainReport:
        """Wait until every owed copy is durable, for ``deadline`` seconds at most (None: as long as it goes on).

        With a deadline, what is half done goes first, then the newest; what cannot arrive in time by measured rates is
        not begun before the end, and the report's ``forecast`` says so. A tier that does not take copies at present is
        not waited for; what is left stands in the report, and what was given up meanwhile. With several ranks all call
        it, and the report is the same on all.
        """
        deadline = as_seconds(deadline, what="drain: deadline")
        self._check_usable()
        self._finish_capture()
        began = time.monotonic()
        self._session.look(deadline)
        if deadline is not None:
            deadline = max(0.0, deadline - (time.monotonic() - began))
        drain = group_commands.drain if self._session.ranks.many else group_commands.drain_here
        return replace(drain(self._session, deadline), seconds=time.monotonic() - began)

    def close(self) -> None:
        """Finish what can be made durable within ``max_wait``, and let go of everything. May be called twice.

        Under ``at_end`` it first saves the last step that ``maybe_save`` was given, unless an exception is being
        handled, and raises what keeps it from that. What is still owed in the end stays in host memory: the next start,
        or ``tierfall drain``, finishes it. Raises, under ``on_error: raise``, what failed.
        """
        self._close("" if sys.exc_info()[0] is None else "it ended by an exception")

    def _close(self, failed: str) -> None:
        """``failed`` says how the training ended, where it did not come to its end."""
        if self._closed:
            return
        self._check_process()
        failure: Exception | None = None
        keep, together = True, False
        deadline_s = time.monotonic() + self._config.max_wait_s

        def left_s() -> float:
            return max(0.0, deadline_s - time.monotonic())

        try:
            try:
                failure = self._save_last(failed, left_s() / 2)
                self._by_path.close(left_s())
                self._finish_capture(left_s())
                self._capturer.close(left_s())
                self._session.look(left_s(), last=True)
                confirmed = confirm_copies(self._session, left_s() / 2)
                report = group_commands.drain_here(
                    self._session, left_s(), doing="close", goes_on=False
                )
            finally:
                self._capturer.let_go()
                together = group_commands.settle(self._session, left_s)
            keep = not confirmed or must_keep_memory(self._session)
            if keep and not self._session.memory.repair(max(1.0, left_s())):
                self._session.coordinator.errors += log_lost(self._session)
            log_left(self._session, report)
        finally:
            self._closed = True
            _open.discard(self)
            self._last = None
            self._saves_on.close()
            self._saver.close()
            try:
                self._session.close(keep_memory=keep, timeout_s=max(1.0, left_s()))
            finally:
                if self._on_signal is not None:
                    self._on_signal.stop()
                if together:
                    self._session.ranks.close(max(1.0, left_s()))
                else:
                    self._session.ranks.leave()
        if self._config.on_error is OnError.RAISE:
            self._check_alive()
            self._raise_failures()
        if failure is not None:
            raise failure

    def _save_last(self, failed: str, timeout_s: float) -> Exception | None:
        """Save the last step where ``at_end`` asks for it, or have it flushed to all tiers; return why that failed."""
        self._cadence.end()
        if not self._config.interval.at_end:
            return None
        last = self._last
        ending = agree_on_end(
            self._session.ranks,
            last,
            saved=last is not None and self._has_saved(last.step),
            changed="" if last is None else last.why_changed(self._capturer.barrier.updates),
            failed=failed,
            timeout_s=timeout_s,
        )
        if last is None or ending is ClosingPlan.NOTHING:
            return None
        if ending is ClosingPlan.FLUSH:
            id = CheckpointId(last.step, self._line.attempt.number)
            self._session.tell(lambda: self._session.coordinator.owe_to_all(id))
            return None
        try:
            self._save_state(last.step, last.state, last.metrics, last.tags, at_end=True)
        except Exception as error:  # noqa: BLE001 - raised once all is closed
            logger.error("close: the last step, %d, could not be saved: %s", last.step, error)
            return error
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid:  # a forked child leaves the block: the run is its parent's
            return
        try:
            self._close("" if error is None else f"it ended by {type(error).__name__}")
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"tierfall: closing failed too: {failure}")
            if error.__context__ is None and error.__cause__ is None:
                error.__context__ = failure
            logger.exception("closing failed while another exception was on its way")

    def _check_usable(self) -> None:
        if self._closed:
            raise ConfigError("this Checkpointer is closed; open another one")
        self._check_process()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigError(
                f"this Checkpointer belongs to process {self._pid}, which opened it; a forked child cannot use it: "
                "save, restore and close there, and open another run in the child if it is to save"
            )

    def _check_alive(self) -> None:
        """Raise what keeps anything that is saved from becoming a checkpoint."""
        self._session.ranks.check()
        if (failure := self._session.workers.failure) is not None:
            raise TierfallError(f"the coordinator stopped: {failure!r}") from failure
        if (fenced := self._session.coordinator.fenced) is not None and not self._closed:
            raise fenced

    def _check_saving(self) -> None:
        self._check_usable()
        self._check_alive()

    def _raise_failures(self) -> None:
        """Raise, under ``on_error: raise``, the first that failed since the last call."""
        coordinator = self._session.coordinator
        fresh = tuple(coordinator.errors)
        del coordinator.errors[: len(fresh)]  # the coordinator's thread may append meanwhile
        if fresh and self._config.on_error is OnError.RAISE:
            raise fresh[0]


def opened_runs() -> list[PathSaves]:
    """Return how each run that is open in this process is saved by path."""
    return [one._by_path for one in list(_open) if one._pid == os.getpid()]


def damage_reporter(run: str, places: Mapping[str, str]) -> FoundDamage:
    """Return what a reader beside the runs that are open in this process tells of damaged copies; ``places`` are those
    of the tiers that it reads, by its names for them."""

    def note(tier: str, id: CheckpointId, error: TierfallError) -> None:
        for ckpt in list(_open):
            if ckpt._run != run or ckpt._pid != os.getpid():
                continue
            for name, store in ckpt._session.stores.items():
                if store.place == places.get(tier):
                    ckpt._session.note_damaged(name, id, error)

    return note


def _check_first(config: Config, run: str) -> None:
    """Refuse a second Checkpointer of one run in one process: it would fence the first."""
    places = {tier.place for tier in config.stored}
    for other in list(_open):
        theirs = {tier.place for tier in other._config.stored}
        if other._run == run and other._pid == os.getpid() and places & theirs:
            raise ConfigError(
                f"open: a second Checkpointer of run {run!r} in this process, which has one with a tier in "
                f"{sorted(places & theirs)[0]} already: close it before opening another"
            )


@atexit.register
def _close_open_runs() -> None:
    """A script that ends without close loses nothing that it saved."""
    for ckpt in list(_open):
        if ckpt._pid == os.getpid():
            if not ckpt._by_path.goes_on:  # else nobody has it in hand who could close it
                logger.warning("run %s: the program ends and did not close it: closing", ckpt._run)
            try:
                ckpt._close("the program ends, and did not close the run")
            except Exception:
                logger.exception("run %s could not be closed", ckpt._run)
