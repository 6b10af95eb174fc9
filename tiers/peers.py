"""Peer memory: the images that this node keeps for others, and those that it sends to the nodes that keep its own.

A node has a folder for each node and start that has sent it something, with the layout of a stored tier: the commit
record there names what that node has sent. So no two starts write one file, and the shards of two attempts never add up
to a checkpoint. Nothing is decided there: it has no attempts, no list and no fence. A start reads what its nodes keep,
and sends to folders of its own. Rank 0 says which checkpoint is whole, so that its shards count, and which goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from tierfall.core.copies.image_writes import ImageUpload
from tierfall.core.format.catalog import FoundCopy, Listing
from tierfall.core.format.commit_files import image_file, unite_records
from tierfall.core.format.decided import DecidedList
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Attempt, Commit, Geometry, Manifest, NamedFile
from tierfall.core.restore.inventory import unite_copies, unite_listings
from tierfall.core.types import keys
from tierfall.core.types.backend import Backend, StoredObject
from tierfall.core.types.errors import BackendError, KeyNotFoundError, TierfallError
from tierfall.core.types.values import CheckpointId, Codec, Shard
from tierfall.tiers.stored import StoredTier

T = TypeVar("T")
Adopt = Callable[[CheckpointId, Shard, str], bool]


class PeerFolder(StoredTier):
    """What one node has sent in one start, on a node that keeps it."""

    def __init__(
        self, name: str, run: str, backend: Backend, adopt: Adopt = lambda id, shard, attempt: False
    ) -> None:
        """``adopt`` asks the node for an image of an attempt id that an earlier start has sent: if the node has a good
        one, it takes it into this folder, and the answer is True."""
        super().__init__(name=name, run=run, backend=backend, has_latest=False)
        self.adopt = adopt

    def commit(self, commit: Commit, *, attempt: Attempt, repairs: bool = False) -> None:
        """Write the record of this node's images."""
        key = self._key(commit.lineage.checkpoint, keys.COMMIT_NAME)
        self._documents.replace(key, commit.encode())

    def check_newest(self, attempt: Attempt | None, *, doing: str = "change") -> None:
        """No other start writes here."""

    def drop(self, checkpoint: CheckpointId) -> None:
        """Delete a checkpoint, the commit record first."""
        self._cache.pop(checkpoint, None)
        self.backend.delete(self._key(checkpoint, keys.COMMIT_NAME))
        self.discard(checkpoint, attempt=None)


