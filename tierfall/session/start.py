"""The start of a run: all ranks agree on one attempt, and on what the tiers hold.

Every rank reports its own memory, the leader of each node the tiers that only its node sees, and rank 0 the shared
tiers. Rank 0 merges the reports: a checkpoint exists where the images of all ranks do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from tierfall.core.format.catalog import FoundCopy, Listing, merge, overtaken, starts_in
from tierfall.core.format.commit_files import image_file
from tierfall.core.format.records import Attempt, Commit, read_commit
from tierfall.core.ranks.message_tree import Bodies
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.restore.agreement import complete, whole_on
from tierfall.core.restore.inventory import describe, describe_starts, merge_ranks, read_starts
from tierfall.core.types.errors import IntegrityError, RanksError, TierfallError
from tierfall.core.types.lineage import AttemptStart
from tierfall.core.types.text import ranks_named
from tierfall.core.types.values import CheckpointId
from tierfall.session import shared_folders
from tierfall.session.leftovers import committed_in_memory
from tierfall.session.opened_tiers import OpenedTiers
from tierfall.setup.attempts import warn_of_two_lives
from tierfall.setup.tiers import bounds_s, reported_tiers

TRIES = 8
_OPEN, _ATTEMPT, _READY = "open", "open: attempt", "open: ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a session begins with: what the tiers hold, as far as it counts for all ranks.

    ``listings`` are this rank's, without checkpoints of which other ranks lack their images. ``whole`` has, per tier,
    the checkpoints whose images are all on it; ``complete`` those whose images are all on some tier; ``seen`` the tiers
    that every rank could read. ``first``: no rank found a checkpoint. ``inherited``: see
    ``leftovers.committed_in_memory``. ``marks`` has, per tier, the marks that any rank found; ``deleted`` the
    checkpoints with a tombstone on some tier and no pin; ``damaged``, per tier, the copies that may be repaired, with
    their damage; ``starts`` how the attempts began that have committed a checkpoint. ``overtaken`` names the tiers that
    a checkpoint is still owed to by the record of a newer one on any node; None where each rank decides by itself.
    """

    attempt: Attempt | None = None
    listings: tuple[Listing, ...] = ()
    whole: Mapping[str, frozenset[CheckpointId]] = field(default_factory=dict)
    complete: frozenset[CheckpointId] = frozenset()
    seen: frozenset[str] = frozenset()
    first: bool = False
    inherited: tuple[Commit, ...] = ()
    marks: Mapping[str, Mapping[CheckpointId, frozenset[str]]] = field(default_factory=dict)
    deleted: frozenset[CheckpointId] = frozenset()
    damaged: Mapping[str, Mapping[CheckpointId, str]] = field(default_factory=dict)
    starts: tuple[AttemptStart, ...] = ()
    overtaken: Mapping[CheckpointId, frozenset[str]] | None = None

    @property
    def scattered(self) -> frozenset[CheckpointId]:
        """The checkpoints whose images are all on some tier, but on no tier together."""
        return self.complete - frozenset().union(*self.whole.values())


def begin_attempt(tiers: OpenedTiers) -> Start:
    """Take an attempt, together with the other ranks, and return what the tiers hold."""
    if tiers.agrees:
        start = agree_on_start(tiers)
        start = replace(start, listings=held_by_all(tiers, start))
    else:
        tiers.settle()
        attempt = tiers.take_number(tiers.next_number())
        start = Start(attempt=attempt, listings=tiers.listings, first=tiers.knows_of_nothing())
    if tiers.ranks.topology.is_root:
        held = start.listings
        warn_of_two_lives(tiers.run, starts_in(held), merge(held), tiers.warned_starts)
    return start


def tend(tiers: OpenedTiers) -> Start:
    """Return what the tiers hold, for a process that only carries out commands and takes no attempt.

    What several ranks saved and left in memory is its own: all of their images are in the slots of this process.
    """
    tiers.settle()
    memory = next(x for x in tiers.listings if x.tier == tiers.host.name)
    commits = (copy.commit for copy in memory.copies)
    return Start(
        listings=tiers.listings, inherited=tuple(c for c in commits if c and c.world_size > 1)
    )


