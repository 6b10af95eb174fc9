"""Commits: what rank 0 decides for the saves and copies of all ranks, and this rank's part in it.

A rank does nothing with a copy before rank 0 has announced it, and rank 0 announces it as soon as it can decide; no
rank waits for an answer. The images that all ranks hold of a save become one checkpoint in memory, or the save is given
up by all:

    every rank                 rank 0
    image complete (sealed) -> all are, and replicated state is equal: alike (nothing is compared: whole, at once)
    sealed in memory        -> all are: the checkpoint is whole

The uploads of all ranks become one committed copy on a tier, or are deleted again:

    every rank             rank 0                      leaders of nodes (rank 0 alone, on a shared tier)
                           admits the copy          ->
    uploaded            -> all have: commit         -> write the commit record (in peer memory every rank does)
                           all have: committed      <- node committed
    copy failed         -> given up on this tier, by all (after a retryable error it is retried: stuck)
    full                -> delete another copy

On a tier that all nodes share, one commit record names the files of all ranks; elsewhere each node's record names those
of its own, and in peer memory each rank's that of its image. All of it belongs to the coordinator's thread and does no
I/O: workers write the records.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from tierfall.core.flush.component import Component
from tierfall.core.flush.facts import LedgerEntry
from tierfall.core.flush.messages import (
    CommitFacts,
    CommittedBytes,
    CommittedCopy,
    GivenUpCopy,
    ImageComplete,
    ImagesAlike,
    ImageSealed,
    ImageShare,
    LateRanks,
    Ordinal,
    SaveFailure,
    StuckCopy,
    UploadedFiles,
    WholeCheckpoint,
    remember,
)
from tierfall.core.flush.replicas import ReplicaAssigner
from tierfall.core.flush.tasks import CommitCopy, DeleteCopy, Outcome, StoreCall, TaskStore
from tierfall.core.format.records import Attempt, Commit, NamedFile, named_not_finite
from tierfall.core.ranks.messages import Message
from tierfall.core.types.errors import (
    CapacityError,
    CaptureError,
    FlushError,
    LostWriteError,
)
from tierfall.core.types.text import format_ranks
from tierfall.core.types.values import CheckpointId, CopyState, SaveOutcome

if TYPE_CHECKING:
    from tierfall.core.flush.coordinator import Coordinator

logger = logging.getLogger("tierfall")

LOST_WRITES_MAX = 3
"""How often a commit record is written again after a write of it was lost."""
END_S = 1.0
"""Seconds for which a save that not all ranks have begun is kept, once no rank begins saves: meanwhile rank 0 gets the
contributions, to name the late ranks."""
_Copy = tuple[str, CheckpointId]


@dataclass(slots=True)
class _PendingRecord:
    """A commit record that this rank writes or, if it ``waits``, retries at ``not_before_s``; refused ``tries`` times,
    first at ``since_s``."""

    task: CommitCopy
    since_s: float = 0.0
    not_before_s: float = 0.0
    waits: bool = False
    tries: int = 0


class TierCommits(Component):
    """Copies on tiers, from the uploads of the ranks to the commit record; see the module."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)
        self._pending: dict[_Copy, _PendingRecord] = {}
        self._of_node: dict[_Copy, tuple[NamedFile, ...]] = {}
        """On the leader of a node: the files that its ranks have uploaded."""
        self._uploaded: dict[_Copy, tuple[NamedFile, ...]] = {}
        self._found: set[_Copy] = set()
        """On rank 0: the copies of which a rank has found its image, and not written it."""
        self._given_up: dict[_Copy, None] = {}
        """The copies that rank 0 has given up. The tier ``""`` stands for all tiers."""
        receive = self._messages.receive
        receive(UploadedFiles, gathered=self.on_all_uploaded, passed=self._on_node_uploaded)
        receive(CommitFacts, announced=self._on_commit)
        receive(CommittedBytes, gathered=self._on_all_committed)
        receive(CommittedCopy, announced=self._on_committed_by_all)
        receive(GivenUpCopy, reported=self._on_failed, announced=self._on_given_up)
        receive(StuckCopy, reported=self._on_stuck_elsewhere, announced=self._on_stuck)

    # Giving up -------------------------------------------------------------------------------------

    def has_given_up(self, tier: str, id: CheckpointId) -> bool:
        """Return whether rank 0 has announced that a copy is given up, on this tier or on all."""
        return (tier, id) in self._given_up or ("", id) in self._given_up

    def remember_given_up(self, tier: str, id: CheckpointId) -> None:
        remember(self._given_up, (tier, id), None)

    def give_up(self, tier: str, id: CheckpointId, message: GivenUpCopy) -> None:
        """Announce to all ranks, once, that a copy is given up; for rank 0."""
        if self.has_given_up(tier, id):
            return
        self.remember_given_up(tier, id)
        complete = (tier, id) in self._ledger.committing
        self._ledger.committing.discard((tier, id))
        self._messages.announce(replace(message, complete=complete), id, tier)

    def _on_failed(self, tier: str, id: CheckpointId, failure: GivenUpCopy, rank: int) -> None:
        """Decide for all ranks by one rank's report."""
        reason = failure.reason
        if not failure.by_rule:
            reason = self._group.topology.name_rank(rank, reason)
        self.give_up(tier, id, replace(failure, reason=reason))

    def _on_given_up(self, tier: str, id: CheckpointId, message: GivenUpCopy) -> None:
        entry = self._ledger.entries.get(id)
        error = self._error_of(tier, id, message)
        remember(self._ledger.lost_copies, (tier, id), error)
        self._end(tier, id)
        if entry is None:
            return  # applied when this rank saves the checkpoint
        self._delete_files(entry, tier, str(error), complete=message.complete)
        if tier in entry.owed and not message.by_rule:
            entry.overtaken |= {tier}  # only in this start: the next one may still copy it
        by_rule, set_aside = message.by_rule, message.set_aside
        self._planner.flusher.give_up(entry, tier, error, by_rule=by_rule, set_aside=set_aside)
        self._ledger.forget_if_gone(entry)

    def _error_of(self, tier: str, id: CheckpointId, message: GivenUpCopy) -> BaseException:
        """Return the error of a copy that is given up: this rank's own error, or one that it causes."""
        own = self._messages.own_errors.pop((tier, id), None)
        if own is not None and not self._ledger.many_ranks:
            return own
        given_up = (
            f"flush of {id} is given up: {tier}" if message.by_rule else f"flush of {id} to {tier}"
        )
        error = FlushError(f"{given_up}: {message.reason}")
        error.__cause__ = own
        return error

    def _end(self, tier: str, id: CheckpointId) -> None:
        """A copy is not written any more; nor is another rank's, if the tier is stuck with it."""
        self._ledger.admitted.get(tier, {}).pop(id, None)
        if self._ledger.stuck.get(tier) == id:
            del self._ledger.stuck[tier]
            self._planner.flusher.on_recovered(tier)

    def give_up_everywhere(
        self, tiers: Iterable[str], id: CheckpointId, entry: LedgerEntry | None, reason: str
    ) -> None:
        """Delete what this rank has uploaded of a save that all ranks give up."""
        for tier in tiers:
            self._end(tier, id)
            if entry is not None:
                self._delete_files(entry, tier, reason, complete=False)

    def _delete_files(self, entry: LedgerEntry, tier: str, reason: str, *, complete: bool) -> None:
        """Delete what this rank has uploaded of a copy that will not be committed.

        ``complete``: all ranks have uploaded, so a commit record may exist. The rank that owns the record then deletes
        it first, and all files after it.
        """
        uploaded = self._uploaded.get((tier, entry.id))
        self._forget(entry, tier)
        record = self._pending.pop((tier, entry.id), None)
        self._messages.forget(UploadedFiles, entry.id, tier)
        if uploaded is None:
            return
        entry.set_state(tier, CopyState.ABSENT)
        in_flight = record is not None and not record.waits
        if not complete:
            if uploaded:
                self._planner.deleter.collect_unfinished(tier, entry.id, reason)
        elif self._ledger.owns(tier) and not in_flight:  # else when the commit's outcome is known
            self._retract(tier, entry.id, reason)
        self._ledger.forget_if_gone(entry)

    def _retract(self, tier: str, id: CheckpointId, reason: str) -> None:
        """Delete what this start has written of a copy whose commit record may exist. What an earlier start committed
        stays: a person may have pinned it, and it may be the last copy. Peer memory tells the images of both apart."""
        found = self._ledger.partial if self._group.is_split(tier) else self._found
        if (tier, id) in found and tier not in self._ledger.peer_tiers:
            return
        self._planner.deleter.delete(DeleteCopy(tier=tier, id=id, reason=reason))

    def _forget(self, entry: LedgerEntry, tier: str) -> None:
        copy = (tier, entry.id)
        entry.uploaded_to -= {tier}
        self._uploaded.pop(copy, None)
        self._of_node.pop(copy, None)
        self._ledger.committing.discard(copy)
        self._ledger.admitted.get(tier, {}).pop(entry.id, None)

    def _on_stuck_elsewhere(
        self, tier: str, id: CheckpointId, message: StuckCopy, rank: int
    ) -> None:
        if not self.has_given_up(tier, id):
            self._messages.announce(message, id, tier)

    def _on_stuck(self, tier: str, id: CheckpointId, message: StuckCopy) -> None:
        if message.rank == self._group.topology.rank and tier in self._ledger.failing:
            return  # this rank detects the recovery of the tier itself
        if (entry := self._ledger.entries.get(id)) is not None:
            entry.overtaken |= {tier}
        # Also if the tier fails on this rank: it may recover here earlier than on the other rank.
        self._ledger.stuck[tier] = id
        error = FlushError(f"flush of {id} to {tier}: rank {message.rank}: {message.reason}")
        self._planner.flusher.mark_failing(tier, error)

    # Committing ------------------------------------------------------------------------------------

    def contribute(
        self,
        tier: str,
        entry: LedgerEntry,
        files: Collection[NamedFile],
        *,
        found: bool = False,
    ) -> None:
        """Contribute the files of this rank's image, which is on a tier now; ``found`` is as in ``UploadedFiles``."""
        if tier not in entry.owed:  # the copy was given up while its last task ran
            entry.set_state(tier, CopyState.ABSENT)
            self._planner.deleter.collect_garbage(
                tier, entry.id, "it was given up", shard=entry.shard
            )
            self._ledger.forget_if_gone(entry)
            return
        entry.uploaded_to |= {tier}
        self._uploaded[tier, entry.id] = tuple(files)
        self._ledger.unfinished.pop((tier, entry.id), None)  # it was overwritten
        body = UploadedFiles(files=tuple(files), found=found)
        self._messages.contribute(body, entry.id, tier)

    def _on_node_uploaded(
        self, tier: str, id: CheckpointId, uploads: Mapping[int, UploadedFiles]
    ) -> None:
        """All ranks below this leader of a node have uploaded their images of a copy."""
        if not (self._group.is_shared(tier) or tier in self._ledger.peer_tiers):
            of_node = {rank: uploads[rank] for rank in self._group.topology.local_ranks}
            self._of_node[tier, id] = files_of_all(of_node)
            if self._group.is_split(tier) and any(upload.found for upload in of_node.values()):
                self._ledger.partial.add((tier, id))  # until all nodes have committed it

    def on_all_uploaded(
        self, tier: str, id: CheckpointId, uploads: Mapping[int, UploadedFiles]
    ) -> None:
        """Commit a copy that all ranks have uploaded."""
        self._on_node_uploaded(tier, id, uploads)
        entry = self._ledger.entries.get(id)
        if entry is None or entry.commit is None or self.has_given_up(tier, id):
            return
        self._ledger.committing.add((tier, id))
        if any(upload.found for upload in uploads.values()):
            self._found.add((tier, id))
        if self._group.is_shared(tier):
            self._commit(entry, tier, replace(entry.commit, files=files_of_all(uploads)))
            return
        facts = CommitFacts(
            wall_time_s=entry.commit.wall_time_s,
            metrics=entry.commit.metrics,
            tags=entry.commit.tags,
            not_finite=entry.commit.not_finite,
            progress=entry.commit.progress,
        )
        self._messages.announce(facts, id, tier)

    def _on_commit(self, tier: str, id: CheckpointId, facts: CommitFacts) -> None:
        """Write the commit record of this node's images, or of this rank's, after all ranks have uploaded theirs."""
        entry = self._ledger.entries.get(id)
        if tier in self._ledger.peer_tiers:
            files = self._uploaded.get((tier, id))
        else:
            files = self._of_node.pop((tier, id), None)
        if files is None or entry is None or entry.commit is None:
            return  # this rank writes none
        if not files:  # no image is on this node
            self._contribute_committed(tier, entry.id, 0)
            return
        commit = replace(
            entry.commit,
            files=files,
            wall_time_s=facts.wall_time_s,
            metrics=facts.metrics,
            tags=facts.tags,
            not_finite=facts.not_finite,
            progress=facts.progress,
        )
        self._commit(entry, tier, commit)

    def _commit(self, entry: LedgerEntry, tier: str, commit: Commit) -> None:
        task = CommitCopy(
            tier=tier,
            id=entry.id,
            commit=replace(commit, owed=self._planner.flusher.older_owed(tier, entry)),
            name_latest=self._planner.flusher.is_newest(tier, entry),
        )
        self._pending[tier, entry.id] = _PendingRecord(task)
        self._dispatch(task)

    def on_outcome(self, outcome: Outcome) -> None:
        """Apply the outcome of writing a commit record."""
        task, error = outcome.task, outcome.error
        assert isinstance(task, CommitCopy)
        tier, id = task.tier, task.id
        record = self._pending.get((tier, id))
        if record is None or self.has_given_up(tier, id):
            self._pending.pop((tier, id), None)
            self._retract(tier, id, "it was given up meanwhile, by all")
            return
        if error is not None and self._may_succeed(record, error):
            self._try_again(record, error)
            return
        del self._pending[tier, id]
        if error is not None and not self._ledger.many_ranks:
            entry = self._ledger.entries[id]
            self._forget(entry, tier)
            self._planner.flusher.commit_failed(tier, entry, error)
        elif error is not None:
            self._messages.report_copy_failed(tier, id, error)
        elif self._group.is_shared(tier):
            self._announce_committed(tier, id, {0: outcome.value.stored_bytes})
        else:
            self._contribute_committed(tier, id, outcome.value.stored_bytes)

    def _may_succeed(self, record: _PendingRecord, error: BaseException) -> bool:
        """Return whether a record that was refused may be written by another try."""
        if isinstance(error, LostWriteError) and self._ledger.many_ranks:
            return record.tries < LOST_WRITES_MAX
        return getattr(error, "retryable", False)

    def _try_again(self, record: _PendingRecord, error: BaseException) -> None:
        """Schedule another try to write a commit record, after a retryable error."""
        task, now_s = record.task, self._ledger.now_s
        entry = self._ledger.entries[task.id]
        record.since_s = record.since_s if record.tries else now_s
        record.tries += 1
        record.waits = True
        record.not_before_s = now_s + self._ledger.wait_s(record.tries)
        self._planner.flusher.note_stall(
            task.tier, entry, error, record.since_s, record.not_before_s
        )
        # A newer checkpoint may be committed before this one.
        if task.tier in self._ledger.failing:
            entry.overtaken |= {task.tier}

    def try_now(self) -> None:
        """Try each record that waits at once."""
        for record in self._pending.values():
            record.not_before_s = 0.0

    def tick(self, now_s: float) -> None:
        for record in self._pending.values():
            if record.waits and now_s >= record.not_before_s:
                record.waits = False
                self._dispatch(record.task)
            elif record.waits:
                self._wake_at(record.not_before_s)

    def _contribute_committed(self, tier: str, id: CheckpointId, stored_bytes: int) -> None:
        body = CommittedBytes(bytes=stored_bytes)
        of_node = tier not in self._ledger.peer_tiers
        self._messages.contribute(body, id, tier, leaders_only=of_node)

    def _on_all_committed(
        self, tier: str, id: CheckpointId, committed: Mapping[int, CommittedBytes]
    ) -> None:
        if not self.has_given_up(tier, id):
            self._announce_committed(tier, id, {r: one.bytes for r, one in committed.items()})

    def _announce_committed(
        self, tier: str, id: CheckpointId, bytes_by_rank: Mapping[int, int]
    ) -> None:
        body = CommittedCopy(bytes_by_rank=bytes_by_rank, found=(tier, id) in self._found)
        self._messages.announce(body, id, tier)

    def _on_committed_by_all(self, tier: str, id: CheckpointId, message: CommittedCopy) -> None:
        entry = self._ledger.entries.get(id)
        if entry is None:
            return
        self._ledger.stuck.pop(tier, None)
        self._forget(entry, tier)
        self._found.discard((tier, id))
        if tier in self._ledger.peer_tiers:
            entry.note_on_peers()
        here = (0,) if self._group.is_shared(tier) else self._group.topology.local_ranks
        size = sum(message.bytes_by_rank.get(rank, 0) for rank in here)
        self._planner.flusher.committed(tier, id, size, found=message.found)
        self._planner.on_committed(tier, entry)
        self._ledger.partial.discard((tier, id))
        self._ledger.on_few_nodes.pop((tier, id), None)
        self._delete_partial(tier, entry)

    def _delete_partial(self, tier: str, newer: LedgerEntry) -> None:
        """Delete older copies of which only a part is left. They were kept in case the parts of other nodes return."""
        if not self._ledger.owns(tier):
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
                self._planner.deleter.delete(
                    DeleteCopy(tier=tier, id=id, reason=reason, known=known)
                )


