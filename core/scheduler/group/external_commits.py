"""Checkpoints of this start that another process writes: known once their commit record lies on a tier.

The process that trains gives such a save its place in the line, and moves none of its bytes. When it is asked to, rank
0 looks for what was committed since, and tells all ranks; from then on it is a checkpoint as any other, flushed and
retained. It belongs to the coordinator's thread: workers read the records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from tierfall.core.format.records import Commit, read_commit
from tierfall.core.ranks.message_tree import MessageTree
from tierfall.core.ranks.messages import Topic
from tierfall.core.ranks.ranks import DecisionAnnounced, RankMessage
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.scheduler.ledger.ledger import Ledger, LedgerEntry, entry_of
from tierfall.core.scheduler.ledger.tasks import Outcome, ReadCommit, Task
from tierfall.core.types.errors import KeyNotFoundError
from tierfall.core.types.values import CheckpointId, CopyState

logger = logging.getLogger("tierfall")
_WRITTEN: Topic = ("written",)
_UNWRITTEN: Topic = ("unwritten",)


class ExternalCommits:
    """See the module. ``council`` reaches the other ranks, where there are any; ``found`` is told of every checkpoint
    that has been entered into the ledger, and of its tier."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        council: MessageTree | None,
        found: Callable[[LedgerEntry, str], None],
        dispatch: Callable[[Task], None],
    ) -> None:
        self._ledger = ledger
        self._council = council
        self._found = found
        self._dispatch = dispatch
        self._looks_itself = council is None or council.topology.is_root
        self._expected: dict[CheckpointId, str] = {}
        self._under_way: dict[CheckpointId, CheckpointId | None] = {}
        self._newest: CheckpointId | None = None
        self._looking: list[tuple[InterruptibleEvent, bool]] = []

    def expect(self, id: CheckpointId, tier: str) -> None:
        """Another process was told to write a checkpoint to a tier; they come in order."""
        self._expected[id] = tier

    def look(self, done: InterruptibleEvent, *, last: bool = False) -> None:
        """Look for what was committed since; ring ``done`` when what there is has been read.

        ``last``: nobody will look again, so what is not there is left to the next start. A rank that does not look
        itself waits then for what rank 0 says of each; else for nothing.
        """
        self._looking.append((done, last))
        if self._looks_itself:
            self._read(self._expected)
        self._end()

    def _read(self, ids: Iterable[CheckpointId]) -> None:
        for id in [id for id in ids if id not in self._under_way]:
            self._under_way[id] = self._newest
            self._dispatch(ReadCommit(tier=self._expected[id], id=id))

    def took(self, outcome: Outcome, now_s: float) -> None:
        """Take what came of a look at one commit record."""
        task = outcome.task
        assert isinstance(task, ReadCommit)
        newest = self._under_way.pop(task.id)
        if outcome.error is None:
            self._on_found(task, outcome.value)
        elif isinstance(outcome.error, KeyNotFoundError):
            self._is_missing(task, newest)
        else:
            logger.warning(
                "%s: not known yet whether %s was written there: %s",
                task.tier, task.id, outcome.error,
            )  # fmt: skip
        self._end()

    @staticmethod
    def is_about(news: RankMessage) -> bool:
        """Say whether this is what hears of it."""
        return news.topic in (_WRITTEN, _UNWRITTEN)

    def hear(self, news: RankMessage) -> None:
        """Hear what rank 0 has found, or will not look for again."""
        assert isinstance(news, DecisionAnnounced)
        if news.topic == _WRITTEN:
            tier, text = news.body
            commit = read_commit(text.encode(), what=f"{tier}: commit record that rank 0 has read")
            self._enter(commit, tier)
            found = commit.line.checkpoint
            left = {id: tier for id, tier in self._expected.items() if id > found}
        else:
            left = {}
        if not self._looks_itself:
            self._expected = left
        self._end()

    def _end(self) -> None:
        if self._under_way:
            return
        last = any(last for _, last in self._looking)
        if last and self._looks_itself:
            if self._expected:
                logger.info("not written yet, and left to the next start: %s", [*self._expected])
            self._expected.clear()
            if self._council is not None:
                self._council.announce(_UNWRITTEN, None)
        self._notify(last=not self._expected)

    def _notify(self, *, last: bool) -> None:
        """Ring for those who look; ``last``: also for whom nobody will look again."""
        for done, of_last in self._looking:
            if last or not of_last:
                done.ring()
        self._looking = [(done, of_last) for done, of_last in self._looking if not done.rung]

    def _on_found(self, task: ReadCommit, commit: Commit) -> None:
        """Tell all ranks of one that is there, and look once more at those before it."""
        del self._expected[task.id]
        self._newest = task.id if self._newest is None else max(self._newest, task.id)
        self._read([id for id in self._expected if id < task.id])
        if self._council is None:
            self._enter(commit, task.tier)
        else:
            self._council.announce(_WRITTEN, [task.tier, commit.encode().decode()])

    def _is_missing(self, task: ReadCommit, newest: CheckpointId | None) -> None:
        """One is not there, looked for when ``newest`` had been found: if that is a later one, it has failed, and what
        it left is collected."""
        if newest is not None and task.id < newest:
            del self._expected[task.id]
            self._ledger.unfinished[task.tier, task.id] = 0
        elif self._newest is not None and task.id < self._newest:
            self._read([task.id])

    def _enter(self, commit: Commit, tier: str) -> None:
        id = commit.line.checkpoint
        entry = entry_of(id, commit, self._ledger.shard)
        entry.set_state(tier, CopyState.COMMITTED, commit.stored_bytes)
        entry.verified.add(tier)  # this start has it written
        self._ledger.knows_what_is_good()
        self._ledger.entries[id] = entry
        self._found(entry, tier)
