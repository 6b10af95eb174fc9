"""Tiers that are full or too small: room is made, or the error says how much is missing, and training continues."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import blank, state_of, step_in, steps_on, wait_until
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.errors import StorageFullError

MakeConfig = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("impatient")


def small_disk(folder: Path, size: str) -> None:
    """Mount a file system of its own, or skip."""
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount does not work here: {done.stderr.strip()}")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    folder = tmp_path / "disk"
    mounted: list[Path] = []

    def make(size: str) -> Path:
        small_disk(folder, size)
        mounted.append(folder)
        return folder

    yield make
    for each in mounted:
        subprocess.run(["umount", "-l", str(each)], check=True)


# A full disk -------------------------------------------------------------------------------------


def test_a_start_on_a_full_disk_goes_on_without_it(
    make_config: MakeConfig, tmp_path: Path, mount: Callable[[str], Path]
) -> None:
    """An attempt's record does not fit: that is no reason not to train."""
    disk = mount("400k")
    config = make_config(fast={}, disk={"path": str(disk)})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    _fill(disk / "filler")
    with tierfall.open(config) as ckpt:
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 1
        ckpt.save(2, state_of(2)).wait("fast")
        (disk / "filler").unlink()
        handle = ckpt.save(3, state_of(3))
        wait_until(lambda: handle.done("disk"), "the copy lands")
    assert steps_on(tmp_path / "fast") == [1, 2, 3]
    assert 3 in steps_on(disk)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(path).f_bavail == 0


# Room --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_what_a_start_on_a_full_disk_left_in_memory_is_its_runs(
    first: bool, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tier took the record of its attempt: the next start knows the tiers by their ids."""
    config = make_config(disk={}, max_wait="0.3s")
    if not first:
        with tierfall.open(config) as ckpt:
            ckpt.restore(blank())
            ckpt.save(1, state_of(1), block=True)

    def full(*arguments: Any, **more: Any) -> Any:
        raise StorageFullError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(PosixBackend, "create", full)
        with tierfall.open(config) as ckpt:
            ckpt.restore(blank())
            handle = ckpt.save(2, state_of(2))
            handle.wait("host")
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(state := blank())
        assert report is not None
        assert (report.step, step_in(state)) == (2, 2)
        ckpt.drain()
    assert steps_on(tmp_path / "disk") == ([2] if first else [1, 2])
