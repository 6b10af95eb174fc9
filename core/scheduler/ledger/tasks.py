"""What the coordinator hands to workers, what comes back, and what else can happen to it: values only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tierfall.core.capture.events import (
    CaptureAdvanced,
    CaptureBegun,
    CaptureFailed,
    CaptureSealed,
    SaveGivenUp,
)
from tierfall.core.capture.snapshot import HostRegion
from tierfall.core.copies.image_writes import ImageUpload
from tierfall.core.copies.images import Image
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Commit, Geometry, Manifest, Mark, NamedFile
from tierfall.core.image.dedup import ReplicaAssignment, ReplicatedTensors
from tierfall.core.ranks.ranks import RankMessage
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.values import CheckpointId, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySource:
    """Where a chunk is read: a region of host memory, or a stored tier (``region`` None)."""

    tier: str
    region: HostRegion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenShard:
    """Begin the image of a copy on ``tier``; a manifest that is not known yet is read from ``source``. ``attempt_id``
    tells whether what is committed there already is this very checkpoint: its commit record is the outcome's value
    then, else the writer, and the manifest if it was read. ``leftover``: an earlier try left something in its folder,
    perhaps packed otherwise, which goes first. ``repairs``: the copy that is committed there is damaged, and is to be
    written anew, unless it is another checkpoint's."""

    tier: str
    id: CheckpointId
    attempt_id: str | None
    shard: Shard
    geometry: Geometry | None
    pieces: Spliced | None
    source: CopySource | None
    leftover: bool = False
    repairs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRun:
    """Bring a run of chunks, ``first`` to before ``stop``, from ``source`` to ``writer``; bytes ``start`` to ``end``.

    ``manifest`` tells how to read and check them; without one they lie in memory, captured by this process just now.
    ``number`` is the run's own.
    """

    tier: str
    id: CheckpointId
    shard: Shard
    number: int
    first: int
    stop: int
    start: int
    end: int
    source: CopySource
    manifest: Manifest | None
    writer: ImageUpload


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishCopy:
    """Publish the image, write the manifest, and commit, unless a newer attempt exists. The outcome's value is the
    commit record as it stands on the tier. ``land_only``: the commit is left to whoever knows that all ranks' images
    are there, and the value is what this rank's came to be (``Uploaded``). ``repairs``: it takes the place of a damaged
    copy."""

    tier: str
    id: CheckpointId
    shard: Shard
    writer: ImageUpload
    manifest: Manifest
    commit: Commit
    marks: tuple[Mark, ...]
    name_latest: bool
    land_only: bool = False
    repairs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """One rank's image and records are on a tier, under these names; the checkpoint is not committed yet."""

    files: tuple[NamedFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCopy:
    """Commit what all ranks have brought, unless a newer attempt exists. The outcome's value is the commit record as it
    stands on the tier. ``tables``: the digests of all ranks' tables of tensors, of which an index is left beside it;
    none where the tier has the images of some ranks alone. ``repairs`` is as in ``FinishCopy``."""

    tier: str
    id: CheckpointId
    commit: Commit
    marks: tuple[Mark, ...]
    name_latest: bool
    tables: tuple[str, ...] = ()
    repairs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortShard:
    tier: str
    id: CheckpointId
    writer: ImageUpload


class NotWholeError(IntegrityError):
    """Nothing was dropped, as copies that the deletion relies on are not whole. ``damaged`` says of each what is wrong,
    and whether its commit record is there; it is empty where one could not be looked at, as ``why`` says."""

    def __init__(self, damaged: Mapping[CheckpointId, tuple[str, bool]], why: str = "") -> None:
        super().__init__(why or "; ".join(why for why, _ in damaged.values()))
        self.damaged = damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteCopy:
    """Take a committed copy apart, or collect what is left of an unfinished one.

    ``tombstoned`` says that all other copies are to go too; ``next_latest`` is what ``latest`` is to name if it named
    this one. The value of its outcome is the marks that were there, or the commit record by which an unfinished copy
    was found to be committed. Of an unfinished one only what belongs to ``shard``, where that is given. ``void``: what
    is committed there is given up by all ranks, and is no checkpoint: no mark keeps it. ``relies_on``: other copies on
    the tier because of which this one may go; nothing is dropped where the files of one are not there any more
    (NotWholeError).
    """

    tier: str
    id: CheckpointId
    reason: str
    tombstoned: bool = False
    unfinished: bool = False
    shard: Shard | None = None
    next_latest: CheckpointId | None = None
    void: bool = False
    relies_on: tuple[CheckpointId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadMarks:
    """Read the marks beside the given checkpoints afresh, and of all others too where a person has changed any since
    they were last read: the outcome's value. ``number`` tells which question of rank 0 that answers. ``relies_on`` is
    as in ``DeleteCopy``, before all nodes drop their parts of a copy."""

    tier: str
    ids: tuple[CheckpointId, ...]
    number: int = 0
    relies_on: tuple[CheckpointId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeMark:
    """Leave a mark, or take it away."""

    tier: str
    mark: Mark
    remove: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCommit:
    """Read the commit record of a checkpoint that another process writes; the outcome's value is the record."""

    tier: str
    id: CheckpointId


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordStart:
    """Record on a tier how the attempt of a checkpoint began that is committed elsewhere, as ``commit`` says."""

    tier: str
    id: CheckpointId
    commit: Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCheck:
    """Read the records of a committed copy that is to be verified. Of the images that its commit record names, sorted
    by rank, each ``of``th from ``turn`` on is read: they are the outcome's value, each with its manifest."""

    tier: str
    id: CheckpointId
    turn: int
    of: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckChunk:
    """Hold one chunk of a copy against its digest."""

    tier: str
    id: CheckpointId
    image: Image
    manifest: Manifest
    index: int


Task = (
    OpenShard
    | CopyRun
    | FinishCopy
    | CommitCopy
    | AbortShard
    | DeleteCopy
    | ReadMarks
    | ChangeMark
    | ReadCommit
    | RecordStart
    | OpenCheck
    | CheckChunk
)


class Side(StrEnum):
    """Whose failure it was."""

    SOURCE = "source"
    TARGET = "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a task: a value, or the exception itself.

    ``seconds`` is what a worker spent on it; of these ``paced_s`` went by in waiting for a pace, and ``read_s`` in
    reading from a stored tier, waits for a pace left out.
    """

    task: Task
    error: BaseException | None = None
    side: Side = Side.TARGET
    value: Any = None
    seconds: float = 0.0
    paced_s: float = 0.0
    read_s: float = 0.0
    bytes: int = 0


# Events: all that can happen to the coordinator.


@dataclass(slots=True, kw_only=True)
class AdmissionRequest:
    """A save asks for a region; ``answer`` is called once, with the region or the error. Once ``cancelled`` is set, by
    any thread, nothing is done for it any more, and it may never be called."""

    id: CheckpointId
    image_bytes: int
    records_bytes: int
    deadline_s: float
    answer: Callable[[HostRegion | None, BaseException | None], None]
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True, kw_only=True)
class AssignmentRequest:
    """A save has a structure that no division knows; ``answer`` is called once."""

    id: CheckpointId
    shareable: ReplicatedTensors
    answer: Callable[[ReplicaAssignment | None], None]
    since_s: float | None = None
    asked_again: bool = False
    ended: bool = False


class CommandKind(StrEnum):
    PIN = "pin"
    UNPIN = "unpin"
    DELETE = "delete"


@dataclass(slots=True, kw_only=True)
class Command:
    """A person's order about one checkpoint; ``answer`` is called once, with the tiers that failed."""

    kind: CommandKind
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
class LedgerQuery:
    """Run a function on the coordinator's thread, where the ledger may be read."""

    function: Callable[[], Any]
    answer: Callable[[Any, BaseException | None], None]


Event = (
    AdmissionRequest
    | CaptureBegun
    | CaptureAdvanced
    | CaptureSealed
    | CaptureFailed
    | SaveGivenUp
    | AssignmentRequest
    | Command
    | LedgerQuery
    | Outcome
    | RankMessage
)
