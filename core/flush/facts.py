"""Facts: the ledger, which is the one record of every copy of every checkpoint, and the group of ranks.

Only the coordinator's thread writes it. It contains facts and answers queries; the coordinator and the policies decide
what follows. A run may have thousands of checkpoints, of which a save changes one: summaries of all entries are updated
only for those that have changed. Entries on which saves, copies or commands work are *open*.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from tierfall.core.capture.handle import SaveHandle
from tierfall.core.capture.snapshot import HostRegion, ReplicaShare, Snapshot
from tierfall.core.flush.rates import TierThroughput
from tierfall.core.format.catalog import KnownCheckpoint, Listing, overtaken, starts_in
from tierfall.core.format.commit_files import plain
from tierfall.core.format.decided import DecidedList
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Commit, Geometry, Manifest
from tierfall.core.ranks.topology import ALONE, Topology
from tierfall.core.runtime import retries
from tierfall.core.types import keys
from tierfall.core.types.errors import FencedError, FlushError, TierfallError, UnreachableError
from tierfall.core.types.lineage import AttemptStart, Key, abandoned_by
from tierfall.core.types.policy import Rule
from tierfall.core.types.values import CheckpointId, CopyState, SaveOutcome, Shard, TierKind
from tierfall.core.types.view import CheckpointView, CopyView, TierRules, View

logger = logging.getLogger("tierfall")
V = TypeVar("V")


@dataclass(slots=True, kw_only=True)
class LedgerEntry:
    """One checkpoint. All members that are sets or mappings are by tier. Each is replaced as a whole: every change adds
    this checkpoint to ``changed``, a set of the ledger. Only the counts in ``failures`` change in place.

    Copies: ``states`` and ``bytes``; ``verified``: this run wrote the copy, or compared all of it with its digests.
    ``damage`` tells why a copy is damaged or could not be read: on a stored tier it has no state and protects nothing,
    but occupies ``bytes``; a rule may delete it only if it is ``repairable``. ``leases`` counts the tasks that read a
    copy.

    Flushes: ``owed``; ``uploaded_to``: this rank's image is there, but the commit waits for other ranks';
    ``failures``; ``set_aside``: this start does not try the copy any more, and why; ``overtaken``: a copy failed, so
    that newer ones may be committed before it.

    This rank's image: ``region`` in memory, of which ``final_chunks`` leading chunks do not change any more; ``share``
    is the snapshot's. ``awaiting_ranks``: it is complete, others' may not be. ``failed``: the save was given up during
    capture. ``commit`` is the record for uncompressed images. ``image_bytes``: those of all ranks; 0 while not known.

    ``pinned``, ``deleted`` and ``tags`` are what persons have decided, with the tags of its save.
    """

    changed: set[CheckpointId] = field(default_factory=set, repr=False, compare=False)
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
    states: Mapping[str, CopyState] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    damage: Mapping[str, str] = field(default_factory=dict)
    verified: frozenset[str] = frozenset()
    repairable: frozenset[str] = frozenset()
    leases: Mapping[str, int] = field(default_factory=dict)
    owed: frozenset[str] = frozenset()
    uploaded_to: frozenset[str] = frozenset()
    failures: Mapping[str, CopyFailures] = field(default_factory=dict)
    set_aside: Mapping[str, BaseException] = field(default_factory=dict)
    overtaken: frozenset[str] = frozenset()

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name != "changed":
            self.changed.add(self.id)

    @property
    def is_settled(self) -> bool:
        """Return whether no work on it is in progress or owed, and no person has deleted it."""
        return not (
            self.owed
            or self.set_aside
            or self.uploaded_to
            or self.deleted
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
        """Note in the file of the image that peer memory has committed its checkpoint: a start after a loss then knows
        that it was reported."""
        if self.region is not None and self.region.sealed:
            self.region.note_on_peers()

    def free(self) -> None:
        """Release its memory region."""
        if self.region is not None:
            self.region.release()
            self.region = None

    @property
    def pieces(self) -> Spliced | None:
        """The table of its tensors; None while unknown."""
        known = self.manifest or (self.snapshot.image_plan if self.snapshot is not None else None)
        return None if known is None else known.pieces

    def decide(self, decided: DecidedList) -> None:
        """Apply what is decided about it."""
        self.pinned = decided.is_pinned(self.id, self.attempt_id)
        self.deleted = decided.is_deleted(self.id, self.attempt_id)
        given = self.commit.tags if self.commit else ()
        self.tags = decided.tags(self.id, self.attempt_id, given)

    @property
    def not_finite(self) -> tuple[str, ...]:
        """What its commit record names as NaN or infinite."""
        return () if self.commit is None else self.commit.not_finite

    def note_not_finite(self, names: tuple[str, ...]) -> None:
        """Note what is NaN or infinite in the images of all ranks."""
        if self.commit is not None and self.commit.not_finite != names:
            self.commit = replace(self.commit, not_finite=names)

    @property
    def own_bytes(self) -> int:
        """The bytes of this rank's image; 0 while unknown."""
        if self.geometry is not None:
            return self.geometry.image_bytes
        return self.commit.image_bytes if self.commit is not None else 0

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
        if state is CopyState.ABSENT:
            self.states = without(self.states, tier)
            self.verified -= {tier}
            if tier not in self.damage:
                self.bytes = without(self.bytes, tier)
            return
        self.states = {**self.states, tier: state}
        if bytes is not None:
            self.bytes = {**self.bytes, tier: bytes}

    def note_damage(self, tier: str, why: str, *, repairable: bool) -> None:
        """Mark the copy on a tier as damaged: it protects nothing from now on."""
        self.damage = {**self.damage, tier: why}
        if repairable:
            self.repairable |= {tier}
        self.set_state(tier, CopyState.ABSENT)

    def note_damage_kept(self, tier: str, why: str) -> None:
        """Note that the copy on a tier differs from what was written, but keep it: some of its tensors may be good."""
        self.damage = {**self.damage, tier: why}

    def forget_damage(self, tier: str) -> None:
        """The damaged copy on a tier was deleted."""
        self.damage = without(self.damage, tier)
        self.repairable -= {tier}

    def note_gone(self, tier: str) -> None:
        """The tier has no copy of it any more."""
        self.forget_damage(tier)
        self.set_state(tier, CopyState.ABSENT)

    def note_kept(self, tier: str) -> None:
        """A deletion was not carried out: the good or damaged copy is still there."""
        self.set_state(tier, CopyState.ABSENT if tier in self.damage else CopyState.COMMITTED)

    def give_up(self, tiers: Iterable[str], error: BaseException) -> None:
        """Owe these tiers no copy any more; the handle reports ``error``."""
        for tier in self.owed.intersection(tiers):
            self.owed -= {tier}
            if self.handle is not None:
                self.handle.on_tier_failed(tier, error)

    def given_up(self, why: str) -> FlushError:
        return FlushError(f"flush of {self.id} is given up: {why}")

    def lease(self, tier: str, change: int) -> None:
        self.leases = {**self.leases, tier: self.leases.get(tier, 0) + change}


