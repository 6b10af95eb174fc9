"""One rank's image at one step, from the call of save until it is sealed: what capture and coordinator share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tierfall.core.format.records import (
    Commit,
    Geometry,
    Lineage,
    Manifest,
)
from tierfall.core.types.values import CheckpointId, Shard

if TYPE_CHECKING:
    from tierfall.core.capture.copier import ImageCopier
    from tierfall.core.capture.handle import SaveHandle
    from tierfall.core.format.documents import Spliced
    from tierfall.core.image.dedup import ReplicaDigests
    from tierfall.core.sampling.replicas import ReplicaPlan, ReplicaReading, StreamProvider
    from tierfall.core.state.view import StateView


class HostRegion(Protocol):
    """Room for one image in memory that outlives the process."""

    @property
    def image(self) -> memoryview: ...

    @property
    def sealed(self) -> bool: ...

    def tensor(self) -> torch.Tensor: ...

    def seal(self, *, manifest: bytes, commit: bytes) -> None: ...

    def unseal(self) -> None: ...

    def manifest(self) -> bytes: ...

    def commit(self) -> bytes: ...

    def add_mark(self, data: bytes) -> None: ...

    def marks(self) -> tuple[bytes, ...]: ...

    def release(self) -> None: ...


class HostMemory(Protocol):
    """The host tier as the coordinator uses it: it hands out regions at once, or says that there is no room."""

    def allocate(self, *, image_bytes: int, records_bytes: int) -> HostRegion | None: ...

    def would_fit(
        self, *, image_bytes: int, records_bytes: int, without: Collection[HostRegion]
    ) -> bool:
        """Say whether ``allocate`` would find room if those regions were released."""
        ...

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def free_bytes(self) -> int: ...


@dataclass(slots=True, kw_only=True)
class Share:
    """How one rank's image was made: the ``structure`` of its state, the ``division`` by which it leaves tensors out
    (none: it has all), and the ``digests`` of what it holds and others hold too, which are compared before the image is
    sealed (none: nothing is). ``replicas`` says what is read for them at save."""

    structure: str
    division: str | None = None
    replicas: ReplicaPlan | None = None
    digests: ReplicaDigests | None = None
    reading: ReplicaReading | None = None

    def read(self, view: StateView, ordinal: int, streams: StreamProvider) -> None:
        """Read what is compared, unless all of it was digested: on the thread that saves."""
        if self.replicas is not None and self.digests is None:
            self.reading = self.replicas.read(view, ordinal, streams)

    def finish(self) -> None:
        """Digest what was read; this waits for devices."""
        if self.reading is not None:
            self.digests, self.reading = self.reading.digests(), None


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """A save in flight. Capture sets ``manifest`` and ``commit`` when it is complete; nobody else writes to it.

    ``past_barrier``: no write to the state that began before the end of the capture can be under way any more, and
    none was found. It is sealed then.
    """

    line: Lineage
    shard: Shard
    geometry: Geometry
    structure: str
    pieces: Spliced
    region: HostRegion
    handle: SaveHandle
    filling: ImageCopier
    wall_time_s: float
    node: str
    share: Share | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    lazy: bool = False
    past_barrier: bool = True
    hashed: bool = False
    failed: bool = False
    manifest: Manifest | None = None
    commit: Commit | None = None

    @property
    def id(self) -> CheckpointId:
        return self.line.checkpoint
