"""The chain of tiers that most parts measure: host memory, and a folder on the file system that is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HOST, FILE = "host", "disk"


def configuration(
    memory: Path, folder: Path, *, capacity: int | None = None, **file: Any
) -> dict[str, Any]:
    """Host memory of ``capacity`` bytes in a file of ``memory``, and a tier in ``folder``; ``file`` is what else the
    tier's entry says."""
    host: dict[str, Any] = {"name": HOST, "kind": "host", "folder": str(memory)}
    if capacity is not None:
        host["capacity"] = capacity
    tier = {"name": FILE, "kind": "file", "path": str(folder), "shared": False, **file}
    return {"run": "bench", "max_wait": "10m", "tiers": [host, tier]}
