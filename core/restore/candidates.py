"""Candidates: which checkpoints may be restored, newest first, by what the tiers hold and what was requested.

That no tier holds a checkpoint is reported only when every tier answered.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.format.catalog import KnownCheckpoint, Listing, NotReadError, merge, starts_in
from tierfall.core.types.errors import RestoreError, TierfallError
from tierfall.core.types.lineage import first_good
from tierfall.core.types.text import format_some
from tierfall.core.types.values import CheckpointId

logger = logging.getLogger("tierfall")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What to restore: by default the newest step of the live lineage. ``tier`` names the only tier to read from;
    ``without`` are those that were tried, and passed over. ``operation`` and ``advice`` are part of error messages;
    ``in_place``: the targets are the caller's state; ``continues``: the run continues from what is restored."""

    step: int | None = None
    attempt: int | None = None
    tier: str | None = None
    without: frozenset[CheckpointId] = frozenset()
    ignore_unreachable: bool = False
    operation: str = "restore"
    advice: str = "or pass unreachable='ignore' to go on without it"
    in_place: bool = True
    continues: bool = True


def choose(
    listings: Sequence[Listing], request: RestoreRequest, tally: ReadTally
) -> list[KnownCheckpoint]:
    """Return what is to be restored, newest first; empty where every tier answered and none holds a checkpoint, and
    where all have been passed over. Raises what ``list_fitting`` raises."""
    return without_bad(list_fitting(listings, request, tally), request, tally)


def list_fitting(
    listings: Sequence[Listing], request: RestoreRequest, tally: ReadTally
) -> list[KnownCheckpoint]:
    """Return what may be restored, newest first; empty as for ``choose``.

    Raises RestoreError where a tier that may hold a newer checkpoint could not be read, and where no checkpoint is one
    that the request names.
    """
    _check_all_were_read(listings, request, tally)
    there = merge(listings)[::-1]
    known = [c for c in there if _fits(c, request)]
    live = [c for c in there if not c.deleted and not c.abandoned and c.id.step != request.step]
    good = [c.id for c in live if any(copy.damage is None for copy in c.copies.values())]
    tally.others = tuple(good[:4])
    candidates = [c for c in known if not _why_not(c, request)]
    if not candidates:
        for checkpoint in known:  # why these are no candidates is part of the error
            id = checkpoint.id
            tally.add_skipped(f"step {id}", _why_not(checkpoint, request), id)
        if not request.without:
            _check_nothing(listings, request, tally)
    return candidates


def without_bad(
    candidates: Sequence[KnownCheckpoint], request: RestoreRequest, tally: ReadTally
) -> list[KnownCheckpoint]:
    """Leave out the candidates with NaN or Inf that an older one may replace, unless the request names a step; log
    which, and what is restored although it has some."""
    if not candidates:
        return []
    named = request.step is not None
    at = (
        0
        if named
        else first_good(candidates, lambda c: any(x.damage is None for x in c.copies.values()))
    )
    passed, left = candidates[:at], list(candidates[at:])
    is_new = bool(passed) and not request.without  # else it was reported
    for one in passed if is_new else ():
        tally.add_skipped(f"step {one.id}", f"it has {_bad(one)}", one.id)
    if is_new:
        taken = f"with {_bad(left[0])}" if left[0].not_finite else "which has none"
        logger.warning(
            "%s: passes over step %s, with %s, and takes step %s, %s. To take the newest anyway, name it: step=%d",
            request.operation, format_some([str(c.id) for c in passed]), _bad(passed[0]),
            left[0].id, taken, passed[0].id.step,
        )  # fmt: skip
    elif left[0].not_finite:
        logger.warning("%s: step %s has %s", request.operation, left[0].id, _bad(left[0]))
    return left


def _bad(checkpoint: KnownCheckpoint) -> str:
    return f"NaN or Inf in {format_some(sorted(checkpoint.not_finite))}"


def is_first_unread(listings: Sequence[Listing], request: RestoreRequest) -> bool:
    """Return whether commit records were left to be read later, and one of them is of the checkpoint that would be
    restored, or may be, or tells which of two attempts of one number counts; or NaN is noted, so that an older
    checkpoint is looked for."""
    unread = [
        copy.id
        for listing in listings
        for copy in listing.copies
        if isinstance(copy.damage, NotReadError)
    ]
    if not unread:
        return False
    starts = starts_in(listings)
    known = {start.attempt for start in starts}
    if len(known) < len(starts) or any(id.attempt not in known for id in unread):
        return True  # how its attempt began may abandon what looks newest
    fit = (c for c in reversed(merge(listings)) if _fits(c, request) and not _why_not(c, request))
    first = next(fit, None)
    if first is None or (first.not_finite and request.step is None):
        return True
    return any(isinstance(copy.damage, NotReadError) for copy in first.copies.values())


def _check_all_were_read(
    listings: Sequence[Listing], request: RestoreRequest, tally: ReadTally
) -> None:
    """Raise RestoreError where a tier could not be read: that is not the same as an empty one."""
    for listing in listings:
        if request.tier not in (None, listing.tier):
            continue
        for problem in () if request.without else listing.problems:
            tally.add_skipped(f"tier {listing.tier}", problem)
        unread = next((each for each in listing.problems if not each.is_damage), listing.error)
        if unread is None:
            continue
        if request.ignore_unreachable:
            logger.warning("restore: continues without tier %s: %s", listing.tier, unread)
            continue
        if _found_elsewhere(listings, request):
            continue
        named = "name a step (step=...), " if request.step is None else ""
        raise RestoreError(
            f"{request.operation}: tier {listing.tier} could not be read and may hold something newer: {unread}. Try "
            f"again, {named}{request.advice}"
        ) from unread


def unread_text(of: str, error: TierfallError, request: RestoreRequest) -> str:
    """Return the text of the error that ends a restore ``of`` a checkpoint that could not be read."""
    return f"{of}: a copy could not be read, and no other is good: {error}. Try again, {request.advice}"


def _found_elsewhere(listings: Sequence[Listing], request: RestoreRequest) -> bool:
    """Return whether the step that the request names was found: then other tiers need not be read."""
    return request.step is not None and any(
        copy.id.step == request.step
        and request.attempt in (None, copy.id.attempt)
        and copy.damage is None
        for listing in listings
        for copy in listing.copies
    )


def _fits(checkpoint: KnownCheckpoint, request: RestoreRequest) -> bool:
    """Return whether a checkpoint is one that the request names, and was not tried."""
    id = checkpoint.id
    if request.step not in (None, id.step) or request.attempt not in (None, id.attempt):
        return False
    return id not in request.without and (request.tier is None or request.tier in checkpoint.copies)


def _why_not(checkpoint: KnownCheckpoint, request: RestoreRequest) -> str:
    """Return why a checkpoint is not restored by this request; empty where it may be."""
    if checkpoint.deleted:
        return "deleted by a person"
    if checkpoint.abandoned and (request.step is None or request.attempt is None):
        return "its lineage was abandoned; name it by step= and attempt= to go back to it"
    return ""


def _check_nothing(listings: Sequence[Listing], request: RestoreRequest, tally: ReadTally) -> None:
    """Raise RestoreError unless no tier holds a checkpoint: a request that no checkpoint fits is no first start."""
    live = [c for c in merge(listings) if not c.deleted]
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
