"""Peer memory: the images that this node keeps for others, and those that it sends to the nodes that keep its own.

A rank sends its image to a process of each node that keeps a copy. The image counts there once rank 0 has said that the
checkpoint is whole, and the rank has sent its records. Nothing is decided there: it has no attempts, no list and no
fence. Each rank drops what it keeps, as rank 0 says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.copies.image_writes import ImageUpload
from tierfall.core.format.catalog import FoundCopy, Listing
from tierfall.core.format.commit_files import files_of, shards_of, unite_records
from tierfall.core.format.decided import DecidedList
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import (
    Attempt,
    Commit,
    Geometry,
    Manifest,
    NamedFile,
    records_bytes_max,
)
from tierfall.core.restore.inventory import unite_listings
from tierfall.core.types.backend import StoredObject
from tierfall.core.types.errors import (
    BackendError,
    KeyNotFoundError,
    LostWriteError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId, Codec, CopyState, Shard
from tierfall.tiers.kept_images import ImageHere, KeptFolder, KeptImages
from tierfall.tiers.peer_requests import ImageThere, PeerClient
from tierfall.tiers.stored import StoredTier

T = TypeVar("T")
KeptImage = ImageHere | ImageThere
KeptReader = KeptFolder | PeerClient
"""What one node keeps of a run: this one, or another one that answers requests."""
NAMES_BYTES = 256 << 10
"""Room for the metrics and tags of a checkpoint, which are known at its end."""


class PeerCache(StoredTier):
    """Peer memory of one node, with the calls of a stored tier. ``kept`` reads what this node keeps, and ``images`` are
    the files of it that this process has; ``sent`` are the nodes that keep the image of this rank, ``shard``."""

    def __init__(
        self,
        *,
        name: str,
        run: str,
        folder: Path,
        kept: KeptReader,
        images: KeptImages | None = None,
        sent: Sequence[PeerClient] = (),
        shard: Shard | None = None,
        **options: Any,
    ) -> None:
        # what a tier stores beside images is in its folder: here, nothing
        backend = PosixBackend(folder, read_only=True, direct_io=False)
        super().__init__(name=name, run=run, backend=backend, **options)
        self._kept = kept
        self._images = images
        self._sent = tuple(sent)
        self._shard = shard
        self._numbers = itertools.count(1)
        self._uploads: dict[CheckpointId, Sequence[Upload]] = {}
        self._waiting: dict[CheckpointId, bytes] = {}
        """The manifests of the images that were sent, and do not count yet."""
        self._written: dict[CheckpointId, Commit] = {}
        """The records of those that count."""
        self._attempt_ids: dict[CheckpointId, str] = {}
        """By checkpoint, the id of its attempt: two starts may use one number."""
        self._found: dict[tuple[KeptReader, CheckpointId, Shard], Sequence[KeptImage]] = {}
        """The images that were found last, by where they are."""

    # What this node keeps ------------------------------------------------------------------------

    def list(self, *, newest: bool = False) -> Listing:
        try:
            images, problems = self._kept.images()
        except TierfallError as error:
            return Listing(tier=self.name, error=error)
        found = {i.place: Listing(tier=self.name, copies=(_copy_of(i.commit),)) for i in images}
        # images of one number of attempt, but of two attempts, are not one checkpoint
        united = unite_listings(self.name, found)
        listing = replace(united, damaged=(*united.damaged, *problems))
        self._attempt_ids |= {c.id: c.commit.lineage.attempt_id for c in listing.copies if c.commit}
        return listing

    def find_copy(self, checkpoint: CheckpointId) -> FoundCopy | None:
        listing = self.list()
        if listing.error is not None:
            raise listing.error
        found = listing.copy(checkpoint)
        if found is None and checkpoint in self._written:  # and nothing of it is kept here
            return _copy_of(self._written[checkpoint])
        return found

    def read_commit(self, checkpoint: CheckpointId) -> Commit:
        """Return the record of what this node keeps of a checkpoint, and of what it has sent."""
        found = {f"image {n}": one.commit for n, one in enumerate(self._images_of(checkpoint))}
        if checkpoint in self._written:
            found["sent"] = self._written[checkpoint]
        attempt_id = self._attempt_ids.get(checkpoint)
        same = {where: one for where, one in found.items() if one.lineage.attempt_id == attempt_id}
        if not same:
            raise KeyNotFoundError(f"{self.name}: no record of {checkpoint} is kept")
        return unite_records(same)

    def files(
        self, checkpoint: CheckpointId, commit: Commit | None = None
    ) -> tuple[StoredObject, ...]:
        """List what this node keeps of a checkpoint, as the files that another tier would have in the step's folder."""
        named = {
            file.name: StoredObject(key=file.name, bytes=file.bytes, version="")
            for image in self._images_of(checkpoint)
            for file in files_of(image.commit, image.shard)
        }
        return tuple(named.values())

    def _images_of(
        self, checkpoint: CheckpointId, kept: KeptReader | None = None
    ) -> Sequence[KeptImage]:
        """Return the images of a checkpoint that this node keeps, or another one, all of one attempt. Those that cannot
        be read count as absent if others can."""
        images, problems = (kept or self._kept).images()
        found = [image for image in images if image.commit.lineage.checkpoint == checkpoint]
        unread = next((each for each in problems if not each.is_damage), None)
        if not found and unread is not None:
            raise unread
        for image in found:
            self._attempt_ids.setdefault(checkpoint, image.commit.lineage.attempt_id)
        wanted = self._attempt_ids.get(checkpoint)
        return [image for image in found if image.commit.lineage.attempt_id == wanted]

    def delete(
        self,
        checkpoint: CheckpointId,
        *,
        attempt: Attempt | None,
        known: DecidedList | None,
        next_latest: CheckpointId | None = None,
    ) -> None:
        """Drop what this process keeps of a checkpoint: each does, as rank 0 says. Without ``known``, the commit was
        revoked, and what this rank has sent goes."""
        if known is None:
            self.discard(checkpoint, attempt=attempt)
        elif self._images is not None:
            self._images.drop(checkpoint)
            self._forget(checkpoint)
        self._attempt_ids.pop(checkpoint, None)

    def discard_unfinished(self, *, attempt: Attempt) -> int:
        """An image that an earlier start has sent in part is no image: its file is free."""
        return 0

    # What this rank sends ------------------------------------------------------------------------

    def written_commit(self, checkpoint: CheckpointId) -> Commit:
        """Return the record of the image that this rank has sent. It counts as written once all nodes that keep it have
        it."""
        if checkpoint not in self._written:
            raise KeyNotFoundError(f"{self.name}: nothing of {checkpoint} was sent")
        return self._written[checkpoint]

    def is_committed(self, checkpoint: CheckpointId) -> bool:
        return checkpoint in self._written

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
        self._waiting.pop(checkpoint, None)
        records_bytes = NAMES_BYTES + records_bytes_max(
            pieces_bytes=len(pieces), chunks=cut.chunk_count, metrics=(), tags=(), run=self._run
        )

        def begin(client: PeerClient, attempt_id: str | None) -> Upload:
            number = next(self._numbers)
            is_there = client.begin(
                checkpoint,
                shard,
                upload=number,
                image_bytes=cut.image_bytes,
                records_bytes=records_bytes,
                attempt_id=attempt_id,
                waiting=list(self._waiting),
            )
            return Upload(client, number, is_there)

        uploads: list[Upload] = []
        image = SentImage(checkpoint, shard, uploads)
        with ExitStack() as undo:
            undo.callback(image.abort)
            for client in self._sent:
                try:
                    uploads.append(begin(client, attempt_id))
                except UnreachableError:
                    if attempt_id is None:
                        raise
                    uploads.append(begin(client, None))  # to read what it has takes it too long
            undo.pop_all()
        self._uploads[checkpoint] = uploads
        return image

    def write_manifest(self, checkpoint: CheckpointId, shard: Shard, data: bytes) -> None:
        """Keep the manifest until rank 0 has said that the checkpoint is whole."""
        self._waiting[checkpoint] = data

    def commit(self, commit: Commit, *, attempt: Attempt, repairs: bool = False) -> None:
        """Make this rank's image count."""
        id = commit.lineage.checkpoint
        if id in self._written:
            return
        if id not in self._waiting:
            raise LostWriteError(f"{self.name}: the image of {id} was given up")
        manifest, record = self._waiting[id], commit.encode()
        for shard in shards_of(commit):
            for each in self._uploads[id]:
                each.client.seal(id, shard, each.number, manifest=manifest, commit=record)
        del self._waiting[id]
        self._written[id] = commit
        self._attempt_ids.setdefault(id, commit.lineage.attempt_id)

    def discard(
        self, checkpoint: CheckpointId, shard: Shard | None = None, *, attempt: Attempt | None
    ) -> None:
        """Drop an image of this rank, of a checkpoint that rank 0 gave up, from the nodes that keep it."""
        if self._shard is not None:
            with ExitStack() as asking:  # one that fails keeps nothing on the others
                for each in self._uploads.get(checkpoint, ()):
                    asking.callback(each.client.discard, checkpoint, self._shard, each.number)
        self._forget(checkpoint)

    def _forget(self, checkpoint: CheckpointId) -> None:
        for known in (self._waiting, self._written, self._uploads):
            known.pop(checkpoint, None)

    # Reading -------------------------------------------------------------------------------------

    def read_manifest(
        self, checkpoint: CheckpointId, shard: Shard, *, length: int | None = None
    ) -> bytes:
        return self._ask(checkpoint, shard, lambda image: image.manifest())

    def read_into(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        offset: int,
        view: memoryview,
        *,
        codec: Codec = Codec.NONE,
    ) -> None:
        self._ask(checkpoint, shard, lambda image: image.read(offset, [view]))

    def _ask(self, checkpoint: CheckpointId, shard: Shard, call: Callable[[KeptImage], T]) -> T:
        """Call each image until one answers: those on this node first, then those on other nodes."""
        failure: TierfallError | None = None
        for kept in (self._kept, *self._sent):
            try:
                for image in self._copies_on(kept, checkpoint, shard):
                    try:
                        return call(image)
                    except TierfallError as error:
                        if failure is None or not error.is_damage:
                            failure = error
            except TierfallError as error:
                failure = failure or error
            self._found.pop((kept, checkpoint, shard), None)
        raise failure or KeyNotFoundError(f"{self.name}: no image of {shard} of {checkpoint}")

    def _copies_on(
        self, kept: KeptReader, checkpoint: CheckpointId, shard: Shard
    ) -> Sequence[KeptImage]:
        key = kept, checkpoint, shard
        if key not in self._found:
            images = self._images_of(checkpoint, kept)
            found = [image for image in images if image.shard == shard]
            self._found = {k: v for k, v in self._found.items() if k[1] == checkpoint}
            self._found[key] = found
        return self._found[key]

    # What a cache has none of --------------------------------------------------------------------

    def check_newest(self, attempt: Attempt | None, *, doing: str = "change") -> None:
        """No other start sends to the nodes of this one."""

    def check_begin(self, attempt: Attempt) -> None:
        """No other start sends to the nodes of this one."""

    def write_latest(self, checkpoint: CheckpointId) -> None:
        """The tiers of storage name the newest checkpoint."""

    def record_lineage(self, commit: Commit, writer: Attempt | None = None) -> None:
        """The tiers of storage record how an attempt began."""

    def note_damaged(self, commit: Commit, why: str) -> None:
        """Each start reads anew what is in memory."""

    def close(self) -> None:
        for client in self._sent:
            client.close()
        super().close()


