"""The images that a node keeps in its memory for other nodes: image files, as those of its own host memory.

Each process of a node receives images into files of its own slot, straight into their pages. A file whose image is
dropped is used again for the next one, since new pages cost more than the transfer of the bytes: the kernel zeroes
each. A received image counts once it is sealed, which rank 0 decides. It outlives the process.

Every process of the node reads all of them, without a lock: the header is compared before and after a read, and an
image that has left its file meanwhile is gone, not damaged.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tierfall.core.capture.copier import chunk_digest
from tierfall.core.format.records import Commit, parse_commit, parse_manifest
from tierfall.core.ranks.domains import node_name
from tierfall.core.types.errors import (
    BackendError,
    CapacityError,
    ConfigError,
    IntegrityError,
    KeyNotFoundError,
    LockError,
    LostWriteError,
    StorageFullError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.tiers.host import ImagePool, image_files
from tierfall.tiers.image_file import PAGE_BYTES, ImageFile, Region, Seal, room_for

logger = logging.getLogger("tierfall")

HELPS = (
    "raise the size of /dev/shm (mount -o remount,size=..., or --shm-size of a container), set the tier's path to a "
    "larger file system in memory, or have fewer copies"
)
_Key = tuple[CheckpointId, Shard]


# Reading ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHere:
    """A sealed image in a file of this node, as it was when the folder was listed. ``place`` is for messages. Its
    methods raise BackendError, and IntegrityError."""

    path: Path
    run: str
    seal: Seal
    commit: Commit

    @property
    def shard(self) -> Shard:
        return self.seal.shard

    @property
    def place(self) -> str:
        return str(self.path)

    def manifest(self) -> bytes:
        with self.opened() as region:
            return region.manifest()

    def read(self, offset: int, views: Iterable[memoryview]) -> None:
        """Fill one view after the other with the image's bytes from ``offset`` on."""
        with self.opened() as region:
            for view in views:
                region.read_into(offset, view)
                offset += view.nbytes

    def verify(self) -> None:
        """Read the image, and compare all of it with its digests. Raises IntegrityError."""
        with self.opened() as region:
            manifest = parse_manifest(region.manifest(), what=str(self.path))
            for index, digest in enumerate(manifest.digests):
                start, end = manifest.chunk_range(index)
                if chunk_digest(region.image[start:end]) != digest:
                    raise IntegrityError(f"{self.path}: chunk {index} does not match its digest")

    def opened(self) -> AbstractContextManager[Region]:
        return opened_image(self.path, self.run, self.seal.commit.digest)


@contextmanager
def opened_image(path: Path, run: str, commit_digest: str) -> Iterator[Region]:
    """Open an image for reading. Raises KeyNotFoundError if its file has no image with that commit record any more."""
    with _opened(path, run) as file:
        region = file.region
        seal = region.sealed_as if region is not None else None
        if region is None or seal is None or seal.commit.digest != commit_digest:
            raise _gone(path)
        yield region


def _gone(path: Path) -> KeyNotFoundError:
    return KeyNotFoundError(f"{path}: the image that was kept there has left memory")


@contextmanager
def _opened(path: Path, run: str) -> Iterator[ImageFile]:
    """Open a file for reading. Raises KeyNotFoundError if it was used for another image meanwhile, whatever error the
    reads have had."""
    file = ImageFile.open(path, run=run, writable=False)

    def check() -> None:
        if file.region is not None and file.view[:PAGE_BYTES] != file.header:
            raise _gone(path)

    try:
        try:
            yield file
        except TierfallError:
            check()
            raise
        check()
    finally:
        file.close(keep=True)


class KeptFolder:
    """The images of a run in a folder of this node."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder, self.run = folder, run

    def images(self) -> tuple[list[ImageHere], list[TierfallError]]:
        """Return the images that are kept, and why others cannot be read."""
        found: list[ImageHere] = []
        problems: list[TierfallError] = []
        for path in [path for paths in image_files(self.folder).values() for path in paths]:
            try:
                with _opened(path, self.run) as file:
                    if file.damage is not None:
                        raise file.damage
                    region = file.region
                    if region is not None and (seal := region.sealed_as) is not None:
                        commit = parse_commit(region.commit(), what=f"commit record in {path}")
                        found.append(ImageHere(path=path, run=self.run, seal=seal, commit=commit))
            except KeyNotFoundError:
                continue
            except TierfallError as error:
                problems.append(error)
        return found, problems

    def find(self, checkpoint: CheckpointId, shard: Shard, attempt_id: str) -> list[ImageHere]:
        """Return the files with an image of that attempt: several, if a damaged one was sent again."""
        return [
            image
            for image in self.images()[0]
            if image.shard == shard
            and image.commit.lineage.checkpoint == checkpoint
            and image.commit.lineage.attempt_id == attempt_id
        ]


def discard_kept(folder: Path) -> None:
    """Delete what this node keeps of a run for other nodes. Raises BackendError if a file cannot be deleted."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise BackendError(f"{error.filename} cannot be deleted: {error.strerror}") from error


