"""The host tier: the images of one rank in memory that outlives its process.

It owns the arena: its allocation, its growth, the images of an earlier start in it, and its end. If others remove the
arena's file, the next images are in a new one. It does not choose which images are kept: it allocates a region, or
returns None.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierfall.core.capture.snapshot import ON_PEERS
from tierfall.core.format.catalog import FoundCopy, Listing
from tierfall.core.format.records import Commit, parse_commit
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.types.errors import (
    BackendError,
    CapacityError,
    ConfigError,
    IntegrityError,
    KeyNotFoundError,
    TierfallError,
)
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, CopyState, Shard
from tierfall.tiers.arena.arena import Arena, arena_name, extent_bytes
from tierfall.tiers.arena.folder import prepare_folder, room_for_arena
from tierfall.tiers.arena.region import Region

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("tierfall")
_ARENA = re.compile(r"slot-(0|[1-9][0-9]{0,8})\.arena")
SPARE = 0.2
PROGRESS_S = 2.0
"""Seconds between two log lines about the allocation of host memory."""


def arena_slots(folder: Path) -> list[int]:
    """Return the numbers of the slots that have an arena in a run's folder."""
    found = (_ARENA.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedImage:
    """A sealed image in the arena, with its commit record. ``on_peers``: peer memory has committed its checkpoint."""

    region: Region
    commit: Commit
    on_peers: bool


class HostTier:
    """One slot's arena, with what an earlier start left in it. ``allocate`` may be called from another thread than the
    rest."""

    def __init__(
        self,
        *,
        name: str,
        run: str,
        folder: Path,
        slot: int,
        shard: Shard,
        capacity_bytes: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        images: int = 2,
        writable: bool = True,
    ) -> None:
        """Open the arena of an earlier start, if there is one. Raises ConfigError for an arena of another run,
        IntegrityError where its header is damaged."""
        self._images = images
        self.name = name
        self._run = run
        self._folder = folder
        self._slot = slot
        self._shard = shard
        self._configured_bytes = capacity_bytes
        self._progress = progress
        self._largest_image_bytes = 0
        self._refused_bytes = 0
        """The capacity that the last failed growth asked for."""
        self._conditions = Conditions()
        self._guard = threading.Lock()
        self._arena = self._attach(writable=writable)
        self._without_file: list[Arena] = []
        """Earlier arenas, whose file was removed, with images that are still used."""

    @property
    def path(self) -> Path:
        return self._folder / arena_name(self._slot)

    @property
    def capacity_bytes(self) -> int:
        return self._arena.capacity_bytes if self._arena else (self._configured_bytes or 0)

    @property
    def free_bytes(self) -> int:
        return self._arena.free_bytes if self._arena else 0

    @property
    def largest_free_bytes(self) -> int:
        return self._arena.largest_free_bytes if self._arena else 0

    # Images of an earlier start ----------------------------------------------------------------------

    def _attach(self, *, writable: bool) -> Arena | None:
        try:
            return Arena.attach(self.path, run=self._run, writable=writable)
        except KeyNotFoundError:
            return None

    def is_empty(self) -> bool:
        """Whether the arena has no sealed image, intact or damaged."""
        return not any(self._examine()) and not self._damage

    def images(self) -> dict[CheckpointId, SealedImage]:
        """Return the sealed images whose records are intact."""
        return self._examine()[0]

    def _examine(self) -> tuple[dict[CheckpointId, SealedImage], dict[Region, TierfallError]]:
        """Return the sealed images whose records are intact, and the errors of the others."""
        images: dict[CheckpointId, SealedImage] = {}
        damaged: dict[Region, TierfallError] = {}
        for region in self._regions():
            if not region.sealed:
                continue
            try:
                image = self._image(region)
            except TierfallError as error:
                damaged[region] = error
                continue
            except ValueError:
                if not region.is_discarded:  # another thread has released it just now
                    raise
                continue
            images[image.commit.lineage.checkpoint] = image
        return images, damaged

    def holds_damaged(self) -> bool:
        """Whether an image with damaged records is there, which no save has released yet."""
        return bool(self._damaged_regions())

    def release_damaged(self) -> None:
        """Release sealed images whose records are damaged; those of a newer tierfall are kept."""
        for region in self._damaged_regions():
            region.release()

    def _damaged_regions(self) -> list[Region]:
        errors = self._examine()[1]
        return [region for region, error in errors.items() if isinstance(error, IntegrityError)]

    @property
    def _damage(self) -> tuple[IntegrityError, ...]:
        """The errors of what was no image any more when the arena was attached."""
        return self._arena.damage if self._arena else ()

    def _regions(self) -> list[Region]:
        return [region for arena in self._arenas() for region in arena.regions()]

    def _arenas(self) -> list[Arena]:
        return [*self._without_file, *filter(None, [self._arena])]

    def _image(self, region: Region) -> SealedImage:
        commit = parse_commit(region.commit(), what=f"{self.name}: commit record in {self.path}")
        region.manifest()  # is compared with its digest
        if commit.lineage.run != self._run:
            raise ConfigError(
                f"{self.name}: {self.path} has an image of run {commit.lineage.run!r}, not of {self._run!r}"
            )
        return SealedImage(region=region, commit=commit, on_peers=ON_PEERS in region.marks())

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
            damaged=(*self._damage, *damaged.values()),
        )

    # Room --------------------------------------------------------------------------------------------

    def ensure_capacity(self, *, image_bytes: int, records_bytes: int) -> None:
        """Allocate the arena at the first save, or for an image that is brought back from another node. Grow it where
        the configuration sets no capacity and images have become larger, and where an earlier start's arena is smaller
        than the configured capacity.

        Raises CapacityError, with both numbers, where one image does not fit.
        """
        need = extent_bytes(image_bytes=image_bytes, records_bytes=records_bytes)
        if self._configured_bytes is not None and need > self._configured_bytes:
            raise CapacityError(
                f"tier {self.name}: one checkpoint takes {format_size(need)} ({need} bytes), its capacity is "
                f"{format_size(self._configured_bytes)} ({self._configured_bytes} bytes): raise the capacity to at "
                "least two checkpoints, so that one can be flushed while the next is captured"
            )
        with self._guard:
            if self._arena is None:
                prepare_folder(self._folder)  # a cleaner of temporary files may have removed it
                self._arena = self._create(
                    self._configured_bytes or self._default_bytes(image_bytes, need)
                )
                self._largest_image_bytes = image_bytes
                return
            current = self._arena.capacity_bytes
            if self._configured_bytes is not None:
                wanted = self._configured_bytes
            elif image_bytes > self._largest_image_bytes:
                wanted = max(self._images * need, int((self._images + SPARE) * image_bytes))
                wanted += self._bytes_of_others()  # they stay until a newer one is on a tier
            else:
                wanted = need
            self._largest_image_bytes = max(self._largest_image_bytes, image_bytes)
            if need > current or wanted > max(current, self._refused_bytes):
                self._grow(wanted, need=need)

    def _bytes_of_others(self) -> int:
        """Return the bytes of images that other ranks have saved."""
        regions = self._arena.regions() if self._arena else ()
        return sum(r.extent.length for r in regions if r.sealed and r.shard != self._shard)

    def _grow(self, capacity_bytes: int, *, need: int) -> None:
        """Raise the capacity; to ``need``, which one image needs, where memory for more is missing."""
        assert self._arena is not None
        try:
            self._arena.grow(capacity_bytes, self._progress)
        except CapacityError as error:
            if need > self._arena.capacity_bytes:
                if need >= capacity_bytes:
                    raise
                self._arena.grow(need, self._progress)
            self._refused_bytes = capacity_bytes
            self._conditions.report(
                self.name, logging.WARNING, "%s: continues with %s of memory: %s",
                self.name, format_size(self._arena.capacity_bytes), error,
            )  # fmt: skip
        else:
            size = format_size(self._arena.capacity_bytes)
            self._conditions.end(self.name, "%s: has %s of memory now", self.name, size)

    def allocate_now(self) -> None:
        """Give the arena its whole capacity at once where that is configured."""
        with self._guard:
            if self._configured_bytes is None:
                return
            if self._arena is None:
                self._arena = self._create(self._configured_bytes)
            elif self._arena.capacity_bytes < self._configured_bytes:
                self._grow(self._configured_bytes, need=0)

    def prepare(self, device: torch.device | None) -> None:
        """Prepare the memory that there is, in the background, for images that come from a ``device`` (None: from host
        memory). A save takes memory that is not prepared rather than waits."""
        with self._guard:
            if self._arena is not None:
                self._arena.prepare(device)

    @property
    def is_prepared(self) -> bool:
        """Whether the memory that there is is prepared, as far as ``prepare`` was told to."""
        with self._guard:
            return self._arena is None or self._arena.is_prepared

    def _default_bytes(self, image_bytes: int, need: int) -> int:
        room = room_for_arena(self._folder)
        return room.default_capacity_bytes(
            image_bytes=image_bytes, extent_bytes=need, images=self._images
        )

    def _create(self, capacity_bytes: int) -> Arena:
        return Arena.create(
            self.path,
            run=self._run,
            shard=self._shard,
            slot=self._slot,
            capacity_bytes=capacity_bytes,
            progress=self._progress,
        )

    def allocate(self, *, image_bytes: int, records_bytes: int) -> Region | None:
        with self._guard:
            if self._arena is None:
                return None
            return self._arena.allocate(
                image_bytes=image_bytes, records_bytes=records_bytes, shard=self._shard
            )

    def would_fit(
        self, *, image_bytes: int, records_bytes: int, without: Collection[object]
    ) -> bool:
        with self._guard:
            return self._arena is not None and self._arena.would_fit(
                image_bytes=image_bytes, records_bytes=records_bytes, without=without
            )

    # Its file ----------------------------------------------------------------------------------------

    def file_exists(self) -> bool:
        """Whether the next image will be in a file, or there is no arena. Raises BackendError where that is unknown."""
        return self._arena is None or self._arena.file_exists()

    def regions_without_file(self) -> Sequence[Region]:
        """Return the regions of images that end with this process, since the file was removed. Raises BackendError
        where that is unknown."""
        lost = [arena for arena in self._arenas() if not arena.file_exists()]
        return [region for arena in lost for region in arena.regions()]

    def replace_file(self) -> None:
        """If the arena's file was removed, allocate another arena for the next images. The images in the old one stay
        readable; its memory is freed once all are released.

        Raises CapacityError if memory is missing, and ConfigError if another file has the name: the old arena is used
        on then.
        """
        with self._guard:
            unused = [arena for arena in self._without_file if not arena.regions()]
            self._without_file = [each for each in self._without_file if each not in unused]
            old = self._arena
        for arena in unused:
            arena.close(keep=True)
        if old is None or old.file_exists():
            return
        old.check_place()
        new = self._create(old.capacity_bytes)
        with self._guard:
            self._without_file.append(old)
            self._arena = new

    # The end -----------------------------------------------------------------------------------------

    def discard(self) -> None:
        """Delete the arena's file, whatever is in it; who has mapped it may use it until then."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise BackendError(f"{self.name}: {self.path} cannot be removed: {error}") from error

    def close(self, *, keep: bool) -> None:
        """Close the arena; delete its file, and the images in it, unless ``keep``."""
        with self._guard:
            for arena in self._without_file:
                arena.close(keep=True)
            if self._arena is not None:
                # one that has no image yet, after the file was removed, would only hold memory
                has_use = bool(self._arena.regions()) or not self._without_file
                self._arena.close(keep=keep and has_use)


def damaged_arena_error(error: IntegrityError, path: Path) -> ConfigError:
    """Make the error of a start that finds an arena whose header is damaged."""
    return ConfigError(
        f"open: the host memory that an earlier start left is damaged: {error}. If nothing in it is needed, remove "
        f"{path} and start again; what was flushed is restored from the other tiers"
    )


def log_allocation(tier: str) -> Callable[[int, int], None]:
    """Return a function that logs the progress of allocating host memory, every PROGRESS_S seconds."""
    last = time.monotonic()

    def log(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PROGRESS_S and done < total:
            last = now
            logger.info("%s: allocating host memory: %d of %d MiB", tier, done >> 20, total >> 20)

    return log
