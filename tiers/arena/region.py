"""A region of an arena: one image while it is filled, sealed, marked, read and released.

Owns the order of the stores that make a region survive this process, and the checks of what is read back. It must not
know how space is found, nor how the file came to be.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tierfall.core.format import documents
from tierfall.core.types.errors import CapacityError, IntegrityError
from tierfall.core.types.values import ByteRange, Shard
from tierfall.tiers.arena import layout as layout
from tierfall.tiers.arena.file import ArenaFile
from tierfall.tiers.arena.layout import ControlBlock, RecordPlace, Seal, padded

if TYPE_CHECKING:
    import torch


class ArenaState:
    """What an arena and its regions have in common: the file, one guard, and the living regions by control slot."""

    def __init__(self, file: ArenaFile) -> None:
        self.file = file
        self.guard = threading.RLock()
        self.living: dict[int, Region] = {}
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

    ``extent`` is its place in the file; ``shard`` whose image it is; ``replica`` whether another node has the original.
    """

    def __init__(
        self,
        shared: ArenaState,
        *,
        slot: int,
        extent: ByteRange,
        image_bytes: int,
        shard: Shard,
        replica: bool,
    ) -> None:
        self.extent = extent
        self.image_bytes = image_bytes
        self.shard = shard
        self.replica = replica
        self._shared = shared
        self._slot = slot
        self._seal: Seal | None = None
        self._released = False
        self._unsealed = False
        self._view = shared.file.view[extent.start : extent.end]

    @classmethod
    def adopted(cls, shared: ArenaState, slot: int, seal: Seal) -> Region:
        """The region that a seal in the file describes."""
        region = cls(
            shared,
            slot=slot,
            extent=seal.extent,
            image_bytes=seal.image_bytes,
            shard=seal.shard,
            replica=seal.replica,
        )
        region._seal = seal
        return region

    @property
    def image(self) -> memoryview:
        """The image's bytes; their address is a multiple of 4096. Writable where the arena is."""
        self._require_living("reading the image")
        return self._view[: self.image_bytes]

    def tensor(self) -> torch.Tensor:
        """Return the image's memory as a uint8 tensor, without a copy; the arena must be writable."""
        import torch

        self._shared.require_writable("making a tensor")
        with torch.inference_mode(False):  # whoever writes there later may be in no such mode
            return torch.frombuffer(self.image, dtype=torch.uint8)

    @property
    def records_bytes(self) -> int:
        """How long manifest and commit record may be together."""
        return self.extent.length - padded(self.image_bytes)

    @property
    def sealed(self) -> bool:
        return self._seal is not None and not self._released

    @property
    def filling(self) -> bool:
        """Say whether its image may be written to."""
        return self._seal is None and not self.given_up

    @property
    def given_up(self) -> bool:
        """Say whether it was unsealed or released."""
        return self._released or self._unsealed

    def seal(self, *, manifest: bytes, commit: bytes) -> None:
        """Declare the image complete: from here on it survives this process.

        Whatever fills the image has ended. Raises CapacityError where the records are longer than was asked for.
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
                replica=self.replica,
                extent=self.extent,
                image_bytes=self.image_bytes,
                manifest=_record(start, manifest),
                commit=_record(between, commit),
            )
            block.write(seal)
            self._seal = seal

    def unseal(self) -> None:
        """Take the seal away, by one store: the image does not survive this process any more.

        Its bytes stay as they are, for whoever still reads them, until ``release``.
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
        """Append a mark; it survives this process once this returns, and older marks whatever happens.

        Raises CapacityError where the marks of this region take all their room (28 KiB).
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
            self._require_living("reading the marks")
            if self._seal is None:
                return ()
            return self._shared.block(self._slot).marks.entries()

    def release(self) -> None:
        """Give the extent back: the control slot first, so that no seal ever names reused bytes. May be called twice.

        Views of the image stay mapped but see what is written there next: whoever holds one has a lease.
        """
        with self._shared.guard:
            if self._released or self._shared.closed:
                return
            with self._changing("releasing") as block:
                if self._seal is not None:
                    block.clear()
                self._released = True
                self._view = memoryview(b"")
                del self._shared.living[self._slot]

    def let_go(self) -> None:
        """The arena is closed: hold its memory no longer. Whoever holds this region may do so for long."""
        self._view = memoryview(b"")

    @contextlib.contextmanager
    def _changing(self, doing: str) -> Iterator[ControlBlock]:
        """Guard a change of this living region's control block."""
        with self._shared.guard:
            self._shared.require_writable(doing)
            self._require_living(doing)
            yield self._shared.block(self._slot)

    @property
    def _what(self) -> str:
        return f"{self._shared.what}: region at {self.extent.start}"

    def _require_living(self, doing: str) -> None:
        if self._released:
            raise ValueError(f"{self._what}: {doing}: it was released")

    def _require_seal(self, doing: str) -> Seal:
        self._require_living(doing)
        if self._seal is None:
            raise ValueError(f"{self._what}: {doing}: it is not sealed yet")
        return self._seal

    def _verified(self, name: str, record: RecordPlace) -> bytes:
        start = record.place.start - self.extent.start
        data = bytes(self._view[start : start + record.place.length])
        if documents.sha256(data) != record.digest:
            raise IntegrityError(
                f"{self._what}: its {name} differs from the seal's digest: this copy is damaged; restore from another "
                "tier, and release the region"
            )
        return data


def _record(start: int, data: bytes) -> RecordPlace:
    place = ByteRange(start=start, end=start + len(data))
    return RecordPlace(place=place, digest=documents.sha256(data))
