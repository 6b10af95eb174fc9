"""One checkpoint in the ledger: what is known of it and of each of its copies. Facts only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tierfall.core.capture.handle import SaveHandle
from tierfall.core.capture.snapshot import HostRegion, Share, Snapshot
from tierfall.core.format.commit_files import plain
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Commit, Geometry, Manifest, geometry
from tierfall.core.types import keys
from tierfall.core.types.errors import FlushError
from tierfall.core.types.lineage import AttemptStart
from tierfall.core.types.values import CheckpointId, CopyState, Shard

TABLE_DIGITS = 32
"""128 bits: ranks compare their tables by this digest."""


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
