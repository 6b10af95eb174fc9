"""Values and enumerations that all folders use.

All are frozen and own no bytes, so a policy may keep one and a thread may read one without a lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MEMORY_IMAGES_MAX = 63
"""How many images one rank's host memory holds at most."""


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """A checkpoint's identity: its training step and the number of the attempt that saved it; ``400@7`` in text."""

    step: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.step}@{self.attempt}"


@dataclass(frozen=True, slots=True)
class Shard:
    """Identifies an image within a checkpoint: a rank, and the number of ranks that saved."""

    rank: int
    world_size: int


class TierKind(StrEnum):
    """The kinds of tier, in the order that a chain of tiers must have."""

    DEVICE = "device"
    HOST = "host"
    PEER = "peer"
    FILE = "file"
    OBJECT = "object"


class Codec(StrEnum):
    """How the chunks of a stored image are packed; ``none`` stores the raw image."""

    NONE = "none"
    ZSTD = "zstd"
    PLANES = "planes"


class Driver(StrEnum):
    """The client library of an object store, in place of the one that is chosen by its address."""

    FSSPEC = "fsspec"


class LossClass(StrEnum):
    """What one failure may destroy; a copy survives its own class and every smaller one. Ordered by extent, not as
    text."""

    NONE = "none"
    PROCESS = "process"
    NODE = "node"
    SITE = "site"

    def covers(self, other: LossClass) -> bool:
        """Whether a loss of this class includes a loss of the other."""
        return self >= other

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
        """The rank in the order of classes: larger where more is lost."""
        return _EXTENTS[self]


_EXTENTS: dict[str, int] = {loss: extent for extent, loss in enumerate(LossClass)}
LOSS_CLASSES = (LossClass.PROCESS, LossClass.NODE, LossClass.SITE)


def survives(kind: TierKind, *, shared: bool) -> LossClass:
    """The largest loss that a copy on such a tier survives. ``shared``: all nodes see the tier's files."""
    match kind:
        case TierKind.DEVICE:
            return LossClass.NONE
        case TierKind.HOST:
            return LossClass.PROCESS
        case TierKind.PEER:
            return LossClass.NODE
        case TierKind.FILE:
            return LossClass.NODE if shared else LossClass.PROCESS
        case TierKind.OBJECT:
            return LossClass.SITE


class CopyState(StrEnum):
    """The state of a checkpoint's copy on a tier."""

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
    """The outcome of a save."""

    PENDING = "pending"
    SAVED = "saved"
    SKIPPED = "skipped"
    SUPERSEDED = "superseded"
    FAILED = "failed"


class CaptureMode(StrEnum):
    """Whether a save returns before the state is copied."""

    LAZY = "lazy"
    BLOCKING = "blocking"


class Verify(StrEnum):
    """How much of a lazily captured image is compared with what ``save`` read of the state."""

    SAMPLE = "sample"
    FULL = "full"
    OFF = "off"


class WhenFull(StrEnum):
    """What a save does when the host tier has no room."""

    WAIT = "wait"
    SKIP = "skip"
    SUPERSEDE = "supersede"


class Direction(StrEnum):
    """Whether a lower or a higher metric is better."""

    MIN = "min"
    MAX = "max"


class OnError(StrEnum):
    """Whether a failed flush is logged, or raised in the training loop."""

    WARN = "warn"
    RAISE = "raise"


class ExportFormat(StrEnum):
    """The format of an export, or of what is imported."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


class ExportDtype(StrEnum):
    """The dtypes that an export converts tensors of floating-point numbers to."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
