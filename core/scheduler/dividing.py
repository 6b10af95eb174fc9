"""The division of what several ranks hold alike: asked for by a save of a new structure, made by rank 0 for all.

    every rank                  rank 0
    its table, at a save    ->  all have brought theirs, for the same save: this is the division
    it has begun that save  ->  there is none: each writes all that it holds, and the next save asks again
    digests, when sealed    ->  they differ: the save is given up, and so is the division

After that nobody is asked as long as no rank's structure changes. It belongs to the coordinator's thread, but for
``divisions``, which saves read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierfall.core.image.dividing import (
    Difference,
    Division,
    Table,
    divide,
    find_difference,
    unpack,
)
from tierfall.core.ranks.council import Bodies, Council, Topic
from tierfall.core.ranks.ranks import Announced, Gathered, News, Told
from tierfall.core.scheduler.tasks import DivisionAsked
from tierfall.core.snapshot import Share
from tierfall.core.values import CheckpointId
from tierfall.core.words import ranks_named

logger = logging.getLogger("tierfall")

ASK_AGAIN_S = 1.0
"""After so long it is asked whether some rank has begun the save without bringing a table."""
DIVIDE = "divide"
_WORDS = frozenset({DIVIDE, "dividing", "divided", "undivided"})
_REMEMBERED = 64


@dataclass(slots=True)
class _Made:
    """A division that rank 0 has made: of which tables, for which save, and what is known of it."""

    division: Division
    tables: list[Table]
    id: CheckpointId
    compared: bool = False
    wrong: Difference | None = None


class Divider:
    """One rank's part; see the module."""

    def __init__(self, council: Council, *, max_wait_s: float) -> None:
        self._council = council
        self._max_wait_s = max_wait_s
        self._asked: DivisionAsked | None = None
        self._brought: CheckpointId | None = None
        self._standing: Table | None = None
        self._begun: CheckpointId | None = None
        self._names: dict[int, str] = {}
        self._made: dict[str, _Made] = {}
        self._ended: dict[CheckpointId, None] = {}
        self._asked_all: dict[CheckpointId, None] = {}
        self.divisions: dict[str, Division] = {}

    # What this rank asks ---------------------------------------------------------------------------

    def ask(self, asked: DivisionAsked) -> None:
        """Bring a table. Where there is nothing in it that others could write, nobody waits, and it stands for later
        saves too."""
        shareable = asked.shareable
        self._names = shareable.names()
        self._standing = None if shareable.numbers else shareable.table
        self._asked = asked if shareable.numbers else None
        self._bring(asked.id, shareable.table)

    def _bring(self, id: CheckpointId, table: Table) -> None:
        if self._brought != id:
            self._brought = id
            self._council.contribute(_topic(DIVIDE, id), table.to_json())

    def has_begun(self, id: CheckpointId) -> None:
        """A save has begun, or ended before it could: whoever waits for it to be divided waits in vain."""
        self._begun = id

    def gone(self, id: CheckpointId) -> None:
        """A save was given up by all ranks. What was divided for it, and never compared, is divided again."""
        self._council.forget(_topic(DIVIDE, id))
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

    def hear(self, news: News) -> bool:
        """Take what is about a division; False for everything else."""
        if news.topic[0] not in _WORDS:
            return False
        id = CheckpointId(int(news.topic[1]), int(news.topic[2]))
        match news:
            case Gathered(topic=(word, *_), passed=False) if word == DIVIDE:
                self._all_asked(id, news.bodies)
            case Told(topic=("dividing", *_)) if _once(self._asked_all, id):
                self._council.announce(_topic("dividing", id), None)
            case Told(topic=("undivided", *_)) if _once(self._ended, id):
                self._council.forget(_topic(DIVIDE, id))
                self._council.announce(_topic("undivided", id), None)
            case Announced(topic=("dividing", *_)):
                if self._standing is not None:
                    self._bring(id, self._standing)
                elif self._has_passed(id):
                    self._council.tell(_topic("undivided", id), None)
            case Announced(topic=("undivided", *_)):
                self.divisions.clear()
                self._answer(id, None)
            case Announced(topic=("divided", *_)):
                self._answer(id, Division.from_json(news.body))
        return True

    def _has_passed(self, id: CheckpointId) -> bool:
        begun = self._begun
        return begun is not None and (begun.attempt, begun.step) >= (id.attempt, id.step)

    def _answer(self, id: CheckpointId, division: Division | None) -> None:
        if self._asked is not None and self._asked.id == id:
            asked, self._asked = self._asked, None
            if division is not None:
                self.divisions[asked.shareable.table.structure] = division
                _limit(self.divisions)
            asked.answer(division)

    # Rank 0 ----------------------------------------------------------------------------------------

    def _all_asked(self, id: CheckpointId, bodies: Bodies) -> None:
        if not _once(self._ended, id):
            return
        tables = [Table.from_json(bodies[rank]) for rank in sorted(bodies)]
        division = divide(tables)
        self._made[division.id] = _Made(division, tables, id)
        _limit(self._made)
        self._council.announce(_topic("divided", id), division.to_json())

    def why_not(self, id: CheckpointId, shares: Mapping[int, Any]) -> tuple[str, int | None] | None:
        """Say why the images of all ranks, made as ``shares`` say, are no checkpoint, and the key of the tensor that it
        is about, for ``named``; None where they are one. It is for rank 0."""
        said = {rank: Share.from_json(share) for rank, share in shares.items() if share is not None}
        for name in {share.division for share in said.values()} - {None}:
            made = self._made.get(str(name))
            unknown = "how it was divided is not known any more; at the next save it is", None
            why = unknown if made is None else self._check(made, said)
            if why is not None:
                self._council.announce(_topic("undivided", id), None)
                return why
        return None

    def _check(self, made: _Made, shares: Mapping[int, Share]) -> tuple[str, int | None] | None:
        """Each rank must have written what the others left to it, and what they left out must be what it wrote."""
        for rank in set(map(int, made.division.owners)):
            share = shares.get(rank)
            if share is None or share.structure != made.tables[rank].structure:
                return (
                    f"rank {rank} saved other tensors than before, and others had left it some of those to write; at "
                    "the next save all divide anew",
                    None,
                )
        if not made.compared:
            found = (shares.get(rank) for rank in range(len(made.tables)))
            columns = [unpack((share and share.digests) or "") for share in found]
            try:
                made.wrong = find_difference(made.division, made.tables, columns)
            except ValueError:
                return "what the ranks hold alike was never compared; at the next save it is", None
            made.compared = True
        if made.wrong is None:
            return None
        key, ranks, others = made.wrong.key, made.wrong.ranks, made.wrong.others
        return (
            f"{{}} is on {ranks_named(ranks)} not what it is on {ranks_named(others)}: each has a tensor of that name "
            "and shape, and they are not replicas of one. Make it a DTensor, give the ranks' tensors different names, "
            "or wrap it in tierfall.item(..., on_resize='per_rank')",
            key,
        )

    def named(self, text: str, key: int | None = None) -> str:
        """Put the name of the tensor with ``key`` into a text, as far as this rank knows it."""
        if key is None:
            return text
        return text.replace("{}", self._names.get(key, "a tensor that they hold"))


def _once(seen: dict[CheckpointId, None], id: CheckpointId) -> bool:
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