def without(by_tier: Mapping[str, V], tier: str) -> Mapping[str, V]:
    """Return a mapping without one tier."""
    return {other: value for other, value in by_tier.items() if other != tier}


@dataclass(slots=True, kw_only=True)
class CopyFailures:
    """Consecutive failures of one copy to one tier, all retryable or all permanent (``lasts``).

    ``others_arrived`` counts the failures with an arrival of another copy between them and the failure before.
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


class LedgerEntries(dict[CheckpointId, LedgerEntry]):
    """Entries by checkpoint. ``changed`` are those that were changed, added or removed since it was cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: set[CheckpointId] = set()
        self._sorted: list[CheckpointId] = []

    def __setitem__(self, id: CheckpointId, entry: LedgerEntry) -> None:
        if id not in self:
            insort(self._sorted, id, key=_key)
        entry.changed = self.changed
        self.changed.add(id)
        super().__setitem__(id, entry)

    def remove(self, id: CheckpointId) -> None:
        """Remove an entry, if it is there."""
        if self.pop(id, None) is not None:
            del self._sorted[bisect_left(self._sorted, _key(id), key=_key)]
            self.changed.add(id)

    def ids(self) -> Iterator[CheckpointId]:
        """Yield all checkpoints, sorted by step and attempt."""
        return iter(self._sorted)

    def newest_first(self) -> Iterator[LedgerEntry]:
        """Yield all entries, sorted by step and attempt, the newest first."""
        return (self[id] for id in reversed(self._sorted))


