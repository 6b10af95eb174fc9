"""The Checkpointer: what a training loop holds. It turns a state into a snapshot, and a checkpoint into a state.

It runs on the training thread and owns that thread's rules: one save after another, steps that rise, the barrier, the
line that is being saved. Bytes are moved by the session's workers and the capture thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

from tierfall import telling
from tierfall.config import Config
from tierfall.core.capture.capturer import Capturer
from tierfall.core.catalog import KnownCheckpoint
from tierfall.core.errors import (
    ConfigError,
    NotSupportedError,
    StepError,
    TierfallError,
)
from tierfall.core.handle import SaveHandle
from tierfall.core.image import plan_fill, resize_rules
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.restore.agreeing import agree_to_restore, finish_together, together
from tierfall.core.restore.reader import Tally
from tierfall.core.restore.resharding import Resize
from tierfall.core.restore.restore import Request, Restored, choose, fill_first
from tierfall.core.scheduler.tasks import (
    PersonsOrder,
)
from tierfall.core.units import as_seconds
from tierfall.core.values import CheckpointId, OnError
from tierfall.core.view import Decision
from tierfall.line import SavingLine, as_step
from tierfall.orders import give
from tierfall.policies.bundle import plan_retention
from tierfall.policies.cadence import should_save
from tierfall.reports import CheckpointInfo, DrainReport, RestoreReport, Statistics
from tierfall.saving import Saver
from tierfall.session import Session
from tierfall.starting import mine, opening, ready_together

logger = logging.getLogger("tierfall")
_open: set[Checkpointer] = set()
SLOWER = 10
"""A rank that has taken its memory, or has filled its part of a restore, waits for the others for so many times
``max_wait``: how long either takes is a matter of bytes."""


class Checkpointer:
    """Saves and restores one training run. Made by ``tierfall.open``; a context manager.

    One process has one Checkpointer per run. Its methods are called by the thread that trains; handles may be waited on
    by any.
    """

    def __init__(
        self, config: Config, *, run: str, fresh: bool = False, ranks: Ranks | None = None
    ) -> None:
        self._config = config
        self._run = run
        self._pid = os.getpid()
        self._closed = False
        ranks = ranks or Ranks.alone()
        with ExitStack() as undo:
            undo.callback(ranks.leave)
            with opening(ranks):
                _check_first(config, run)
                self._session = Session(config, run=run, ranks=ranks)
            undo.callback(self._session.abandon)
            first = self._session.begin_line()
            assert self._session.attempt is not None
            self._line = SavingLine(run, self._session.attempt, begun=fresh or first)
            with ready_together(ranks, timeout_s=SLOWER * config.max_wait_s):
                self._session.host.create_now()
                self._session.build()
                self._capturer = Capturer(
                    post=self._session.coordinator.post, max_wait_s=config.max_wait_s, name=run
                )
                undo.callback(self._capturer.close, 1.0)
                self._saver = Saver(config, self._session, self._capturer)
            if fresh:
                self._say_left_behind(self._session.known(), None)
            self._session.start()
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

        ``metrics`` are numbers or 0-dim tensors, read when captured; ``block`` waits until the last tier of this step
        has it, and raises what keeps it from it, as the handle's ``wait`` does. Raises CaptureError for a state that
        cannot be saved, StepError for a step that does not follow, CapacityError where a tier cannot hold one
        checkpoint, FencedError where a newer attempt of the run exists, and under ``on_error: raise`` what failed since
        the last call.
        """
        began = time.monotonic()
        self._check_usable()
        self._check_alive()
        many = self._session.ranks.many
        if not many:
            self._raise_failures()
        step = as_step(step)
        self._line.check(step)
        try:
            self._finish_capture(in_order=True)
            handle = self._saver.save(self._line, step, state, metrics or {}, tags, began)
        except BaseException as error:
            self._saver.tell_others(self._line, step, error)
            raise
        if many:  # the others save this step whatever has failed here before
            self._raise_failures()
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
        self._check_usable()
        interval = self._config.interval
        if interval is None or interval.every is None:
            raise ConfigError(
                "maybe_save: the configuration has no interval, and choosing one by itself is not supported yet: set "
                "interval: {every: STEPS}, or call save"
            )
        self._line.check_begun(step)
        if not should_save(as_step(step), every_steps=interval.every):
            return None
        return self.save(step, state, metrics=metrics, tags=tags, block=block)

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
        if only is None and (fenced := self._session.coordinator.fenced) is not None:
            raise fenced
        if only is None and self._line.saved_any:
            self._session.check_newest()
        self._finish_capture()
        self._wait_sealed()
        with self._nothing_dropped():
            restored = self._restore(
                request,
                lambda header: plan_fill(state, header, only=only, strict=strict),
                Resize(rules=resize_rules(state)),
            )
            if restored is None:
                self._line.begun = True
                return None
            any_saved = finish_together(
                self._session.ranks,
                restored.plan.finish,  # type: ignore[attr-defined]
                restored.checkpoint.id,
                goes_on=only is None,
                saved=self._line.saved_any,
                timeout_s=SLOWER * self._config.max_wait_s,
            )
            if only is None:
                self._continue_from(restored, any_saved)
        return telling.restore_report(restored, time.monotonic() - began)

    @contextmanager
    def _nothing_dropped(self) -> Iterator[None]:
        """Keep every copy where it is, until what was read is known to be what this run goes on from."""
        session = self._session
        dropper = session.coordinator.dropper
        try:
            session.ask(lambda: setattr(dropper, "paused", True))
            yield
        finally:
            session.tell(lambda: setattr(dropper, "paused", False))

    def _wait_sealed(self) -> None:
        """The newest save is hashed and sealed a moment after it was captured; a restore must see it."""
        for handle in self._saver.counts.handles[-1:]:
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
        step = None if step is None else as_step(step, doing="restore")
        attempt = None if attempt is None else as_step(attempt, doing="restore", what="attempt")
        known = [t.name for t in self._config.chain]
        if tier is not None and tier not in known:
            raise ConfigError(f"restore: no tier is named {tier!r}; there are {', '.join(known)}")
        return Request(
            step=step, attempt=attempt, tier=tier, ignore_unreachable=unreachable == "ignore"
        )

    def _restore(
        self, request: Request, make_plan: Callable[[Any], Any], resize: Resize
    ) -> Restored | None:
        session, tally = self._session, Tally()
        listings = session.list_now()
        ranks, many = session.ranks, session.ranks.many
        if many:
            told = mine(self._config, ranks)
            candidates = agree_to_restore(ranks, listings, request, mine=told, tally=tally)
        else:
            candidates = choose(listings, request, tally)
        if not candidates:
            return None
        regions = session.ask(
            lambda: {
                (e.id, e.shard): e.region
                for e in session.coordinator.ledger.entries.values()
                if e.region is not None and e.region.sealed
            }
        )
        return fill_first(
            candidates,
            listings,
            request,
            tally,
            open_image=session.open_image(regions),
            make_plan=make_plan,
            shard=ranks.shard,
            ring=session.ring,
            resize=resize,
            together=together(ranks, timeout_s=SLOWER * self._config.max_wait_s) if many else None,
        )

    def _continue_from(self, restored: Restored, any_saved: bool) -> None:
        """The line goes on from here; what this start saved before, on any rank, belongs to another one."""
        id, commit = restored.checkpoint.id, restored.checkpoint.commit
        assert commit is not None
        attempt = self._line.attempt
        if any_saved:
            self._session.listings = self._session.list_now()
            attempt = self._session.take_attempt()
        self._line.continue_from(commit, attempt)
        self._say_left_behind(self._session.known(), id)
        ledger = self._session.coordinator.ledger
        self._session.ask(lambda: ledger.go_on_from(id, attempt=attempt.number))

    def _say_left_behind(
        self, known: Sequence[KnownCheckpoint], from_id: CheckpointId | None
    ) -> None:
        """Say which checkpoints the line that begins here leaves behind: they go once it is as safe."""
        left = [
            c
            for c in known
            if not (c.abandoned or c.tombstoned or c.pinned)
            and (from_id is None or c.id.step > from_id.step)
        ]
        if left:
            logger.warning(
                "run %s: the line that begins %s leaves behind %s; each tier deletes its own once the new line has a "
                "copy that is as safe. To keep one, pin it now",
                self._run,
                "anew" if from_id is None else f"at {from_id}",
                _some([str(c.id) for c in left]),
            )

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
        if self._session.ranks.many:
            raise NotSupportedError(f"{kind}: with several ranks this is not supported yet")
        step = as_step(step, doing=kind)
        attempt = None if attempt is None else as_step(attempt, doing=kind, what="attempt")
        self._finish_capture()
        id = self._find(kind, step, attempt)
        failed = give(self._session, kind, id)
        for tier, error in failed.items():
            if isinstance(error, StepError):
                raise error
            known = type(error) if isinstance(error, TierfallError) else TierfallError
            raise known(f"{kind} of {id}: tier {tier} could not do it: {error}") from error

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
        if (
            not dry_run
        ):  # marks that were left from outside are read first, so that more may go, or less
            self._session.ask(coordinator.dropper.survey_all)
            self._session.wait_idle(self._config.max_wait_s)
        return decisions

    def statistics(self) -> Statistics:
        """Return counters and times since open."""
        self._check_usable()
        return telling.statistics(self._session, self._saver.counts)

    # The end -----------------------------------------------------------------------------------------

    def drain(self, deadline: float | None = None) -> DrainReport:
        """Wait until every owed copy is durable, for ``deadline`` seconds at most (None: as long as it goes on).

        A tier that does not take copies at present is not waited for; what is left stands in the report.
        """
        began = time.monotonic()
        deadline = as_seconds(deadline, what="drain: deadline")
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
        deadline_s = time.monotonic() + self._config.max_wait_s

        def left_s() -> float:
            return max(0.0, deadline_s - time.monotonic())

        try:
            self._finish_capture(left_s())
            self._capturer.close(left_s())
            report = self.drain(left_s())
            keep = telling.must_keep_memory(self._session)
            self._say_left(report)
        finally:
            self._closed = True
            _open.discard(self)
            self._saver.close()
            try:
                self._session.close(keep_memory=keep, timeout_s=max(1.0, left_s()))
            finally:
                self._session.ranks.close(max(1.0, left_s()))
        if self._config.on_error is OnError.RAISE:
            self._check_alive()
            self._raise_failures()

    def _say_left(self, report: DrainReport) -> None:
        if not report.left:
            return
        session, held = self._session, self._session.host.images()
        entries = session.coordinator.ledger.entries
        capturing = session.ask(lambda: {e.id for e in entries.values() if e.snapshot is not None})
        in_memory: list[str] = []
        elsewhere: list[str] = []
        lost: list[str] = []
        for step, attempt, tier in report.left:
            id = CheckpointId(step, attempt)
            place = lost if id in capturing else in_memory if id in held else elsewhere
            place.append(f"{step}@{attempt} to {tier}")
        if lost:
            logger.warning("close: not captured in time, and lost: %s", _some(lost))
        if in_memory:
            logger.warning(
                "close: still owed: %s; what is owed lies in %s, and the next start or 'tierfall drain' finishes it",
                _some(in_memory),
                self._session.host.path,
            )
        if elsewhere:
            logger.warning(
                "close: still owed: %s; the next start copies it from the tier that has it",
                _some(elsewhere),
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
                "this Checkpointer belongs to the process that opened it; a forked child cannot use it"
            )

    def _check_alive(self) -> None:
        """Raise what keeps anything that is saved from becoming a checkpoint."""
        self._session.ranks.check()
        if (failure := self._session.workers.failure) is not None:
            raise TierfallError(f"the coordinator stopped: {failure!r}") from failure
        if (fenced := self._session.coordinator.fenced) is not None and not self._closed:
            raise fenced

    def _raise_failures(self) -> None:
        """Raise, under ``on_error: raise``, the first that failed since the last call."""
        coordinator = self._session.coordinator
        fresh = tuple(coordinator.errors)
        del coordinator.errors[: len(fresh)]  # the coordinator's thread may append meanwhile
        if fresh and self._config.on_error is OnError.RAISE:
            raise fresh[0]


def _some(things: Sequence[str]) -> str:
    """Name a few of many, and say how many more there are."""
    more = len(things) - 4
    return ", ".join(things[:4]) + (f" and {more} more" if more > 0 else "")


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
def _close_what_was_not() -> None:
    """A script that ends without close loses nothing that it saved."""
    for ckpt in list(_open):
        if ckpt._pid == os.getpid():
            logger.warning("run %s: the program ends and did not close it: closing", ckpt._run)
            try:
                ckpt.close()
            except Exception:
                logger.exception("run %s could not be closed", ckpt._run)
