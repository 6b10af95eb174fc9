"""The arena: one rank's host tier, cut into regions that each hold an image with its manifest and commit record.

Owns what is free, and the order in which a region is filled, sealed, marked and released, so that after a SIGKILL at
any moment exactly the sealed images are there and the rest is free. It must not know what a manifest says, which copy
is worth keeping, or who owns the run: whoever creates or attaches an arena for writing holds the lock of its slot.

A region that is being filled exists in this process only. Its seal goes into the file last, by one store. After a fork
the child shares the memory: it must neither allocate nor seal, and it keeps the pages of a removed arena until it ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from pathlib import Path

from tierfall.core.types.errors import ConfigError, IntegrityError
from tierfall.core.types.keys import check_name
from tierfall.core.types.values import ByteRange, Shard
from tierfall.tiers.arena import layout as layout
from tierfall.tiers.arena.file import ArenaFile, Progress
from tierfall.tiers.arena.folder import (
    RoomReport,
    default_folder,
    prepare_folder,
    room_for_arena,
    sized,
)
from tierfall.tiers.arena.layout import (
    EXTENTS_START,
    PAGE_BYTES,
    SLOT_COUNT,
    ArenaHeader,
    Seal,
    padded,
)
from tierfall.tiers.arena.region import ArenaState, Region

__all__ = [
    "Arena",
    "Region",
    "RoomReport",
    "arena_name",
    "default_folder",
    "extent_bytes",
    "lock_name",
    "prepare_folder",
    "room_for_arena",
]

logger = logging.getLogger(__name__)

LARGE_PAGE_BYTES = 2 << 20


def arena_name(slot: int) -> str:
    return f"slot-{slot}.arena"


def lock_name(slot: int) -> str:
    return f"slot-{slot}.lock"


def extent_bytes(*, image_bytes: int, records_bytes: int) -> int:
    """Return what one image takes from an arena's capacity, its manifest and commit record included."""
    return padded(image_bytes) + padded(records_bytes)


