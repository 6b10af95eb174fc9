"""External commits: checkpoints of this start that another process writes, known once their commit record is stored.

The process that trains assigns such a save its ordinal, and moves none of its bytes. When it is asked to, rank 0 reads
the commit records that are there, and announces them to all ranks; from then on each is flushed and retained as any
other checkpoint. It belongs to the coordinator's thread: workers read the records.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tierfall.core.format.records import Commit, parse_commit
from tierfall.core.ranks.message_tree import MessageTree
from tierfall.core.ranks.ranks import DecisionAnnounced, RankMessage
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.scheduler.group.messages import ExternalCommit, MessageKind, kind_of
from tierfall.core.scheduler.ledger.entry import entry_of
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import Outcome, ReadCommit
from tierfall.core.types.errors import KeyNotFoundError
from tierfall.core.types.values import CheckpointId, CopyState

logger = logging.getLogger("tierfall")


class ExternalCommits:
    """See the module."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        message_tree: MessageTree,
        hooks: Hooks,
    ) -> None:
        self._ledger = ledger
        self._message_tree = message_tree
        self._hooks = hooks
        self._looks_itself = message_tree.topology.is_root
        self._expected: dict[CheckpointId, str] = {}
        self._under_way: dict[CheckpointId, CheckpointId | None] = {}
        self._newest: CheckpointId | None = None
        self._looking: list[tuple[InterruptibleEvent, bool]] = []

    def expect(self, id: CheckpointId, tier: str) -> None:
        """Another process was asked to write a checkpoint to a tier; calls are in the order of the checkpoints."""
        self._expected[id] = tier

    def search(self, done: InterruptibleEvent, *, last: bool = False) -> None:
        """Look for what was committed since; ring ``done`` when all records have been read.

        ``last``: there will be no other look, so a checkpoint that is not committed is left to the next start. Then a
        rank other than 0 waits for what rank 0 announces of each; else it waits for nothing.
        """
        self._looking.append((done, last))
        if self._looks_itself:
            self._read(self._expected)
        self._end()

    def _read(self, ids: Iterable[CheckpointId]) -> None:
        for id in [id for id in ids if id not in self._under_way]:
            self._under_way[id] = self._newest
            self._hooks.dispatch(ReadCommit(tier=self._expected[id], id=id))

    def on_outcome(self, outcome: Outcome) -> None:
        """One commit record was read, or is not there."""
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
    def handles(news: RankMessage) -> bool:
        """Return whether ``on_message`` processes a message."""
        return kind_of(news) in (MessageKind.EXTERNAL_COMMIT, MessageKind.NO_MORE_EXTERNAL_COMMITS)

    def on_message(self, news: RankMessage) -> None:
        """Rank 0 has found a commit record, or will not look again."""
        assert isinstance(news, DecisionAnnounced)
        if kind_of(news) == MessageKind.EXTERNAL_COMMIT:
            message = ExternalCommit.from_json(news.body, rank=0)
            what = f"{message.tier}: commit record that rank 0 has read"
            commit = parse_commit(message.commit.encode(), what=what)
            self._enter(commit, message.tier)
            found = commit.lineage.checkpoint
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
            self._message_tree.announce((MessageKind.NO_MORE_EXTERNAL_COMMITS.value,), None)
        self._notify(last=not self._expected)

    def _notify(self, *, last: bool) -> None:
        """End the looks; ``last``: also those that no other look follows."""
        for done, of_last in self._looking:
            if last or not of_last:
                done.set()
        self._looking = [(done, of_last) for done, of_last in self._looking if not done.is_set]

    def _on_found(self, task: ReadCommit, commit: Commit) -> None:
        """Announce a checkpoint that is committed, and look once more for earlier ones."""
        del self._expected[task.id]
        self._newest = task.id if self._newest is None else max(self._newest, task.id)
        self._read([id for id in self._expected if id < task.id])
        body = ExternalCommit(tier=task.tier, commit=commit.encode().decode())
        self._message_tree.announce((MessageKind.EXTERNAL_COMMIT.value,), body.to_json())

    def _is_missing(self, task: ReadCommit, newest: CheckpointId | None) -> None:
        """A checkpoint was not committed when ``newest`` had been found already: if that is a later one, its save has
        failed, and its files are collected."""
        if newest is not None and task.id < newest:
            del self._expected[task.id]
            self._ledger.unfinished[task.tier, task.id] = 0
        elif self._newest is not None and task.id < self._newest:
            self._read([task.id])

    def _enter(self, commit: Commit, tier: str) -> None:
        id = commit.lineage.checkpoint
        entry = entry_of(id, commit, self._ledger.shard)
        entry.set_state(tier, CopyState.COMMITTED, commit.stored_bytes)
        entry.verified.add(tier)  # it was written by this start
        self._ledger.set_knows_good()
        self._ledger.entries[id] = entry
        self._hooks.on_external_commit(tier, entry)
