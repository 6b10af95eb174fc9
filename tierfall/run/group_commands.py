"""A person's commands to an open run, on the thread that trains; with several ranks, every rank makes the same call.

Rank 0 decides which checkpoint a command names. Its coordinator has all ranks carry it out, and all ranks raise or
return the same result. Nothing here moves bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from tierfall.core.flush.tasks import CommandKind
from tierfall.core.ranks.agreement import check_same_arguments
from tierfall.core.types.errors import RanksError, StepError, TierfallError
from tierfall.core.types.units import format_duration
from tierfall.core.types.values import CheckpointId
from tierfall.core.types.view import ArrivalOutlook, Decision, DrainDecision
from tierfall.policies.drain import describe_drain
from tierfall.policies.retention import plan_retention
from tierfall.run.session import Session
from tierfall.telemetry.reports import CheckpointInfo, DrainForecast, DrainReport

logger = logging.getLogger("tierfall")
_ARRIVES = {
    ArrivalOutlook.ARRIVES: True,
    ArrivalOutlook.TOO_LATE: False,
    ArrivalOutlook.UNKNOWN: None,
}


def known_checkpoints(session: Session) -> list[CheckpointInfo]:
    """Return every checkpoint that exists or is being captured, oldest first, without the remains of failed captures;
    those that another process committed for this start included."""

    def ask() -> list[CheckpointInfo]:
        ledger = session.coordinator.ledger
        left = ledger.abandoned()
        return [
            session.status.checkpoint_info(entry, abandoned=entry.id in left)
            for entry in sorted(ledger.entries.values(), key=lambda e: e.id)
            if entry.commit is not None or entry.snapshot is not None or entry.damage
        ]

    session.find_external_commits()
    return session.call(ask)


def run_command(
    session: Session,
    kind: CommandKind,
    step: int,
    attempt: int | None,
    *,
    even_the_last: bool,
    tag: str = "",
) -> None:
    """Carry out a command, on all ranks. Rank 0 decides which checkpoint it names.

    Raises StepError if there is none, or if a deletion would leave none that can be restored, unless
    ``even_the_last``; and what kept a tier from it: the same on every rank.
    """
    ranks = session.ranks

    def decide(calls: dict[int, dict[str, Any]]) -> CheckpointId:
        check_same_arguments(kind, calls)
        id = find_checkpoint(session, kind, step, attempt)
        restorable = session.call(lambda: session.coordinator.ledger.view().restorable)
        # a pinned one is refused with another reason
        if not even_the_last and all(c.id == id and not c.pinned for c in restorable):
            raise StepError(
                f"{kind}: after {id}, no step is left that can be restored; save one first, or pass "
                "even_the_last=True"
            )
        return id

    call = {"step": step, "attempt": attempt, "even_the_last": even_the_last, "tag": tag}
    session.wait_filled(kind)
    id = ranks.agree(kind, call, decide, CheckpointId)
    failed: dict[str, BaseException] = {}
    if ranks.topology.is_root:
        try:
            failed = session.submit(kind, id, tag)
        except TierfallError as error:
            # the coordinator has stopped: no other rank must wait for it
            failed = {"tierfall": error}

    def end(calls: dict[int, None]) -> None:
        for tier, error in failed.items():
            if isinstance(error, StepError):
                raise error
            known = type(error) if isinstance(error, TierfallError) else TierfallError
            where = "" if tier == "tierfall" else f"tier {tier} could not do it: "
            raise known(f"{kind} of {id}: {where}{error}") from error

    ranks.agree(f"{kind}: end", None, end, object, timeout_s=_patience_s(session))


def find_checkpoint(session: Session, doing: str, step: int, attempt: int | None) -> CheckpointId:
    """Return the newest checkpoint of that step, of the live lineage unless ``attempt`` is given.

    Raises StepError where there is none.
    """
    known = known_checkpoints(session)
    fitting = [
        c
        for c in known
        if c.step == step and (not c.abandoned if attempt is None else c.attempt == attempt)
    ]
    if not fitting:
        which = f"step {step}" + ("" if attempt is None else f" of attempt {attempt}")
        if any(
            id.step == step and attempt in (None, id.attempt) for id in session.leftovers.images
        ):
            raise StepError(
                f"{doing}: {which} is in memory alone, where ranks of an earlier start left it: it can be restored. "
                "The next save is made at once and goes to every tier; name that one"
            )
        there = ", ".join(f"{c.step}@{c.attempt}" for c in known[-8:]) or "none"
        raise StepError(f"{doing}: {which} is not known; the newest there are: {there}")
    return CheckpointId(fitting[-1].step, fitting[-1].attempt)


def _patience_s(session: Session) -> float:
    """Return how long ranks wait for rank 0, which may itself wait for its tiers for ``max_wait``."""
    return 2 * session.config.max_wait_s


# prune -----------------------------------------------------------------------------------------------


def prune(session: Session, *, dry_run: bool) -> list[Decision]:
    """Return what retention decides, on rank 0, and carry it out on all ranks unless ``dry_run``."""
    ranks = session.ranks
    coordinator = session.coordinator
    session.find_external_commits()

    def plan() -> tuple[Decision, ...]:
        view = replace(coordinator.ledger.view(), assume_verified=True)
        return tuple(d for tier in coordinator.lanes for d in plan_retention(view, tier))

    def decide(calls: dict[int, dict[str, Any]]) -> tuple[Decision, ...]:
        check_same_arguments("prune", calls)
        return session.call(plan)

    decisions = ranks.agree("prune", {"dry_run": dry_run}, decide, tuple[Decision, ...])
    if not dry_run:
        if ranks.topology.is_root:
            session.call(coordinator.deleter.trust)
            session.wait_idle(session.config.max_wait_s)
        ranks.meet("prune: dropped", timeout_s=_patience_s(session))
        if not ranks.topology.is_root:
            session.wait_idle(session.config.max_wait_s)
        ranks.meet("prune: end", timeout_s=_patience_s(session))
    return list(decisions)


# drain -----------------------------------------------------------------------------------------------


def drain_here(
    session: Session,
    deadline_s: float | None,
    *,
    doing: str = "drain",
    continues: bool = True,
    copies_only: bool = False,
) -> DrainReport:
    """Wait until every copy that this rank owes is durable, for ``deadline_s`` seconds at most; unless ``copies_only``,
    until deletions have ended, too.

    With a deadline, copies that can arrive in time are written first. ``continues``: the others are begun afterwards.
    ``doing`` names the operation in the log.
    """
    began = time.monotonic()
    coordinator = session.coordinator
    session.call(coordinator.try_again)
    owed = session.call(coordinator.owed_copies)
    forecast: tuple[DrainForecast, ...] = ()
    asker = object()
    try:
        if deadline_s is not None and owed:
            plan = partial(coordinator.drain_schedule.begin, asker, began + deadline_s)
            forecast = _log_forecast(session.call(plan), doing, deadline_s)
        with session.waiting_for_copies(doing):
            session.wait_idle(deadline_s, copies_only=copies_only)
    finally:
        if continues:
            session.call_soon(partial(coordinator.drain_schedule.end, asker))
    left = set(session.call(coordinator.owed_copies))
    left |= set(owed) & set(session.call(coordinator.set_aside_copies))
    durable = session.call(lambda: set(coordinator.durable))
    return DrainReport(
        done=_triples(copy for copy in owed if copy in durable),
        left=_triples(sorted(left)),
        lost=_triples(copy for copy in owed if copy not in left | durable),
        seconds=time.monotonic() - began,
        forecast=forecast,
    )


def _log_forecast(
    decisions: Sequence[DrainDecision], doing: str, deadline_s: float
) -> tuple[DrainForecast, ...]:
    """Log what arrives before the deadline, and return it, in the order in which copies are written."""
    lost = any(decision.outlook is ArrivalOutlook.TOO_LATE for decision in decisions)
    for line in describe_drain(decisions):
        level = logging.WARNING if lost else logging.INFO
        logger.log(level, "%s: in at most %s %s", doing, format_duration(deadline_s), line)
    return tuple(
        DrainForecast(
            step=decision.checkpoint.step,
            attempt=decision.checkpoint.attempt,
            tier=decision.tier,
            arrives=_ARRIVES[decision.outlook],
            left_bytes=decision.left_bytes,
            reason=decision.reason,
        )
        for decision in decisions
    )


def drain(session: Session, deadline_s: float | None) -> DrainReport:
    """Wait on all ranks until every owed copy is durable, for the shortest ``deadline_s`` of any rank at most.

    The report is the same on all ranks.
    """
    began = time.monotonic()
    max_wait_s = session.config.max_wait_s
    deadline = min(
        session.ranks.agree(
            "drain",
            () if deadline_s is None else (deadline_s,),
            lambda given: tuple(chain.from_iterable(given.values())),
            tuple[float, ...],
            timeout_s=max_wait_s if deadline_s is None else min(max_wait_s, deadline_s),
        ),
        default=None,
    )
    report = drain_here(session, deadline)
    # rank 0 plans, and does not wait for copies that cannot arrive; another rank waits until the deadline
    rest_s = 0.0 if deadline is None else max(0.0, deadline - report.seconds)
    timeout_s = _patience_s(session) + rest_s
    merged = session.ranks.agree(
        "drain: end", report, _merge_reports, DrainReport, timeout_s=timeout_s
    )
    return replace(merged, seconds=time.monotonic() - began)


def finish_commands(
    session: Session, left_s: Callable[[], float], *, frees: bool
) -> tuple[bool, bool]:
    """At close, carry out what rank 0 has decided until its end, such as deletions by its retention.

    Return whether all ranks reach this within ``left_s()`` seconds, and one second at least; and whether memory may be
    freed. A rank ``frees`` its memory if its part of what a tier must have is whole there; all ranks free, or none. If
    they do not meet, each goes by its own part.
    """
    ranks = session.ranks
    if not ranks.many:
        return True, frees
    timeout_s = max(1.0, left_s())
    try:
        frees = ranks.agree(
            "close",
            frees,
            lambda found: all(found.values()),
            bool,
            timeout_s=timeout_s,
            is_last=True,
        )
    except RanksError as error:
        logger.warning(
            "close: rank %d does not wait for the others: %s", ranks.topology.rank, error
        )
        return False, frees
    try:
        session.wait_idle(left_s())
    except TierfallError as error:  # the coordinator has stopped; the other ranks end normally
        logger.warning("close: rank %d: %s", ranks.topology.rank, error)
    return True, frees


def _triples(copies: Iterable[tuple[CheckpointId, str]]) -> tuple[tuple[int, int, str], ...]:
    return tuple((id.step, id.attempt, tier) for id, tier in copies)


def _merge_reports(reports: Mapping[int, DrainReport]) -> DrainReport:
    """Merge the reports of all ranks; the forecast is that of rank 0, which plans. A copy that one rank knows to be
    durable is so: the others learn it soon. A copy that one rank waits for is left."""
    done, left, lost = (
        {copy for report in reports.values() for copy in getattr(report, name)}
        for name in ("done", "left", "lost")
    )
    return replace(
        reports[0],
        done=tuple(sorted(done)),
        left=tuple(sorted(left - done)),
        lost=tuple(sorted(lost - left - done)),
    )
