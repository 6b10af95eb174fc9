"""Which systems there are, in the order of the tables, and how to get those that are missing."""

from __future__ import annotations

from collections.abc import Collection

from benchmarks.peers.dcp import Dcp, DcpProcess, DcpThread
from benchmarks.peers.files import Safetensors, TorchSave
from benchmarks.peers.meta import TorchCheckpointing
from benchmarks.peers.ours import Bare, Tierfall
from benchmarks.peers.resiliency import Resiliency
from benchmarks.peers.snapshot import TorchSnapshot
from benchmarks.peers.system import System

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
)


KEYS = tuple(system.key for system in SYSTEMS)


def chosen(keys: Collection[str]) -> list[type[System]]:
    """Return the installed ones among those that are asked for."""
    return [system for system in SYSTEMS if system.key in keys and system.installed()]


def missing(keys: Collection[str]) -> str:
    """Say in one line which of those asked for are left out, and how to get them; empty: none."""
    absent = [system for system in SYSTEMS if system.key in keys and not system.installed()]
    if not absent:
        return ""
    names = "; ".join(system.name for system in absent)
    wanted = " ".join(dict.fromkeys(system.requirement for system in absent))
    return f"left out, since not installed, or not whole: {names} (pip install {wanted}, or all: {INSTALL_ALL})"
