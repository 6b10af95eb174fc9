"""The start of a run: all ranks agree on one attempt, on what the tiers hold, and on which folders all nodes see; the
attempts of a run, by the records on several tiers.

Every rank reports its own memory, the leader of each node the tiers that only its node sees, and rank 0 the shared
tiers. Rank 0 merges the reports: a checkpoint exists where the images of all ranks do.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain

from tierfall.config import FileTierConfig, ObjectTierConfig
from tierfall.core.format.catalog import (
    FoundCopy,
    Listing,
    decided_in,
    merge,
    next_attempt,
    overtaken,
    starts_in,
)
from tierfall.core.format.commit_files import image_file, ranks_with_image
from tierfall.core.format.decided import DecidedList
from tierfall.core.format.records import Attempt, Lineage
from tierfall.core.ranks.messages import CheckpointKey, Message
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.restore.agreement import (
    complete,
    damaged_copies,
    not_on_all_nodes,
    on_few_nodes,
    only_whole,
    whole_on_each,
)
from tierfall.core.restore.inventory import (
    TierMessage,
    describe,
    merge_ranks,
    unlisted,
)
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.types import keys
from tierfall.core.types.backend import put_object
from tierfall.core.types.errors import (
    BackendError,
    ConfigError,
    IntegrityError,
    KeyNotFoundError,
    RanksError,
    StorageFullError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.keys import ATTEMPT_MAX
from tierfall.core.types.lineage import AttemptStart
from tierfall.core.types.text import format_ranks
from tierfall.core.types.values import CheckpointId
from tierfall.setup.host_memory import displaced_in
from tierfall.setup.opened_tiers import OPENING, OpenedTiers
from tierfall.setup.tiers import (
    holds_any,
    reported_tiers,
    reporters,
    shared_setting,
    start_patience_s,
)
from tierfall.tiers.host_folder import file_system_of
from tierfall.tiers.run_files import StrayAttemptError
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")
Tiers = Sequence[FileTierConfig | ObjectTierConfig]

TRIES = 8
PATIENCE_S = {True: 10.0, None: 1.5, False: 0.5}
"""Seconds that a file is searched, by ``shared`` of the tier: a network file system may show it late."""
PAUSE_S = 0.1
STALE_S = 3600.0
_ATTEMPT, _READY, _REST = "open: attempt", "open: ready", "open: old checkpoints"
_LEFTOVERS, _SHARED = "open: leftovers", "open: shared"
_ADVICE = "Mount it on all nodes; or, where each node is to have a folder of its own there, set shared: false"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport(Message):
    """What ``rank`` has found on a tier, for the ranks that could not list it."""

    tier: str
    rank: int
    found: TierMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Message):
    """What a session begins with: what rank 0 has decided, by what all ranks have found on the tiers.

    ``unreachable`` has, per tier, the reason of some rank. ``whole`` has, per tier that all ranks reach, the
    checkpoints whose images are all on it; ``complete`` those whose images are all on some tier; ``on_few_nodes`` is as
    in ``View``; ``seen`` the tiers that every rank could read whole. ``first``: no rank found a checkpoint.
    ``image_bytes`` has the bytes of all ranks' images, ``not_finite`` what is NaN or infinite in any, by checkpoint.
    ``lags``: some rank has a listing that lags.
    ``displaced`` are complete checkpoints of which some rank's memory has another rank's image: no rank flushes them.
    ``decided`` are the names of the entries in all lists that any rank has read; ``damaged``, per tier, the damaged
    copies that a rule may delete, with their damage; ``starts`` how the attempts began that have committed a
    checkpoint. ``overtaken`` names the tiers that a checkpoint is still owed to by the record of a newer one on any
    node; None where each rank decides by itself. ``reported`` has listings for the ranks that could not list a tier.
    ``elsewhere`` has, per tier, the checkpoints that some nodes have no file of, though they are whole or damaged
    there. ``partial``: some rank has left commit records of old checkpoints for later; ``agree_on_rest`` follows.
    Without an ``attempt``, all ranks are to read them now.
    """

    attempt: Attempt | None = None
    partial: bool = False
    unreachable: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, frozenset[CheckpointId]] = field(default_factory=dict)
    complete: frozenset[CheckpointId] = frozenset()
    on_few_nodes: Mapping[str, Mapping[CheckpointKey, bool]] = field(default_factory=dict)
    seen: frozenset[str] = frozenset()
    first: bool = False
    image_bytes: Mapping[CheckpointKey, int] = field(default_factory=dict)
    not_finite: Mapping[CheckpointKey, tuple[str, ...]] = field(default_factory=dict)
    lags: bool = False
    displaced: frozenset[CheckpointId] = frozenset()
    decided: tuple[str, ...] = ()
    damaged: Mapping[str, Mapping[CheckpointKey, str]] = field(default_factory=dict)
    starts: tuple[AttemptStart, ...] = ()
    overtaken: Mapping[CheckpointKey, frozenset[str]] | None = None
    reported: tuple[TierReport, ...] = ()
    elsewhere: Mapping[str, tuple[FoundCopy, ...]] = field(default_factory=dict)

    @property
    def scattered(self) -> frozenset[CheckpointId]:
        """The checkpoints whose images are all on some tier, but on none together that all ranks reach."""
        return self.complete - frozenset().union(*self.whole.values())


def take_attempt(tiers: OpenedTiers, before: Attempt | None = None) -> Start:
    """Take an attempt, together with the other ranks, and return what the tiers hold. ``before`` is the attempt of this
    process that it follows; the first one deletes what earlier starts left half written."""
    if tiers.agrees:
        return agree_on_start(tiers, before)
    tiers.make_durable()
    attempt = tiers.claim_from(next_number(tiers.listings, run=tiers.run, own=before))
    if before is None:
        tiers.discard_unfinished(attempt)
    return Start(attempt=attempt, first=tiers.finds_nothing(), partial=tiers.is_partial)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundAtStart(Message):
    """What one rank has found. ``unreachable`` has the reason of each tier; ``tiers`` is the inventory of those that it
    reports; ``unlisted`` names, for each stored tier that it could not list, the rank that reports it; ``nothing``: it
    knows of no checkpoint, and could read every tier. ``emptied`` has the tiers that its node remembers and finds
    empty, each with the reason. ``partial``: it has left commit records for later."""

    number: int
    partial: bool
    unreachable: Mapping[str, str]
    emptied: Mapping[str, str] = field(default_factory=dict)
    tiers: Mapping[str, TierMessage]
    unlisted: Mapping[str, int]
    nothing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(Message):
    """The ranks at which a tier ``refused`` the attempt, and the tiers that a rank may not write to, with why: of one
    rank, or of all."""

    refused: tuple[int, ...]
    read_only: Mapping[str, str]


def agree_on_start(tiers: OpenedTiers, before: Attempt | None) -> Start:
    """Take one attempt for all ranks. Raises, on every rank, what kept one of them from starting.

    All ranks exclude a tier that one rank cannot reach: no checkpoint would ever be whole there. Where one falls silent
    after that, they decide again, without it.
    """
    ranks = tiers.ranks
    if before is None:
        _find_shared(tiers)
    tiers.make_durable()
    reported_by = reporters(tiers.config, ranks)
    looked_at = [
        replace(x, error=tiers.emptied[x.tier]) if x.tier in tiers.emptied else x
        for x in tiers.listings
    ]
    number = next_number(looked_at, run=tiers.run, own=before)
    for _ in range(TRIES):
        start = ranks.agree(
            OPENING,
            _found_here(tiers, number),
            lambda found: decide(tiers, found),
            Start,
            timeout_s=start_patience_s(tiers.config),
        )
        if start.attempt is None:
            tiers.listings = tiers.list_now(OPENING)
            tiers.make_durable()
            continue
        tiers.exclude_all(start.unreachable)
        tiers.emptied.clear()  # the others are new tiers
        with ranks.reporting_error(_ATTEMPT):
            taken = ranks.topology.is_root or tiers.claim(start.attempt)  # rank 0 has decided it
        refused = () if taken else (ranks.topology.rank,)
        claim = Claim(refused=refused, read_only=tiers.found_read_only)
        answer = ranks.agree(_ATTEMPT, claim, _merge_claims, Claim)
        tiers.make_read_only(answer.read_only)
        if not answer.refused and (before or _discard_unfinished(tiers, start.attempt)):
            tiers.listings = fill_in(tiers.listings, start, reported_by)
            return start
        number = start.attempt.number + 1
    raise RanksError(
        f"open: {format_ranks(answer.refused)} found another start's attempt in the place of each of {TRIES} numbers: "
        "another job of this run's name is starting at the same time"
    )


def agree_on_rest(tiers: OpenedTiers, start: Start, leave: InterruptibleEvent) -> Start:
    """Agree again on what the tiers hold, now that each rank has read the commit records that the ``start`` had left
    for later. For another thread than that of the training. Raises RanksError if a rank does not come, or after
    ``leave`` was set."""
    if not tiers.agrees:
        return replace(start, partial=False)
    again = tiers.ranks.agree_aside(
        _REST,
        _found_here(tiers, 0),
        lambda found: decide(tiers, found, start.attempt),
        Start,
        timeout_s=start_patience_s(tiers.config),
        leave=leave,
    )
    tiers.listings = fill_in(tiers.listings, again, reporters(tiers.config, tiers.ranks))
    return again


def _found_here(tiers: OpenedTiers, number: int) -> FoundAtStart:
    return FoundAtStart(
        number=number,
        partial=tiers.is_partial,
        unreachable={tier: str(error) for tier, error in tiers.errors.items()},
        emptied={tier: str(error) for tier, error in tiers.emptied.items()},
        tiers=describe(tiers.listings, mine=reported_tiers(tiers.config, tiers.ranks)),
        unlisted=unlisted(tiers.listings, reporters(tiers.config, tiers.ranks)),
        nothing=tiers.finds_nothing(),
    )


def _discard_unfinished(tiers: OpenedTiers, attempt: Attempt) -> bool:
    """Delete what earlier starts left half written, now that all ranks have written the attempt, and none writes
    anything else. Return whether all ranks can go on with all tiers."""
    timeout_s = start_patience_s(tiers.config)
    with tiers.ranks.reporting_error(_LEFTOVERS, timeout_s):
        silent = not tiers.discard_unfinished(attempt)
    return tiers.ranks.agree(
        _LEFTOVERS, silent, lambda found: not any(found.values()), bool, timeout_s=timeout_s
    )


def fill_in(
    listings: Iterable[Listing], start: Start, reported_by: Mapping[str, int]
) -> tuple[Listing, ...]:
    """Replace the listings that failed on this rank by those of the ranks that report the tiers, where these could list
    them. Without them, this rank would owe copies that exist, and wait for the other ranks to upload their images."""
    reported = {
        report.tier: merge_ranks({report.rank: {report.tier: report.found}}, [report.tier])[0]
        for report in start.reported
        if report.rank == reported_by.get(report.tier)
    }
    return tuple(x if x.error is None else reported.get(x.tier, x) for x in listings)


@contextmanager
def all_ranks_or_none(ranks: Ranks, *, timeout_s: float) -> Iterator[None]:
    """Start no rank unless all ranks complete this block, the last within ``timeout_s`` seconds of the first."""
    with ranks.reporting_error(_READY, timeout_s):
        yield
    ranks.meet(_READY, timeout_s=timeout_s)


def decide(
    tiers: OpenedTiers, found: Mapping[int, FoundAtStart], attempt: Attempt | None = None
) -> Start:
    """Decide, on rank 0, which attempt all ranks take and which checkpoints of the tiers count for all of them.

    ``found`` are the reports of the ranks, ``attempt`` is what they have taken before.
    """
    partial = any(one.partial for one in found.values())
    if partial and any(one.emptied for one in found.values()):
        return Start()  # whether all that those tiers can have had is elsewhere, the records tell
    inventories = {rank: one.tiers for rank, one in found.items()}
    listings = merge_ranks(inventories, [tier.name for tier in tiers.config.chain])
    whole_somewhere, _ = complete(listings)
    refused = _refused_as_emptied(found, listings)
    for name in refused.keys() & tiers.emptied.keys():  # before anything is written there
        tiers.exclude(name, tiers.emptied.pop(name))
    unreachable = {
        **_first_reasons((rank, one.unreachable) for rank, one in found.items()),
        **refused,
    }
    attempt = attempt or tiers.claim_from(max(one.number for one in found.values()))
    reachable = [listing for listing in listings if listing.tier not in unreachable]
    host, copies = tiers.config.host.name, tiers.config.peer_copies
    few = on_few_nodes(reachable, inventories, copies=copies, whole=whole_somewhere, host=host)
    return Start(
        unreachable=unreachable,
        attempt=attempt,
        partial=partial,
        whole=whole_on_each(reachable, few, host=host),
        complete=whole_somewhere,
        on_few_nodes=few,
        seen=frozenset(x.tier for x in listings if x.unread is None),
        displaced=whole_somewhere
        & displaced_in(inventories, host=host, world_size=tiers.ranks.topology.world_size),
        decided=decided_in(listings).names,
        damaged=damaged_copies(listings, host=host),
        starts=tuple(starts_in(listings, whole_somewhere)),
        overtaken=overtaken(merge(map(only_whole, listings))),
        first=all(one.nothing for one in found.values()),
        image_bytes={c.id: c.bytes for c in merge(listings)},
        not_finite={c.id: tuple(sorted(c.not_finite)) for c in merge(listings) if c.not_finite},
        lags=any(listing.lags for listing in listings),
        reported=tuple(
            TierReport(tier=tier, rank=rank, found=inventories[rank][tier])
            for tier, rank in sorted({x for one in found.values() for x in one.unlisted.items()})
            if tier not in unreachable and inventories[rank][tier].error is None
        ),
        elsewhere={x.tier: not_on_all_nodes(x, inventories) for x in listings},
    )


def _refused_as_emptied(
    found: Mapping[int, FoundAtStart], listings: Sequence[Listing]
) -> dict[str, str]:
    """Return the tiers that are empty on a node and were not before, with why, unless all that they can have had is
    elsewhere: another node has its part of the tier, and each checkpoint that anything names is whole without it."""
    emptied = _first_reasons((rank, one.emptied) for rank, one in found.items())
    named = {copy.id for listing in listings for copy in listing.copies}

    def is_elsewhere(tier: str) -> bool:
        parts = [
            one.tiers[tier]
            for one in found.values()
            if tier in one.tiers and tier not in one.emptied
        ]
        whole, _ = complete([x for x in listings if x.tier != tier])
        return any(part.error is None and part.copies for part in parts) and named <= whole

    return {tier: why for tier, why in emptied.items() if not is_elsewhere(tier)}


def _merge_claims(claims: Mapping[int, Claim]) -> Claim:
    return Claim(
        refused=tuple(chain.from_iterable(claim.refused for claim in claims.values())),
        read_only=_first_reasons((rank, claim.read_only) for rank, claim in claims.items()),
    )


def _first_reasons(reasons: Iterable[tuple[int, Mapping[str, str]]]) -> dict[str, str]:
    """Return, per tier, the first reason that any rank has. It counts for all ranks: no checkpoint would be whole on a
    tier that one of them does not write to."""
    found: dict[str, str] = {}
    for rank, by_tier in reasons:
        for tier, why in by_tier.items():
            found.setdefault(tier, f"rank {rank}: {why}")
    return found


def on_all_ranks(tiers: OpenedTiers, start: Start) -> tuple[Listing, ...]:
    """Return this rank's listings. If ranks have agreed on the ``start``, checkpoints that lack images of other ranks
    are left out.

    An image in memory counts where the other images are on some tier, since it is read first; but not where it is
    another rank's, whose record does not name this rank's files. What any rank has found to be decided counts for all,
    and so does damage of a copy that a rule may delete.
    """
    if start.overtaken is None:
        return tiers.listings
    host, shard = tiers.config.host.name, tiers.ranks.shard
    decided = DecidedList.parse(start.decided)

    def counts(tier: str, copy: FoundCopy) -> bool:
        if tier != host:
            return copy.id in start.whole[tier] or copy.id in start.damaged.get(tier, {})
        is_ours = copy.commit is None or image_file(copy.commit, shard) is not None
        return is_ours and copy.id in start.complete

    def damage_of(tier: str, copy: FoundCopy) -> TierfallError | None:
        why = start.damaged.get(tier, {}).get(copy.id)
        return copy.damage if why is None else IntegrityError(why)

    def beside(listing: Listing) -> Iterable[FoundCopy]:
        found = start.elsewhere.get(listing.tier, ()) if listing.error is None else ()
        return (one for one in found if listing.copy(one.id) is None)

    return tuple(
        replace(
            listing,
            starts=start.starts,
            decided=listing.decided | decided,
            copies=tuple(
                replace(copy, damage=damage_of(listing.tier, copy))
                for copy in (*listing.copies, *beside(listing))
                if counts(listing.tier, copy)
            ),
        )
        for listing in tiers.listings
    )


# Which folders all nodes see -------------------------------------------------------------------------
#
# Rank 0 writes a file to each folder, and the first rank of each other node searches it. The result sets ``shared`` of
# a tier that is not configured, and is checked against the value of one that is. A tier that all nodes saw before has
# one id on all of them: on a node where its file system is not mounted, its folder is empty. So it may be if a commit
# record names the images of all ranks. With one node there is no probe.


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderLook(Message):
    """One rank's view of a tier's folder. A rank that has excluded the tier reports the file system alone.

    ``seen``: whether it saw rank 0's file; None if it did not search, or the search ``failed``. ``id`` is that in the
    tier's record. ``was_shared``: a record says that all nodes saw the tier. ``of_all_ranks`` is a checkpoint whose
    commit record there names the images of all ranks. ``is_empty``: there is no file of the run. ``file_system`` is the
    kind of its file system, reported by the first rank of a node.
    """

    seen: bool | None = None
    failed: str = ""
    is_opened: bool = False
    id: str | None = None
    was_shared: bool = False
    of_all_ranks: str | None = None
    is_empty: bool = False
    file_system: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderReport(Message):
    """One rank's views, by tier: of those that rank 0 could write to, and those that are full."""

    looks: Mapping[str, FolderLook]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDecision(Message):
    """By tier: whether all nodes see the same files, and why some rank could not write or search."""

    shared: Mapping[str, bool]
    failed: Mapping[str, str]


