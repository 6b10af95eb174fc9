"""The arena: one rank's host tier, divided into regions that each hold an image with its manifest and commit record.

It owns the free space, and the order in which a region is filled, sealed, marked and released: after a SIGKILL at any
moment the arena has exactly the sealed images, and the rest is free. It must not know the content of a manifest, which
copy to keep, or who owns the run: a process that creates or attaches an arena for writing has the lock of its slot.

A region that is being filled exists in this process only. Its seal is written to the file last, by one store. A forked
child must neither allocate nor seal, and it keeps the pages of a removed arena until it exits.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from tierfall.core.types.errors import ConfigError, IntegrityError
from tierfall.core.types.keys import check_name
from tierfall.core.types.values import ByteRange, Shard
from tierfall.tiers.arena import layout
from tierfall.tiers.arena.file import ArenaFile, Progress
from tierfall.tiers.arena.folder import sized
from tierfall.tiers.arena.layout import (
    EXTENTS_START,
    PAGE_BYTES,
    SLOT_COUNT,
    ArenaHeader,
    Seal,
    padded,
)
from tierfall.tiers.arena.preparation import Preparation
from tierfall.tiers.arena.region import ArenaState, Region

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("tierfall")

LARGE_PAGE_BYTES = 2 << 20
ALIGNED_BYTES_MIN = 16 * LARGE_PAGE_BYTES


def arena_name(slot: int) -> str:
    return f"slot-{slot}.arena"


def lock_name(slot: int) -> str:
    return f"slot-{slot}.lock"


def extent_bytes(*, image_bytes: int, records_bytes: int) -> int:
    """Return the bytes of an arena that one image uses, its manifest and commit record included."""
    return padded(image_bytes) + padded(records_bytes)


class Arena:
    """One arena file, open in this process. Its methods may be called from several threads."""

    def __init__(self, file: ArenaFile) -> None:
        self._shared = ArenaState(file)
        self._damage: list[IntegrityError] = []
        self._preparation = Preparation(self)

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
    ) -> Arena:
        """Create an arena whose regions may together use ``capacity_bytes`` (rounded up to 4 KiB).

        The file is 2 MiB larger. Its pages are reserved; ``prepare`` touches and locks them. ``progress`` is called
        with the bytes done and the total. A kill before this returns leaves no arena. Raises CapacityError with the
        needed and the available bytes; ConfigError where there is an arena already.
        """
        header = ArenaHeader(
            run=check_name(run, what=f"arena {path}: run"),
            shard=shard,
            slot=slot,
            capacity_bytes=_checked_capacity(path, capacity_bytes),
        )
        return cls(ArenaFile.create(path, header, progress=progress))

    @classmethod
    def attach(cls, path: Path, *, run: str, writable: bool = True) -> Arena:
        """Open the arena of an earlier process, with its sealed regions; everything else in it is free.

        A region whose seal is damaged is left out, logged, and reported by ``damage``. With ``writable=False`` the file
        is not changed, and its owner may be alive: a region that it releases then reads as damaged.

        Raises KeyNotFoundError where there is no file, ConfigError for one that is not this run's arena,
        NotSupportedError for one that a newer tierfall wrote, IntegrityError for a damaged or truncated one.
        """
        arena = cls(ArenaFile.attach(path, run=run, writable=writable))
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
    def capacity_bytes(self) -> int:
        return self._shared.file.capacity_bytes

    @property
    def damage(self) -> tuple[IntegrityError, ...]:
        """One error for each region that was damaged when the arena was attached."""
        return tuple(self._damage)

    @property
    def free_bytes(self) -> int:
        return sum(gap.length for gap in self._gaps(self.regions()))

    @property
    def largest_free_bytes(self) -> int:
        """The largest extent that ``allocate`` would find now."""
        return max((gap.length for gap in self._gaps(self.regions())), default=0)

    def regions(self) -> tuple[Region, ...]:
        """Return the allocated regions, filling and sealed, by offset."""
        with self._shared.guard:
            return tuple(
                sorted(self._shared.regions.values(), key=lambda region: region.extent.start)
            )

    def allocate(
        self,
        *,
        image_bytes: int,
        records_bytes: int,
        shard: Shard | None = None,
    ) -> Region | None:
        """Allocate an extent for an image and at most ``records_bytes`` of manifest and commit record; None where no
        gap or control slot is free.

        ``shard`` is the image's (by default the arena's). The bytes of the image are not cleared.
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
                (slot for slot in range(SLOT_COUNT) if slot not in self._shared.regions), None
            )
            if start is None or slot is None:
                return None
            region = Region(
                self._shared,
                slot=slot,
                extent=ByteRange(start=start, end=start + length),
                image_bytes=image_bytes,
                shard=shard or self._shared.file.header.shard,
            )
            self._shared.regions[slot] = region
            return region

    def would_fit(
        self, *, image_bytes: int, records_bytes: int, without: Collection[object]
    ) -> bool:
        """Whether ``allocate`` would find an extent if the regions ``without`` were released."""
        length = extent_bytes(image_bytes=image_bytes, records_bytes=records_bytes)
        released = {id(region) for region in without}
        with self._shared.guard:
            rest = tuple(region for region in self.regions() if id(region) not in released)
            return len(rest) < SLOT_COUNT and _first_fit(self._gaps(rest), length) is not None

    def grow(self, capacity_bytes: int, progress: Progress | None = None) -> None:
        """Raise the capacity. Regions keep their offsets, and views of them stay valid.

        Raises CapacityError, and changes nothing, where memory is missing; ConfigError for a smaller capacity.
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
                self._preparation.resume()

    def prepare(self, device: torch.device | None) -> None:
        """Touch the pages in the background and, for copies from a ``device``, lock them; see ``Preparation``."""
        self._shared.require_writable("preparing its memory")
        self._preparation.begin(device)

    @property
    def is_prepared(self) -> bool:
        """Whether all pages are touched and, for copies from the device that ``prepare`` was given, locked."""
        return not self.unprepared_pieces(self._preparation.device)

    def unprepared_pieces(self, device: torch.device | None) -> list[int]:
        """The pieces of the file that are not prepared for copies from a ``device``: those of free space first, in the
        order of ``allocate``."""
        with self._shared.guard:
            file = self._shared.file
            if self._shared.closed:
                return []
            prepared = file.prepared_pieces(device)
            whole = ByteRange(start=0, end=EXTENTS_START + self.capacity_bytes)
            if len(prepared) == len(file.pieces_of(whole)):
                return []
            spans = (*self._gaps(self.regions()), whole)
            pieces = dict.fromkeys(piece for span in spans for piece in file.pieces_of(span))
            return [piece for piece in pieces if piece not in prepared]

    def _is_filled_in(self, piece: int) -> bool:
        """Whether an image is being filled in a piece of the file."""
        span = self._shared.file.range_of(piece)
        filling = (region.extent for region in self._shared.regions.values() if region.filling)
        return any(each.start < span.end and span.start < each.end for each in filling)

    def touch(self, span: ByteRange) -> bool:
        """Touch the pages of a range of the file; False if there is no such range."""
        return not self._shared.closed and self._shared.file.touch(span)

    def set_prepared(self, piece: int, device: torch.device | None) -> bool:
        """Lock a piece that is touched, for copies from a ``device``; False while an image in it is being filled: a
        copy to memory that is locked in part is refused, so that locks do not change under a copy."""
        with self._shared.guard:
            file = self._shared.file
            if self._shared.closed:
                return False
            busy = self._is_filled_in(piece)
            file.set_prepared(piece, None if busy else device)
            return not busy

    def file_exists(self) -> bool:
        """Whether the path still names the arena's file; True for a closed arena, which needs none.

        Raises BackendError where that is unknown.
        """
        with self._shared.guard:
            return self._shared.closed or self._shared.file.exists()

    def check_place(self) -> None:
        """Raise ConfigError if no other arena may take the place of this one, whose file was removed."""
        with self._shared.guard:
            self._shared.require_open("making another one")
            self._shared.file.check_place()

    def close(self, *, keep: bool) -> None:
        """Close the arena, and delete its file unless ``keep``. May be called twice.

        The memory is freed with the last view of it. Copies from the device must have ended: the pages are unlocked.
        """
        self._preparation.close()
        with self._shared.guard:
            if self._shared.closed:
                return
            self._shared.closed = True
            for region in self._shared.regions.values():
                region.drop_view()
            self._shared.regions.clear()
            try:
                if not keep and self._shared.file.writable:
                    self._shared.file.remove()
            finally:
                self._shared.file.release()

    def _adopt(self) -> None:
        """Read the seals; clear the control slots whose seal is damaged or overlaps another."""
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
        # After the loop: a slot of a newer tierfall raises above, and then the arena must not have been changed.
        for slot, reason in sorted(damage.items()):
            self._note_damage(slot, reason)
        for slot, seal in seals.items():
            self._shared.regions[slot] = Region.adopted(self._shared, slot, seal)

    def _note_damage(self, slot: int, error: IntegrityError) -> None:
        logger.warning("%s; its image in host memory is lost", error)
        self._damage.append(error)
        if self._shared.file.writable:
            self._shared.block(slot).clear()

    def _gaps(self, regions: tuple[Region, ...]) -> list[ByteRange]:
        """Return the ranges between those regions, and after the last."""
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
    """Return the offset of the first gap of that length. A large extent gets an offset that is a multiple of 2 MiB if
    some gap allows it, for large pages; of a small one too much room would be lost between two of them."""
    if length >= ALIGNED_BYTES_MIN:
        for gap in gaps:
            start = padded(gap.start, LARGE_PAGE_BYTES)
            if start + length <= gap.end:
                return start
    return next((gap.start for gap in gaps if gap.length >= length), None)
