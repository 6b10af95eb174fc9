"""The ledger's entries, and summaries of all of them, updated only for entries that may have changed.

A run may have thousands of checkpoints, of which a save changes one. A component that looks an entry up may change it,
so a lookup counts as a change. Entries on which saves, copies or commands work are *open*, and updated each time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace

from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.types.lineage import AttemptStart, Key, abandoned_by
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.core.types.view import CheckpointView


class LedgerEntries(dict[CheckpointId, LedgerEntry]):
    """Entries by checkpoint; see the module. Iterating over ``values`` is no lookup: an entry found there is changed by
    its own methods, which report the change, or is open already."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: set[CheckpointId] = set()
        self._sorted: list[CheckpointId] = []

    def __getitem__(self, id: CheckpointId) -> LedgerEntry:
        entry = super().__getitem__(id)
        self.changed.add(id)
        return entry

    def get(self, id: CheckpointId) -> LedgerEntry | None:  # type: ignore[override]
        entry = super().get(id)
        if entry is not None:
            self.changed.add(id)
        return entry

    def __setitem__(self, id: CheckpointId, entry: LedgerEntry) -> None:
        if id not in self:
            insort(self._sorted, id, key=_key)
        entry.changed = self.changed
        self.changed.add(id)
        super().__setitem__(id, entry)

    def pop(self, id: CheckpointId) -> LedgerEntry | None:  # type: ignore[override]
        """Remove an entry, if it is there."""
        if id in self:
            del self._sorted[bisect_left(self._sorted, _key(id), key=_key)]
            self.changed.add(id)
        return super().pop(id, None)

    def peek(self, id: CheckpointId) -> LedgerEntry:
        """Return an entry that the caller does not change."""
        return super().__getitem__(id)

    def ids(self, *, newest_first: bool = False) -> Iterator[CheckpointId]:
        """Yield all checkpoints, sorted by step and attempt."""
        return reversed(self._sorted) if newest_first else iter(self._sorted)


def _key(id: CheckpointId) -> tuple[int, int]:
    return id.step, id.attempt


class AbandonedLines:
    """The abandoned checkpoints, updated as checkpoints are added and removed.

    An attempt that has committed something counts also when all of that is deleted; one that has only saved into memory
    counts while such an image is there.
    """

    def __init__(self) -> None:
        self._starts: dict[Key, AttemptStart] = {}
        self._of_memory: dict[Key, AttemptStart] = {}
        self._whole: dict[CheckpointId, tuple[str | None, Key | None]] = {}
        self._counts: Counter[Key] = Counter()
        self._abandoned: set[CheckpointId] = set()
        self._flipped: set[CheckpointId] = set()
        self._is_left: Callable[[CheckpointId, str | None], bool] = abandoned_by(())
        self._outdated = False

    def set_starts(self, starts: Mapping[Key, AttemptStart]) -> None:
        """Set the starts of the attempts that have committed something."""
        self._starts = dict(starts)
        self._outdated = True

    def choose_attempt(self, number: int, attempt_id: str) -> None:
        """Of attempts that share a number, count the one with this id."""
        for key, start in self._starts.items():
            if key[0] == number:
                self._starts[key] = replace(start, passed_over=key[1] != attempt_id)
        self._outdated = True

    def note(self, id: CheckpointId, entry: LedgerEntry | None) -> None:
        """Update a checkpoint; None: it was removed."""
        self._forget(id)
        if entry is None or not (entry.is_whole or entry.damage):
            return
        start = entry.start
        self._whole[id] = (entry.attempt_id, None if start is None else start.key)
        if start is not None:
            self._note_start(start, committed=CopyState.COMMITTED in entry.states.values())
        if not self._outdated and self._is_left(id, entry.attempt_id):
            self._abandoned.add(id)
            self._flipped.add(id)

    def _note_start(self, start: AttemptStart, *, committed: bool) -> None:
        self._counts[start.key] += 1
        if start.key in self._starts:
            return
        if start.key not in self._of_memory:
            self._of_memory[start.key] = start
            self._outdated = True
        if committed:
            self._starts[start.key] = self._of_memory.pop(start.key)

    def _forget(self, id: CheckpointId) -> None:
        _, key = self._whole.pop(id, (None, None))
        if key is not None:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                self._outdated |= self._of_memory.pop(key, None) is not None
        if id in self._abandoned:
            self._abandoned.discard(id)
            self._flipped.add(id)

    def abandoned(self) -> Set[CheckpointId]:
        """Return the abandoned checkpoints: a live set."""
        if self._outdated:
            self._outdated = False
            self._is_left = abandoned_by([*self._starts.values(), *self._of_memory.values()])
            new = {id for id, (of, _) in self._whole.items() if self._is_left(id, of)}
            self._flipped |= new ^ self._abandoned
            self._abandoned = new
        return self._abandoned

    def take_flipped(self) -> Set[CheckpointId]:
        """Return the checkpoints whose membership has changed since the last call."""
        flipped, self._flipped = self._flipped, set()
        return flipped


