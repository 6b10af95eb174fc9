"""The events of a capture, which the capturer sends to the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from tierfall.core.capture.snapshot import HostRegion, Snapshot
from tierfall.core.types.values import CheckpointId, SaveOutcome


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