def _find_shared(opened: OpenedTiers) -> None:
    """Find out, at the first attempt, which folders all nodes see. No agreement of the ranks comes before it.

    Raises ConfigError, on all ranks, if some nodes see a tier's files and others do not, or if the result contradicts a
    configured value.
    """
    tiers = [x for x in opened.config.storage if x.folder is not None]
    topology = opened.ranks.topology
    if len(topology.nodes) == 1 or not tiers:
        return
    key = f"{opened.run}/{keys.PROBE_FOLDER}/{int(time.time())}-{secrets.token_hex(8)}"
    written: list[StoredTier] = []
    failed: dict[str, str] = {}
    try:
        files = opened.ranks.agree(
            OPENING,
            None,
            lambda _: _write_probe_files(opened, tiers, key, written, failed),
            dict[str, str],
            timeout_s=start_patience_s(opened.config),
        )
        tiers = [tier for tier in tiers if tier.name in files]
        looks = {tier.name: _look_at(opened, tier) for tier in tiers}
        if topology.is_leader and topology.node != 0:
            _search_probe_files(opened, tiers, files, looks)
        found = opened.ranks.agree(
            _SHARED,
            FolderReport(looks=looks),
            lambda reports: _decide_shared(tiers, files, failed, reports),
            SharedDecision,
        )
    finally:
        for store in written:
            try:
                store.backend.delete(key)
            except BackendError as error:
                logger.warning("open: tier %s: a file of the probe stays: %s", store.name, error)
    for name in [t.name for t in tiers if t.shared is None and isinstance(t, FileTierConfig)]:
        if name in found.shared:
            logger.info("tier %s: all nodes see the same files: %s", name, found.shared[name])
    opened.set_shared(found.shared)
    opened.exclude_all(found.failed)


