"""The start of a run: all ranks agree on one attempt, and on what the tiers hold.

Every rank reports its own memory, the leader of each node the tiers that only its node sees, and rank 0 the shared
tiers. Rank 0 merges the reports: a checkpoint exists where the images of all ranks do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from tierfall.core.format.catalog import (
    FoundCopy,
    Listing,
    decided_in,
    merge,
    overtaken,
    starts_in,
)
from tierfall.core.format.commit_files import image_file
from tierfall.core.format.decided import DecidedList
from tierfall.core.format.records import Attempt
from tierfall.core.ranks.messages import Message
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.restore.agreement import (
    complete,
    damaged_copies,
    not_on_all_nodes,
    only_whole,
)
from tierfall.core.restore.inventory import (
    CopyMessage,
    TierMessage,
    describe,
    merge_ranks,
    unlisted,
)
from tierfall.core.restore.redundancy import on_few_nodes, whole_on_each
from tierfall.core.types.errors import IntegrityError, RanksError, TierfallError
from tierfall.core.types.lineage import AttemptStart
from tierfall.core.types.text import format_ranks
from tierfall.core.types.values import CheckpointId
from tierfall.session import shared_folders
from tierfall.session.leftovers import displaced_in
from tierfall.session.opened_tiers import OpenedTiers
from tierfall.session.shared_folders import ProbeFiles
from tierfall.setup.attempts import warn_of_overtaken_starts
from tierfall.setup.tiers import bounds_s, patience_s, reported_tiers, reporters

TRIES = 8
_OPEN, _ATTEMPT, _READY = "open", "open: attempt", "open: ready"
_LEFTOVERS = "open: leftovers"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport(Message):
    """What ``rank`` has found on a tier, for the ranks that could not list it."""

    tier: str
    rank: int
    found: TierMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Message):
    """What a session begins with: what rank 0 has decided, by what all ranks have found on the tiers.

    ``unreachable`` and ``read_only`` have, per tier, the reason of some rank. ``whole`` has, per tier that all ranks
    reach, the checkpoints whose images are all on it; ``complete`` those whose images are all on some tier;
    ``on_few_nodes`` is as in ``View``; ``seen`` the tiers that every rank could read whole. ``first``: no rank found a
    checkpoint. ``image_bytes`` has the bytes of all ranks' images, by checkpoint. ``lags``: another rank has a listing
    that lags. ``displaced`` are complete checkpoints of which some rank's memory has another rank's image: no rank
    flushes them. ``decided`` are the names of the entries of what is decided, by the lists of all tiers that any rank
    has read; ``damaged``, per tier, the damaged copies that a rule may delete, with their damage; ``starts`` how the
    attempts began that have committed a checkpoint. ``overtaken`` names the tiers that a checkpoint is still owed to by
    the record of a newer one on any node; None where each rank decides by itself. ``reported`` has listings for the
    ranks that could not list a tier. ``elsewhere`` has, per tier, the checkpoints that some nodes have no file of,
    though they are whole or damaged there.
    """

    attempt: Attempt | None = None
    unreachable: Mapping[str, str] = field(default_factory=dict)
    read_only: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, frozenset[CheckpointId]] = field(default_factory=dict)
    complete: frozenset[CheckpointId] = frozenset()
    on_few_nodes: Mapping[str, Mapping[CheckpointId, bool]] = field(default_factory=dict)
    seen: frozenset[str] = frozenset()
    first: bool = False
    image_bytes: Mapping[CheckpointId, int] = field(default_factory=dict)
    lags: bool = False
    displaced: frozenset[CheckpointId] = frozenset()
    decided: tuple[str, ...] = ()
    damaged: Mapping[str, Mapping[CheckpointId, str]] = field(default_factory=dict)
    starts: tuple[AttemptStart, ...] = ()
    overtaken: Mapping[CheckpointId, frozenset[str]] | None = None
    reported: tuple[TierReport, ...] = ()
    elsewhere: Mapping[str, tuple[CopyMessage, ...]] = field(default_factory=dict)

    @property
    def scattered(self) -> frozenset[CheckpointId]:
        """The checkpoints whose images are all on some tier, but on none together that all ranks reach."""
        return self.complete - frozenset().union(*self.whole.values())


def begin_attempt(tiers: OpenedTiers) -> Start:
    """Take an attempt, together with the other ranks, and return what the tiers hold. The first attempt deletes what
    earlier starts left half written."""
    if tiers.agrees:
        start = agree_on_start(tiers)
    else:
        tiers.make_durable()
        is_first = tiers.attempt is None
        attempt = tiers.claim_from(tiers.next_number())
        if is_first:
            tiers.discard_unfinished()
        start = Start(attempt=attempt, first=tiers.finds_nothing())
    if tiers.ranks.topology.is_root:
        held = on_all_ranks(tiers, start)
        warn_of_overtaken_starts(tiers.run, starts_in(held), merge(held), tiers.warned_starts)
    return start


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundAtStart(Message):
    """What one rank has found. ``unreachable`` and ``read_only`` hold the reason of each tier; ``tiers`` is the
    inventory of those that it reports; ``unlisted`` names, for each stored tier that it could not list, the rank that
    reports it; ``nothing``: it knows of no checkpoint, and could read every tier."""

    number: int
    unreachable: Mapping[str, str]
    read_only: Mapping[str, str]
    tiers: Mapping[str, TierMessage]
    unlisted: Mapping[str, int]
    nothing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMessage(Message):
    """What one rank contributes to a call of ``open``: what it has found, or whether a tier ``refused`` the attempt, or
    has fallen ``silent`` since; or the ``error`` that keeps it from starting."""

    error: str | None = None
    found: FoundAtStart | None = None
    refused: bool = False
    silent: bool = False
    read_only: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDecision(Message):
    """The ranks at which a tier ``refused`` the attempt, and the tiers that a rank may not write to, with why."""

    refused: tuple[int, ...]
    read_only: Mapping[str, str]


def agree_on_start(tiers: OpenedTiers) -> Start:
    """Take one attempt for all ranks. Raises, on every rank, what kept one of them from starting.

    All ranks exclude a tier that one rank cannot reach: no checkpoint would ever be whole there. Where one falls silent
    after that, they decide again, without it.
    """
    ranks, is_first = tiers.ranks, tiers.attempt is None
    _find_shared(tiers)
    tiers.make_durable()
    config = tiers.config
    order = [tier.name for tier in config.chain]
    reported_by = reporters(config, ranks)
    number = tiers.next_number()
    for _ in range(TRIES):
        found = FoundAtStart(
            number=number,
            unreachable={tier: str(error) for tier, error in tiers.errors.items()},
            read_only=tiers.found_read_only,
            tiers=describe(tiers.listings, mine=reported_tiers(config, ranks)),
            unlisted=unlisted(tiers.listings, reported_by),
            nothing=tiers.finds_nothing(),
        )
        start = ranks.agree(
            _OPEN,
            StartMessage(found=found),
            lambda messages: decide(tiers, _found_by_all(messages), order),
            Start,
            timeout_s=_patience_s(tiers),
        )
        assert start.attempt is not None
        tiers.exclude_all(start.unreachable)
        tiers.make_read_only(start.read_only)
        with _report_error(ranks, _ATTEMPT):
            taken = tiers.claim(start.attempt)
        message = StartMessage(refused=not taken, read_only=tiers.found_read_only)
        answer = ranks.agree(_ATTEMPT, message, _merge_attempts, AttemptDecision)
        tiers.make_read_only(answer.read_only)
        if not answer.refused and (not is_first or _discard_unfinished(tiers)):
            tiers.listings = fill_in(tiers.listings, start, reported_by)
            return start
        number = start.attempt.number + 1
    raise RanksError(
        f"open: {format_ranks(answer.refused)} found another start's attempt in the place of each of {TRIES} numbers: "
        "another job of this run's name is starting at the same time"
    )


def _discard_unfinished(tiers: OpenedTiers) -> bool:
    """Delete what earlier starts left half written, now that all ranks have written the attempt, and none writes
    anything else. Return whether all ranks can go on with all tiers."""
    timeout_s = _patience_s(tiers)
    with _report_error(tiers.ranks, _LEFTOVERS, timeout_s):
        silent = not tiers.discard_unfinished()
    message = StartMessage(silent=silent)
    return tiers.ranks.agree(_LEFTOVERS, message, _none_silent, bool, timeout_s=timeout_s)


def _none_silent(messages: Mapping[int, StartMessage]) -> bool:
    _check_started(messages)
    return not any(message.silent for message in messages.values())


def fill_in(
    listings: Iterable[Listing], start: Start, reported_by: Mapping[str, int]
) -> tuple[Listing, ...]:
    """Replace the listings that failed on this rank by those of the ranks that report the tiers, where these could list
    them. Without them, this rank would owe copies that exist, and wait for the other ranks to upload their images."""
    reported = {
        report.tier: merge_ranks({report.rank: {report.tier: report.found}}, [report.tier])[0]
        for report in start.reported
        if report.rank == reported_by.get(report.tier)
    }
    return tuple(x if x.error is None else reported.get(x.tier, x) for x in listings)


def _find_shared(tiers: OpenedTiers) -> None:
    """Find out, at the first attempt, which folders all nodes see. No agreement of the ranks comes before it."""
    if tiers.attempt is not None or not shared_folders.tiers_to_probe(tiers):
        return
    with shared_folders.files_of_probe(tiers) as write_files:

        def write(messages: dict[int, StartMessage]) -> ProbeFiles:
            _check_started(messages)
            return write_files()

        timeout_s = _patience_s(tiers)
        written = tiers.ranks.agree(_OPEN, StartMessage(), write, ProbeFiles, timeout_s=timeout_s)
        failed = shared_folders.probe(tiers, written)
    tiers.exclude_all({**written.failed, **failed})


def _patience_s(tiers: OpenedTiers) -> float:
    """Return how many seconds later than the first rank the last may call: it may have waited for a silent tier, once
    to open it and once to list it, and have allocated host memory for its image and brought it back from peers."""
    bounds = bounds_s(tiers.config)
    slowest_s = max((bounds[tier.name] for tier in tiers.config.stored), default=0.0)
    recovery_s = 0.0 if tiers.config.peers is None else patience_s(tiers.config)
    return tiers.config.max_wait_s + 2 * slowest_s + recovery_s


@contextmanager
def opened_by_each(ranks: Ranks) -> Iterator[None]:
    """Report an error in this block to the other ranks: they wait for this rank in ``agree_on_start``."""
    with _report_error(ranks, _OPEN):
        yield


@contextmanager
def all_ranks_or_none(ranks: Ranks, *, timeout_s: float) -> Iterator[None]:
    """Start no rank unless all ranks complete this block, the last within ``timeout_s`` seconds of the first."""
    with _report_error(ranks, _READY, timeout_s):
        yield
    ranks.agree(_READY, StartMessage(), _check_started, object, timeout_s=timeout_s)


@contextmanager
def _report_error(ranks: Ranks, what: str, timeout_s: float | None = None) -> Iterator[None]:
    """Report an error in this block to the other ranks, at their next agreement."""
    try:
        yield
    except BaseException as error:
        with suppress(TierfallError):  # it has the same reason: this rank raises its own error
            message = StartMessage(error=str(error) or repr(error))
            ranks.agree(what, message, _check_started, object, timeout_s=timeout_s, is_last=True)
        raise


def _check_started(messages: Mapping[int, StartMessage]) -> None:
    for rank, message in messages.items():
        if message.error is not None:
            raise RanksError(f"open: rank {rank}: {message.error}")


def _found_by_all(messages: Mapping[int, StartMessage]) -> dict[int, FoundAtStart]:
    _check_started(messages)
    return {rank: message.found for rank, message in messages.items() if message.found is not None}


def decide(tiers: OpenedTiers, found: Mapping[int, FoundAtStart], order: list[str]) -> Start:
    """Decide, on rank 0, which attempt all ranks take and which checkpoints of the tiers count for all of them.

    ``found`` are the reports of the ranks, ``order`` are the tiers' names.
    """
    inventories = {rank: one.tiers for rank, one in found.items()}
    listings = merge_ranks(inventories, order)
    whole_somewhere, _ = complete(listings)
    attempt = tiers.claim_from(max(one.number for one in found.values()))
    unreachable = _first_reasons((rank, one.unreachable) for rank, one in found.items())
    read_only = _first_reasons((rank, one.read_only) for rank, one in found.items())
    reachable = [listing for listing in listings if listing.tier not in unreachable]
    host, copies = tiers.config.host.name, tiers.config.peer_copies
    few = on_few_nodes(reachable, inventories, copies=copies, whole=whole_somewhere, host=host)
    return Start(
        unreachable=unreachable,
        read_only={**read_only, **tiers.found_read_only},
        attempt=attempt,
        whole=whole_on_each(reachable, few, host=host),
        complete=whole_somewhere,
        on_few_nodes=few,
        seen=frozenset(x.tier for x in listings if x.unread is None),
        displaced=whole_somewhere
        & displaced_in(inventories, host=host, world_size=tiers.ranks.topology.world_size),
        decided=decided_in(listings).names,
        damaged=damaged_copies(listings, host=host),
        starts=tuple(starts_in(listings, whole_somewhere)),
        overtaken=overtaken(merge(map(only_whole, listings))),
        first=all(one.nothing for one in found.values()),
        image_bytes={c.id: c.bytes for c in merge(listings)},
        lags=any(listing.lags for listing in listings),
        reported=tuple(
            TierReport(tier=tier, rank=rank, found=inventories[rank][tier])
            for tier, rank in sorted({x for one in found.values() for x in one.unlisted.items()})
            if tier not in unreachable and inventories[rank][tier].error is None
        ),
        elsewhere={x.tier: not_on_all_nodes(x, inventories) for x in listings},
    )


def _merge_attempts(messages: Mapping[int, StartMessage]) -> AttemptDecision:
    _check_started(messages)
    return AttemptDecision(
        refused=tuple(rank for rank, message in messages.items() if message.refused),
        read_only=_first_reasons((rank, message.read_only) for rank, message in messages.items()),
    )


def _first_reasons(reasons: Iterable[tuple[int, Mapping[str, str]]]) -> dict[str, str]:
    """Return, per tier, the first reason that any rank has. It counts for all ranks: no checkpoint would be whole on a
    tier that one of them does not write to."""
    found: dict[str, str] = {}
    for rank, by_tier in reasons:
        for tier, why in by_tier.items():
            found.setdefault(tier, f"rank {rank}: {why}")
    return found


def on_all_ranks(tiers: OpenedTiers, start: Start) -> tuple[Listing, ...]:
    """Return this rank's listings, without the checkpoints of which other ranks lack their images, if ranks have
    agreed on the ``start``.

    An image in memory counts where the other images are on some tier, since it is read first; but not where it is
    another rank's, whose record does not name this rank's files. What any rank has found to be decided counts for all,
    and so does damage of a copy that a rule may delete.
    """
    if start.overtaken is None:
        return tiers.listings
    host, shard = tiers.config.host.name, tiers.ranks.shard
    decided = DecidedList.parse(start.decided)

    def counts(tier: str, copy: FoundCopy) -> bool:
        if tier != host:
            return copy.id in start.whole[tier] or copy.id in start.damaged.get(tier, {})
        is_ours = copy.commit is None or image_file(copy.commit, shard) is not None
        return is_ours and copy.id in start.complete

    def damage_of(tier: str, copy: FoundCopy) -> TierfallError | None:
        why = start.damaged.get(tier, {}).get(copy.id)
        return copy.damage if why is None else IntegrityError(why)

    def beside(listing: Listing) -> Iterable[FoundCopy]:
        found = start.elsewhere.get(listing.tier, ()) if listing.error is None else ()
        return (one.copy_of(0, listing.tier) for one in found if listing.copy(one.id) is None)

    return tuple(
        replace(
            listing,
            starts=start.starts,
            decided=listing.decided | decided,
            copies=tuple(
                replace(copy, damage=damage_of(listing.tier, copy))
                for copy in (*listing.copies, *beside(listing))
                if counts(listing.tier, copy)
            ),
        )
        for listing in tiers.listings
    )
