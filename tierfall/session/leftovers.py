"""Host memory of an earlier start: the check that it is this run's, its adoption, and the images that are not those of
the present ranks.

A rank owns its slot, with the images of whatever rank. An image of this rank becomes its copy again. The first rank of
a node adopts the slots beyond those of the present ranks. The images of other ranks are kept for restores until
something newer is durable. Nothing here knows how ranks agree.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tierfall.core.capture.snapshot import HostRegion
from tierfall.core.flush.facts import Ledger, LedgerEntry
from tierfall.core.format.catalog import Listing
from tierfall.core.format.commit_files import shards_of
from tierfall.core.format.records import Commit, geometry, parse_manifest
from tierfall.core.restore.inventory import Inventory, unite_listings
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.runtime.run_lock import RunLock
from tierfall.core.types.errors import ConfigError, IntegrityError, KeyNotFoundError, TierfallError
from tierfall.core.types.text import format_some
from tierfall.core.types.values import CheckpointId, CopyState, LossClass, Shard
from tierfall.setup.attempts import ids_by_commits
from tierfall.setup.tiers import unattached_slot
from tierfall.telemetry.status import remove_status
from tierfall.tiers.arena.arena import lock_name
from tierfall.tiers.host import HostTier, SealedImage, arena_slots
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")


@dataclass(frozen=True, slots=True)
class AdoptedSlot:
    """A slot of a rank that no longer exists, with its lock."""

    lock: RunLock
    host: HostTier

    def close(self, *, keep: bool) -> None:
        try:
            self.host.close(keep=keep)
            if not keep:
                remove_status(self.lock.path)
        finally:
            self.lock.release()


def adopt_slots(
    folder: Path,
    *,
    first: int,
    name: str,
    run: str,
    command: str = "",
) -> tuple[list[AdoptedSlot], list[TierfallError]]:
    """Adopt every slot from ``first`` on that has an arena. An empty one is deleted; one that cannot be read is logged,
    and stays: also return the errors of those that may hold good images.

    Raises LockError where another process owns one: a rank of an earlier start that still runs.
    """
    adopted: list[AdoptedSlot] = []
    problems: list[TierfallError] = []
    try:
        for slot in arena_slots(folder):
            if slot >= first:
                lock = RunLock.acquire(folder / lock_name(slot), run=run, command=command)
                host = unattached_slot(folder, slot, name=name, run=run)
                adopted += _adopt(lock, host, problems)
    except BaseException:
        for one in adopted:
            one.close(keep=True)
        raise
    return adopted, problems


def _adopt(lock: RunLock, host: HostTier, problems: list[TierfallError]) -> list[AdoptedSlot]:
    try:
        host.attach()
    except BaseException as error:
        lock.release()
        if not isinstance(error, TierfallError):
            raise
        logger.warning(
            "open: the host memory that a rank of an earlier start left cannot be read, and stays: %s",
            error,
        )
        if not (error.is_damage or isinstance(error, ConfigError)):  # the latter: not of this run
            problems.append(error)
        return []
    slot = AdoptedSlot(lock, host)
    if host.is_empty():
        slot.close(keep=False)
        return []
    return [slot]


def list_slots(hosts: Sequence[HostTier]) -> Listing:
    """Return what is sealed in several slots, as one listing."""
    return unite_listings(hosts[0].name, {host.path.name: host.list() for host in hosts})


def images_in(hosts: Iterable[HostTier]) -> list[tuple[CheckpointId, SealedImage]]:
    """Return the sealed images of several slots; each may have an image of the same checkpoint."""
    return [item for host in hosts for item in host.images().items()]


def regions_in(hosts: Iterable[HostTier]) -> dict[tuple[CheckpointId, Shard], HostRegion]:
    return {(id, held.region.shard): held.region for id, held in images_in(hosts)}


# On rank 0 --------------------------------------------------------------------------------------------


def displaced_in(
    inventories: Mapping[int, Inventory], *, host: str, world_size: int
) -> frozenset[CheckpointId]:
    """Return the checkpoints of which some rank has found an image in memory that another rank saved, or one of as many
    ranks as there are not now."""
    return frozenset(
        copy.id
        for rank, tiers in inventories.items()
        for copy in (tiers[host].copies if host in tiers else ())
        if (commit := copy.commit_of(rank, host)) is not None
        and shards_of(commit) != [Shard(rank, world_size)]
    )


# In the ledger ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Leftovers:
    """The images in this node's memory that are not those of the present ranks, by checkpoint: they are restored from,
    and copied nowhere. Belongs to the coordinator's thread."""

    ledger: Ledger
    slots: list[AdoptedSlot]
    images: dict[CheckpointId, list[HostRegion]] = field(default_factory=dict)
    _conditions: Conditions = field(default_factory=Conditions)

    def add(self, id: CheckpointId, image: SealedImage, *, complete: bool) -> None:
        """Keep an image until something newer is on a tier. ``complete``: all images of its checkpoint are there."""
        shard = image.region.shard
        what = f"open: the part of rank {shard.rank} of {shard.world_size} of {id} is in memory"
        stays = "it is not flushed, and stays, to be restored from, until something newer is durable or a save needs"
        if complete:
            logger.info("%s: %s its room", what, stays)
        else:
            logger.warning(
                "%s, the others' are not: %s its room; if no other tier holds the rest, that checkpoint is lost with "
                "the machines that are missing", what, stays,
            )  # fmt: skip
        self.images.setdefault(id, []).append(image.region)

    def on_committed(self, tier: str, newer: LedgerEntry) -> None:
        """Release what is older than a checkpoint just committed on ``tier``, unless it is pinned, and nowhere else."""
        if self.ledger.rules_of(tier).survives is LossClass.NONE:
            return
        for id in [id for id in self.images if (id.attempt, id.step) < newer.age_order]:
            if self.ledger.decided.is_pinned(id, None) and not self.durable_on(id):
                continue
            for region in self.images.pop(id):
                region.release()
            self._conditions.end(id, "memory has room beside %s again: it is released", id)
        for slot in [slot for slot in self.slots if slot.host.is_empty()]:
            self.slots.remove(slot)
            slot.close(keep=False)

    def evict_oldest(self) -> bool:
        """Release the oldest images, for a save; False where there are none that may go.

        Those that this start was restored from go last; without peer memory they stay as long as no tier has them. So
        do those that peer memory counts on, and only where memory has room for nothing else: of these the restored one
        goes before one that was reported.
        """
        ids = sorted(self.images, key=self._eviction_order)
        if ids and self._is_only_source(ids[0]):
            self._conditions.report(
                ids[0], logging.WARNING,
                "memory has no room beside %s, which this start was restored from and no tier has: saves wait or are "
                "skipped until something newer is durable. With room for one image only, end the training and run "
                "'tierfall drain', or raise the capacity of memory", ids[0],
            )  # fmt: skip
            return False
        if not ids or (self._is_needed(ids[0]) and self._has_other_images()):
            return False
        id = ids[0]
        logger.warning("memory is full: the part of %s that an earlier start left is deleted", id)
        for region in self.images.pop(id):
            region.release()
        return True

    def _eviction_order(self, id: CheckpointId) -> tuple[bool, bool, int, int]:
        is_needed = self._is_needed(id) or self._is_only_source(id)
        return is_needed, is_needed and self._may_be_reported(id), id.attempt, id.step

    def _is_only_source(self, id: CheckpointId) -> bool:
        is_restored = id == self.ledger.restored_from and not self.ledger.peer_tiers
        return is_restored and not self.durable_on(id)

    def _is_needed(self, id: CheckpointId) -> bool:
        """Return whether peer memory counts on these images, and no other tier has them: this start was restored from
        them, or they are the newest of a reported checkpoint."""
        peers = self.ledger.peer_tiers
        if not peers or self.durable_on(id) - peers:
            return False
        return id == self.ledger.restored_from or (
            self._may_be_reported(id) and not self._has_newer(id)
        )

    def _has_newer(self, id: CheckpointId) -> bool:
        entries, peers = self.ledger.entries, self.ledger.peer_tiers
        newer = entries.keys() | {other for _, other in self.ledger.on_few_nodes}
        deleted = {other for other in entries if entries[other].deleted}
        return any(
            self.durable_on(other) - peers or self._may_be_reported(other)
            for other in newer - deleted
            if other > id
        )

    def _may_be_reported(self, id: CheckpointId) -> bool:
        """Return whether peer memory has committed a checkpoint, or may have before copies of it were lost."""
        few, durable = self.ledger.on_few_nodes, self.durable_on(id)
        return any(few.get((tier, id), tier in durable) for tier in self.ledger.peer_tiers)

    def durable_on(self, id: CheckpointId) -> set[str]:
        """Return the tiers on which a checkpoint is committed."""
        entry = self.ledger.entries.get(id)
        states = {} if entry is None else entry.states
        return {tier for tier, state in states.items() if state is CopyState.COMMITTED}

    def _has_other_images(self) -> bool:
        host = self.ledger.host
        return any(host in entry.states for entry in self.ledger.entries.values())