def _write_probe_files(
    opened: OpenedTiers, tiers: Tiers, key: str, written: list[StoredTier], failed: dict[str, str]
) -> dict[str, str]:
    """Write a file to each folder, on rank 0, and return its ``key`` by tier. Add the tiers that have it to
    ``written``, and those that do not answer, with why, to ``failed``.

    A full tier has an empty key: the configured value is used, or else its records. Raises the errors of a tier that
    are not retryable.
    """
    prefix = key.rpartition("/")[0] + "/"
    files: dict[str, str] = {}
    for tier in tiers:
        store = opened.stores.get(tier.name)
        if store is None or tier.read_only or tier.name in opened.emptied:
            continue
        try:
            for stale in [s.key for s in store.backend.scan(prefix) if _is_stale(s.key)]:
                store.backend.delete(stale)
            put_object(store.backend, key, b"\n")
        except StorageFullError as error:
            files[tier.name] = ""
            logger.warning(
                "open: tier %s is full, and no file shows whether all nodes see it: by its records, or else by "
                "default, it is %s. Set 'shared', or free the disk: %s",
                store.name,
                "shared" if shared_setting(tier) else "a folder of each node",
                error,
            )
        except UnreachableError as error:
            failed[tier.name] = f"rank 0: {error}"
        else:
            files[tier.name] = key
            written.append(store)
    return files


