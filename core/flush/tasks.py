"""Tasks of the workers, their outcomes, and the other events that the coordinator handles: values only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from tierfall.core.capture.snapshot import (
    CaptureAdvanced,
    CaptureBegun,
    CaptureFailed,
    CaptureSealed,
    HostRegion,
    SaveGivenUp,
)
from tierfall.core.copies.image_writes import ImageUpload, WritableStore
from tierfall.core.copies.images import Image, ReadableStore
from tierfall.core.format.catalog import FoundCopy
from tierfall.core.format.decided import Decided, DecidedList
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Attempt, Commit, Geometry, Manifest, NamedFile
from tierfall.core.image.dedup import ReplicaAssignment, ReplicatedTensors
from tierfall.core.ranks.message_tree import RankMessage
from tierfall.core.types.errors import IntegrityError, StorageFullError
from tierfall.core.types.values import CheckpointId, Shard


class DecidedStore(Protocol):
    """A tier's list of what is decided: ``tiers/run_files.py:DecidedFolder``."""

    def read(self, *, max_age_s: float = ...) -> DecidedList: ...

    def add(self, entry: Decided) -> None: ...


class TaskStore(ReadableStore, WritableStore, Protocol):
    """What tasks call of a stored tier. ``tiers/stored.py:StoredTier`` implements it. All methods block."""

    @property
    def decided(self) -> DecidedStore: ...

    def read_commit(self, checkpoint: CheckpointId) -> Commit: ...

    def written_commit(self, checkpoint: CheckpointId) -> Commit: ...

    def is_committed(self, checkpoint: CheckpointId) -> bool: ...

    def find_copy(self, checkpoint: CheckpointId) -> FoundCopy | None: ...

    def sync_commit(self, checkpoint: CheckpointId) -> None: ...

    def record_lineage(self, commit: Commit, writer: Attempt | None = None) -> None: ...

    def check_begin(self, attempt: Attempt) -> None: ...

    def check_room(self, needed_bytes: int, checkpoint: CheckpointId | None = None) -> None: ...

    def check_newest(self, attempt: Attempt | None, *, doing: str = ...) -> None: ...

    def commit(self, commit: Commit, *, attempt: Attempt) -> None: ...

    def note_damaged(self, commit: Commit, why: str) -> None: ...

    def write_latest(self, checkpoint: CheckpointId) -> None: ...

    def delete(
        self,
        checkpoint: CheckpointId,
        *,
        attempt: Attempt | None,
        known: DecidedList | None,
        next_latest: CheckpointId | None = None,
    ) -> DecidedList | None: ...

    def discard(
        self, checkpoint: CheckpointId, shard: Shard | None = None, *, attempt: Attempt | None
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySource:
    """Where chunks are read from: a region of host memory, or a stored tier (``region`` None)."""

    tier: str
    region: HostRegion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenShard:
    """Create the writer of an image on ``tier``. A manifest that is not known yet is read from ``source``.

    The outcome's value is the writer, and the manifest if it was read; or the commit record, where the checkpoint of
    ``attempt_id`` is committed there already. ``leftover``: a failed attempt left files, perhaps packed otherwise,
    which are deleted first. KeptFreeError if a copy of ``room_bytes``, of which other ranks of this node may have
    written their part, leaves less free than the tier is to keep.
    """

    tier: str
    id: CheckpointId
    attempt_id: str | None
    shard: Shard
    geometry: Geometry | None
    pieces: Spliced | None
    source: CopySource | None
    leftover: bool = False
    room_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRun:
    """Copy the chunks from ``first`` to before ``stop``, bytes ``start`` to ``end``, from ``source`` to ``writer``.

    They are checked against ``manifest``; None for an image in memory that this process captured. ``number`` is that of
    the chunk range.
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
    """Publish the image and write its manifest, unless a newer attempt exists. The outcome's value is ``Uploaded``.
    ``commit`` names the image's files."""

    tier: str
    id: CheckpointId
    shard: Shard
    writer: ImageUpload
    manifest: Manifest
    commit: Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """The files of one rank's image on a tier; the checkpoint is not committed yet."""

    files: tuple[NamedFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCopy:
    """Commit the images of all ranks, unless a newer attempt exists. The outcome's value is the commit record as
    written."""

    tier: str
    id: CheckpointId
    commit: Commit
    name_latest: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortShard:
    tier: str
    id: CheckpointId
    writer: ImageUpload


class NotWholeError(IntegrityError):
    """Nothing was deleted, as copies that are to stay are damaged. ``damaged`` tells of each what is wrong, and whether
    its commit record is there; it is empty where one could not be checked, for the reason ``why``."""

    def __init__(self, damaged: Mapping[CheckpointId, tuple[str, bool]], why: str = "") -> None:
        super().__init__(why or "; ".join(why for why, _ in damaged.values()))
        self.damaged = damaged


class KeptFreeError(StorageFullError):
    """There is space, which is to stay free (``keep_free``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteCopy:
    """Delete a committed copy, or the files of an ``unfinished`` one: all, or those of ``shard``.

    ``known`` are the entries that the decision took into account: if the tier's list has any other, nothing is deleted,
    and the outcome's value is that list. Without ``known`` all ranks have given it up: no list is read. If it is no
    list, the value is None, or the commit record of an unfinished copy that is committed. ``next_latest`` is what
    ``latest`` names afterwards if it named this one. ``stay`` are copies on the tier that stay; NotWholeError if one of
    them lacks files.
    """

    tier: str
    id: CheckpointId
    reason: str
    known: DecidedList | None = None
    unfinished: bool = False
    shard: Shard | None = None
    next_latest: CheckpointId | None = None
    stay: tuple[CheckpointId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadDecided:
    """Read a tier's list of what is decided: the outcome's value."""

    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddDecided:
    """Add an entry to a tier's list, unless a newer attempt exists."""

    tier: str
    entry: Decided


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCall:
    """Another call of a tier's store, by this process as ``Attempt``: its result is the outcome's value. ``then``
    receives the outcome, on the coordinator's thread."""

    tier: str
    call: Callable[[TaskStore, Attempt], Any]
    then: Callable[[Outcome], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCheck:
    """Read the records of a committed copy that is to be verified. Of its images, sorted by rank, every ``of``th from
    ``turn`` on is this rank's share: these are the outcome's value, each with its manifest."""

    tier: str
    id: CheckpointId
    turn: int
    of: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckChunk:
    """Compare one chunk of a copy with its digest."""

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
    | ReadDecided
    | AddDecided
    | StoreCall
    | OpenCheck
    | CheckChunk
)


class Side(StrEnum):
    """Which tier of a copy failed."""

    SOURCE = "source"
    TARGET = "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a task: a value or the exception.

    ``seconds`` is the worker's time; it includes ``throttled_s`` of rate-limit waits, and ``read_s`` of reading from a
    stored tier without such waits.
    """

    task: Task
    error: BaseException | None = None
    side: Side = Side.TARGET
    value: Any = None
    seconds: float = 0.0
    throttled_s: float = 0.0
    read_s: float = 0.0


# The other events that the coordinator handles.


@dataclass(slots=True, kw_only=True)
class AdmissionRequest:
    """A save requests a region. ``on_answer`` is called once, with the region or the error. After any thread has set
    ``cancelled``, the request is dropped, and ``on_answer`` may never be called."""

    id: CheckpointId
    image_bytes: int
    records_bytes: int
    deadline_s: float
    on_answer: Callable[[HostRegion | None, BaseException | None], None]
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True, kw_only=True)
class AssignmentRequest:
    """A save has a structure without a replica assignment. ``on_answer`` is called once."""

    id: CheckpointId
    shareable: ReplicatedTensors
    on_answer: Callable[[ReplicaAssignment | None], None]
    since_s: float | None = None
    asked_again: bool = False
    ended: bool = False


class CommandKind(StrEnum):
    PIN = "pin"
    UNPIN = "unpin"
    TAG = "tag"
    UNTAG = "untag"
    DELETE = "delete"


@dataclass(slots=True, kw_only=True)
class Command:
    """A person's command about one checkpoint. ``on_answer`` is called once, with the tiers that failed. It waits for
    the tiers ``waiting``: first for ``entry`` in their lists, then, for a deletion, until their copies are gone."""

    kind: CommandKind
    id: CheckpointId
    on_answer: Callable[[dict[str, BaseException]], None]
    tag: str = ""
    entry: Decided | None = None
    waiting: set[str] = field(default_factory=set)
    failed: dict[str, BaseException] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class LedgerQuery:
    """Run a function on the coordinator's thread, which may read the ledger."""

    function: Callable[[], Any]
    on_answer: Callable[[Any, BaseException | None], None]


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
