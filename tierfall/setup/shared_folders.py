"""The probe for shared folders: rank 0 writes a file to each folder, and the first rank of each other node searches it.

The result sets ``shared`` of a tier that is not configured, and is checked against the value of one that is. A tier
that all nodes saw before has one id on all of them: on a node where its file system is not mounted, its folder is
empty. So it may be if a commit record names the images of all ranks. With one node there is no probe.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tierfall.config import FileTierConfig, ObjectTierConfig
from tierfall.core.format.catalog import Listing
from tierfall.core.format.commit_files import ranks_with_image
from tierfall.core.ranks.messages import Message
from tierfall.core.types import keys
from tierfall.core.types.backend import put_object
from tierfall.core.types.errors import (
    BackendError,
    ConfigError,
    KeyNotFoundError,
    StorageFullError,
    UnreachableError,
)
from tierfall.core.types.text import format_ranks
from tierfall.setup.opened_tiers import OpenedTiers
from tierfall.setup.tiers import holds_any, shared_setting
from tierfall.tiers.arena.folder import file_system_of
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")

PATIENCE_S = {True: 10.0, None: 1.5, False: 0.5}
"""Seconds that a file is searched, by ``shared`` of the tier: a network file system may show it late."""
PAUSE_S = 0.1
STALE_S = 3600.0
_SHARED = "open: shared"
_ADVICE = "Mount it on all nodes; or, where each node is to have a folder of its own there, set shared: false"
Tiers = Sequence[FileTierConfig | ObjectTierConfig]


def tiers_to_probe(opened: OpenedTiers) -> Tiers:
    """Return the tiers to probe: those with a folder; none with one node."""
    if len(opened.ranks.topology.nodes) == 1:
        return ()
    return tuple(x for x in opened.config.storage if x.folder is not None and not x.read_only)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFiles(Message):
    """The tiers to which rank 0 has ``written`` its file, those that are ``full``, and, by tier, why it ``failed``.
    ``token`` is part of the files' name."""

    token: str
    written: tuple[str, ...]
    full: tuple[str, ...]
    failed: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderReport(Message):
    """One rank's view of the tiers that it has not excluded.

    By tier: whether rank 0's file was ``seen``, or why the search ``failed``; the id in the tier's record (``ids``);
    the kind of its file system. ``shared_before`` are the tiers of which a record says that all nodes saw them;
    ``of_all_ranks`` has a checkpoint whose commit record there names the images of all ranks; ``empty`` are the tiers
    without any file of the run.
    """

    seen: Mapping[str, bool]
    failed: Mapping[str, str]
    ids: Mapping[str, str | None]
    shared_before: frozenset[str]
    of_all_ranks: Mapping[str, str]
    empty: frozenset[str]
    file_systems: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDecision(Message):
    """By tier: whether all nodes see the same files, and why some rank could not search."""

    shared: Mapping[str, bool]
    failed: Mapping[str, str]


def probe(opened: OpenedTiers, files: ProbeFiles) -> Mapping[str, str]:
    """Set ``shared`` of the opened tiers by the result of all ranks; return, by tier, why some rank could not read it.

    ``files`` is what rank 0 has written. Raises ConfigError, on all ranks, if some nodes see a
    tier's files and others do not, or if the result contradicts a configured value.
    """
    topology = opened.ranks.topology
    looks = topology.is_leader and topology.node != 0
    tiers = [tier for tier in tiers_to_probe(opened) if tier.name in (*files.written, *files.full)]
    written = [tier for tier in tiers if tier.name in files.written]
    seen, failed = find_probe_files(opened, written, files.token) if looks else ({}, {})
    there = [tier for tier in tiers if tier.name in opened.stores]
    report = FolderReport(
        seen=seen,
        failed=failed,
        ids={t.name: opened.identities.id_of(t.name) for t in there},
        shared_before=frozenset(t.name for t in there if opened.identities.is_shared(t.name)),
        of_all_ranks={t.name: id for t in there if (id := _of_all_ranks(opened, t.name))},
        empty=frozenset(t.name for t in there if not holds_any(_listing(opened, t.name))),
        file_systems={t.name: _file_system(t) for t in tiers} if topology.is_leader else {},
    )
    found = opened.ranks.agree(
        _SHARED, report, lambda reports: _decide(tiers, files.full, reports), SharedDecision
    )
    shared = found.shared
    for tier in tiers:
        if tier.shared is None and tier.name in shared and isinstance(tier, FileTierConfig):
            logger.info("tier %s: all nodes see the same files: %s", tier.name, shared[tier.name])
    opened.set_shared(found.shared)
    return found.failed


