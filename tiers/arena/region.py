"""A region of an arena: one image while it is filled, sealed, marked, read and released.

It owns the order of the stores that make a region survive this process, and the verification of what is read back. It
must not know how space is allocated or how the file is created.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tierfall.core.format import documents
from tierfall.core.types.errors import CapacityError, IntegrityError
from tierfall.core.types.values import ByteRange, Shard
from tierfall.tiers.arena import layout
from tierfall.tiers.arena.file import ArenaFile
from tierfall.tiers.arena.layout import ControlBlock, RecordRange, Seal, padded

if TYPE_CHECKING:
    import torch


class ArenaState:
    """State shared by an arena and its regions: the file, one lock, and the allocated regions by control slot."""

    def __init__(self, file: ArenaFile) -> None:
        self.file = file
        self.guard = threading.RLock()
        self.regions: dict[int, Region] = {}
        self.closed = False

    @property
    def what(self) -> str:
        return f"arena {self.file.path}"

    def block(self, slot: int) -> ControlBlock:
        return ControlBlock(self.file.view, slot, what=self.what)

    def require_open(self, doing: str) -> None:
        if self.closed:
            raise ValueError(f"{self.what}: {doing}: it is closed")

    def require_writable(self, doing: str) -> None:
        self.require_open(doing)
        if not self.file.writable:
            raise ValueError(f"{self.what}: {doing}: it was attached with writable=False")


class Region:
    """One extent of an arena: filling, then sealed, perhaps unsealed, then released.

    ``extent`` is its byte range in the file, ``shard`` the image's.
    """

    def __init__(
        self,
        shared: ArenaState,
        *,
        slot: int,
        extent: ByteRange,
        image_bytes: int,
        shard: Shard,
    ) -> None:
        self.extent = extent
        self.image_bytes = image_bytes
        self.shard = shard
        self._shared = shared
        self._slot = slot
        self._seal: Seal | None = None
        self._released = False
        self._unsealed = False
        self._view = shared.file.view[extent.start : extent.end]

    @classmethod
    def adopted(cls, shared: ArenaState, slot: int, seal: Seal) -> Region:
        """Make the region that a seal in the file describes."""
        region = cls(
            shared,
            slot=slot,
            extent=seal.extent,
            image_bytes=seal.image_bytes,
            shard=seal.shard,
        )
        region._seal = seal
        return region

    @property
    def image(self) -> memoryview:
        """The image's bytes, at an address that is a multiple of 4096. Writable where the arena is."""
        self._require_allocated("reading the image")
        return self._view[: self.image_bytes]

    def tensor(self) -> torch.Tensor:
        """Return the image's memory as a uint8 tensor, without a copy; the arena must be writable."""
        import torch

        self._shared.require_writable("making a tensor")
        with torch.inference_mode(
            False
        ):  # an inference tensor could not be written to outside of that mode
            return torch.frombuffer(self.image, dtype=torch.uint8)

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` from byte ``start`` of the image. Pages of the mapping that are not touched yet stay so."""
        self._require_allocated("reading the image")
        self._shared.file.read_into(self.extent.start + start, view)

    @property
    def records_bytes(self) -> int:
        """The bytes reserved for the manifest and the commit record together."""
        return self.extent.length - padded(self.image_bytes)

    @property
    def sealed(self) -> bool:
        return self._seal is not None and not self._released

    @property
    def filling(self) -> bool:
        """Whether the image may be written to."""
        return self._seal is None and not self.is_discarded

    @property
    def is_discarded(self) -> bool:
        """Whether the region was unsealed or released."""
        return self._released or self._unsealed

    def seal(self, *, manifest: bytes, commit: bytes) -> None:
        """Write the records and the seal: from here on the image survives this process.

        All writes to the image must have ended. Raises CapacityError where the records exceed ``records_bytes``.
        """
        with self._changing("sealing") as block:
            if self._seal is not None or self._unsealed:
                raise ValueError(f"{self._what}: it was sealed already")
            if len(manifest) + len(commit) > self.records_bytes:
                raise CapacityError(
                    f"{self._what}: manifest and commit record are {len(manifest)} + {len(commit)} bytes, room is for "
                    f"{self.records_bytes}; allocate the region with larger `records_bytes`"
                )
            start = self.extent.start + padded(self.image_bytes)
            between = start + len(manifest)
            layout.store(self._view, start - self.extent.start, manifest)
            layout.store(self._view, between - self.extent.start, commit)
            seal = Seal(
                shard=self.shard,
                extent=self.extent,
                image_bytes=self.image_bytes,
                manifest=_record(start, manifest),
                commit=_record(between, commit),
            )
            block.write(seal)
            self._seal = seal

    def unseal(self) -> None:
        """Remove the seal, by one store: the image does not survive this process any more.

        Its bytes are kept for readers that have a view, until ``release``.
        """
        self._require_seal("unsealing")
        with self._changing("unsealing") as block:
            block.clear()
            self._seal = None
            self._unsealed = True

    def manifest(self) -> bytes:
        """Return the manifest, verified against the seal; raises IntegrityError where it differs."""
        with self._shared.guard:
            return self._verified("manifest", self._require_seal("reading the manifest").manifest)

    def commit(self) -> bytes:
        """Return the commit record, verified against the seal; raises IntegrityError where it differs."""
        with self._shared.guard:
            seal = self._require_seal("reading the commit record")
            return self._verified("commit record", seal.commit)

    def add_mark(self, data: bytes) -> None:
        """Append a mark; it survives this process once this returns. A kill meanwhile harms no older mark.

        Raises CapacityError where the marks of this region would exceed 28 KiB.
        """
        self._require_seal("marking")
        with self._changing("marking") as block:
            if len(data) > block.marks.room_bytes():
                raise CapacityError(
                    f"{self._what}: a mark of {len(data)} bytes does not fit, {max(0, block.marks.room_bytes())} are "
                    "left; flush the checkpoint to a lower tier, which has no such bound"
                )
            block.marks.append(data)

    def marks(self) -> tuple[bytes, ...]:
        """Return all marks, oldest first; raises IntegrityError where one is damaged."""
        with self._shared.guard:
            self._shared.require_open("reading the marks")
            self._require_allocated("reading the marks")
            if self._seal is None:
                return ()
            return self._shared.block(self._slot).marks.entries()

    def release(self) -> None:
        """Free the extent: the control slot first, so that no seal ever names reused bytes. May be called twice.

        Views of the image stay mapped, but see the bytes that are written there next: readers need a lease.
        """
        with self._shared.guard:
            if self._released or self._shared.closed:
                return
            with self._changing("releasing") as block:
                if self._seal is not None:
                    block.clear()
                self._released = True
                self._view = memoryview(b"")
                del self._shared.regions[self._slot]

    def drop_view(self) -> None:
        """Drop the view of a closed arena, so that a reference to this region does not keep its memory mapped."""
        self._view = memoryview(b"")

    @contextlib.contextmanager
    def _changing(self, doing: str) -> Iterator[ControlBlock]:
        """Lock the arena for a change of this region's control block."""
        with self._shared.guard:
            self._shared.require_writable(doing)
            self._require_allocated(doing)
            yield self._shared.block(self._slot)

    @property
    def _what(self) -> str:
        return f"{self._shared.what}: region at {self.extent.start}"

    def _require_allocated(self, doing: str) -> None:
        if self._released:
            raise ValueError(f"{self._what}: {doing}: it was released")

    def _require_seal(self, doing: str) -> Seal:
        self._require_allocated(doing)
        if self._seal is None:
            raise ValueError(f"{self._what}: {doing}: it is not sealed yet")
        return self._seal

    def _verified(self, name: str, record: RecordRange) -> bytes:
        start = record.range.start - self.extent.start
        data = bytes(self._view[start : start + record.range.length])
        if documents.sha256(data) != record.digest:
            raise IntegrityError(
                f"{self._what}: its {name} differs from the seal's digest: this copy is damaged; restore from another "
                "tier, and release the region"
            )
        return data


def _record(start: int, data: bytes) -> RecordRange:
    span = ByteRange(start=start, end=start + len(data))
    return RecordRange(range=span, digest=documents.sha256(data))