class PeerCache(StoredTier):
    """Peer memory of one node, with the calls of a stored tier. ``kept`` returns the folders of what this node keeps,
    by their names; ``sent`` are the folders of this start on the nodes that keep its images, one for each copy."""

    def __init__(
        self,
        *,
        name: str,
        run: str,
        kept: Callable[[], Mapping[str, PeerFolder]],
        sent: Sequence[PeerFolder],
        backend: Backend,
        **options: Any,
    ) -> None:
        """``backend`` tells place and traits: that of the first folder of ``sent``, or of what is kept."""
        super().__init__(name=name, run=run, backend=backend, has_latest=False, **options)
        self._kept = kept
        self._sent = tuple(sent)
        self._attempt_ids: dict[CheckpointId, str] = {}
        """By checkpoint, the id of its attempt: two starts may use one number."""
        self._holding: dict[tuple[CheckpointId, Shard], Sequence[PeerFolder]] = {}
        """The folders of what is kept that have an image."""

    # What this node keeps ------------------------------------------------------------------------

    def list(self, *, newest: bool = False) -> Listing:
        try:
            found = {name: folder.list() for name, folder in self._kept().items()}
        except TierfallError as error:
            return Listing(tier=self.name, error=error)
        listing = unite_listings(self.name, found)
        self._attempt_ids |= {c.id: c.commit.lineage.attempt_id for c in listing.copies if c.commit}
        return listing

    def find_copy(self, checkpoint: CheckpointId, *, batch: int = 0) -> FoundCopy | None:
        found = {name: folder.find_copy(checkpoint) for name, folder in self._kept().items()}
        copies = {name: copy for name, copy in found.items() if copy is not None}
        if not copies and self._sent:
            return self._sent[0].find_copy(checkpoint)
        return unite_copies(copies)[0] if copies else None

    def read_commit(self, checkpoint: CheckpointId) -> Commit:
        """Return the record of what this node keeps of a checkpoint, and of what it has sent."""
        found = {name: commit for name, _, commit in self._records(checkpoint)}
        try:
            found["sent"] = self.written_commit(checkpoint)
        except BackendError as error:
            if not (found or isinstance(error, KeyNotFoundError)):
                raise
        attempt_id = self._attempt_ids.get(checkpoint)
        same = {where: one for where, one in found.items() if one.lineage.attempt_id == attempt_id}
        if not same:
            raise KeyNotFoundError(f"{self.name}: no record of {checkpoint} is kept")
        return unite_records(same)

    def files(
        self, checkpoint: CheckpointId, commit: Commit | None = None
    ) -> tuple[StoredObject, ...]:
        """List all files of a checkpoint that this node keeps, by their names in the step's folder."""
        attempt_id = self._attempt_ids.get(checkpoint)
        found = {
            file.key: file
            for _, folder, record in self._records(checkpoint)
            if attempt_id in (None, record.lineage.attempt_id)
            for file in folder.files(checkpoint)
        }
        return tuple(found.values())

    def _records(self, checkpoint: CheckpointId) -> Sequence[tuple[str, PeerFolder, Commit]]:
        """Return the folders of what is kept that have a checkpoint, by name, and their records. One that cannot be
        read counts as absent if another has it."""
        found, failure = [], None
        for name, folder in self._kept().items():
            try:
                found.append((name, folder, folder.read_commit(checkpoint)))
            except KeyNotFoundError:
                continue
            except TierfallError as error:
                failure = error
        if failure is not None and not found:
            raise failure
        for _, _, commit in found:
            self._attempt_ids.setdefault(checkpoint, commit.lineage.attempt_id)
        return found

    def delete(
        self,
        checkpoint: CheckpointId,
        *,
        attempt: Attempt | None,
        known: DecidedList | None,
        batch: int = 0,
        next_latest: CheckpointId | None = None,
    ) -> None:
        """Delete what this node keeps of a checkpoint: each node does, as rank 0 says. Without ``known``, the commit
        was revoked, and what this node has sent goes."""
        folders = self._sent if known is None else self._kept().values()
        call_all(folders, lambda folder: folder.drop(checkpoint))
        self._attempt_ids.pop(checkpoint, None)

    def discard_unfinished(self, *, attempt: Attempt) -> int:
        """Delete what earlier starts have sent in part."""
        count = 0
        for folder in self._kept().values():
            for checkpoint in folder.list().unfinished:
                folder.discard(checkpoint, attempt=None)
            count += folder.backend.discard_unfinished(f"{self._run}/")
        return count

    def delete_run(self) -> None:
        """Delete all of the run that this node keeps, and that it has sent."""
        call_all((*self._sent, *self._kept().values()), lambda folder: folder.delete_run())

    # What this node sends ------------------------------------------------------------------------

    def written_commit(self, checkpoint: CheckpointId) -> Commit:
        """Return the record of the images that this node has sent. It counts as written once all nodes that keep them
        have it."""
        records = [folder.read_commit(checkpoint) for folder in self._sent]
        if not records:
            raise KeyNotFoundError(f"{self.name}: nothing of {checkpoint} was sent")
        self._attempt_ids.setdefault(checkpoint, records[0].lineage.attempt_id)
        return records[0]

    def is_committed(self, checkpoint: CheckpointId) -> bool:
        return bool(self._sent) and all(folder.is_committed(checkpoint) for folder in self._sent)

    def create_shard(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        cut: Geometry,
        pieces: Spliced,
        *,
        attempt_id: str | None = None,
        resumes: bool = False,
    ) -> SentImage:
        """Begin to send an image, to those that do not keep it from an earlier start, by its ``attempt_id``."""
        with ExitStack() as undo:
            writers: list[ImageUpload] = []
            for folder in self._sent:
                if attempt_id is not None and _adopts(folder, checkpoint, shard, attempt_id):
                    continue
                writer = folder.create_shard(checkpoint, shard, cut, pieces)
                undo.callback(writer.abort)
                writers.append(writer)
            undo.pop_all()
        return SentImage(writers)

    def write_manifest(self, checkpoint: CheckpointId, shard: Shard, data: bytes) -> None:
        for folder in self._sent:
            folder.write_manifest(checkpoint, shard, data)

    def commit(self, commit: Commit, *, attempt: Attempt, repairs: bool = False) -> None:
        """Make this node's images count: rank 0 has said that the checkpoint is whole."""
        for folder in self._sent:
            folder.commit(commit, attempt=attempt)

    def discard(
        self, checkpoint: CheckpointId, shard: Shard | None = None, *, attempt: Attempt | None
    ) -> None:
        """Delete a checkpoint that rank 0 gave up from the nodes that keep this node's images."""
        call_all(self._sent, lambda folder: folder.discard(checkpoint, shard, attempt=attempt))

    # Reading -------------------------------------------------------------------------------------

    def read_manifest(
        self, checkpoint: CheckpointId, shard: Shard, *, length: int | None = None
    ) -> bytes:
        return self._ask(checkpoint, shard, lambda folder: folder.read_manifest(checkpoint, shard))

    def read_into(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        offset: int,
        view: memoryview,
        *,
        codec: Codec = Codec.NONE,
    ) -> None:
        self._ask(checkpoint, shard, lambda f: f.read_into(checkpoint, shard, offset, view))

    def read_cached(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        offset: int,
        end: int,
        views: Iterable[memoryview],
        *,
        codec: Codec = Codec.NONE,
    ) -> bool:
        views = tuple(views)
        return self._ask(
            checkpoint, shard, lambda f: f.read_cached(checkpoint, shard, offset, end, views)
        )

    def _ask(self, checkpoint: CheckpointId, shard: Shard, call: Callable[[StoredTier], T]) -> T:
        """Call each folder that has an image until one answers: those on this node first, then those on other
        nodes."""
        failure: BackendError | None = None
        if (checkpoint, shard) not in self._holding:
            self._holding[checkpoint, shard] = self._folders_with(checkpoint, shard)
        for folder in (*self._holding[checkpoint, shard], *self._sent):
            try:
                return call(folder)
            except BackendError as error:
                if failure is None or not error.is_damage:
                    failure = error
        self._holding.pop((checkpoint, shard), None)
        raise failure or KeyNotFoundError(f"{self.name}: no image of {shard} of {checkpoint}")

    def _folders_with(self, checkpoint: CheckpointId, shard: Shard) -> Sequence[PeerFolder]:
        records = self._records(checkpoint)
        attempt_id = self._attempt_ids.get(checkpoint)
        return [
            folder
            for _, folder, commit in records
            if attempt_id in (None, commit.lineage.attempt_id) and image_file(commit, shard)
        ]

    def for_reading(self, wrap: Callable[[Backend], Backend]) -> PeerCache:
        """Return the same tier for reading. ``wrap`` is applied to the backend of each folder on another node."""
        sent = [PeerFolder(self.name, self._run, wrap(folder.backend)) for folder in self._sent]
        backend = sent[0].backend if sent else self.backend
        found = PeerCache(
            name=self.name, run=self._run, kept=self._kept, sent=sent, backend=backend
        )
        found._attempt_ids = self._attempt_ids
        return found

    # What a cache has none of --------------------------------------------------------------------

    def check_newest(self, attempt: Attempt | None, *, doing: str = "change") -> None:
        """No other start sends to the folders of this one."""

    def check_begin(self, attempt: Attempt) -> None:
        """No other start sends to the folders of this one."""

    def sync_commit(self, checkpoint: CheckpointId) -> None:
        """Memory has nothing to sync."""

    def record_lineage(self, commit: Commit, writer: Attempt | None = None) -> None:
        """The tiers of storage record how an attempt began."""

    def note_damaged(self, commit: Commit, why: str) -> None:
        """Each start reads anew what is in memory."""

    def note_mended(self, commit: Commit) -> None:
        """See ``note_damaged``."""

    def close(self) -> None:
        call_all((*self._sent, *self._kept().values()), lambda folder: folder.close())
        if not self._sent:
            self.backend.close()