def agree_on_start(tiers: OpenedTiers) -> Start:
    """Take one attempt for all ranks. Raises, on every rank, what kept one of them from starting.

    All ranks exclude a tier that one rank cannot reach: no checkpoint would ever be whole there.
    """
    ranks = tiers.ranks
    _find_shared(tiers)
    tiers.settle()
    config = tiers.config
    order = [tier.name for tier in config.chain]
    number = tiers.next_number()
    for _ in range(TRIES):
        found = ranks.agree(
            _OPEN,
            {
                "number": number,
                "unreachable": {tier: str(error) for tier, error in tiers.errors.items()},
                "read_only": tiers.found_read_only,
                "tiers": describe(tiers.listings, mine=reported_tiers(config, ranks)),
                "nothing": tiers.knows_of_nothing(),
            },
            lambda bodies: decide(tiers, bodies, order),
            timeout_s=_patience_s(tiers),
        )
        tiers.leave_out(found["unreachable"])
        tiers.go_on_reading(found["read_only"])
        attempt = Attempt(run=tiers.run, **found["attempt"])
        with _report_error(ranks, _ATTEMPT):
            taken = tiers.adopt_attempt(attempt)
        body = {"taken": taken, "read_only": tiers.found_read_only}
        answer = ranks.agree(_ATTEMPT, body, _read_attempt)
        tiers.go_on_reading(answer["read_only"])
        refused = answer["refused"]
        if not refused:
            return read_start(attempt, found)
        number = attempt.number + 1
    raise RanksError(
        f"open: {ranks_named(refused)} found another start's attempt in the place of each of {TRIES} numbers: another "
        "job of this run's name is starting at the same time"
    )


def read_start(attempt: Attempt, found: Mapping[str, Any]) -> Start:
    """Return what all ranks know, from the decision ``found`` of rank 0."""
    return Start(
        attempt=attempt,
        whole={tier: _ids(ids) for tier, ids in found["whole"].items()},
        complete=_ids(found["complete"]),
        seen=frozenset(found["seen"]),
        first=found["first"],
        inherited=tuple(
            read_commit(text.encode(), what="commit record of an adopted checkpoint")
            for text in found["inherited"]
        ),
        marks={tier: _names(said) for tier, said in found["marks"].items()},
        deleted=_ids(found["deleted"]),
        damaged={
            tier: {CheckpointId(step, attempt): why for step, attempt, why in said}
            for tier, said in found["damaged"].items()
        },
        starts=read_starts(found["starts"]),
        overtaken=_names(found["overtaken"]),
    )


def _find_shared(tiers: OpenedTiers) -> None:
    """Find out, at the first attempt, which folders all nodes see. No agreement of the ranks comes before it."""
    if tiers.attempt is not None or not shared_folders.tiers_to_probe(tiers):
        return
    with shared_folders.files_of_probe(tiers) as files:

        def write(bodies: Bodies) -> dict[str, Any]:
            _check_started(bodies)
            return files.write()

        said = tiers.ranks.agree(_OPEN, {}, write, timeout_s=_patience_s(tiers))
        failed = shared_folders.probe(tiers, said)
    tiers.leave_out({**said["failed"], **failed})


def _patience_s(tiers: OpenedTiers) -> float:
    """Return how many seconds later than the first rank the last may call: it may have waited for a tier that did not
    answer, once to open it and once to list it."""
    bounds = bounds_s(tiers.config)
    slowest_s = max((bounds[tier.name] for tier in tiers.config.stored), default=0.0)
    return tiers.config.max_wait_s + 2 * slowest_s


@contextmanager
def opened_by_each(ranks: Ranks) -> Iterator[None]:
    """Report an error in this block to the other ranks: they wait for this rank in ``agree_on_start``."""
    with _report_error(ranks, _OPEN):
        yield


@contextmanager
def ready_on_all_ranks(ranks: Ranks, *, timeout_s: float) -> Iterator[None]:
    """Start no rank unless all ranks complete this block, the last within ``timeout_s`` seconds of the first."""
    with _report_error(ranks, _READY, timeout_s):
        yield
    ranks.agree(_READY, {}, _check_started, timeout_s=timeout_s)


@contextmanager
def _report_error(ranks: Ranks, what: str, timeout_s: float | None = None) -> Iterator[None]:
    """Report an error in this block to the other ranks, at their next agreement."""
    try:
        yield
    except BaseException as error:
        with suppress(TierfallError):  # it has the same reason: this rank raises its own error
            body = {"error": str(error) or repr(error)}
            ranks.agree(what, body, _check_started, timeout_s=timeout_s)
        raise


def _check_started(bodies: Bodies) -> None:
    for rank, body in bodies.items():
        if "error" in body:
            raise RanksError(f"open: rank {rank}: {body['error']}")


