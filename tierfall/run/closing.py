"""The end of a training: the last step that ``maybe_save`` was called for, the copies that are still owed, and the
drain on a signal that announces the end of the process.

``close`` saves the last step where ``at_end`` is set; with several ranks, all agree on that. Nothing here saves.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from signal import Signals
from typing import Any

from tierfall.config import Config
from tierfall.config.fields import signals_named
from tierfall.core.ranks.agreement import LeftError
from tierfall.core.ranks.messages import Message
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.sampling.fingerprint import Fingerprint
from tierfall.core.types.errors import FlushError, RanksError, TierfallError
from tierfall.core.types.text import first_sentence, format_ranks, format_some
from tierfall.core.types.units import format_duration
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.launch import signal_hub
from tierfall.run import group_commands
from tierfall.run.saver import SavingLineage
from tierfall.run.session import Session, needed_beside_memory
from tierfall.telemetry.reports import DrainReport

logger = logging.getLogger("tierfall")
FAILED_S = 5.0
"""Seconds for which rank 0 waits for the others at each meeting, once the training has failed on one that owes copies:
others may be in a collective, until the launcher ends them. Another rank waits for rank 0 for ``ANSWER_S`` more."""
DRAIN_ON = "drain.on_signal"
POLL_S = 0.05
FREE_S = 2.0
"""Seconds for which the end of the process waits until memory is freed."""
LOOK_S = 2.0
"""Seconds that the places of failing tiers have to answer whether they were emptied."""


@dataclass(frozen=True, slots=True)
class LastStep:
    """The arguments of the last ``maybe_save``, the number of updates until then, and, if the step is not saved, a
    fingerprint of the state."""

    step: int
    state: Mapping[str, Any]
    metrics: Mapping[str, Any] | None
    tags: Sequence[str]
    updates: int
    fingerprint: Fingerprint | None

    def describe_change(self, updates: int) -> str:
        """Return how the state differs from that step's, after ``updates``; empty where it is unchanged."""
        if updates != self.updates:
            return "the state was changed since, by an optimizer's step"
        name = None if self.fingerprint is None else self.fingerprint.changed(self.state)
        if name is None:
            return ""
        return f"{name} was changed since: leave the with block, or call save(), before the change"


class ClosingPlan(StrEnum):
    """What to do with the last step: save it, or flush it to all tiers where it is saved already."""

    NOTHING = "nothing"
    SAVE = "save"
    FLUSH = "flush"


def agree_on_end(
    session: Session,
    lineage: SavingLineage,
    last: LastStep | None,
    *,
    changed: str,
    failed: str,
    timeout_s: float,
) -> tuple[ClosingPlan, float]:
    """Return the plan of all ranks for the last step, and the seconds to wait for the other ranks at each later
    meeting. Log what keeps the step from being saved, and flush it where it is saved.

    The saves after the last that all ranks have begun are given up: no rank begins one any more. ``changed`` is how the
    state differs from that of the last step, ``failed`` how the training ended early; each is empty where that is not
    so. A rank whose training failed waits for the others only until its copies are finished, which takes none of their
    training threads.
    """
    copied, gone = _copied(session) if failed and session.ranks.many else (None, False)
    step = None if last is None else last.step
    mine = LastStepReport(
        step=step,
        saved=step is not None and lineage.has_saved(step),
        changed=changed,
        failed=failed,
        gone=gone,
        reached=-1 if lineage.last_step is None else lineage.last_step,
    )
    try:
        decision = session.ranks.agree(
            "close: the last step",
            mine,
            decide,
            ClosingDecision,
            timeout_s=timeout_s,
            is_last=True,
            leave=copied,
        )
    except RanksError as error:
        if not isinstance(error, LeftError):
            text = "this rank waits for no other" if last is None else "the last step is not saved"
            logger.warning("close: %s: %s", text, error)
        return ClosingPlan.NOTHING, 0.0 if failed else math.inf
    if decision.reason:
        logger.warning("close: the last step is not saved: %s", decision.reason)
    coordinator, attempt = session.coordinator, lineage.attempt.number
    if decision.plan is not ClosingPlan.SAVE:
        reached = CheckpointId(decision.reached, attempt)
        session.call_soon(partial(coordinator.seals.end_saves, reached))
    if step is not None and decision.plan is ClosingPlan.FLUSH:
        session.call_soon(partial(coordinator.owe_to_all_tiers, CheckpointId(step, attempt)))
    if decision.gone:
        return decision.plan, 0.0
    return decision.plan, FAILED_S if decision.failed else math.inf


