"""Host memory of a node as one process has it: its own slot, the slots that it has adopted from ranks that no longer
exist, and the images in them; the check that what an earlier start left is this run's.

A rank owns its slot, with the images of whatever rank. An image of this rank becomes its copy again. The first rank of
a node adopts the slots beyond those of the present ranks. The images of other ranks are kept for restores until
something newer is durable.

Others may remove the files during training: systemd at the end of a user's last session (RemoveIPC), or a cleaner of
temporary files. Images in them are flushed, and end with this process; the next images have new files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from tierfall.config import Config
from tierfall.core.capture.snapshot import HostRegion
from tierfall.core.flush.facts import Ledger, LedgerEntry
from tierfall.core.format.catalog import Listing
from tierfall.core.format.commit_files import shards_of
from tierfall.core.format.records import Commit, parse_manifest
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.restore.inventory import Inventory, unite_listings
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.runtime.run_lock import RunLock
from tierfall.core.types.errors import (
    ConfigError,
    IntegrityError,
    KeyNotFoundError,
    TierfallError,
)
from tierfall.core.types.text import format_some
from tierfall.core.types.values import CheckpointId, CopyState, LossClass, Shard
from tierfall.setup.places import run_folder
from tierfall.setup.tiers import open_slot
from tierfall.telemetry.status import remove_status
from tierfall.tiers.host import HostTier, SealedImage, image_files, lock_name
from tierfall.tiers.host_folder import prepare_folder
from tierfall.tiers.image_file import Region
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")

WHO = "by systemd's RemoveIPC, say, or by a cleaner of temporary files"


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot of host memory, with its lock."""

    lock: RunLock
    host: HostTier

    def close(self, *, keep: bool) -> None:
        try:
            self.host.close(keep=keep)
            if not keep:
                remove_status(self.host.folder, self.host.slot)
        finally:
            self.lock.release()