# Receiving --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Arriving:
    """An image that is being received, by the number that its sender has given it. A broken connection may still write
    to it after it was given up: the file is free once ``writers`` is 0."""

    upload: int
    region: Region
    writers: int = 0
    given_up: bool = False


class KeptImages(ImagePool):
    """The files into which a process receives images. Its methods may be called by several threads."""

    def __init__(self, folder: KeptFolder, slot: int, *, adopts_from: float = math.inf) -> None:
        """The files of this process are those of its ``slot``, and of the slots of earlier starts from ``adopts_from``
        on. They are opened when one is needed first."""
        super().__init__(folder.folder, slot, folder.run)
        self.kept = folder
        self._adopts_from = adopts_from
        self._lock = threading.Lock()
        self._opened = False
        self._arriving: dict[_Key, _Arriving] = {}
        self._sealed: dict[CheckpointId, list[Region]] = {}
        self._uploads: dict[Shard, int] = {}
        """The newest upload of each sender."""
        self._sent: dict[_Key, tuple[int, Region | None]] = {}
        """The images that this start has sealed, by the upload, and those of earlier starts that are good (None)."""

    def _open(self) -> None:
        """Open the files of earlier starts. Raises LockError if another process uses one of the own slot, ConfigError
        for one that is no image of this run. Such files of other slots stay as they are."""
        own = self.slot
        with self._making:
            if self._opened:
                return
            for slot, paths in image_files(self.folder).items():
                for path in paths if slot == own or slot >= self._adopts_from else ():
                    if all(file.path != path for file in self._files):
                        self._adopt(path, is_own=slot == own)
            self._opened = True

    def _adopt(self, path: Path, *, is_own: bool) -> None:
        try:
            file = ImageFile.open(path, run=self._run, writable=True)
        except KeyNotFoundError:
            return
        except (LockError, ConfigError) as error:
            if is_own:
                raise
            logger.warning("peers: what a rank of an earlier start has kept stays: %s", error)
            return
        self._files.append(file)
        try:
            if file.damage is not None:
                raise file.damage
            if file.region is not None:
                commit = parse_commit(file.region.commit(), what=f"commit record in {path}")
                self._sealed.setdefault(commit.lineage.checkpoint, []).append(file.region)
        except IntegrityError as error:
            logger.warning("peers: an image that was kept for another node is damaged: %s", error)
            if file.region is None:
                file.clear()
            else:
                file.region.release()
        except TierfallError as error:  # of a newer version: it stays
            logger.warning("peers: %s", error)

    def begin(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        *,
        upload: int,
        image_bytes: int,
        records_bytes: int,
        attempt_id: str | None,
        waiting: Collection[CheckpointId],
    ) -> bool:
        """Have room for an image; return True if it need not be sent: an earlier start, of ``attempt_id``, has sent it,
        and it is good. Of this rank's other images that are not sealed only those ``waiting`` for that stay.
        ``upload`` is a number that grows with each upload of the rank: a request that comes late is refused by
        LostWriteError, and one that comes twice changes nothing.

        Raises StorageFullError if it does not fit into the memory that is free: else the machine may kill a process.
        """
        key = checkpoint, shard
        self._open()
        with self._lock:
            if self._is_repeated(key, upload):
                return key in self._sent
            self._uploads[shard] = upload
            self._sent.pop(key, None)
            for other in [each for each in self._arriving if each[1] == shard]:
                if other == key or other[0] not in waiting:
                    self._give_up(other)
        if attempt_id is not None and self._has_good(checkpoint, shard, attempt_id):
            with self._lock:
                if not self._is_repeated(key, upload):
                    self._sent[key] = upload, None
            return True
        region = self._allocate(shard, image_bytes=image_bytes, records_bytes=records_bytes)
        try:
            with self._lock:
                if self._is_repeated(key, upload):
                    region.release()
                else:
                    self._arriving[key] = _Arriving(upload, region)
        except BaseException:
            region.release()
            raise
        return False

    def _is_repeated(self, key: _Key, upload: int) -> bool:
        """Whether an upload has begun already. Raises LostWriteError if a newer one has."""
        if upload < self._uploads.get(key[1], 0):
            raise LostWriteError(f"a newer upload than {upload} of {key[1]} has begun")
        arriving, sent = self._arriving.get(key), self._sent.get(key)
        return upload in (arriving and arriving.upload, sent and sent[0])

    def _has_good(self, checkpoint: CheckpointId, shard: Shard, attempt_id: str) -> bool:
        """Whether an earlier start has sent an image, and it is good. Damaged ones are dropped."""
        for image in self.kept.find(checkpoint, shard, attempt_id):
            try:
                image.verify()
            except IntegrityError as error:
                logger.warning("peers: it is sent again: %s", error)
                self._drop_damaged(image)
            except TierfallError:  # it cannot be told: it is sent
                logger.debug("peers: %s is not read", image.path, exc_info=True)
            else:
                return True
        return False

    def _drop_damaged(self, image: ImageHere) -> None:
        """Drop an image; the file of another process is deleted, which its owner notices."""
        checkpoint = image.commit.lineage.checkpoint
        with self._lock:
            kept = self._sealed.get(checkpoint, [])
            own = [r for r in kept if r.path == image.path and r.sealed_as == image.seal]
            for region in own:
                kept.remove(region)
                region.release()
        if not own:
            with suppress(OSError):
                image.path.unlink()

    def _allocate(self, shard: Shard, *, image_bytes: int, records_bytes: int) -> Region:
        """Take a free file that has room, or make one. Raises StorageFullError."""
        need = room_for(image_bytes=image_bytes, records_bytes=records_bytes)
        with self._making:
            while (region := self._take(image_bytes, need, shard)) is None:
                try:
                    self._delete_small(need)
                    self._check_free(need, 0)
                    self._make_file(need)
                except CapacityError as error:
                    raise StorageFullError(f"{error} on {node_name()}: {HELPS}") from error
            return region

    @contextmanager
    def receiving(
        self, checkpoint: CheckpointId, shard: Shard, upload: int, offset: int, size_bytes: int
    ) -> Iterator[memoryview]:
        """Lend the memory of a range of an image. Raises LostWriteError if that upload was not begun, or was given
        up."""
        with self._lock:
            arriving = self._begun(checkpoint, shard, upload)
            if not 0 <= offset <= offset + size_bytes <= arriving.region.image_bytes:
                raise BackendError(f"bytes {offset} to {offset + size_bytes} are not in the image")
            arriving.writers += 1
        try:
            yield arriving.region.image[offset : offset + size_bytes]
        finally:
            with self._lock:
                arriving.writers -= 1
                if arriving.given_up and not arriving.writers:
                    arriving.region.release()

    def _begun(self, checkpoint: CheckpointId, shard: Shard, upload: int) -> _Arriving:
        arriving = self._arriving.get((checkpoint, shard))
        if arriving is None or arriving.upload != upload:
            raise LostWriteError(
                f"the image of {shard} of {checkpoint} was not begun here, or was given up: send it again"
            )
        return arriving

    def seal(
        self, checkpoint: CheckpointId, shard: Shard, upload: int, *, manifest: bytes, commit: bytes
    ) -> None:
        """Make an image count, unless it does already. Raises LostWriteError as ``receiving`` does, and if the image's
        file was removed."""
        key = checkpoint, shard
        with self._lock:
            if key in self._sent and self._sent[key][0] == upload:
                return
            arriving = self._begun(checkpoint, shard, upload)
            if arriving.writers:  # an earlier connection: what arrives there may be damaged
                raise UnreachableError("an earlier request still writes to the image")
            if not arriving.region.has_file():
                self._give_up(key)
                raise LostWriteError(f"{arriving.region.path} was removed meanwhile")
            arriving.region.seal(manifest=manifest, commit=commit)
            del self._arriving[key]
            self._sealed.setdefault(checkpoint, []).append(arriving.region)
            self._sent[key] = upload, arriving.region

    def discard(self, checkpoint: CheckpointId, shard: Shard, upload: int) -> None:
        """Drop an image that this start was sent by an upload; what an earlier start has sent stays."""
        key = checkpoint, shard
        with self._lock:
            if key in self._arriving and self._arriving[key].upload == upload:
                self._give_up(key)
            if key in self._sent and self._sent[key][0] == upload:
                _, region = self._sent.pop(key)
                if region is not None:
                    self._sealed[checkpoint].remove(region)
                    region.release()
        self._trim()

    def drop(self, checkpoint: CheckpointId) -> None:
        """Drop the images of a checkpoint in the files of this process."""
        self._open()
        with self._lock:
            for key in [key for key in self._sent if key[0] == checkpoint]:
                del self._sent[key]
            for region in self._sealed.pop(checkpoint, []):
                region.release()
        self._trim()

    def _give_up(self, key: _Key) -> None:
        arriving = self._arriving.pop(key, None)
        if arriving is not None:
            arriving.given_up = True
            if not arriving.writers:
                arriving.region.release()

    def _trim(self) -> None:
        """Keep a free file for each one that is used; delete the others, the smallest first."""
        with self._making:
            files = self._files
            free = sorted((f for f in files if f.is_free), key=lambda f: f.room_bytes)
            for file in free[: max(0, 2 * len(free) - len(files))]:
                files.remove(file)
                file.close(keep=False)

    def close(self, *, keep: bool) -> None:
        """Close the files, and delete the free ones; unless ``keep``, all of them. May be called twice."""
        self._closed = True  # ends a reservation that is in progress
        with ExitStack() as closing:  # one that fails keeps no other open
            closing.callback(super().close, keep=keep)
            if not keep:
                try:
                    self._open()
                except (LockError, ConfigError) as error:  # a later start has them
                    logger.warning("peers: what is kept for other nodes stays: %s", error)
