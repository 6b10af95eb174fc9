"""The ledger's entries, and what follows from all of them: worked out anew for those alone that may have changed.

A run may have thousands of checkpoints on its tiers, of which a save changes one. Whoever looks an entry up may change
it, so a look-up counts as a change; and what copies, saves or orders are at work on is *open*, and looked at each time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace

from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.types.lineage import AttemptStart, Key, abandoned_by
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.core.types.view import CheckpointView


class LedgerEntries(dict[CheckpointId, LedgerEntry]):
    """Entries by checkpoint; see the module. Going through ``values`` is no look-up: who changes what it finds there
    does so by the entry's own methods, or finds it open already."""

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

    def setdefault(self, id: CheckpointId, entry: LedgerEntry) -> LedgerEntry:
        if id not in self:
            self[id] = entry
        return self[id]

    def pop(self, id: CheckpointId) -> LedgerEntry | None:  # type: ignore[override]
        """Forget an entry, if it is there."""
        if id in self:
            del self._sorted[bisect_left(self._sorted, _key(id), key=_key)]
            self.changed.add(id)
        return super().pop(id, None)

    def peek(self, id: CheckpointId) -> LedgerEntry:
        """Look an entry up that is not to be changed."""
        return super().__getitem__(id)

    def ids(self, *, newest_first: bool = False) -> Iterator[CheckpointId]:
        """Name all, by step and attempt."""
        return reversed(self._sorted) if newest_first else iter(self._sorted)


def _key(id: CheckpointId) -> tuple[int, int]:
    return id.step, id.attempt


class AbandonedLines:
    """What the lines of saving have left behind: kept from one question to the next, while checkpoints come and go.

    An attempt that has committed something counts also when all of that is gone; one that has only saved something
    into memory counts while that is there.
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

    def know(self, starts: Mapping[Key, AttemptStart]) -> None:
        """Know how attempts began that have committed something, and of no others."""
        self._starts = dict(starts)
        self._outdated = True

    def goes_on_from(self, number: int, attempt_id: str) -> None:
        """Of attempts that share a number, the one of this id counts."""
        for key, start in self._starts.items():
            if key[0] == number:
                self._starts[key] = replace(start, passed_over=key[1] != attempt_id)
        self._outdated = True

    def note(self, id: CheckpointId, entry: LedgerEntry | None) -> None:
        """Know what there is of a checkpoint now."""
        self._forget(id)
        if entry is None or not entry.is_whole:
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
        """Name the abandoned ones, as it is now and comes to be."""
        if self._outdated:
            self._outdated = False
            self._is_left = abandoned_by([*self._starts.values(), *self._of_memory.values()])
            new = {id for id, (of, _) in self._whole.items() if self._is_left(id, of)}
            self._flipped |= new ^ self._abandoned
            self._abandoned = new
        return self._abandoned

    def take_flipped(self) -> Set[CheckpointId]:
        """Name those that were abandoned, or are no longer, since this was asked for last."""
        flipped, self._flipped = self._flipped, set()
        return flipped


class Overview:
    """What follows from all entries. ``look`` makes the view of one, of which it is said whether it is abandoned."""

    def __init__(
        self, entries: LedgerEntries, look: Callable[[LedgerEntry, bool], CheckpointView]
    ) -> None:
        self._entries = entries
        self._look = look
        self._open: dict[CheckpointId, LedgerEntry] = {}
        self._recent: set[CheckpointId] = set()
        self._past: set[CheckpointId] = set()
        self.lineage = AbandonedLines()
        self._views: dict[CheckpointId, CheckpointView] = {}
        self._counted: dict[CheckpointId, tuple[dict[str, int], dict[str, CopyState]]] = {}
        self._unverified: set[CheckpointId] = set()
        self._tombstoned: set[CheckpointId] = set()
        self._repairable: set[CheckpointId] = set()
        self._overtaken: set[CheckpointId] = set()
        self._used: Counter[str] = Counter()
        self._leaving: Counter[str] = Counter()
        self._whole: Counter[str] = Counter()

    def settle(self) -> None:
        """Nobody has an entry in hand any more that was looked up until now. Before, it may still be changed."""
        self._past |= self._recent
        self._recent.clear()

    def open(self) -> list[LedgerEntry]:
        """Those that are owed to a tier, lie in memory, or are being saved, copied, dropped or read by a lane; and some
        that were."""
        self._refresh()
        return list(self._open.values())

    def abandoned(self) -> Set[CheckpointId]:
        """Name what lines have left behind, as it is now and comes to be."""
        self._refresh()
        return self.lineage.abandoned()

    def used_bytes(self, tier: str) -> int:
        self._refresh()
        return self._used[tier]

    def leaving_bytes(self, tier: str) -> int:
        self._refresh()
        return self._leaving[tier]

    def whole_on(self, tier: str) -> int:
        """How many copies can be read whole there."""
        self._refresh()
        return self._whole[tier]

    def overtaken(self) -> list[LedgerEntry]:
        """Those of which a tier has failed to take a copy, so that newer ones may be there before it."""
        self._refresh()
        return [self._entries[id] for id in self._overtaken]

    def repairable(self) -> list[LedgerEntry]:
        """Those with a copy that was found damaged, and is not forgotten: looked up, as they may be owed one again."""
        self._refresh()
        return [self._entries[id] for id in sorted(self._repairable, key=_key)]

    def has_tombstoned(self) -> bool:
        """Say whether a person has deleted one that is there yet."""
        self._refresh()
        return bool(self._tombstoned)

    def has_unverified(self) -> bool:
        """Say whether a tier holds a committed copy that nobody has verified."""
        self._refresh()
        return bool(self._unverified)

    def views(self) -> tuple[CheckpointView, ...]:
        """Views of all, by step and attempt. Those of open ones are made anew each time."""
        self._refresh()
        left = self.lineage.abandoned()
        for id in self.lineage.take_flipped():
            self._views.pop(id, None)
        for id, entry in list(self._open.items()):
            if entry.is_settled:
                del self._open[id]
        found = []
        for id in self._entries.ids():
            view = self._views.get(id)
            if view is None:
                view = self._look(self._entries.peek(id), id in left)
                if id not in self._open and id not in self._recent:
                    self._views[id] = view
            found.append(view)
        return tuple(found)

    def _refresh(self) -> None:
        changed = self._entries.changed
        self._recent |= changed
        changed.clear()
        if not self._recent and not self._past:
            return
        for id in self._recent | self._past:
            self._views.pop(id, None)
            entry = self._entries.peek(id) if id in self._entries else None
            if entry is None or entry.is_settled:
                self._open.pop(id, None)
            else:
                self._open[id] = entry
            self._count(id, entry)
            _keep_if(self._unverified, id, entry is not None and entry.is_unverified)
            _keep_if(self._overtaken, id, entry is not None and bool(entry.overtaken))
            _keep_if(self._repairable, id, entry is not None and bool(entry.repairable))
            _keep_if(self._tombstoned, id, entry is not None and entry.tombstoned)
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