def decide(tiers: OpenedTiers, bodies: Bodies, order: list[str]) -> dict[str, Any]:
    """Decide, on rank 0, which attempt all ranks take and which checkpoints of the tiers count for all of them.

    ``bodies`` are the reports of the ranks, ``order`` are the tiers' names. Returns a JSON object.
    """
    _check_started(bodies)
    told = {rank: body["tiers"] for rank, body in bodies.items()}
    listings = merge_ranks(told, order)
    found, _ = complete(listings)
    attempt = tiers.take_number(max(body["number"] for body in bodies.values()))
    unreachable: dict[str, str] = {}
    for rank, body in bodies.items():
        for tier, why in body["unreachable"].items():
            unreachable.setdefault(tier, f"rank {rank}: {why}")
    return {
        "unreachable": unreachable,
        "read_only": {**_read_only(bodies), **tiers.found_read_only},
        "attempt": {
            "number": attempt.number,
            "id": attempt.id,
            "node": attempt.node,
            "pid": attempt.pid,
            "wall_time_s": attempt.wall_time_s,
        },
        "whole": {
            listing.tier: _pairs(c.id for c in listing.copies if whole_on(listing, c.id))
            for listing in listings
        },
        "complete": _pairs(found),
        "seen": [listing.tier for listing in listings if listing.error is None],
        "inherited": committed_in_memory(
            listings,
            told,
            host=tiers.config.host.name,
            world_size=tiers.ranks.topology.world_size,
        ),
        "marks": {
            listing.tier: [
                [c.id.step, c.id.attempt, sorted(c.marks)] for c in listing.copies if c.marks
            ]
            for listing in listings
        },
        "damaged": damaged_copies(listings, host=tiers.config.host.name),
        "deleted": _pairs(c.id for c in merge(listings) if c.tombstoned and not c.pinned),
        "starts": describe_starts(starts_in(listings, found)),
        "overtaken": [
            [id.step, id.attempt, sorted(names)]
            for id, names in sorted(overtaken(merge(map(_only_whole, listings))).items())
        ],
        "first": all(body["nothing"] for body in bodies.values()),
    }


def _only_whole(listing: Listing) -> Listing:
    """Leave out what is not on all nodes: its record says nothing for those that lack it."""
    return replace(listing, copies=tuple(c for c in listing.copies if whole_on(listing, c.id)))


def damaged_copies(listings: Sequence[Listing], *, host: str) -> dict[str, list[list[Any]]]:
    """Return, per tier, the copies that may be repaired, with their damage; images in memory are never repaired."""
    found: dict[str, list[list[Any]]] = {}
    for checkpoint in merge(listings):
        for tier, copy in checkpoint.copies.items():
            if copy.repairable and tier != host:
                said = [checkpoint.id.step, checkpoint.id.attempt, str(copy.damage)]
                found.setdefault(tier, []).append(said)
    return found


def _read_attempt(bodies: Bodies) -> dict[str, Any]:
    _check_started(bodies)
    return {
        "refused": [rank for rank, body in bodies.items() if not body["taken"]],
        "read_only": _read_only(bodies),
    }


def _read_only(bodies: Bodies) -> dict[str, str]:
    """Return the tiers that some rank cannot write to: no rank writes there, since no checkpoint would be whole."""
    found: dict[str, str] = {}
    for rank, body in bodies.items():
        for tier, why in body["read_only"].items():
            found.setdefault(tier, f"rank {rank}: {why}")
    return found


def _pairs(ids: Any) -> list[list[int]]:
    return [[id.step, id.attempt] for id in sorted(ids)]


def _names(said: list[list[Any]]) -> dict[CheckpointId, frozenset[str]]:
    return {CheckpointId(step, attempt): frozenset(names) for step, attempt, names in said}


def _ids(pairs: list[list[int]]) -> frozenset[CheckpointId]:
    return frozenset(CheckpointId(step, attempt) for step, attempt in pairs)


def held_by_all(tiers: OpenedTiers, start: Start) -> tuple[Listing, ...]:
    """Return this rank's listings, without the checkpoints of which other ranks lack their images.

    An image in memory counts where the other images are on some tier, since it is read first; but not where it is
    another rank's, whose record does not name this rank's files. A mark that any rank found counts for all, and so does
    damage that may be repaired.
    """
    host, shard = tiers.config.host.name, tiers.ranks.shard

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
        for listing in tiers.listings
    )
