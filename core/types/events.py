"""The events of a run: one value class per kind, and the list of all kinds.

``at_s`` is the emitter's time: the coordinator's clock, which is virtual in tests and simulations. Sizes are in bytes,
durations in seconds. ``docs/metrics.md`` describes each kind; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from tierfall.core.types.text import members
from tierfall.core.types.values import CheckpointId, SaveOutcome

FORMAT = 1
"""Version of the log's lines; increased only by a change that a reader of older lines would misread."""
TEXT_MAX = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The base of all events."""

    kind: ClassVar[str] = ""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvent(Event):
    """An event that concerns one checkpoint."""

    id: CheckpointId


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyEvent(CheckpointEvent):
    """An event that concerns the copy of a checkpoint on one tier."""

    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(Event):
    """A process opened the run under number ``attempt`` (None: it saves nothing, and only runs commands)."""

    kind: ClassVar[str] = "opened"
    attempt: int | None
    pid: int
    node: str
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(Event):
    """A process closed the run; ``lost_events`` counts events that could not be written since it was opened."""

    kind: ClassVar[str] = "closed"
    lost_events: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveBegun(CheckpointEvent):
    """The capture of a checkpoint began, of ``lazy_bytes`` lazily; it is owed to ``tiers``."""

    kind: ClassVar[str] = "save_begun"
    bytes: int
    lazy_bytes: int
    tiers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured(CheckpointEvent):
    """The image is complete in host memory, ``seconds`` after the call of ``save``. That blocked the training thread
    for ``blocked_s``."""

    kind: ClassVar[str] = "captured"
    bytes: int
    seconds: float
    blocked_s: float
    lazy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEnded(CheckpointEvent):
    """A save ended without a checkpoint: it was skipped, superseded, or failed."""

    kind: ClassVar[str] = "save_ended"
    outcome: SaveOutcome
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushBegun(CopyEvent):
    """A copy to a tier began; ``tries`` counts the consecutive failures on that tier before it."""

    kind: ClassVar[str] = "flush_begun"
    bytes: int
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushDone(CopyEvent):
    """An image has arrived completely, ``seconds`` after the copy began; ``sources`` maps each tier to the bytes read
    from it."""

    kind: ClassVar[str] = "flush_done"
    bytes: int
    seconds: float
    sources: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushStalled(CopyEvent):
    """A copy was interrupted, or its commit record was not written; that resumes where it stopped, in ``again_s``."""

    kind: ClassVar[str] = "flush_stalled"
    reason: str
    again_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushFailed(CopyEvent):
    """A copy, or its commit record, failed ``seconds`` after the copy began. It is restarted, unless ``flush_given_up``
    follows."""

    kind: ClassVar[str] = "flush_failed"
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushGivenUp(CopyEvent):
    """The copy will never be made on this tier."""

    kind: ClassVar[str] = "flush_given_up"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside(CopyEvent):
    """A copy failed repeatedly while others succeeded on its tier. This start does not retry it; the next one does."""

    kind: ClassVar[str] = "set_aside"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(CopyEvent):
    """A checkpoint was committed on a tier, with ``bytes`` stored there, ``seconds`` after the call of ``save`` (None:
    an earlier start saved it)."""

    kind: ClassVar[str] = "committed"
    bytes: int
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted(CopyEvent):
    """An image was removed from host memory: a save needs the room, or nothing needs the image."""

    kind: ClassVar[str] = "evicted"
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(CopyEvent):
    """A copy was deleted from a stored tier, in ``seconds``. ``unfinished``: it was never committed there."""

    kind: ClassVar[str] = "dropped"
    bytes: int
    reason: str
    seconds: float
    unfinished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DropFailed(CopyEvent):
    """A copy could not be deleted; the deletion is retried."""

    kind: ClassVar[str] = "drop_failed"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFailing(Event):
    """A tier has accepted no copies for ``max_wait``, or cannot for a permanent reason. For the host tier: the files
    of images were removed, so that these end with this process."""

    kind: ClassVar[str] = "tier_failing"
    tier: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRecovered(Event):
    """A tier accepts copies again. For the host tier: its images outlive this process again."""

    kind: ClassVar[str] = "tier_recovered"
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRestored(CheckpointEvent):
    """A state was filled from a checkpoint. ``sources`` maps each tier to the bytes read from it; ``fallbacks`` lists
    the skipped copies and checkpoints, with reasons."""

    kind: ClassVar[str] = "restored"
    bytes: int
    seconds: float
    sources: Mapping[str, int]
    fallbacks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFailed(Event):
    """Another error; ``doing`` names the operation."""

    kind: ClassVar[str] = "error"
    doing: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsLost(Event):
    """``count`` events were discarded because the log could not be written for too long."""

    kind: ClassVar[str] = "events_lost"
    count: int


Notify = Callable[[Event], None]
"""Called with each event, on the thread that emits it; must neither block nor raise."""


def ignore(event: Event) -> None:
    """Discard an event."""


def event_to_json(event: Event) -> dict[str, Any]:
    """Convert an event to JSON members without its time: ``kind``, then its fields; an id becomes ``step`` and
    ``attempt``. Floats have 6 digits after the point, and texts TEXT_MAX characters at most."""
    names = [each.name for each in fields(event) if each.name != "at_s"]
    found = {"kind": event.kind, **members(event, *names)}
    for name, value in found.items():
        if isinstance(value, float):
            found[name] = round(value, 6)
        elif isinstance(value, str):
            found[name] = value[:TEXT_MAX]
    return found
