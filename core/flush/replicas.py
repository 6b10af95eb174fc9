"""Deduplication: which rank writes the state that is replicated across ranks, and the comparison of the replicas.

    every rank                    rank 0
    its table, at a save       -> all have contributed one for the same save: the assignment
    it has begun that save     -> no assignment: each rank writes all its tensors, and the next save asks again

An assignment is used until the structure of some rank's state changes. Images are compared before they are sealed:

    digest of each group       -> all equal: the save goes on
                                  one differs: no save by this assignment is a checkpoint; which tensor is it?
    digest of each tensor      -> the save is given up by the tensor's name; from then on each rank writes all

It belongs to the coordinator's thread, except ``assignments``, which saves read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from tierfall.core.capture.snapshot import ReplicaShare
from tierfall.core.flush.messages import ImageShare, Messages, SaveFailure, remember
from tierfall.core.flush.tasks import AssignmentRequest
from tierfall.core.image.dedup import (
    NOBODY,
    ReplicaAssignment,
    ReplicaDifference,
    ReplicaDigests,
    ReplicaTable,
    assign_writers,
    digests_agree,
    find_difference,
)
from tierfall.core.ranks.messages import Message
from tierfall.core.types.text import format_ranks
from tierfall.core.types.values import CheckpointId

ASK_AGAIN_S = 1.0
"""After how long rank 0 is asked whether some rank has begun the save without a table."""
_NOT_COMPARED = "replicated state was not compared; the next save compares it"


@dataclass(frozen=True, slots=True, kw_only=True)
class _TablesWanted(Message):
    """Reported, then announced: a save waits for the tables of the other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unassigned(Message):
    """Reported, then announced: a save gets no assignment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesUnlike(Message):
    """Announced: replicas differ, and each rank is to contribute the digests of its tensors."""


@dataclass(slots=True)
class _MadeAssignment:
    """An assignment that rank 0 has made of ``tables``, first for the save ``id``. ``compared``: all replicas were
    compared once; ``unlike``: why the ranks do not hold replicas any more."""

    assignment: ReplicaAssignment
    tables: list[ReplicaTable]
    id: CheckpointId
    compared: bool = False
    unlike: SaveFailure | None = None

    def sharers(self) -> set[int]:
        """Return the ranks that have replicas of another rank's tensors."""
        groups = (self.assignment.groups_of(table.keys) for table in self.tables)
        return {rank for rank, column in enumerate(groups) if (column != NOBODY).any()}


