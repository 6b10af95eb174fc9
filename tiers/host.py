"""The host tier: the images of one rank in memory that outlives its process, a pool of image files.

It has as many files as its capacity holds, MEMORY_IMAGES_MAX at most, fewer if the process may open few descriptors.
The first is reserved before the first save, the others in the background, and all are used again for later images.
What an earlier start left is the same: sealed images, and free files. A file that others removed is not used again. The
tier does not choose which images are kept: it allocates a region, or returns None.
"""

from __future__ import annotations

import logging
import queue
import re
import resource
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierfall.core.format.catalog import FoundCopy, Listing
from tierfall.core.format.records import Commit, parse_commit
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.types.errors import (
    CapacityError,
    ConfigError,
    IntegrityError,
    KeyNotFoundError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.units import format_size
from tierfall.core.types.values import MEMORY_IMAGES_MAX, CheckpointId, CopyState, Shard
from tierfall.tiers.host_folder import WHAT_HELPS, measure_room, prepare_folder, sized
from tierfall.tiers.image_file import PAGE_BYTES, ImageFile, Region, padded, room_for

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("tierfall")
DESCRIPTORS_FOR_ONE_FILE = 16
"""The process may open so many descriptors for each file, which takes two: the program needs the others."""
REST_S = 0.001
"""The shortest rest."""
BUSY_S = 0.05
"""The longest rest, also while what is left waits for an image to be filled."""
JOIN_S = 5.0
_FILE = re.compile(r"slot-(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})\.image")


def lock_name(slot: int) -> str:
    return f"slot-{slot}.lock"


def image_files(folder: Path) -> dict[int, list[Path]]:
    """Return the paths of the image files in a run's folder, by slot. Raises UnreachableError."""
    found: dict[int, list[tuple[int, Path]]] = {}
    try:
        for path in folder.iterdir():
            if match := _FILE.fullmatch(path.name):
                found.setdefault(int(match[1]), []).append((int(match[2]), path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UnreachableError(f"{folder} could not be listed: {error.strerror}") from error
    return {slot: [path for _, path in sorted(found[slot])] for slot in sorted(found)}


def new_path(folder: Path, slot: int) -> Path:
    """Return a free path for another file of a slot. Raises UnreachableError."""
    taken = set(image_files(folder).get(slot, []))
    paths = (folder / f"slot-{slot}.{number}.image" for number in range(len(taken) + 1))
    return next(path for path in paths if path not in taken)


def held_bytes(folder: Path) -> int:
    """Return how much memory the image files in a run's folder take."""
    total = 0
    for path in [path for paths in image_files(folder).values() for path in paths]:
        with suppress(OSError):  # it was removed meanwhile
            total += path.stat().st_blocks * 512
    return total


class ImagePool:
    """The files of one slot, each of which is used for one image after the other. It never changes its size: free ones
    that are too small for an image are deleted when one is made for it. May be used by several threads."""

    def __init__(self, folder: Path, slot: int, run: str) -> None:
        self.folder, self.slot, self._run = folder, slot, run
        self._files: list[ImageFile] = []
        self._in_memory = False
        """Whether no file is made on a file system that is not in memory."""
        self._closed = False
        self._guard = threading.Lock()
        self._making = threading.Lock()
        """Held while a file is made, which takes long for a large one."""

    def _take(self, image_bytes: int, need: int, shard: Shard) -> Region | None:
        """Take the smallest free file with that room, if there is one, for an image."""
        with self._guard:
            for file in [file for file in self._files if file.is_free]:
                self._drop_removed(file)
            fitting = [file for file in self._files if file.is_free and file.room_bytes >= need]
            if not fitting or self._closed:
                return None
            file = min(fitting, key=lambda file: file.room_bytes)
            return file.take(image_bytes=image_bytes, shard=shard)

    def _drop_removed(self, file: ImageFile) -> None:
        """Drop a file that others have removed."""
        try:
            is_there = file.exists()
        except TierfallError as error:
            logger.debug("%s", error)
            return
        if not is_there:
            self._files.remove(file)
            file.close(keep=True)

    def _rest(self, need: int) -> Sequence[ImageFile]:
        """Return the files that stay if one is made with that room. The caller has ``_guard``."""
        return [file for file in self._files if not file.is_free or file.room_bytes >= need]

    def _delete_small(self, need: int) -> None:
        """Delete free files that have less room. Raises CapacityError, and deletes none, if memory is missing even
        so."""
        with self._guard:
            rest = self._rest(need)
            small_bytes = _rooms([file for file in self._files if file not in rest])
        if small_bytes:
            self._check_free(need, small_bytes)
        with self._guard:
            rest = self._rest(need)
            small = [file for file in self._files if file not in rest]
            self._files = [*rest]
        for file in small:
            file.close(keep=False)

    def _check_free(self, need: int, small_bytes: int) -> None:
        """Raise CapacityError if less memory is free for a file than it needs, with what ``small_bytes`` will free."""
        free_bytes = measure_room(prepare_folder(self.folder)).free_bytes + small_bytes
        if need > free_bytes:
            raise CapacityError(f"it needs {sized(need)}, and {sized(free_bytes)} are free for it")

    def _make_file(self, room_bytes: int) -> None:
        """Make a file. The caller has ``_making``. Raises CapacityError if memory is missing."""
        prepare_folder(self.folder)  # a cleaner of temporary files may have removed it
        if self._in_memory and not measure_room(self.folder).in_memory:
            raise ConfigError(
                f"the file system of {self.folder} was unmounted, and the one that is there now is not in memory; "
                "mount it again"
            )
        path = new_path(self.folder, self.slot)
        made = ImageFile.create(
            path, run=self._run, room_bytes=room_bytes, stopped=lambda: self._closed
        )
        with self._guard:
            self._files.append(made)

    def close(self, *, keep: bool) -> None:
        self._closed = True  # ends a reservation that is in progress
        with self._making, ExitStack() as closing:  # one that fails keeps no other open
            for file in self._files:
                closing.callback(file.close, keep=keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedImage:
    """A sealed image in memory, with its commit record. ``on_peers``: peer memory has committed its checkpoint."""

    region: Region
    commit: Commit
    on_peers: bool


class HostTier(ImagePool):
    """The image files of one slot. Its methods may be called from several threads."""

    def __init__(
        self,
        *,
        name: str,
        run: str,
        folder: Path,
        slot: int,
        shard: Shard,
        capacity_bytes: int | None = None,
        images: int = 2,
        ranks: int = 1,
        writable: bool = True,
    ) -> None:
        """Open the files of an earlier start. ``images`` are needed if the configuration sets no capacity, and
        ``ranks`` share the node's memory.

        Raises ConfigError for a file that is no image of this run, LockError if another process uses one.
        """
        super().__init__(folder, slot, run)
        self.name = name
        self._shard = shard
        self._images = images
        self._ranks = ranks
        self._configured_bytes = capacity_bytes
        self._capacity_bytes = capacity_bytes or 0
        self._most_bytes = 0
        """What the capacity may become by ``take_spare``."""
        self._need_bytes = 0
        """The room that the last image needed."""
        self._is_short = False
        """Whether memory was missing when a file was to be made the last time."""
        self._share_bytes: int | None = None
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        few = max(2, descriptors // DESCRIPTORS_FOR_ONE_FILE)
        self._files_max = (
            MEMORY_IMAGES_MAX
            if descriptors == resource.RLIM_INFINITY
            else min(MEMORY_IMAGES_MAX, few)
        )
        self._device: torch.device | None = None
        self._may_lock = True
        self._conditions = Conditions()
        self._preparation = Preparation(self._prepare_some, name=run)
        try:
            for path in image_files(folder).get(slot, []):
                with suppress(KeyNotFoundError):  # its owner has removed it meanwhile
                    self._files.append(ImageFile.open(path, run=run, writable=writable))
        except BaseException:
            self.close(keep=True)
            raise

    @property
    def place(self) -> str:
        """The pattern of the names of its files, for messages."""
        return str(self.folder / f"slot-{self.slot}.*.image")

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes or _rooms(self._files)

    @property
    def free_bytes(self) -> int:
        with self._guard:
            return self._rest_bytes()

    @property
    def largest_free_bytes(self) -> int:
        """The room of the largest image that ``allocate`` would find a file for now."""
        with self._guard:
            return max(self._rest_bytes(), *(f.room_bytes for f in self._files if f.is_free), 0)

    def _rest_bytes(self, without: Collection[object] = ()) -> int:
        """Return what the files in use leave of the capacity. If memory was missing, it is what they leave of the files
        that are there. The files of the regions ``without`` count as free."""
        gone = {id(region) for region in without}
        busy = [file for file in self._files if not file.is_free and id(file.region) not in gone]
        limit = _rooms(self._files) if self._is_short else self.capacity_bytes
        return max(0, limit - _rooms(busy)) if len(busy) < self._files_max else 0

    # Images of an earlier start ----------------------------------------------------------------------

    def is_empty(self) -> bool:
        """Whether there is no sealed image, intact or damaged."""
        return not any(self._examine())

    def images(self) -> dict[CheckpointId, SealedImage]:
        """Return the sealed images whose records are intact."""
        return self._examine()[0]

    def _examine(self) -> tuple[dict[CheckpointId, SealedImage], dict[ImageFile, TierfallError]]:
        """Return the sealed images whose records are intact, and the errors of the others."""
        images: dict[CheckpointId, SealedImage] = {}
        damaged: dict[ImageFile, TierfallError] = {}
        with self._guard:
            files = [(file, file.region) for file in self._files]
        for file, region in files:
            if file.damage is not None:
                damaged[file] = file.damage
            if region is None or not region.sealed:
                continue
            try:
                image = self._image(file, region)
            except TierfallError as error:
                damaged[file] = error
                continue
            except ValueError:
                if not region.is_discarded:  # another thread has released it just now
                    raise
                continue
            images[image.commit.lineage.checkpoint] = image
        return images, damaged

    def _image(self, file: ImageFile, region: Region) -> SealedImage:
        commit = parse_commit(region.commit(), what=f"{self.name}: commit record in {file.path}")
        region.manifest()  # is compared with its digest
        if commit.lineage.run != self._run:
            raise ConfigError(
                f"{self.name}: {file.path} has an image of run {commit.lineage.run!r}, not of {self._run!r}"
            )
        return SealedImage(region=region, commit=commit, on_peers=region.on_peers)

    def holds_damaged(self) -> bool:
        """Whether an image is there that cannot be read, and that no save has released yet."""
        return bool(self._examine()[1])

    def release_damaged(self) -> None:
        """Release damaged images; those of a newer tierfall are kept."""
        for file, error in self._examine()[1].items():
            if not isinstance(error, IntegrityError):
                continue
            if file.region is None:
                file.clear()
            else:
                file.region.release()

    def list(self) -> Listing:
        """List the sealed images."""
        images, damaged = self._examine()
        copies = [
            FoundCopy(
                id=id,
                state=CopyState.SEALED,
                bytes=held.commit.image_bytes,
                commit=held.commit,
                on_peers=held.on_peers,
            )
            for id, held in images.items()
        ]
        return Listing(
            tier=self.name,
            copies=tuple(sorted(copies, key=lambda c: c.id)),
            damaged=tuple(damaged.values()),
        )

    # Room --------------------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Compare the capacity of all ranks of the node with the memory that is free: all ranks do, before any of them
        saves. Raises CapacityError."""
        self._share_bytes = self._measure_share()
        if self._configured_bytes is not None:
            of_ranks = f" for each of {self._ranks} ranks" if self._ranks > 1 else ""
            measure_room(self.folder).require(
                self._ranks * self._configured_bytes - held_bytes(self.folder),
                what=f"tier {self.name}: a capacity of {sized(self._configured_bytes)}{of_ranks}",
            )

    def _measure_share(self) -> int:
        """Return how much of the node's memory this rank may use if the configuration sets no capacity: of three
        quarters of what is free, as much as each other rank; of half if peers' images are kept there, too."""
        room = measure_room(self.folder)
        self._in_memory = room.in_memory
        free_bytes = min(room.free_bytes, room.memory_free_bytes or room.free_bytes)
        quarters = 3 if self._images == 2 else 2
        return (free_bytes + held_bytes(self.folder)) * quarters // 4 // self._ranks

    def ensure_capacity(self, *, image_bytes: int, records_bytes: int) -> None:
        """Have a file that an image fits in, once it is free: at the first save, for an image that has outgrown the
        files, and for one that is brought back from another node. The other files are reserved in the background.

        Raises CapacityError, with both numbers, if one image does not fit.
        """
        need = room_for(image_bytes=image_bytes, records_bytes=records_bytes)
        if self._configured_bytes is not None and need > self._configured_bytes:
            raise CapacityError(
                f"tier {self.name}: one checkpoint takes {format_size(need)} ({need} bytes), its capacity is "
                f"{format_size(self._configured_bytes)} ({self._configured_bytes} bytes): raise the capacity to at "
                "least two checkpoints, so that one can be flushed while the next is captured"
            )
        if need == self._need_bytes:
            return
        with self._guard:
            has_file = any(file.room_bytes >= need for file in self._files)
            if self._configured_bytes is None and need > self._need_bytes:
                self._set_capacity(need)
        if not has_file:
            with self._making:
                try:
                    self._make(need)
                except TierfallError as error:
                    if all(file.is_free for file in self._files):
                        raise
                    self._note_shortage(error)  # the image in one of them may be evicted
        self._need_bytes = need
        self._preparation.resume()

    def _set_capacity(self, need: int) -> None:
        """Set a capacity that the configuration does not: for the images that are needed, or for fewer. Raises
        CapacityError if there is no room for one."""
        if self._share_bytes is None:
            self._share_bytes = self._measure_share()
        share = self._share_bytes
        if need > share:
            raise CapacityError(
                f"tier {self.name} in {self.folder}: one image needs {sized(need)}, and without a `capacity` it takes "
                f"{sized(share)} at most, its part of the memory that is free; set the tier's `capacity` to at least "
                f"{sized(need)}, or {WHAT_HELPS}"
            )
        need = min(share, need + _slack(need))
        # images of other ranks stay until a newer one is on a tier
        others = [f for f in self._files if f.region is not None and f.region.shard != self._shard]
        images, busy = share // need, [file for file in self._files if not file.is_free]
        needed = min(images, self._images) * need + _rooms(others)
        self._capacity_bytes = max(self._capacity_bytes, needed)
        spare = min(images, self._images + 1) * need + _rooms(others)
        self._most_bytes = max(spare, min(share, _rooms(busy) + need))

    def take_spare(self) -> bool:
        """Have room for one image more than is needed, if the configuration sets no capacity, and there is room. Return
        whether this has changed anything."""
        if self._capacity_bytes >= self._most_bytes:
            return False
        self._capacity_bytes = self._most_bytes
        return True

    def allocate(self, *, image_bytes: int, records_bytes: int) -> Region | None:
        """Allocate a region for an image; None if no file is free, and no other may be made."""
        need = room_for(image_bytes=image_bytes, records_bytes=records_bytes)
        try:
            if (region := self._take(image_bytes, need, self._shard)) is not None:
                return region
            with self._making:
                while (region := self._take(image_bytes, need, self._shard)) is None:
                    if not self._make(need):
                        return None
                return region
        except TierfallError as error:
            self._note_shortage(error)
            return None

    def would_fit(
        self, *, image_bytes: int, records_bytes: int, without: Collection[object]
    ) -> bool:
        """Whether ``allocate`` would find a file if the regions ``without`` were released."""
        need = room_for(image_bytes=image_bytes, records_bytes=records_bytes)
        gone = {id(region) for region in without}
        with self._guard:
            free = (f for f in self._files if f.is_free or id(f.region) in gone)
            return need <= self._rest_bytes(without) or any(f.room_bytes >= need for f in free)

    def _room_beside(self, need: int) -> int:
        """Return the room for a file with that room beside those that stay then."""
        rest = self._rest(need)
        return self.capacity_bytes - _rooms(rest) if len(rest) < self._files_max else 0

    def _make(self, need: int) -> bool:
        """Make a file with that room. False if the files in use leave no room. Raises CapacityError if memory is
        missing."""
        with self._guard:
            if self._closed or need > self._room_beside(need):
                return False
        self._delete_small(need)
        with self._guard:  # one of these may have been taken meanwhile
            room = self._room_beside(need)
        if need > room:
            return False
        # The slack must not cost an image.
        each = self.capacity_bytes // (self.capacity_bytes // need)
        self._make_file(min(need + _slack(need), each, room) // PAGE_BYTES * PAGE_BYTES)
        self._is_short = False
        self._conditions.end(self.name, "%s: has memory for more again", self.name)
        return True

    def _note_shortage(self, error: TierfallError) -> None:
        if self._closed:
            return
        self._is_short = True
        self._conditions.report(
            self.name, logging.WARNING, "%s: continues with %s of memory: %s",
            self.name, format_size(_rooms(self._files)), error,
        )  # fmt: skip

    # Preparation -------------------------------------------------------------------------------------

    def prepare(self, device: torch.device | None) -> None:
        """Prepare the memory that there is, in the background, for images that come from a ``device`` (None: from host
        memory). A save takes memory that is not prepared rather than waits."""
        if device is not None:
            self._device = device
        if self._files and not self.is_prepared:
            self._preparation.resume()

    @property
    def is_prepared(self) -> bool:
        """Whether the memory that there may be is reserved and touched and, for copies from the device that ``prepare``
        was given, locked."""
        locks = self._device is not None and self._may_lock
        with self._guard:
            return not self._lacks_file() and all(
                file.touched_bytes == file.room_bytes
                and (not locks or file.locked_bytes == file.room_bytes)
                for file in self._files
                if file.damage is None
            )

    def _lacks_file(self) -> bool:
        """Whether there is room for another file of the size that the last image needed."""
        need = self._need_bytes
        return bool(need) and not self._is_short and need <= self._room_beside(need)

    def _prepare_some(self) -> float | None:
        """Reserve a file, or touch or lock some pages, those of free files first; see ``Preparation``."""
        with self._guard:
            need, lacks = self._need_bytes, self._lacks_file()
            files = sorted(self._files, key=lambda file: not file.is_free)
        if lacks:
            with self._making:
                try:
                    if self._make(need):
                        return 0.0
                except TierfallError as error:
                    self._note_shortage(error)
        for file in files:
            if file.touch_some() or self._lock_some(file):
                return 0.0
        return None if self.is_prepared else BUSY_S

    def _lock_some(self, file: ImageFile) -> bool:
        """Lock some pages of a file, if there are some to lock now. A refusal is logged once."""
        if self._device is None or not self._may_lock:
            return False
        refusal = file.lock_some(self._device)
        if refusal:
            self._may_lock = False
            logger.warning(
                "%s: its memory could not be page-locked beyond %s: %s; copies from the GPU continue, slower; raise "
                "`ulimit -l` (or --ulimit memlock=-1 of a container) or set a smaller `capacity`",
                self.name,
                sized(sum(each.locked_bytes for each in self._files)),
                refusal,
            )
        return refusal == ""

    # Its files ---------------------------------------------------------------------------------------

    def lost_regions(self) -> Sequence[Region]:
        """Return the regions of images that end with this process, since their files were removed. Raises BackendError
        if that is unknown."""
        with self._guard:
            used = [(file, file.region) for file in self._files if file.region is not None]
        return [region for file, region in used if not file.exists()]

    # The end -----------------------------------------------------------------------------------------

    def discard(self) -> None:
        """Delete the files and the images in them: the process ends now, and frees the memory with that."""
        self._closed = True
        for file in self._files:
            file.remove()

    def close(self, *, keep: bool) -> None:
        """Close the files; delete them, and the images in them, unless ``keep``. Free ones are deleted."""
        self._closed = True
        self._preparation.close()
        super().close(keep=keep)


def _rooms(files: Collection[ImageFile]) -> int:
    return sum(file.room_bytes for file in files)


def _slack(need: int) -> int:
    """Return by how much a file is larger than the image needs: records grow with metrics and tags."""
    return padded(need // 64)


class Preparation:
    """A thread that reserves files in the background, touches their pages, and locks them for copies from a device.

    Images are filled and read without it, only slower: a first touch costs ten times the copy, and a copy from a device
    to memory that is not locked keeps the host waiting. The thread calls ``step`` until that returns None, and again
    after each ``resume``. ``step`` prepares a part of the memory, and returns the seconds that the thread rests at
    least. It rests as long as it has worked, BUSY_S at most, since other threads wait for a page table, or for the
    driver, meanwhile.
    """

    def __init__(self, step: Callable[[], float | None], *, name: str) -> None:
        self._step = step
        self._name = name
        # Not an event: an interrupt of the thread that saves could leave its lock taken.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = False
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        """Prepare what is not prepared."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(
                target=self._run, name=f"tierfall-{self._name}-prepare", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as error:  # the limit of processes, or of memory, is reached
                self._give_up(error)
        self._wakes.put(None)

    def close(self) -> None:
        """End the thread. The pages stay as they are."""
        self._closed = True
        self._wakes.put(None)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._wakes.get()
                self._prepare()
        except Exception as error:  # noqa: BLE001 - reported
            self._give_up(error)

    def _prepare(self) -> None:
        while not self._closed:
            began_s = time.monotonic()
            least_s = self._step()
            if least_s is None:
                return
            worked_s = min(time.monotonic() - began_s, BUSY_S)
            # A wake ends the rest; the next step sees what it was for.
            with suppress(queue.Empty):
                self._wakes.get(timeout=max(REST_S, least_s, worked_s))

    def _give_up(self, error: Exception) -> None:
        logger.warning(
            "host memory of run %s is not prepared any further: %s; saves go on, slower",
            self._name,
            error,
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )
