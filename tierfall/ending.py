"""The end of a training: the last step that ``maybe_save`` was given is saved by ``close``, if ``at_end`` asks for it.

With several ranks all bring what they know, and all do the same. Nothing here saves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tierfall.core.errors import RanksError
from tierfall.core.ranks.council import Bodies
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.words import ranks_named

logger = logging.getLogger("tierfall")


@dataclass(frozen=True, slots=True)
class LastStep:
    """What ``maybe_save`` was given last, and how many updates had been made then."""

    step: int
    state: Mapping[str, Any]
    metrics: Mapping[str, Any] | None
    tags: Sequence[str]
    updates: int


class Ending(StrEnum):
    """What is to be done about the last step: it is saved, or flushed to all tiers, as it is saved already."""

    NOTHING = "nothing"
    SAVE = "save"
    FLUSH = "flush"


def agree_on_end(
    ranks: Ranks,
    last: LastStep | None,
    *,
    saved: bool,
    changed: bool,
    failed: str,
    timeout_s: float,
) -> Ending:
    """Say what is to be done about the last step, the same on all ranks; what keeps it from being saved is logged.

    ``saved`` says that this rank has saved it, ``changed`` that the state is not that step's any more, and ``failed``,
    if it is not empty, how the training ended where it did not come to its end.
    """
    step = None if last is None else last.step
    mine = {"step": step, "saved": saved, "changed": changed, "failed": failed}
    try:
        if ranks.many:
            ending, why = ranks.agree("close: the last step", mine, decide, timeout_s=timeout_s)
        else:
            ending, why = decide({0: mine})
    except RanksError as error:
        ending, why = Ending.NOTHING, str(error)
    if why:
        logger.warning("close: the last step is not saved: %s", why)
    return Ending(ending)


def decide(bodies: Bodies) -> list[str]:
    """Say what follows from what all ranks know, and why it is nothing."""
    steps = {rank: body["step"] for rank, body in bodies.items()}
    step = steps[0]
    unsaved = [rank for rank, body in bodies.items() if not body["saved"]]
    if all(found is None for found in steps.values()):
        return [Ending.NOTHING, ""]
    for rank, body in bodies.items():
        if body["failed"]:
            why = f"step {step}: {_who(rank, bodies)}{body['failed']}"
            return [Ending.NOTHING, why if unsaved else ""]
    if any(found != step for found in steps.values()):
        other = next(rank for rank, found in steps.items() if found != step)
        return [Ending.NOTHING, f"rank {other} ended at {_at(steps[other])}, rank 0 at {_at(step)}"]
    if not unsaved:
        return [Ending.FLUSH, ""]
    for rank, body in bodies.items():
        if body["changed"]:
            why = f"step {step}: {_who(rank, bodies)}the state was changed since"
            return [Ending.NOTHING, why]
    if len(unsaved) < len(bodies):
        return [Ending.NOTHING, f"step {step}: {ranks_named(unsaved)} left it out, others saved it"]
    return [Ending.SAVE, ""]


def _who(rank: int, bodies: Bodies) -> str:
    return f"rank {rank}: " if len(bodies) > 1 else ""


def _at(step: int | None) -> str:
    return "no step" if step is None else f"step {step}"
