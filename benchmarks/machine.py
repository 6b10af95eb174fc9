"""On what a run was measured: processor, memory, file systems, versions, and who else was at work."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("tierfall", "xxhash")


def file_system(folder: Path) -> str:
    """Return the type of the file system that a folder lies on, such as ext4."""
    return mount_of(folder)[1]


def mount_of(folder: Path) -> tuple[str, str]:
    """Return device and type of the mount that holds a folder; question marks where the kernel does not say."""
    best = ("", "?", "?")
    for line in _read("/proc/self/mounts").splitlines():
        device, point, kind, *_ = line.split()
        point = point.encode().decode("unicode_escape")
        inside = folder.resolve().is_relative_to(point)
        if inside and len(point) >= len(best[0]):
            best = (point, device, kind)
    return best[1], best[2]


def describe(folder: Path, memory: Path, device: str) -> dict[str, Any]:
    source, kind = mount_of(folder)
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "shared_huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "folder": f"{kind} on {source}",
        "memory_folder": file_system(memory),
        "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,  # with its build, which the package's version lacks
        **{package: version(package) for package in PACKAGES},
    }


def load() -> float:
    """Return how many threads ran or waited for the disk, over the last minute."""
    return os.getloadavg()[0]


def _field(path: str, name: str) -> str:
    for line in _read(path).splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""


def _chosen(path: str) -> str:
    """Return the word in brackets, as the kernel marks the choice."""
    return _read(path).partition("[")[2].partition("]")[0] or "?"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