def _copy_of(commit: Commit) -> FoundCopy:
    """Return the copy that a record in peer memory stands for."""
    id, size = commit.lineage.checkpoint, commit.image_bytes
    return FoundCopy(id=id, state=CopyState.COMMITTED, bytes=size, commit=commit)


@dataclass(frozen=True, slots=True)
class Upload:
    """An image on its way to another node, by its number. ``is_there``: an earlier start has sent it."""

    client: PeerClient
    number: int
    is_there: bool


class SentImage(ImageUpload):
    """Sends an image to each node that is to keep a copy. The failure of any is the failure of the call."""

    def __init__(self, checkpoint: CheckpointId, shard: Shard, uploads: Sequence[Upload]) -> None:
        self._checkpoint, self._shard, self._uploads = checkpoint, shard, uploads

    def has_chunk(self, index: int) -> bool:
        """Whether a chunk need not be sent: if all nodes have the image, none."""
        return all(each.is_there for each in self._uploads)

    def write_chunks(self, index: int, start: int, view: memoryview) -> None:
        for each in self._uploads:
            if not each.is_there:
                each.client.write(self._checkpoint, self._shard, each.number, start, view)

    def finish(self, manifest: Manifest) -> tuple[NamedFile, ...]:
        """All has arrived; what counts is decided by the commit."""
        return ()

    def abort(self) -> None:
        for each in self._uploads:
            with suppress(BackendError):  # the next image that is begun gives this one up
                each.client.discard(self._checkpoint, self._shard, each.number)
