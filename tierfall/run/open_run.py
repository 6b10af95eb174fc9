"""A run that this process trains: the parts behind a ``Checkpointer``, and the calls that integrations make of them.

It owns the rules of the training thread: one save after another, steps that rise, and the order of the end. Bytes are
moved by the session's workers and by the capture thread. ``checkpointer.open_run_of`` leads here; nothing of it is
public API.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from tierfall.config import Config
from tierfall.config.fields import signals_named
from tierfall.core.capture.capturer import Capturer
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.copies.chunk_reader import FoundDamage
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.sampling.fingerprint import Fingerprint
from tierfall.core.state.omissions import omissions, unsaved_parameters
from tierfall.core.state.view import StateView
from tierfall.core.state.walk import walk_state
from tierfall.core.state.walk_cache import WalkCache
from tierfall.core.types.errors import ConfigError, TierfallError
from tierfall.core.types.values import CheckpointId, OnError, Verify
from tierfall.run import announced_steps, closing, drain_on_signal, group_commands
from tierfall.run.announced_steps import AnnouncedSteps
from tierfall.run.cadence import cadence_of
from tierfall.run.drain_on_signal import DrainOnSignal
from tierfall.run.restorer import Restorer, log_abandoned
from tierfall.run.saver import SaveCall, Saver, checked_metrics
from tierfall.session.opened_tiers import OpenedTiers
from tierfall.session.requests import must_keep_memory
from tierfall.session.session import Listener, Session
from tierfall.session.start import all_ranks_or_none, begin_attempt, opened_by_each
from tierfall.setup import signal_hub
from tierfall.setup.lineage import SavingLineage, as_step
from tierfall.setup.peers import close_peers, meet_peers
from tierfall.setup.places import run_folder
from tierfall.setup.tiers import patience_s
from tierfall.telemetry.step_timer import StepClock

logger = logging.getLogger("tierfall")
OPEN: set[OpenRun] = set()
"""The runs that are open in this process, and those that a fork has inherited."""
ABANDON_S = 1.0
LAST_S = 1.0
"""Each last step of ``close`` has at least so many seconds, also when ``max_wait`` is over."""


class OpenRun:
    """See the module. Complete when built; ``close`` ends it.

    Its methods are called by the thread that trains. ``save`` may be called by one thread after the other.
    """

    def __init__(
        self,
        config: Config,
        *,
        run: str,
        fresh: bool = False,
        ranks: Ranks | None = None,
        command: str = "",
    ) -> None:
        """See ``tierfall.open``."""
        self.run = run
        self.pid = os.getpid()
        self.closed = False
        self._ends = False
        """No further save begins."""
        self._last: closing.LastStep | None = None
        self._fingerprint: Fingerprint | None = None
        self.checks_omissions = True
        ranks = ranks or Ranks.alone()
        with ExitStack() as undo:
            undo.callback(ranks.leave)
            config, self._peers = meet_peers(config, run, ranks)
            undo.callback(close_peers, self._peers)
            with opened_by_each(ranks):
                _check_first(config, run)
                if config.drain is not None:
                    signal_hub.check_thread(drain_on_signal.WHAT)
                tiers = OpenedTiers(
                    config,
                    run=run,
                    ranks=ranks,
                    fresh=fresh,
                    peers=self._peers,
                    command=command,
                )
            undo.callback(tiers.close, keep=True)
            start = begin_attempt(tiers)
            assert tiers.attempt is not None
            self.config = config = tiers.config
            with all_ranks_or_none(ranks, timeout_s=patience_s(config)):
                tiers.host.allocate_now()
                self.session = Session(tiers, start)
                undo.callback(self.session.abandon)
                self.session.serve_metrics()
                self.lineage = SavingLineage(run, tiers.attempt, begun=fresh or start.first)
                self._steps = StepClock(self.session.coordinator.throttle)
                self.capturer = Capturer(
                    post=self.session.coordinator.post,
                    max_wait_s=config.max_wait_s,
                    name=run,
                    holds=self.session.holds,
                    checked=config.capture.verify is not Verify.OFF,
                    on_step=self._steps.on_step,
                    threads=self.session.hash_threads,
                )
                undo.callback(self.capturer.close, ABANDON_S)
                self.saver = Saver(config, self.session, self.capturer, lambda: self._steps.step_s)
                listeners: dict[str | int, Listener] = {}
                announced = None
                if ranks.many:
                    announced = AnnouncedSteps(
                        ranks.message_tree,
                        run_aside=self.session.call_soon,
                        leave_out=self._report_unsaved,
                    )
                    listeners[announced_steps.TOPIC] = announced.on_message
                self.cadence = cadence_of(config, self.session, announced)
                self.restorer = Restorer(
                    config,
                    self.session,
                    self.lineage,
                    on_continued=self._on_continued,
                )
                self._saves_on = signal_hub.add_listener(
                    signals_named(config.interval.on_signal),
                    what="open: interval.on_signal",
                    flag=lambda number: self.cadence.request(number.name),
                )
                undo.callback(signal_hub.stop, self._saves_on)
            if fresh:
                log_abandoned(run, self.session.known(), None)
                self.session.coordinator.begin_anew()
            self.session.start(listeners)
            self._drains_on: DrainOnSignal | None = None
            if config.drain is not None:
                counts = self.saver.counts
                self._drains_on = DrainOnSignal(config, self.session, lambda: counts.tried)
            closing.log_open(self.session)
            undo.pop_all()
        OPEN.add(self)

    # Saving ------------------------------------------------------------------------------------------

    def save_state(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None,
        tags: Sequence[str],
        *,
        at_end: bool = False,
    ) -> SaveHandle:
        """Save a state of the training loop; ``at_end``: to every tier, whatever ``flush.every`` says."""
        omitted: list[str] = []

        def walk(cache: WalkCache) -> StateView:
            view = walk_state(state, cache)
            if self.checks_omissions:
                omitted.extend(unsaved_parameters(state, view))
            return view

        handle = self.save(
            step,
            walk,
            metrics=metrics or {},
            tags=tags,
            at_end=at_end,
        )
        self.cadence.on_saved(handle)
        if self._last is not None and self._last.step < handle.step:
            self._last = None  # a later step is saved
        if self.checks_omissions:
            self.checks_omissions = False
            for text in (*omitted, *omissions(state)):
                logger.warning("%s", text)
        return handle

    def save(
        self,
        step: int,
        walk: Callable[[WalkCache], StateView],
        *,
        metrics: Mapping[str, Any],
        tags: Sequence[str],
        may_be_lazy: bool = True,
        at_end: bool = False,
    ) -> SaveHandle:
        """Save the state that ``walk`` returns a view of. Without ``may_be_lazy``, all of it is copied on return."""
        began_s = time.monotonic()
        self._steps.on_save()
        self.check_saving()
        many = self.session.ranks.many
        if not many:
            self._raise_failures()
        step = as_step(step)
        call = SaveCall(
            step=step,
            metrics=metrics,
            tags=tags,
            began_s=began_s,
            may_be_lazy=may_be_lazy,
            at_end=at_end or (self.session.displaced and not self.lineage.saved_any),
        )
        with self.saver.lock:
            if self._ends:
                raise ConfigError(
                    f"save of step {step}: another thread closes this Checkpointer; open another one"
                )
            self.lineage.check(step)
            self.saver.counts.steps.record(step, began_s)
            try:
                self.finish_capture(in_order=True)
                handle = self.saver.save(self.lineage, call, walk)
            except BaseException as error:
                if not self.lineage.is_at(step):  # its capture did not begin
                    failed = CheckpointId(step, self.lineage.attempt.number)
                    self.session.journal.save_failed(failed, error)
                self.saver.report_failed(self.lineage, step, error)
                raise
        if many:  # the other ranks save this step, whatever failed here before it
            self._raise_failures()
        return handle

    def note_last(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None,
        tags: Sequence[str],
    ) -> None:
        """Keep what ``close`` has to do if no other step follows. A step that is not saved has a fingerprint of the
        state with it: the one of an earlier step is updated."""
        if not self.lineage.has_saved(step):
            if self._fingerprint is None or not self._fingerprint.refresh(state):
                self._fingerprint = Fingerprint(state, self._steps.step_s)
            metrics = {
                name: value if isinstance(value, float) else value.clone()
                for name, value in checked_metrics(metrics or {}).items()
            }
        self._last = closing.LastStep(
            step, state, metrics, tags, self.capturer.barrier.updates, self._fingerprint
        )

    def forget_last(self) -> None:
        """The state is not that of the last step any more."""
        self._last = self._fingerprint = None

    def _report_unsaved(self, step: int, error: TierfallError) -> None:
        """Report to the other ranks, which save this step, that this rank has passed it."""
        logger.warning("%s", error)
        with self.saver.lock:
            self.saver.report_failed(self.lineage, step, error)

    def finish_capture(self, timeout_s: float | None = None, *, in_order: bool = False) -> None:
        """Wait until the present capture ends, so that the next can begin. If it fails, its handle raises that.

        ``in_order``: memory of a device need not be read yet, if the caller's next work on the device comes after.
        """
        bound_s = self.config.max_wait_s if timeout_s is None else timeout_s
        try:
            self.capturer.wait_copied(bound_s, in_order=in_order)
        except TierfallError:
            logger.debug("the previous capture failed", exc_info=True)

    # Restoring ---------------------------------------------------------------------------------------

    def prepare_restore(self, *, continues: bool) -> None:
        """Wait until the last save is sealed, so that a restore finds it.

        Raises FencedError where a newer attempt exists and the run ``continues`` from what is restored.
        """
        if continues and (fenced := self.session.coordinator.fenced) is not None:
            raise fenced
        if continues and self.lineage.saved_any:
            self.session.tiers.check_fence()
        self.finish_capture()
        for handle in self.saver.counts.handles[-1:]:
            try:
                handle.captured(self.config.max_wait_s)
            except (TierfallError, TimeoutError):
                logger.debug("the last save was not captured", exc_info=True)

    def _on_continued(self, step: int, due: str | None) -> None:
        self.forget_last()
        self.cadence.continue_from(step, due)

    # Checks ------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise ConfigError where the run is closed, or was opened by the process that this one was forked from."""
        if self.closed:
            raise ConfigError("this Checkpointer is closed; open another one")
        self._check_process()

    def check_saving(self) -> None:
        """Raise what keeps anything that is saved from becoming a checkpoint."""
        self.check_usable()
        self._check_alive()

    def _check_process(self) -> None:
        if os.getpid() != self.pid:
            raise ConfigError(
                f"this Checkpointer belongs to process {self.pid}, which opened it; a forked child cannot use it: "
                "save, restore and close there, and open another run in the child if it is to save"
            )

    def _check_alive(self) -> None:
        self.session.ranks.check()
        self.session.check_running()
        if (fenced := self.session.coordinator.fenced) is not None and not self.closed:
            raise fenced

    def _raise_failures(self) -> None:
        """Raise, under ``on_error: raise``, the first failure since the last call."""
        coordinator = self.session.coordinator
        fresh = tuple(coordinator.errors)
        del coordinator.errors[: len(fresh)]  # the coordinator's thread may append meanwhile
        if fresh and self.config.on_error is OnError.RAISE:
            raise fresh[0]

    # The end -----------------------------------------------------------------------------------------

    def close(self, failed: str) -> None:
        """See ``Checkpointer.close``. ``failed`` describes how the training ended, where that was before its end."""
        if self.closed:
            return
        self._check_process()
        failure: Exception | None = None
        keep, together, session = True, False, self.session
        deadline_s = time.monotonic() + self.config.max_wait_s

        def left_s(least_s: float = 0.0) -> float:
            return max(least_s, deadline_s - time.monotonic())

        def meets_s() -> float:
            return min(left_s(), self._meets_s)

        try:
            try:
                failure = self._save_last(failed, left_s() / 2)
                self._end_saves(left_s() / 2)
                self.finish_capture(left_s())
                self.capturer.close(left_s())
                session.find_external_commits(left_s(), last=True)
                looked_at = closing.confirm_copies(session, left_s() / 2)
                report = group_commands.drain_here(
                    session,
                    left_s(),
                    doing="close",
                    continues=False,
                    # deletions may need other ranks, and one of these may have failed
                    copies_only=session.ranks.many and self._meets_s <= closing.FAILED_S,
                )
            except BaseException:  # Ctrl-C, say: the rest takes LAST_S each
                deadline_s = time.monotonic()
                what = f"run {session.run} is closed", closing.LookedAt({})
                closing.log_newest(session, *what, memory_kept=True, early=True)
                raise
            finally:
                self.capturer.stop_waiting()
                together = self._meets_s > 0 and group_commands.finish_commands(session, meets_s)
            keep = not looked_at.allows_release or must_keep_memory(session)
            if keep:
                session.coordinator.errors += closing.log_lost(session)
            closing.log_end(session, report, looked_at, memory_kept=keep, early=bool(failed))
        finally:
            self.closed = True
            OPEN.discard(self)
            self._last = None
            signal_hub.stop(self._saves_on)
            self.saver.close()
            try:
                session.close(keep_memory=keep, timeout_s=left_s(LAST_S))
            finally:
                if self._drains_on is not None:
                    self._drains_on.stop()
                if together:
                    session.ranks.close(max(LAST_S, meets_s()))
                else:
                    session.ranks.leave()
                close_peers(self._peers)  # until all have left, they delete what it keeps
        if self.config.on_error is OnError.RAISE:
            self._check_alive()
            self._raise_failures()
        if failure is not None:
            raise failure

    def _end_saves(self, timeout_s: float) -> None:
        """Refuse the saves that another thread still begins, once the one in progress has ended."""
        self._ends = True
        if self.saver.lock.acquire(timeout=timeout_s):
            self.saver.lock.release()

    def _save_last(self, failed: str, timeout_s: float) -> Exception | None:
        """Save the last step where ``at_end`` asks for it, or flush it to all tiers; return why that failed."""
        self._meets_s = closing.FAILED_S if failed else math.inf
        self.cadence.end()
        last = self._last
        plan, self._meets_s = closing.agree_on_end(
            self.session,
            self.lineage,
            last,
            changed="" if last is None else last.describe_change(self.capturer.barrier.updates),
            failed=failed,
            timeout_s=min(timeout_s, self._meets_s),
        )
        if last is None or plan is not closing.ClosingPlan.SAVE:
            return None
        try:
            self.save_state(last.step, last.state, last.metrics, last.tags, at_end=True)
        except Exception as error:  # noqa: BLE001 - raised once all is closed
            logger.error("close: the last step, %d, could not be saved: %s", last.step, error)
            return error
        return None


