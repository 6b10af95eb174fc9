"""Commit records that this rank writes for all: each is tried again until its tier takes it, or never will."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.tasks import CommitCopy
from tierfall.core.types.values import CheckpointId

logger = logging.getLogger("tierfall")
AGAIN_S = 1.0
MOST_TIMES = 60
"""A wait between two tries grows by ``AGAIN_S`` with each, up to so many times that."""


@dataclass(slots=True)
class _CommitAttempt:
    task: CommitCopy
    since_s: float | None = None
    not_before_s: float | None = None
    tries: int = 0
    reported: bool = False


class PendingCommits:
    """See the module. ``is_stuck`` is told, once, of a record that a tier has not taken for ``max_wait_s``."""

    def __init__(
        self,
        *,
        hooks: Hooks,
        is_stuck: Callable[[CommitCopy, BaseException], None],
        max_wait_s: float,
    ) -> None:
        self._hooks = hooks
        self._is_stuck = is_stuck
        self._max_wait_s = max_wait_s
        self._tries: dict[tuple[str, CheckpointId], _CommitAttempt] = {}

    def begin(self, task: CommitCopy) -> None:
        self._tries[task.tier, task.id] = _CommitAttempt(task)
        self._hooks.dispatch(task)

    def ended(self, tier: str, id: CheckpointId) -> bool:
        """Try it no more; return whether a try is under way, of which it is not known yet what became."""
        one = self._tries.pop((tier, id), None)
        return one is not None and one.not_before_s is None

    def is_wanted(self, task: CommitCopy) -> bool:
        return (task.tier, task.id) in self._tries

    def again(self, task: CommitCopy, error: BaseException, now_s: float) -> None:
        """The tier did not take it, for a reason that may pass."""
        one = self._tries[task.tier, task.id]
        one.tries += 1
        one.since_s = now_s if one.since_s is None else one.since_s
        if now_s >= one.since_s + self._max_wait_s and not one.reported:
            one.reported = True
            self._is_stuck(task, error)
        one.not_before_s = now_s + AGAIN_S * min(one.tries, MOST_TIMES)
        logger.warning("%s: the commit of %s is tried again: %s", task.tier, task.id, error)

    def tick(self, now_s: float) -> None:
        """Try again what is due."""
        for one in self._tries.values():
            if one.not_before_s is not None and now_s >= one.not_before_s:
                one.not_before_s = None
                self._hooks.dispatch(one.task)

    def due_s(self) -> list[float]:
        """Return when each that waits is to be tried again."""
        return [one.not_before_s for one in self._tries.values() if one.not_before_s is not None]