def _is_stale(key: str) -> bool:
    """Return whether a killed start left this file. A recent file may be of a start that is probing now."""
    written = key.rpartition("/")[2].partition("-")[0]
    return written.isdecimal() and time.time() - int(written) > STALE_S


def _look_at(opened: OpenedTiers, tier: FileTierConfig | ObjectTierConfig) -> FolderLook:
    """Return what this rank knows of a tier's folder, before it searches rank 0's file."""
    look, name = FolderLook(), tier.name
    if opened.ranks.topology.is_leader:
        assert tier.folder is not None
        try:
            kind = file_system_of(tier.folder) or "an unknown file system"
        except OSError as error:
            kind = f"a file system that cannot be examined ({error.strerror})"
        look = replace(look, file_system=kind)
    if name not in opened.stores:
        return look
    listing = next(x for x in opened.listings if x.tier == name)
    of_all_ranks = (
        str(copy.id)
        for copy in listing.copies
        if (commit := copy.commit) is not None
        if len(ranks_with_image(commit, commit.world_size)) == commit.world_size
    )
    return replace(
        look,
        is_opened=True,
        id=opened.identities.id_of(name),
        was_shared=opened.identities.is_shared(name),
        of_all_ranks=next(of_all_ranks, None),
        is_empty=not holds_any(listing),
    )