def _copied(session: Session) -> tuple[InterruptibleEvent, bool]:
    """Return an event that is set once this rank has made all copies it can; and whether it owes none now."""
    coordinator, copied = session.coordinator, InterruptibleEvent()

    def ask() -> bool:
        coordinator.set_when_idle(copied, copies_only=True)
        return not coordinator.owed_copies()

    return copied, session.call(ask)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStepReport(Message):
    """What one rank knows of the last step; see ``agree_on_end``. ``reached`` is the last step that it began to save,
    or restored, -1 without one. A rank that is ``gone`` waits for no other."""

    step: int | None
    saved: bool
    changed: str
    failed: str
    gone: bool = False
    reached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosingDecision(Message):
    """What all ranks do, and why it is nothing. ``failed``: the training has failed on a rank; ``gone``: one is gone.
    ``reached`` is the lowest of all ranks."""

    plan: ClosingPlan = ClosingPlan.NOTHING
    reason: str = ""
    failed: bool = False
    gone: bool = False
    reached: int = -1


def decide(reports: Mapping[int, LastStepReport]) -> ClosingDecision:
    """Return what follows from the reports of all ranks."""
    return replace(
        _decide_plan(reports),
        failed=any(report.failed for report in reports.values()),
        gone=any(report.gone for report in reports.values()),
        reached=min(report.reached for report in reports.values()),
    )


def _decide_plan(reports: Mapping[int, LastStepReport]) -> ClosingDecision:
    """Return the plan, and the reason where it is to do nothing."""
    steps = {rank: report.step for rank, report in reports.items()}
    step = steps[0]
    unsaved = [rank for rank, report in reports.items() if not report.saved]
    if all(found is None for found in steps.values()):
        return ClosingDecision()
    for rank, report in reports.items():
        if report.failed:
            why = f"step {step}: {_who(rank, reports)}{report.failed}"
            return ClosingDecision(reason=why if unsaved else "")
    if any(found != step for found in steps.values()):
        other = next(rank for rank, found in steps.items() if found != step)
        why = f"rank {other} ended at {_at(steps[other])}, rank 0 at {_at(step)}"
        return ClosingDecision(reason=why)
    if not unsaved:
        return ClosingDecision(plan=ClosingPlan.FLUSH)
    for rank, report in reports.items():
        if report.changed:
            return ClosingDecision(reason=f"step {step}: {_who(rank, reports)}{report.changed}")
    if len(unsaved) < len(reports):
        why = f"step {step}: {format_ranks(unsaved)} left it out, others saved it"
        return ClosingDecision(reason=why)
    return ClosingDecision(plan=ClosingPlan.SAVE)


@dataclass(frozen=True, slots=True)
class LookedAt:
    """Checkpoints that must not be lost with memory. Of each, by tier that has a copy in the ledger: whether it is
    whole there now, or why that is not known."""

    found: Mapping[CheckpointId, Mapping[str, bool | TierfallError]]

    @property
    def allows_release(self) -> bool:
        """False where no tier is known to have a whole copy of one of them."""
        return all(True in tiers.values() for tiers in self.found.values())

    def is_unknown(self, id: CheckpointId, tier: str) -> bool:
        """Return whether a tier could not be asked about a checkpoint. What a tier lacks, the ledger knows."""
        return isinstance(self.found.get(id, {}).get(tier), TierfallError)


