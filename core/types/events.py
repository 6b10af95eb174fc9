"""What happens in a run, for whoever writes it down: one value per kind of event, and the one list of the kinds.

Values only. ``at_s`` is the time of whoever says it: the coordinator's clock, virtual in tests and simulations.
Sizes are in bytes, spans in seconds. ``docs/event-log.md`` describes each kind, and a test compares.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from tierfall.core.types.text import float_to_json
from tierfall.core.types.values import CheckpointId, SaveOutcome

FORMAT = 1
"""The version of the lines that ``members`` gives: raised where a reader of the old ones would be misled."""
TEXT_MAX = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened."""

    kind: ClassVar[str] = ""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OfCheckpoint(Event):
    """Something that happened to a checkpoint."""

    id: CheckpointId


@dataclass(frozen=True, slots=True, kw_only=True)
class OfCopy(OfCheckpoint):
    """Something that happened to a copy of a checkpoint, on a tier."""

    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(Event):
    """A process opened the run; ``attempt`` is its line of saving (None: it only carries out orders)."""

    kind: ClassVar[str] = "opened"
    attempt: int | None
    pid: int
    node: str
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(Event):
    """A process closed the run; ``lost_events`` counts events that could not be written since it opened it."""

    kind: ClassVar[str] = "closed"
    lost_events: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveBegun(OfCheckpoint):
    """The capture of a checkpoint began; it is owed to ``tiers``."""

    kind: ClassVar[str] = "save_begun"
    bytes: int
    tiers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured(OfCheckpoint):
    """The image is whole in host memory, ``seconds`` after the save began. ``blocked_s`` is what the training thread
    gave for it."""

    kind: ClassVar[str] = "captured"
    bytes: int
    seconds: float
    blocked_s: float
    lazy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEnded(OfCheckpoint):
    """A save came to nothing: it was skipped, superseded, or failed."""

    kind: ClassVar[str] = "save_ended"
    outcome: SaveOutcome
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushBegun(OfCopy):
    """A copy to a tier began; ``tries`` counts those before it that failed in a row there."""

    kind: ClassVar[str] = "flush_begun"
    bytes: int
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushDone(OfCopy):
    """All of an image has arrived, ``seconds`` after the copy began; ``sources`` says how much was read where."""

    kind: ClassVar[str] = "flush_done"
    bytes: int
    seconds: float
    sources: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushStalled(OfCopy):
    """A copy could not go on; what has arrived stays, and it goes on from there in ``again_s``."""

    kind: ClassVar[str] = "flush_stalled"
    reason: str
    again_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushFailed(OfCopy):
    """A copy ended in an error, ``seconds`` after it began. It is begun again, unless ``flush_given_up`` says not."""

    kind: ClassVar[str] = "flush_failed"
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushGivenUp(OfCopy):
    """A tier will never get its copy."""

    kind: ClassVar[str] = "flush_given_up"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside(OfCopy):
    """A copy failed again and again while its tier took others: this start tries it no more, the next one does."""

    kind: ClassVar[str] = "set_aside"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(OfCopy):
    """A checkpoint is committed on a tier, where it takes ``bytes``; ``seconds`` after its save began (None: an earlier
    start saved it)."""

    kind: ClassVar[str] = "committed"
    bytes: int
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted(OfCopy):
    """An image left host memory, so that a save has room, or because it is of no use any more."""

    kind: ClassVar[str] = "evicted"
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(OfCopy):
    """A copy left a stored tier; deleting it took ``seconds``. ``unfinished``: it was never committed there."""

    kind: ClassVar[str] = "dropped"
    bytes: int
    reason: str
    seconds: float
    unfinished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DropFailed(OfCopy):
    """A copy could not be deleted; that is tried again."""

    kind: ClassVar[str] = "drop_failed"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFailing(Event):
    """A tier takes no copies at present, and has not for as long as ``max_wait``, or for a reason that lasts. The host
    tier: what lies in memory ends with this process, as somebody removed the memory's file."""

    kind: ClassVar[str] = "tier_failing"
    tier: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRecovered(Event):
    """A tier takes copies again; what lies in memory outlives this process again."""

    kind: ClassVar[str] = "tier_recovered"
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRestored(OfCheckpoint):
    """A state was filled from a checkpoint: ``bytes`` by tier in ``sources``, and what was passed over, and why."""

    kind: ClassVar[str] = "restored"
    bytes: int
    seconds: float
    sources: Mapping[str, int]
    fallbacks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFailed(Event):
    """Something else went wrong: ``doing`` says what was being done."""

    kind: ClassVar[str] = "error"
    doing: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsLost(Event):
    """``count`` events stand nowhere: the log took none, for longer than they could wait."""

    kind: ClassVar[str] = "events_lost"
    count: int


KINDS: tuple[type[Event], ...] = (
    Opened,
    SaveBegun,
    Captured,
    SaveEnded,
    FlushBegun,
    FlushDone,
    FlushStalled,
    FlushFailed,
    FlushGivenUp,
    SetAside,
    Committed,
    Evicted,
    Dropped,
    DropFailed,
    TierFailing,
    TierRecovered,
    StateRestored,
    OperationFailed,
    EventsLost,
    Closed,
)
"""All there are, in the order in which the page lists them."""

Notify = Callable[[Event], None]
"""Is told of each event, on the thread where it happens; it must not block, nor raise."""


def ignore(event: Event) -> None:
    """Tell nobody."""


def event_to_json(event: Event) -> dict[str, Any]:
    """Write an event as JSON members, but for its time: ``kind``, then its own fields; an id is a step and an
    attempt."""
    found: dict[str, Any] = {"kind": event.kind}
    for each in fields(event):
        value = getattr(event, each.name)
        match value:
            case CheckpointId():
                found |= {"step": value.step, "attempt": value.attempt}
            case float():
                found[each.name] = float_to_json(round(value, 6))
            case str():
                found[each.name] = str(value)[:TEXT_MAX]
            case tuple():
                found[each.name] = list(value)
            case Mapping():
                found[each.name] = dict(value)
            case _:
                found[each.name] = value
    del found["at_s"]
    return found


def member_names(kind: type[Event]) -> tuple[str, ...]:
    """Name the members of a kind's lines beside ``kind``, as ``members`` writes them."""
    own = (each.name for each in fields(kind) if each.name != "at_s")
    return tuple(n for name in own for n in (("step", "attempt") if name == "id" else (name,)))


@dataclass(slots=True, kw_only=True)
class RecentEvents:
    """The last events of a process, for whoever looks at it, from any thread."""

    limit: int = 16
    events: tuple[Event, ...] = field(default=())
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, event: Event) -> None:
        with self.lock:
            self.events = (*self.events[1 - self.limit :], event)
