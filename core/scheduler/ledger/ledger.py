"""The ledger: the one record of every copy of every checkpoint. Only the coordinator's thread writes it.

It keeps facts and answers questions; what follows from them is the coordinator's and the policies' business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import replace

from tierfall.core.format.catalog import KnownCheckpoint, Listing, overtaken, starts_in
from tierfall.core.scheduler.ledger.entry import LedgerEntry, entry_of
from tierfall.core.scheduler.ledger.overview import LedgerEntries, Overview
from tierfall.core.scheduler.ledger.throughput import TierThroughput
from tierfall.core.types import keys
from tierfall.core.types.values import CheckpointId, CopyState, LossClass, Shard
from tierfall.core.types.view import CheckpointView, CopyView, TierRules, View

ALONE = Shard(0, 1)


class Ledger:
    """Entries by checkpoint, and the picture of them that policies see."""

    def __init__(self, rules: tuple[TierRules, ...], host: str, *, shard: Shard = ALONE) -> None:
        """``shard`` is this rank's part of every checkpoint that is saved now. ``partial`` is as in ``note_partial``;
        ``scattered`` are those whose parts are all somewhere, but not on one tier: they can be restored, and no rank
        flushes its part, as another may have none to bring; ``deleted`` bear a tombstone where any rank looked.
        ``knows_good``: this start has restored, or has committed a checkpoint of its own; before, no rule drops
        anything. ``reading`` counts who is about to read a checkpoint: its copies below memory do not go meanwhile, but
        by a person's order. ``failing`` says of tiers why they take no copies at present, and of memory why what lies
        there ends with this process. ``now_s`` is the time of the last step; ``read_rates`` says how fast tiers were
        seen to be read."""
        self.shard = shard
        self.rules = rules
        self.host = host
        self.entries = LedgerEntries()
        self._overview = Overview(self.entries, self._view)
        self.unfinished: dict[tuple[str, CheckpointId], int] = {}
        self.partial: set[tuple[str, CheckpointId]] = set()
        self.scattered: frozenset[CheckpointId] = frozenset()
        self.deleted: frozenset[CheckpointId] = frozenset()
        self.knows_good = False
        self.reading: Counter[CheckpointId] = Counter()
        self.failing: dict[str, BaseException] = {}
        self.restored_from: CheckpointId | None = None
        self.attempt: int | None = None
        self.least_ordinal = 0
        self.now_s = 0.0
        self.wall_offset_s = 0.0
        self.found_pinned: set[CheckpointId] = set()
        """What some rank found a pin of at the start, perhaps where this one has no copy."""
        self.rates = TierThroughput()

    def set_clock(self, *, now_s: float, wall_time_s: float) -> None:
        """Say what time it is: on the clock that ``step`` is told of, and on the wall. From here on the first one
        counts alone, so that a wall clock that is set anew makes nothing older."""
        self.now_s, self.wall_offset_s = now_s, wall_time_s - now_s

    def load(self, known: Iterable[KnownCheckpoint], listings: Iterable[Listing]) -> None:
        """Take over what tiers were found to hold."""
        known = tuple(known)
        late = overtaken(known)
        for checkpoint in known:
            entry = entry_of(checkpoint.id, checkpoint.commit, self.shard)
            for tier, copy in checkpoint.copies.items():
                if copy.damage is not None:
                    entry.bytes[tier] = copy.bytes
                    entry.note_damage(tier, str(copy.damage), repairable=copy.repairable)
                else:
                    entry.set_state(tier, copy.state, copy.bytes)
                entry.marks[tier] = copy.marks
            entry.overtaken.update(late.get(checkpoint.id, ()))
            self.entries[checkpoint.id] = entry
        listings = tuple(listings)
        self._overview.lineage.know({start.key: start for start in starts_in(listings)})
        for listing in listings:
            for id, bytes in listing.unfinished.items():
                self.unfinished[listing.tier, id] = bytes

    def note_marks(self, marks: Mapping[str, Mapping[CheckpointId, frozenset[str]]]) -> None:
        """Note the marks that ranks together found, by tier: all decide alike, whoever of them read a mark."""
        for tier, found in marks.items():
            for id, names_of_marks in found.items():
                if keys.PIN_MARK in names_of_marks:
                    self.found_pinned.add(id)
                if self._has(tier, id):
                    entry = self.entries[id]
                    entry.marks[tier] = entry.marks.get(tier, frozenset()) | names_of_marks

    def note_partial(self, listings: Iterable[Listing]) -> None:
        """Note what has a commit record on the part of a tier that is seen here, and is not whole on all of it: a start
        died while it was committed there, or dropped; or a machine is missing."""
        self.partial = {
            (listing.tier, copy.id)
            for listing in listings
            for copy in listing.copies
            if copy.state is CopyState.COMMITTED and copy.damage is None
            if not self._has(listing.tier, copy.id)
        }

    def _has(self, tier: str, id: CheckpointId) -> bool:
        entry = self.entries.get(id)
        return entry is not None and (tier in entry.states or tier in entry.damage)

    def go_on_from(self, checkpoint: CheckpointId | None, *, attempt: int) -> None:
        """Note what was restored, and as which attempt the line goes on."""
        self.restored_from, self.attempt = checkpoint, attempt
        self.least_ordinal = 0
        self.knows_good = True
        entry = None if checkpoint is None else self.entries.get(checkpoint)
        if entry is not None and entry.attempt_id is not None:
            # of attempts that share its number it is the one that counts now
            self._overview.lineage.goes_on_from(entry.id.attempt, entry.attempt_id)

    def knows_what_is_good(self) -> None:
        """Note that copies may be dropped by rule from now on."""
        self.knows_good = True

    def ordered(self) -> list[LedgerEntry]:
        """Entries in the order in which they came to be."""
        return sorted(self.entries.values(), key=lambda entry: entry.order)

    def forget_if_gone(self, entry: LedgerEntry) -> None:
        if not (entry.states or entry.owed or entry.damage or entry.snapshot):
            self.entries.pop(entry.id)

    def whole(self, entry: LedgerEntry) -> bool:
        """Say whether some tier holds the checkpoint whole."""
        return entry.is_whole

    def settle(self) -> None:
        """Begin a step: nobody has an entry in hand any more that was looked up before."""
        self._overview.settle()

    def open(self) -> list[LedgerEntry]:
        """Entries that are owed to a tier, lie in memory, or are being saved, copied, dropped or read by a lane."""
        return self._overview.open()

    def is_read_on(self, tier: str) -> bool:
        """Say whether a lane or somebody else reads a whole copy there."""
        read = [id for id, count in self.reading.items() if count > 0 and tier != self.host]
        return any(
            id in self.entries and self.entries.peek(id).readable_on(tier) for id in read
        ) or any(entry.readable_on(tier) and entry.leases.get(tier, 0) > 0 for entry in self.open())

    def holds_any(self, tier: str) -> bool:
        """Say whether a whole copy lies on a tier."""
        return self.count_on(tier) > 0

    def count_on(self, tier: str) -> int:
        """How many whole copies lie on a tier."""
        return self._overview.whole_on(tier)

    def abandoned(self) -> Set[CheckpointId]:
        """Name what the present line left behind, as it is now and comes to be; an attempt that has committed something
        counts also when all of that is gone."""
        return self._overview.abandoned()

    def view(
        self,
        held: Collection[CheckpointId] = (),
        *,
        settling: Collection[CheckpointId] = (),
        restoring: bool = False,
    ) -> View:
        """Make the picture for policies; ``held`` are not to be touched, as if they were being read; ``settling`` and
        ``restoring`` are as in the view."""
        return View(
            tiers=self._tiers(),
            checkpoints=self._views(held, settling),
            failing=frozenset(self.failing),
            restored_from=self.restored_from,
            attempt=self.attempt,
            restoring=restoring,
            wall_time_s=self.now_s + self.wall_offset_s,
            many_ranks=self.shard.world_size > 1,
            read_bytes_per_s=self.rates.read_rates(),
        )

    def _tiers(self) -> tuple[TierRules, ...]:
        """The rules of all tiers; where memory has lost its file, what lies there survives nothing."""
        if self.host not in self.failing:
            return self.rules
        return tuple(
            replace(rules, survives=LossClass.NONE) if rules.name == self.host else rules
            for rules in self.rules
        )

    def _views(
        self, held: Collection[CheckpointId], settling: Collection[CheckpointId]
    ) -> tuple[CheckpointView, ...]:
        views = self._overview.views()
        reading = {id for id, count in self.reading.items() if count > 0}
        special = reading.union(held, settling)
        if not special:
            return views
        return tuple(
            self._special(view, held, settling, reading) if view.id in special else view
            for view in views
        )

    def _special(
        self,
        view: CheckpointView,
        held: Collection[CheckpointId],
        settling: Collection[CheckpointId],
        reading: Collection[CheckpointId],
    ) -> CheckpointView:
        is_held, is_read = view.id in held, view.id in reading
        copies = {
            tier: replace(copy, leased=copy.leased or is_held or (is_read and tier != self.host))
            for tier, copy in view.copies.items()
        }
        return replace(view, copies=copies, settling=view.id in settling)

    def _view(self, entry: LedgerEntry, abandoned: bool) -> CheckpointView:
        commit = entry.commit
        return CheckpointView(
            id=entry.id,
            ordinal=entry.ordinal,
            started_from=entry.started_from,
            abandoned=abandoned,
            pinned=entry.pinned,
            tombstoned=entry.tombstoned,
            copies={
                tier: CopyView(
                    state=state,
                    bytes=entry.bytes.get(tier, 0),
                    leased=entry.leases.get(tier, 0) > 0,
                    verified=tier in entry.verified,
                )
                for tier, state in entry.states.items()
            },
            owed=frozenset(entry.owed),
            overtaken=frozenset(entry.overtaken),
            at_end=entry.commit is not None and entry.commit.line.at_end,
            metrics=commit.metrics if commit else {},
            tags=entry.tags,
            wall_time_s=commit.wall_time_s if commit else None,
        )

    @property
    def all_live(self) -> bool:
        """Say whether nothing is left behind, or deleted by a person."""
        return not self.abandoned() and not self._overview.has_tombstoned()

    def overtaken(self) -> list[LedgerEntry]:
        """Name those that some tier has failed to take."""
        return self._overview.overtaken()

    def repairable(self) -> list[LedgerEntry]:
        """Name those with a damaged copy that can be written anew, or may have to go."""
        return self._overview.repairable()

    @property
    def has_unverified(self) -> bool:
        """Say whether a tier holds a committed copy that nobody has verified."""
        return self._overview.has_unverified()

    def unverified(self, tier: str) -> list[LedgerEntry]:
        """Name the committed copies on a tier that nobody has verified, newest first; what was left behind, or
        deleted, is not among them: nothing relies on it."""
        left = self.abandoned()
        return [
            entry
            for entry in map(self.entries.peek, self.entries.ids(newest_first=True))
            if entry.state(tier) is CopyState.COMMITTED and tier not in entry.verified
            if entry.id not in left and not entry.tombstoned
        ]

    def used_bytes(self, tier: str) -> int:
        """Bytes that a tier holds of this run, half-done copies included."""
        return self._overview.used_bytes(tier) + sum(
            size for (name, _), size in self.unfinished.items() if name == tier
        )

    def leaving_bytes(self, tier: str) -> int:
        """Bytes of copies that are on their way out of a tier, or are to be tried again."""
        return self._overview.leaving_bytes(tier)
