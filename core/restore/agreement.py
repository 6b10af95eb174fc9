"""Agreement on a restore: which checkpoints all ranks may restore, by what each of them finds on the tiers.

Each rank sends the inventory of the tiers that it reports. Rank 0 merges them, leaves out each checkpoint that lacks a
shard, and chooses for all ranks. After each checkpoint that was tried, every rank learns whether any rank failed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice

from tierfall.core.copies.checkpoint_reader import PASSABLE
from tierfall.core.copies.chunk_reader import Fallback, ReadTally
from tierfall.core.format.catalog import (
    FoundCopy,
    KnownCheckpoint,
    Listing,
    NotReadError,
    merge,
    starts_in,
)
from tierfall.core.format.commit_files import ranks_with_image
from tierfall.core.format.records import Commit
from tierfall.core.ranks.agreement import check_same_arguments
from tierfall.core.ranks.messages import Message, NumberRanges
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.restore.assign import (
    Holders,
    RankGroup,
    group_needs,
)
from tierfall.core.restore.candidates import (
    RestoreRequest,
    is_first_unread,
    list_fitting,
    unread_text,
    without_bad,
)
from tierfall.core.restore.inventory import (
    Inventory,
    TierMessage,
    describe,
    merge_ranks,
)
from tierfall.core.restore.pulls import RankAddress
from tierfall.core.restore.restore import HALF_FILLED, EndedError, RankFailure, Together
from tierfall.core.types.errors import IntegrityError, RanksError, RestoreError, TierfallError
from tierfall.core.types.text import format_ranks
from tierfall.core.types.values import CheckpointId, CopyState

logger = logging.getLogger("tierfall")

_NAMED_MAX = 8
_UNFINISHED = "the tensors are in place, but the rest is not: "


# All ranks -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _RestoreCall(Message):
    """What a rank was asked to restore, and what it has found on the tiers that it reports."""

    request: RestoreRequest
    tiers: Mapping[str, TierMessage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates(Message):
    """What all ranks may restore, newest first. ``commits`` are their records, which name no files and nodes.
    ``fallbacks`` are the skipped sources, with reasons; ``unread`` the checkpoints that are skipped because they
    could not be read; ``others`` are those of ``ReadTally``. ``later``: that depends on commit records that were left
    to be read later."""

    later: bool = False
    commits: tuple[Commit, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    unread: tuple[CheckpointId, ...] = ()
    others: tuple[CheckpointId, ...] = ()


def agree_to_restore(
    ranks: Ranks,
    listings: Sequence[Listing],
    request: RestoreRequest,
    *,
    mine: Sequence[str],
    tally: ReadTally,
) -> list[KnownCheckpoint] | None:
    """Return what all ranks may restore, newest first, the same on all; empty where no tier holds a checkpoint. None:
    that depends on commit records that some rank has left to be read later. If there are any, older checkpoints may be
    left out.

    Every rank calls it with the same ``request``. ``listings`` are of all tiers, fastest first; ``mine`` names those
    that this rank reports, so that a tier which many ranks see is reported once. A checkpoint that no tier here holds
    has no copies.
    Raises what ``choose`` raises, on all ranks; RanksError where a rank did not come.
    """
    order = [listing.tier for listing in listings]

    def decide(calls: dict[int, _RestoreCall]) -> Candidates:
        check_same_arguments("restore", {rank: asdict(c.request) for rank, c in calls.items()})
        return choose_candidates({rank: c.tiers for rank, c in calls.items()}, order, request)

    call = _RestoreCall(request=request, tiers=describe(listings, mine=mine))
    decision = ranks.agree("restore", call, decide, Candidates)
    if decision.later:
        return None
    tally.others = decision.others
    for fallback in decision.fallbacks:
        tally.add_skipped(fallback.what, fallback.reason, fallback.id)
    for id in decision.unread:
        tally.found_unread(id)
    agreed = {commit.lineage.checkpoint: commit for commit in decision.commits}
    lives = {id: commit.lineage.attempt_id for id, commit in agreed.items()}
    here = {known.id: known for known in merge(_keep_agreed(lives, x) for x in listings)}
    found = []
    for id, commit in agreed.items():
        known = here.get(id) or KnownCheckpoint(id=id, commit=commit, copies={}, abandoned=False)
        # What was not found here, or only damaged, has the lineage and world size of the agreed record.
        found.append(replace(known, commit=known.commit or commit))
    return found


# One candidate ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateStep(Message):
    """A rank's part in the next step of all ranks with a candidate: the images that it sees on each tier, by the tier's
    number in the chain, and where it is asked for chunks; then the chunks that it needs, by image; last, neither: it
    has filled its targets. Or it has ``failed``, at any step. ``for_good``: no older checkpoint is to be tried."""

    id: CheckpointId
    seen: Mapping[int, NumberRanges] | None = None
    address: RankAddress = field(default_factory=RankAddress)
    needs: Mapping[int, NumberRanges] | None = None
    failed: str | None = None
    for_good: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecision(Message):
    """What all ranks learn at a step. ``failed`` ends the candidate on all of them."""

    failed: RankFailure | None = None
    seen: Mapping[int, Mapping[int, NumberRanges]] = field(default_factory=dict)
    addresses: tuple[RankAddress, ...] = ()
    groups: tuple[RankGroup, ...] = ()


def agree_on_step(
    ranks: Ranks, step: CandidateStep, holders: Holders, *, timeout_s: float | None
) -> StepDecision:
    """Take the next step with a candidate, on all ranks. ``holders`` are known after the first. Raises EndedError if
    another rank has failed, also before this step."""
    decide = partial(_decide_step, holders=holders)
    decision = ranks.agree("restore: fill", step, decide, StepDecision, timeout_s=timeout_s)
    if decision.failed is not None and step.failed is None:
        raise EndedError(decision.failed)
    return decision


def make_barrier(ranks: Ranks, *, timeout_s: float | None = None) -> Together:
    """Return the ``together`` of ``fill_first``, for these ranks. ``timeout_s`` is how much longer than the fastest
    rank the slowest may take to fill its targets."""

    def end_candidate(
        checkpoint: KnownCheckpoint, error: BaseException | None
    ) -> RankFailure | None:
        if isinstance(error, EndedError):
            return error.failure
        text = str(error) if isinstance(error, TierfallError) else repr(error)
        step = CandidateStep(
            id=checkpoint.id,
            failed=None if error is None else text.removesuffix(HALF_FILLED),
            for_good=not isinstance(error, PASSABLE),
        )
        try:
            return agree_on_step(ranks, step, {}, timeout_s=timeout_s).failed
        except EndedError as ended:
            return ended.failure

    return end_candidate


def _decide_step(steps: Mapping[int, CandidateStep], holders: Holders) -> StepDecision:
    """Decide for all ranks. The failure that all follow is the first that is for good, or else the first."""
    others = [rank for rank, one in steps.items() if one.id != steps[0].id]
    if others:
        raise RanksError(
            f"restore: {format_ranks(others)} filled {steps[others[0]].id} where rank 0 filled {steps[0].id}"
        )
    failed = [
        RankFailure(rank=rank, message=one.failed, permanent=one.for_good)
        for rank, one in steps.items()
        if one.failed is not None
    ]
    if failed:
        return StepDecision(failed=next((f for f in failed if f.permanent), failed[0]))
    seen = {rank: one.seen for rank, one in steps.items() if one.seen is not None}
    needs = {rank: one.needs for rank, one in steps.items() if one.needs is not None}
    if {len(seen), len(needs)} - {0, len(steps)}:
        raise RanksError(f"restore of {steps[0].id}: the ranks are at different steps with it")
    addresses = tuple(steps[rank].address for rank in sorted(seen))
    return StepDecision(seen=seen, addresses=addresses, groups=group_needs(needs, holders))


# All ranks, at the end -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _FinishOutcome(Message):
    """The error of this rank, or of ``rank``, if one failed. ``saved``: this rank, or any, has saved since its lineage
    began."""

    rank: int = 0
    failed: str | None = None
    saved: bool = False


def finish_on_all_ranks(
    ranks: Ranks,
    finish: Callable[[], None],
    id: CheckpointId,
    *,
    saved: bool,
    request: RestoreRequest,
    timeout_s: float | None = None,
) -> bool:
    """Call ``finish``, which ends a restore, on all ranks; return whether any of them has ``saved`` since its lineage
    began.

    Raises RestoreError on every rank if ``finish`` failed on one. If the ``request`` fills the state in place, all
    errors call it half filled: on the other ranks it is of a step that not all ranks are at.
    """
    of = f"{request.operation} of {id}"
    half = HALF_FILLED if request.in_place else ""
    failure: BaseException | None = None
    try:
        finish()
    except BaseException as error:  # noqa: BLE001 - the other ranks must know; raised below
        failure = error
    failed = None if failure is None else str(failure) or repr(failure)
    outcome = _FinishOutcome(failed=failed, saved=saved)
    try:
        decision = ranks.agree(
            "restore: finish", outcome, _finished, _FinishOutcome, timeout_s=timeout_s
        )
    except TierfallError as lost:
        if failure is None:
            raise RestoreError(f"{of}: {_UNFINISHED}{lost}{half}") from lost
        failure.add_note(f"the other ranks may not know of it: {lost}")
        decision = _FinishOutcome()
    if isinstance(failure, Exception):
        raise RestoreError(f"{of}: {_UNFINISHED}{failure}{half}") from failure
    if failure is not None:
        raise failure
    if decision.failed is not None:
        raise RestoreError(f"{of}: rank {decision.rank}: {_UNFINISHED}{decision.failed}{half}")
    return decision.saved


def _finished(outcomes: Mapping[int, _FinishOutcome]) -> _FinishOutcome:
    rank = next((rank for rank, one in outcomes.items() if one.failed is not None), 0)
    saved = any(one.saved for one in outcomes.values())
    return _FinishOutcome(rank=rank, failed=outcomes[rank].failed, saved=saved)


def _keep_agreed(lives: Mapping[CheckpointId, str], listing: Listing) -> Listing:
    """Treat a copy of the same name whose attempt is not the agreed one as damaged: its shards are of another
    checkpoint."""

    def held(copy: FoundCopy) -> FoundCopy:
        life = lives.get(copy.id)
        if copy.commit is None or life in (None, copy.commit.lineage.attempt_id):
            return copy
        damage = IntegrityError(
            f"{listing.tier}: {copy.id} is of another life of this run than the one that the ranks agreed on"
        )
        return replace(copy, commit=None, damage=damage, on_peers=False, foreign=True)

    return replace(listing, copies=tuple(map(held, listing.copies)))


# What rank 0 decides ---------------------------------------------------------------------------------


def choose_candidates(
    inventories: Mapping[int, Inventory], order: Sequence[str], request: RestoreRequest
) -> Candidates:
    """Choose for all ranks, by what each has found.

    Raises RestoreError as ``choose`` does, and where every candidate lacks shards: a run whose checkpoints can only
    partly be read does not start anew.
    """
    listings = merge_ranks(inventories, order)
    whole, lacking = complete(listings)
    tally = ReadTally()
    partial = {copy.id for listing in listings for copy in listing.copies} - whole - lacking.keys()
    listings = tuple(_without(partial, listing) for listing in listings)
    if is_first_unread(listings, request):
        return Candidates(later=True)
    for id in sorted(partial):
        reason = "only some ranks had sealed it in memory, and no tier that answered holds the rest"
        tally.add_skipped(f"step {id}", reason, id)
        logger.warning("restore: step %s is no checkpoint: %s", id, reason)
    candidates = list_fitting(listings, request, tally)
    taken: list[KnownCheckpoint] = []
    unread: list[CheckpointId] = []
    for known in candidates:
        lack = _lack(known, request.tier)
        if not lack:
            taken.append(known)
            continue
        if (error := _unread(known, request.tier)) is not None:
            is_later = isinstance(error, NotReadError)
            if taken and (is_later or not request.ignore_unreachable):
                break  # the older ones are chosen among only if these are passed over
            if is_later:
                return Candidates(later=True)
            if not request.ignore_unreachable:
                of = f"{request.operation} of {known.id}"
                raise RestoreError(unread_text(of, error, request)) from error
            unread.append(known.id)
        tally.add_skipped(f"step {known.id}", lack, known.id)
    if candidates and not taken:
        raise RestoreError(
            f"{request.operation}: no checkpoint is there whole: "
            + "; ".join(f"{f.what}: {f.reason}" for f in tally.fallbacks[-8:])
            + ". Bring back the machines or tiers that hold the rest, or open with fresh=True to begin anew"
        )
    taken = without_bad(taken, request, tally)
    commits = [known.commit for known in taken if known.commit is not None]
    return Candidates(
        commits=tuple(replace(commit, files=(), nodes=()) for commit in commits),
        fallbacks=tuple(tally.fallbacks),
        unread=tuple(unread),
        others=tally.others,
    )


def _without(ids: Collection[CheckpointId], listing: Listing) -> Listing:
    return replace(listing, copies=tuple(copy for copy in listing.copies if copy.id not in ids))


def complete(
    listings: Iterable[Listing],
) -> tuple[frozenset[CheckpointId], dict[CheckpointId, str]]:
    """Return the checkpoints of which every shard is on some tier, and what each other committed one lacks.

    A checkpoint that only some ranks sealed in memory, and no tier completes, is neither: its start died meanwhile. One
    that peer memory had committed, as an image says, is committed, though this start may not read that tier.
    """
    whole: set[CheckpointId] = set()
    lacking: dict[CheckpointId, str] = {}
    for known in merge(listings):
        lack = _lack(known)
        if not lack:
            whole.add(known.id)
        elif known.commit is None or any(
            copy.on_peers or copy.state is CopyState.COMMITTED for copy in known.copies.values()
        ):
            lacking[known.id] = lack
    return frozenset(whole), lacking


def is_whole(copy: FoundCopy) -> bool:
    """Return whether every shard of a checkpoint is on the tier of this copy."""
    return copy.commit is not None and copy.damage is None and names_all_shards(copy.commit)


def names_all_shards(commit: Commit) -> bool:
    """Return whether a record, merged from those of all nodes, names every shard of its checkpoint."""
    return not _absent([commit])


def damaged_copies(listings: Sequence[Listing], *, host: str) -> dict[str, dict[CheckpointId, str]]:
    """Return, per tier, the damaged copies that all ranks know and a rule may delete, with their damage: no images in
    memory, and no copy of which some nodes have no shard."""
    found: dict[str, dict[CheckpointId, str]] = {}
    for checkpoint in merge(listings):
        for tier, copy in checkpoint.copies.items():
            if copy.commit is not None and not names_all_shards(copy.commit):
                continue
            if copy.repairable and tier != host:
                found.setdefault(tier, {})[checkpoint.id] = str(copy.damage)
    return found


def not_on_all_nodes(
    listing: Listing, inventories: Mapping[int, Inventory]
) -> tuple[FoundCopy, ...]:
    """Return the copies on a tier that some nodes have no file of, without their files: a node was replaced by one that
    keeps nothing yet, or another number of nodes saved them. They are whole, or damaged. All ranks must know of them,
    to delete them together and to owe them to no tier that has them."""
    reports = [tiers[listing.tier] for tiers in inventories.values() if listing.tier in tiers]
    nodes = Counter(copy.id for report in reports for copy in report.copies)
    return tuple(
        replace(copy, bytes=0, commit=replace(copy.commit, files=(), nodes=()))
        for copy in listing.copies
        if copy.commit is not None and nodes[copy.id] < len(reports)
        if names_all_shards(copy.commit) and (copy.damage is None or copy.repairable)
    )


def only_whole(listing: Listing) -> Listing:
    """Leave out copies that are not whole: a record says nothing for nodes that lack it."""
    return replace(listing, copies=tuple(c for c in listing.copies if is_whole(c)))


def on_few_nodes(
    listings: Sequence[Listing],
    inventories: Mapping[int, Inventory],
    *,
    copies: Mapping[str, int],
    whole: Collection[CheckpointId],
    host: str,
) -> dict[str, dict[CheckpointId, bool]]:
    """Return, per tier of ``copies``, the checkpoints of which a node has a commit record there, and too few nodes an
    image: nodes are lost, or a start ended while it sent them.

    ``copies`` says how many nodes are to have each image, beside host memory, which is the tier ``host``. Of ``whole``
    checkpoints all images are on some tier; others are left out. ``listings`` are the ``inventories`` of all ranks,
    merged. The value: whether it may have been reported as committed: an image in memory says so, or memory has none.
    Nobody counts on one that is abandoned, or was deleted by a person: the value is False.
    """
    if not copies:
        return {}
    starts = starts_in(listings, whole)  # what was never whole abandons nothing
    known = merge(
        replace(x, starts=starts, copies=tuple(c for c in x.copies if c.id in whole))
        for x in listings
    )
    may_be_reported = {
        one.id: one.live and (host not in one.copies or one.copies[host].on_peers) for one in known
    }
    return {
        listing.tier: {
            copy.id: may_be_reported[copy.id]
            for copy in listing.copies
            if copy.commit is not None
            and copy.id in may_be_reported
            and _fewest(inventories, listing.tier, copy.commit) < copies[listing.tier]
        }
        for listing in listings
        if listing.tier in copies
    }


def _fewest(inventories: Mapping[int, Inventory], tier: str, commit: Commit) -> int:
    """Return on how many nodes the rarest image of a checkpoint is."""
    nodes: Counter[int] = Counter()
    for tiers in inventories.values():
        for copy in tiers[tier].copies if tier in tiers else ():
            found = copy.commit if copy.damage is None else None
            if found is not None and found.lineage == commit.lineage:
                nodes.update(ranks_with_image(found, commit.world_size))
    return min(nodes[rank] for rank in range(commit.world_size))


def whole_on_each(
    listings: Sequence[Listing], few: Mapping[str, Collection[CheckpointId]], *, host: str
) -> dict[str, frozenset[CheckpointId]]:
    """Return, per tier, the checkpoints of which every shard is on it. One that is on too ``few`` nodes and whole in
    memory does not count: memory makes again what is missing."""
    whole = {x.tier: frozenset(c.id for c in x.copies if is_whole(c)) for x in listings}
    in_memory = whole.get(host, frozenset())
    return {tier: found - (in_memory & set(few.get(tier, ()))) for tier, found in whole.items()}


def _lack(known: KnownCheckpoint, tier: str | None = None) -> str:
    """Describe what a checkpoint lacks on all tiers, or on ``tier``; empty where every shard is there."""
    copies = [copy for name, copy in known.copies.items() if tier in (None, name)]
    commits = [copy.commit for copy in copies if copy.commit is not None]
    if not commits:
        return "; ".join(str(copy.damage) for copy in copies)
    absent = _absent(commits)
    where = "on no tier that answered" if tier is None else f"not on tier {tier}"
    return f"{absent} {where}" if absent else ""


def _unread(known: KnownCheckpoint, tier: str | None) -> TierfallError | None:
    """Return why a copy of a checkpoint, on any tier or on ``tier``, could not be read; None where all were."""
    copies = (copy for name, copy in known.copies.items() if tier in (None, name))
    return next((copy.unread for copy in copies if copy.unread is not None), None)


def _absent(commits: Sequence[Commit]) -> str:
    """Name the ranks whose shards these records lack: ``ranks 8, 9 of 16 are``; empty where they lack none."""
    world_size = commits[0].world_size
    there = frozenset().union(*(ranks_with_image(commit, world_size) for commit in commits))
    count = world_size - len(there)
    if not count:
        return ""
    # A record may claim any number of ranks: no more of them are listed than are named.
    first = format_ranks(islice((r for r in range(world_size) if r not in there), _NAMED_MAX))
    more = f" and {count - _NAMED_MAX} more" if count > _NAMED_MAX else ""
    return f"{first}{more} of {world_size} {'is' if count == 1 else 'are'}"
