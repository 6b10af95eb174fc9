"""Snapshots: one rank's image at one step, from the call of save until it is sealed; used by capture and
coordinator."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tierfall.core.format.records import (
    Commit,
    ImagePlan,
    Lineage,
    Manifest,
    Progress,
)
from tierfall.core.types.values import CheckpointId, SaveOutcome, Shard

if TYPE_CHECKING:
    from tierfall.core.capture.copier import ImageCopier
    from tierfall.core.capture.handle import SaveHandle
    from tierfall.core.image.dedup import ReplicaDigests
    from tierfall.core.runtime.streams import Streams
    from tierfall.core.sampling.finite import FiniteSample
    from tierfall.core.sampling.replicas import ReplicaPlan, ReplicaReading
    from tierfall.core.state.view import StateView


class HostRegion(Protocol):
    """The memory of one image, which outlives the process."""

    @property
    def image(self) -> memoryview: ...

    @property
    def sealed(self) -> bool: ...

    def read_into(self, start: int, view: memoryview) -> None: ...

    def seal(self, *, manifest: bytes, commit: bytes) -> None: ...

    def unseal(self) -> None: ...

    def manifest(self) -> bytes: ...

    def commit(self) -> bytes: ...

    def note_on_peers(self) -> None:
        """Note that peer memory has committed the checkpoint: before that is reported."""
        ...

    def release(self) -> None: ...


class HostMemory(Protocol):
    """The host tier as the coordinator uses it; ``allocate`` waits for no image to be released, and returns None for
    lack of room."""

    def allocate(self, *, image_bytes: int, records_bytes: int) -> HostRegion | None: ...

    def would_fit(
        self, *, image_bytes: int, records_bytes: int, without: Collection[HostRegion]
    ) -> bool:
        """Whether ``allocate`` would succeed if the regions ``without`` were released."""
        ...

    def take_spare(self) -> bool:
        """Have room for one image more than is needed, if there is room; return whether this has changed anything."""
        ...

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def free_bytes(self) -> int: ...

    @property
    def largest_free_bytes(self) -> int:
        """The largest image, with its records, that ``allocate`` would find room for."""
        ...


@dataclass(slots=True, kw_only=True)
class ReplicaShare:
    """One rank's part in deduplication: the ``structure`` of its state, the id of the replica assignment by which its
    image omits tensors (``assignment``; None: it omits none), and the ``digests`` of its replicas, which are compared
    before the image is sealed (None: no comparison). ``replicas`` is the plan of what to read for them at save."""

    structure: str
    assignment: str | None = None
    replicas: ReplicaPlan | None = None
    digests: ReplicaDigests | None = None
    reading: ReplicaReading | None = None

    def read(self, view: StateView, ordinal: int, streams: Streams) -> None:
        """Read the replicas' samples, unless all bytes were digested. Called on the thread that saves."""
        if self.replicas is not None and self.digests is None:
            self.reading = self.replicas.read(view, ordinal, streams)

    def finish(self) -> None:
        """Take the digests of what was read; waits for devices."""
        if self.reading is not None:
            self.digests, self.reading = self.reading.digests(), None


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """A save in flight. Only capture writes to it; it sets ``manifest`` and ``commit`` when the image is complete.
    ``lazy_bytes`` of the image are captured lazily; ``finite`` finds NaN in it (None: it is not looked for).
    ``progress`` is that of the training.

    ``past_barrier``: every write to the state that began before the end of the capture has ended, and none was
    detected. The image may be sealed then.
    """

    lineage: Lineage
    shard: Shard
    image_plan: ImagePlan
    region: HostRegion
    handle: SaveHandle
    copier: ImageCopier
    wall_time_s: float
    node: str
    share: ReplicaShare | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    lazy: bool = False
    lazy_bytes: int = 0
    finite: FiniteSample | None = None
    progress: Progress | None = None
    past_barrier: bool = True
    hashed: bool = False
    failed: bool = False
    manifest: Manifest | None = None
    commit: Commit | None = None

    @property
    def id(self) -> CheckpointId:
        return self.lineage.checkpoint


# The events of a capture, which the capturer sends to the coordinator -----------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureBegun:
    snapshot: Snapshot
    tiers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureAdvanced:
    id: CheckpointId
    final_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSealed:
    id: CheckpointId


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureFailed:
    id: CheckpointId
    error: BaseException
    region: HostRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveGivenUp:
    """A save ended before its capture began: it was skipped, or failed."""

    id: CheckpointId
    error: BaseException
    outcome: SaveOutcome
