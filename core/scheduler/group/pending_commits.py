"""The commit records that a rank writes, each until its tier accepts it. No I/O: workers write them."""

from __future__ import annotations

from dataclasses import dataclass

from tierfall.core.runtime import retries
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.tasks import CommitCopy
from tierfall.core.types.values import CheckpointId


@dataclass(slots=True)
class CommitAttempt:
    """A record that is written, or is tried again at ``not_before_s``; it was refused first at ``since_s``."""

    task: CommitCopy
    since_s: float = 0.0
    not_before_s: float = 0.0
    waits: bool = False
    tries: int = 0


class PendingCommits:
    """The commit records that this rank writes: each is tried again until its tier accepts it, or it is given up."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._attempts: dict[tuple[str, CheckpointId], CommitAttempt] = {}

    def begin(self, task: CommitCopy) -> None:
        self._attempts[task.tier, task.id] = CommitAttempt(task)
        self._hooks.dispatch(task)

    def end(self, tier: str, id: CheckpointId) -> bool:
        """Try a record no more; return whether a try is in flight, whose outcome is unknown."""
        attempt = self._attempts.pop((tier, id), None)
        return attempt is not None and not attempt.waits

    def has(self, task: CommitCopy) -> bool:
        return (task.tier, task.id) in self._attempts

    def tries(self, task: CommitCopy) -> int:
        """Return how often a record was refused."""
        return self._attempts[task.tier, task.id].tries

    def try_again(self, task: CommitCopy, now_s: float) -> CommitAttempt:
        attempt = self._attempts[task.tier, task.id]
        attempt.since_s = attempt.since_s if attempt.tries else now_s
        attempt.tries += 1
        attempt.waits = True
        attempt.not_before_s = now_s + retries.wait_s(
            attempt.tries, has_deadline=self._hooks.has_deadline()
        )
        return attempt

    def try_now(self) -> None:
        """Try each record that waits at once."""
        for attempt in self._attempts.values():
            attempt.not_before_s = 0.0

    def tick(self, now_s: float) -> None:
        for attempt in self._attempts.values():
            if attempt.waits and now_s >= attempt.not_before_s:
                attempt.waits = False
                self._hooks.dispatch(attempt.task)

    def due_s(self) -> list[float]:
        """Return when each record that waits is to be tried again."""
        return [a.not_before_s for a in self._attempts.values() if a.waits]
