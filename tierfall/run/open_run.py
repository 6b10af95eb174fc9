"""A run that this process trains: the parts behind a ``Checkpointer``, and the calls that integrations make of them.

It owns the rules of the training thread: one save after another, steps that rise, what a restore reads and goes on
from, and the order of the end. Bytes are moved by the session's workers and by the capture thread.
``checkpointer.open_run_of`` leads here; nothing of it is public API.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tierfall.config import Config
from tierfall.config.fields import signals_named
from tierfall.core.capture.capturer import Capturer
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.copies.checkpoint_reader import CheckpointReader
from tierfall.core.copies.chunk_reader import FoundDamage, ReadTally
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.restore.agreement import agree_to_restore, finish_on_all_ranks, make_barrier
from tierfall.core.restore.candidates import RestoreRequest, choose
from tierfall.core.restore.pulled_reader import PulledReader
from tierfall.core.restore.reshard import MakePlan, ResizeRules
from tierfall.core.restore.restore import HALF_FILLED, RestoreResult, Together, fill_first
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.sampling.fingerprint import Fingerprint
from tierfall.core.state.omissions import omissions, unsaved_parameters
from tierfall.core.state.view import StateView
from tierfall.core.state.walk import walk_state
from tierfall.core.state.walk_cache import WalkCache
from tierfall.core.types.errors import ConfigError, StepError, TierfallError
from tierfall.core.types.text import format_some
from tierfall.core.types.values import CheckpointId, OnError, SaveOutcome, Verify
from tierfall.launch import signal_hub
from tierfall.launch.launcher import find_ranks
from tierfall.run import cadence, closing, group_commands
from tierfall.run.saver import SaveCall, Saver, SavingLineage, as_step, checked_metrics
from tierfall.run.session import Listener, Session
from tierfall.run.status_writer import restore_report
from tierfall.setup.opened_tiers import OPENING, OpenedTiers
from tierfall.setup.peers import PeerMemory, close_peers, meet_peers
from tierfall.setup.places import run_folder, runs_in
from tierfall.setup.start import all_ranks_or_none, on_all_ranks, take_attempt
from tierfall.setup.tiers import call_tiers, patience_s, reported_tiers, tier_rules
from tierfall.telemetry.progress import reading
from tierfall.telemetry.reports import RestoreReport
from tierfall.telemetry.step_timer import StepClock

T = TypeVar("T")
logger = logging.getLogger("tierfall")
OPEN: set[OpenRun] = set()
"""The runs that are open in this process, and those that a fork has inherited."""
ABANDON_S = 1.0
LAST_S = 1.0
"""Each last action of ``close`` has at least so many seconds, even after ``max_wait``."""
RESTORES_MAX = 3
"""So many restores of one step without a newer save are reported."""
LOOK_S = 2.0
"""Seconds that a tier has to answer which other runs it has."""
_SAVE_ON = "open: interval.on_signal"


class OpenRun:
    """See the module. ``open`` returns one; ``close`` ends it.

    Its methods are called by the thread that trains. ``save`` may be called by one thread after the other.
    """

    @classmethod
    def open(
        cls,
        config: Config,
        *,
        process_group: object = None,
        ranks: Ranks | None = None,
        fresh: bool = False,
    ) -> OpenRun:
        """Open a run; see ``tierfall.open``. ``ranks`` takes the place of what the launcher says. If a step fails, what
        the steps before it have opened is closed, on all ranks."""
        with ExitStack() as undo:
            # The launcher: which rank this process is, and the connection to the others.
            ranks = ranks or find_ranks(config, process_group=process_group)
            undo.callback(ranks.leave)
            if not config.stored and ranks.topology.is_root:
                logger.warning(
                    "run %s has host memory alone: a checkpoint survives the loss of this process, and not a restart "
                    "of the machine. Add a tier of kind file or object", config.run,
                )  # fmt: skip
            config, peers = meet_peers(config, ranks)
            undo.callback(close_peers, peers)

            # The tiers: host memory with what an earlier start left in it, and each stored tier, listed.
            with ranks.reporting_error(OPENING):
                _check_first(config)
                tiers = OpenedTiers(config, ranks=ranks, fresh=fresh, peers=peers)
                undo.callback(tiers.close, keep=True)

            # The attempt: a number that no other start has, and what all ranks have found.
            start = take_attempt(tiers)

            with all_ranks_or_none(ranks, timeout_s=patience_s(tiers.config)):
                tiers.memory.host.check_room()

                # The catalog: who has what, for all ranks.
                catalog = on_all_ranks(tiers, start)

                # The planner: the ledger of it, and what decides and copies. Nothing moves yet.
                session = Session(tiers, start, catalog)
                undo.callback(session.close, keep_memory=True, timeout_s=ABANDON_S)

                # The checkpointer: what saves and restores on the thread that trains, and the thread that captures.
                steps = StepClock(session.coordinator.throttle)
                capturer = Capturer(
                    post=session.coordinator.post,
                    max_wait_s=config.max_wait_s,
                    name=config.run,
                    holds=session.holds,
                    checked=config.capture.verify is not Verify.OFF,
                    on_step=steps.on_step,
                    threads=session.hash_threads,
                )
                undo.callback(capturer.close, ABANDON_S)
                opened = cls(session, capturer, steps, peers, begun=fresh or start.first)
                undo.callback(opened.stop_signals)

            if fresh:
                log_abandoned(config.run, session.known(), None)
                session.coordinator.begin_anew()
            session.start(opened.listeners)
            opened.listen_to_signals()  # what a signal asks for is work of a session that has started
            closing.log_open(session)
            undo.pop_all()
        OPEN.add(opened)
        return opened

    def __init__(
        self,
        session: Session,
        capturer: Capturer,
        steps: StepClock,
        peers: PeerMemory | None,
        *,
        begun: bool,
    ) -> None:
        """Build what saves and restores on a ``session`` that has not started. ``begun``: it may save without a
        restore."""
        self.session, self.capturer, self._steps, self._peers = session, capturer, steps, peers
        self.run, self.config, ranks = session.run, session.config, session.ranks
        self.pid = os.getpid()
        self.closed = False
        self._ends = False
        """No further save begins."""
        self._last: closing.LastStep | None = None
        self._fingerprint: Fingerprint | None = None
        self.checks_omissions = True
        self._restores: Counter[tuple[CheckpointId, int]] = Counter()
        self.lineage = SavingLineage(self.run, session.attempt, begun=begun)
        self.saver = Saver(session, capturer)
        announced = None
        if ranks.many:
            announced = cadence.AnnouncedSteps(
                ranks.message_tree, run_aside=session.call_soon, leave_out=self._report_unsaved
            )
        self.listeners: dict[str | int, Listener] = (
            {} if announced is None else {cadence.TOPIC: announced.on_message}
        )
        """The receivers of other ranks' messages, by topic."""
        self.cadence = cadence.CadenceClock(
            cadence.rules_of(self.config.interval, tier_rules(self.config)),
            clock=time.monotonic,
            began_s=session.attempt.wall_time_s,
            images=lambda image_bytes: (session.host.capacity_bytes or 0) // image_bytes,
            copying=lambda: any(lane.active for lane in session.coordinator.lanes.values()),
            others=announced,
        )
        self.patience_s = patience_s(self.config)
        """How long one rank waits for another where bytes are moved."""
        self._saves_on: signal_hub.Listener | None = None
        self._drains_on: closing.DrainOnSignal | None = None

    def listen_to_signals(self) -> None:
        """Listen to the signals that request a save or a drain, until ``stop_signals``."""
        self._saves_on = signal_hub.add_listener(
            signals_named(self.config.interval.on_signal),
            what=_SAVE_ON,
            flag=lambda number: self.cadence.request(number.name),
        )
        if self.config.drain is not None:
            saver = self.saver
            self._drains_on = closing.DrainOnSignal(self.config, self.session, lambda: saver.tried)

    def stop_signals(self) -> None:
        """Stop listening to signals; may be called twice."""
        self.stop_saving_on_signals()
        if self._drains_on is not None:
            self._drains_on.stop()

    def stop_saving_on_signals(self) -> None:
        if self._saves_on is not None:
            signal_hub.stop(self._saves_on)

    # Saving ------------------------------------------------------------------------------------------

    def save_state(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None,
        tags: Sequence[str],
        *,
        at_end: bool = False,
        block: bool = False,
    ) -> SaveHandle:
        """Save a state of the training loop; ``at_end``: to every tier, whatever ``flush.every`` says. ``block`` waits
        until the last tier of this step has it."""
        omitted: list[str] = []

        def walk(cache: WalkCache) -> StateView:
            view = walk_state(state, cache)
            if self.checks_omissions:
                omitted.extend(unsaved_parameters(state, view))
            return view

        handle = self.save(step, walk, metrics=metrics or {}, tags=tags, at_end=at_end)
        self.cadence.on_saved(handle)
        if self._last is not None and self._last.step < handle.step:
            self._last = None  # a later step is saved
        if self.checks_omissions:
            self.checks_omissions = False
            for text in (*omitted, *omissions(state)):
                logger.warning("%s", text)
        if block:
            with self.session.waiting_for_copies(f"save of step {step}"):
                handle.wait()
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
        self.check_usable()
        self._check_alive()
        many = self.session.ranks.many
        if not many:
            self._raise_failures()
        step = as_step(step)
        self.session.wait_filled(f"save of step {step}")
        call = SaveCall(
            step=step,
            metrics=metrics,
            tags=tags,
            began_s=began_s,
            may_be_lazy=may_be_lazy,
            progress=self.cadence.progress(),
            at_end=at_end or (self.session.displaced and not self.lineage.saved_any),
        )
        with self.saver.lock:
            if self._ends:
                raise ConfigError(
                    f"save of step {step}: another thread closes this Checkpointer; open another one"
                )
            self.lineage.check(step)
            self.session.step_timer.record(step, began_s)
            try:
                self.finish_capture(in_order=True)
                handle = self.saver.save(self.lineage, call, walk)
            except BaseException as error:
                if step != self.lineage.last_step:  # its capture did not begin
                    failed = CheckpointId(step, self.lineage.attempt.number)
                    self.session.journal.save_ended(failed, SaveOutcome.FAILED, error)
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
        """Note the last step for ``close``, in case no other follows. If the step is not saved, it has a fingerprint of
        the state: that of an earlier step, updated."""
        fingerprint = None
        if not self.lineage.has_saved(step):
            if self._fingerprint is None or not self._fingerprint.refresh(state):
                self._fingerprint = Fingerprint(state, self._steps.step_s)
            fingerprint = self._fingerprint
            metrics = {
                name: value if isinstance(value, float) else value.clone()
                for name, value in checked_metrics(metrics or {}).items()
            }
        self._last = closing.LastStep(
            step, state, metrics, tags, self.capturer.barrier.updates, fingerprint
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
            self.session.tiers.check_fence(self.session.attempt)
        self.finish_capture()
        if (last := self.saver.last) is not None:
            try:
                last.captured(self.config.max_wait_s)
            except (TierfallError, TimeoutError):
                logger.debug("the last save was not captured", exc_info=True)

    @contextmanager
    def deletions_paused(self) -> Iterator[None]:
        """Pause deletions until it is known whether the run continues from what was read."""
        session = self.session
        deleter = session.coordinator.deleter
        try:
            session.call_in_turn(lambda: deleter.set_paused(True))
            yield
        finally:
            session.call_soon(lambda: deleter.set_paused(False))

    @contextmanager
    def noting_half_filled(self, only: tuple[str, ...] | None) -> Iterator[Callable[[], None]]:
        """Refuse saves after an error that left the state, or the part ``only``, half filled, until a restore succeeds.

        Yields a function to call before the state is written: an interrupt after that is such an error.
        """
        begun: list[bool] = []
        try:
            yield lambda: begun.append(True)
        except BaseException as error:
            if HALF_FILLED in str(error) or (begun and not isinstance(error, Exception)):
                self.lineage.half_filled.add(only)
            raise

    def restore_request(
        self,
        step: int | None,
        attempt: int | None,
        tier: str | None = None,
        unreachable: str = "raise",
        *,
        doing: str = "restore",
    ) -> RestoreRequest:
        """Return a request made of the arguments of ``restore``; ConfigError for invalid ones."""
        if unreachable not in ("raise", "ignore"):
            raise ConfigError(
                f"restore: unreachable must be 'raise' or 'ignore', not {unreachable!r}"
            )
        step = None if step is None else as_step(step, doing=doing)
        attempt = None if attempt is None else as_step(attempt, doing=doing, what="attempt")
        known = [t.name for t in self.config.chain]
        if tier is not None and tier not in known:
            raise ConfigError(f"restore: no tier is named {tier!r}; there are {', '.join(known)}")
        return RestoreRequest(
            step=step,
            attempt=attempt,
            tier=tier,
            ignore_unreachable=unreachable == "ignore",
            operation=doing,
        )

    def read_newest(self, request: RestoreRequest, read_first: Callable[..., T]) -> T | None:
        """Return what ``read_first``, such as ``restore.read_first``, reads of the newest good checkpoint, on all
        ranks; None where there is none.

        Raises RestoreError where no candidate can be read whole.
        """
        tally = self.session.new_tally()
        choose_now = partial(self.candidates, tally=tally)
        how = {"make_reader": self.reader, "together": self.barrier()}
        with self.showing(request.operation, tally):
            return read_first(choose_now, request, tally, **how)

    def fill_newest(
        self, request: RestoreRequest, plan: MakePlan, rules: ResizeRules, *, continues: bool
    ) -> RestoreResult | None:
        """Read what ``plan`` plans, on all ranks or none; if ``continues``, the lineage continues from it. Without a
        checkpoint, saving may begin."""
        ranks = self.session.ranks
        request = replace(request, continues=continues)
        fill = partial(fill_first, make_plan=plan, shard=ranks.shard, resize=rules)
        restored = self.read_newest(request, fill)
        if restored is None:
            self.warn_of_other_runs()
            self.begin_anew()
            return None
        verified = restored.verified(ranks.shard)
        self.finish_restore(restored.checkpoint, request, restored.plan.finish, verified)
        return restored

    def report_restored(self, restored: RestoreResult, began_s: float) -> RestoreReport:
        """Return the report of what was read since ``began_s``, once the journal has it."""
        seconds, rates = time.monotonic() - began_s, self.session.coordinator.rates
        report = restore_report(restored, seconds)
        for source in report.sources:
            if source.rank is None:  # a lower bound: measured over the whole restore
                read = partial(rates.note_read, source.tier, source.bytes, seconds)
                self.session.call_soon(read)
        return self.session.journal.restored(report)

    def showing(self, doing: str, tally: ReadTally) -> AbstractContextManager[None]:
        """Show the progress of what is read by a tally, one line a job: on rank 0."""
        if not self.session.ranks.topology.is_root:
            return nullcontext()
        return reading(doing, tally, lambda: self.session.tiers.memory.folder)

    def warn_of_other_runs(self) -> None:
        if not self.session.ranks.topology.is_root:
            return
        folders = {t.name: t.folder for t in self.config.stored if t.folder is not None}
        answers = call_tiers(
            (store for store in self.session.stores.values() if store.name in folders),
            lambda store: runs_in(folders[store.name]),
            self.config,
            BoundedCalls(),
            timeout_s=LOOK_S,
        )
        found = {run for each in answers.values() for run in each.value or ()}
        if others := found - {self.session.run}:
            logger.warning(
                "restore: no tier has a checkpoint of run %r, and training begins anew. Other runs on these tiers: %s. "
                "To continue from one, give its name as 'run' in the configuration",
                self.session.run, format_some(sorted(others)),
            )  # fmt: skip

    def reader(
        self, checkpoint: KnownCheckpoint, tiers: Sequence[str], tally: ReadTally
    ) -> CheckpointReader:
        """Return a reader of a checkpoint's images; several ranks share what they read."""
        open_image, ring = self.session.tiers.opener(), self.session.ring
        if not self.session.ranks.many:
            return CheckpointReader(checkpoint, tiers, open_image, tally, ring)
        config = self.config
        return PulledReader(
            checkpoint,
            tiers,
            open_image,
            tally,
            ring,
            ranks=self.session.ranks,
            order=[tier.name for tier in config.chain],
            max_wait_s=config.max_wait_s,
            patience_s=self.patience_s,
            interface=None if config.peers is None else config.peers.interface,
        )

    def barrier(self) -> Together:
        """Return how all ranks end a candidate."""
        return make_barrier(self.session.ranks, timeout_s=self.patience_s)

    def candidates(
        self, request: RestoreRequest, tally: ReadTally, *, reads_all: bool = False
    ) -> list[KnownCheckpoint]:
        """List all tiers, and return the checkpoints that may be restored, newest first, the same on all ranks. Unless
        it ``reads_all``, older ones may be left out."""
        session = self.session
        listings = session.list_now() if reads_all else session.list_to_restore(request)
        if not session.tiers.agrees:
            return choose(listings, request, tally)
        reported = reported_tiers(self.config, session.ranks)
        found = agree_to_restore(session.ranks, listings, request, mine=reported, tally=tally)
        return self.candidates(request, tally, reads_all=True) if found is None else found

    def begin_anew(self) -> None:
        """Let saving begin: no tier holds a checkpoint that the lineage could continue from."""
        self.lineage.begun = True
        self.session.call_in_turn(self.session.coordinator.begin_anew)

    def begin_empty(self) -> None:
        """Let saving begin, on all ranks, if no tier holds a checkpoint; see ``Checkpointer.begin``."""
        request = RestoreRequest(operation="begin", advice="or open with fresh=True")
        session = self.session
        if there := self.candidates(request, session.new_tally()):
            raise StepError(
                f"begin: run {session.run!r} has checkpoints, the newest is {there[0].id}: call restore() or load() to "
                "continue from one, choose another run name, or open with fresh=True to leave them behind"
            )
        self.begin_anew()

    def finish_restore(
        self,
        checkpoint: KnownCheckpoint,
        request: RestoreRequest,
        finish: Callable[[], None] = lambda: None,
        verified: tuple[str, ...] = (),
    ) -> None:
        """Call ``finish``, which ends a restore, on all ranks; if the ``request`` continues, let the lineage continue
        from the checkpoint, as a new attempt if any rank has saved since the last restore. This rank's image was read
        whole, and was good, on the tiers ``verified``."""
        id, commit, session = checkpoint.id, checkpoint.commit, self.session
        any_saved = finish_on_all_ranks(
            session.ranks,
            finish,
            id,
            saved=self.lineage.saved_any,
            request=request,
            timeout_s=self.patience_s,
        )
        if not request.continues:
            return
        assert commit is not None, "it was read"
        attempt = session.begin_attempt() if any_saved else self.lineage.attempt
        self.lineage.continue_from(commit, attempt)
        log_abandoned(self.run, session.known(), id)

        def continue_ledger() -> None:
            session.coordinator.verifier.on_restored(id, verified)
            session.coordinator.ledger.continue_from(id, attempt=attempt.number)

        session.call_in_turn(continue_ledger)
        # Without an image in host memory, a node was lost or moved: the next save makes its image, and what it kept
        # for others, again.
        is_lost = self.config.peers is not None and session.host.name not in verified
        due = "peer memory has lost copies" if is_lost else None
        if session.displaced:
            due = "memory has images of other ranks, which no rank can flush"
        self.forget_last()
        self.cadence.continue_from(id.step, due, earlier=commit.progress)
        if request.step is None:
            self._report_again(id)
        session.step_timer.continue_from(id.step)

    def _report_again(self, id: CheckpointId) -> None:
        """Warn if the newest checkpoint was restored ``RESTORES_MAX`` times while no start has saved a good newer one:
        training may fail from it each time. Each attempt since is a restore, and each call of this one."""
        session, own = self.session, self.lineage.attempt.number
        self._restores[id, own] += 1
        attempts = {number for listing in session.tiers.listings for number in listing.attempts}
        times = self._restores[id, own] + sum(id.attempt < number < own for number in attempts)
        if times < RESTORES_MAX or not session.ranks.topology.is_root:
            return
        older = (c.id for c in reversed(session.known()) if c.live and c.id.step < id.step)
        back = next((f"go back: restore(step={each.step})" for each in older), "no step is older")
        logger.warning(
            "restore: this is restore number %d of step %s without a good newer save. If nothing is left to train, all "
            "is well; if training fails from it each time, %s", times, id, back,
        )  # fmt: skip

    # Checks ------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise ConfigError where the run is closed, or was opened by the process that this one was forked from."""
        if self.closed:
            raise ConfigError("this Checkpointer is closed; open another one")
        self._check_process()

    def _check_process(self) -> None:
        if os.getpid() != self.pid:
            raise ConfigError(
                f"this Checkpointer belongs to process {self.pid}, which opened it; a forked child cannot use it: "
                "save, restore and close there, and open another run in the child if it is to save"
            )

    def _check_alive(self) -> None:
        """Raise the error that keeps saves from becoming checkpoints."""
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
        keep, together, frees, session = True, False, False, self.session
        deadline_s = time.monotonic() + self.config.max_wait_s
        most_s = closing.FAILED_S if failed else math.inf  # at each meeting of the ranks

        def left_s(least_s: float = 0.0) -> float:
            return max(least_s, deadline_s - time.monotonic())

        def meets_s() -> float:
            return min(left_s(), most_s)

        try:
            try:
                self.cadence.end()
                session.wait_filled("close", min(left_s() / 2, most_s))
                updates, last = self.capturer.barrier.updates, self._last
                plan, most_s = closing.agree_on_end(
                    session,
                    self.lineage,
                    last,
                    changed="" if last is None else last.describe_change(updates),
                    failed=failed,
                    timeout_s=min(left_s() / 2, most_s),
                )
                if last is not None and plan is closing.ClosingPlan.SAVE:
                    failure = self._save_last(last)
                self._end_saves(left_s() / 2)
                self.finish_capture(left_s())
                self.capturer.close(left_s())
                session.find_external_commits(left_s(), last=True)
                looked_at = closing.confirm_copies(session, left_s() / 2)
                frees = looked_at.allows_release
                report = group_commands.drain_here(
                    session,
                    left_s(),
                    doing="close",
                    continues=False,
                    # deletions may need other ranks, and one of these may have failed
                    copies_only=session.ranks.many and most_s <= closing.FAILED_S,
                )
            except BaseException:  # Ctrl-C, say: the rest takes LAST_S each
                deadline_s = time.monotonic()
                what = f"run {session.run} is closed", closing.LookedAt({})
                closing.log_newest(session, *what, memory_kept=True, early=True)
                raise
            finally:
                self.capturer.stop_waiting()
                if most_s > 0:
                    together, frees = group_commands.finish_commands(session, meets_s, frees=frees)
            keep = not frees or session.must_keep_memory()
            session.coordinator.errors += closing.log_end(
                session, report, looked_at, memory_kept=keep, early=bool(failed)
            )
        finally:
            self.closed = True
            OPEN.discard(self)
            self._last = None
            self.stop_saving_on_signals()
            self.saver.close()
            kept = True
            try:
                kept = session.close(keep_memory=keep, timeout_s=left_s(LAST_S))
            finally:
                self.stop_signals()
                try:
                    if together:
                        session.ranks.close(max(LAST_S, meets_s()))
                    else:
                        session.ranks.leave()
                finally:  # not before all have left: others may read what it keeps
                    close_peers(self._peers, keep=kept)
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

    def _save_last(self, last: closing.LastStep) -> Exception | None:
        """Save the last step to all tiers; return why that failed."""
        try:
            self.save_state(last.step, last.state, last.metrics, last.tags, at_end=True)
        except Exception as error:  # noqa: BLE001 - raised once all is closed
            logger.error("close: the last step, %d, could not be saved: %s", last.step, error)
            return error
        return None


def log_abandoned(run: str, known: Sequence[KnownCheckpoint], from_id: CheckpointId | None) -> None:
    """Log which checkpoints are abandoned by the lineage that begins here, and which an earlier start abandoned, as it
    may not have seen them."""
    loose = [c for c in known if not (c.deleted or c.pinned)]
    begins = "anew" if from_id is None else f"at {from_id}"
    newer = [c for c in loose if from_id is None or c.id.step > from_id.step]
    for left, who in (
        ([c for c in newer if not c.abandoned], f"the lineage that begins {begins} abandons"),
        ([c for c in loose if c.abandoned], "an earlier start has abandoned"),
    ):
        if left:
            logger.warning(
                "run %s: %s %s; each tier deletes its own once the present lineage has a copy as safe. To keep "
                "one, pin it now",
                run,
                who,
                format_some([str(c.id) for c in left]),
            )


# The open runs of this process -----------------------------------------------------------------------


def damage_reporter(run: str, places: Mapping[str, str]) -> FoundDamage:
    """Return a function by which a reader reports a damaged copy to the open runs of this process.

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


def open_run_on(config: Config) -> OpenRun | None:
    """Return the run of that name that is open in this process with the same host memory or a tier of ``config``."""
    places = {tier.place for tier in config.stored}
    for other in open_runs():
        theirs = {tier.place for tier in other.config.stored}
        if other.run == config.run and (
            places & theirs or other.session.memory.folder == run_folder(config, config.run)
        ):
            return other
    return None


def failed_by_exception() -> str:
    """Return how the training ended, for ``OpenRun.close``, if an exception is being handled."""
    return "" if sys.exc_info()[0] is None else "it ended by an exception"


def _check_first(config: Config) -> None:
    """Refuse to open a run twice in one process: the second would fence the first; and to listen to signals on another
    than the main thread."""
    if (other := open_run_on(config)) is not None:
        raise ConfigError(
            f"open: a second Checkpointer of run {config.run!r} in this process, which has one with host memory in "
            f"{other.session.memory.folder} already. tierfall.open(..., replace=True) closes that one first, also if "
            "no variable holds it any more; tierfall.close_all() closes all of this process"
        )
    if config.drain is not None:
        signal_hub.check_thread(closing.DRAIN_ON)
    if config.interval.on_signal:
        signal_hub.check_thread(_SAVE_ON)


@atexit.register
def _close_open_runs() -> None:
    """Close what a script has left open: nothing that it saved is lost."""
    for one in open_runs():
        logger.warning("run %s: the program ends and did not close it: closing", one.run)
        try:
            one.close("the program ends, and did not close the run")
        except Exception:
            logger.exception("run %s could not be closed", one.run)
