"""The ledger: the one record of every copy of every checkpoint. Only the coordinator's thread writes it.

It keeps facts and answers questions; what follows from them is the coordinator's and the policies' business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from tierfall.core.capture.handle import SaveHandle
from tierfall.core.capture.snapshot import HostRegion, Share, Snapshot
from tierfall.core.format.catalog import KnownCheckpoint, Listing, overtaken, starts_in
from tierfall.core.format.commit_files import plain
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Commit, Geometry, Manifest, geometry
from tierfall.core.scheduler.ledger.entries import LedgerEntries, Overview
from tierfall.core.types import keys
from tierfall.core.types.errors import FlushError
from tierfall.core.types.lineage import AttemptStart
from tierfall.core.types.values import CheckpointId, CopyState, LossClass, Shard
from tierfall.core.types.view import CheckpointView, CopyView, TierRules, View


@dataclass(slots=True, kw_only=True)
class LedgerEntry:
    """One checkpoint; its commit record is the plain one, however tiers pack the image.

    ``final_chunks`` counts the leading chunks of its image in memory that will not change; ``damage`` says per tier
    what is wrong with the copy there: such a copy has no state, and protects nothing. It takes room and bears marks;
    those ``repairable`` are this checkpoint's own, and are written anew from a good copy. ``verified`` names the tiers
    whose copy this run has written, or has held against its digests whole. ``in_doubt`` names tiers
    where a try to commit it ended without an answer. ``awaits_others``: this rank's image is sealed in memory, others'
    may not be; ``landed`` names tiers that have it, and not all others' yet; ``lost`` says that it was given up while
    its capture was under way; ``share`` is as its snapshot has it. ``failures`` are by tier; ``set_aside`` names tiers
    that this start does not try to bring it to any more, as it alone cannot be written there, with the reason;
    ``overtaken`` names tiers that failed to take it, so that newer ones may be there before it. ``parts``: other ranks
    than those of now saved it, and these are the images that this rank brings to tiers for them, each an entry that
    shares what is known of the checkpoint; there may be none.
    """

    id: CheckpointId
    ordinal: int
    started_from: CheckpointId | None
    shard: Shard
    attempt_id: str | None = None
    commit: Commit | None = None
    manifest: Manifest | None = None
    geometry: Geometry | None = None
    region: HostRegion | None = None
    snapshot: Snapshot | None = None
    handle: SaveHandle | None = None
    share: Share | None = None
    final_chunks: int = 0
    adopted: bool = False
    awaits_others: bool = False
    lost: bool = False
    deleted: bool = False
    marks: dict[str, frozenset[str]] = field(default_factory=dict)
    states: dict[str, CopyState] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    damage: dict[str, str] = field(default_factory=dict)
    verified: set[str] = field(default_factory=set)
    repairable: set[str] = field(default_factory=set)
    leases: dict[str, int] = field(default_factory=dict)
    owed: set[str] = field(default_factory=set)
    landed: set[str] = field(default_factory=set)
    in_doubt: set[str] = field(default_factory=set)
    failures: dict[str, CopyFailures] = field(default_factory=dict)
    set_aside: dict[str, BaseException] = field(default_factory=dict)
    overtaken: set[str] = field(default_factory=set)
    parts: tuple[LedgerEntry, ...] | None = None
    changed: set[CheckpointId] = field(default_factory=set, repr=False, compare=False)

    @property
    def is_settled(self) -> bool:
        """Say whether nothing is at work on it, and nothing is to be done: it changes only when it is looked up."""
        return not (
            self.owed
            or self.set_aside
            or self.landed
            or self.in_doubt
            or self.awaits_others
            or self.lost
            or self.snapshot is not None
            or self.region is not None
            or self.parts is not None
            or any(self.leases.values())
            or any(
                state not in (CopyState.COMMITTED, CopyState.LEAVING)
                for state in self.states.values()
            )
        )

    @property
    def is_unverified(self) -> bool:
        """Say whether a tier holds a committed copy of it that nobody has verified."""
        return any(
            state is CopyState.COMMITTED and tier not in self.verified
            for tier, state in self.states.items()
        )

    @property
    def is_whole(self) -> bool:
        """Say whether some tier holds it whole."""
        return any(
            state in (CopyState.SEALED, CopyState.COMMITTED) for state in self.states.values()
        )

    def part(self, shard: Shard, region: HostRegion, manifest: Manifest) -> LedgerEntry:
        """Make the entry of an image that another rank saved."""
        return replace(
            self,
            shard=shard,
            region=region,
            manifest=manifest,
            geometry=geometry(manifest),
            adopted=True,
            landed=set(),
        )

    def next_part(self, tier: str) -> LedgerEntry | None:
        """Return what this rank is to bring to a tier next; None where it has brought all."""
        own = (self,) if self.parts is None else self.parts
        return next((part for part in own if tier not in part.landed), None)

    @property
    def regions(self) -> tuple[HostRegion, ...]:
        """The memory that its images of this rank take."""
        return tuple(e.region for e in (self, *(self.parts or ())) if e.region is not None)

    def free(self) -> None:
        """Give that memory back."""
        for one in (self, *(self.parts or ())):
            if one.region is not None:
                one.region.release()
                one.region = None

    @property
    def pieces(self) -> Spliced | None:
        """The table of its tensors, where it is known."""
        known = self.manifest or self.snapshot
        return None if known is None else known.pieces

    @property
    def table(self) -> str:
        """A short digest of that table, or an empty one where it is not known."""
        known = self.manifest or self.snapshot
        return "" if known is None else known.structure.removeprefix("sha256:")[:TABLE_DIGITS]

    @property
    def pinned(self) -> bool:
        return any(keys.PIN_MARK in marks for marks in self.marks.values())

    @property
    def tombstoned(self) -> bool:
        """A person deleted it: here, or by a mark that was found."""
        return self.deleted or any(keys.TOMBSTONE_MARK in m for m in self.marks.values())

    @property
    def tags(self) -> frozenset[str]:
        given = self.commit.tags if self.commit else ()
        marks = {mark for marks in self.marks.values() for mark in marks}
        return keys.tags_of(given, marks) if marks else frozenset(given)

    def set_mark(self, tier: str, name: str, *, there: bool) -> None:
        self.changed.add(self.id)
        old = self.marks.get(tier, frozenset())
        self.marks[tier] = old | {name} if there else old - {name}

    @property
    def start(self) -> AttemptStart | None:
        """How its attempt began; None where every commit record is damaged."""
        if self.attempt_id is None:
            return None
        return AttemptStart(
            attempt=self.id.attempt,
            attempt_id=self.attempt_id,
            started_from=self.started_from,
            began_s=self.commit.wall_time_s if self.commit else 0.0,
        )

    @property
    def order(self) -> tuple[int, int]:
        """In which order checkpoints came to be, over attempts and rewinds."""
        return (self.id.attempt, self.id.step)

    def state(self, tier: str) -> CopyState:
        return self.states.get(tier, CopyState.ABSENT)

    def readable_on(self, tier: str) -> bool:
        return self.state(tier) in (CopyState.SEALED, CopyState.COMMITTED)

    def set_state(self, tier: str, state: CopyState, bytes: int | None = None) -> None:
        self.changed.add(self.id)
        if state is CopyState.ABSENT:
            self.states.pop(tier, None)
            self.verified.discard(tier)
            if tier not in self.damage:
                self.bytes.pop(tier, None)
                self.marks.pop(tier, None)
            return
        self.states[tier] = state
        if bytes is not None:
            self.bytes[tier] = bytes

    def note_damage(self, tier: str, why: str, *, repairable: bool) -> None:
        """The copy on a tier counts for nothing from now on."""
        self.damage[tier] = why
        if repairable:
            self.repairable.add(tier)
        self.set_state(tier, CopyState.ABSENT)

    def tell_damage(self, tier: str, why: str) -> None:
        """The copy on a tier is not what was written, and stays for what is good of it."""
        self.changed.add(self.id)
        self.damage[tier] = why

    def forget_damage(self, tier: str) -> None:
        """What was damaged on a tier was written anew, or has gone."""
        self.changed.add(self.id)
        self.damage.pop(tier, None)
        self.repairable.discard(tier)

    def note_gone(self, tier: str) -> None:
        """Nothing of it is on a tier any more."""
        self.forget_damage(tier)
        self.set_state(tier, CopyState.ABSENT)

    def note_kept(self, tier: str) -> None:
        """What was to leave a tier stays there: a good copy, or what is left of a damaged one."""
        self.set_state(tier, CopyState.ABSENT if tier in self.damage else CopyState.COMMITTED)

    def give_up(self, tiers: Iterable[str], error: BaseException) -> None:
        """These tiers are not owed a copy any more; whoever waits for one is told."""
        self.changed.add(self.id)
        for tier in self.owed.intersection(tiers):
            self.owed.discard(tier)
            if self.handle is not None:
                self.handle.tell_tier_failed(tier, error)

    def given_up(self, why: str) -> FlushError:
        return FlushError(f"flush of {self.id} is given up: {why}")

    def lease(self, tier: str, change: int) -> None:
        self.changed.add(self.id)
        self.leases[tier] = self.leases.get(tier, 0) + change


@dataclass(slots=True, kw_only=True)
class CopyFailures:
    """Tries in a row to bring one copy to one tier that failed, all so that it may pass, or all so that it ``lasts``.

    ``others_came`` counts those before which the tier had taken another copy since the try before; ``arrivals`` is how
    many it had taken by the last one."""

    lasts: bool = False
    count: int = 0
    others_came: int = 0
    arrivals: int = 0

    def note(self, arrivals: int, *, lasts: bool) -> None:
        """Note another try that failed, where the tier has taken so many copies by now."""
        if lasts is not self.lasts:
            self.lasts, self.count, self.others_came = lasts, 0, 0
        self.others_came += self.count > 0 and arrivals > self.arrivals
        self.count += 1
        self.arrivals = arrivals


ALONE = Shard(0, 1)
TABLE_DIGITS = 32
"""128 bits: every rank tells every other by these."""


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
        self.read_rates: Callable[[], Mapping[str, float]] = dict

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
            read_bytes_per_s=self.read_rates(),
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


def entry_of(id: CheckpointId, commit: Commit | None, shard: Shard) -> LedgerEntry:
    """Make an entry of what a commit record says; None where every one is damaged. ``shard`` is this rank's part, where
    the checkpoint is of as many ranks."""
    return LedgerEntry(
        id=id,
        ordinal=commit.line.ordinal if commit else 0,
        started_from=commit.line.started_from if commit else None,
        shard=_shard(commit, shard),
        attempt_id=commit.line.attempt_id if commit else None,
        commit=plain(commit) if commit else None,
    )


def _shard(commit: Commit | None, own: Shard) -> Shard:
    if commit is None or commit.world_size == own.world_size:
        return own
    named = (keys.parse_shard(file.name) for file in commit.files)
    return next((shard for shard in named if shard is not None), own)
