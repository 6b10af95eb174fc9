"""Which systems there are, in the order of the tables, and how to get those that are missing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from benchmarks import apart
from benchmarks.peers.dcp import Dcp, DcpProcess, DcpThread
from benchmarks.peers.files import Safetensors, TorchSave
from benchmarks.peers.frameworks import Lightning, LightningAsync, Orbax
from benchmarks.peers.meta import TorchCheckpointing
from benchmarks.peers.ours import Bare, Tierfall
from benchmarks.peers.resiliency import Resiliency
from benchmarks.peers.snapshot import TorchSnapshot
from benchmarks.peers.system import Place, System, Task
from benchmarks.plan import Plan

INSTALL_ALL = "make .venv/.installed-bench"
SYSTEMS: tuple[type[System], ...] = (
    Tierfall,
    Bare,
    TorchSave,
    Safetensors,
    Dcp,
    DcpThread,
    DcpProcess,
    TorchSnapshot,
    TorchCheckpointing,
    Resiliency,
    Lightning,
    LightningAsync,
    Orbax,
)


KEYS = tuple(system.key for system in SYSTEMS)


def chosen(keys: Collection[str]) -> list[type[System]]:
    """Return the installed ones among those that are asked for."""
    return [system for system in SYSTEMS if system.key in keys and system.installed()]


def type_of(key: str) -> type[System]:
    """Return the system of a key."""
    return next(system for system in SYSTEMS if system.key == key)


def measure_apart(
    plan: Plan, module: str, key: str, *, direct: bool, size_max_bytes: int | None = None
) -> dict[str, Any]:
    """Measure a system by ``module`` in a process and session of its own; it finds an empty page cache.

    The state has the plan's size, and ``size_max_bytes`` at most.
    """
    size_bytes = min(plan.size_bytes, size_max_bytes or plan.size_bytes)
    apart.drop_page_cache()
    with apart.own_folders(plan, f"peer-{key}") as (folder, memory):
        place = Place(folder=folder, memory=memory, direct=direct)
        task = Task(size_bytes=size_bytes, key=key, place=place, device=plan.device)
        return apart.run(module, task.words(), own_session=True)


def missing(keys: Collection[str]) -> str:
    """Say in one line which of those asked for are left out, and how to get them; empty: none."""
    absent = [system for system in SYSTEMS if system.key in keys and not system.installed()]
    if not absent:
        return ""
    names = "; ".join(system.name for system in absent)
    wanted = " ".join(dict.fromkeys(system.requirement for system in absent))
    return f"left out, since not installed, or not whole: {names} (pip install {wanted}, or all: {INSTALL_ALL})"