def confirm_copies(session: Session, timeout_s: float) -> LookedAt:
    """Look again at the copies that allow memory to be released, for ``timeout_s`` seconds at most: they may have been
    removed meanwhile. Copies that lack files are reported as damaged: memory is kept then."""
    if session.coordinator.fenced is not None:
        return LookedAt({})

    def ask() -> dict[CheckpointId, list[str]]:
        has_no_part = session.coordinator.ledger.has_no_part
        return {
            e.id: [t for t in session.stores if e.readable_on(t) and not has_no_part(t, e.id)]
            for e in needed_beside_memory(session)
        }

    copies = session.call(ask)
    ends_s = time.monotonic() + timeout_s
    return LookedAt(
        {
            id: session.look_at(id, tiers, max(0.0, ends_s - time.monotonic()))
            for id, tiers in copies.items()
            if tiers
        }
    )


def _only_in_lost_memory(session: Session) -> set[CheckpointId]:
    """Return the checkpoints that are committed on no tier, and sealed in memory that ends with this process."""

    def ask() -> set[CheckpointId]:
        ledger, ends = session.coordinator.ledger, session.memory.ends_with_process
        left = ledger.abandoned()
        of_others = session.leftovers.images
        return {
            e.id
            for e in ledger.entries.values()
            if e.state(ledger.host) is CopyState.SEALED and e.id not in left and not e.deleted
            if CopyState.COMMITTED not in e.states.values()
            if ends([e.region])
        } | {
            id
            for id, regions in of_others.items()
            if not session.leftovers.durable_on(id) and id not in left and ends(regions)
        }

    return session.call(ask)


def log_end(
    session: Session, report: DrainReport, looked_at: LookedAt, *, memory_kept: bool, early: bool
) -> list[FlushError]:
    """Log what ``close`` leaves owed and why, and on rank 0 the newest checkpoint and which tiers have it: as a warning
    if the training ended ``early``. Log, and return, what is lost with this process: it is in memory alone, and the
    memory has no file any more."""
    coordinator = session.coordinator

    def ask() -> dict[str, BaseException]:
        lanes = (x for x in coordinator.lanes.values() if x.failing_since_s is not None)
        delayed = {lane.tier: lane.last_error for lane in lanes if lane.last_error is not None}
        return delayed | coordinator.ledger.failing

    lost = _only_in_lost_memory(session) if memory_kept else set()
    losses = []
    if lost:
        named = format_some([str(id) for id in sorted(lost)])
        losses = [
            FlushError(f"close: lost, as no other tier has it: {named}: {session.memory.loss}")
        ]
        logger.error("%s", losses[0])
    answers = [pair for tiers in looked_at.found.values() for pair in tiers.items()]
    lacking = {tier for tier, answer in answers if answer is not True}
    unasked = {tier: answer for tier, answer in answers if not isinstance(answer, bool)}
    failing = {tier: first_sentence(error) for tier, error in session.call(ask).items()}
    errors = {**unasked, **failing}
    for tier, error in errors.items():
        logger.warning("close: tier %s does not answer or accepts no copy: %s", tier, error)
    if memory_kept:
        session.tiers.identities.forget_lost({*errors, *lacking}, timeout_s=LOOK_S)
    _log_left(session, report, lost)
    event = f"run {session.run} is closed"
    log_newest(session, event, looked_at, memory_kept=memory_kept, early=early)
    return losses


def _log_left(session: Session, report: DrainReport, lost: Set[CheckpointId]) -> None:
    """Log the copies that are still owed, and what writes them later, without those of the ``lost``."""
    entries = session.coordinator.ledger.entries
    capturing = session.call(lambda: {e.id for e in entries.values() if e.snapshot is not None})
    left = [(CheckpointId(step, attempt), tier) for step, attempt, tier in report.left]
    if torn := [f"{id} to {tier}" for id, tier in left if id in capturing - lost]:
        logger.warning("close: not captured in time, and lost: %s", format_some(torn))
    if owed := [f"{id} to {tier}" for id, tier in left if id not in capturing | lost]:
        logger.warning(
            "close: still owed: %s; the next start finishes it, or 'tierfall drain' what of it is in %s",
            format_some(owed),
            session.host.place,
        )