# Rank 0 ----------------------------------------------------------------------------------------------


@contextmanager
def files_of_probe(opened: OpenedTiers) -> Iterator[Callable[[], ProbeFiles]]:
    """Return a function that writes a file to each folder; the files are removed at the end of the context.

    A full tier is not probed: the configured value is used, or else its records. The function raises the errors of a
    tier that are not retryable.
    """
    token = f"{int(time.time())}-{secrets.token_hex(8)}"
    key = f"{_prefix(opened.run)}{token}"
    written: list[StoredTier] = []

    def write() -> ProbeFiles:
        failed: dict[str, str] = {}
        full: list[str] = []
        for tier in tiers_to_probe(opened):
            store = opened.stores.get(tier.name)
            if store is None or tier.name in opened.emptied:
                continue
            try:
                for stale in [
                    s.key for s in store.backend.scan(_prefix(opened.run)) if _is_stale(s.key)
                ]:
                    store.backend.delete(stale)
                put_object(store.backend, key, b"\n")
            except StorageFullError as error:
                full.append(store.name)
                logger.warning(
                    "open: tier %s is full, and no file shows whether all nodes see it: by its records, or else by "
                    "default, it is %s. Set 'shared', or free the disk: %s",
                    tier.name,
                    "shared" if shared_setting(tier) else "a folder of each node",
                    error,
                )
            except UnreachableError as error:
                failed[tier.name] = f"rank 0: {error}"
            else:
                written.append(store)
        names = tuple(store.name for store in written)
        return ProbeFiles(token=token, written=names, full=tuple(full), failed=failed)

    try:
        yield write
    finally:
        for store in written:
            try:
                store.backend.delete(key)
            except BackendError as error:
                logger.warning("open: tier %s: a file of the probe stays: %s", store.name, error)


def _prefix(run: str) -> str:
    return f"{run}/{keys.PROBE_FOLDER}/"


def _is_stale(key: str) -> bool:
    """Return whether a killed start left this file. A recent file may be of a start that is probing now."""
    written = key.rpartition("/")[2].partition("-")[0]
    return written.isdecimal() and time.time() - int(written) > STALE_S


def _decide(
    tiers: Tiers, full: Sequence[str], reports: Mapping[int, FolderReport]
) -> SharedDecision:
    failed: dict[str, str] = {}
    shared: dict[str, bool] = {}
    for rank, report in reports.items():
        for name, why in report.failed.items():
            failed.setdefault(name, f"rank {rank}: {why}")
    for tier in tiers:
        if shared_setting(tier) is None:
            _check_one_id(tier, reports)
        seen = {rank: x.seen[tier.name] for rank, x in reports.items() if tier.name in x.seen}
        if tier.name in full and shared_setting(tier) is None:
            shared[tier.name] = any(tier.name in x.shared_before for x in reports.values())
        elif tier.name not in full and tier.name not in failed and seen:
            shared[tier.name] = _found(tier, seen)
        if shared_setting(tier) is None and not shared.get(tier.name, True):
            _check_one_nodes(tier, reports)
            _check_file_systems(tier, reports)
    return SharedDecision(shared=shared, failed=failed)


def _found(tier: FileTierConfig | ObjectTierConfig, seen: Mapping[int, bool]) -> bool:
    with_it = [rank for rank, sees in seen.items() if sees]
    without = [rank for rank, sees in seen.items() if not sees]
    where = f"open: tier {tier.name} ({tier.folder})"
    if with_it and without:
        raise ConfigError(
            f"{where}: the nodes of {format_ranks(with_it)} see what rank 0 writes there, those of "
            f"{format_ranks(without)} do not: mount one folder on all nodes, or one of its own on each"
        )
    setting, found = shared_setting(tier), bool(with_it)
    if setting is True and not found:
        what = "a tier of kind file" if isinstance(tier, ObjectTierConfig) else "shared: false"
        raise ConfigError(
            f"{where} is set to be shared, and the nodes of {format_ranks(without)} do not see what rank 0 writes "
            f"there: mount it on all nodes, or make it {what}"
        )
    if setting is False and found:
        raise ConfigError(
            f"{where} is set to shared: false, and the nodes of {format_ranks(with_it)} see what rank 0 writes there: "
            "set shared: true, or give each node a folder of its own"
        )
    return found


