"""Checkpoints of several ranks in a drain: which images this machine uploads, and when a checkpoint is committed.

The machines of a job that died exchange no messages: each uploads its own images, and reads on a shared tier which ones
the others have uploaded. The last one commits; the commit record is created if absent, so two may do so at once. A
node's own disk gets its images with a record of these alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from tierfall.config import FileTierConfig, ObjectTierConfig
from tierfall.core.format.catalog import KnownCheckpoint, merge
from tierfall.core.format.commit_files import document_file, shards_of
from tierfall.core.format.documents import sha256
from tierfall.core.format.records import Commit, Manifest, NamedFile, parse_manifest
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.types import keys
from tierfall.core.types.errors import IntegrityError, KeyNotFoundError, TierfallError
from tierfall.core.types.values import CheckpointId, Codec, CopyState, Shard
from tierfall.session.leftovers import images_in
from tierfall.session.opened_tiers import OpenedTiers
from tierfall.session.session import Session
from tierfall.tiers.stored import StoredTier


class AwaitedShardsError(TierfallError):
    """Images that other machines upload are not on the tier yet, or are of another checkpoint.

    It is retryable: a commit that fails for good makes the coordinator delete what is on the tier, of all machines. The
    tier accepts the next copy meanwhile.
    """

    retryable: ClassVar[bool] = True
    awaits_others: ClassVar[bool] = True


@dataclass(slots=True)
class MachineShards:
    """Prepares a session that drains the memory of several ranks: ``prepare`` before it is built, ``add_stored`` after.

    ``slots`` is the number of ranks that have left memory on this machine; ``unknown`` are the tiers that may or may
    not be shared; ``problems`` name what cannot be flushed, each with the reason.
    """

    tiers: OpenedTiers
    slots: int
    problems: list[str] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    _world_size: int = 1
    _shared: set[str] = field(default_factory=set)
    _known: Mapping[CheckpointId, KnownCheckpoint] = field(default_factory=dict)
    _inherited: tuple[Commit, ...] = ()

    @property
    def are_all_here(self) -> bool:
        """Whether every rank of the job has left memory on this machine."""
        return self.slots >= self._world_size

    def prepare(self, owed_to: Collection[str]) -> tuple[Commit, ...]:
        """Return the records of the checkpoints to flush, and find which of the tiers ``owed_to`` all machines see."""
        tiers = self.tiers
        images = images_in(tiers.hosts())
        self._world_size = max(image.commit.world_size for _, image in images)
        self._known = {known.id: known for known in merge(tiers.listings)}
        self._inherited = tuple(self._committable({id for id, _ in images}))
        for tier in tiers.config.stored:
            if tier.name not in owed_to or tier.name not in tiers.stores:
                continue
            try:
                if self.are_all_here or self._is_shared(tier):
                    self._shared.add(tier.name)
            except IntegrityError as error:
                self.unknown.add(tier.name)
                self.problems.append(str(error))
                tiers.exclude(tier.name, error)
        tiers.set_shared({tier.name: tier.name in self._shared for tier in tiers.config.stored})
        return self._inherited

    def _committable(self, ids: set[CheckpointId]) -> Iterator[Commit]:
        """Give the records of the checkpoints in memory that may be whole; what not all ranks sealed is none."""
        for id in sorted(ids):
            known = self._known[id]
            if known.commit is None or known.commit.world_size == 1:
                continue
            lacking = known.commit.world_size - len(_shards_at_hand(known))
            if not lacking or not self.are_all_here:
                yield known.commit
            elif self._has_unread:
                self.problems.append(
                    f"{id}: {lacking} of its images are not in memory; what could not be read may have them"
                )

    @property
    def _has_unread(self) -> bool:
        return any(listing.unread is not None for listing in self.tiers.listings)

    def may_flush(self, id: CheckpointId) -> bool:
        """Whether a checkpoint is of one rank, or of several whose images may all be found."""
        commit = self._known[id].commit
        one_rank = commit is not None and commit.world_size == 1
        return one_rank or any(record.lineage.checkpoint == id for record in self._inherited)

    def _is_shared(self, tier: FileTierConfig | ObjectTierConfig) -> bool:
        """Whether all machines see a tier: by the configuration, or by the records there.

        Raises IntegrityError, which names the key to set, where neither decides it.
        """
        if isinstance(tier, ObjectTierConfig):
            return True
        if tier.shared is not None:
            return tier.shared
        listing = next(x for x in self.tiers.listings if x.tier == tier.name)
        for copy in listing.copies:
            if copy.commit is not None and copy.commit.world_size > self.slots:
                return len(shards_of(copy.commit)) == copy.commit.world_size
        raise IntegrityError(
            f"whether all nodes see {tier.name} is not known here: set it in the configuration (shared: true, or false)"
        )

    def add_stored(self, session: Session) -> None:
        """Add the images that only other tiers have to what this machine uploads, and leave out what is uploaded."""
        if not self._has_unread:  # what lacks images is no checkpoint
            session.leftovers.partial_images.clear()
        for entry in session.leftovers.whole_images:
            assert entry.shards is not None
            entry.shards = (*entry.shards, *self._stored_shards(entry))
            for part in entry.shards:
                shared = self._shared & session.coordinator.lanes.keys()
                part.uploaded_to.update(tier for tier in shared if self._is_on(part, tier))

    def _stored_shards(self, entry: LedgerEntry) -> Iterator[LedgerEntry]:
        assert entry.shards is not None
        here = {part.shard for part in entry.shards}
        for tier, copy in self._known[entry.id].copies.items():
            store = self.tiers.stores.get(tier)
            if store is None or copy.commit is None:
                continue
            for shard in [shard for shard in shards_of(copy.commit) if shard not in here]:
                try:
                    data = store.read_manifest(entry.id, shard)
                    manifest = parse_manifest(data, what=f"{tier}: manifest of {entry.id}")
                except TierfallError as error:
                    self.problems.append(f"{entry.id} on {tier}: {error}")
                    continue
                part = entry.from_other_rank(shard, None, manifest)
                # Peer memory of this node has other ranks' images, and not its own.
                part.states = {**part.states, tier: CopyState.COMMITTED}
                yield part
                here.add(shard)

    def _is_on(self, part: LedgerEntry, tier: str) -> bool:
        """Whether a shard's image and manifest are on a tier, uploaded by an earlier drain."""
        assert part.manifest is not None
        try:
            data = self.tiers.stores[tier].read_manifest(part.id, part.shard)
        except KeyNotFoundError:
            return False
        return sha256(data) == sha256(part.manifest.encode())

    def complete(self, commit: Commit, tier: str) -> Commit:
        """Return the record with the images of all ranks, by what is on a tier that all machines see.

        Raises AwaitedShardsError where one is not there.
        """
        if tier not in self._shared or len(shards_of(commit)) == commit.world_size:
            return commit
        store = self.tiers.stores[tier]
        shards = [Shard(rank, commit.world_size) for rank in range(commit.world_size)]
        files = _files_there(store, commit, shards)
        if files is None:
            raise AwaitedShardsError(
                f"{commit.lineage.checkpoint} on {tier}: this machine's images are there, other ranks' are not yet: "
                "drain the other machines, the last one commits it"
            )
        return replace(commit, files=files)