class NodeMemory:
    """See the module. ``host`` is the process's own slot, ``adopted`` are those of ranks that no longer exist, and
    ``problems`` the errors of memory that may hold good images and could not be read. ``loss`` is why images are lost
    with this process; empty if none is, as far as known."""

    def __init__(
        self, config: Config, *, ranks: Ranks, adopts: bool, images: int, command: str
    ) -> None:
        """Lock and open the own slot and, if this process ``adopts``, those of ranks that no longer exist. By default
        memory has room for so many ``images``. A ``command`` that holds the run is waited for, for ``max_wait`` at
        most.

        Raises LockError if another process has one of the slots, ConfigError for memory of another run.
        """
        self.name, run = config.host.name, config.run
        self.folder = prepare_folder(run_folder(config, run))
        self.adopted: list[Slot] = []
        self.problems: list[TierfallError] = []
        self.loss = ""
        self._conditions = Conditions()
        with ExitStack() as undo:
            own = ranks.local_index
            lock = RunLock.acquire(
                self.folder / lock_name(own), run=run, command=command, wait_s=config.max_wait_s
            )
            undo.callback(lock.release)
            local = len(ranks.topology.local_ranks)
            self.host = HostTier(
                name=self.name,
                run=run,
                folder=self.folder,
                slot=own,
                shard=ranks.shard,
                capacity_bytes=config.host.capacity_bytes,
                images=images,
                ranks=local,
            )
            self._own = Slot(lock, self.host)
            undo.callback(self.close, keep=True)
            for slot in image_files(self.folder) if adopts else ():
                if slot >= local:
                    self._adopt(slot, run, command)
            undo.pop_all()

    def _adopt(self, slot: int, run: str, command: str) -> None:
        """Adopt a slot. An empty one is deleted; one that cannot be read is logged, and stays. Raises LockError where
        another process owns it: a rank of an earlier start that still runs."""
        lock = RunLock.acquire(self.folder / lock_name(slot), run=run, command=command)
        try:
            host = open_slot(self.folder, slot, name=self.name, run=run)
        except BaseException as error:
            lock.release()
            if not isinstance(error, TierfallError):
                raise
            logger.warning(
                "open: the host memory that a rank of an earlier start left cannot be read, and stays: %s",
                error,
            )
            is_another_runs = isinstance(error, ConfigError)
            if not (error.is_damage or is_another_runs):
                self.problems.append(error)
            return
        if host.is_empty():
            Slot(lock, host).close(keep=False)
        else:
            self.adopted.append(Slot(lock, host))

    @property
    def _slots(self) -> list[Slot]:
        return [self._own, *self.adopted]

    @property
    def hosts(self) -> list[HostTier]:
        """The slots, this process's own first."""
        return [slot.host for slot in self._slots]

    def images(self) -> list[tuple[CheckpointId, SealedImage]]:
        """Return the sealed images of all slots."""
        return images_in(self.hosts)

    def list(self) -> Listing:
        """List the sealed images of all slots, and what could not be read."""
        found = list_slots(self.hosts)
        return replace(found, damaged=(*found.damaged, *self.problems))

    # Its files ---------------------------------------------------------------------------------------

    def hold_place(self) -> bool:
        """Lock this run's place in memory again if its lock file was removed: each save does, and the end. Return
        whether the place is held: False, which is logged, if another process has taken it."""
        try:
            is_lost = bool(self._note_lost())
            for lock in [s.lock for s in self._slots if not s.lock.is_file_intact()]:
                prepare_folder(self.folder)
                lock.reacquire()
                # with images lost too, that is what is logged
                level = logging.DEBUG if is_lost else logging.WARNING
                logger.log(level, "lock file %s was removed, %s: it is made anew", lock.path, WHO)
        except TierfallError as error:
            text = "%s: this run's place in memory cannot be held: %s"
            self._conditions.report("place", logging.WARNING, text, self.name, error)
            return False
        self._conditions.end("place", "%s: this run's place in memory is held again", self.name)
        return True

    def _note_lost(self) -> Sequence[Region]:
        """Return the images whose files were removed; that is logged once."""
        lost = [region for host in self.hosts for region in host.lost_regions()]
        if lost and not self.loss:
            self.loss = (
                f"{self.name}: what is in memory ends with this process: its files in {self.folder} were removed while "
                f"this process uses them, {WHO}"
            )
            logger.warning("%s", self.loss)
        elif not lost:
            self.loss = ""
        return lost

    def ends_with_process(self, regions: Iterable[HostRegion | None]) -> bool:
        """Whether one of these images in memory is lost with this process, by all that is known."""
        try:
            lost = self._note_lost()
        except TierfallError:
            return True
        return any(region is each for region in regions for each in lost)

    # The end -----------------------------------------------------------------------------------------

    def close(self, *, keep: bool) -> None:
        """Close the slots, and release their locks; unless ``keep``, what is in them is deleted."""
        with ExitStack() as closing:  # each is closed, whatever another one raises
            for slot in self._slots:
                closing.callback(slot.close, keep=keep)


def list_slots(hosts: Sequence[HostTier]) -> Listing:
    """Return what is sealed in several slots, as one listing."""
    return unite_listings(hosts[0].name, {host.place: host.list() for host in hosts})


def images_in(hosts: Iterable[HostTier]) -> list[tuple[CheckpointId, SealedImage]]:
    """Return the sealed images of several slots; each may have an image of the same checkpoint."""
    return [item for host in hosts for item in host.images().items()]


def regions_in(hosts: Iterable[HostTier]) -> dict[tuple[CheckpointId, Shard], HostRegion]:
    return {(id, held.region.shard): held.region for id, held in images_in(hosts)}


# Whose it is ------------------------------------------------------------------------------------------