# Adoption -----------------------------------------------------------------------------------------


def check_memory(
    hosts: Iterable[HostTier],
    stores: Mapping[str, StoredTier],
    listings: Iterable[Listing],
    *,
    run: str,
    may_be_unknown: bool,
) -> None:
    """Raise ConfigError for host memory of another run of the same name.

    ``listings`` are those of all tiers. Where all tiers answered, memory is refused too if no tier knows its attempt,
    or the attempt's record is damaged, unless it ``may_be_unknown``.
    """
    answered = [x for x in listings if x.tier in stores and x.error is None]
    is_known = len(answered) == len(stores) > 0 and not may_be_unknown
    for host in hosts:
        found: dict[tuple[int, str], list[CheckpointId]] = {}
        for id, image in host.images().items():
            found.setdefault((id.attempt, image.commit.lineage.attempt_id), []).append(id)
        for (number, attempt_id), ids in found.items():
            why = _why_foreign(number, attempt_id, stores, answered, is_known=is_known)
            if why is not None:
                steps = format_some([str(id) for id in ids])
                raise ConfigError(
                    f"open: {host.path} holds {steps} of another life of run {run!r}: {why}. To continue "
                    "from them, copy them to the tiers by 'tierfall drain', and start again. To begin anew, free that "
                    "memory by 'tierfall drain --discard', or choose another run name"
                )