def _key(id: CheckpointId) -> tuple[int, int]:
    return id.step, id.attempt


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of a run. Rank 0 decides which copy a tier receives next, when a checkpoint is complete, what is given
    up and what is deleted. ``shared`` has, per stored tier, whether all ranks see the same files there; a tier that it
    lacks is shared."""

    topology: Topology = ALONE
    shared: Mapping[str, bool] = field(default_factory=dict)

    @property
    def decides(self) -> bool:
        """Whether this is rank 0."""
        return self.topology.is_root

    @property
    def shard(self) -> Shard:
        """This rank's part of each checkpoint."""
        return Shard(self.topology.rank, self.topology.world_size)

    def is_shared(self, tier: str) -> bool:
        return self.shared.get(tier, True)

    def owns(self, tier: str) -> bool:
        """Return whether this rank writes commit records, and what is decided, on a tier."""
        return self.topology.is_root if self.is_shared(tier) else self.topology.is_leader

    def is_split(self, tier: str) -> bool:
        """Return whether other nodes store parts of the copies on a tier."""
        return not self.is_shared(tier) and len(self.topology.nodes) > 1

    def ranks_on(self, tier: str) -> tuple[int, ...]:
        """Return the ranks whose images this rank sees on a tier."""
        if self.is_shared(tier):
            return tuple(range(self.topology.world_size))
        return self.topology.local_ranks


