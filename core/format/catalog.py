"""What tiers hold, as read from them: the values of a listing, and how listings of several tiers come together.

"Absent" and "could not look" are kept apart: a listing either holds everything that its tier answered, or the error
that kept it from answering. A commit record that is there but damaged is damage, never absence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tierfall.core.format.records import Attempt, Commit
from tierfall.core.types import keys
from tierfall.core.types.errors import IntegrityError, TierfallError
from tierfall.core.types.lineage import AttemptStart, Key, abandoned, resolve
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.core.types.view import CheckpointView, CopyView, TierRules, View

UNSEEN_ATTEMPTS = 1000
"""So many attempts a tier that cannot be asked may know of beyond those that are seen: more starts than a run has while
a tier is away."""


class StepFolderError(IntegrityError):
    """Something else lies where the folder of a step is to be: what it holds, or leads to, is not looked at.
    ``checkpoint`` is the one whose folder it would be."""

    def __init__(self, message: str, checkpoint: CheckpointId) -> None:
        super().__init__(message)
        self.checkpoint = checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCopy:
    """A checkpoint that has a commit record on a tier. ``damage`` says what is wrong with it: a copy without ``commit``
    has a record that cannot be read, or is not this checkpoint's; one with it lacks files that the record names, or
    may not survive a power cut. What is left of such a copy is read where nothing better is there, and counts for
    nothing else."""

    id: CheckpointId
    state: CopyState
    bytes: int
    commit: Commit | None
    damage: TierfallError | None = None
    marks: frozenset[str] = frozenset()
    foreign: bool = False

    @property
    def label(self) -> str:
        """Its state in a word."""
        return str(self.state) if self.damage is None else "damaged"

    @property
    def repairable(self) -> bool:
        """Say whether a damaged copy may be written anew: not one of another life of this run, which is ``foreign``,
        nor what a newer tierfall wrote."""
        return isinstance(self.damage, IntegrityError) and not self.foreign


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All that one tier answered. ``unfinished`` are step folders without a commit record, with their bytes;
    ``starts`` say how attempts began that have committed something there, though it may be gone; ``damaged`` is what
    could not even be told apart, as in memory that was overwritten."""

    tier: str
    copies: tuple[FoundCopy, ...] = ()
    unfinished: dict[CheckpointId, int] = field(default_factory=dict)
    attempts: tuple[int, ...] = ()
    starts: tuple[AttemptStart, ...] = ()
    damaged: tuple[TierfallError, ...] = ()
    error: TierfallError | None = None

    @property
    def used_bytes(self) -> int:
        """The bytes of all copies, unfinished ones included."""
        return sum(copy.bytes for copy in self.copies) + sum(self.unfinished.values())

    def copy(self, checkpoint: CheckpointId) -> FoundCopy | None:
        return next((c for c in self.copies if c.id == checkpoint), None)

    def no_folders(
        self, step: int | None = None, attempt: int | None = None
    ) -> list[StepFolderError]:
        """Return what lies where folders of steps are to be; of one ``step``, or attempt, where that is given."""
        return [
            error
            for error in self.damaged
            if isinstance(error, StepFolderError)
            and step in (None, error.checkpoint.step)
            and attempt in (None, error.checkpoint.attempt)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCheckpoint:
    """One checkpoint over all tiers that answered. ``commit`` is None where no record of it can be read."""

    id: CheckpointId
    commit: Commit | None
    copies: dict[str, FoundCopy]
    abandoned: bool

    @property
    def bytes(self) -> int:
        """The bytes of its images; where no record says, those of its largest copy."""
        return (
            self.commit.image_bytes if self.commit else max(c.bytes for c in self.copies.values())
        )

    @property
    def wall_time_s(self) -> float | None:
        return self.commit.wall_time_s if self.commit else None

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.commit.metrics if self.commit else {}

    @property
    def tags(self) -> frozenset[str]:
        """Tags given at the save and since, less those that were taken away."""
        return keys.tags_of(self.commit.tags if self.commit else (), self.marks)

    @property
    def marks(self) -> frozenset[str]:
        return frozenset().union(*(copy.marks for copy in self.copies.values()))

    @property
    def pinned(self) -> bool:
        return keys.PIN_MARK in self.marks

    @property
    def tombstoned(self) -> bool:
        return keys.TOMBSTONE_MARK in self.marks


def merge(listings: Iterable[Listing]) -> tuple[KnownCheckpoint, ...]:
    """Bring listings together, oldest checkpoint first."""
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
    left = abandoned(
        ((id, commit.line.attempt_id) for id, commit in commits.items() if commit is not None),
        starts,
    )
    return tuple(
        KnownCheckpoint(id=id, commit=commits[id], copies=found[id], abandoned=id in left)
        for id in sorted(found)
    )


def start_of(commit: Commit) -> AttemptStart:
    """Say what a commit record tells of how its attempt began; it was not later than the record."""
    line = commit.line
    return AttemptStart(
        attempt=line.checkpoint.attempt,
        attempt_id=line.attempt_id,
        started_from=line.started_from,
        began_s=commit.wall_time_s,
    )


def starts_in(
    listings: Iterable[Listing], whole: Collection[CheckpointId] | None = None
) -> tuple[AttemptStart, ...]:
    """Say how every attempt began that has committed something, as far as these tiers know; of those that share a
    number, all but one are passed over. Copies count of what is ``whole`` alone, where that is given."""
    starts: list[AttemptStart] = []
    saved = []
    for listing in listings:
        starts += listing.starts
        for copy in listing.copies:
            if copy.commit is not None and (whole is None or copy.id in whole):
                starts.append(start_of(copy.commit))
                saved.append((copy.id, copy.commit.line.attempt_id))
    return resolve(starts, saved)


def next_attempt(listings: Sequence[Listing], own: Attempt | None = None) -> int:
    """Return an attempt's number above any that these tiers know, and above that of this process (``own``); where a
    tier could not be asked, above any that it may know, so that what is saved now comes after all that lies there."""
    saved = [
        *(copy.id.attempt for listing in listings for copy in listing.copies),
        *(id.attempt for listing in listings for id in listing.unfinished),
        *(start.attempt for listing in listings for start in listing.starts),
    ]
    taken = [number for listing in listings for number in listing.attempts]
    newest = max((*saved, *taken, own.number if own else 0, 0))
    if own is None and any(listing.error is not None for listing in listings):
        # starts that save nothing, one after the other while a tier is away, need no further room
        newest = max(newest, max(saved, default=0) + UNSEEN_ATTEMPTS)
    return newest + 1


def of_one_lineage(
    copies: dict[str, FoundCopy], passed_over: Collection[Key] = ()
) -> dict[str, FoundCopy]:
    """Tell copies apart that only share a name: starts that could not see each other's tiers may take the same attempt
    number. What is not of an attempt that is ``passed_over`` counts, or else what was saved last; the others are
    damage."""
    commits = [copy.commit for copy in copies.values() if copy.commit is not None]
    if len({commit.line.attempt_id for commit in commits}) < 2:
        return copies
    newest = max(
        commits,
        key=lambda commit: (
            (commit.line.checkpoint.attempt, commit.line.attempt_id) not in passed_over,
            commit.wall_time_s,
        ),
    ).line.attempt_id
    return {
        tier: copy
        if copy.commit is None or copy.commit.line.attempt_id == newest
        else replace(
            copy,
            commit=None,
            marks=frozenset(),
            foreign=True,
            damage=IntegrityError(
                f"{tier}: {copy.id} is of another life of this run, and another tier holds the one that counts"
            ),
        )
        for tier, copy in copies.items()
    }


def overtaken(known: Iterable[KnownCheckpoint]) -> dict[CheckpointId, frozenset[str]]:
    """Name, by checkpoint, the tiers that have newer ones and are still owed it: the newest record there says so."""
    newest: dict[str, Commit] = {}
    for checkpoint in sorted(known, key=lambda c: (c.id.attempt, c.id.step)):
        for tier, copy in checkpoint.copies.items():
            if copy.commit is not None:
                newest[tier] = copy.commit
    found: dict[CheckpointId, frozenset[str]] = {}
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
    """Make the picture that policies see of what lies on disk, for callers without a coordinator; ``wall_time_s`` is
    now."""
    late = overtaken(known)
    return View(
        tiers=tuple(tiers),
        wall_time_s=wall_time_s,
        many_ranks=any(c.commit is not None and c.commit.world_size > 1 for c in known),
        checkpoints=tuple(
            CheckpointView(
                id=c.id,
                ordinal=c.commit.line.ordinal if c.commit else 0,
                started_from=c.commit.line.started_from if c.commit else None,
                abandoned=c.abandoned,
                pinned=c.pinned,
                tombstoned=c.tombstoned,
                metrics=c.metrics,
                tags=c.tags,
                wall_time_s=c.wall_time_s,
                overtaken=late.get(c.id, frozenset()),
                copies={
                    tier: CopyView(state=copy.state, bytes=copy.bytes)
                    for tier, copy in c.copies.items()
                    if copy.damage is None
                },
            )
            for c in known
        ),
        **members,  # type: ignore[arg-type]
    )