def _shards_at_hand(known: KnownCheckpoint) -> set[Shard]:
    records = [copy.commit for copy in known.copies.values() if copy.commit is not None]
    return set().union(*map(shards_of, records))


def _files_there(
    store: StoredTier, commit: Commit, shards: Sequence[Shard]
) -> tuple[NamedFile, ...] | None:
    """Return the files of these shards as they are on a tier; None where one is incomplete."""
    id = commit.lineage.checkpoint
    sizes = {stored.key: stored.bytes for stored in store.files(id)}
    files: list[NamedFile] = []
    for shard in shards:
        if keys.manifest_name(shard) not in sizes:
            return None
        data = store.read_manifest(id, shard)
        manifest = parse_manifest(data, what=f"{store.name}: manifest of {id}")
        if manifest.lineage != commit.lineage:
            raise AwaitedShardsError(
                f"{id} on {store.name}: the image of rank {shard.rank} there is of another checkpoint of that id"
            )
        image = _image_files(store, manifest, sizes)
        if image is None:
            return None
        files += [*image, document_file(keys.manifest_name(shard), data)]
    return tuple(files)


def _image_files(
    store: StoredTier, manifest: Manifest, sizes: Mapping[str, int]
) -> tuple[NamedFile, ...] | None:
    shard, id = manifest.shard, manifest.lineage.checkpoint
    for codec in Codec:
        name = keys.shard_name(shard, codec)
        if name not in sizes:
            continue
        if codec is Codec.NONE:
            if sizes[name] == manifest.image_bytes:
                return (NamedFile(name=name, bytes=sizes[name], digest=None),)
        elif keys.stored_name(shard) in sizes:
            record = document_file(keys.stored_name(shard), store.read_stored(id, shard))
            raw_bytes = manifest.image_bytes
            packed = NamedFile(name=name, bytes=sizes[name], digest=None, raw_bytes=raw_bytes)
            return (packed, record)
    return None
