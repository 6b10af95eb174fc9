"""What a trainer process tells of itself: one JSON object a line, written as it happens, read while it grows.

A reader never sees half an event: a line without its end is left until the rest is there, or for good.
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
class Totals:
    """What saving has cost since the process started. ``blocked_s`` is a sum over its saves."""

    saves: int
    blocked_s: float
    image_bytes: int
    edge_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a start found: where each shard came from as (shard, tier, bytes), what was passed over and why."""

    step: int
    attempt: int
    seconds: float
    sources: tuple[tuple[str, str, int], ...]
    fallbacks: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The trainer is ready. ``image_bytes`` is not known before the first save."""

    parameters: int
    restored: Restored | None
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A step was trained. ``loss`` is exact (``float.hex``), ``time_s`` a monotonic clock of this machine."""

    step: int
    loss: str
    seconds: float
    time_s: float
    tiers: Mapping[str, TierNow]
    totals: Totals | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last step is durable wherever it goes. ``fingerprint`` is of model and moments."""

    fingerprint: str
    tiers: Mapping[str, TierNow]
    totals: Totals | None


Event = Started | StepDone | Ended


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
    kind = fields.pop("kind")
    if kind == "Started":
        restored = fields.pop("restored")
        return Started(restored=_restored(restored) if restored else None, **fields)
    tiers = {name: _tier(tier) for name, tier in fields.pop("tiers").items()}
    totals = fields.pop("totals")
    counted = Totals(**totals) if totals else None
    if kind == "StepDone":
        return StepDone(tiers=tiers, totals=counted, **fields)
    return Ended(tiers=tiers, totals=counted, **fields)


def _tier(fields: dict[str, Any]) -> TierNow:
    return TierNow(whole=tuple(fields.pop("whole")), **fields)


def _restored(fields: dict[str, Any]) -> Restored:
    lists = ("sources", "fallbacks")
    tuples: dict[str, Any] = {name: tuple(tuple(one) for one in fields.pop(name)) for name in lists}
    return Restored(**tuples, **fields)
