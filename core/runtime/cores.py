"""The processor cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

THREADS_MAX = 8
"""Threads that hash images at once: with that many, hashing is as fast as the bus of a device, or as memory."""
_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def core_mask() -> str:
    """The cores that this process may run on, as hexadecimal bits: equal for processes that share all of theirs."""
    return f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"


def hash_threads(sharers: int = 1) -> int:
    """Return how many threads should hash an image: the cores that this process may run on, cut by the quota of its
    control group, and divided by the ranks of this node that run on the same cores (``sharers``); 1 to THREADS_MAX."""
    quotas = [quota for group in group_folders("cpu") if (quota := _quota_of(group)) is not None]
    cores = min([len(os.sched_getaffinity(0)), *quotas])
    return max(1, min(THREADS_MAX, int(cores / sharers)))


def group_folders(controller: str) -> list[Path]:
    """The folders of this process's control groups with this controller, and of those above them."""
    try:
        rows = [row.split(":", 2) for row in _OWN_GROUPS.read_text().splitlines()]
    except OSError:
        return []
    folders = []
    for _, controllers, path in (row for row in rows if len(row) == 3):
        if controllers and controller not in controllers.split(","):
            continue
        base = _GROUPS / controllers if controllers else _GROUPS
        group = base / path.lstrip("/")
        # In a container that has its own view of the groups, the path may name a folder that is not there.
        folders += [base, *(p for p in (group, *group.parents) if base in p.parents)]
    return folders


def _quota_of(folder: Path) -> float | None:
    """The quota of a control group, in cores; None without one."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return float(quota) / float(period) if float(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
        return None