def _adopts(folder: PeerFolder, checkpoint: CheckpointId, shard: Shard, attempt_id: str) -> bool:
    """Return whether a keeper has an image of an earlier start; what it cannot tell is sent."""
    try:
        return folder.adopt(checkpoint, shard, attempt_id)
    except BackendError:
        return False


class SentImage:
    """Writes an image to each node that keeps a copy. The failure of any is the failure of the call."""

    def __init__(self, writers: Sequence[ImageUpload]) -> None:
        self._writers = writers

    def has_chunk(self, index: int) -> bool:
        return all(writer.has_chunk(index) for writer in self._writers)

    def write_chunks(self, index: int, start: int, view: memoryview) -> None:
        for writer in self._writers:
            writer.write_chunks(index, start, view)

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()

    def finish(self, manifest: Manifest) -> tuple[NamedFile, ...]:
        for writer in self._writers:
            writer.finish(manifest)
        return ()

    def abort(self) -> None:
        for writer in self._writers:
            writer.abort()


def call_all(folders: Iterable[T], call: Callable[[T], object]) -> None:
    """Call for all, and raise the first error then: one that fails does not keep what is on the others."""
    failure: BackendError | None = None
    for folder in folders:
        try:
            call(folder)
        except BackendError as error:
            failure = failure or error
    if failure is not None:
        raise failure