def is_ours(stores: Mapping[str, StoredTier], listings: Iterable[Listing], commit: Commit) -> bool:
    """Return whether no tier that answered knows the attempt that a checkpoint was saved by under another id."""
    answered = [x for x in listings if x.tier in stores and x.error is None]
    number, id = commit.lineage.checkpoint.attempt, commit.lineage.attempt_id
    return _why_foreign(number, id, stores, answered, is_known=False) is None


def _why_foreign(
    number: int,
    attempt_id: str,
    stores: Mapping[str, StoredTier],
    answered: Sequence[Listing],
    *,
    is_known: bool,
) -> str | None:
    """Return why memory of an attempt is not this run's; None where it is.

    Where a tier's record of the attempt is missing or damaged, the attempt's commit records name its id. A tier that
    was unreachable may know another attempt of that number.
    """
    damage: list[TierfallError] = []
    ids: dict[str, frozenset[str]] = {}
    for listing in answered:
        found = ids_by_commits(listing, number)
        if number in listing.attempts:
            try:
                found = frozenset({stores[listing.tier].fence.read(number).id})
            except KeyNotFoundError:
                logger.debug("%s: attempt %d was removed just now", listing.tier, number)
            except IntegrityError as error:
                damage.append(error)
        if found:
            ids[listing.tier] = found
    known = any(attempt_id in found for found in ids.values())
    if ids and not known:
        return f"tier {next(iter(ids))} knows that attempt by another id"
    for each in damage:
        whose = (
            "this run's, by other records"
            if known
            else "adopted only if it is known to be this run's"
        )
        logger.warning("open: %s; memory of attempt %d is %s", each, number, whose)
    if known or not is_known:
        return None
    if damage:
        return f"the record of attempt {number} is damaged, and no other names its id ({damage[0]})"
    return (
        f"no tier has a record of attempt {number}: they were emptied, are not mounted, or are new"
    )


def adopt_images(
    ledger: Ledger,
    images: Sequence[tuple[CheckpointId, SealedImage]],
    slots: list[AdoptedSlot],
    displaced: Collection[CheckpointId] = (),
) -> Leftovers:
    """Enter the images in this process's slots into the ledger, and return the others: those of ``displaced``
    checkpoints, and of such as not all ranks have. ``slots`` were adopted from ranks that no longer exist."""
    host = ledger.host
    leftovers = Leftovers(ledger, slots)
    for id, image in images:
        entry = ledger.entries.get(id)
        is_own = image.region.shard == ledger.shard and id not in displaced
        if ledger.decided.is_deleted(id, image.commit.lineage.attempt_id):
            image.region.release()
        elif not is_own or entry is None or host not in entry.states:
            # a tier or a machine may come back that has the rest
            leftovers.add(id, image, complete=id in displaced)
        elif entry.region is not None:
            image.region.release()
        else:
            entry.region = image.region
            entry.adopted = True
            entry.manifest = parse_manifest(
                image.region.manifest(), what=f"{host}: manifest of {id}"
            )
            entry.geometry = geometry(entry.manifest)
            logger.info("open: %s in memory is adopted", id)
            _note_on_peers(ledger, entry)
    for entry in list(ledger.entries.values()):
        if host in entry.states and entry.region is None:
            entry.set_state(host, CopyState.ABSENT)
            ledger.forget_if_gone(entry)
    return leftovers


def _note_on_peers(ledger: Ledger, entry: LedgerEntry) -> None:
    """Note beside an image that was brought back from another node that peer memory has committed its checkpoint."""
    few = ledger.on_few_nodes
    if any(
        few.get((tier, entry.id), entry.state(tier) is CopyState.COMMITTED)
        for tier in ledger.peer_tiers
    ):
        entry.note_on_peers()


def note_overtaken(ledger: Ledger, late: Mapping[CheckpointId, frozenset[str]] | None) -> None:
    """Replace the tiers that checkpoints are still owed to, though newer ones are there, by what the records of all
    nodes say: a rank that goes by its own node's records would upload an image that no other rank follows up.

    None: no other rank was asked.
    """
    for entry in ledger.ordered() if late is not None else ():
        entry.overtaken = frozenset((late or {}).get(entry.id, ()))
