"""Agreeing: which checkpoints all ranks restore, by what each of them sees of the tiers.

Each rank describes what it alone can tell of (``inventory``). Rank 0 brings that together, leaves out what has not
every shard somewhere, and chooses for all; and after each checkpoint that was tried, all hear whether any rank failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.format.catalog import FoundCopy, KnownCheckpoint, Listing, merge
from tierfall.core.format.commit_files import named_shards
from tierfall.core.format.records import Commit, read_commit
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.restore.candidates import RestoreRequest, choose
from tierfall.core.restore.exchange.gloo import LostError
from tierfall.core.restore.inventory import describe, merge_ranks
from tierfall.core.restore.restore import HALF_FILLED, PASSABLE, RankFailure, Together
from tierfall.core.types.errors import IntegrityError, RanksError, RestoreError, TierfallError
from tierfall.core.types.text import ranks_named
from tierfall.core.types.values import CheckpointId, CopyState

logger = logging.getLogger("tierfall")

_NAMED_MAX = 8


# All ranks together ----------------------------------------------------------------------------------


def agree_to_restore(
    ranks: Ranks,
    listings: Sequence[Listing],
    request: RestoreRequest,
    *,
    mine: Sequence[str],
    tally: ReadTally,
    look_again: Callable[[], Sequence[Listing]] | None = None,
    timeout_s: float | None = None,
) -> list[KnownCheckpoint]:
    """Return what all ranks may restore, newest first, the same on all; nothing where there is truly nothing.

    Every rank calls it with the same ``request``. ``listings`` are of all tiers, fastest first; ``mine`` names those
    that this rank speaks for, so that a tier which many ranks see is described once. What is returned is described by
    what ``look_again`` returns once all ranks have come, where that is given. A checkpoint that no tier here holds has
    no copies. Raises what ``choose`` does, on all ranks; RanksError where a rank did not come.
    """
    order = [listing.tier for listing in listings]

    def decide(bodies: dict[int, Any]) -> dict[str, Any]:
        _check_same_request({rank: body["request"] for rank, body in bodies.items()})
        described = {rank: body["tiers"] for rank, body in bodies.items()}
        return choose_candidates(described, order, request)

    body = {"request": asdict(request), "tiers": describe(listings, mine=mine)}
    decision = ranks.agree("restore", body, decide, timeout_s=timeout_s)
    for what, reason in decision["fallbacks"]:
        tally.passed_over(what, reason)
    records = [_record(said) for said in decision["commits"]]
    agreed = {CheckpointId(*id): c for id, c in zip(decision["order"], records, strict=True)}
    lives = {id: commit.line.attempt_id for id, commit in agreed.items()}
    seen = listings if look_again is None else look_again()
    here = {known.id: known for known in merge(_keep_agreed(lives, x) for x in seen)}
    return [_describe_known(here.get(id), commit) for id, commit in agreed.items()]


def _record(said: str) -> Commit:
    return read_commit(said.encode(), what="restore: what the ranks agreed on")


def _describe_known(here: KnownCheckpoint | None, commit: Commit) -> KnownCheckpoint:
    """Return what is known here of a checkpoint; where that is nothing, or damaged, what the ranks agreed on says of
    which line it is, and how many ranks saved it."""
    if here is None:
        return KnownCheckpoint(id=commit.line.checkpoint, commit=commit, copies={}, abandoned=False)
    return here if here.commit is not None else replace(here, commit=commit)


def make_barrier(ranks: Ranks, *, timeout_s: float | None = None) -> Together:
    """Make what ``fill_first`` tells the other ranks by. ``timeout_s`` is how much longer than the fastest rank the
    slowest may take to fill its targets."""

    def tell(checkpoint: KnownCheckpoint, error: BaseException | None) -> RankFailure | None:
        id = checkpoint.id
        failed = None
        if error is not None:
            said = str(error) if isinstance(error, TierfallError) else repr(error)
            for_good = not isinstance(error, PASSABLE)
            lost = isinstance(error, LostError)
            message = said.removesuffix(HALF_FILLED)
            failed = {"message": message, "for_good": for_good, "lost": lost}
        body = {"id": [id.step, id.attempt], "failed": failed}
        # Whoever has lost another rank does not wait for it as long as for one that is slow.
        patience_s = None if isinstance(error, LostError) else timeout_s
        worst = ranks.agree("restore: fill", body, _decisive_failure, timeout_s=patience_s)
        return None if worst is None else RankFailure(**worst)

    return tell


def finish_on_all_ranks(
    ranks: Ranks,
    finish: Callable[[], None],
    id: CheckpointId,
    *,
    goes_on: bool,
    saved: bool,
    timeout_s: float | None = None,
) -> bool:
    """``finish`` a restore, on all ranks; return whether any of them has ``saved`` since its line began.

    ``goes_on``: the run continues from what was restored. Raises RestoreError on every rank where one could not: its
    own on that rank. All say that the state is half filled: on the others it is of a step that not all ranks are at.
    """
    of = f"restore of {id}"
    failure: BaseException | None = None
    try:
        finish()
    except BaseException as error:  # noqa: BLE001 - the other ranks must know; raised below
        failure = error
    try:
        body = {"failed": failure and (str(failure) or repr(failure)), "goes_on": goes_on}
        said = ranks.agree(
            "restore: finish", {**body, "saved": saved}, _finished, timeout_s=timeout_s
        )
    except TierfallError as lost:
        if failure is None:
            raise _half_finished(of, str(lost), "") from lost
        failure.add_note(f"the other ranks may not know of it: {lost}")
        said = {}
    if isinstance(failure, Exception):
        raise _half_finished(of, str(failure), "") from failure
    if failure is not None:
        raise failure
    if said["failed"] is not None:
        raise _half_finished(of, said["failed"], f"rank {said['rank']}: ")
    return bool(said["saved"])


def _half_finished(of: str, reason: str, where: str) -> RestoreError:
    return RestoreError(
        f"{of}: {where}the tensors are in place, but the rest is not: {reason}{HALF_FILLED}"
    )


def _finished(bodies: Mapping[int, Any]) -> dict[str, Any]:
    others = [rank for rank, body in bodies.items() if body["goes_on"] != bodies[0]["goes_on"]]
    if others:
        ours, theirs = ("all", "a part") if bodies[0]["goes_on"] else ("a part", "all")
        raise RanksError(
            f"{ranks_named(others)} restored {theirs} where rank 0 restored {ours} (only=...): every rank asks for the "
            "same"
        )
    rank = next((rank for rank, body in bodies.items() if body["failed"] is not None), 0)
    saved = any(body["saved"] for body in bodies.values())
    return {"rank": rank, "failed": bodies[rank]["failed"], "saved": saved}


def _decisive_failure(bodies: Mapping[int, Any]) -> dict[str, Any] | None:
    """Return the failure that all ranks follow: the first that ends the restore, or else the first; what was lost only
    where no rank says why."""
    tried = {rank: tuple(body["id"]) for rank, body in bodies.items()}
    others = [rank for rank, id in tried.items() if id != tried[0]]
    if others:
        raise RanksError(
            f"restore: {ranks_named(others)} filled {CheckpointId(*tried[others[0]])} where rank 0 filled "
            f"{CheckpointId(*tried[0])}"
        )
    failed = [{"rank": r, **b["failed"]} for r, b in bodies.items() if b["failed"] is not None]
    known = [f for f in failed if not f["lost"]] or failed
    worst = next((f for f in known if f["for_good"]), known[0] if known else None)
    return worst and {what: said for what, said in worst.items() if what != "lost"}


def _check_same_request(requests: Mapping[int, dict[str, Any]]) -> None:
    for what, ours in requests[0].items():
        others = [rank for rank, request in requests.items() if request[what] != ours]
        if others:
            raise RanksError(
                f"restore: {ranks_named(others)} asked for {what}={requests[others[0]][what]!r} where rank 0 asked for "
                f"{what}={ours!r}: every rank asks for the same"
            )


def _keep_agreed(lives: Mapping[CheckpointId, str], listing: Listing) -> Listing:
    """Take what only shares its name with what was agreed on for damage: its shards are not of one checkpoint."""

    def held(copy: FoundCopy) -> FoundCopy:
        life = lives.get(copy.id)
        if copy.commit is None or life in (None, copy.commit.line.attempt_id):
            return copy
        damage = IntegrityError(
            f"{listing.tier}: {copy.id} is of another life of this run than the one that the ranks agreed on"
        )
        return replace(copy, commit=None, marks=frozenset(), damage=damage, foreign=True)

    return replace(listing, copies=tuple(map(held, listing.copies)))


# What rank 0 decides ---------------------------------------------------------------------------------


def choose_candidates(
    described: Mapping[int, Mapping[str, Any]], order: Sequence[str], request: RestoreRequest
) -> dict[str, Any]:
    """Choose for all ranks, of what each has described; the answer is made of what JSON holds.

    ``order``: what may be restored, newest first; ``commits``: the record of each, in which no files and nodes are
    named; ``fallbacks``: what was passed over, and why. Raises RestoreError as ``choose`` does, and where what is
    there lacks shards: a run whose checkpoints are only partly in reach does not begin anew.
    """
    listings = merge_ranks(described, order)
    whole, lacking = complete(listings)
    tally = ReadTally()
    partial = {copy.id for listing in listings for copy in listing.copies} - whole - lacking.keys()
    for id in sorted(partial):
        reason = "only some ranks had sealed it in memory, and no tier that answered holds the rest"
        tally.passed_over(f"step {id}", reason)
        logger.warning("restore: step %s is no checkpoint: %s", id, reason)
    candidates = choose([_without(partial, listing) for listing in listings], request, tally)
    taken: list[KnownCheckpoint] = []
    for known in candidates:
        if lack := _lack(known, request.tier):
            tally.passed_over(f"step {known.id}", lack)
        else:
            taken.append(known)
    if candidates and not taken:
        raise RestoreError(
            f"{request.operation}: no checkpoint is there whole: "
            + "; ".join(f"{f.what}: {f.reason}" for f in tally.fallbacks[-8:])
            + ". Bring back the machines or tiers that hold the rest, or open with fresh=True to begin anew"
        )
    commits = [known.commit for known in taken if known.commit is not None]
    return {
        "order": [[known.id.step, known.id.attempt] for known in taken],
        "commits": [replace(commit, files=(), nodes=()).encode().decode() for commit in commits],
        "fallbacks": [[f.what, f.reason] for f in tally.fallbacks],
    }


def _without(ids: Collection[CheckpointId], listing: Listing) -> Listing:
    return replace(listing, copies=tuple(copy for copy in listing.copies if copy.id not in ids))


def complete(
    listings: Iterable[Listing],
) -> tuple[frozenset[CheckpointId], dict[CheckpointId, str]]:
    """Return the checkpoints of which every shard is on some tier, and what the other committed ones lack.

    What some ranks sealed in memory, and nothing completes, is neither: its start died while it sealed.
    """
    whole: set[CheckpointId] = set()
    lacking: dict[CheckpointId, str] = {}
    for known in merge(listings):
        lack = _lack(known)
        if not lack:
            whole.add(known.id)
        elif known.commit is None or any(
            copy.state is CopyState.COMMITTED for copy in known.copies.values()
        ):
            lacking[known.id] = lack
    return frozenset(whole), lacking


def whole_on(listing: Listing, id: CheckpointId) -> bool:
    """Say whether every shard of a checkpoint is on one tier, as far as a look at it tells."""
    copy = listing.copy(id)
    if copy is None or copy.commit is None or copy.damage is not None:
        return False
    return not _absent([copy.commit])


def _lack(known: KnownCheckpoint, tier: str | None = None) -> str:
    """Say what a checkpoint lacks on all tiers, or on ``tier``; nothing where every shard is there."""
    copies = [copy for name, copy in known.copies.items() if tier in (None, name)]
    commits = [copy.commit for copy in copies if copy.commit is not None]
    if not commits:
        return "; ".join(str(copy.damage) for copy in copies)
    absent = _absent(commits)
    where = "on no tier that answered" if tier is None else f"not on tier {tier}"
    return f"{absent} {where}" if absent else ""


def _absent(commits: Sequence[Commit]) -> str:
    """Name the ranks whose shards these records do not name: ``ranks 8, 9 of 16 are``; nothing where they name all."""
    world_size = commits[0].world_size
    there = frozenset().union(*(named_shards(commit, world_size) for commit in commits))
    count = world_size - len(there)
    if not count:
        return ""
    # A record may claim any number of ranks: no more of them are listed than are named.
    first = ranks_named(islice((r for r in range(world_size) if r not in there), _NAMED_MAX))
    more = f" and {count - _NAMED_MAX} more" if count > _NAMED_MAX else ""
    return f"{first}{more} of {world_size} {'is' if count == 1 else 'are'}"