def _nothing_whole(session: Session) -> tuple[str, str]:
    """Return what to log where no tier that is written has a whole checkpoint: others may have one, or parts."""
    if session.leftovers.images:
        steps = format_some([str(id) for id in sorted(session.leftovers.images)])
        return f"no tier has a checkpoint of it, and memory has images of {steps}", (
            "a restart restores from there"
        )
    if any(listing.copies for listing in session.tiers.listings):
        found = "no tier that is written has a whole checkpoint of it"
        return found, "a restart looks at all tiers again"
    return "no tier has a checkpoint of it", "a restart begins anew"


def announce(text: str) -> None:
    """Log at level INFO; on a terminal, if the program configures no logging, so that it is shown."""
    shows_warnings = not logger.hasHandlers() and logger.level == logging.NOTSET
    try:
        on_terminal = shows_warnings and sys.stderr.isatty()
    except (AttributeError, ValueError):  # a daemon has none, or has closed it
        on_terminal = False
    logger.log(logging.WARNING if on_terminal else logging.INFO, "%s", text)


def log_open(session: Session) -> None:
    """Log, on rank 0, the attempt that has begun, and the newest checkpoint and which tiers have it."""
    if not session.ranks.topology.is_root:
        return
    attempt, tiers = session.attempt.number, [session.host.name, *session.stores]

    def log() -> None:
        found = _describe_newest(session, _find_newest(session, tiers, LookedAt({})))
        announce(f"run {session.run} is open as attempt {attempt}; {found}")

    session.call_in_turn(log)


def _describe_newest(session: Session, newest: tuple[CheckpointId, list[str]] | None) -> str:
    if newest is None:
        return _nothing_whole(session)[0]
    entry = session.coordinator.ledger.entries.get(newest[0])
    bad = (
        f", with NaN or Inf in {format_some(entry.not_finite)}"
        if entry and entry.not_finite
        else ""
    )
    return f"its newest checkpoint is {newest[0]}, on {', '.join(newest[1])}{bad}"


def _find_newest(
    session: Session, tiers: Sequence[str], looked_at: LookedAt
) -> tuple[CheckpointId, list[str]] | None:
    """Return the newest live checkpoint that some of the tiers have, and which; None if there is none. On the
    coordinator's thread."""
    ledger = session.coordinator.ledger
    left = ledger.abandoned()
    for entry in ledger.entries.newest_first():
        id = entry.id
        there = [t for t in tiers if entry.readable_on(t) and not looked_at.is_unknown(id, t)]
        if ledger.host in there and session.memory.ends_with_process([entry.region]):
            there.remove(ledger.host)
        if there and id not in left and not entry.deleted:
            return id, there
    return None


def log_newest(
    session: Session, event: str, looked_at: LookedAt, *, memory_kept: bool, early: bool
) -> None:
    """Log, on rank 0, the newest checkpoint and which tiers have it, after the ``event``; as a warning if the training
    ended ``early``, with what a restart does."""
    if not session.ranks.topology.is_root:
        return
    if not session.filled.is_set:  # its thread may wait for another rank
        logger.warning("%s; the commit records of earlier checkpoints were not read yet", event)
        return
    host = session.host.name
    try:
        tiers = [*([host] if memory_kept else []), *session.stores]
        newest = session.call(lambda: _find_newest(session, tiers, looked_at))
    except TierfallError as error:  # an interrupt is being raised, which it must not replace
        logger.warning("%s; its newest checkpoint is not known: %s", event, error)
        return
    found = _describe_newest(session, newest)
    restart = "a restart continues there" if newest else _nothing_whole(session)[1]
    if "NaN" in found:
        restart += ", or at an older one without"
    if unread := [x.tier for x in session.tiers.listings if x.error is not None]:
        restart = f"not read at the start: {', '.join(unread)}"
    if early and session.coordinator.fenced is None:
        logger.warning("%s; %s; %s", event, found, restart)
    else:
        announce(f"{event}; {found}")
    if newest is not None and newest[1] == [host] and session.stores:
        unasked = [tier for tier in session.stores if looked_at.is_unknown(newest[0], tier)]
        unless = f", unless {format_some(unasked)} has it, which did not answer" if unasked else ""
        logger.warning(
            "run %s: %s is in the memory of this machine alone%s, in %s: the next start restores it, and a restart of "
            "the machine loses it", session.run, newest[0], unless, session.host.place,
        )  # fmt: skip


