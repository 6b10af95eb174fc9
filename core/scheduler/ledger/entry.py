"""One checkpoint in the ledger: what is known of it and of each of its copies. Facts only."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from tierfall.core.capture.handle import SaveHandle
from tierfall.core.capture.snapshot import ON_PEERS, HostRegion, ReplicaShare, Snapshot
from tierfall.core.format.commit_files import plain
from tierfall.core.format.decided import DecidedList
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Commit, Geometry, Manifest
from tierfall.core.types import keys
from tierfall.core.types.errors import FlushError, TierfallError
from tierfall.core.types.lineage import AttemptStart
from tierfall.core.types.values import CheckpointId, CopyState, Shard

logger = logging.getLogger("tierfall")


@dataclass(slots=True, kw_only=True)
class LedgerEntry:
    """One checkpoint. All members that are sets or dicts are by tier.

    Copies: ``states`` and ``bytes``; ``verified``: this run wrote the copy, or compared all of it with its digests.
    ``damage`` tells what is wrong with a copy, or why it could not be read: it has no state and protects nothing, but
    occupies ``bytes``; a rule may delete a ``repairable`` one, any other one is kept. ``leases`` counts the tasks that
    read a copy.

    Flushes: ``owed``; ``uploaded_to``: this rank's image is there, but the commit waits for other ranks';
    ``commit_unknown_on``: a commit ended without a response; ``failures``; ``set_aside``: this start does not try the
    copy any more, and why; ``overtaken``: a copy failed, so that newer ones may be committed before it.

    This rank's image: ``region`` in memory, of which ``final_chunks`` leading chunks do not change any more; ``share``
    is the snapshot's. ``awaiting_ranks``: it is sealed, other ranks' may not be. ``failed``: the save was given up
    during capture. ``commit`` is the record for uncompressed images. ``image_bytes``: those of all ranks; 0 while not
    known.

    ``pinned``, ``deleted`` and ``tags`` are what persons have decided, with the tags of its save.
    """

    id: CheckpointId
    ordinal: int
    started_from: CheckpointId | None
    shard: Shard
    attempt_id: str | None = None
    commit: Commit | None = None
    image_bytes: int = 0
    manifest: Manifest | None = None
    geometry: Geometry | None = None
    region: HostRegion | None = None
    snapshot: Snapshot | None = None
    handle: SaveHandle | None = None
    share: ReplicaShare | None = None
    final_chunks: int = 0
    adopted: bool = False
    awaiting_ranks: bool = False
    failed: bool = False
    pinned: bool = False
    deleted: bool = False
    tags: frozenset[str] = frozenset()
    states: dict[str, CopyState] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    damage: dict[str, str] = field(default_factory=dict)
    verified: set[str] = field(default_factory=set)
    repairable: set[str] = field(default_factory=set)
    leases: dict[str, int] = field(default_factory=dict)
    owed: set[str] = field(default_factory=set)
    uploaded_to: set[str] = field(default_factory=set)
    commit_unknown_on: set[str] = field(default_factory=set)
    failures: dict[str, CopyFailures] = field(default_factory=dict)
    set_aside: dict[str, BaseException] = field(default_factory=dict)
    overtaken: set[str] = field(default_factory=set)
    changed: set[CheckpointId] = field(default_factory=set, repr=False, compare=False)

    @property
    def is_settled(self) -> bool:
        """Return whether no work on it is in progress or owed: it then changes only by lookup."""
        return not (
            self.owed
            or self.set_aside
            or self.uploaded_to
            or self.commit_unknown_on
            or self.awaiting_ranks
            or self.failed
            or self.snapshot is not None
            or self.region is not None
            or any(self.leases.values())
            or any(
                state not in (CopyState.COMMITTED, CopyState.LEAVING)
                for state in self.states.values()
            )
        )

    @property
    def is_whole(self) -> bool:
        """Return whether some tier has all of it."""
        return any(
            state in (CopyState.SEALED, CopyState.COMMITTED) for state in self.states.values()
        )

    def note_on_peers(self) -> None:
        """Note beside the image in memory, once, that peer memory has committed its checkpoint: a start after a loss
        sees which checkpoints were reported."""
        if self.region is None or not self.region.sealed:
            return
        try:
            if ON_PEERS not in self.region.marks():
                self.region.add_mark(ON_PEERS)
        except TierfallError as error:
            logger.warning("%s in memory does not say that peer memory has it: %s", self.id, error)

    def free(self) -> None:
        """Release its memory region."""
        if self.region is not None:
            self.region.release()
            self.region = None

    @property
    def pieces(self) -> Spliced | None:
        """The table of its tensors; None while unknown."""
        known = self.manifest or self.snapshot
        return None if known is None else known.pieces

    def decide(self, decided: DecidedList) -> None:
        """Apply what is decided about it."""
        self.changed.add(self.id)
        self.pinned = decided.is_pinned(self.id, self.attempt_id)
        self.deleted = decided.is_deleted(self.id, self.attempt_id)
        given = self.commit.tags if self.commit else ()
        self.tags = decided.tags(self.id, self.attempt_id, given)

    @property
    def start(self) -> AttemptStart | None:
        """The start of its attempt; None where every commit record is damaged."""
        if self.attempt_id is None:
            return None
        return AttemptStart(
            attempt=self.id.attempt,
            attempt_id=self.attempt_id,
            started_from=self.started_from,
            began_s=self.commit.wall_time_s if self.commit else 0.0,
        )

    @property
    def age_order(self) -> tuple[int, int]:
        """Sorts checkpoints by the time of their saves, over attempts and rewinds."""
        return (self.id.attempt, self.id.step)

    def state(self, tier: str) -> CopyState:
        return self.states.get(tier, CopyState.ABSENT)

    def readable_on(self, tier: str) -> bool:
        return self.state(tier) in (CopyState.SEALED, CopyState.COMMITTED)

    def has_record_on(self, tier: str) -> bool:
        """Return whether a commit record is on a tier, of a good copy or of a damaged one."""
        state = self.state(tier)
        return state is CopyState.COMMITTED or (state is CopyState.ABSENT and tier in self.damage)

    def set_state(self, tier: str, state: CopyState, bytes: int | None = None) -> None:
        self.changed.add(self.id)
        if state is CopyState.ABSENT:
            self.states.pop(tier, None)
            self.verified.discard(tier)
            if tier not in self.damage:
                self.bytes.pop(tier, None)
            return
        self.states[tier] = state
        if bytes is not None:
            self.bytes[tier] = bytes

    def note_damage(self, tier: str, why: str, *, repairable: bool) -> None:
        """Mark the copy on a tier as damaged: it protects nothing from now on."""
        self.damage[tier] = why
        if repairable:
            self.repairable.add(tier)
        self.set_state(tier, CopyState.ABSENT)

    def note_damage_kept(self, tier: str, why: str) -> None:
        """Note that the copy on a tier differs from what was written, but keep it: some of its tensors may be good."""
        self.changed.add(self.id)
        self.damage[tier] = why

    def forget_damage(self, tier: str) -> None:
        """The damaged copy on a tier was deleted."""
        self.changed.add(self.id)
        self.damage.pop(tier, None)
        self.repairable.discard(tier)

    def note_gone(self, tier: str) -> None:
        """The tier has no copy of it any more."""
        self.forget_damage(tier)
        self.set_state(tier, CopyState.ABSENT)

    def note_kept(self, tier: str) -> None:
        """A deletion was not carried out: the good or damaged copy is still there."""
        self.set_state(tier, CopyState.ABSENT if tier in self.damage else CopyState.COMMITTED)

    def give_up(self, tiers: Iterable[str], error: BaseException) -> None:
        """Owe these tiers no copy any more; the handle reports ``error``."""
        self.changed.add(self.id)
        for tier in self.owed.intersection(tiers):
            self.owed.discard(tier)
            if self.handle is not None:
                self.handle.on_tier_failed(tier, error)

    def given_up(self, why: str) -> FlushError:
        return FlushError(f"flush of {self.id} is given up: {why}")

    def lease(self, tier: str, change: int) -> None:
        self.changed.add(self.id)
        self.leases[tier] = self.leases.get(tier, 0) + change


@dataclass(slots=True, kw_only=True)
class CopyFailures:
    """Consecutive failures of one copy to one tier, all retryable or all permanent (``lasts``).

    ``others_arrived`` counts the failures before which the tier had received another copy since the last failure.
    ``arrivals`` is the number of copies that it had received at the last failure.
    """

    lasts: bool = False
    count: int = 0
    others_arrived: int = 0
    arrivals: int = 0

    def record(self, arrivals: int, *, lasts: bool) -> None:
        """Count a failure; ``arrivals`` is how many copies the tier has received by now."""
        if lasts is not self.lasts:
            self.lasts, self.count, self.others_arrived = lasts, 0, 0
        self.others_arrived += self.count > 0 and arrivals > self.arrivals
        self.count += 1
        self.arrivals = arrivals


def entry_of(id: CheckpointId, commit: Commit | None, shard: Shard) -> LedgerEntry:
    """Return the entry of a commit record (None: every one is damaged). ``shard`` is this rank's; it applies where as
    many ranks saved the checkpoint."""
    return LedgerEntry(
        id=id,
        ordinal=commit.lineage.ordinal if commit else 0,
        started_from=commit.lineage.started_from if commit else None,
        shard=_shard(commit, shard),
        attempt_id=commit.lineage.attempt_id if commit else None,
        commit=plain(commit) if commit else None,
    )


def _shard(commit: Commit | None, own: Shard) -> Shard:
    if commit is None or commit.world_size == own.world_size:
        return own
    named = (keys.parse_shard(file.name) for file in commit.files)
    return next((shard for shard in named if shard is not None), Shard(0, commit.world_size))