def check_memory(
    hosts: Iterable[HostTier],
    stores: Mapping[str, StoredTier],
    listings: Sequence[Listing],
    silent: Mapping[str, TierfallError],
    *,
    run: str,
    may_be_unknown: bool,
) -> None:
    """Raise ConfigError for host memory that may be of another life of this run: a tier knows its attempt by another
    id, or no tier knows it, unless it ``may_be_unknown``. ``silent`` has the tiers that were not looked at, with why.
    """
    for host in hosts:
        found: dict[tuple[int, str], list[CheckpointId]] = {}
        for id, image in host.images().items():
            found.setdefault((id.attempt, image.commit.lineage.attempt_id), []).append(id)
        for (number, attempt_id), ids in found.items():
            known = _ids_by_tier(number, stores, listings)
            if any(attempt_id in ids for ids in known.values()) or (may_be_unknown and not known):
                continue
            why = (
                f"tier {next(iter(known))} knows attempt {number} by another id"
                if known
                else f"no tier has a good record of attempt {number}: they were emptied, are new, or it is damaged"
            )
            held = f"open: {host.place} holds {format_some([str(id) for id in ids])}"
            if silent:
                reasons = "; ".join(str(error) for error in silent.values())
                raise ConfigError(
                    f"{held}, and of the tiers that answer, {why}. Whose it is may be known once all tiers answer: "
                    f"open again then. Until then that memory stays as it is. Not looked at: {reasons}"
                )
            raise ConfigError(
                f"{held} of another life of run {run!r}: {why}. To continue from them, copy them to the tiers by "
                "'tierfall drain', and start again. To begin anew, free that memory by 'tierfall drain --discard', or "
                "choose another run name"
            )


def is_ours(stores: Mapping[str, StoredTier], listings: Iterable[Listing], commit: Commit) -> bool:
    """Return whether a tier knows a checkpoint's attempt by this id, or no tier that answered knows it."""
    number, id = commit.lineage.checkpoint.attempt, commit.lineage.attempt_id
    known = _ids_by_tier(number, stores, listings).values()
    return not known or any(id in ids for ids in known)


def _ids_by_tier(
    number: int, stores: Mapping[str, StoredTier], listings: Iterable[Listing]
) -> dict[str, frozenset[str]]:
    """Return, for each tier that answered and has any, the ids of the attempt of that number, by its record or, where
    that is damaged, by commit records: normally one."""
    known: dict[str, frozenset[str]] = {}
    for listing in [x for x in listings if x.tier in stores and x.error is None]:
        found = ids_by_commits(listing, number)
        if number in listing.attempts:
            try:
                found = frozenset({stores[listing.tier].fence.read(number).id})
            except (KeyNotFoundError, IntegrityError) as error:
                logger.debug("%s: attempt %d: %s", listing.tier, number, error)
        if found:
            known[listing.tier] = found
    return known


def ids_by_commits(listing: Listing, number: int) -> frozenset[str]:
    """Return the ids of the attempt of that number in the commit records of a tier: normally one, or none."""
    return frozenset(
        copy.commit.lineage.attempt_id
        for copy in listing.copies
        if copy.commit is not None and copy.id.attempt == number
    )


# On rank 0 --------------------------------------------------------------------------------------------


def displaced_in(
    inventories: Mapping[int, Inventory], *, host: str, world_size: int
) -> frozenset[CheckpointId]:
    """Return the checkpoints of which some rank has found an image in memory that another rank saved, or another number
    of ranks."""
    return frozenset(
        copy.id
        for rank, tiers in inventories.items()
        for copy in (tiers[host].copies if host in tiers else ())
        if copy.commit is not None and shards_of(copy.commit) != [Shard(rank, world_size)]
    )


