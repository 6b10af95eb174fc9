"""The places of tiers: whether two are equal, and which folder of this machine's memory belongs to them."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tierfall.config import Config, FileTierConfig, ObjectTierConfig
from tierfall.core.format.records import KnownTier, TierRecord, parse_tier_record
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.types import keys
from tierfall.core.types.errors import TierfallError, UnreachableError
from tierfall.tiers.host_folder import default_folder

logger = logging.getLogger("tierfall")
LOOK_S = 2.0
"""Seconds that a look at an earlier place may take: it may be on a mount that hangs."""
MEMORY_NAME = "tiers.json"
"""The file of what this machine remembers of a run's tiers until it is restarted, beside the run's host memory."""


def memory_root(config: Config) -> Path:
    """Return the folder with the host memory of all runs that are configured alike."""
    return Path(config.host.folder or default_folder())


def run_folder(config: Config, run: str) -> Path:
    """Return the folder of a run's host memory on this machine. Two projects may have runs of one name: each set of
    tiers has a folder of its own.

    A folder is named by the places of the tiers. If they have changed, it is the folder of an earlier start that
    remembers one of them, by its place or, if it was moved, by its id.
    """
    base = memory_root(config) / run
    tiers = config.storage
    places = "\n".join(sorted(_written_place(tier) for tier in tiers))
    own = base / hashlib.sha256(places.encode()).hexdigest()[:12]
    try:
        found = [
            (remembered, folder)
            for folder in (() if own.exists() else folders_of_run(base))
            if (remembered := read_memory(folder))
        ]
    except (OSError, UnreachableError):  # another user's, say: its reader raises the error
        found = []
    calls = {str(folder): partial(_is_of, remembered, tiers, run) for remembered, folder in found}
    answers = BoundedCalls().call_all(calls, dict.fromkeys(calls, LOOK_S), doing="look")
    earlier = [(r.wall_time_s, folder) for r, folder in found if answers[str(folder)].value]
    return max(earlier, default=(0.0, own))[1]


def with_own_peers(config: Config) -> Config:
    """Return the configuration with a folder of peer memory for these tiers alone, named as that of their host memory:
    another project on this node may have a run of that name."""
    tier = config.peers
    if tier is None or tier.path.name == (name := run_folder(config, config.run).name):
        return config
    return config.with_keys([tier.name], path=tier.path / name)


def seen_by_one(config: Config) -> Config:
    """Return the configuration for a process that does not meet the other nodes: of peer memory it reads what this node
    keeps, if anything."""
    config = with_own_peers(config)
    tier = config.peers
    if tier is None:
        return config
    if tier.path.exists():
        return config.with_keys([tier.name], read_only=True)
    return config.without(tier.name)


def folders_of_run(base: Path) -> list[Path]:
    """Return the folders of host memory of all runs of one name, which are below ``base``. Those of another user are
    left out. Raises UnreachableError."""
    try:
        return sorted(child for child in base.iterdir() if is_readable_folder(child))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnreachableError(f"{base} could not be listed: {error.strerror}") from error


def is_readable_folder(path: Path) -> bool:
    """Return whether a path is a folder that this user may read. Raises OSError."""
    return path.is_dir() and os.access(path, os.R_OK | os.X_OK)


def read_memory(folder: Path) -> TierRecord | None:
    """Return what this machine remembers of the tiers of the run whose host memory is in ``folder``; None if nothing,
    or if it cannot be read."""
    path = folder / MEMORY_NAME
    try:
        return parse_tier_record(path.read_bytes(), what=str(path))
    except FileNotFoundError:
        return None
    except (OSError, TierfallError) as error:
        logger.warning("what this machine remembers of the tiers could not be read: %s", error)
        return None


def _written_place(tier: FileTierConfig | ObjectTierConfig) -> str:
    """Return a tier's place as it is written: nothing is asked of a file system that may hang."""
    return tier.place if tier.folder is None else os.path.abspath(tier.folder)


def _is_of(
    remembered: TierRecord, tiers: Sequence[FileTierConfig | ObjectTierConfig], run: str
) -> bool:
    """Return whether one of the tiers is remembered."""
    known = remembered.others.values()
    if any(each.place == _written_place(tier) for each in known for tier in tiers):
        return True
    return any(
        same_place(each.place, tier.place) or _is_moved(each, tier.folder, run)
        for each in known
        for tier in tiers
    )


def _is_moved(known: KnownTier, folder: Path | None, run: str) -> bool:
    """Return whether a folder has the id of a known tier, and the tier's earlier place has no record: else one of them
    is a copy."""
    if folder is None or not known.id or Path(known.place, run, keys.TIER_NAME).exists():
        return False
    path = folder / run / keys.TIER_NAME
    try:
        return parse_tier_record(path.read_bytes(), what=str(path)).id == known.id
    except (OSError, TierfallError):
        return False


def same_place(one: str, other: str) -> bool:
    """Return whether two places are equal, after ``..`` and symbolic links of paths are resolved."""
    if one == other:
        return True
    if not (os.path.isabs(one) and os.path.isabs(other)):
        return False
    return os.path.realpath(one) == os.path.realpath(other)


def device_of(folder: Path | None) -> int | None:
    """Return the number of the device of a folder; None where there is no such folder."""
    try:
        return None if folder is None else os.stat(folder).st_dev
    except OSError:
        return None


def find_emptied(
    places: Mapping[str, tuple[str, int | None]], run: str, *, timeout_s: float
) -> list[str]:
    """Return which tiers, whose place and device are given by name, have lost the record of the run since. One whose
    place is on another device now, or does not answer within ``timeout_s`` seconds, is not among them: its file system
    may not be mounted."""
    calls = {
        name: partial(_is_emptied, Path(place), run, device)
        for name, (place, device) in places.items()
    }
    answers = BoundedCalls().call_all(calls, dict.fromkeys(calls, timeout_s), doing="look at")
    return [name for name, answer in answers.items() if answer.value]


def _is_emptied(folder: Path, run: str, device: int | None) -> bool:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return device == device_of(there) and not (folder / run / keys.TIER_NAME).exists()


def folders_in(folder: Path) -> list[Path]:
    """Return the folders that may be runs, by their names."""
    try:
        below = [child for child in folder.iterdir() if keys.NAME_PATTERN.match(child.name)]
        return [child for child in below if is_readable_folder(child)]
    except OSError as error:
        raise UnreachableError(f"{folder} could not be listed: {error.strerror}") from error


def runs_in(folder: Path) -> set[str]:
    """Return the runs that a tier has in its folder. Raises UnreachableError."""
    return {child.name for child in folders_in(folder) if is_run(child)}


def is_run(path: Path) -> bool:
    if not keys.NAME_PATTERN.match(path.name):
        return False
    return (path / keys.ATTEMPTS_FOLDER).is_dir() or any(
        keys.parse_step_folder(child.name) for child in path.iterdir() if child.is_dir()
    )