class Ledger:
    """All entries, and summaries of them. ``view`` is what policies see of it."""

    def __init__(
        self,
        rules: tuple[TierRules, ...],
        host: str,
        *,
        group: Group | None = None,
    ) -> None:
        """``unfinished`` are files of uncommitted copies, with their bytes; ``partial`` is as in ``note_partial``.
        ``has_begun``: this start has restored, or begins anew, or has committed a checkpoint; before, rules delete
        nothing. ``lags``: a listing of this start was incomplete, and rules delete nothing. ``unsure`` names the
        tiers where a copy could not be reached at the last listing, which a start or a restore makes: a missing commit
        record proves nothing there. ``reading`` counts a
        checkpoint's readers: meanwhile only a command deletes its stored copies. One that could not be read counts as
        read to the end. ``restoring``: a restore reads the tiers. ``failing`` tells why tiers accept no copies at
        present, on this rank or another; ``stuck`` has the copy of another rank that a tier does not accept. ``fenced``
        is the error that reports a newer attempt: this process writes nothing more. ``memory_is_short``: the last save
        that requested a region found no room. ``deadlines`` are the times by which drains are to be done, by who asked.
        ``admitted`` are the copies that rank 0 has begun, in their order; ``committing`` those that all ranks have
        uploaded, while rank 0 waits for their commit records. ``lost_saves`` and ``lost_copies`` tell why all ranks
        have given up a save or a copy, as this rank may begin it later. ``now_s`` is the time of the present step.
        ``evaluated_at`` is the training step of the last evaluation: earlier checkpoints may lack its metrics."""
        self.entries = LedgerEntries()
        self._open: dict[CheckpointId, LedgerEntry] = {}
        self._views: dict[CheckpointId, CheckpointView] = {}
        self._all_views: tuple[CheckpointView, ...] | None = None
        """All of these, until an entry changes."""
        self._starts: dict[Key, AttemptStart] = {}
        """The starts of the attempts that have committed something, also if all of that is deleted."""
        self._present_starts: dict[Key, AttemptStart] = {}
        """Those, and the starts of the attempts that have an image in memory alone."""
        self._is_left = abandoned_by(())
        self._abandoned: set[CheckpointId] = set()
        self.group = group or Group()
        self.shard = self.group.shard
        self.rules = rules
        self.host = host
        self.peer_tiers = frozenset(rule.name for rule in rules if rule.kind is TierKind.PEER)
        self.unfinished: dict[tuple[str, CheckpointId], int] = {}
        self.partial: set[tuple[str, CheckpointId]] = set()
        self.scattered: frozenset[CheckpointId] = frozenset()
        self.on_few_nodes: dict[tuple[str, CheckpointId], bool] = {}
        self.decided = DecidedList()
        self.has_begun = False
        self.evaluated_at: float = 0
        self.lags = False
        self.unsure: set[str] = set()
        self.reading: Counter[CheckpointId] = Counter()
        self.restoring = False
        self.failing: dict[str, BaseException] = {}
        self.stuck: dict[str, CheckpointId] = {}
        self.fenced: FencedError | None = None
        self.memory_is_short = False
        self.deadlines: dict[object, float] = {}
        self.admitted: dict[str, dict[CheckpointId, None]] = {}
        self.committing: set[tuple[str, CheckpointId]] = set()
        self.lost_saves: dict[CheckpointId, tuple[TierfallError, SaveOutcome]] = {}
        self.lost_copies: dict[tuple[str, CheckpointId], BaseException] = {}
        self.restored_from: CheckpointId | None = None
        self.attempt: int | None = None
        self.least_ordinal = 0
        self.now_s = 0.0
        self.wall_offset_s = 0.0
        self.rates = TierThroughput()

    @property
    def many_ranks(self) -> bool:
        """Whether the run has several ranks."""
        return self.shard.world_size > 1

    @property
    def is_urgent(self) -> bool:
        """Whether flushes must run unthrottled: a save needs memory, or there is a deadline."""
        return self.memory_is_short or bool(self.deadlines)

    @property
    def longest_wait_s(self) -> float:
        """The longest wait until what failed is tried again."""
        return retries.longest_s(has_deadline=bool(self.deadlines))

    def wait_s(self, failures: int) -> float:
        """Return how long to wait after so many failures in a row."""
        return retries.wait_s(failures, has_deadline=bool(self.deadlines))

    def owns(self, tier: str) -> bool:
        """Return whether this rank writes and deletes records on a tier. In peer memory, each rank has its own."""
        return tier in self.peer_tiers or self.group.owns(tier)

    def rules_of(self, tier: str) -> TierRules:
        return next(rules for rules in self.rules if rules.name == tier)

    def set_clock(self, *, now_s: float, wall_time_s: float) -> None:
        """Set the time of the clock of ``step``, and the wall time. Later wall times are derived from that clock, so
        that setting the wall clock changes no checkpoint's age."""
        self.now_s, self.wall_offset_s = now_s, wall_time_s - now_s

    def load(
        self,
        known: Iterable[KnownCheckpoint],
        listings: Iterable[Listing],
        *,
        decided: DecidedList,
        scattered: frozenset[CheckpointId] = frozenset(),
        on_few_nodes: Mapping[str, Mapping[CheckpointId, bool]] = MappingProxyType({}),
    ) -> None:
        """Add the checkpoints that were found on tiers. ``scattered`` ones are complete, but not on one tier that all
        ranks reach: they can be restored, and are not flushed, as some rank may have no image of them.
        ``on_few_nodes`` is as in ``View``, by tier. ``decided`` is what is decided by the lists of all tiers together,
        the same on all ranks."""
        known, self.decided = tuple(known), decided
        self.scattered = scattered
        self.on_few_nodes = {
            (tier, id): may_be_reported
            for tier, few in on_few_nodes.items()
            for id, may_be_reported in few.items()
        }
        late = overtaken(known)
        for checkpoint in known:
            entry = entry_of(checkpoint.id, checkpoint.commit, self.shard)
            entry.image_bytes = checkpoint.bytes
            for tier, copy in checkpoint.copies.items():
                if copy.damage is not None:
                    entry.bytes = {**entry.bytes, tier: copy.bytes}
                    why = (
                        f"it could not be read: {copy.unread}" if copy.unread else str(copy.damage)
                    )
                    entry.note_damage(tier, why, repairable=copy.repairable)
                else:
                    entry.set_state(tier, copy.state, copy.bytes)
            entry.overtaken |= late.get(checkpoint.id, frozenset())
            self.enter(entry)
        listings = tuple(listings)
        self._starts = {start.key: start for start in starts_in(listings)}
        self.note_reach(listings)
        for listing in listings:
            for id, bytes in listing.unfinished.items():
                self.unfinished[listing.tier, id] = bytes

    def note_reach(self, listings: Iterable[Listing]) -> None:
        """Note whether one of these listings ``lags``, and on which tiers a copy could not be reached. A tier that was
        listed in part only stays unsure."""
        for listing in listings:
            self.lags |= listing.lags
            if any(isinstance(copy.damage, UnreachableError) for copy in listing.copies):
                self.unsure.add(listing.tier)
            elif listing.error is None and not listing.is_partial:
                self.unsure.discard(listing.tier)

    def enter(self, entry: LedgerEntry) -> None:
        """Add a checkpoint, with what is decided about it."""
        entry.decide(self.decided)
        self.entries[entry.id] = entry

    def learn(self, new: DecidedList) -> list[LedgerEntry]:
        """Add what is decided; return the entries that it is about."""
        self.decided |= new
        found = [e for id in sorted(new.checkpoints) if (e := self.entries.get(id)) is not None]
        for entry in found:
            entry.decide(self.decided)
        return found

    def note_partial(self, listings: Iterable[Listing]) -> None:
        """Note checkpoints that have a commit record on this node's part of a tier, but are incomplete: a start died
        during their commit or deletion, or a machine is missing."""
        self.partial = {
            (listing.tier, copy.id)
            for listing in listings
            for copy in listing.copies
            if copy.state is CopyState.COMMITTED and (copy.damage is None or copy.repairable)
            if not self._has(listing.tier, copy.id)
        }

    def _has(self, tier: str, id: CheckpointId) -> bool:
        entry = self.entries.get(id)
        return entry is not None and (tier in entry.states or tier in entry.damage)

    def continue_from(self, checkpoint: CheckpointId | None, *, attempt: int) -> None:
        """Note what was restored, and the attempt that continues from it."""
        self.restored_from, self.attempt = checkpoint, attempt
        self.least_ordinal = 0
        self.has_begun = True
        entry = None if checkpoint is None else self.entries.get(checkpoint)
        if entry is not None and entry.attempt_id is not None:
            # of attempts that share its number, this one counts from now on
            for key, start in self._starts.items():
                if key[0] == entry.id.attempt:
                    passed_over = key[1] != entry.attempt_id
                    self._starts[key] = replace(start, passed_over=passed_over)
            self.entries.changed.add(entry.id)

    def ordered(self) -> list[LedgerEntry]:
        """Return the entries by the time of their saves."""
        return sorted(self.entries.values(), key=lambda entry: entry.age_order)

    def forget_if_gone(self, entry: LedgerEntry) -> None:
        if not (entry.states or entry.owed or entry.damage or entry.snapshot):
            self.entries.remove(entry.id)

    def view(
        self,
        *,
        settling: Collection[CheckpointId] = (),
    ) -> View:
        """Return the view for policies. ``settling`` are the checkpoints that are ``changing`` in it."""
        return View(
            tiers=self.rules,
            checkpoints=self._checkpoints(settling),
            failing=frozenset(self.failing),
            restored_from=self.restored_from,
            attempt=self.attempt,
            restoring=self.restoring,
            wall_time_s=self.now_s + self.wall_offset_s,
            many_ranks=self.many_ranks,
            read_bytes_per_s=self.rates.read_rates(),
            partial=frozenset(self.partial),
            on_few_nodes=dict(self.on_few_nodes),
        )

    def set_retain(self, retain: Mapping[str, tuple[Rule, ...]]) -> None:
        """Replace what decides which checkpoints tiers keep, by the tiers' names."""
        self.rules = tuple(replace(r, retain=retain.get(r.name, r.retain)) for r in self.rules)

    def _checkpoints(self, settling: Collection[CheckpointId]) -> tuple[CheckpointView, ...]:
        views = self.views()
        reading = {id for id, count in self.reading.items() if count > 0}
        special = reading.union(settling)
        if not special:
            return views
        return tuple(
            self._special(view, settling, reading) if view.id in special else view for view in views
        )

    def _special(
        self,
        view: CheckpointView,
        settling: Collection[CheckpointId],
        reading: Collection[CheckpointId],
    ) -> CheckpointView:
        is_read = view.id in reading
        copies, damaged = (
            {
                t: replace(c, leased=c.leased or (is_read and t != self.host))
                for t, c in known.items()
            }
            for known in (view.copies, view.damaged)
        )
        return replace(view, copies=copies, damaged=damaged, changing=view.id in settling)

    def _view(self, entry: LedgerEntry, *, abandoned: bool) -> CheckpointView:
        """Return the view of an entry."""
        commit = entry.commit
        copies = {
            tier: CopyView(
                state=entry.states.get(tier, CopyState.COMMITTED),
                bytes=entry.bytes.get(tier, 0),
                leased=entry.leases.get(tier, 0) > 0,
                verified=tier in entry.verified,
            )
            for tier in entry.states.keys() | entry.repairable
        }
        return CheckpointView(
            id=entry.id,
            ordinal=entry.ordinal,
            started_from=entry.started_from,
            abandoned=abandoned,
            pinned=entry.pinned,
            deleted=entry.deleted,
            copies={tier: copies[tier] for tier in entry.states},
            damaged={t: copies[t] for t in entry.repairable - entry.states.keys()},
            owed=entry.owed,
            overtaken=entry.overtaken,
            at_end=entry.commit is not None and entry.commit.lineage.at_end,
            metrics=commit.metrics if commit else {},
            not_finite=frozenset(entry.not_finite),
            tags=entry.tags,
            wall_time_s=commit.wall_time_s if commit else None,
        )

    @property
    def all_live(self) -> bool:
        """Whether no checkpoint is abandoned, or was deleted by a person."""
        return not self.abandoned() and not self.deleted()

    def live_copies(self, tier: str) -> Iterator[LedgerEntry]:
        """Yield the committed copies on a tier, newest first, without abandoned and deleted ones."""
        abandoned = self.abandoned()
        for entry in self.entries.newest_first():
            if (
                entry.state(tier) is CopyState.COMMITTED
                and entry.id not in abandoned
                and not entry.deleted
            ):
                yield entry

    def newest_on(self, tier: str, *, without: Collection[CheckpointId]) -> CheckpointId | None:
        """Return the newest live checkpoint that is committed on a tier and is not in ``without``."""
        return next((e.id for e in self.live_copies(tier) if e.id not in without), None)

    def has_no_part(self, tier: str, id: CheckpointId) -> bool:
        """Return whether a copy that is committed on a tier is there on other nodes alone."""
        entry = self.entries.get(id)
        if entry is None or entry.state(tier) is not CopyState.COMMITTED:
            return False
        return entry.bytes.get(tier) == 0

    def used_bytes(self, tier: str) -> int:
        """Return the bytes of this run on a tier, unfinished copies included."""
        copies = sum(entry.bytes.get(tier, 0) for entry in self.entries.values())
        return copies + sum(size for (name, _), size in self.unfinished.items() if name == tier)

    def bytes_being_deleted(self, tier: str) -> int:
        """Return the bytes of copies whose deletion is in progress or is retried."""
        return sum(
            entry.bytes.get(tier, 0)
            for entry in self.entries.values()
            if entry.state(tier) is CopyState.LEAVING
        )

    def whole_copies_on(self, tier: str) -> int:
        """Return the number of whole copies on a tier."""
        return sum(entry.readable_on(tier) for entry in self.entries.values())

    # Summaries -------------------------------------------------------------------------------------

    def open(self) -> list[LedgerEntry]:
        """Return the entries that are owed, deleted by a person, in memory, or being saved, copied or read."""
        self._refresh()
        return list(self._open.values())

    def deleted(self) -> list[LedgerEntry]:
        """Return the entries that a person has deleted, while there is something left of them."""
        return sorted((e for e in self.open() if e.deleted), key=lambda entry: entry.id)

    def abandoned(self) -> Set[CheckpointId]:
        """Return the abandoned checkpoints: a live set, which changes with the ledger. An attempt abandons checkpoints
        once it has committed one, or while an image of it is in memory."""
        self._refresh()
        return self._abandoned

    def views(self) -> tuple[CheckpointView, ...]:
        """Return the views of all entries, by step and attempt."""
        self._refresh()
        if self._all_views is None:
            ids = [*self.entries.ids()]
            for id in ids:
                if id not in self._views:
                    self._views[id] = self._view(self.entries[id], abandoned=id in self._abandoned)
            self._all_views = tuple(map(self._views.__getitem__, ids))
        return self._all_views

    def _refresh(self) -> None:
        changed = self.entries.changed
        if not changed:
            return
        self._all_views = None
        for id in changed:
            self._views.pop(id, None)
            entry = self.entries.get(id)
            if entry is None or entry.is_settled:
                self._open.pop(id, None)
            else:
                self._open[id] = entry
            if entry is not None and CopyState.COMMITTED in entry.states.values() and entry.start:
                self._starts.setdefault(entry.start.key, entry.start)
        sealed = (e for e in self._open.values() if e.state(self.host) is CopyState.SEALED)
        present = dict(self._starts)
        for start in filter(None, (entry.start for entry in sealed)):
            present.setdefault(start.key, start)
        if present != self._present_starts:
            self._present_starts, self._is_left = present, abandoned_by(present.values())
            self._views.clear()
            self._abandoned.clear()
            changed.update(self.entries)
        for id in changed:
            entry = self.entries.get(id)
            is_there = entry is not None and bool(entry.is_whole or entry.damage)
            if entry is not None and is_there and self._is_left(id, entry.attempt_id):
                self._abandoned.add(id)
            else:
                self._abandoned.discard(id)
        changed.clear()
