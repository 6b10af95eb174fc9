"""The small values that every room passes around: identities, states, orders, decisions.

They describe; they own nothing. All are frozen, so a policy may keep one and a thread may read one without a lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """A checkpoint's identity: its training step and the number of the attempt that saved it; ``400@7`` in text."""

    step: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.step}@{self.attempt}"


@dataclass(frozen=True, slots=True)
class Shard:
    """Whose image it is: a rank of a world."""

    rank: int
    world_size: int


class TierKind(StrEnum):
    """The kinds of tier, in the order in which a chain may hold them."""

    DEVICE = "device"
    HOST = "host"
    FILE = "file"
    OBJECT = "object"


class Codec(StrEnum):
    """How the chunks of a stored image are packed; ``none`` stores the image as it is."""

    NONE = "none"
    ZSTD = "zstd"
    PLANES = "planes"


class Driver(StrEnum):
    """The library that speaks to an object store; ``s3://`` has a client of its own, whatever is named."""

    OBSTORE = "obstore"
    FSSPEC = "fsspec"


class LossClass(StrEnum):
    """What may be lost at one blow; a copy survives its own class and every smaller one. They compare by how much is
    lost, never as text."""

    NONE = "none"
    PROCESS = "process"
    NODE = "node"
    SITE = "site"

    def covers(self, other: LossClass) -> bool:
        """Say whether a loss of this class is one of the other, too."""
        return self.extent >= other.extent

    def __lt__(self, other: str) -> bool:
        return _EXTENTS[self] < _EXTENTS[other]

    def __le__(self, other: str) -> bool:
        return _EXTENTS[self] <= _EXTENTS[other]

    def __gt__(self, other: str) -> bool:
        return _EXTENTS[self] > _EXTENTS[other]

    def __ge__(self, other: str) -> bool:
        return _EXTENTS[self] >= _EXTENTS[other]

    @property
    def extent(self) -> int:
        """Say how much is lost: larger where more is."""
        return _EXTENTS[self]


_EXTENTS: dict[str, int] = {loss: extent for extent, loss in enumerate(LossClass)}
LOSS_CLASSES = (LossClass.PROCESS, LossClass.NODE, LossClass.SITE)


def survives(kind: TierKind, *, shared: bool) -> LossClass:
    """Say the largest loss that a copy on such a tier survives."""
    match kind:
        case TierKind.DEVICE:
            return LossClass.NONE
        case TierKind.HOST:
            return LossClass.PROCESS
        case TierKind.FILE:
            return LossClass.NODE if shared else LossClass.PROCESS
        case TierKind.OBJECT:
            return LossClass.SITE


class CopyState(StrEnum):
    """Where a copy of a snapshot on a tier stands."""

    ABSENT = "absent"
    ARRIVING = "arriving"
    SEALED = "sealed"
    COMMITTED = "committed"
    LEAVING = "leaving"


class Changes(StrEnum):
    """When the training loop may change a tensor: only inside the optimizer's step, or at any time."""

    ON_STEP = "on_step"
    ANYTIME = "anytime"


class SaveOutcome(StrEnum):
    """What became of a save."""

    PENDING = "pending"
    SAVED = "saved"
    SKIPPED = "skipped"
    SUPERSEDED = "superseded"
    FAILED = "failed"


class CaptureMode(StrEnum):
    """Whether a save returns before the state is copied."""

    LAZY = "lazy"
    BLOCKING = "blocking"
    AUTO = "auto"


class Verify(StrEnum):
    """How much of a lazily captured image is compared with the state as it was at save."""

    SAMPLE = "sample"
    FULL = "full"
    OFF = "off"


class WhenFull(StrEnum):
    """What a save does when the host tier has no room."""

    WAIT = "wait"
    SKIP = "skip"
    SUPERSEDE = "supersede"


class Direction(StrEnum):
    """Which end of a metric is the good one."""

    MIN = "min"
    MAX = "max"


class OnError(StrEnum):
    """What a failed flush does to the training loop."""

    WARN = "warn"
    RAISE = "raise"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Bytes ``start`` up to, not including, ``end``."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start
