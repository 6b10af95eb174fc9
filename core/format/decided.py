"""What is decided about the checkpoints of a run: entries that are created once, and never changed.

A person's pin, tag or deletion is an entry in the folder ``decided`` of each stored tier that the command reaches; the
lists of all tiers are united. Damage that a reader has found is an entry of one tier's list, which concerns the copy on
that tier alone. The name of an entry says everything; an entry cannot be half written, or damaged.

    000001-pin-step-00000400-a0007-0123456789abcdef
    000002-unpin-step-00000400-a0007-0123456789abcdef

Of a word and its opposite the entry with the highest number counts; of equal numbers, which two processes gave at the
same moment, the one that keeps the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from tierfall.core.format import documents
from tierfall.core.types import keys
from tierfall.core.types.values import CheckpointId

FENCE_VALID_S = 1.0
"""How many seconds what was read of a tier's fence, or of its list, may be relied on."""


class Word(StrEnum):
    """What an entry says of a checkpoint. A deletion has no opposite; a pin made at the same moment prevents it."""

    PIN = "pin"
    UNPIN = "unpin"
    TAG = "tag"
    UNTAG = "untag"
    DELETED = "deleted"
    DAMAGED = "damaged"
    MENDED = "mended"


_WORDS = frozenset(map(str, Word))
_ANY_ATTEMPT = "0" * 16
"""The attempt of a checkpoint without a commit record that can be read: such an entry is about each of that number."""
_NUMBER_MAX = 10**9
"""A name with such a number is none of tierfall's: what follows it could not be named."""
_OF_ONE_TIER = (Word.DAMAGED, Word.MENDED)
_WITH_TAG = (Word.TAG, Word.UNTAG)


@dataclass(frozen=True, slots=True, order=True)
class Decided:
    """One entry. ``attempt_id`` is the first half of the id of the attempt that saved the checkpoint: another attempt
    of that number may have saved one of the same step. ``tag`` is '' but for the words ``tag`` and ``untag``."""

    number: int
    word: Word
    checkpoint: CheckpointId
    attempt_id: str
    tag: str = ""

    @property
    def name(self) -> str:
        """The last component of its key."""
        return keys.decided_name(self.number, self.word, self.checkpoint, self.attempt_id, self.tag)

    @classmethod
    def parse(cls, name: str) -> Decided | None:
        """Parse the name of an entry; None for another name, and for a word that this version does not know."""
        parsed = keys.parse_decided(name)
        if parsed is None:
            return None
        number, word, checkpoint, attempt_id, tag = parsed
        if word not in _WORDS or bool(tag) is not (word in _WITH_TAG) or number >= _NUMBER_MAX:
            return None
        return cls(number, Word(word), checkpoint, attempt_id, tag)

    def encode(self, reason: str, wall_time_s: float) -> bytes:
        """The content of its object, for people: nothing is decided by it."""
        return documents.seal(
            {
                "number": self.number,
                "word": str(self.word),
                "step": self.checkpoint.step,
                "attempt": self.checkpoint.attempt,
                "attempt_id": self.attempt_id,
                "tag": self.tag,
                "wall_time_s": wall_time_s,
                "reason": reason,
            }
        )


def short_id(attempt_id: str | None) -> str:
    """The attempt id in an entry: its first 16 digits."""
    if attempt_id is None:
        return _ANY_ATTEMPT
    if len(attempt_id) >= 16 and not set(attempt_id) - set("0123456789abcdef"):
        return attempt_id[:16]
    return documents.sha256(attempt_id.encode()).removeprefix("sha256:")[:16]  # a crafted one


