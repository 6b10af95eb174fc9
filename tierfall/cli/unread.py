"""What ``export`` and ``copy`` do about tiers that could not be read: they are named, and no step is taken for another.

An unread tier may hold what the command is looking for: a newer line's step of the same number, or the only good copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tierfall.cli.common import CommandOutput, code_of, find_on
from tierfall.core.format.catalog import KnownCheckpoint, Listing, merge, starts_in
from tierfall.core.types.errors import IntegrityError, TierfallError
from tierfall.core.types.values import CheckpointId
from tierfall.ops.commands import unread


def find_certain(
    answer: CommandOutput,
    listings: Sequence[Listing],
    named: tuple[int, int | None],
    tier: str | None,
    *,
    doing: str,
) -> KnownCheckpoint:
    """Find the checkpoint that STEP names, and note the tiers that could not be read.

    Ends the command where it is not there, and where STEP names no attempt and a tier that could not be read may hold
    that step of a newer one: then the one that was found may be of a line that was left behind.
    """
    found = find_on(answer, listings, named, tier, doing=doing)
    if tier is not None:
        return found
    silent = unread(listings)
    answer.note_unread(silent)
    if silent and named[1] is None and may_be_newer(listings, found.id):
        choice = f"name it {found.id}" + (", or a tier by --tier" if doing == "export" else "")
        answer.refuse(
            f"{doing}: a newer attempt than that of {found.id} may have saved step {found.id.step} too, on "
            f"{', '.join(silent)}: if {found.id} is meant, {choice}"
        )
    return found


def may_be_newer(listings: Sequence[Listing], id: CheckpointId) -> bool:
    """Say whether a later attempt than a checkpoint's may have saved its step again: there was one, and it is not known
    to have begun at that step or above."""
    known = merge(listings)
    numbers = {n for listing in listings for n in listing.attempts} | {c.id.attempt for c in known}
    begun = {start.attempt: start.step for start in starts_in(listings) if not start.passed_over}
    newest = max(numbers, default=id.attempt)
    return any(begun.get(n, -1) < id.step for n in range(id.attempt + 1, newest + 1))


@contextmanager
def naming_unread_tiers(
    answer: CommandOutput, listings: Sequence[Listing], gone: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """End the command where the block fails, with the tiers that were noted, and what an unread one may mean for it.

    ``gone`` is asked where no good copy was found, and says so if they were dropped meanwhile.
    """
    silent = ", ".join(unread(listings))
    try:
        yield
    except IntegrityError as error:
        if dropped := gone():
            answer.refuse(dropped)
        more = f"; {silent} could not be read and may hold a good copy" if silent else ""
        answer.refuse(f"{error}{more}")
    except TierfallError as error:
        answer.refuse(error, code_of(error))