# The open runs of this process -----------------------------------------------------------------------


def damage_reporter(run: str, places: Mapping[str, str]) -> FoundDamage:
    """Return what a reader calls for a damaged copy, so that the open runs of this process learn of it.

    ``places`` are those of the tiers that it reads, by its names for them.
    """

    def note(tier: str, id: CheckpointId, error: TierfallError) -> None:
        for one in open_runs():
            for name, store in one.session.stores.items() if one.run == run else ():
                if store.place == places.get(tier):
                    one.session.report_damaged(name, id, error)

    return note


def open_runs() -> list[OpenRun]:
    """Return the runs that are open in this process."""
    return [one for one in list(OPEN) if one.pid == os.getpid()]


def open_run_on(config: Config, run: str) -> OpenRun | None:
    """Return the run of this name that is open in this process with the same host memory or a tier of ``config``."""
    places = {tier.place for tier in config.stored}
    for other in open_runs():
        theirs = {tier.place for tier in other.config.stored}
        if other.run == run and (
            places & theirs or other.session.tiers.folder == run_folder(config, run)
        ):
            return other
    return None


def failed_by_exception() -> str:
    """Return how the training ended, for ``OpenRun.close``, if an exception is being handled."""
    return "" if sys.exc_info()[0] is None else "it ended by an exception"


def _check_first(config: Config, run: str) -> None:
    """Refuse to open a run twice in one process: the second would fence the first."""
    if (other := open_run_on(config, run)) is not None:
        raise ConfigError(
            f"open: a second Checkpointer of run {run!r} in this process, which has one with host memory in "
            f"{other.session.tiers.folder} already. tierfall.open(..., replace=True) closes that one first, also if no "
            "variable holds it any more; tierfall.close_all() closes all of this process"
        )


@atexit.register
def _close_open_runs() -> None:
    """Close what a script has left open: nothing that it saved is lost."""
    for one in open_runs():
        logger.warning("run %s: the program ends and did not close it: closing", one.run)
        try:
            one.close("the program ends, and did not close the run")
        except Exception:
            logger.exception("run %s could not be closed", one.run)