class DecidedList:
    """The entries of a run that are known: those of one tier, or of several together. A value.

        >>> known = DecidedList().adding(Word.PIN, CheckpointId(400, 7), "0123456789abcdef" * 2)
        >>> known.is_pinned(CheckpointId(400, 7), "0123456789abcdef" * 2)
        True

    Where ``attempt_id`` is asked for and None, since every commit record of the checkpoint is damaged, the entries of
    all attempts of its number count.
    """

    def __init__(self, entries: Iterable[Decided] = ()) -> None:
        self.entries = frozenset(entries)

    @classmethod
    def parse(cls, names: Iterable[str]) -> DecidedList:
        """Make the list of the entries with these names; other names are left out."""
        return cls(filter(None, map(Decided.parse, names)))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all entries, in the order of their numbers."""
        return tuple(entry.name for entry in sorted(self.entries))

    def __or__(self, other: DecidedList) -> DecidedList:
        if other.entries <= self.entries:
            return self
        return DecidedList(self.entries | other.entries)

    def __sub__(self, other: DecidedList) -> DecidedList:
        return DecidedList(self.entries - other.entries)

    def __iter__(self) -> Iterator[Decided]:
        return iter(sorted(self.entries))

    def __bool__(self) -> bool:
        return bool(self.entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecidedList) and self.entries == other.entries

    def __hash__(self) -> int:
        return hash(self.entries)

    def __repr__(self) -> str:
        return f"DecidedList({', '.join(self.names)})"

    @property
    def of_all_tiers(self) -> DecidedList:
        """Without the damage of copies, which concerns one tier."""
        return DecidedList(e for e in self.entries if e.word not in _OF_ONE_TIER)

    def of(self, id: CheckpointId, attempt_id: str | None) -> tuple[Decided, ...]:
        """The entries about a checkpoint."""
        found = self._by_checkpoint.get(id, ())
        if attempt_id is None or not found:
            return found
        named = (short_id(attempt_id), _ANY_ATTEMPT)
        return tuple(entry for entry in found if entry.attempt_id in named)

    @cached_property
    def _by_checkpoint(self) -> dict[CheckpointId, tuple[Decided, ...]]:
        found: dict[CheckpointId, tuple[Decided, ...]] = {}
        for entry in sorted(self.entries):
            found[entry.checkpoint] = (*found.get(entry.checkpoint, ()), entry)
        return found

    @property
    def checkpoints(self) -> frozenset[CheckpointId]:
        """The checkpoints that have an entry."""
        return frozenset(self._by_checkpoint)

    def is_pinned(self, id: CheckpointId, attempt_id: str | None) -> bool:
        return self._holds(id, attempt_id, Word.PIN, Word.UNPIN)

    def is_deleted(self, id: CheckpointId, attempt_id: str | None) -> bool:
        """Whether a person has deleted it; a pinned one is kept."""
        deleted = any(entry.word is Word.DELETED for entry in self.of(id, attempt_id))
        return deleted and not self.is_pinned(id, attempt_id)

    def is_damaged(self, id: CheckpointId, attempt_id: str | None) -> bool:
        """Whether the copy on the tier of this list was found damaged, and not rewritten since."""
        return self._holds(id, attempt_id, Word.DAMAGED, Word.MENDED)

    def tags(
        self, id: CheckpointId, attempt_id: str | None, given: Iterable[str] = ()
    ) -> frozenset[str]:
        """The tags of a checkpoint, which was ``given`` some at its save."""
        found = self.of(id, attempt_id)
        if not found:
            return frozenset(given)
        added = {entry.tag for entry in found if entry.word is Word.TAG}
        removed = {entry.tag for entry in found if entry.word is Word.UNTAG}
        kept = {tag for tag in added if self._holds(id, attempt_id, Word.TAG, Word.UNTAG, tag)}
        return frozenset((set(given) - removed) | kept)

    def damage(self, id: CheckpointId, attempt_id: str | None) -> Decided | None:
        """The newest entry of damage that holds; None if the copy is not known to be damaged."""
        if not self.is_damaged(id, attempt_id):
            return None
        return max(entry for entry in self.of(id, attempt_id) if entry.word is Word.DAMAGED)

    def _holds(
        self, id: CheckpointId, attempt_id: str | None, word: Word, opposite: Word, tag: str = ""
    ) -> bool:
        found = [entry for entry in self.of(id, attempt_id) if entry.tag == tag]
        said = max((entry.number for entry in found if entry.word is word), default=0)
        denied = max((entry.number for entry in found if entry.word is opposite), default=0)
        return said > 0 and said >= denied

    def next(self, word: Word, id: CheckpointId, attempt_id: str | None, tag: str = "") -> Decided:
        """Make an entry that counts more than all of these."""
        number = 1 + max((entry.number for entry in self.entries), default=0)
        return Decided(number, word, id, short_id(attempt_id), tag)

    def adding(
        self, word: Word, id: CheckpointId, attempt_id: str | None, tag: str = ""
    ) -> DecidedList:
        """The list with that entry."""
        return self | DecidedList([self.next(word, id, attempt_id, tag)])
