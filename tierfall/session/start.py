"""How the ranks of a start come to one attempt, and to one picture of what the tiers hold.

Every rank looks at its own memory, the leader of each node at what its node alone sees, rank 0 at what all see. Rank 0
puts that together: a checkpoint is there when every rank's part of it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tierfall.config import Config, ObjectTierConfig
from tierfall.config import StoredTierConfig as StoredSection
from tierfall.core.format.catalog import FoundCopy, Listing, merge, starts_in
from tierfall.core.format.commit_files import image_file
from tierfall.core.format.records import Attempt, Commit, read_commit
from tierfall.core.ranks.messages import Message
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.restore.agreement import complete, whole_on
from tierfall.core.restore.inventory import TierMessage, describe, merge_ranks
from tierfall.core.types.errors import IntegrityError, RanksError, TierfallError
from tierfall.core.types.lineage import AttemptStart
from tierfall.core.types.text import ranks_named
from tierfall.core.types.values import CheckpointId
from tierfall.session import shared_folders
from tierfall.session.leftovers import committed_in_memory
from tierfall.session.shared_folders import ProbeFiles
from tierfall.setup.tiers import bounds_s

if TYPE_CHECKING:
    from tierfall.session.session import Session

TRIES = 8
_OPEN, _ATTEMPT, _READY = "open", "open: attempt", "open: ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What all ranks know after they have met. ``whole`` names, per tier, the checkpoints of which every rank's part is
    there; ``complete`` those whose parts are all somewhere; ``seen`` names the tiers that every rank could read;
    ``first``: no rank found any; ``inherited``: see ``leftovers.committed_in_memory``. ``marks``, per tier, are those
    that any rank found; ``deleted`` bear a tombstone somewhere, and no pin; ``damaged``, per tier, may be repaired,
    each with what is wrong with it; ``starts`` say how attempts began that have committed something."""

    attempt: Attempt
    whole: Mapping[str, frozenset[CheckpointId]]
    complete: frozenset[CheckpointId]
    seen: frozenset[str]
    first: bool
    inherited: tuple[Commit, ...] = ()
    marks: Mapping[str, Mapping[CheckpointId, frozenset[str]]] = field(default_factory=dict)
    deleted: frozenset[CheckpointId] = frozenset()
    damaged: Mapping[str, Mapping[CheckpointId, str]] = field(default_factory=dict)
    starts: tuple[AttemptStart, ...] = ()

    @property
    def scattered(self) -> frozenset[CheckpointId]:
        """Whose parts are all somewhere, but on no tier together."""
        return self.complete - frozenset().union(*self.whole.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundAtStart(Message):
    """What one rank has found. ``unreachable`` and ``read_only`` hold the reason of each tier; ``tiers`` is the
    inventory of those that it reports; ``nothing``: it knows of no checkpoint, and could read every tier."""

    number: int
    unreachable: Mapping[str, str]
    read_only: Mapping[str, str]
    tiers: Mapping[str, TierMessage]
    nothing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMessage(Message):
    """What one rank contributes to a call of ``open``: what it has found, or whether a tier ``refused`` the attempt; or
    the ``error`` that keeps it from starting."""

    error: str | None = None
    found: FoundAtStart | None = None
    refused: bool = False
    read_only: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDecision(Message):
    """What rank 0 decides on a start; see ``Start``. ``inherited`` are the texts of commit records."""

    unreachable: Mapping[str, str]
    read_only: Mapping[str, str]
    attempt: Attempt
    whole: Mapping[str, frozenset[CheckpointId]]
    complete: frozenset[CheckpointId]
    seen: frozenset[str]
    inherited: tuple[str, ...]
    marks: Mapping[str, tuple[tuple[CheckpointId, frozenset[str]], ...]]
    damaged: Mapping[str, tuple[tuple[CheckpointId, str], ...]]
    deleted: frozenset[CheckpointId]
    starts: tuple[AttemptStart, ...]
    first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDecision(Message):
    """The ranks at which a tier ``refused`` the attempt, and the tiers that a rank may not write to, with why."""

    refused: tuple[int, ...]
    read_only: Mapping[str, str]


def is_shared(tier: StoredSection) -> bool:
    """Say whether all nodes see the same files there."""
    return isinstance(tier, ObjectTierConfig) or bool(tier.shared)


def reported_tiers(config: Config, ranks: Ranks) -> tuple[str, ...]:
    """Name the tiers that this rank tells the others of."""
    owned = (tier.name for tier in config.stored if is_owner(tier, ranks))
    return (config.host.name, *owned)


def is_owner(tier: StoredSection, ranks: Ranks) -> bool:
    """Say whether this rank commits, collects and deletes there."""
    return ranks.topology.is_root if is_shared(tier) else ranks.topology.is_leader


def agree_on_start(session: Session) -> Start:
    """Take one attempt for all ranks. Raises, on every rank, what kept one of them from starting.

    A tier that one rank cannot reach is left out by all: nothing would ever be whole there.
    """
    ranks = session.ranks
    _find_shared(session)
    session.settle()
    config = session.config
    order = [tier.name for tier in config.chain]
    number = session.next_number()
    for _ in range(TRIES):
        found = FoundAtStart(
            number=number,
            unreachable={tier: str(error) for tier, error in session.errors.items()},
            read_only=session.found_read_only,
            tiers=describe(session.listings, mine=reported_tiers(config, ranks)),
            nothing=session.knows_of_nothing(),
        )
        decision = ranks.agree(
            _OPEN,
            StartMessage(found=found),
            lambda messages: decide(session, _found_by_all(messages), order),
            StartDecision,
            timeout_s=_patience_s(session),
        )
        session.leave_out(decision.unreachable)
        session.go_on_reading(decision.read_only)
        with _report_error(ranks, _ATTEMPT):
            taken = session.adopt_attempt(decision.attempt)
        message = StartMessage(refused=not taken, read_only=session.found_read_only)
        answer = ranks.agree(_ATTEMPT, message, _merge_attempts, AttemptDecision)
        session.go_on_reading(answer.read_only)
        if not answer.refused:
            return read_start(decision)
        number = decision.attempt.number + 1
    raise RanksError(
        f"open: {ranks_named(answer.refused)} found another start's attempt in the place of each of {TRIES} numbers: "
        "another job of this run's name is starting at the same time"
    )


def read_start(decision: StartDecision) -> Start:
    what = "commit record of an adopted checkpoint"
    return Start(
        attempt=decision.attempt,
        whole=decision.whole,
        complete=decision.complete,
        seen=decision.seen,
        first=decision.first,
        inherited=tuple(read_commit(text.encode(), what=what) for text in decision.inherited),
        marks={tier: dict(pairs) for tier, pairs in decision.marks.items()},
        deleted=decision.deleted,
        damaged={tier: dict(pairs) for tier, pairs in decision.damaged.items()},
        starts=decision.starts,
    )


def _find_shared(session: Session) -> None:
    """Find out, once, which folders all nodes see. It is the first that ranks do together."""
    if session.probed or not shared_folders.tiers_to_probe(session):
        return
    with shared_folders.files_of_probe(session) as files:

        def write(messages: dict[int, StartMessage]) -> ProbeFiles:
            _check_started(messages)
            return files.write()

        timeout_s = _patience_s(session)
        written = session.ranks.agree(_OPEN, StartMessage(), write, ProbeFiles, timeout_s=timeout_s)
        session.config, failed = shared_folders.probe(session, written)
    session.leave_out({**written.failed, **failed})
    session.probed = True


def _patience_s(session: Session) -> float:
    """How much longer than the fastest rank the slowest may take to come: it may have waited for a tier that did not
    answer, to be opened and to be listed."""
    bounds = bounds_s(session.config)
    slowest_s = max((bounds[tier.name] for tier in session.config.stored), default=0.0)
    return session.config.max_wait_s + 2 * slowest_s


@contextmanager
def opened_by_each(ranks: Ranks) -> Iterator[None]:
    """What is done inside is done by each rank before it meets the others in ``agree_on_start``, who wait for it: they
    are to know why it does not come."""
    with _report_error(ranks, _OPEN):
        yield


@contextmanager
def ready_on_all_ranks(ranks: Ranks, *, timeout_s: float) -> Iterator[None]:
    """What is done inside is done by all ranks, or no rank starts. ``timeout_s`` is how much longer than the fastest
    rank the slowest may take."""
    with _report_error(ranks, _READY, timeout_s):
        yield
    if ranks.many:
        ranks.agree(_READY, StartMessage(), _check_started, object, timeout_s=timeout_s)


@contextmanager
def _report_error(ranks: Ranks, what: str, timeout_s: float | None = None) -> Iterator[None]:
    """Tell the other ranks, at their next agreement, what kept this one from coming to it."""
    try:
        yield
    except BaseException as error:
        if ranks.many:
            with suppress(TierfallError):  # it says the same: this rank raises its own
                message = StartMessage(error=str(error) or repr(error))
                ranks.agree(what, message, _check_started, object, timeout_s=timeout_s)
        raise


def _check_started(messages: Mapping[int, StartMessage]) -> None:
    for rank, message in messages.items():
        if message.error is not None:
            raise RanksError(f"open: rank {rank}: {message.error}")


def _found_by_all(messages: Mapping[int, StartMessage]) -> dict[int, FoundAtStart]:
    _check_started(messages)
    return {rank: message.found for rank, message in messages.items() if message.found is not None}


def decide(session: Session, found: Mapping[int, FoundAtStart], order: list[str]) -> StartDecision:
    """Decide, as rank 0, on the attempt of all ranks and on what the tiers, listed in ``order``, hold for all of them,
    by what each has found."""
    inventories = {rank: one.tiers for rank, one in found.items()}
    listings = merge_ranks(inventories, order)
    whole_somewhere, _ = complete(listings)
    attempt = session.take_number(max(one.number for one in found.values()))
    read_only = _first_reasons((rank, one.read_only) for rank, one in found.items())
    return StartDecision(
        unreachable=_first_reasons((rank, one.unreachable) for rank, one in found.items()),
        read_only={**read_only, **session.found_read_only},
        attempt=attempt,
        whole={
            listing.tier: frozenset(c.id for c in listing.copies if whole_on(listing, c.id))
            for listing in listings
        },
        complete=whole_somewhere,
        seen=frozenset(listing.tier for listing in listings if listing.error is None),
        inherited=committed_in_memory(
            listings,
            inventories,
            host=session.config.host.name,
            world_size=session.ranks.topology.world_size,
        ),
        marks={
            listing.tier: tuple((c.id, c.marks) for c in listing.copies if c.marks)
            for listing in listings
        },
        damaged=damaged_copies(listings, host=session.config.host.name),
        deleted=frozenset(c.id for c in merge(listings) if c.tombstoned and not c.pinned),
        starts=tuple(starts_in(listings, whole_somewhere)),
        first=all(one.nothing for one in found.values()),
    )


def damaged_copies(
    listings: Sequence[Listing], *, host: str
) -> dict[str, tuple[tuple[CheckpointId, str], ...]]:
    """Return what is wrong with the copies on each tier that may be repaired; those in memory may not."""
    found: dict[str, tuple[tuple[CheckpointId, str], ...]] = {}
    for checkpoint in merge(listings):
        for tier, copy in checkpoint.copies.items():
            if copy.repairable and tier != host:
                found[tier] = (*found.get(tier, ()), (checkpoint.id, str(copy.damage)))
    return found


def _merge_attempts(messages: Mapping[int, StartMessage]) -> AttemptDecision:
    _check_started(messages)
    return AttemptDecision(
        refused=tuple(rank for rank, message in messages.items() if message.refused),
        read_only=_first_reasons((rank, message.read_only) for rank, message in messages.items()),
    )


def _first_reasons(reasons: Iterable[tuple[int, Mapping[str, str]]]) -> dict[str, str]:
    """Return, per tier, the first reason that any rank has. A tier that one rank cannot reach, or cannot write to, is
    left out by all: nothing would ever be whole there."""
    found: dict[str, str] = {}
    for rank, by_tier in reasons:
        for tier, why in by_tier.items():
            found.setdefault(tier, f"rank {rank}: {why}")
    return found


def held_by_all(session: Session, start: Start) -> tuple[Listing, ...]:
    """Leave out, of what this rank found, what other ranks do not have their parts of.

    What lies in memory counts as long as the other parts are on some tier: it is read first; but not where it is
    another rank's part, whose record says nothing of this one's. A mark that any rank found counts for all, and so does
    damage that may be repaired.
    """
    host, shard = session.config.host.name, session.ranks.shard

    def counts(tier: str, copy: FoundCopy) -> bool:
        if tier != host:
            return copy.id in start.whole[tier] or copy.id in start.damaged.get(tier, {})
        is_ours = copy.commit is None or image_file(copy.commit, shard) is not None
        return is_ours and copy.id in start.complete

    def damage_of(tier: str, copy: FoundCopy) -> TierfallError | None:
        why = start.damaged.get(tier, {}).get(copy.id)
        return copy.damage if why is None else IntegrityError(why)

    return tuple(
        replace(
            listing,
            starts=start.starts,
            copies=tuple(
                replace(
                    copy,
                    marks=copy.marks | start.marks.get(listing.tier, {}).get(copy.id, frozenset()),
                    damage=damage_of(listing.tier, copy),
                )
                for copy in listing.copies
                if counts(listing.tier, copy)
            ),
        )
        for listing in session.listings
    )
