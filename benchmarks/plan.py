"""What a run of the benchmarks is to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run, where, and how large. ``folder`` and ``memory`` are the run's own, and removed by the caller."""

    folder: Path
    memory: Path
    file_system: str
    size_bytes: int
    rounds: int
    seed: int
    only: frozenset[str]
    device: str = "cpu"
    systems: frozenset[str] = frozenset()
    parameters: int = 1_000_000_000
    """Of the model of the part ``gpu``."""