def _search_probe_files(
    opened: OpenedTiers, tiers: Tiers, files: Mapping[str, str], looks: dict[str, FolderLook]
) -> None:
    """Search rank 0's files for a limited time; add to ``looks`` whether each was seen, or why that failed."""
    began = time.monotonic()
    waiting = [tier for tier in tiers if tier.name in opened.stores and files[tier.name]]
    while waiting:
        for tier in list(waiting):
            name = tier.name
            try:
                opened.stores[name].backend.stat(files[name])
            except KeyNotFoundError:
                patience_s = min(PATIENCE_S[shared_setting(tier)], opened.config.max_wait_s / 2)
                if time.monotonic() - began < patience_s:
                    continue
                looks[name] = replace(looks[name], seen=False)
            except BackendError as error:
                looks[name] = replace(looks[name], failed=str(error))
            else:
                looks[name] = replace(looks[name], seen=True)
            waiting.remove(tier)
        if waiting:
            time.sleep(PAUSE_S)


def _decide_shared(
    tiers: Tiers,
    files: Mapping[str, str],
    failed: Mapping[str, str],
    reports: Mapping[int, FolderReport],
) -> SharedDecision:
    """Decide, on rank 0, by what all ranks have seen; ``failed`` are the tiers that rank 0 could not write to."""
    shared: dict[str, bool] = {}
    failed = dict(failed)
    for tier in tiers:
        name, is_open = tier.name, shared_setting(tier) is None
        where = f"open: tier {name} ({tier.folder})"
        looks = {rank: x.looks[name] for rank, x in reports.items() if name in x.looks}
        seen = {rank: look.seen for rank, look in looks.items() if look.seen is not None}
        for rank, look in looks.items():
            if look.failed:
                failed.setdefault(name, f"rank {rank}: {look.failed}")
        if is_open:
            _check_one_id(where, looks)
        if not files[name] and is_open:
            shared[name] = any(look.was_shared for look in looks.values())
        elif files[name] and name not in failed and seen:
            shared[name] = _found(tier, where, seen)
        if is_open and not shared.get(name, True):
            _check_not_shared(where, looks)
    return SharedDecision(shared=shared, failed=failed)


