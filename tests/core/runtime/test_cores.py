"""How many threads hash an image: as many as the process has cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tierfall.core.ranks.topology import Topology
from tierfall.core.runtime import cores


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 12 cores, and the control group ``/job/container`` of its process, without a quota."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setattr(cores, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cores, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("0::/job/container\n")
    (tmp_path / "groups/job/container").mkdir(parents=True)
    (tmp_path / "groups/job/container/cpu.max").write_text("max 100000\n")
    return tmp_path / "groups"


def test_as_many_as_the_process_may_run_on(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 7, 11})
    assert cores.hash_threads() == 3
    assert cores.core_mask() == f"{1 << 3 | 1 << 7 | 1 << 11:x}"


@pytest.mark.parametrize(
    ("quota", "threads"), [("350000 100000", 3), ("50000 100000", 1), ("max 100000", 8)]
)
def test_a_quota_of_the_container_cuts_them(groups: Path, quota: str, threads: int) -> None:
    (groups / "job/container/cpu.max").write_text(f"{quota}\n")
    assert cores.hash_threads() == threads


def test_a_quota_above_the_container_cuts_them_too(groups: Path) -> None:
    (groups / "job/cpu.max").write_text("200000 100000\n")
    assert cores.hash_threads() == 2


def test_a_container_with_a_view_of_its_own(groups: Path) -> None:
    """Its path names a folder of the machine, which it does not see."""
    (groups.parent / "own").write_text("0::/kubepods/pod1/container\n")
    (groups / "cpu.max").write_text("400000 100000\n")
    assert cores.hash_threads() == 4


def test_groups_of_the_first_version(groups: Path) -> None:
    (groups.parent / "own").write_text("5:memory:/job\n4:cpu,cpuacct:/job\n")
    folder = groups / "cpu,cpuacct/job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("600000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cores.hash_threads() == 6
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert cores.hash_threads() == 8


def test_ranks_divide_only_cores_that_they_share(groups: Path) -> None:
    """Four ranks of a node, two of which are bound to cores of their own."""
    nodes, masks = ["a", "a", "a", "a", "b"], ["0,1,2,3", "0,1,2,3", "4,5", "6,7", "0,1,2,3"]
    sharers = [Topology.of(rank, nodes, cores_of=masks).core_sharers for rank in range(5)]
    assert sharers == [2, 2, 1, 1, 1]
    assert cores.hash_threads(sharers=3) == 4
    assert cores.hash_threads(sharers=100) == 1
