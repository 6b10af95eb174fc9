"""Candidates: which checkpoints may be restored, newest first, by what the tiers hold and what was requested.

That no tier holds a checkpoint is reported only when every tier answered.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.copies.shard_reader import PASSABLE, OpenImage, ShardReader, find_images
from tierfall.core.format.catalog import KnownCheckpoint, Listing, StepFolderError, merge
from tierfall.core.image.header import ImageHeader
from tierfall.core.image.raw_files import are_files, refuse_files
from tierfall.core.restore.reshard import MakePlan, RestorePlan
from tierfall.core.types.errors import RestoreError
from tierfall.core.types.values import CheckpointId, Shard

logger = logging.getLogger("tierfall")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What to restore: by default the newest step of the live lineage. ``tier`` names the only tier to read from;
    ``operation`` and ``advice`` are part of error messages; ``in_place``: the targets are the caller's state."""

    step: int | None = None
    attempt: int | None = None
    tier: str | None = None
    ignore_unreachable: bool = False
    operation: str = "restore"
    advice: str = "or pass unreachable='ignore' to go on without it"
    in_place: bool = True


def choose(
    listings: Sequence[Listing], request: RestoreRequest, tally: ReadTally
) -> list[KnownCheckpoint]:
    """Return what may be restored, newest first; empty where every tier answered and none holds a checkpoint.

    Raises RestoreError where a tier that may hold a newer checkpoint could not be read, and where no checkpoint is one
    that the request names.
    """
    _check_all_were_read(listings, request, tally)
    candidates = _candidates(listings, request, tally)
    if not candidates:
        _check_nothing(listings, request, tally)
    return candidates


def _check_all_were_read(
    listings: Sequence[Listing], request: RestoreRequest, tally: ReadTally
) -> None:
    """Raise RestoreError where a tier could not be read: that is not the same as an empty one."""
    for listing in listings:
        for damage in listing.damaged:
            if isinstance(damage, StepFolderError) and not _matches_request(
                damage.checkpoint, request
            ):
                continue
            tally.add_skipped(f"tier {listing.tier}", damage)
        if listing.error is None or (request.tier is not None and listing.tier != request.tier):
            continue
        tally.add_skipped(f"tier {listing.tier}", listing.error)
        if request.ignore_unreachable:
            logger.warning("restore: continues without tier %s: %s", listing.tier, listing.error)
            continue
        if _found_elsewhere(listings, request):
            continue
        named = "name a step (step=...), " if request.step is None else ""
        raise RestoreError(
            f"{request.operation}: tier {listing.tier} could not be read and may hold something newer: "
            f"{listing.error}. Try again, {named}{request.advice}"
        ) from listing.error


def _found_elsewhere(listings: Sequence[Listing], request: RestoreRequest) -> bool:
    """Return whether the step that the request names was found: then other tiers need not be read."""
    return request.step is not None and any(
        copy.id.step == request.step
        and request.attempt in (None, copy.id.attempt)
        and copy.damage is None
        for listing in listings
        for copy in listing.copies
    )


def _matches_request(checkpoint: CheckpointId, request: RestoreRequest) -> bool:
    return request.step in (None, checkpoint.step) and request.attempt in (None, checkpoint.attempt)


def _candidates(
    listings: Sequence[Listing], request: RestoreRequest, tally: ReadTally
) -> list[KnownCheckpoint]:
    """Return what the request allows, newest first, without what was deleted or abandoned."""
    candidates = []
    for checkpoint in reversed(merge(listings)):
        if request.tier is not None and request.tier not in checkpoint.copies:
            continue
        if not _matches_request(checkpoint.id, request):
            continue
        if checkpoint.tombstoned:
            tally.add_skipped(f"step {checkpoint.id}", "deleted by a person")
        elif checkpoint.abandoned and (request.step is None or request.attempt is None):
            tally.add_skipped(
                f"step {checkpoint.id}",
                "its lineage was abandoned; name it by step= and attempt= to go back to it",
            )
        else:
            candidates.append(checkpoint)
    return candidates


def _check_nothing(listings: Sequence[Listing], request: RestoreRequest, tally: ReadTally) -> None:
    """Raise RestoreError unless no tier holds a checkpoint: a request that no checkpoint fits is no first start."""
    live = [c for c in merge(listings) if not c.tombstoned]
    damaged = any(listing.damaged for listing in listings)
    named = request.step is not None or request.attempt is not None
    unread = [x.tier for x in listings if x.error is not None and request.tier in (None, x.tier)]
    if not (live or damaged or named or unread):
        return
    asked = "" if request.step is None else f" of step {request.step}"
    if request.attempt is not None:
        asked += f" of attempt {request.attempt}"
    where = f" on tier {request.tier}" if request.tier else ""
    there = ", ".join(f"{c.id} on {'+'.join(c.copies)}" for c in live[-6:])
    there = there or ("only something damaged" if damaged else "none")
    if unread:
        there += (
            f"; tier {', '.join(unread)} could not be read, so it is not known whether this is a first start: try "
            "again, or open with fresh=True to begin anew"
        )
    reasons = "; ".join(f"{f.what}: {f.reason}" for f in tally.fallbacks[-6:])
    raise RestoreError(
        f"{request.operation}: there is no checkpoint{asked}{where} to restore; there are: {there}"
        + (f" ({reasons})" if reasons else "")
    )


def states_only(
    make_plan: MakePlan,
    candidates: Iterable[KnownCheckpoint],
    listings: Sequence[Listing],
    request: RestoreRequest,
    open_image: OpenImage,
    shard: Shard,
) -> MakePlan:
    """Return a ``make_plan`` that raises RestoreError for a checkpoint that was saved by path. The error names the step
    to restore instead."""

    def instead() -> str:
        return step_instead(candidates, listings, request, open_image, shard)

    def plan(header: ImageHeader) -> RestorePlan:
        refuse_files(header, doing=request.operation, instead=instead)
        return make_plan(header)

    return plan


def step_instead(
    candidates: Iterable[KnownCheckpoint],
    listings: Sequence[Listing],
    request: RestoreRequest,
    open_image: OpenImage,
    shard: Shard,
) -> str:
    """Return, for an error message, the newest of ``candidates`` that holds a state, as far as this rank, ``shard``,
    can read them; empty where there is none."""
    for checkpoint in candidates:
        tiers = [x.tier for x in listings if x.tier in checkpoint.copies]
        read = [tier for tier in tiers if request.tier in (None, tier)]
        header = _header(checkpoint, read, open_image, shard)
        if header is not None and not are_files(header):
            return f"; the newest step that holds a state is {checkpoint.id}: name it by step={checkpoint.id.step}"
    return ""


def _header(
    checkpoint: KnownCheckpoint, tiers: Sequence[str], open_image: OpenImage, shard: Shard
) -> ImageHeader | None:
    """Read the header of one rank's image: each of them tells whether the checkpoint is a state."""
    saved = shard.world_size if checkpoint.commit is None else checkpoint.commit.world_size
    one = shard if saved == shard.world_size else Shard(0, saved)
    tally = ReadTally()
    try:
        images, manifest = find_images(checkpoint, tiers, open_image, one, tally)
        with ShardReader(images, manifest, tally, None, 1) as job:
            return job.read_header()
    except PASSABLE:
        return None
