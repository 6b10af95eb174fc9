"""A person's commands to an open run, on the thread that trains; with several ranks, every rank makes the same call.

Rank 0 decides which checkpoint a command names. Its coordinator has all ranks carry it out, and all ranks raise or
return the same result. Nothing here moves bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from tierfall.core.ranks.message_tree import Bodies
from tierfall.core.scheduler.ledger.tasks import CommandKind
from tierfall.core.types.errors import RanksError, StepError, TierfallError
from tierfall.core.types.text import ranks_named
from tierfall.core.types.values import CheckpointId
from tierfall.core.types.view import Decision, Verdict
from tierfall.policies.defaults import plan_retention
from tierfall.session.drain_forecast import end_drain, from_json, start_drain, to_json
from tierfall.session.requests import submit
from tierfall.session.session import Session
from tierfall.session.statistics import checkpoint_infos
from tierfall.telemetry.reports import CheckpointInfo, DrainForecast, DrainReport

logger = logging.getLogger("tierfall")


def known_checkpoints(session: Session) -> list[CheckpointInfo]:
    """Return every known checkpoint, oldest first, those that another process committed for this start included."""
    session.look()
    return session.ask(lambda: checkpoint_infos(session.coordinator.ledger, time.time()))


def run_command(session: Session, kind: CommandKind, step: int, attempt: int | None) -> None:
    """Carry out a command, on all ranks. Rank 0 decides which checkpoint it names.

    Raises StepError where there is none, and what kept a tier from it: the same on every rank.
    """
    ranks = session.ranks

    def decide(bodies: Bodies) -> list[int]:
        check_same(kind, bodies)
        id = _find(session, kind, step, attempt)
        return [id.step, id.attempt]

    id = CheckpointId(*ranks.agree(kind, {"step": step, "attempt": attempt}, decide))
    failed: dict[str, BaseException] = {}
    if ranks.topology.is_root:
        failed = _submit(session, kind, id)
    ranks.agree(
        f"{kind}: end", None, lambda bodies: check(kind, id, failed), timeout_s=_patience_s(session)
    )


def _find(session: Session, kind: CommandKind, step: int, attempt: int | None) -> CheckpointId:
    """Return the newest checkpoint of that step, of the live lineage unless ``attempt`` is given."""
    known = known_checkpoints(session)
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


def _submit(session: Session, kind: CommandKind, id: CheckpointId) -> dict[str, BaseException]:
    try:
        return submit(session, kind, id)
    except (
        TierfallError
    ) as error:  # the coordinator has stopped: the other ranks must not wait for it
        return {"tierfall": error}


def _patience_s(session: Session) -> float:
    """Return how long ranks wait for rank 0, which may itself wait for its tiers for ``max_wait``."""
    return 2 * session.config.max_wait_s


def check(kind: CommandKind, id: CheckpointId, failed: Mapping[str, BaseException]) -> None:
    """Raise what kept a command from being carried out; ``failed`` has the error of each tier."""
    for tier, error in failed.items():
        if isinstance(error, StepError):
            raise error
        known = type(error) if isinstance(error, TierfallError) else TierfallError
        raise known(f"{kind} of {id}: tier {tier} could not do it: {error}") from error


def check_same(what: str, bodies: Bodies) -> None:
    """Raise RanksError where a rank called with other arguments than rank 0."""
    for name, ours in bodies[0].items():
        others = [rank for rank, body in bodies.items() if body[name] != ours]
        if others:
            raise RanksError(
                f"{what}: {ranks_named(others)} asked for {name}={bodies[others[0]][name]!r} where rank 0 asked for "
                f"{name}={ours!r}: every rank asks for the same"
            )


# prune -----------------------------------------------------------------------------------------------


def plan(session: Session) -> list[Decision]:
    """Return what retention decides for every copy on every tier."""
    coordinator = session.coordinator

    def ask() -> list[Decision]:
        view = replace(coordinator.ledger.view(), trusting=True)
        return [d for tier in coordinator.lanes for d in plan_retention(view, tier)]

    return session.ask(ask)


def prune(session: Session, *, dry_run: bool) -> list[Decision]:
    """Return what retention decides, on rank 0, and carry it out on all ranks unless ``dry_run``."""
    ranks = session.ranks
    session.look()

    def decide(bodies: Bodies) -> list[Any]:
        check_same("prune", bodies)
        return [_decision_to_json(decision) for decision in plan(session)]

    decisions = ranks.agree("prune", {"dry_run": dry_run}, decide)
    if not dry_run:
        if ranks.topology.is_root:  # marks by other processes are read first: more may go, or less
            session.ask(session.coordinator.dropper.trust)
            session.wait_idle(session.config.max_wait_s)
        ranks.agree("prune: dropped", None, _ignore_bodies, timeout_s=_patience_s(session))
        if ranks.many:
            session.wait_idle(session.config.max_wait_s)
        ranks.agree("prune: end", None, _ignore_bodies, timeout_s=_patience_s(session))
    return [_decision_from_json(*said) for said in decisions]


def _decision_to_json(decision: Decision) -> list[Any]:
    id = decision.checkpoint
    return [
        id.step, id.attempt, decision.tier, str(decision.verdict), decision.reason, decision.bytes
    ]  # fmt: skip


def _decision_from_json(
    step: int, attempt: int, tier: str, verdict: str, reason: str, size: int
) -> Decision:
    return Decision(
        checkpoint=CheckpointId(step, attempt),
        tier=tier,
        verdict=Verdict(verdict),
        reason=reason,
        bytes=size,
    )


def _ignore_bodies(bodies: Bodies) -> None:
    """The decision of an agreement that only waits for all ranks."""


# drain -----------------------------------------------------------------------------------------------


def drain_here(
    session: Session, deadline_s: float | None, *, doing: str = "drain", goes_on: bool = True
) -> DrainReport:
    """Wait until every copy that this rank owes is durable, for ``deadline_s`` seconds at most.

    With a deadline, copies that can arrive in time are written first. ``goes_on``: the others are begun afterwards.
    ``doing`` names the operation in the log.
    """
    began = time.monotonic()
    coordinator = session.coordinator
    owed = session.ask(coordinator.left_undone)
    forecast: tuple[DrainForecast, ...] = ()
    asker = object()
    try:
        if deadline_s is not None and owed:
            forecast = start_drain(
                session, asker, began + deadline_s, doing=doing, left_s=deadline_s
            )
        session.wait_idle(deadline_s)
    finally:
        if goes_on:
            end_drain(session, asker)
    left = set(session.ask(coordinator.left_undone))
    left |= set(owed) & set(session.ask(coordinator.set_aside))
    durable = session.ask(lambda: set(coordinator.durable))
    return DrainReport(
        done=_triples(copy for copy in owed if copy in durable),
        left=_triples(sorted(left)),
        lost=_triples(copy for copy in owed if copy not in left | durable),
        seconds=time.monotonic() - began,
        forecast=forecast,
    )


def drain(session: Session, deadline_s: float | None) -> DrainReport:
    """Wait on all ranks until every owed copy is durable, for the shortest ``deadline_s`` of any rank at most.

    The report is the same on all ranks.
    """
    began = time.monotonic()
    max_wait_s = session.config.max_wait_s
    deadline = session.ranks.agree(
        "drain",
        deadline_s,
        lambda bodies: min((s for s in bodies.values() if s is not None), default=None),
        timeout_s=max_wait_s if deadline_s is None else min(max_wait_s, deadline_s),
    )
    report = drain_here(session, deadline)
    body = [report.done, report.left, report.lost, to_json(report.forecast)]
    # rank 0 plans, and does not wait for copies that cannot arrive; another rank waits until the deadline
    rest_s = 0.0 if deadline is None else max(0.0, deadline - report.seconds)
    done, left, lost, forecast = session.ranks.agree(
        "drain: end", body, _merge_reports, timeout_s=_patience_s(session) + rest_s
    )
    return DrainReport(
        done=tuple((step, attempt, tier) for step, attempt, tier in done),
        left=tuple((step, attempt, tier) for step, attempt, tier in left),
        lost=tuple((step, attempt, tier) for step, attempt, tier in lost),
        seconds=time.monotonic() - began,
        forecast=from_json(forecast),
    )


def settle(session: Session, left_s: Callable[[], float]) -> bool:
    """At close, carry out what rank 0 has decided until its end, such as deletions by its retention.

    False where not all ranks reach this within ``left_s()`` seconds, and one second at least.
    """
    ranks = session.ranks
    if not ranks.many:
        return True
    try:
        ranks.agree("close", None, _ignore_bodies, timeout_s=max(1.0, left_s()))
    except RanksError as error:
        logger.warning(
            "close: rank %d does not wait for the others: %s", ranks.topology.rank, error
        )
        return False
    try:
        session.wait_idle(left_s())
    except TierfallError as error:  # the coordinator has stopped; the other ranks end normally
        logger.warning("close: rank %d: %s", ranks.topology.rank, error)
    return True


def _triples(copies: Iterable[tuple[CheckpointId, str]]) -> tuple[tuple[int, int, str], ...]:
    return tuple((id.step, id.attempt, tier) for id, tier in copies)


def _merge_reports(bodies: Bodies) -> list[list[Any]]:
    """Merge the reports of all ranks; the forecast is that of rank 0, which plans.

    A copy is done where one rank knows that it is committed: the others are about to receive that. It is left where one
    rank still waits for it.
    """
    done, left, lost = (
        {tuple(copy) for body in bodies.values() for copy in body[place]} for place in range(3)
    )
    return [sorted(done), sorted(left - done), sorted(lost - left - done), bodies[0][3]]
