"""The places of tiers: whether two are one, one is a copy of the other, and which have lost the files of a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from tierfall.core.format.tier_record import KnownTier, parse_tier_record
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


def device_of(folder: Path | None) -> int | None:
    """Return the number of the device of a folder; None where there is no such folder."""
    try:
        return None if folder is None else os.stat(folder).st_dev
    except OSError:
        return None


def find_emptied(
    known: Mapping[str, KnownTier], names: Iterable[str], run: str, *, timeout_s: float
) -> list[str]:
    """Return which tiers of one node, of those ``names`` whose places are ``known``, have lost the record of the run
    since. One whose place is on another device now, or does not answer within ``timeout_s`` seconds, is not among
    them: its file system may not be mounted."""
    calls = {
        name: partial(_is_emptied, Path(known[name].place), run, known[name].device)
        for name in names
        if name in known and not known[name].shared and os.path.isabs(known[name].place)
    }
    answers = BoundedCalls().call_all(calls, dict.fromkeys(calls, timeout_s), doing="look at")
    return [name for name, answer in answers.items() if answer.value]


def _is_emptied(folder: Path, run: str, device: int | None) -> bool:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    is_mounted = device is not None and device == device_of(there)
    return is_mounted and not (folder / run / keys.TIER_NAME).exists()


def warn_of_copy(run: str, tier: str, known: KnownTier, place: str) -> None:
    """Warn where a tier's folder was copied: the place where it was before still has the run's files, with its id."""
    if known.place == place or not (os.path.isabs(known.place) and os.path.isabs(place)):
        return
    old, new = (Path(p) / run / keys.TIER_NAME for p in (known.place, place))

    def is_copy() -> bool:
        if parse_tier_record(old.read_bytes(), what=str(old)).id != known.id:
            return False
        return not old.samefile(new)  # one folder, by two mounts

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