# In the ledger ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Leftovers:
    """The images in this node's memory that are not those of the present ranks, by checkpoint: they are restored from,
    and copied nowhere. Belongs to the coordinator's thread."""

    ledger: Ledger
    slots: list[Slot]
    """Those that were adopted from ranks that no longer exist."""
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
        """Release what is outdated by a checkpoint just committed on ``tier``."""
        for id in self.outdated_by(tier, newer):
            self._release(id)
        self._close_empty()

    def outdated_by(self, tier: str, newer: LedgerEntry) -> list[CheckpointId]:
        """Return what is older than a checkpoint committed on ``tier``, unless it is pinned, and nowhere else."""
        if self.ledger.rules_of(tier).survives is LossClass.NONE:
            return []
        is_pinned = self.ledger.decided.is_pinned
        return [
            id
            for id in self.images
            if (id.attempt, id.step) < newer.age_order
            and (not is_pinned(id, None) or self.durable_on(id))
        ]

    def free_deleted(self, is_noted: Callable[[CheckpointId], bool]) -> None:
        """Release the images of checkpoints that a person has deleted, once that ``is_noted``."""
        deleted = self.ledger.decided.is_deleted
        for id in [id for id in self.images if deleted(id, None) and is_noted(id)]:
            self._release(id)
            self._close_empty()

    def _release(self, id: CheckpointId) -> None:
        for region in self.images.pop(id):
            region.release()
        self._conditions.end(id, "memory has room beside %s again: it is released", id)

    def _close_empty(self) -> None:
        for slot in [slot for slot in self.slots if slot.host.is_empty()]:
            self.slots.remove(slot)
            slot.close(keep=False)

    def evict_oldest(self) -> bool:
        """Release the oldest images, for a save; False where there are none that may go.

        Last go those that this start was restored from, or that peer memory counts on, if no other tier has them: of
        these the restored one goes before a reported one. Without peer memory they stay; with it they go only if memory
        has no image of this rank that would go before them.
        """
        if not self.images:
            return False
        id = min(self.images, key=self._eviction_order)
        if self._is_needed(id) and not self.ledger.peer_tiers:
            self._conditions.report(
                id, logging.WARNING,
                "memory has no room beside %s, which this start was restored from and no tier has: saves wait or are "
                "skipped until something newer is durable. With room for one image only, end the training and run "
                "'tierfall drain', or raise the capacity of memory", id,
            )  # fmt: skip
            return False
        own = [e.id for e in self.ledger.entries.values() if self.ledger.host in e.states]
        order = self._eviction_order
        if self._is_needed(id) and any(order(each) < order(id) for each in own):
            return False
        logger.warning("memory is full: the part of %s that an earlier start left is deleted", id)
        self._release(id)
        return True

    def _eviction_order(self, id: CheckpointId) -> tuple[bool, bool, int, int]:
        is_needed = self._is_needed(id)
        return is_needed, is_needed and self._may_be_reported(id), id.attempt, id.step

    def _is_needed(self, id: CheckpointId) -> bool:
        """Return whether no tier but peer memory has these images, and this start was restored from them, or peer
        memory counts on them: they are the newest of a reported checkpoint. Without peer memory, a newer checkpoint in
        the memory of all ranks takes their place."""
        if self.durable_on(id) - self.ledger.peer_tiers:
            return False
        if id == self.ledger.restored_from:
            return bool(self.ledger.peer_tiers) or not self._memory_has_newer(id)
        return self._may_be_reported(id) and not self._has_newer(id)

    def _memory_has_newer(self, id: CheckpointId) -> bool:
        left, order = self.ledger.abandoned(), (id.attempt, id.step)
        return any(
            e.state(self.ledger.host) is CopyState.SEALED and e.age_order > order
            for e in self.ledger.entries.values()
            if not (e.deleted or e.id in left)
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


def adopt_images(
    ledger: Ledger,
    images: Sequence[tuple[CheckpointId, SealedImage]],
    leftovers: Leftovers,
    displaced: Collection[CheckpointId] = (),
) -> None:
    """Enter the images in this process's slots into the ledger. The others are ``leftovers``: those of ``displaced``
    checkpoints, and of such as not all ranks have."""
    host = ledger.host
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
            entry.geometry = entry.manifest.geometry()
            logger.info("open: %s in memory is adopted", id)
            # an image that was brought back from another node does not say so
            few, committed = ledger.on_few_nodes, CopyState.COMMITTED
            if any(few.get((t, id), entry.state(t) is committed) for t in ledger.peer_tiers):
                entry.note_on_peers()
    for entry in list(ledger.entries.values()):
        if host in entry.states and entry.region is None:
            entry.set_state(host, CopyState.ABSENT)
            ledger.forget_if_gone(entry)


def note_overtaken(ledger: Ledger, late: Mapping[CheckpointId, frozenset[str]] | None) -> None:
    """Replace the tiers that checkpoints are still owed to, though newer ones are there, by what the records of all
    nodes say: a rank that goes by its own node's records would upload an image that no other rank follows up.

    None: no other rank was asked.
    """
    for entry in ledger.ordered() if late is not None else ():
        entry.overtaken = frozenset((late or {}).get(entry.id, ()))
