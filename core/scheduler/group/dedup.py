"""The division of what several ranks hold alike: asked for by a save of a new structure, made by rank 0 for all.

    every rank                  rank 0
    its table, at a save    ->  all have brought theirs, for the same save: this is the division
    it has begun that save  ->  there is none: each writes all that it holds, and the next save asks again

After that nobody is asked as long as no rank's structure changes. Every image is compared before it is sealed:

    digests of each group   ->  all alike: go on
                                a group is not: no save by this division is a checkpoint any more; which tensor?
    digests of each tensor  ->  the save is given up by name, and so is the division: from now on each writes all

It belongs to the coordinator's thread, but for ``divisions``, which saves read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tierfall.core.capture.snapshot import Share
from tierfall.core.image.dedup import (
    NOBODY,
    ReplicaAssignment,
    ReplicaDifference,
    ReplicaDigests,
    ReplicaTable,
    are_alike,
    assign_writers,
    find_difference,
)
from tierfall.core.ranks.message_tree import Bodies, MessageTree
from tierfall.core.ranks.messages import Topic
from tierfall.core.ranks.ranks import DecisionAnnounced, MessagesGathered, RankMessage, RankReported
from tierfall.core.scheduler.ledger.tasks import AssignmentRequest
from tierfall.core.types.text import ranks_named
from tierfall.core.types.values import CheckpointId

logger = logging.getLogger("tierfall")

ASK_AGAIN_S = 1.0
"""After so long it is asked whether some rank has begun the save without bringing a table."""
DIVIDE = "divide"
_WORDS = frozenset({DIVIDE, "dividing", "divided", "undivided", "unlike", "digests"})
_REMEMBERED = 64
_NEVER_COMPARED = "what the ranks hold alike was not compared; at the next save it is"

Refusal = tuple[str, int | None]
"""Why the images of all ranks are no checkpoint, and the key of the tensor that it is about, for ``Divider.named``."""


@dataclass(slots=True)
class _MadeAssignment:
    """A division that rank 0 has made: of which tables, for which save; whether all that it divides was ``compared``
    once; and that the ranks hold some of it not alike any more (``unlike``)."""

    division: ReplicaAssignment
    tables: list[ReplicaTable]
    id: CheckpointId
    compared: bool = False
    unlike: Refusal | None = None

    def sharers(self) -> set[int]:
        """Return the ranks that hold what others hold too."""
        groups = (self.division.groups_of(table.keys) for table in self.tables)
        return {rank for rank, column in enumerate(groups) if (column != NOBODY).any()}


class ReplicaAssigner:
    """One rank's part; see the module. ``refuse`` is called at rank 0 for a save that is no checkpoint, once it is
    known why."""

    def __init__(
        self,
        council: MessageTree,
        *,
        max_wait_s: float,
        refuse: Callable[[CheckpointId, Refusal], None],
    ) -> None:
        self._council = council
        self._max_wait_s = max_wait_s
        self._refuse_save = refuse
        self._asked: AssignmentRequest | None = None
        self._brought: CheckpointId | None = None
        self._standing: ReplicaTable | None = None
        self._begun: CheckpointId | None = None
        self._names: dict[int, str] = {}
        self._made: dict[str, _MadeAssignment] = {}
        self._digests: dict[CheckpointId, ReplicaDigests] = {}
        self._unnamed: dict[CheckpointId, list[_MadeAssignment]] = {}
        self._ended: dict[CheckpointId, None] = {}
        self._asked_all: dict[CheckpointId, None] = {}
        self.divisions: dict[str, ReplicaAssignment] = {}

    # What this rank asks ---------------------------------------------------------------------------

    def ask(self, asked: AssignmentRequest) -> None:
        """Bring a table. Where there is nothing in it that others could write, nobody waits, and it stands for later
        saves too."""
        shareable = asked.shareable
        self._names = shareable.names()
        self._standing = None if shareable.numbers else shareable.table
        self._asked = asked if shareable.numbers else None
        self._contribute(asked.id, shareable.table)

    def _contribute(self, id: CheckpointId, table: ReplicaTable) -> None:
        if self._brought != id:
            self._brought = id
            self._council.contribute(_topic(DIVIDE, id), table.to_json())

    def has_begun(self, id: CheckpointId) -> None:
        """A save has begun, or ended before it could: whoever waits for it to be divided waits in vain."""
        self._begun = id

    def sealed(self, id: CheckpointId, share: Share) -> None:
        """This rank's image is complete: its digests may be asked for until all ranks' were compared."""
        if share.digests is not None:
            self._digests[id] = share.digests
            _limit(self._digests)

    def ended(self, id: CheckpointId) -> None:
        """All ranks' images were compared, or given up."""
        self._digests.pop(id, None)

    def gone(self, id: CheckpointId) -> None:
        """A save was given up by all ranks. What was divided for it, and never compared, is divided again."""
        self.ended(id)
        self._council.forget(_topic(DIVIDE, id))
        self._council.forget(_topic("digests", id))
        self._answer(id, None)
        if any(made.id == id and not made.compared for made in self._made.values()):
            self._council.announce(_topic("undivided", id), None)

    def stop(self) -> None:
        """Nothing will be divided any more."""
        if self._asked is not None:
            self._answer(self._asked.id, None)

    def tick(self, now_s: float) -> None:
        asked = self._asked
        if asked is None or asked.ended:
            return
        if asked.since_s is None:
            asked.since_s = now_s
        if now_s >= asked.since_s + self._max_wait_s:
            asked.ended = True
            self._council.tell(_topic("undivided", asked.id), None)
        elif now_s >= asked.since_s + ASK_AGAIN_S and not asked.asked_again:
            asked.asked_again = True
            self._council.tell(_topic("dividing", asked.id), None)

    def next_s(self, now_s: float) -> float | None:
        asked = self._asked
        if asked is None or asked.ended or asked.since_s is None:
            return None
        due = (asked.since_s + ASK_AGAIN_S, asked.since_s + self._max_wait_s)
        return min((when for when in due if when > now_s), default=None)

    # What is heard ---------------------------------------------------------------------------------

    def hear(self, news: RankMessage) -> bool:
        """Take what is about a division; False for everything else."""
        if news.topic[0] not in _WORDS:
            return False
        id = CheckpointId(int(news.topic[1]), int(news.topic[2]))
        if not self._on_digests(id, news):
            self._dispatch_message(id, news)
        return True

    def _on_digests(self, id: CheckpointId, news: RankMessage) -> bool:
        match news:
            case MessagesGathered(topic=("digests", *_)):
                if not news.passed:
                    self._on_all_digests(id, news.bodies)
            case DecisionAnnounced(topic=("unlike", *_)):
                found = self._digests.get(id)
                self._council.contribute(_topic("digests", id), found and found.to_json())
            case _:
                return False
        return True

    def _dispatch_message(self, id: CheckpointId, news: RankMessage) -> None:
        match news:
            case MessagesGathered(topic=(word, *_), passed=False) if word == DIVIDE:
                self._on_all_asked(id, news.bodies)
            case RankReported(topic=("dividing", *_)) if _is_first_time(self._asked_all, id):
                self._council.announce(_topic("dividing", id), None)
            case RankReported(topic=("undivided", *_)) if _is_first_time(self._ended, id):
                self._council.forget(_topic(DIVIDE, id))
                self._council.announce(_topic("undivided", id), None)
            case DecisionAnnounced(topic=("dividing", *_)):
                if self._standing is not None:
                    self._contribute(id, self._standing)
                elif self._has_passed(id):
                    self._council.tell(_topic("undivided", id), None)
            case DecisionAnnounced(topic=("undivided", *_)):
                self.divisions.clear()
                self._answer(id, None)
            case DecisionAnnounced(topic=("divided", *_)):
                self._answer(id, ReplicaAssignment.from_json(news.body))

    def _has_passed(self, id: CheckpointId) -> bool:
        begun = self._begun
        return begun is not None and (begun.attempt, begun.step) >= (id.attempt, id.step)

    def _answer(self, id: CheckpointId, division: ReplicaAssignment | None) -> None:
        if self._asked is not None and self._asked.id == id:
            asked, self._asked = self._asked, None
            if division is not None:
                self.divisions[asked.shareable.table.structure] = division
                _limit(self.divisions)
            asked.answer(division)

    # Rank 0 ----------------------------------------------------------------------------------------

    def _on_all_asked(self, id: CheckpointId, bodies: Bodies) -> None:
        if not _is_first_time(self._ended, id):
            return
        tables = [ReplicaTable.from_json(bodies[rank]) for rank in sorted(bodies)]
        division = assign_writers(tables)
        known = self._made.get(division.id)
        if known is not None and known.unlike is not None:
            division = division.apart()
        self._made[division.id] = _MadeAssignment(division, tables, id)
        _limit(self._made)
        self._council.announce(_topic("divided", id), division.to_json())

    def are_alike(self, id: CheckpointId, shares: Mapping[int, Any]) -> bool:
        """Say whether the images of all ranks, made as ``shares`` say (``Share.to_json``), are a checkpoint; else
        ``refuse`` is called, now or later. It is for rank 0."""
        said = {rank: share for rank, share in shares.items() if share is not None}
        for name in {division for _, division, _ in said.values()} - {None}:
            made = self._made.get(str(name))
            if made is None:
                why: Refusal = (
                    "how it was divided is not known any more; at the next save it is",
                    None,
                )
            elif (found := self._why_not(made, id, said)) is not None:
                why = found
            else:
                continue
            self._refuse(id, why)
            return False
        by_group = {
            rank: {(division, group): digest for group, digest in pairs or ()}
            for rank, (_, division, pairs) in said.items()
        }
        if not are_alike(by_group):
            self._name(id, {str(division) for _, division, _ in said.values()})
            return False
        for made in self._made.values():
            made.compared |= made.id == id
        return True

    def _why_not(
        self, made: _MadeAssignment, id: CheckpointId, said: Mapping[int, Any]
    ) -> Refusal | None:
        """Each rank must have written what the others left to it, and have digested what is compared."""
        if made.unlike is not None:
            return made.unlike
        owners = set(map(int, made.division.owners))
        for rank in owners:
            if said.get(rank, (None,))[0] != made.tables[rank].structure:
                return (
                    f"rank {rank} saved other tensors than before, and others had left it some of those to write; at "
                    "the next save all divide anew",
                    None,
                )
        compare = owners if made.compared else made.sharers()
        if any(said.get(rank, (None, None))[1] != made.division.id for rank in compare):
            return _NEVER_COMPARED, None
        if compare and not made.compared and made.id != id:
            return _NEVER_COMPARED, None
        return None

    def _refuse(self, id: CheckpointId, why: Refusal) -> None:
        self._council.announce(_topic("undivided", id), None)
        self._refuse_save(id, why)

    def _name(self, id: CheckpointId, divisions: Collection[str]) -> None:
        """Ranks hold something not alike: ask all of them for what they digested, to name it."""
        self._unnamed[id] = [self._made[name] for name in self._made.keys() & divisions]
        for made in self._unnamed[id]:
            made.unlike = _UNNAMED, None
        self._council.announce(_topic("unlike", id), None)

    def _on_all_digests(self, id: CheckpointId, bodies: Bodies) -> None:
        found = find_difference({rank: body for rank, body in bodies.items() if body is not None})
        self._end_naming(id, (_UNNAMED, None) if found is None else _as_refusal(found))

    def end_naming(self, id: CheckpointId) -> bool:
        """Some rank will not say what it digested; return whether that was waited for."""
        return self._end_naming(id, (_UNNAMED, None))

    def _end_naming(self, id: CheckpointId, why: Refusal) -> bool:
        if id not in self._unnamed:
            return False
        for made in self._unnamed.pop(id):
            made.unlike = why
        self._refuse(id, why)
        return True

    def named(self, text: str, key: int | None = None) -> str:
        """Put the name of the tensor with ``key`` into a text, as far as this rank knows it."""
        if key is None:
            return text
        return text.replace("{}", self._names.get(key, "a tensor that they hold"))