class Arena:
    """One arena file, open in this process. Its methods may be called from several threads."""

    def __init__(self, file: ArenaFile) -> None:
        self._shared = ArenaState(file)
        self._damage: list[IntegrityError] = []

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        run: str,
        shard: Shard,
        slot: int,
        capacity_bytes: int,
        progress: Progress | None = None,
        page_lock: bool = True,
    ) -> Arena:
        """Create an arena whose regions may together take ``capacity_bytes`` (rounded up to 4 KiB).

        The file is 2 MiB larger. Its pages are reserved, faulted in and, with ``page_lock`` and a CUDA device, locked.
        ``progress`` is called with bytes done and bytes in all. A kill in the middle leaves no arena. Raises
        CapacityError, naming what is needed and what there is; ConfigError where there is an arena already.
        """
        header = ArenaHeader(
            run=check_name(run, what=f"arena {path}: run"),
            shard=shard,
            slot=slot,
            capacity_bytes=_checked_capacity(path, capacity_bytes),
            created_wall_s=time.time(),
        )
        return cls(ArenaFile.create(path, header, page_lock=page_lock, progress=progress))

    @classmethod
    def attach(
        cls, path: Path, *, run: str, writable: bool = True, page_lock: bool = True
    ) -> Arena:
        """Open an arena that an earlier process left, with its sealed regions; everything else in it is free.

        A region whose seal is damaged is not there: ``damage`` says so, and so does the log. With ``writable=False``
        nothing is changed, and the owner may be alive: what it releases meanwhile reads as damaged.

        Raises KeyNotFoundError where there is no file, ConfigError for one that is not this run's arena,
        NotSupportedError for one that a newer tierfall wrote, IntegrityError for a damaged or truncated one.
        """
        arena = cls(ArenaFile.attach(path, run=run, writable=writable, page_lock=page_lock))
        try:
            arena._adopt()
        except BaseException:
            arena.close(keep=True)
            raise
        return arena

    @property
    def path(self) -> Path:
        return self._shared.file.path

    @property
    def run(self) -> str:
        return self._shared.file.header.run

    @property
    def shard(self) -> Shard:
        """The rank that created the arena; a region names its own."""
        return self._shared.file.header.shard

    @property
    def slot(self) -> int:
        return self._shared.file.header.slot

    @property
    def capacity_bytes(self) -> int:
        return self._shared.file.capacity_bytes

    @property
    def damage(self) -> tuple[IntegrityError, ...]:
        """What was found damaged when the arena was attached."""
        return tuple(self._damage)

    @property
    def free_bytes(self) -> int:
        return sum(gap.length for gap in self._gaps(self.regions()))

    @property
    def largest_free_bytes(self) -> int:
        """The largest extent that could be allocated now."""
        return max((gap.length for gap in self._gaps(self.regions())), default=0)

    @property
    def free_slots(self) -> int:
        """How many further regions the table of control slots has room for."""
        return SLOT_COUNT - len(self._shared.living)

    def regions(self) -> tuple[Region, ...]:
        """Return the living regions, filling and sealed, in the order of their place."""
        with self._shared.guard:
            return tuple(
                sorted(self._shared.living.values(), key=lambda region: region.extent.start)
            )

    def allocate(
        self,
        *,
        image_bytes: int,
        records_bytes: int,
        shard: Shard | None = None,
        replica: bool = False,
    ) -> Region | None:
        """Take an extent for an image and at most ``records_bytes`` of manifest and commit record; None without room.

        ``shard`` says whose image it will be (the arena's, left out), ``replica`` that another node has the original.
        The bytes of the image are whatever was there before.
        """
        if image_bytes < 1 or records_bytes < 0:
            raise ValueError(
                f"arena {self.path}: cannot allocate {image_bytes} + {records_bytes} bytes"
            )
        with self._shared.guard:
            self._shared.require_writable("allocating")
            length = extent_bytes(image_bytes=image_bytes, records_bytes=records_bytes)
            start = _first_fit(self._gaps(self.regions()), length)
            slot = next(
                (slot for slot in range(SLOT_COUNT) if slot not in self._shared.living), None
            )
            if start is None or slot is None:
                return None
            region = Region(
                self._shared,
                slot=slot,
                extent=ByteRange(start=start, end=start + length),
                image_bytes=image_bytes,
                shard=self.shard if shard is None else shard,
                replica=replica,
            )
            self._shared.living[slot] = region
            return region

    def would_fit(
        self, *, image_bytes: int, records_bytes: int, without: Collection[object]
    ) -> bool:
        """Say whether ``allocate`` would find an extent if the regions ``without`` were released."""
        length = extent_bytes(image_bytes=image_bytes, records_bytes=records_bytes)
        gone = {id(region) for region in without}
        with self._shared.guard:
            left = tuple(region for region in self.regions() if id(region) not in gone)
            return len(left) < SLOT_COUNT and _first_fit(self._gaps(left), length) is not None

    def grow(self, capacity_bytes: int, progress: Progress | None = None) -> None:
        """Raise the capacity. Living regions stay where they are, and views of them stay valid.

        Raises CapacityError, and changes nothing, where there is no room; ConfigError for less than there is.
        """
        with self._shared.guard:
            self._shared.require_writable("growing")
            capacity_bytes = _checked_capacity(self.path, capacity_bytes)
            if capacity_bytes < self.capacity_bytes:
                raise ConfigError(
                    f"arena {self.path}: cannot shrink from {sized(self.capacity_bytes)} to {sized(capacity_bytes)}; "
                    "close it and create a smaller one"
                )
            if capacity_bytes > self.capacity_bytes:
                self._shared.file.grow(capacity_bytes, progress)

    def file_is_there(self) -> bool:
        """Say whether the path still names the arena's file, or the arena is closed: nobody misses it then.

        Raises BackendError where that cannot be found out.
        """
        with self._shared.guard:
            return self._shared.closed or self._shared.file.is_there()

    def unlock_pages(self) -> bool:
        """Unlock the pages, which ``renew_file`` asks for; False while an image is filled, perhaps by a device.

        No device may read an image either.
        """
        with self._shared.guard:
            if any(region.filling for region in self._shared.living.values()):
                return False
            if not self._shared.closed:
                self._shared.file.unlock_pages()
            return True

    @property
    def renewing(self) -> bool:
        """Whether ``renew_file`` is half done."""
        return self._shared.file.renewing

    def renew_file(self) -> bool:
        """Go on making the file anew that somebody has removed: by a few MiB, until ``file_is_there``.

        False where what is left has to wait for an image that is being filled. Views stay valid. Raises CapacityError
        without room, ConfigError where another file has the name, BackendError; all stays usable.
        """
        with self._shared.guard:
            if self._shared.closed:
                return False
            self._shared.require_writable("making its file anew")
            living = self._shared.living.values()
            return self._shared.file.renew([r.extent for r in living if r.filling])

    def close(self, *, keep: bool) -> None:
        """Let go of the arena, and delete its file unless ``keep``. May be called twice.

        The memory goes with the last view of it. Copies from the device must have ended: the pages are unlocked.
        """
        with self._shared.guard:
            if self._shared.closed:
                return
            self._shared.closed = True
            for region in self._shared.living.values():
                region.let_go()
            self._shared.living.clear()
            try:
                if not keep and self._shared.file.writable:
                    self._shared.file.remove()
            finally:
                self._shared.file.forget()

    def _adopt(self) -> None:
        """Find the sealed regions; on the way, empty the slots that cannot be believed."""
        seals: dict[int, Seal] = {}
        damage: dict[int, IntegrityError] = {}
        for slot in range(SLOT_COUNT):
            try:
                seal = self._shared.block(slot).read(self.capacity_bytes)
            except IntegrityError as error:
                damage[slot] = error
                continue
            if seal is not None:
                seals[slot] = seal
        for slot in layout.overlapping(seals):
            del seals[slot]
            what = self._shared.block(slot).what
            damage[slot] = IntegrityError(f"{what}: its extent overlaps another region's")
        # Only now: a slot that a newer tierfall wrote refuses the arena, and must leave it as it was.
        for slot, reason in sorted(damage.items()):
            self._note_damage(slot, reason)
        for slot, seal in seals.items():
            self._shared.living[slot] = Region.adopted(self._shared, slot, seal)

    def _note_damage(self, slot: int, error: IntegrityError) -> None:
        logger.warning("%s; its image in host memory is given up", error)
        self._damage.append(error)
        if self._shared.file.writable:
            self._shared.block(slot).clear()

    def _gaps(self, regions: tuple[Region, ...]) -> list[ByteRange]:
        """Return what lies between those regions, and behind the last."""
        with self._shared.guard:
            start = EXTENTS_START
            gaps = []
            for region in regions:
                gaps.append(ByteRange(start=start, end=region.extent.start))
                start = region.extent.end
            gaps.append(ByteRange(start=start, end=EXTENTS_START + self.capacity_bytes))
            return [gap for gap in gaps if gap.length > 0]


def _checked_capacity(path: Path, capacity_bytes: int) -> int:
    if not PAGE_BYTES <= capacity_bytes <= layout.CAPACITY_BYTES_MAX:
        raise ConfigError(
            f"arena {path}: capacity {capacity_bytes} bytes; expected {PAGE_BYTES} to {layout.CAPACITY_BYTES_MAX}"
        )
    return padded(capacity_bytes)


def _first_fit(gaps: list[ByteRange], length: int) -> int | None:
    """Choose a start: the first gap that takes it at a multiple of 2 MiB (where it is that long), else the first."""
    if length >= LARGE_PAGE_BYTES:
        for gap in gaps:
            start = padded(gap.start, LARGE_PAGE_BYTES)
            if start + length <= gap.end:
                return start
    return next((gap.start for gap in gaps if gap.length >= length), None)