# A signal that announces the end ------------------------------------------------------------------


class DrainOnSignal:
    """Listens for the signal until ``stop``. Made on the main thread.

    The signal has its previous effect once the drain has ended: every copy that can be durable is, or the deadline has
    passed. If it ends the process then, host memory is freed, unless something in it is needed. Where the same signal
    requests a save (``interval.on_signal``), the drain also waits until that save is durable, or until the run is
    closed.
    """

    def __init__(self, config: Config, session: Session, saves: Callable[[], int]) -> None:
        """``saves`` returns how many saves have begun, or were skipped."""
        assert config.drain is not None
        self._deadline_s = config.drain.deadline_s
        self._saving = frozenset(config.interval.on_signal)
        self._session = session
        self._saves = saves
        self._saves_before: dict[Signals, int] = {}
        self._closed = threading.Event()
        self._listener = signal_hub.add_listener(
            signals_named(config.drain.on_signal),
            what=DRAIN_ON,
            # on the thread that saves: the requested save may end before the drain begins
            flag=lambda number: self._saves_before.setdefault(number, saves()),
            work=self._drain,
        )

    def stop(self) -> None:
        """Stop listening: the run is closed."""
        self._closed.set()
        signal_hub.stop(self._listener)

    def _drain(self, number: Signals) -> None:
        ends_s = time.monotonic() + self._deadline_s
        name, session = number.name, self._session
        logger.warning(
            "%s: draining for %s at most; then the signal has its previous effect",
            name,
            format_duration(self._deadline_s),
        )
        try:
            session.call_soon(lambda: session.coordinator.drain_schedule.share(self._deadline_s))
            looked_at = confirm_copies(session, self._deadline_s / 2)
            saves = name in self._saving
            report = self._until(ends_s, name, continues=not saves)
            if saves and self._wait_for_save(number, ends_s):
                report = self._until(ends_s, name, continues=True)
            left = format_some(
                [f"{step}@{attempt} to {tier}" for step, attempt, tier in report.left]
            )
            logger.warning("%s: drained%s", name, f"; still owed: {left}" if left else "")
            kept = not looked_at.allows_release or session.must_keep_memory()
        except TierfallError as error:
            # The run was closed, which drains too, or the coordinator has stopped.
            logger.warning("%s: nothing more is drained: %s", name, error)
            return
        event = f"{name}: run {session.run} may end now"
        log_newest(session, event, looked_at, memory_kept=kept, early=True)
        if not kept and signal_hub.ends_process(number):
            session.free_memory_at_end(FREE_S)

    def _until(self, ends_s: float, name: str, *, continues: bool) -> DrainReport:
        left_s = max(0.0, ends_s - time.monotonic())
        # A deletion may need another rank, which this signal has ended already.
        return group_commands.drain_here(
            self._session, left_s, doing=name, continues=continues, copies_only=True
        )

    def _wait_for_save(self, number: Signals, ends_s: float) -> bool:
        """Wait for the save that the signal requests; False where it has not begun in time, or the run was closed."""
        # None: the main thread has not handled the signal yet
        while (before := self._saves_before.get(number)) is None or self._saves() <= before:
            if time.monotonic() >= ends_s or self._closed.wait(POLL_S):
                return False
        return True


def _who(rank: int, reports: Mapping[int, LastStepReport]) -> str:
    return f"rank {rank}: " if len(reports) > 1 else ""


def _at(step: int | None) -> str:
    return "no step" if step is None else f"step {step}"