_REMEDY = (
    "From the next save on each rank writes all that it holds, and gets its own back. Wrap what is a rank's own in "
    "tierfall.item(..., on_resize='per_rank'): with LocalSGD and DiLoCo the inner optimizer, and the model unless it "
    "is saved right after an exchange; or make it a DTensor, or give the ranks' tensors different names"
)
_UNNAMED = f"ranks have tensors of one name and shape that are not replicas of one. {_REMEDY}"


def _as_refusal(found: ReplicaDifference) -> Refusal:
    more = f" ({found.more} more tensors likewise)" if found.more else ""
    return (
        f"{{}} is on {ranks_named(found.ranks)} not what it is on {ranks_named(found.others)}{more}: each has a tensor "
        f"of that name and shape, and they are not replicas of one. {_REMEDY}",
        found.key,
    )


def _is_first_time(seen: dict[CheckpointId, None], id: CheckpointId) -> bool:
    """Say whether this is the first time; few are remembered."""
    if id in seen:
        return False
    seen[id] = None
    _limit(seen)
    return True


def _limit(memory: dict[Any, Any]) -> None:
    """Let the oldest go, where there are too many."""
    while len(memory) > _REMEMBERED:
        del memory[next(iter(memory))]


def _topic(what: str, id: CheckpointId) -> Topic:
    return (what, id.step, id.attempt)
