"""What the coordinator hands to workers, what comes back, and what else can happen to it: values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tierfall.core.contracts import Writer
from tierfall.core.records import Commit, Manifest, Mark
from tierfall.core.snapshot import Geometry, HostRegion, Snapshot
from tierfall.core.values import CheckpointId, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a chunk is read: a region of host memory, or a stored tier (``region`` None)."""

    tier: str
    region: HostRegion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenShard:
    """Begin the image of a copy on ``tier``; a manifest that is not known yet is read from ``source``. ``attempt_id``
    tells whether what is committed there already is this very checkpoint."""

    tier: str
    id: CheckpointId
    attempt_id: str | None
    shard: Shard
    geometry: Geometry | None
    source: Source | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyChunk:
    """Bring one chunk from ``source`` to ``writer``; with ``digest``, checked on the way."""

    tier: str
    id: CheckpointId
    shard: Shard
    index: int
    start: int
    end: int
    source: Source
    digest: str | None
    writer: Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishCopy:
    """Publish the image, write the manifest, and commit, unless a newer attempt exists."""

    tier: str
    id: CheckpointId
    shard: Shard
    writer: Writer
    manifest: Manifest
    commit: Commit
    marks: tuple[Mark, ...]
    name_latest: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortShard:
    tier: str
    id: CheckpointId
    writer: Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCopy:
    """Take a committed copy apart, or collect what is left of an unfinished one.

    ``tombstoned`` says that all other copies are to go too; ``next_latest`` is what ``latest`` is to name if it named
    this one. The value of its outcome is the marks that were there, or the commit record by which an unfinished copy
    was found to be committed.
    """

    tier: str
    id: CheckpointId
    reason: str
    tombstoned: bool = False
    unfinished: bool = False
    next_latest: CheckpointId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadMarks:
    """Read the marks beside the given checkpoints afresh."""

    tier: str
    ids: tuple[CheckpointId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeMark:
    """Leave a mark, or take it away."""

    tier: str
    mark: Mark
    remove: bool = False


Task = OpenShard | CopyChunk | FinishCopy | AbortShard | DropCopy | ReadMarks | ChangeMark


class Side(StrEnum):
    """Whose failure it was."""

    SOURCE = "source"
    TARGET = "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a task: a value, or the exception itself."""

    task: Task
    error: BaseException | None = None
    side: Side = Side.TARGET
    value: Any = None
    seconds: float = 0.0
    bytes: int = 0


# Events: all that can happen to the coordinator.


@dataclass(slots=True, kw_only=True)
class Admission:
    """A save asks for a region; ``answer`` is called once, with the region or the error."""

    id: CheckpointId
    image_bytes: int
    records_bytes: int
    deadline_s: float
    answer: Callable[[HostRegion | None, BaseException | None], None]


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


class PersonsOrder(StrEnum):
    PIN = "pin"
    UNPIN = "unpin"
    DELETE = "delete"


@dataclass(slots=True, kw_only=True)
class Order:
    """A person's order about one checkpoint; ``answer`` is called once, with the tiers that failed."""

    kind: PersonsOrder
    id: CheckpointId
    wall_time_s: float
    answer: Callable[[dict[str, BaseException]], None]
    begun: bool = False
    reserving: bool = False
    dropping: bool = False
    unmarked: bool = False
    waiting: set[str] = field(default_factory=set)
    failed: dict[str, BaseException] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Ask:
    """Run a function on the coordinator's thread, where the ledger may be read."""

    function: Callable[[], Any]
    answer: Callable[[Any, BaseException | None], None]


Event = (
    Admission
    | CaptureBegun
    | CaptureAdvanced
    | CaptureSealed
    | CaptureFailed
    | Order
    | Ask
    | Outcome
)