def _found(tier: FileTierConfig | ObjectTierConfig, where: str, seen: Mapping[int, bool]) -> bool:
    with_it = [rank for rank, sees in seen.items() if sees]
    without = [rank for rank, sees in seen.items() if not sees]
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


def _check_one_id(where: str, looks: Mapping[int, FolderLook]) -> None:
    """Raise ConfigError if a tier that all nodes saw before has not one id on all ranks that have opened it."""
    known = [rank for rank, look in looks.items() if look.was_shared]
    for rank, look in looks.items() if known else ():
        if look.is_opened and look.id != looks[known[0]].id:
            raise ConfigError(
                f"{where}: rank {known[0]} finds that all nodes saw the same files there before, and rank {rank} finds "
                f"another tier there, or none. {_ADVICE}"
            )


def _check_not_shared(where: str, looks: Mapping[int, FolderLook]) -> None:
    """Raise ConfigError if a folder that is not shared seems not to be mounted on some node: one folder had the images
    of all ranks, and another node's is empty; or they are on file systems of several kinds."""
    empty = [rank for rank, look in looks.items() if look.is_empty]
    for rank, look in looks.items():
        if empty and look.of_all_ranks:
            raise ConfigError(
                f"{where}: other nodes do not see what rank 0 writes there, and rank {rank} finds that the commit "
                f"record of {look.of_all_ranks} there names the images of all ranks, and the folder of "
                f"{format_ranks(empty)} is empty. {_ADVICE}"
            )
    kinds = {rank: look.file_system for rank, look in looks.items() if look.file_system}
    others = [rank for rank, kind in kinds.items() if kind != kinds[0]]
    if others:
        raise ConfigError(
            f"{where}: on rank 0 it is on {kinds[0]}, on {format_ranks(others)} on {kinds[others[0]]}: that may be a "
            f"missing mount. {_ADVICE}"
        )


# Attempts, by the records on several tiers ------------------------------------------------------------


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