class Overview(ABC):
    """All entries, and summaries of them."""

    def __init__(self) -> None:
        self.entries = LedgerEntries()
        self._open: dict[CheckpointId, LedgerEntry] = {}
        self._recent: set[CheckpointId] = set()
        self._past: set[CheckpointId] = set()
        self.lineage = AbandonedLines()
        self._views: dict[CheckpointId, CheckpointView] = {}
        self._counted: dict[CheckpointId, tuple[dict[str, int], dict[str, CopyState]]] = {}
        self._deleted: set[CheckpointId] = set()
        self._repairable: set[CheckpointId] = set()
        self._overtaken: set[CheckpointId] = set()
        self._used: Counter[str] = Counter()
        self._leaving: Counter[str] = Counter()
        self._whole: Counter[str] = Counter()

    @abstractmethod
    def _view(self, entry: LedgerEntry, *, abandoned: bool) -> CheckpointView:
        """Return the view of an entry."""

    def refresh(self) -> None:
        """Begin a step: entries that were looked up until now do not change any more; update the summaries once more
        for them."""
        self._past |= self._recent
        self._recent.clear()

    def open(self) -> list[LedgerEntry]:
        """Return the entries that are owed, in memory, or being saved, copied, deleted or read; and some that were."""
        self._refresh()
        return list(self._open.values())

    def abandoned(self) -> Set[CheckpointId]:
        """Return the abandoned checkpoints: a live set, which changes with the ledger. An attempt that has committed
        something counts also when all of that is deleted."""
        self._refresh()
        return self.lineage.abandoned()

    def used_bytes(self, tier: str) -> int:
        """Return the bytes of all copies on a tier."""
        self._refresh()
        return self._used[tier]

    def bytes_being_deleted(self, tier: str) -> int:
        """Return the bytes of copies whose deletion is in progress or is retried."""
        self._refresh()
        return self._leaving[tier]

    def whole_copies_on(self, tier: str) -> int:
        """Return the number of whole copies on a tier."""
        self._refresh()
        return self._whole[tier]

    def overtaken(self) -> list[LedgerEntry]:
        """Return the entries of which a copy failed, so that newer ones may be committed before it."""
        self._refresh()
        return [self.entries[id] for id in self._overtaken]

    def repairable(self) -> list[LedgerEntry]:
        """Return the entries with a damaged copy that a rule may delete."""
        self._refresh()
        return [self.entries.peek(id) for id in sorted(self._repairable, key=_key)]

    def deleted(self) -> list[LedgerEntry]:
        """Return the entries that a person has deleted, while there is something left of them."""
        self._refresh()
        return [self.entries.peek(id) for id in sorted(self._deleted, key=_key)]

    def views(self) -> tuple[CheckpointView, ...]:
        """Return the views of all entries, by step and attempt. Those of open entries are never cached."""
        self._refresh()
        abandoned = self.lineage.abandoned()
        for id in self.lineage.take_flipped():
            self._views.pop(id, None)
        for id, entry in list(self._open.items()):
            if entry.is_settled:
                del self._open[id]
        found = []
        for id in self.entries.ids():
            view = self._views.get(id)
            if view is None:
                view = self._view(self.entries.peek(id), abandoned=id in abandoned)
                if id not in self._open and id not in self._recent:
                    self._views[id] = view
            found.append(view)
        return tuple(found)

    def _refresh(self) -> None:
        changed = self.entries.changed
        self._recent |= changed
        changed.clear()
        if not self._recent and not self._past:
            return
        for id in self._recent | self._past:
            self._views.pop(id, None)
            entry = self.entries.peek(id) if id in self.entries else None
            if entry is None or entry.is_settled:
                self._open.pop(id, None)
            else:
                self._open[id] = entry
            self._count(id, entry)
            _keep_if(self._overtaken, id, entry is not None and bool(entry.overtaken))
            _keep_if(self._repairable, id, entry is not None and bool(entry.repairable))
            _keep_if(self._deleted, id, entry is not None and entry.deleted)
        self._past.clear()

    def _count(self, id: CheckpointId, entry: LedgerEntry | None) -> None:
        old = self._counted.get(id)
        new = None if entry is None else (dict(entry.bytes), dict(entry.states))
        if old == new:
            return
        if old is not None:
            self._add(*old, -1)
            del self._counted[id]
        self.lineage.note(id, entry)
        if new is None:
            return
        self._add(*new, 1)
        self._counted[id] = new

    def _add(self, bytes: dict[str, int], states: dict[str, CopyState], sign: int) -> None:
        for tier, size in bytes.items():
            self._used[tier] += sign * size
            if states.get(tier) is CopyState.LEAVING:
                self._leaving[tier] += sign * size
        for tier, state in states.items():
            if state in (CopyState.SEALED, CopyState.COMMITTED):
                self._whole[tier] += sign


def _keep_if(ids: set[CheckpointId], id: CheckpointId, holds: bool) -> None:
    if holds:
        ids.add(id)
    else:
        ids.discard(id)
