"""Listings of tiers, and the merge of several listings into checkpoints.

A listing has either everything that its tier returned, or the error of a tier that could not be listed; the two are
never confused. A commit record that exists but is damaged is damage, never absence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tierfall.core.format.commit_files import ranks_with_image
from tierfall.core.format.decided import DecidedList
from tierfall.core.format.records import Attempt, Commit
from tierfall.core.types.errors import BackendError, IntegrityError, TierfallError
from tierfall.core.types.lineage import AttemptStart, Key, abandoned_by, resolve
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.core.types.view import CheckpointView, CopyView, TierRules, View

UNSEEN_ATTEMPTS = 1000
"""Assumed maximum of attempts that only an unreachable tier knows: more starts than a run has during an outage."""


class NotReadError(BackendError):
    """The commit record of a copy is there, and is read later: see ``tiers.stored.StoredTier.list``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCopy:
    """A checkpoint with a commit record on a tier, or that something else there names.

    ``damage`` is the error of a copy that is damaged (``is_damage``), or could not be read, or is read later
    (NotReadError). Without ``commit``, the commit record has that error, is gone, or is another checkpoint's. With
    ``commit``, a file that the record names has it, or the copy may not survive a power cut. Such a copy is read only
    if there is no better one, and counts for nothing else. ``foreign``: another attempt of the same number saved it.
    ``on_peers``, of a copy in memory: peer memory has committed the checkpoint."""

    id: CheckpointId
    state: CopyState
    bytes: int
    commit: Commit | None
    damage: TierfallError | None = None
    on_peers: bool = False
    foreign: bool = False

    @property
    def label(self) -> str:
        """The state, ``damaged``, or ``unreadable``."""
        if self.damage is None:
            return str(self.state)
        return "damaged" if self.damage.is_damage else "unreadable"

    @property
    def unread(self) -> TierfallError | None:
        """Why it could not be read; None for a good or a damaged copy."""
        return None if self.damage is None or self.damage.is_damage else self.damage

    @property
    def lacks_ranks(self) -> bool:
        """Whether it is in memory, and the images of some ranks are not, or not on this node: the start that saved it
        may have died before all ranks had sealed it."""
        if self.state is not CopyState.SEALED or self.commit is None:
            return False
        return len(ranks_with_image(self.commit, self.commit.world_size)) < self.commit.world_size

    @property
    def repairable(self) -> bool:
        """Whether a damaged copy may be rewritten or deleted: not a foreign one, nor one that could not be read."""
        return self.damage is not None and self.damage.is_damage and not self.foreign

    @property
    def view(self) -> CopyView:
        return CopyView(state=self.state, bytes=self.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The content of one tier. ``unfinished`` maps step folders without a commit record to their bytes. ``starts`` are
    the starts of attempts that committed there, including deleted checkpoints. ``decided`` is the tier's list of what
    is decided. ``damaged`` are errors that belong to no copy, as in overwritten memory. ``lags``: the listing, or
    ``latest``, contradicts what is read there by key. With ``error``, the tier, or a part of it, could not be
    listed."""

    tier: str
    copies: tuple[FoundCopy, ...] = ()
    unfinished: dict[CheckpointId, int] = field(default_factory=dict)
    attempts: tuple[int, ...] = ()
    starts: tuple[AttemptStart, ...] = ()
    decided: DecidedList = field(default_factory=DecidedList)
    damaged: tuple[TierfallError, ...] = ()
    lags: bool = False
    error: TierfallError | None = None

    @property
    def unread(self) -> TierfallError | None:
        """Why the tier, or a copy on it, could not be read; None if all was read."""
        return self.error or next((copy.unread for copy in self.copies if copy.unread), None)

    @property
    def is_partial(self) -> bool:
        """Whether commit records are left to be read later."""
        return any(isinstance(copy.damage, NotReadError) for copy in self.copies)

    @property
    def problems(self) -> tuple[TierfallError, ...]:
        """What is wrong with the tier: ``damaged`` and ``error``."""
        return self.damaged if self.error is None else (*self.damaged, self.error)

    @property
    def used_bytes(self) -> int:
        """The bytes of all copies, unfinished ones included."""
        return sum(copy.bytes for copy in self.copies) + sum(self.unfinished.values())

    def copy(self, checkpoint: CheckpointId) -> FoundCopy | None:
        return next((c for c in self.copies if c.id == checkpoint), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCheckpoint:
    """One checkpoint on all tiers that were listed. ``commit`` is None if none of its records can be parsed. ``tags``
    are those of its save, and those that were added and not removed since. ``deleted``: by a person."""

    id: CheckpointId
    commit: Commit | None
    copies: dict[str, FoundCopy]
    abandoned: bool
    pinned: bool = False
    deleted: bool = False
    tags: frozenset[str] = frozenset()

    @property
    def bytes(self) -> int:
        """Size of its images; without a record, that of its largest copy. A record may name those of one node only."""
        records = (self.commit, *(copy.commit for copy in self.copies.values()))
        named = [record.image_bytes for record in records if record is not None]
        return max(named or (copy.bytes for copy in self.copies.values()))

    @property
    def attempt_id(self) -> str | None:
        """The id of the attempt that saved it; None without a record."""
        return self.commit.lineage.attempt_id if self.commit else None

    @property
    def wall_time_s(self) -> float | None:
        return self.commit.wall_time_s if self.commit else None

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.commit.metrics if self.commit else {}

    @property
    def started_from(self) -> CheckpointId | None:
        return self.commit.lineage.started_from if self.commit else None

    @property
    def not_finite(self) -> frozenset[str]:
        """What its records name as NaN or infinite. One in memory may name what is in the images of one node only."""
        records = (self.commit, *(copy.commit for copy in self.copies.values()))
        return frozenset(name for each in records if each is not None for name in each.not_finite)

    @property
    def live(self) -> bool:
        return not self.abandoned and not self.deleted

    @property
    def unread(self) -> TierfallError | None:
        """Why it may be good: no copy is known to be, and one could not be read."""
        if any(copy.damage is None for copy in self.copies.values()):
            return None
        return next((copy.unread for copy in self.copies.values() if copy.unread), None)


def merge(listings: Iterable[Listing]) -> tuple[KnownCheckpoint, ...]:
    """Merge listings into checkpoints, oldest first."""
    listings = tuple(listings)
    starts = starts_in(listings)
    passed_over = {start.key for start in starts if start.passed_over}
    found: dict[CheckpointId, dict[str, FoundCopy]] = {}
    for listing in listings:
        for copy in listing.copies:
            found.setdefault(copy.id, {})[listing.tier] = copy
    found = {id: of_one_lineage(copies, passed_over) for id, copies in found.items()}
    commits = {
        id: next((c.commit for c in copies.values() if c.commit is not None), None)
        for id, copies in found.items()
    }
    is_abandoned = abandoned_by(starts)
    decided = decided_in(listings)
    named = decided.checkpoints

    def known(id: CheckpointId, commit: Commit | None) -> KnownCheckpoint:
        attempt_id = commit.lineage.attempt_id if commit else None
        return KnownCheckpoint(
            id=id,
            commit=commit,
            copies=found[id],
            abandoned=is_abandoned(id, attempt_id),
            pinned=id in named and decided.is_pinned(id, attempt_id),
            deleted=id in named and decided.is_deleted(id, attempt_id),
            tags=decided.tags(id, attempt_id, commit.tags if commit else ()),
        )

    return tuple(known(id, commit) for id, commit in sorted(commits.items(), key=lambda c: c[0]))


def decided_in(listings: Iterable[Listing]) -> DecidedList:
    """What is decided by the lists of all these tiers together."""
    entries = (entry for listing in listings for entry in listing.decided.of_all_tiers.entries)
    return DecidedList(entries)


def start_of(commit: Commit) -> AttemptStart:
    """The start of a commit record's attempt; the record's time is the latest that it can have begun."""
    lineage = commit.lineage
    return AttemptStart(
        attempt=lineage.checkpoint.attempt,
        attempt_id=lineage.attempt_id,
        started_from=lineage.started_from,
        began_s=commit.wall_time_s,
    )


def starts_in(
    listings: Iterable[Listing], whole: Collection[CheckpointId] | None = None
) -> tuple[AttemptStart, ...]:
    """The resolved starts of all attempts that committed on these tiers. If ``whole`` is given, only copies of those
    checkpoints count."""
    starts: list[AttemptStart] = []
    saved = []
    for listing in listings:
        starts += listing.starts
        for copy in listing.copies:
            if copy.commit is not None and (whole is None or copy.id in whole):
                starts.append(start_of(copy.commit))
                saved.append((copy.id, copy.commit.lineage.attempt_id))
    return resolve(starts, saved)


def next_attempt(listings: Sequence[Listing], own: Attempt | None = None) -> int:
    """An attempt number above all on these tiers and above that of this process (``own``). If a tier could not be
    listed, the number is also above any that this tier may have, so that new checkpoints come after its own."""
    saved = [
        *(copy.id.attempt for listing in listings for copy in listing.copies),
        *(id.attempt for listing in listings for id in listing.unfinished),
        *(start.attempt for listing in listings for start in listing.starts),
    ]
    recorded = [number for listing in listings for number in listing.attempts]
    newest = max((*saved, *recorded, own.number if own else 0, 0))
    if own is None and any(listing.error is not None for listing in listings):
        # counted from saved attempts: repeated starts that save nothing during an outage add no further gap
        newest = max(newest, max(saved, default=0) + UNSEEN_ATTEMPTS)
    return newest + 1


def of_one_lineage(
    copies: dict[str, FoundCopy], passed_over: Collection[Key] = ()
) -> dict[str, FoundCopy]:
    """Separate copies that share only a name: starts that could not see each other's tiers may use the same attempt
    number. Copies of an attempt that is not ``passed_over`` count, or else those saved last; the others become foreign
    and damaged."""
    if len(copies) < 2:
        return copies
    commits = [copy.commit for copy in copies.values() if copy.commit is not None]
    if len({commit.lineage.attempt_id for commit in commits}) < 2:
        return copies
    newest = max(
        commits,
        key=lambda commit: (
            (commit.lineage.checkpoint.attempt, commit.lineage.attempt_id) not in passed_over,
            commit.wall_time_s,
        ),
    ).lineage.attempt_id
    return {
        tier: copy
        if copy.commit is None or copy.commit.lineage.attempt_id == newest
        else replace(
            copy,
            commit=None,
            on_peers=False,
            foreign=True,
            damage=IntegrityError(
                f"{tier}: {copy.id} was saved by another attempt of this number; another tier has the one that counts"
            ),
        )
        for tier, copy in copies.items()
    }


def overtaken(known: Iterable[KnownCheckpoint]) -> dict[CheckpointId, frozenset[str]]:
    """By checkpoint, the tiers that have newer ones and are still owed it, according to their newest record, or may be:
    its own record there is not good."""
    newest: dict[str, Commit] = {}
    found: dict[CheckpointId, frozenset[str]] = {}
    for checkpoint in sorted(known, key=lambda c: (c.id.attempt, c.id.step)):
        for tier, copy in checkpoint.copies.items():
            if copy.commit is not None:
                newest[tier] = copy.commit
            elif not copy.foreign:
                found[checkpoint.id] = found.get(checkpoint.id, frozenset()) | {tier}
    for tier, commit in newest.items():
        for id in commit.owed:
            found[id] = found.get(id, frozenset()) | {tier}
    return found


def to_view(
    tiers: Sequence[TierRules],
    known: Sequence[KnownCheckpoint],
    *,
    wall_time_s: float,
    **members: object,
) -> View:
    """Build the policies' view from listings, for callers without a coordinator; ``wall_time_s`` is the current time
    in seconds since 1970."""
    owed_to = overtaken(known)
    return View(
        tiers=tuple(tiers),
        wall_time_s=wall_time_s,
        many_ranks=any(c.commit is not None and c.commit.world_size > 1 for c in known),
        checkpoints=tuple(
            CheckpointView(
                id=c.id,
                ordinal=c.commit.lineage.ordinal if c.commit else 0,
                started_from=c.started_from,
                abandoned=c.abandoned,
                pinned=c.pinned,
                deleted=c.deleted,
                metrics=c.metrics,
                not_finite=c.not_finite,
                tags=c.tags,
                wall_time_s=c.wall_time_s,
                overtaken=owed_to.get(c.id, frozenset()),
                copies={t: copy.view for t, copy in c.copies.items() if copy.damage is None},
                damaged={t: copy.view for t, copy in c.copies.items() if copy.repairable},
            )
            for c in known
        ),
        **members,  # type: ignore[arg-type]
    )
