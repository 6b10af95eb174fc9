"""Whether two places of tiers are one, or one is a copy of the other."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from tierfall.core.format.records import KnownTier, parse_tier_record
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.types import keys
from tierfall.core.types.errors import TierfallError

logger = logging.getLogger("tierfall")
LOOK_S = 2.0
"""Seconds that a look at an earlier place may take: it may be on a mount that hangs."""


def same_place(one: str, other: str) -> bool:
    """Return whether two places are equal, after ``..`` and symbolic links of paths are resolved."""
    if one == other:
        return True
    if not (os.path.isabs(one) and os.path.isabs(other)):
        return False
    return os.path.realpath(one) == os.path.realpath(other)


def is_same_folder(one: str, other: str) -> bool:
    """Return whether two places are the same folder of this machine, by device and inode."""
    try:
        return os.path.isabs(one) and os.path.isabs(other) and os.path.samefile(one, other)
    except OSError:
        return False


def warn_of_copy(run: str, tier: str, known: KnownTier, place: str) -> None:
    """Warn where a tier's folder was copied: the place where it was before still has the run's files, with its id."""
    if known.place == place or not (os.path.isabs(known.place) and os.path.isabs(place)):
        return
    old, new = (Path(p) / run / keys.TIER_NAME for p in (known.place, place))

    def is_copy() -> bool:
        if parse_tier_record(old.read_bytes(), what=str(old)).id != known.id:
            return False
        return old.stat().st_ino != new.stat().st_ino  # else one folder, by two mounts

    try:
        copied = BoundedCalls().call_all({tier: is_copy}, {tier: LOOK_S}, doing="look")[tier].get()
    except (OSError, TierfallError) as error:
        logger.debug("tier %s: its earlier place %s was not read: %s", tier, known.place, error)
        return
    if copied:
        logger.warning(
            "tier %s: %s and %s are copies of one another, of run %s: a job there does not see what one here saves, "
            "and each continues its own. Train in one of the two alone",
            tier,
            place,
            known.place,
            run,
        )
