"""External commits: checkpoints of this start that another process writes, known once their commit record is stored.

The training process assigns such a checkpoint its ordinal, and moves none of its bytes. At a search, rank 0 reads the
commit records of the expected checkpoints and announces those that exist to all ranks. From then on each is flushed
and retained like any other checkpoint. Belongs to the coordinator's thread; workers read the records.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from tierfall.core.flush.component import Component
from tierfall.core.flush.facts import entry_of
from tierfall.core.flush.messages import ExternalCommit, ExternalCommitsEnd
from tierfall.core.flush.tasks import Outcome, StoreCall, TaskStore
from tierfall.core.format.records import Attempt, Commit, parse_commit
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.types.errors import KeyNotFoundError
from tierfall.core.types.values import CheckpointId, CopyState

if TYPE_CHECKING:
    from tierfall.core.flush.coordinator import Coordinator

logger = logging.getLogger("tierfall")


class ExternalCommits(Component):
    """See the module. ``_expected`` has the tier of each checkpoint whose record is not found yet.

    ``_reading`` are those whose record is being read, ``_newest`` is the newest that was found. ``_searches`` are the
    searches in progress: the event that ends each, and whether it is the last.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)
        self._reads_records = self._group.decides
        self._expected: dict[CheckpointId, str] = {}
        self._reading: set[CheckpointId] = set()
        self._newest: CheckpointId | None = None
        self._searches: list[tuple[InterruptibleEvent, bool]] = []
        self._messages.receive(ExternalCommit, announced=self._on_announced)
        self._messages.receive(ExternalCommitsEnd, announced=self._on_end)

    def expect(self, id: CheckpointId, tier: str) -> None:
        """Expect a checkpoint that another process was asked to write to a tier. Calls are in the order of the
        checkpoints."""
        self._expected[id] = tier

    def search(self, done: InterruptibleEvent, *, last: bool = False) -> None:
        """Search for the records of expected checkpoints. ``done`` is set when all of them have been read.

        ``last``: no other search follows, so a checkpoint without a record is left to the next start. On ranks other
        than 0 the last search ends when rank 0 has announced the result of each checkpoint, any other one at once.
        """
        self._searches.append((done, last))
        if self._reads_records:
            self._read_records(self._expected)
        self._end_if_idle()

    def _read_records(self, ids: Iterable[CheckpointId]) -> None:
        """Read the records of expected checkpoints, those of earlier ones again once a later one is found."""
        for id in [id for id in ids if id not in self._reading]:
            self._reading.add(id)
            then = partial(self._on_read, id, self._newest)
            self._dispatch(StoreCall(tier=self._expected[id], call=partial(_read, id), then=then))

    def _on_read(self, id: CheckpointId, newest: CheckpointId | None, outcome: Outcome) -> None:
        """Apply the outcome of reading a record. ``newest`` had been found before: if that is a later checkpoint, and
        this one has no record, its save has failed, and its files are collected."""
        tier = outcome.task.tier
        self._reading.discard(id)
        if outcome.error is None or isinstance(outcome.error, KeyNotFoundError):
            known = "not written" if outcome.error else "written"
            self._conditions.end(id, "%s: %s is %s there", tier, id, known)
        if outcome.error is None:
            self._expected.pop(id, None)
            self._newest = id if self._newest is None else max(self._newest, id)
            commit = outcome.value.encode().decode()
            self._messages.announce(ExternalCommit(tier=tier, commit=commit))
            self._read_records(each for each in self._expected if each < id)
        elif isinstance(outcome.error, KeyNotFoundError):
            if newest is not None and id < newest:
                self._expected.pop(id, None)
                self._ledger.unfinished[tier, id] = 0
            elif self._newest is not None and id < self._newest:  # found since the read began
                self._read_records([id])
        else:
            self._conditions.report(
                id, logging.WARNING, "%s: not known yet whether %s was written there: %s",
                tier, id, outcome.error,
            )  # fmt: skip
        self._end_if_idle()

    def _on_announced(self, message: ExternalCommit) -> None:
        """Apply a commit record that rank 0 has found."""
        what = f"{message.tier}: commit record that rank 0 has read"
        commit = parse_commit(message.commit.encode(), what=what)
        self._enter(commit, message.tier)
        if not self._reads_records:
            found = commit.lineage.checkpoint
            self._expected = {id: tier for id, tier in self._expected.items() if id > found}
        self._end_if_idle()

    def _on_end(self, message: ExternalCommitsEnd) -> None:
        """Rank 0 has ended its last search."""
        self._expected.clear()
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._reading:
            return
        last = any(last for _, last in self._searches)
        if last and self._reads_records:
            if self._expected:
                logger.info("not written yet, and left to the next start: %s", [*self._expected])
            self._expected.clear()
            self._messages.announce(ExternalCommitsEnd())
        self._notify(last=not self._expected)

    def _notify(self, *, last: bool) -> None:
        """End the searches; the last one only if ``last``."""
        for done, is_last in self._searches:
            if last or not is_last:
                done.set()
        self._searches = [(done, is_last) for done, is_last in self._searches if not done.is_set]

    def _enter(self, commit: Commit, tier: str) -> None:
        id = commit.lineage.checkpoint
        entry = self._ledger.entries.get(id) or entry_of(id, commit, self._ledger.shard)
        entry.set_state(tier, CopyState.COMMITTED, commit.stored_bytes)
        entry.verified |= {tier}  # it was written by this start
        self._ledger.has_begun = True
        self._ledger.enter(entry)
        self._planner.on_external_commit(tier, entry)


def _read(id: CheckpointId, store: TaskStore, attempt: Attempt) -> Commit:
    commit = store.written_commit(id)
    store.sync_commit(id)
    return commit
