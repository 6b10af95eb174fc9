"""Plans of benchmarks that are as small as tests want them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.plan import Plan


def tiny_plan(folder: Path, only: str, *more: str, **words: Any) -> Plan:
    """A plan of these parts, of one round of 1 MiB where nothing else is said, in folders that are there."""
    for name in ("files", "memory"):
        (folder / name).mkdir()
    small = {"size_bytes": 1 << 20, "rounds": 1, **words}
    return Plan(
        folder=folder / "files",
        memory=folder / "memory",
        file_system="tmpfs",
        seed=0,
        only=frozenset({only, *more}),
        **small,
    )
