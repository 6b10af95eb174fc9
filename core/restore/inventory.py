"""Describing: what each rank sees of the tiers, as it is told to the others, and all of that as one picture.

Pure: from listings to what JSON holds, and back. A commit record that a rank describes has been checked by it already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tierfall.core.format.catalog import FoundCopy, Listing, of_one_lineage
from tierfall.core.format.records import Commit, read_commit
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    RanksError,
    TierfallError,
    UnreachableError,
    error_class,
)
from tierfall.core.types.lineage import AttemptStart, merge_starts
from tierfall.core.types.values import CheckpointId, CopyState


def describe(listings: Iterable[Listing], *, mine: Sequence[str]) -> dict[str, Any]:
    """Return what the tiers named in ``mine`` hold, by tier, made of what JSON holds."""
    return {
        listing.tier: {
            "error": _error_to_json(listing.error),
            "damaged": [str(damage) for damage in listing.damaged],
            "starts": describe_starts(listing.starts),
            "copies": [
                {
                    "step": copy.id.step,
                    "attempt": copy.id.attempt,
                    "state": copy.state.value,
                    "bytes": copy.bytes,
                    "marks": sorted(copy.marks),
                    "damage": _error_to_json(copy.damage),
                    "foreign": copy.foreign,
                    "commit": None if copy.commit is None else copy.commit.encode().decode(),
                }
                for copy in listing.copies
            ],
        }
        for listing in listings
        if listing.tier in mine
    }


def describe_starts(starts: Iterable[AttemptStart]) -> list[list[Any]]:
    return [
        [
            start.attempt,
            start.attempt_id,
            start.started_from and [start.started_from.step, start.started_from.attempt],
            start.began_s,
            start.passed_over,
        ]
        for start in starts
    ]


def read_starts(said: Iterable[list[Any]]) -> tuple[AttemptStart, ...]:
    return tuple(
        AttemptStart(
            attempt=attempt,
            attempt_id=attempt_id,
            started_from=None if started_from is None else CheckpointId(*started_from),
            began_s=began_s,
            passed_over=passed_over,
        )
        for attempt, attempt_id, started_from, began_s, passed_over in said
    )


def merge_ranks(
    described: Mapping[int, Mapping[str, Any]], order: Sequence[str]
) -> tuple[Listing, ...]:
    """Make one listing per tier, in ``order``, of what ranks have described.

    Records of one checkpoint, each of its own node, become one that names the shards of all. A tier that any rank could
    not read, or none has looked at, has an error, beside what the others found there.
    """
    return tuple(
        _merge_tier(tier, {rank: said[tier] for rank, said in described.items() if tier in said})
        for tier in order
    )


def _merge_tier(tier: str, described: Mapping[int, Mapping[str, Any]]) -> Listing:
    if not described:
        return Listing(tier=tier, error=RanksError(f"no rank has looked at tier {tier}"))
    damaged: list[TierfallError] = []
    failures: list[TierfallError] = []
    starts: list[AttemptStart] = []
    found: dict[CheckpointId, dict[int, FoundCopy]] = {}
    for rank, said in sorted(described.items()):
        starts += read_starts(said["starts"])
        if said["error"] is not None:
            failures.append(_error_from_json(said["error"], rank))
        damaged += [IntegrityError(f"rank {rank}: {text}") for text in said["damaged"]]
        for member in said["copies"]:
            copy = _copy(member, rank, tier)
            found.setdefault(copy.id, {})[rank] = copy
    copies = []
    for _, by_rank in sorted(found.items()):
        copy, lost = unite_copies(
            {f"{tier} of rank {rank}": copy for rank, copy in by_rank.items()}
        )
        copies.append(copy)
        damaged += lost
    return Listing(
        tier=tier,
        copies=tuple(copies),
        starts=tuple(merge_starts(starts).values()),
        damaged=tuple(damaged),
        error=failures[0] if failures else None,
    )


def unite_copies(found: Mapping[str, FoundCopy]) -> tuple[FoundCopy, list[TierfallError]]:
    """Make one copy of those of several places, each named; what is wrong with some of them comes beside it."""
    copies = of_one_lineage(dict(found))
    marks = frozenset().union(*(copy.marks for copy in copies.values()))
    damages = [copy.damage for copy in copies.values() if copy.damage is not None]
    good = {where: copy for where, copy in copies.items() if copy.commit is not None}
    if not good:
        return replace(next(iter(copies.values())), marks=marks), damages[1:]
    sizes = {frozenset(copy.commit.files): copy.bytes for copy in good.values() if copy.commit}
    lacks = next((copy.damage for copy in good.values() if copy.damage is not None), None)
    damages = [damage for damage in damages if damage is not lacks]
    one = replace(next(iter(good.values())), bytes=sum(sizes.values()), marks=marks, damage=lacks)
    try:
        commit = _unite_records({where: copy.commit for where, copy in good.items() if copy.commit})
    except IntegrityError as error:
        return replace(one, commit=None, damage=error), damages
    return replace(one, commit=commit), damages


def _unite_records(records: Mapping[str, Commit]) -> Commit:
    """Make one record that names the files of all. Raises IntegrityError where two contradict each other."""
    (first_at, first), *_ = records.items()
    files = {file.name: (first_at, file) for file in first.files}
    for where, record in records.items():
        of = f"{where}: commit record of {record.line.checkpoint}"
        if (record.line, record.world_size) != (first.line, first.world_size):
            raise IntegrityError(f"{of}: it contradicts that on {first_at}")
        for file in record.files:
            named_at, named = files.setdefault(file.name, (where, file))
            if named != file:
                raise IntegrityError(f"{of}: its {file.name} is another than that on {named_at}")
    owed = {id for record in records.values() for id in record.owed}
    return replace(first, files=tuple(file for _, file in files.values()), owed=tuple(sorted(owed)))


def _copy(member: Mapping[str, Any], rank: int, tier: str) -> FoundCopy:
    id = CheckpointId(member["step"], member["attempt"])
    commit, damage = member["commit"], member["damage"]
    what = f"rank {rank}: commit record of {id} on {tier}"
    return FoundCopy(
        id=id,
        state=CopyState(member["state"]),
        bytes=member["bytes"],
        commit=None if commit is None else read_commit(commit.encode(), what=what),
        damage=None if damage is None else _error_from_json(damage, rank),
        foreign=member["foreign"],
        marks=frozenset(member["marks"]),
    )


def _error_to_json(error: TierfallError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {"kind": type(error).__name__, "text": str(error), "retryable": error.retryable}


def _error_from_json(said: Mapping[str, Any], rank: int) -> TierfallError:
    """Make an error of what another rank said of it: of its kind, where that is one of tierfall's own."""
    otherwise = UnreachableError if said["retryable"] else BackendError
    return error_class(said["kind"], otherwise)(f"rank {rank}: {said['text']}")
