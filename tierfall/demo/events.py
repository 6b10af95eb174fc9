"""What a trainer process tells of itself: one JSON object a line, written as it happens, read while it grows.

A reader never sees half an event: a line without its end is left until the rest is there, or for good. Times named
``time_s`` and ``began_s`` are of the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class TierNow:
    """What one tier holds, as ``step@attempt``, and the copy that is arriving there."""

    whole: tuple[str, ...]
    arriving: str | None
    arrived_bytes: int
    moved_bytes: int

    @property
    def newest(self) -> str | None:
        return self.whole[-1] if self.whole else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """What one tier packed: bytes before and after, and the seconds that it took, over its threads."""

    raw_bytes: int
    stored_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What saving has cost since the process started. ``blocked_s`` is a sum over its saves."""

    saves: int
    blocked_s: float
    image_bytes: int
    edge_bytes: Mapping[str, int]
    packed: Mapping[str, Packed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a start found: where each shard came from as (shard, tier, bytes), what was passed over and why.

    It took ``seconds``, and was over at ``time_s``.
    """

    step: int
    attempt: int
    seconds: float
    time_s: float
    sources: tuple[tuple[str, str, int], ...]
    fallbacks: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The trainer is ready, with what it restored. ``fingerprint`` is of model and moments."""

    parameters: int
    restored: Restored | None
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What the tiers held at ``time_s``: as soon as they were open, and time and again while the last flushes go on."""

    time_s: float
    tiers: Mapping[str, TierNow]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A step was trained, in ``seconds``, and over at ``time_s``. ``loss`` is exact (``float.hex``)."""

    step: int
    loss: str
    seconds: float
    time_s: float
    tiers: Mapping[str, TierNow]
    totals: Totals | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A save, told when it is called, and again whenever it has come further.

    It was called at ``began_s``; ``captured_s`` and, by tier, ``durable_s`` are seconds from there.
    """

    checkpoint: str
    began_s: float
    captured_s: float | None
    durable_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last step is durable wherever it goes, at ``time_s``. ``fingerprint`` is of model and moments."""

    fingerprint: str
    time_s: float
    tiers: Mapping[str, TierNow]
    totals: Totals | None


Event = Looked | Started | StepDone | Saved | Ended


class EventWriter:
    """Appends events to a file; each is out as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("w", buffering=1)

    def write(self, event: Event) -> None:
        self._file.write(json.dumps({"kind": type(event).__name__, **asdict(event)}) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


class EventReader:
    """Reads what has been appended since it was last asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, end, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(end)
        return [_decode(json.loads(line)) for line in whole.splitlines()]


def _decode(fields: dict[str, Any]) -> Event:
    match fields.pop("kind"):
        case "Started":
            restored = fields.pop("restored")
            return Started(restored=_restored(restored) if restored else None, **fields)
        case "Saved":
            return Saved(**fields)
        case "Looked":
            return Looked(tiers=_tiers(fields.pop("tiers")), **fields)
        case kind:
            told: type[StepDone | Ended] = StepDone if kind == "StepDone" else Ended
            tiers, totals = _tiers(fields.pop("tiers")), fields.pop("totals")
            return told(tiers=tiers, totals=_totals(totals) if totals else None, **fields)


def _tiers(fields: dict[str, Any]) -> dict[str, TierNow]:
    return {name: _tier(tier) for name, tier in fields.items()}


def _tier(fields: dict[str, Any]) -> TierNow:
    return TierNow(whole=tuple(fields.pop("whole")), **fields)


def _totals(fields: dict[str, Any]) -> Totals:
    packed = {name: Packed(**one) for name, one in fields.pop("packed").items()}
    return Totals(packed=packed, **fields)


def _restored(fields: dict[str, Any]) -> Restored:
    lists = ("sources", "fallbacks")
    tuples: dict[str, Any] = {name: tuple(tuple(one) for one in fields.pop(name)) for name in lists}
    return Restored(**tuples, **fields)