def _check_one_id(
    tier: FileTierConfig | ObjectTierConfig, reports: Mapping[int, FolderReport]
) -> None:
    """Raise ConfigError if a tier that all nodes saw before has not one id on all ranks that have opened it."""
    known = [rank for rank, report in reports.items() if tier.name in report.shared_before]
    ids = {rank: x.ids[tier.name] for rank, x in reports.items() if tier.name in x.ids}
    for rank, id in ids.items() if known else ():
        if id != ids[known[0]]:
            raise ConfigError(
                f"open: tier {tier.name} ({tier.folder}): rank {known[0]} finds that all nodes saw the same files "
                f"there before, and rank {rank} finds another tier there, or none. {_ADVICE}"
            )


def _check_one_nodes(
    tier: FileTierConfig | ObjectTierConfig, reports: Mapping[int, FolderReport]
) -> None:
    """Raise ConfigError if one folder had the images of all ranks, and another node's is empty."""
    empty = [rank for rank, report in reports.items() if tier.name in report.empty]
    for rank, report in reports.items():
        if empty and tier.name in report.of_all_ranks:
            raise ConfigError(
                f"open: tier {tier.name} ({tier.folder}): other nodes do not see what rank 0 writes there, and rank "
                f"{rank} finds that the commit record of {report.of_all_ranks[tier.name]} there names the images of "
                f"all ranks, and the folder of {format_ranks(empty)} is empty. {_ADVICE}"
            )


def _check_file_systems(
    tier: FileTierConfig | ObjectTierConfig, reports: Mapping[int, FolderReport]
) -> None:
    """Raise ConfigError if a folder of each node is on file systems of several kinds."""
    kinds = {
        r: x.file_systems[tier.name] for r, x in reports.items() if tier.name in x.file_systems
    }
    others = [rank for rank, kind in kinds.items() if kind != kinds[0]]
    if others:
        raise ConfigError(
            f"open: tier {tier.name} ({tier.folder}): on rank 0 it is on {kinds[0]}, on {format_ranks(others)} on "
            f"{kinds[others[0]]}: that may be a missing mount. {_ADVICE}"
        )


def _listing(opened: OpenedTiers, name: str) -> Listing:
    return next(x for x in opened.listings if x.tier == name)


def _of_all_ranks(opened: OpenedTiers, name: str) -> str | None:
    """Return a checkpoint whose commit record on a tier names the images of all ranks; None if there is none. All ranks
    may have been on one node."""
    for copy in _listing(opened, name).copies:
        commit = copy.commit
        if commit is not None and len(ranks_with_image(commit, commit.world_size)) == (
            commit.world_size
        ):
            return str(copy.id)
    return None


def _file_system(tier: FileTierConfig | ObjectTierConfig) -> str:
    """Return the kernel's name of the file system that a folder is on."""
    assert tier.folder is not None
    try:
        return file_system_of(tier.folder) or "an unknown file system"
    except OSError as error:
        return f"a file system that cannot be examined ({error.strerror})"


# The first rank of each other node -------------------------------------------------------------------


def find_probe_files(
    opened: OpenedTiers, tiers: Tiers, token: str
) -> tuple[dict[str, bool], dict[str, str]]:
    """Search rank 0's files for a limited time; return, by tier, whether its file was seen, and the errors."""
    seen: dict[str, bool] = {}
    failed: dict[str, str] = {}
    began = time.monotonic()
    key = f"{_prefix(opened.run)}{token}"
    waiting = [tier for tier in tiers if tier.name in opened.stores]
    while waiting:
        for tier in list(waiting):
            try:
                opened.stores[tier.name].backend.stat(key)
            except KeyNotFoundError:
                if time.monotonic() - began < _patience_s(opened, tier):
                    continue
                seen[tier.name] = False
            except BackendError as error:
                failed[tier.name] = str(error)
            else:
                seen[tier.name] = True
            waiting.remove(tier)
        if waiting:
            time.sleep(PAUSE_S)
    return seen, failed


def _patience_s(opened: OpenedTiers, tier: FileTierConfig | ObjectTierConfig) -> float:
    return min(PATIENCE_S[shared_setting(tier)], opened.config.max_wait_s / 2)
