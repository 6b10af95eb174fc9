"""Tier commits: the uploads of all ranks become one committed copy on a tier, or are deleted again.

    every rank             rank 0                      leaders of nodes (rank 0 alone, on a shared tier)
                           admits the copy          ->
    uploaded            -> all have: commit         -> write the commit record
                           all have: committed      <- node committed
    copy failed         -> given up on this tier, by all (after a retryable error it is retried: stuck)

On a tier that all nodes share, one commit record names the files of all ranks; elsewhere each node's record names those
of its own. It belongs to the coordinator's thread and does no I/O: workers write the records.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeVar

from tierfall.core.format.records import Commit, NamedFile
from tierfall.core.ranks.message_tree import Bodies, MessageTree
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.flush.flusher import Flusher
from tierfall.core.scheduler.group.messages import (
    CommitFacts,
    CommittedBytes,
    CommittedCopy,
    GivenUpCopy,
    GroupMessages,
    MessageKind,
    Reason,
    StuckCopy,
    UploadedFiles,
    read_all,
)
from tierfall.core.scheduler.group.pending_commits import PendingCommits
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.hooks import Hooks
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import CommitCopy, DeleteCopy, Outcome
from tierfall.core.types.errors import FlushError, LostWriteError
from tierfall.core.types.values import CheckpointId, CopyState

K = TypeVar("K")
V = TypeVar("V")
REMEMBERED = 64
"""How many checkpoints that were given up are remembered, for ranks that save them later."""
LOST_WRITES_MAX = 3
"""How often a commit record is written anew where what was written of it was lost."""
_Copy = tuple[str, CheckpointId]


def remember(memory: dict[K, V], key: K, value: V) -> None:
    """Add an item; at most ``REMEMBERED`` are kept, the newest."""
    memory[key] = value
    while len(memory) > REMEMBERED:
        del memory[next(iter(memory))]


class TierCommits:
    """See the module. ``shared`` holds, per stored tier, whether all ranks see the same files there."""

    def __init__(
        self,
        message_tree: MessageTree,
        *,
        ledger: Ledger,
        shared: Mapping[str, bool],
        flusher: Flusher,
        deleter: Deleter,
        hooks: Hooks,
    ) -> None:
        self._messages = GroupMessages(message_tree)
        self._topology = message_tree.topology
        self._ledger = ledger
        self._shared = shared
        self._flusher = flusher
        self._deleter = deleter
        self._pending = PendingCommits(hooks)
        self.tick, self.due_s = self._pending.tick, self._pending.due_s
        self.try_now = self._pending.try_now
        self.admitted: dict[str, dict[CheckpointId, None]] = {tier: {} for tier in shared}
        self._of_node: dict[_Copy, dict[int, UploadedFiles]] = {}
        self._uploaded: dict[_Copy, list[NamedFile]] = {}
        self._stuck: dict[str, CheckpointId] = {}
        self._complete: set[_Copy] = set()
        self._given_up: dict[_Copy, None] = {}
        """The copies that rank 0 has given up. The tier ``""`` stands for all tiers."""
        self._errors: dict[_Copy, BaseException] = {}
        self._own_errors: dict[_Copy, BaseException] = {}
        """Why this rank cannot write copies."""

    def owns(self, tier: str) -> bool:
        """Return whether this rank writes commit records, and what is decided, on a tier."""
        return self._topology.is_root if self._shared[tier] else self._topology.is_leader

    def is_stuck(self, tier: str) -> bool:
        """Return whether the tier does not accept a copy from some rank at present."""
        return tier in self._stuck

    def is_committing(self, id: CheckpointId) -> bool:
        """Return, on rank 0, whether a copy of a checkpoint is being committed to any tier."""
        return any(of == id for _, of in self._complete)

    def is_committing_on(self, tier: str) -> bool:
        """Return, on rank 0, whether a tier has a copy that all ranks have uploaded, that is not committed yet."""
        return any(on == tier for on, _ in self._complete)

    def errors_of(self, id: CheckpointId) -> dict[str, BaseException]:
        """Return why the ranks have given up copies of a checkpoint, by tier."""
        return {tier: error for (tier, of), error in self._errors.items() if of == id}

    # Giving up -------------------------------------------------------------------------------------

    def has_given_up(self, tier: str, id: CheckpointId) -> bool:
        """Return whether rank 0 has announced that a copy is given up, on this tier or on all."""
        return (tier, id) in self._given_up or ("", id) in self._given_up

    def remember_given_up(self, tier: str, id: CheckpointId) -> None:
        remember(self._given_up, (tier, id), None)

    def give_up(
        self, tier: str, id: CheckpointId, reason: str, *, by_rule: bool, set_aside: bool
    ) -> None:
        """Announce to all ranks that a copy is given up; for rank 0. See ``GivenUpCopy``."""
        if self.has_given_up(tier, id):
            return
        self.remember_given_up(tier, id)
        complete = (tier, id) in self._complete
        self._complete.discard((tier, id))
        body = GivenUpCopy(reason=reason, complete=complete, by_rule=by_rule, set_aside=set_aside)
        self._messages.announce(MessageKind.GIVEN_UP, id, tier, body)

    def report_failed(
        self, kind: MessageKind, tier: str, id: CheckpointId, error: BaseException
    ) -> None:
        """Report to rank 0 why this rank cannot write a copy, which all ranks then give up."""
        remember(self._own_errors, (tier, id), error)
        self._messages.report(kind, id, tier, Reason(text=str(error)))

    def on_given_up(self, tier: str, id: CheckpointId, message: GivenUpCopy) -> None:
        entry = self._ledger.entries.get(id)
        error = self._error_of(tier, id, message.reason)
        remember(self._errors, (tier, id), error)
        self.admitted[tier].pop(id, None)
        self._on_resumed(tier, id)
        if entry is None:
            return  # applied when this rank saves the checkpoint
        self._delete_files(entry, tier, str(error), complete=message.complete)
        if message.by_rule:
            self._flusher.queue.give_up_on_this_rank(entry, tier, message.reason)
            self._flusher.stop_copy(entry, tier, error)
        elif message.set_aside and tier in entry.owed:
            self._flusher.set_aside(entry, tier, error)
        elif tier in entry.owed:
            entry.overtaken.add(tier)  # only in this start: the next one may still copy it
            self._flusher.give_up_copy(entry, tier, error)
        self._ledger.forget_if_gone(entry)

    def _error_of(self, tier: str, id: CheckpointId, reason: str) -> BaseException:
        """Return the error of a copy that is given up for ``reason``: this rank's own error, or one that it causes."""
        own = self._own_errors.pop((tier, id), None)
        if own is not None and not self._ledger.many_ranks:
            return own
        error = FlushError(f"flush of {id} to {tier}: {reason}")
        error.__cause__ = own
        return error

    def give_up_everywhere(self, id: CheckpointId, entry: LedgerEntry | None, reason: str) -> None:
        """Delete what this rank has uploaded of a save that all ranks give up."""
        for tier in self._shared:
            self.admitted[tier].pop(id, None)
            self._on_resumed(tier, id)
            if entry is not None:
                self._delete_files(entry, tier, reason, complete=False)

    def _delete_files(self, entry: LedgerEntry, tier: str, reason: str, *, complete: bool) -> None:
        """Delete what this rank has uploaded of a copy that will not be committed.

        ``complete``: all ranks have uploaded, so a commit record may exist. The rank that owns the record then deletes
        it first, and all files after it.
        """
        uploaded = self._uploaded.get((tier, entry.id))
        self._forget(entry, tier)
        in_flight = self._pending.end(tier, entry.id)
        self._messages.forget(MessageKind.UPLOADED, entry.id, tier)
        if uploaded is None:
            return
        entry.set_state(tier, CopyState.ABSENT)
        if not complete:
            if uploaded:
                self._deleter.collect_unfinished(tier, entry.id, reason)
        elif self.owns(tier) and not in_flight:  # else when the outcome of the commit is known
            self._retract(tier, entry.id, reason)
        self._ledger.forget_if_gone(entry)

    def _retract(self, tier: str, id: CheckpointId, reason: str) -> None:
        self._deleter.delete(DeleteCopy(tier=tier, id=id, reason=reason))

    def _forget(self, entry: LedgerEntry, tier: str) -> None:
        entry.uploaded_to.discard(tier)
        self._uploaded.pop((tier, entry.id), None)
        self._complete.discard((tier, entry.id))
        self.admitted[tier].pop(entry.id, None)
        self._of_node.pop((tier, entry.id), None)

    def on_stuck(self, tier: str, id: CheckpointId, message: StuckCopy) -> None:
        if message.rank == self._topology.rank and tier in self._ledger.failing:
            return  # this rank detects the recovery of the tier itself
        if (entry := self._ledger.entries.get(id)) is not None:
            entry.overtaken.add(tier)
        # Also if the tier fails on this rank: it may recover here earlier than on the other rank.
        self._stuck[tier] = id
        error = FlushError(f"flush of {id} to {tier}: rank {message.rank}: {message.reason}")
        self._flusher.mark_failing(tier, error)

    def _on_resumed(self, tier: str, id: CheckpointId) -> None:
        """End the wait for another rank's stuck copy: that copy is not written any more."""
        if self._stuck.get(tier) == id:
            del self._stuck[tier]
            self._flusher.on_recovered(tier)

    # Committing ------------------------------------------------------------------------------------

    def contribute(self, tier: str, entry: LedgerEntry, files: Collection[NamedFile]) -> None:
        """Contribute the files of this rank's image, which is on a tier now."""
        if tier not in entry.owed:  # the copy was given up while its last task ran
            entry.set_state(tier, CopyState.ABSENT)
            self._deleter.collect_garbage(tier, entry.id, "it was given up", shard=entry.shard)
            self._ledger.forget_if_gone(entry)
            return
        entry.uploaded_to.add(tier)
        self._uploaded[tier, entry.id] = list(files)
        self._ledger.unfinished.pop((tier, entry.id), None)  # it was overwritten
        body = UploadedFiles(files=tuple(files))
        self._messages.contribute(MessageKind.UPLOADED, entry.id, tier, body)

    def on_all_uploaded(
        self, tier: str, id: CheckpointId, bodies: Bodies, *, of_node_only: bool
    ) -> None:
        """Continue a copy that all ranks have uploaded, or all ranks of this leader's node (``of_node_only``)."""
        uploads = read_all(UploadedFiles, bodies)
        if not self._shared[tier]:
            local = self._topology.local_ranks
            self._of_node[tier, id] = {rank: uploads[rank] for rank in local}
        if of_node_only:
            return
        entry = self._ledger.entries.get(id)
        if entry is None or entry.commit is None or self.has_given_up(tier, id):
            return
        self._complete.add((tier, id))
        if self._shared[tier]:
            self._commit(entry, tier, replace(entry.commit, files=_files(uploads)))
            return
        facts = CommitFacts(
            wall_time_s=entry.commit.wall_time_s,
            metrics=entry.commit.metrics,
            tags=entry.commit.tags,
        )
        self._messages.announce(MessageKind.COMMIT, id, tier, facts)

    def on_commit(self, tier: str, entry: LedgerEntry, facts: CommitFacts) -> None:
        """Write the commit record of this node's images, after all nodes have uploaded theirs."""
        uploads = self._of_node.pop((tier, entry.id), None)
        if uploads is None or entry.commit is None:
            return  # this rank is no leader of a node
        if not any(upload.files for upload in uploads.values()):  # no image is on this node
            self._contribute_committed(tier, entry.id, 0)
            return
        commit = replace(
            entry.commit,
            files=_files(uploads),
            wall_time_s=facts.wall_time_s,
            metrics=facts.metrics,
            tags=facts.tags,
        )
        self._commit(entry, tier, commit)

    def _commit(self, entry: LedgerEntry, tier: str, commit: Commit) -> None:
        task = CommitCopy(
            tier=tier,
            id=entry.id,
            commit=replace(commit, owed=self._flusher.older_owed(tier, entry)),
            name_latest=self._flusher.is_newest(tier, entry),
        )
        self._pending.begin(task)

    def on_outcome(self, task: CommitCopy, outcome: Outcome) -> None:
        """Apply the outcome of writing a commit record."""
        expected = self._pending.has(task) and not self.has_given_up(task.tier, task.id)
        if expected and self._may_succeed(task, outcome.error):
            self._schedule_retry(task, outcome.error)
            return
        self._pending.end(task.tier, task.id)
        if not expected:
            self._retract(task.tier, task.id, "it was given up meanwhile, by all")
        elif outcome.error is not None and not self._ledger.many_ranks:
            entry = self._ledger.entries[task.id]
            self._forget(entry, task.tier)
            self._flusher.commit_failed(task.tier, entry, outcome.error)
        elif outcome.error is not None:
            self.report_failed(MessageKind.COPY_FAILED, task.tier, task.id, outcome.error)
        elif self._shared[task.tier]:
            self._announce_committed(task.tier, task.id, {0: outcome.value.stored_bytes})
        else:
            self._contribute_committed(task.tier, task.id, outcome.value.stored_bytes)

    def _may_succeed(self, task: CommitCopy, error: BaseException | None) -> bool:
        """Return whether a record that was refused may be written by another try."""
        if isinstance(error, LostWriteError) and self._ledger.many_ranks:
            return self._pending.tries(task) < LOST_WRITES_MAX
        return getattr(error, "retryable", False)

    def _schedule_retry(self, task: CommitCopy, error: BaseException | None) -> None:
        """Schedule another attempt to write a commit record, after a retryable error."""
        entry = self._ledger.entries.get(task.id)
        assert error is not None
        assert entry is not None
        attempt = self._pending.try_again(task, self._ledger.now_s)
        since_s, until_s = attempt.since_s, attempt.not_before_s
        self._flusher.note_stall(task.tier, entry, error, since_s, until_s)
        # A newer checkpoint may be committed before this one.
        if task.tier in self._ledger.failing:
            entry.overtaken.add(task.tier)

    def _contribute_committed(self, tier: str, id: CheckpointId, stored_bytes: int) -> None:
        body = CommittedBytes(bytes=stored_bytes)
        self._messages.contribute(MessageKind.NODE_COMMITTED, id, tier, body, leaders_only=True)

    def on_all_committed(self, tier: str, id: CheckpointId, bodies: Bodies) -> None:
        if not self.has_given_up(tier, id):
            committed = read_all(CommittedBytes, bodies)
            self._announce_committed(tier, id, {r: one.bytes for r, one in committed.items()})

    def _announce_committed(
        self, tier: str, id: CheckpointId, bytes_by_rank: Mapping[int, int]
    ) -> None:
        body = CommittedCopy(bytes_by_rank=bytes_by_rank)
        self._messages.announce(MessageKind.COMMITTED, id, tier, body)

    def on_committed(self, tier: str, entry: LedgerEntry, message: CommittedCopy) -> None:
        leader = 0 if self._shared[tier] else self._topology.local_ranks[0]
        self._stuck.pop(tier, None)
        self._forget(entry, tier)
        if tier in self._ledger.peer_tiers:
            entry.note_on_peers()
        self._flusher.committed(tier, entry.id, message.bytes_by_rank[leader])
        self._ledger.partial.discard((tier, entry.id))
        self._ledger.on_few_nodes.pop((tier, entry.id), None)
        self._delete_partial(tier, entry)

    def _delete_partial(self, tier: str, newer: LedgerEntry) -> None:
        """Delete older copies of which only a part is left. They were kept in case the parts of other nodes return."""
        if not self.owns(tier):
            return
        older = [id for where, id in self._ledger.partial if where == tier]
        for id in older:
            entry = self._ledger.entries.get(id)
            is_owed = entry is not None and tier in entry.owed
            is_pinned = self._ledger.decided.is_pinned(id, None)
            if (id.attempt, id.step) < newer.age_order and not (is_owed or is_pinned):
                self._ledger.partial.discard((tier, id))
                reason = "only a part of it is there, and a newer one is whole"
                known = self._ledger.decided
                self._deleter.delete(DeleteCopy(tier=tier, id=id, reason=reason, known=known))


def _files(uploads: Mapping[int, UploadedFiles]) -> tuple[NamedFile, ...]:
    """Return the uploaded files in the order of the ranks."""
    return tuple(file for rank in sorted(uploads) for file in uploads[rank].files)