def files_of_all(uploads: Mapping[int, UploadedFiles]) -> tuple[NamedFile, ...]:
    """Return the uploaded files in the order of the ranks."""
    return tuple(file for rank in sorted(uploads) for file in uploads[rank].files)


@dataclass(slots=True)
class _RankWait:
    """This rank waits for the others' contributions of one kind. ``flushed``: rank 0 was sent what there is."""

    kind: type[Message] = ImageComplete
    since_s: float | None = None
    flushed: bool = False


class GroupSeals(Component):
    """Saves, from the images of the ranks to one checkpoint in memory; see the module.

    An image that is to be compared is sealed only once the comparison is done: no later start could repeat it. A rank
    that waits longer than ``max_wait`` for the others reports it, and rank 0 gives the save up.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)
        self._max_wait_s = coordinator.max_wait_s
        self.replicas = ReplicaAssigner(
            self._messages,
            wake_at=self._wake_at,
            max_wait_s=self._max_wait_s,
            refuse=self.give_up,
        )
        self._whole: dict[CheckpointId, None] = {}
        self._waits: dict[CheckpointId, _RankWait] = {}
        self._reached: CheckpointId | None = None
        """Set once no rank saves any more: the last checkpoint that all ranks have begun to save, or restored."""
        receive = self._messages.receive
        receive(ImageComplete, gathered=self.on_all_complete)
        receive(ImagesAlike, announced=self._on_alike)
        receive(ImageSealed, gathered=self._on_all_sealed)
        receive(WholeCheckpoint, announced=self._on_whole)
        receive(LateRanks, reported=self._on_late)
        receive(SaveFailure, reported=self._on_failed, announced=self._on_given_up)
        receive(Ordinal, reported=self._on_ordinal_elsewhere, announced=self._on_ordinal)

    def contribute(self, entry: LedgerEntry) -> None:
        """This rank's image is complete."""
        entry.awaiting_ranks = True
        self._waits[entry.id] = _RankWait()
        share = None
        if (made := entry.share) is not None:
            self.replicas.sealed(entry.id, made)
            digests = None if made.digests is None else made.digests.by_group()
            share = ImageShare(
                structure=made.structure, assignment=made.assignment, digests=digests
            )
        size = entry.own_bytes
        body = ImageComplete(
            ordinal=entry.ordinal, image_bytes=size, share=share, not_finite=entry.not_finite
        )
        self._messages.contribute(body, entry.id)

    # Rank 0 ----------------------------------------------------------------------------------------

    def on_all_complete(self, id: CheckpointId, images: Mapping[int, ImageComplete]) -> None:
        """All ranks' images are complete."""
        if self._planner.copies.has_given_up("", id):
            return
        ordinals = {rank: image.ordinal for rank, image in images.items()}
        others = [rank for rank, ordinal in ordinals.items() if ordinal != ordinals[0]]
        if others:  # their images would not be restored together
            self._messages.announce(Ordinal(ordinal=max(ordinals.values())))
            text = (
                f"{format_ranks(others)} saved it as checkpoint {ordinals[others[0]]} of the lineage, and rank 0 as "
                f"checkpoint {ordinals[0]}: every rank saves the same steps. From the next one on the ordinals agree"
            )
            self.give_up(id, SaveFailure(text=text))
            return
        shares = {rank: image.share for rank, image in images.items() if image.share is not None}
        if not self.replicas.images_agree(id, shares):
            self._planner.copies.remember_given_up("", id)
        elif any(share.digests is not None for share in shares.values()):
            self._messages.announce(ImagesAlike(), id)
        else:
            self._on_all_sealed(id, images)

    def _on_all_sealed(
        self, id: CheckpointId, images: Mapping[int, ImageComplete | ImageSealed]
    ) -> None:
        """All ranks' images are sealed: the checkpoint is whole."""
        if self._planner.copies.has_given_up("", id):
            return
        remember(self._whole, id, None)
        total = sum(image.image_bytes for image in images.values())
        noted = named_not_finite(name for image in images.values() for name in image.not_finite)
        self._messages.announce(WholeCheckpoint(image_bytes=total, not_finite=noted), id)

    def _on_failed(self, id: CheckpointId, failure: SaveFailure, rank: int) -> None:
        """A save has failed on a rank."""
        if self.replicas.end_naming(id) or self._planner.copies.has_given_up("", id):
            return
        text = self._ledger.group.topology.name_rank(rank, failure.text)
        self.give_up(id, replace(failure, text=text))

    def _on_late(self, id: CheckpointId, late: LateRanks, rank: int) -> None:
        """A rank has waited too long for the others, or waits in vain."""
        if self.replicas.end_naming(id) or self._planner.copies.has_given_up("", id):
            return
        if id in self._whole or any(of == id for _, of in self._ledger.committing):
            return  # the last of them contributed just now, or has uploaded its image
        kinds = (ImageComplete, ImageSealed)
        missing = [other for kind in kinds for other in self._messages.missing(kind, id)]
        who = format_ranks(missing) if missing else "another rank"
        when = "before the training ended"
        if not late.ended:
            when = f"within max_wait ({self._max_wait_s:g} s) of rank {rank}"
        text = f"{who} did not save step {id.step} {when}: every rank saves the same steps"
        self._messages.announce(Ordinal(ordinal=late.ordinal))
        self.give_up(id, SaveFailure(text=text))

    def _on_ordinal_elsewhere(self, message: Ordinal, rank: int) -> None:
        self._messages.announce(message)

    def give_up(self, id: CheckpointId, failure: SaveFailure) -> None:
        """Have all ranks give a save up."""
        self._planner.copies.remember_given_up("", id)
        self._messages.announce(failure, id)

    # Every rank ------------------------------------------------------------------------------------

    def _on_ordinal(self, message: Ordinal) -> None:
        self._ledger.least_ordinal = max(self._ledger.least_ordinal, message.ordinal)

    def _on_alike(self, id: CheckpointId, message: ImagesAlike) -> None:
        """Seal an image that was compared, if it is not sealed yet. The checkpoint is whole once all ranks have sealed:
        a kill before could leave a newer image to some ranks and an older one to others."""
        entry = self._ledger.entries.get(id)
        if entry is None or entry.failed:
            return
        self.replicas.compared(id)
        if entry.share is not None and entry.share.digests is not None:
            assert entry.region is not None
            assert entry.manifest is not None
            assert entry.commit is not None
            entry.region.seal(manifest=entry.manifest.encode(), commit=entry.commit.encode())
            entry.share.digests = None
            if entry.handle is not None:
                entry.handle.on_captured()
        self._waits[id] = _RankWait(ImageSealed)
        body = ImageSealed(image_bytes=entry.own_bytes, not_finite=entry.not_finite)
        self._messages.contribute(body, id)

    def _on_whole(self, id: CheckpointId, whole: WholeCheckpoint) -> None:
        entry = self._ledger.entries.get(id)
        if entry is None:
            return
        self._waits.pop(id, None)
        entry.image_bytes = whole.image_bytes
        entry.note_not_finite(whole.not_finite)
        entry.awaiting_ranks = False
        if entry.state(self._ledger.host) is CopyState.ARRIVING:
            entry.set_state(self._ledger.host, CopyState.SEALED)

    def _on_given_up(self, id: CheckpointId, failure: SaveFailure) -> None:
        entry = self._ledger.entries.get(id)
        reason = self.replicas.named(failure)
        kind = CapacityError if failure.outcome is not SaveOutcome.FAILED else CaptureError
        error = kind(f"save of step {id.step} is given up by all ranks: {reason}")
        self._waits.pop(id, None)
        self.replicas.save_given_up(id)
        self._messages.forget(ImageComplete, id)
        self._messages.forget(ImageSealed, id)
        remember(self._ledger.lost_saves, id, (error, failure.outcome))
        self._planner.copies.give_up_everywhere(self._lanes, id, entry, reason)
        if entry is not None:
            self._planner.captures.give_up(entry, error, failure.outcome)

    # Time ------------------------------------------------------------------------------------------

    def end_saves(self, reached: CheckpointId) -> None:
        """Have all ranks give up the steps after ``reached`` of that attempt, within ``END_S``: no rank begins a save
        any more, and not all have begun these."""
        self._reached = reached
        for id, wait in self._waits.items():
            if self._is_past_end(id):
                self._waits[id] = _RankWait(wait.kind)

    def tick(self, now_s: float) -> None:
        """Report a wait that is over. After half of it, have the bodies that arrived sent to rank 0, which can then
        name late ranks."""
        self.replicas.tick(now_s)
        for id, wait in list(self._waits.items()):
            bound_s = END_S if self._is_past_end(id) else self._max_wait_s
            if wait.since_s is None:
                wait.since_s = now_s
            elif now_s >= wait.since_s + bound_s:
                del self._waits[id]
                ordinal = self._ledger.entries[id].ordinal if id in self._ledger.entries else 0
                body = LateRanks(ordinal=ordinal, ended=self._is_past_end(id))
                self._messages.report(body, id)
                continue
            elif now_s >= wait.since_s + bound_s / 2 and not wait.flushed:
                wait.flushed = True
                self._messages.flush_partial(wait.kind, id)
            self._wake_at(wait.since_s + bound_s / 2)
            self._wake_at(wait.since_s + bound_s)

    def _is_past_end(self, id: CheckpointId) -> bool:
        reached = self._reached
        return reached is not None and id.attempt == reached.attempt and id.step > reached.step


