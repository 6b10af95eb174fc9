"""The attempts of a run, by the records on several tiers."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence

from tierfall.core.format.catalog import (
    UNSEEN_ATTEMPTS,
    KnownCheckpoint,
    Listing,
    next_attempt,
    start_of,
)
from tierfall.core.format.records import Attempt, Lineage
from tierfall.core.types.errors import ConfigError, KeyNotFoundError, TierfallError
from tierfall.core.types.keys import ATTEMPT_MAX
from tierfall.core.types.lineage import AttemptStart, Key, overtaken_starts
from tierfall.core.types.text import format_some
from tierfall.tiers.attempts import StrayAttemptError
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")


def next_number(listings: Sequence[Listing], *, run: str, own: Attempt | None = None) -> int:
    """Return the number above all attempts that ``listings`` name, as ``catalog.next_attempt`` does.

    Raises ConfigError, which names the tiers, where the last number is taken.
    """
    where = [x.tier for x in listings if ATTEMPT_MAX in {*x.attempts, *_saved_by(x)}]
    if where:
        raise ConfigError(
            f"open: run {run!r} has an attempt {ATTEMPT_MAX} on {', '.join(where)}, above which there is no number: if "
            "no start took it, remove its record, or the folders of its steps; or choose another run name"
        )
    number: int = min(next_attempt(listings, own), ATTEMPT_MAX)
    return number


def attempt_of(line: Lineage) -> Attempt:
    """Return the attempt that saved a checkpoint, for this process to write on its behalf."""
    return Attempt(
        run=line.run,
        number=line.checkpoint.attempt,
        id=line.attempt_id,
        node=socket.gethostname(),
        pid=os.getpid(),
        wall_time_s=time.time(),
    )


def _saved_by(listing: Listing) -> set[int]:
    """Return the attempts that have step folders on a tier, committed or not."""
    return {id.attempt for id in (*(copy.id for copy in listing.copies), *listing.unfinished)}


def ids_by_commits(listing: Listing, number: int) -> frozenset[str]:
    """Return the ids of the attempt of that number in the commit records of a tier: normally one, or none."""
    return frozenset(
        copy.commit.lineage.attempt_id
        for copy in listing.copies
        if copy.commit is not None and copy.id.attempt == number
    )


def newest_attempt(
    listings: Iterable[Listing], stores: Mapping[str, StoredTier], *, above: int = 0
) -> tuple[Attempt, str] | None:
    """Return the newest attempt in ``listings`` above a number, and a tier that has its record; None where there is
    none. Strays do not count.

    Raises what kept the record from being read on every tier that has it.
    """
    holders: dict[int, list[str]] = {}
    for listing in listings:
        for number in listing.attempts if listing.tier in stores else ():
            holders.setdefault(number, []).append(listing.tier)
    for number in sorted((n for n in holders if n > above), reverse=True):
        failure: TierfallError | None = None
        for tier in holders[number]:
            try:
                return stores[tier].fence.read(number), tier
            except StrayAttemptError as error:
                logger.warning("%s; until then it is ignored", error)
            except KeyNotFoundError:
                continue  # removed since the listing
            except TierfallError as error:
                failure = error
        if failure is not None:
            raise failure
    return None


def warn_of_overtaken_starts(
    run: str,
    starts: Sequence[AttemptStart],
    known: Sequence[KnownCheckpoint],
    reported: set[Key],
) -> None:
    """Log, once each, the starts that could not see each other's tiers, which of them counts, and how to return to the
    others. ``reported`` are those logged before; this adds to it."""
    saved: dict[Key, list[KnownCheckpoint]] = {}
    for checkpoint in known:
        if checkpoint.commit is not None:
            saved.setdefault(start_of(checkpoint.commit).key, []).append(checkpoint)
    passed_over = {start.key: start.attempt for start in starts if start.passed_over}
    later = {
        start.key: counts.attempt
        for start, counts in overtaken_starts(starts, above=UNSEEN_ATTEMPTS)
    }
    for key, counts in {**later, **passed_over}.items():
        left = [c for c in saved.get(key, []) if c.abandoned]
        if key in reported or not left:
            continue
        reported.add(key)
        what = (
            f"two starts have taken attempt {key[0]}, as neither could see the other's tiers. The one counts that the "
            "run went on from, or else that began last by its clock"
            if key in passed_over
            else f"attempt {key[0]} began after attempt {counts}, by their clocks, and has the lower number: neither "
            "could see the other's tiers. The higher number counts"
        )
        logger.warning(
            "run %s: %s; what the other has saved is abandoned: %s. If that is the wrong one, go back to it by "
            "restore(step=%d, attempt=%d); to keep it, pin it now",
            run,
            what,
            format_some([f"{c.id} on {'+'.join(c.copies)}" for c in left]),
            left[-1].id.step,
            key[0],
        )