class ReplicaAssigner:
    """One rank's part; see the module. ``refuse`` is called at rank 0 for a save that is no checkpoint, once the reason
    is known."""

    def __init__(
        self,
        messages: Messages,
        *,
        wake_at: Callable[[float], None],
        max_wait_s: float,
        refuse: Callable[[CheckpointId, SaveFailure], None],
    ) -> None:
        self._messages = messages
        self._wake_at = wake_at
        self._max_wait_s = max_wait_s
        self._refuse_save = refuse
        self._request: AssignmentRequest | None = None
        self._contributed: CheckpointId | None = None
        self._constant_table: ReplicaTable | None = None
        self._begun: CheckpointId | None = None
        self._names: dict[int, str] = {}
        self._made: dict[str, _MadeAssignment] = {}
        self._digests: dict[CheckpointId, ReplicaDigests] = {}
        self._unnamed: dict[CheckpointId, list[_MadeAssignment]] = {}
        self._ended: dict[CheckpointId, None] = {}
        self._tables_asked: dict[CheckpointId, None] = {}
        self.assignments: dict[str, ReplicaAssignment] = {}
        """The assignment of each structure of this rank's state."""
        messages.receive(ReplicaTable, gathered=self._on_all_tables)
        messages.receive(
            _TablesWanted, reported=self._on_tables_wanted, announced=self._on_asked_for_table
        )
        messages.receive(ReplicaAssignment, announced=self._answer)
        messages.receive(
            _Unassigned, reported=self._on_one_unassigned, announced=self._on_unassigned
        )
        messages.receive(ImagesUnlike, announced=self._on_unlike)
        messages.receive(ReplicaDigests, gathered=self._on_all_digests)

    # This rank's saves -----------------------------------------------------------------------------

    def request(self, asked: AssignmentRequest) -> None:
        """Contribute a table. If it lists nothing that other ranks could write, the save does not wait, and the table
        is contributed to later saves too."""
        shareable = asked.shareable
        self._names = shareable.names()
        self._constant_table = None if shareable.numbers else shareable.table
        self._request = asked if shareable.numbers else None
        self._contribute(asked.id, shareable.table)

    def _contribute(self, id: CheckpointId, table: ReplicaTable) -> None:
        if self._contributed != id:
            self._contributed = id
            self._messages.contribute(table, id)

    def save_begun(self, id: CheckpointId) -> None:
        """A save has begun, or has failed to: this rank contributes no table to it any more."""
        self._begun = id

    def sealed(self, id: CheckpointId, share: ReplicaShare) -> None:
        """This rank's image is complete: keep its digests until the images of all ranks were compared."""
        if share.digests is not None:
            remember(self._digests, id, share.digests)

    def compared(self, id: CheckpointId) -> None:
        """The images of all ranks were compared, or given up."""
        self._digests.pop(id, None)

    def save_given_up(self, id: CheckpointId) -> None:
        """All ranks have given a save up. An assignment that was made for it, and never compared, is not used."""
        self.compared(id)
        self._messages.forget(ReplicaTable, id)
        self._messages.forget(ReplicaDigests, id)
        self._answer(id, None)
        if any(made.id == id and not made.compared for made in self._made.values()):
            self._messages.announce(_Unassigned(), id)

    def stop(self) -> None:
        """The coordinator has stopped: answer what waits."""
        if self._request is not None:
            self._answer(self._request.id, None)

    def tick(self, now_s: float) -> None:
        request = self._request
        if request is None or request.ended:
            return
        if request.since_s is None:
            request.since_s = now_s
        if now_s >= request.since_s + self._max_wait_s:
            request.ended = True
            self._messages.report(_Unassigned(), request.id)
        elif now_s >= request.since_s + ASK_AGAIN_S and not request.asked_again:
            request.asked_again = True
            self._messages.report(_TablesWanted(), request.id)
        self._wake_at(request.since_s + ASK_AGAIN_S)
        self._wake_at(request.since_s + self._max_wait_s)

    # Messages --------------------------------------------------------------------------------------

    def _on_asked_for_table(self, id: CheckpointId, message: _TablesWanted) -> None:
        if self._constant_table is not None:
            self._contribute(id, self._constant_table)
        elif self._has_passed(id):
            self._messages.report(_Unassigned(), id)

    def _on_unassigned(self, id: CheckpointId, message: _Unassigned) -> None:
        self.assignments.clear()
        self._answer(id, None)

    def _on_unlike(self, id: CheckpointId, message: ImagesUnlike) -> None:
        self._messages.contribute(self._digests.get(id, ReplicaDigests), id)

    def _has_passed(self, id: CheckpointId) -> bool:
        begun = self._begun
        return begun is not None and (begun.attempt, begun.step) >= (id.attempt, id.step)

    def _answer(self, id: CheckpointId, assignment: ReplicaAssignment | None) -> None:
        if self._request is not None and self._request.id == id:
            request, self._request = self._request, None
            if assignment is not None:
                remember(self.assignments, request.shareable.table.structure, assignment)
            request.on_answer(assignment)

    # Rank 0 ----------------------------------------------------------------------------------------

    def _on_tables_wanted(self, id: CheckpointId, message: _TablesWanted, rank: int) -> None:
        if _is_first_time(self._tables_asked, id):
            self._messages.announce(message, id)

    def _on_one_unassigned(self, id: CheckpointId, message: _Unassigned, rank: int) -> None:
        if _is_first_time(self._ended, id):
            self._messages.forget(ReplicaTable, id)
            self._messages.announce(message, id)

    def _on_all_tables(self, id: CheckpointId, by_rank: Mapping[int, ReplicaTable]) -> None:
        if not _is_first_time(self._ended, id):
            return
        tables = [by_rank[rank] for rank in sorted(by_rank)]
        assignment = assign_writers(tables)
        known = self._made.get(assignment.id)
        if known is not None and known.unlike is not None:
            assignment = assignment.unshared()
        remember(self._made, assignment.id, _MadeAssignment(assignment, tables, id))
        self._messages.announce(assignment, id)

    def images_agree(self, id: CheckpointId, shares: Mapping[int, ImageShare]) -> bool:
        """Return whether the images of all ranks, made as ``shares`` describe, are a checkpoint; else ``refuse`` is
        called, now or later. For rank 0."""
        used = {share.assignment for share in shares.values() if share.assignment is not None}
        for name in used:
            made = self._made.get(name)
            if made is None:
                why = SaveFailure(
                    text="its replica assignment is not known any more; the next save makes a new one"
                )
            elif (found := self._why_not(made, id, shares)) is not None:
                why = found
            else:
                continue
            self._refuse(id, why)
            return False
        by_group = {
            rank: {(share.assignment, group): d for group, d in (share.digests or {}).items()}
            for rank, share in shares.items()
        }
        if not digests_agree(by_group):
            self._name(id, used)
            return False
        for made in self._made.values():
            made.compared |= made.id == id
        return True

    def _why_not(
        self, made: _MadeAssignment, id: CheckpointId, shares: Mapping[int, ImageShare]
    ) -> SaveFailure | None:
        """Return why a save is no checkpoint: a rank has not written what others left to it, or has not digested what
        is compared."""
        if made.unlike is not None:
            return made.unlike
        owners = made.assignment.writers
        for rank in owners:
            if rank not in shares or shares[rank].structure != made.tables[rank].structure:
                return SaveFailure(
                    text=f"rank {rank} saved other tensors than before, and was to write some of those for others; "
                    "the next save makes a new assignment"
                )
        compare = owners if made.compared else made.sharers()
        by_this = {r for r, share in shares.items() if share.assignment == made.assignment.id}
        if compare - by_this or (compare and not made.compared and made.id != id):
            return SaveFailure(text=_NOT_COMPARED)
        return None

    def _refuse(self, id: CheckpointId, why: SaveFailure) -> None:
        self._messages.announce(_Unassigned(), id)
        self._refuse_save(id, why)

    def _name(self, id: CheckpointId, assignments: Collection[str]) -> None:
        """Replicas differ: ask all ranks for the digests of their tensors, to name the tensor."""
        self._unnamed[id] = [self._made[name] for name in self._made.keys() & assignments]
        for made in self._unnamed[id]:
            made.unlike = SaveFailure(text=_UNNAMED)
        self._messages.announce(ImagesUnlike(), id)

    def _on_all_digests(
        self, id: CheckpointId, digests: Mapping[int, ReplicaDigests | None]
    ) -> None:
        found = find_difference({rank: of for rank, of in digests.items() if of is not None})
        self._end_naming(id, SaveFailure(text=_UNNAMED) if found is None else _as_failure(found))

    def end_naming(self, id: CheckpointId) -> bool:
        """A rank will not contribute its digests; return whether they were waited for."""
        return self._end_naming(id, SaveFailure(text=_UNNAMED))

    def _end_naming(self, id: CheckpointId, why: SaveFailure) -> bool:
        if id not in self._unnamed:
            return False
        for made in self._unnamed.pop(id):
            made.unlike = why
        self._refuse(id, why)
        return True

    def named(self, failure: SaveFailure) -> str:
        """Return the text of a failure with the name of its tensor, as far as this rank knows it."""
        if failure.tensor is None:
            return failure.text
        return failure.text.replace(
            "{}", self._names.get(failure.tensor, "a tensor that they hold")
        )


_REMEDY = (
    "From the next save on each rank writes all that it holds, and gets its own back. Wrap what is a rank's own in "
    "tierfall.item(..., on_resize='per_rank'): with LocalSGD and DiLoCo the inner optimizer, and the model unless it "
    "is saved right after an exchange; or make it a DTensor, or give the ranks' tensors different names"
)
_UNNAMED = f"ranks have tensors of one name and shape that are not replicas of one. {_REMEDY}"


def _as_failure(found: ReplicaDifference) -> SaveFailure:
    more = f" ({found.more} more tensors likewise)" if found.more else ""
    return SaveFailure(
        text=f"{{}} on {format_ranks(found.ranks)} differs from that on {format_ranks(found.others)}{more}: each has a "
        f"tensor of that name and shape, and they are not replicas of one. {_REMEDY}",
        tensor=found.key,
    )


def _is_first_time(seen: dict[CheckpointId, None], id: CheckpointId) -> bool:
    if id in seen:
        return False
    remember(seen, id, None)
    return True