class StartRecords(Component):
    """Records of where this attempt began, on tiers that hold abandoned checkpoints and none of this attempt yet.

    A tier that receives few checkpoints may receive none of the new lineage before the tiers that have some are lost.
    The abandoned checkpoints on it would then count as live again.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)
        self._recorded: set[tuple[str, int]] = set()

    def committed(self, tier: str, commit: Commit | None) -> None:
        """A checkpoint was committed on a tier: if it is of this attempt, record the attempt's start on the others."""
        attempt = self._ledger.attempt
        if commit is None or commit.lineage.checkpoint.attempt != attempt:
            return
        self._recorded.add((tier, attempt))
        if all((other, attempt) in self._recorded for other in self._lanes):
            return
        abandoned = self._ledger.abandoned()
        for other in self._lanes:
            if (other, attempt) in self._recorded:
                continue
            self._recorded.add((other, attempt))
            if any(
                entry.id in abandoned and entry.state(other) is CopyState.COMMITTED
                for entry in self._ledger.entries.values()
            ):
                self._dispatch(
                    StoreCall(
                        tier=other,
                        call=partial(_record, commit),
                        then=partial(self._on_recorded, attempt),
                    )
                )

    def _on_recorded(self, number: int, outcome: Outcome) -> None:
        """Apply an outcome. After a failure the record is written with the next commit."""
        tier = outcome.task.tier
        if outcome.error is not None:
            self._conditions.report(
                (tier, number), logging.WARNING,
                "%s: the start of attempt %d is not recorded yet: %s",
                tier, number, outcome.error,
            )  # fmt: skip
            self._recorded.discard((tier, number))
        else:
            text = "%s: the start of attempt %d is recorded"
            self._conditions.end((tier, number), text, tier, number)


def _record(commit: Commit, store: TaskStore, attempt: Attempt) -> None:
    number = commit.lineage.checkpoint.attempt
    store.check_newest(attempt, doing=f"record of attempt {number}")
    store.record_lineage(commit, attempt)
